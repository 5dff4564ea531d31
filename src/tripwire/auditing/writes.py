"""Writes: what is tried at each place, and how it is undone."""

from __future__ import annotations

import builtins
import itertools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from tripwire.auditing.alternatives import (
    ANOTHER_SHAPE,
    FORMS,
    CannotWrite,
    can_change,
    find_other_plain,
    iter_others,
    other_dtype,
    user_code,
)
from tripwire.auditing.findings import AuditedPlace, PlaceKind
from tripwire.auditing.holdings import (
    HeldArguments,
    HeldAttributes,
    HeldClassBody,
    HeldCode,
    HeldElements,
    HeldEnvironment,
    HeldGlobals,
    HeldItems,
    HeldMembers,
    HeldSlots,
    Holding,
    own_dict,
)
from tripwire.auditing.walking import Ran, Walk, plain_function
from tripwire.rulebook.rules import words
from tripwire.values.classes import class_dict, find_in_class, isinstance, module_of, mro

# Replacing these would break the class, not the call.
_LEFT_ALONE = words(
    "__init__ __new__ __del__ __getattribute__ __setattr__ __delattr__ __init_subclass__ __hash__ "
    "__class_getitem__ __set_name__ __subclasshook__ __instancecheck__ __repr__"
)


@dataclass(frozen=True, slots=True)
class Trial:
    """Something to try. It is in force inside its `with`."""

    place: AuditedPlace
    start: Callable[[ExitStack], None]  # leaves the undoing on the stack before it writes
    around_call: Callable[[], AbstractContextManager[Any]] = nullcontext  # for flags of a thread

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Written in here."""
        with ExitStack() as undo:
            self.start(undo)
            yield


def find_writes(walk: Walk, ran: Ran) -> list[Trial]:
    """Everything that can be tried in a walked world."""
    return [
        *_held(walk, ran),
        *_tensor_forms(walk),
        *_modules(walk, ran),
        *_objects(walk),
        *_absences(walk, ran),
        *_aliases(walk),
        *_builtins(walk, ran),
        *_environment(walk),
        *_flags(),
    ]


# --- what is held ---


def _held(walk: Walk, ran: Ran) -> Iterator[Trial]:
    for holding in walk.holdings:
        for key, value in holding.contents().items():
            if isinstance(holding, HeldClassBody):
                yield from _class_attribute(holding, key, value, ran)
            elif isinstance(holding, HeldCode):
                yield from _code(holding)
            elif not isinstance(holding, HeldMembers) and _is_open(holding, key, value, ran):
                for change, make in iter_others(value):
                    make = _refuse_recurrent if _is_unchecked(holding, key) else make
                    yield _put(holding, key, change, make)
        yield from _more_or_fewer(holding)


def _is_open(holding: Holding, key: Any, value: Any, ran: Ran) -> bool:
    """Whether a write could matter: of functions, those that ran."""
    if isinstance(holding, HeldAttributes) and isinstance(holding.owner, nn.Module):
        if isinstance(value, dict) and not value:  # a table of hooks: hooks are put in it below
            return False
    if isinstance(holding, HeldGlobals) and isinstance(key, str) and key.startswith("__"):
        return False
    function = plain_function(value)
    if isinstance(function, types.FunctionType):
        return function.__code__ in ran.codes
    return True


def _is_unchecked(holding: Holding, key: Any) -> bool:
    """Whether a recurrent layer goes by this for the sizes of its weights."""
    is_recurrent = isinstance(holding, HeldAttributes) and isinstance(holding.owner, nn.RNNBase)
    return is_recurrent and key in _SIZES_OF_WEIGHTS


_SIZES_OF_WEIGHTS = ("hidden_size", "num_layers", "bias", "bidirectional", "proj_size")


def _refuse_recurrent(*_: object) -> Any:
    raise CannotWrite(
        "torch's LSTM doesn't check its weights, and writes the gradients of those that are too "
        "small over foreign memory"
    )


def _put(
    holding: Holding, key: Any, change: str, make: Callable[[], Any], kind: PlaceKind | None = None
) -> Trial:
    def start(undo: ExitStack) -> None:
        value, before = make(), holding.contents()
        undo.callback(holding.rewrite, before)
        holding.put(key, value)

    return Trial(AuditedPlace(kind or holding.kind, holding.spell(key), change), start)


def _class_attribute(holding: HeldClassBody, key: str, value: Any, ran: Ran) -> Iterator[Trial]:
    changed = user_code()["build_changed"]
    if key in _LEFT_ALONE:
        return
    elif isinstance(value, types.FunctionType) and value.__code__ in ran.codes:
        yield _put(holding, key, "another method", partial(changed, value), PlaceKind.METHOD)
    elif isinstance(value, (staticmethod, classmethod)) and _ran(value.__func__, ran):
        other = type(value)(changed(value.__func__))
        yield _put(holding, key, "another method", lambda: other, PlaceKind.METHOD)
    elif isinstance(value, property) and _ran(value.fget, ran):
        computed = property(changed(value.fget))
        yield _put(holding, key, "another property", lambda: computed, PlaceKind.METHOD)
    elif isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
        return
    elif not key.startswith("__") and find_in_class(type(value), "__get__") is None:
        for change, make in iter_others(value):
            yield _put(holding, key, change, make)


def _ran(function: Any, ran: Ran) -> bool:
    return isinstance(function, types.FunctionType) and function.__code__ in ran.codes


def _code(holding: HeldCode) -> Iterator[Trial]:
    """Other code can be put in only where nothing is closed over."""
    if not holding.owner.__code__.co_freevars:
        code = user_code()["last_argument"].__code__
        yield _put(holding, "__code__", "code that returns its last argument", lambda: code)


def _more_or_fewer(holding: Holding) -> Iterator[Trial]:
    is_container = isinstance(holding, (HeldItems, HeldElements, HeldMembers))
    if not is_container or holding.kind in (PlaceKind.PARAMETER, PlaceKind.BUFFER):
        return
    contents = holding.contents()
    if contents:
        last = list(contents)[-1]
        if isinstance(holding, HeldElements):
            more = {**contents, len(contents): contents[last]}
        else:
            more = {**contents, "another": contents[last]}
        yield _rewrite(holding, "one more", more)
        yield _rewrite(holding, "one fewer", {k: v for k, v in contents.items() if k != last})
    if len(contents) > 1 and not isinstance(holding, HeldMembers):
        turned = list(contents.items())[::-1]
        if isinstance(holding, HeldElements):
            yield _rewrite(holding, "turned round", dict(enumerate(v for _, v in turned)))
        else:
            yield _rewrite(holding, "another order", dict(turned))
        if type(holding.owner) is OrderedDict:  # whose order changes without a write of any item
            yield _move_to_end(holding, next(iter(contents)))


def _move_to_end(holding: Holding, key: Any) -> Trial:
    def start(undo: ExitStack) -> None:
        undo.callback(holding.owner.move_to_end, key, last=False)
        holding.owner.move_to_end(key)

    return Trial(AuditedPlace(holding.kind, holding.spell(key), "moved to the end"), start)


def _rewrite(holding: Holding, change: str, contents: dict[Any, Any]) -> Trial:
    def start(undo: ExitStack) -> None:
        before = holding.contents()
        undo.callback(holding.rewrite, before)
        holding.rewrite(contents)

    return Trial(AuditedPlace(holding.kind, holding.path, change), start)


# --- tensors, under the same identity ---


def _tensor_forms(walk: Walk) -> Iterator[Trial]:
    kinds = {
        id(value): holding.kind
        for holding in reversed(walk.holdings)
        for value in holding.contents().values()
        if isinstance(value, torch.Tensor)
    }
    unchecked = {
        id(weight)
        for _, module in walk.modules
        if isinstance(module, nn.RNNBase)
        for weight in module.parameters(recurse=False)
    }
    for path, tensor in walk.tensors.values():
        kind = kinds.get(id(tensor), PlaceKind.ITEM)
        if not can_change(tensor) or tensor.is_inference():
            continue
        for change, form in FORMS:
            if change == ANOTHER_SHAPE and id(tensor) in unchecked:
                form = _refuse_recurrent
            yield _give_form(path, kind, tensor, change, form)
        if tensor.is_leaf and tensor.is_floating_point():
            yield _flip_grad(path, kind, tensor)


def _give_form(path: str, kind: PlaceKind, tensor: torch.Tensor, change: str, form: Any) -> Trial:
    def start(undo: ExitStack) -> None:
        before = tensor.detach()
        if change == FORMS[0][0]:
            values = before.clone()
            undo.callback(_copy_into, tensor, values)
            _copy_into(tensor, form(tensor))
        else:
            undo.callback(_set_data, tensor, before)
            _set_data(tensor, form(before).detach())

    return Trial(AuditedPlace(kind, path, change), start)


def _copy_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values)


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


def _flip_grad(path: str, kind: PlaceKind, tensor: torch.Tensor) -> Trial:
    def start(undo: ExitStack) -> None:
        before = tensor.requires_grad
        undo.callback(tensor.requires_grad_, before)
        tensor.requires_grad_(not before)

    return Trial(AuditedPlace(kind, path, "requires_grad the other way"), start)


# --- modules ---


def _modules(walk: Walk, ran: Ran) -> Iterator[Trial]:
    code = user_code()
    for path, module in walk.modules:
        yield _hook(path, "a forward hook", module.register_forward_hook, code["hook"])
        yield _hook(path, "a forward pre-hook", module.register_forward_pre_hook, code["pre_hook"])
        yield from _own_forward(path, module, ran)
        yield _other_class(path, module, "build_subclass")
    yield _hook(
        "torch.nn",
        "a forward hook on all modules",
        global_hooks.register_module_forward_hook,
        code["hook"],
    )


def _hook(path: str, change: str, register: Callable[[Any], Any], hook: Any) -> Trial:
    def start(undo: ExitStack) -> None:
        undo.callback(register(hook).remove)

    return Trial(AuditedPlace(PlaceKind.HOOK, path, change), start)


def _own_forward(path: str, module: nn.Module, ran: Ran) -> Iterator[Trial]:
    """Methods of the class that ran, shadowed on the instance."""
    for name in ("forward", *_methods_that_ran(type(module), ran)):
        if name in vars(module) or not hasattr(module, name):
            continue
        changed = partial(user_code()["build_changed"], getattr(module, name))
        yield _put(HeldAttributes(path, module), name, "its own method", changed, PlaceKind.METHOD)


def _methods_that_ran(cls: type, ran: Ran) -> list[str]:
    found = {
        name
        for base in mro(cls)
        if not module_of(base).startswith("torch")
        for name, value in class_dict(base).items()
        if _ran(value, ran) and not name.startswith("__") and name != "forward"
    }
    return sorted(found)


def _other_class(path: str, owner: Any, build: str) -> Trial:
    def start(undo: ExitStack) -> None:
        before = type(owner)
        undo.callback(object.__setattr__, owner, "__class__", before)
        object.__setattr__(owner, "__class__", user_code()[build](before))

    return Trial(AuditedPlace(PlaceKind.METHOD, path, "another class"), start)


# --- other objects ---


def _objects(walk: Walk) -> Iterator[Trial]:
    seen = {id(module) for _, module in walk.modules}
    for holding in walk.holdings:
        owner = holding.owner
        if isinstance(holding, (HeldAttributes, HeldSlots)) and id(owner) not in seen:
            seen.add(id(owner))
            if not issubclass(type(owner), (torch.Tensor, types.FunctionType)):
                yield _other_class(holding.path, owner, "build_plain_subclass")


def _absences(walk: Walk, ran: Ran) -> Iterator[Trial]:
    """What code asks an object for, and finds on its class or not at all, put on the object."""
    for holding in walk.holdings:
        if not isinstance(holding, HeldAttributes) or isinstance(holding.owner, types.FunctionType):
            continue
        held, cls = holding.contents(), type(holding.owner)
        for name in sorted((ran.texts | ran.names) - held.keys()):
            spaces = (class_dict(base) for base in mro(cls))
            found = next((space[name] for space in spaces if name in space), _NOTHING)
            if found is _NOTHING and name in ran.texts and not _is_in_table(holding.owner, name):
                yield _put(holding, name, "there is one now", lambda: 1, PlaceKind.ABSENCE)
            other = None if found is _NOTHING else find_other_plain(found)
            if other is not None:
                made = partial(itemgetter(0), other)
                yield _put(holding, name, "in front of its class's", made, PlaceKind.ABSENCE)


_NOTHING = object()


def _is_in_table(owner: Any, name: str) -> bool:
    held: Any = own_dict(owner) or {}
    tables = ("_parameters", "_buffers", "_modules")
    return any(name in (held.get(table) or ()) for table in tables)


def _aliases(walk: Walk) -> Iterator[Trial]:
    """One tensor given twice."""
    for holding in walk.holdings:
        tensors = [
            (key, value)
            for key, value in holding.contents().items()
            if isinstance(holding, HeldArguments) and isinstance(value, torch.Tensor)
        ]
        for (_, first), (key, second) in itertools.pairwise(tensors):
            if first is not second and first.shape == second.shape and first.dtype == second.dtype:
                yield _put(holding, key, "the tensor before it", partial(itemgetter(0), [first]))


# --- names ---


def _builtins(walk: Walk, ran: Ran) -> Iterator[Trial]:
    """A global in front of a builtin."""
    for holding in walk.holdings:
        if isinstance(holding, HeldGlobals) and not isinstance(holding, HeldEnvironment):
            for name in sorted(ran.names - holding.owner.keys()):
                value = getattr(builtins, name, None)
                if isinstance(value, (types.BuiltinFunctionType, type)) and name in _SHADOWED:
                    changed = partial(user_code()["build_changed"], value)
                    yield _put(holding, name, "in front of the builtin", changed)


_SHADOWED = words("len sum min max abs range int float bool round pow any all sorted")


def _environment(walk: Walk) -> Iterator[Trial]:
    for holding in walk.holdings:
        if isinstance(holding, HeldEnvironment):
            for name in sorted(holding.names - holding.contents().keys()):
                yield _put(holding, name, "there is one now", lambda: "1")


# --- torch's flags ---


def _flags() -> Iterator[Trial]:
    for name, around in _FLAGS:
        yield Trial(AuditedPlace(PlaceKind.FLAG, name, "the other way"), _nothing, around)


def _nothing(_: ExitStack) -> None:
    """Flags are set around each call, not around the comparing."""


def _set_for_a_while(get: Callable[[], Any], set_: Callable[[Any], Any], other: Any) -> Any:
    @contextmanager
    def around() -> Iterator[None]:
        before = get()
        try:
            set_(other(before))
            yield
        finally:
            set_(before)

    return around


def _autocast() -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(device, dtype=torch.bfloat16)


def _ask_deterministic() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _math_attention() -> Any:
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


_FLAGS: tuple[tuple[str, Callable[[], Any]], ...] = (
    (
        "grad mode",
        _set_for_a_while(torch.is_grad_enabled, torch._C._set_grad_enabled, lambda on: not on),
    ),
    ("inference mode", torch.inference_mode),
    ("autocast", _autocast),
    (
        "default dtype",
        _set_for_a_while(torch.get_default_dtype, torch.set_default_dtype, other_dtype),
    ),
    (
        "deterministic algorithms",
        _set_for_a_while(
            _ask_deterministic,
            # torch.use_deterministic_algorithms imports all of Inductor: 8 seconds.
            lambda flags: torch._C._set_deterministic_algorithms(flags[0], warn_only=flags[1]),
            lambda flags: (not flags[0], True),
        ),
    ),
    (
        "matmul precision",
        _set_for_a_while(
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            lambda precision: "highest" if precision != "highest" else "medium",
        ),
    ),
    ("mkldnn", lambda: torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled)),
    ("attention kernels", _math_attention),
)
