"""Habits: whether a callable may write to what it is given, judged by its code before it runs.

If a call may write, its values are captured before it runs. If it can't, that isn't needed: nothing
that it was given will have changed when it fails. A wrong "may write" costs time, a wrong "can't"
loses values. So whatever isn't known to be harmless counts as a write: a library's object, or a
function of a library whose functions aren't known here.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from tripwire.reading.tensors import iter_given
from tripwire.recording.capture.origin import is_installed_module, is_packaged_file
from tripwire.rulebook.rules import Call, rule_for, words
from tripwire.values.classes import isinstance, module_of

_STORES = words(
    "STORE_ATTR DELETE_ATTR STORE_SUBSCR DELETE_SUBSCR STORE_SLICE STORE_GLOBAL DELETE_GLOBAL "
    "STORE_NAME"
)
_CHANGERS = words(
    "append appendleft extend extendleft insert add update setdefault pop popleft popitem clear "
    "remove discard sort reverse rotate send throw setattr delattr exec eval next __next__ "
    "__setattr__ __delattr__ __setstate__ "
    # the operators by name
    "iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ixor ior iconcat "
    "setitem delitem "
    # arrays
    "fill put place putmask copyto partition resize setflags itemset shuffle at byteswap "
    # running statistics
    "batch_norm instance_norm "
    # modules and training
    "backward step zero_grad train eval load_state_dict register_buffer register_parameter"
)
_DRAWS = words("random numpy np Random default_rng generator Generator rng")
_IN_PLACE = re.compile(r"[A-Za-z_]*[A-Za-z0-9]_|__i[a-z]+__|__setitem__|__delitem__|__set__")
_KEYWORDS = frozenset({"out", "inplace"})
# Functions that write if one of their arguments is true.
_TOLD_TO_WRITE = frozenset(
    name
    for name, function in vars(nn.functional).items()
    if isinstance(function, types.FunctionType) and "inplace" in function.__code__.co_varnames
)
# Libraries whose functions write only where a name above, or a keyword, says so.
_KNOWN = words(
    "torch math cmath builtins operator numpy typing types functools itertools collections "
    "dataclasses enum abc copy re string numbers contextlib warnings tripwire"
)
# Kinds of objects that no call changes unless the caller's code shows it.
_STILL = words(
    "int float complex bool str bytes NoneType ellipsis NotImplementedType list tuple dict set "
    "frozenset bytearray range slice cell code property staticmethod classmethod type object "
    "mappingproxy method function getset_descriptor member_descriptor wrapper_descriptor "
    "method_descriptor method-wrapper"
)
_STILL_OF_TORCH = words("dtype device layout memory_format Size Tensor Parameter Buffer finfo")


@dataclass(frozen=True, slots=True)
class Habits:
    """What a callable's code may do."""

    writes: bool  # to anything that was there before
    draws: bool  # from a generator that isn't torch's own

    @property
    def are_harmless(self) -> bool:
        """Whether a failed call leaves what it was given as it was."""
        return not (self.writes or self.draws)


def find_habits(codes: Iterable[CodeType], objects: Iterable[object]) -> Habits:
    """The habits of recorded code, and of what it can reach among recorded objects."""
    draws = writes = False
    for code in codes:
        names = frozenset(code.co_names)
        draws = draws or not _DRAWS.isdisjoint(names)
        writes = writes or _may_write(code)
    for value in objects:
        if writes:
            break
        draws = draws or type(value) is torch.Generator
        writes = _changes_when_used(value)
    return Habits(writes, draws)


# --- objects ---


def _changes_when_used(value: object) -> bool:
    """Whether using an object may change something though the user's code doesn't show it."""
    kind = type(value)
    if isinstance(value, types.ModuleType):
        return is_installed_module(value.__name__) and _root(value.__name__) not in _KNOWN
    if isinstance(value, type):
        return False  # what is made of it is new
    if isinstance(value, types.MethodDescriptorType | types.WrapperDescriptorType):
        return _is_changer(value.__name__)  # `partial(list.append, items)`
    if isinstance(value, types.FunctionType):
        return is_packaged_file(value.__code__.co_filename) and _is_unknown(value.__module__)
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType | type):
            return _is_unknown(value.__module__ or "builtins")
        return True  # `push = items.append`
    if isinstance(value, nn.Module) and _changes_itself(value):
        return True
    home = kind.__module__
    if home == "builtins":
        return kind.__name__ not in _STILL  # iterators: to read one is to change it
    if not is_installed_module(home):
        return False  # its methods are among the codes
    if _root(home) == "torch":
        known = home.startswith("torch.nn.modules.") or kind.__name__ in _STILL_OF_TORCH
        return not (known or home in ("torch._ops", "torch"))
    if _root(home) == "numpy":
        return kind.__name__ not in ("ndarray", "ufunc", "_ArrayFunctionDispatcher") and (
            not hasattr(kind, "dtype")
        )
    return home not in ("types", "typing", "functools", "operator", "weakref", "enum")


def _root(module: str) -> str:
    return module.partition(".")[0]


def _is_unknown(module: str | None) -> bool:
    return module is None or _root(module).removeprefix("_") not in _KNOWN


def _changes_itself(module: nn.Module) -> bool:
    """Whether a layer may write when it is called: running statistics, inplace=True.

    Whether it is in training doesn't count: that may have changed by the next call.
    """
    state = module.__dict__
    return bool(
        state.get("inplace")
        or state.get("max_norm") is not None
        or (state.get("_buffers") and is_installed_module(module_of(type(module))))
    )


# --- code ---


def _may_write(code: CodeType) -> bool:
    names = frozenset(code.co_names)
    if any(map(_is_changer, names)):
        return True
    if not _TOLD_TO_WRITE.isdisjoint(names) and any(c is True for c in code.co_consts):
        return True
    if any(isinstance(c, tuple) and not _KEYWORDS.isdisjoint(c) for c in code.co_consts):
        return True
    for step in dis.get_instructions(code):
        if step.opname in _STORES:
            return True
        if step.opname == "STORE_DEREF" and step.argval in code.co_freevars:
            return True
        if step.opname == "BINARY_OP" and step.argrepr.endswith("="):
            return True
        if step.opname == "IMPORT_NAME" and _root(str(step.argval)) not in _KNOWN:
            return True
    return any(isinstance(c, CodeType) and _may_write(c) for c in code.co_consts)


def _is_changer(name: str) -> bool:
    return name in _CHANGERS or (name not in _PRIVATE and _IN_PLACE.fullmatch(name) is not None)


_PRIVATE = frozenset({"__init__", "__iter__", "__index__", "__int__", "__invert__"})


# --- calls of torch's ---


def find_written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """Tensors that a call of torch's is about to change in place, as far as its form tells."""
    rule = rule_for(func)
    if isinstance(rule, Call):
        if rule.writes and args:
            # A fused optimizer writes to all of its lists.
            yield from iter_given(args if rule.name.startswith(_WRITES_ALL) else args[:1])
        if rule.writes_also is not None:
            yield from iter_given(rule.writes_also.find(args, kwargs))
    name = getattr(func, "__name__", "")
    if name in _EXPOSES or name in _EMBEDDINGS or _is_in_place(func, args, kwargs):
        yield from iter_given((*args, *kwargs.values()))
    if kwargs.get("out") is not None:
        yield from iter_given((kwargs["out"],))


_WRITES_ALL = ("_fused_", "_amp_")
_EMBEDDINGS = words("embedding embedding_bag")  # max_norm
# After these anybody may write to the tensor's memory, and no call of torch's tells.
_EXPOSES = words(
    "numpy __array__ __dlpack__ data_ptr untyped_storage storage _typed_storage share_memory_"
)


def _is_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("inplace"):
        return True
    if not isinstance(func, types.FunctionType):
        return False
    place = _place_of_inplace(func.__code__)
    return place is not None and len(args) > place and bool(args[place])


@functools.lru_cache(maxsize=1024)
def _place_of_inplace(code: CodeType) -> int | None:
    names = code.co_varnames[: code.co_argcount]
    return names.index("inplace") if "inplace" in names else None
