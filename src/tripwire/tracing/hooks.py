"""Hooks: what of torch is patched while a run is observed.

A torch-function mode doesn't see everything. While at least one thread traces, these are
patched as well: module calls (for scopes), custom autograd functions, scripted functions,
tensor subclassing, `set_`, autocast, inference mode and `sdpa_kernel`, and checkpointing; and what
pythonhooks.py has of Python. Each patch asks for the calling thread's state first and steps aside
where there is none. The last tracer to leave puts back what was there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import Any

import torch
import torch.utils.checkpoint
from msgspec.structs import replace
from torch import nn
from torch.autograd import function as autograd_function
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from tripwire.env import torch_path
from tripwire.ranges import is_library_caller
from tripwire.reading.tensors import (
    GeneratorStates,
    holds_tensor,
    iter_given,
    iter_held,
    version_of,
)
from tripwire.reading.torchstate import find_autocast
from tripwire.rulebook.refusals import Refusal, Refused
from tripwire.rulebook.rules import Call, Refuse, Target
from tripwire.tracing import blocks, levels, outside, pythonhooks
from tripwire.tracing.answers import Own, changes, find_answer, form_of, hands_out
from tripwire.tracing.blocks import find_recorded, range_of
from tripwire.tracing.bodies import (
    OF_CLASSES,
    Functions,
    Passed,
    computes_with_symbols,
    find_backward,
    find_contexts,
    find_functions,
    find_names,
    follows_from_shapes,
    has_plain_sizes,
    lending,
)
from tripwire.tracing.fxnodes import (
    CHECKPOINT_WRITES,
    build_arguments,
    hand_over,
    record,
)
from tripwire.tracing.observe import Started
from tripwire.tracing.recorder import Recorder, note_failure
from tripwire.tracing.state import CURRENT, Inside, PythonCall, Region, TracingState, all_plain
from tripwire.values.classes import isinstance, short_name_of
from tripwire.values.contents import all_codes
from tripwire.values.numbers import close_values, is_open, iter_leaves
from tripwire.writes.patches import Patch, Patches, RarerCollections

# What a hook calls in the library is what the user called.
_HOOKING = (blocks, levels, outside, pythonhooks)
FILES = frozenset({__file__, *(module.__file__ for module in _HOOKING)})


@contextmanager
def installed(user: object) -> Iterator[None]:
    """Keep the patches in place for somebody, a run, say."""
    try:
        _OF_TORCH.enter(id(user))
        _OF_PYTHON.enter(id(user))
        yield
    finally:
        uninstall(user)


def uninstall(user: object) -> None:
    """The same needs no patches any more; telling it twice is fine."""
    _OF_PYTHON.leave(id(user))
    _OF_TORCH.leave(id(user))


@contextmanager
def lifted(user: object) -> Iterator[None]:
    """What was there before, for a while, unless other threads trace.

    Dynamo knows Python's functions by their identity, and asks once which these are.
    """
    uninstall(user)
    try:
        yield
    finally:
        _OF_TORCH.enter(id(user))
        _OF_PYTHON.enter(id(user))


def release(user: object) -> None:
    """A refused run needs no names any more, and makes few objects."""
    _OF_PYTHON.leave(id(user))


def _observe(
    state: TracingState,
    rule: Call,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    python: PythonCall | None = None,
    functions: Functions | None = None,
) -> Any:
    """Run a call that the mode can't see, unobserved inside, and record it as one node."""
    where = range_of(state)
    is_followed = False
    if functions is not None and python is not None:
        with state.unrecorded():  # its bytecode is looked at
            is_followed = computes_with_symbols(python.function, functions)
    if state.shadow is not None:
        state.shadow.close_call((args, kwargs), rule.name, is_known=is_followed)
    with state.unrecorded():
        nodes = None
        try:
            nodes = build_arguments(state, rule, args, kwargs, lambda: where)
        except Refused as refused:
            state.refuse(Refusal(refused.slug, refused.reason, where))
        given, named = args, kwargs
        acts = python is not None and state.quiet
        passed = Passed((args, kwargs))
        if acts:  # what is met from now on may be what it wrote
            state.reach.holders.open_number = None
        written = state.inner.look() if acts else {}
        versions = list(map(version_of, iter_given(args))) if python is not None else []
        generators = GeneratorStates()
        place: int | None = state.custom_calls
        state.custom_calls += python is not None
        state.inside = inside = Inside(is_plain=functions is not None)
        state.is_inside = True
        noting: AbstractContextManager[Started] = (
            state.observer.noting() if acts and state.observer else nullcontext([])
        )
        try:
            with (
                lending((args, kwargs)) as (args, kwargs),
                noting as started,
                state.reach.holders.uprooted(),
            ):
                value = run(*args, **kwargs)
            kept = passed.find_kept()
        except Exception as error:
            note_failure(state, rule, error, where)
            raise
        finally:
            state.inside, state.is_inside = None, False
        if functions is not None and inside.is_plain:
            acts = False  # a compiler may know all that it does
            state.inner.note_names(find_names(functions))
            _watch_functions(state, functions)
            assert python is not None
            why = _COPIED.format(inside.copied) if inside.copied else None
            if why is None and _asks_for_classes(functions, args):
                why = _PARAMETER
            if why is None and any(tensor.requires_grad for tensor in iter_given(value)):
                why = _find_hindrance(state, python.function, functions, args, versions, value)
            rule = replace(rule, opaque=False, as_it_is=why)
        if acts:
            assert python is not None
            contexts = find_contexts(python.function)
            state.stores.add_passed((*args, *kwargs.values()))
            for code, namespace in started:
                state.stores.add(code, namespace, contexts.get(id(code)))
            state.inner.note(written)
            can_answer = state.inner.is_as(written) and not (state.regions or kwargs)
            if not can_answer or changes(args, versions) or hands_out(args, value):
                place = None
            target: Any = rule.target
            own = Own(target.call, target.__name__, form_of(value), place)
            rule = replace(rule, target=own)
        if nodes is not None:
            try:
                if acts and kept:
                    nodes = hand_over(state, rule, nodes, (given, named), kept, where)
                draws = generators.have_moved()
                record(state, rule, nodes, args, kwargs, value, where, python, draws=draws)
            except Refused as refused:
                state.refuse(Refusal(refused.slug, refused.reason, where))
        if is_followed and state.shadow is not None and state.refusal is None:
            state.shadow.follow_function(rule, run, given, value, changes(args, versions))
        return value


# --- scopes ----------------------------------------------------------------------------------


def _wrap_module_call(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call_in_scope(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = CURRENT.state
        if state is None:
            return plain(self, *args, **kwargs)
        state.scopes.push(_module_path(state, self))
        outer = state.outer
        state.outer = state.capture_range(1)
        inside = self is not state.target
        if inside:
            if not state.open_modules:
                state.modules.setdefault(id(self), self)
            state.open_modules += 1
        try:
            _check_module(state, self)
            return plain(self, *args, **kwargs)
        finally:
            state.open_modules -= inside
            state.outer = outer
            state.scopes.pop()

    return call_in_scope


CALL_IN_SCOPE = next(
    const
    for const in _wrap_module_call.__code__.co_consts
    if isinstance(const, CodeType) and const.co_name == "call_in_scope"
)


def _check_module(state: TracingState, module: nn.Module) -> None:
    """Refuse modules whose call does what neither a mode nor a patch can see."""
    if isinstance(module, torch.jit.ScriptModule):
        reason = (
            "a scripted module runs here, and this trace can't see into it. Trace the plain module."
        )
        state.refuse(Refusal("scripted-module", reason, range_of(state)))


def _module_path(state: TracingState, module: nn.Module) -> str:
    source = state.reach.find_source(module)
    if source is None:  # made by the run, or read from something that isn't observed
        return f"{state.scopes.current.path}/{short_name_of(type(module))}"
    return state.scope_paths.of(source)


# --- custom autograd functions -----------------------------------------------------------------


def _wrap_apply(plain: Any) -> Any:
    """`Function.apply` reaches this through super(), so names bound before do too."""

    def apply_observed(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(autograd_function._SingleLevelFunction, cls).apply
        answer = find_answer()
        if answer:
            return answer[0]
        state = find_recorded()
        if state is None:
            return run(*args, **kwargs)
        refuse = _find_refusal(state, cls)
        if refuse is not None:
            state.refuse(Refusal(refuse.slug, refuse.reason, range_of(state)))
            return run(*args, **kwargs)
        kinds = "".join("d" if isinstance(arg, torch.Tensor) else "c" for arg in args)
        scalars = tuple(
            ... if holds_tensor(arg) else arg for arg in args if not isinstance(arg, torch.Tensor)
        )
        target = Target(cls.apply, f"{cls.__name__}_apply")
        name = f"{cls.__name__}.apply"  # a class may be called `dropout`, and is another thing
        rule = Call("call_function", target, name, opaque=True, as_it_is=_OWN_CODE)
        functions = _find_watchable(state, cls, args) if not kwargs else None
        return _observe(state, rule, run, args, kwargs, PythonCall(cls, kinds, scalars), functions)

    return classmethod(apply_observed)


_PARAMETER = "its code may check for a parameter or another class, and compilers pass plain tensors"
_OWN_CODE = "its code reads or writes something besides its arguments, or may do so"
_CHANGES = "gradients are on, and it changes an argument in place or returns one from a tuple"
_AUTOCAST = "autocast is on, and its backward runs under the autocast of its own time"
_COPIED = "inside it, `{}` returns its argument itself, and a compiler would make a copy"


def _find_watchable(state: TracingState, cls: Any, args: tuple[Any, ...]) -> Functions | None:
    """The functions that a forward runs, where what they read can be watched."""
    if state.observer is None or state.reach.find_source(cls) is None:
        return None
    with state.unrecorded():
        return find_functions(cls, close_values(args))


def _watch_functions(state: TracingState, functions: Functions) -> None:
    assert state.observer is not None
    state.computed_names.update(("forward", "setup_context"))  # which torch looks up
    with state.reach.holders.planting_nothing():  # they ran
        for function in functions:
            for code in all_codes(function.__code__):
                state.observer.adopt(code, function.__globals__)


def _asks_for_classes(functions: Functions, args: tuple[Any, ...]) -> bool:
    """Whether a function may check for a parameter: a compiler passes plain tensors."""
    named = {name for function in functions for name in function.__code__.co_names}
    return not named.isdisjoint(OF_CLASSES) and any(
        type(given) is not torch.Tensor for given in iter_given(args)
    )


def _find_hindrance(
    state: TracingState,
    cls: Any,
    functions: Functions,
    args: tuple[Any, ...],
    versions: list[int | None],
    value: object,
) -> str | None:
    """Why a compiler may not run a custom function with gradients once, for all calls."""
    hidden = [arg for arg in args if isinstance(arg, tuple)]  # from autograd
    if changes(args, versions) or hands_out(hidden, value):
        return _CHANGES
    if find_autocast() is not None:
        return _AUTOCAST
    backward = find_backward(cls, functions)
    if backward is None:
        return _OWN_CODE
    _watch_functions(state, backward)
    state.computed_names.add("backward")
    return None


def _find_refusal(state: TracingState, cls: Any) -> Refuse | None:
    if issubclass(cls, BackwardHookFunction):  # around what a module takes and returns
        scope = state.scopes.current
        return Refuse(
            "backward-hook",
            f"the module {f'`{scope}` ' if scope else ''}has backward hooks: Python functions that "
            "would run in the backward, outside the graph. Remove them, or call it under "
            "torch.no_grad().",
        )
    if issubclass(cls, torch.utils.checkpoint.CheckpointFunction):
        return Refuse(
            "reentrant-checkpoint",
            "re-entrant checkpointing runs the function again inside its backward, where this "
            "trace can't see it. Pass use_reentrant=False.",
        )
    for name in ("forward", "backward", "setup_context"):
        for tensor in iter_held(getattr(cls, name, None)):
            known = state.values.find(tensor)
            if known is not None and known.node is not None and not known.sources:
                return Refuse(
                    "opaque-object",
                    f"{cls.__name__}.{name} closes over {known.node.name}, a tensor of this "
                    "run, which the graph would keep. Pass it to apply.",
                )
    return None


# --- scripted functions ------------------------------------------------------------------------


def _wrap_script_call(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call_observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = find_recorded()
        if state is None:
            return plain(self, *args, **kwargs)
        target = Target(self, f"{self.name}_script")
        rule = Call(
            "call_function",
            target,
            f"{self.name}.script",
            opaque=not has_plain_sizes(self),
            of_shapes=follows_from_shapes(self),
        )
        made = _observe(state, rule, functools.partial(plain, self), args, kwargs)
        given = set(map(id, iter_given((args, kwargs))))
        if not given.isdisjoint(map(id, iter_given(made))) and _decides(self):
            reason = (
                f"the scripted function `{self.name}` has an `if` or a loop, and returned one of "
                "its arguments. On another call it may return a new tensor, and a graph can't do "
                "both. Return a copy (x.clone()), or leave out @script."
            )
            state.refuse(Refusal("scripted-result", reason, range_of(state)))
        return made

    return call_observed


def _decides(script: Any) -> bool:
    """Whether what a scripted function does may depend on values."""
    graph = str(script.inlined_graph)
    return "prim::If" in graph or "prim::Loop" in graph


# --- tensors made or remade unseen --------------------------------------------------------------


def _wrap_make_subclass(plain: Callable[..., Any]) -> object:
    def make_subclass(*args: Any, **kwargs: Any) -> Any:
        state = find_recorded()
        if state is None:
            return plain(*args, **kwargs)
        target = Target(plain, "make_subclass")
        return _observe(state, Call("call_function", target, "subclass"), plain, args, kwargs)

    return staticmethod(make_subclass)


def _wrap_from_numpy(plain: Callable[..., Any]) -> Callable[..., Any]:
    def from_numpy(array: Any, /) -> Any:
        state = find_recorded()
        if state is None or not state.quiet:
            return plain(array)
        rule = Call("call_function", Target(plain, "from_numpy"), "from_numpy")
        return _observe(state, rule, plain, (array,), {})

    return from_numpy


def _wrap_method(rule: Call) -> Callable[[Callable[..., Any]], object]:
    """Observe a tensor method that no mode sees."""

    def wrap(plain: Callable[..., Any]) -> object:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            state = find_recorded()
            if state is None:
                return plain(self, *args, **kwargs)
            return _observe(state, rule, plain, (self, *args), kwargs)

        return method

    return wrap


# --- torch's fast paths --------------------------------------------------------------------------


def _wrap_has_torch_function(plain: Callable[..., bool]) -> Callable[..., bool]:
    """nn.MultiheadAttention and its like leave their fast path when a mode is active.

    They ask through the module; functions that dispatch to a mode have the name of their own, but
    for torch's functions of numbers.
    """

    def has_torch_function(*args: Any) -> bool:
        mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if not isinstance(mode, Recorder):
            return plain(*args)
        if any(map(is_open, iter_leaves(args))):
            if is_library_caller(1):
                return plain(*args)
            args = close_values(args)
        with _pop_mode_temporarily():
            return plain(*args)

    return has_torch_function


def _wrap_for_users(plain: Callable[..., bool]) -> Callable[..., bool]:
    """torch's own functions ask by these names whether they have to dispatch to a mode."""
    without_ours = _wrap_has_torch_function(plain)

    def has_torch_function(*args: Any) -> bool:
        return plain(*args) if is_library_caller(1) else without_ours(*args)

    return has_torch_function


# --- checkpointing -----------------------------------------------------------------------------


def find_checkpoint() -> Any | None:
    """The frame of the checkpointed region that runs for the first time now.

    torch keeps it in the hook that counts saved tensors, and nowhere else.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    code = None if hooks is None else getattr(hooks[0], "__code__", None)
    if code is None or torch_path(code.co_filename) != "utils/checkpoint.py":
        return None
    if "frame" not in code.co_freevars:  # the hook of a region that runs again
        return None
    return hooks[0].__closure__[code.co_freevars.index("frame")].cell_contents  # type: ignore[index]


def _run_again_alike() -> None:
    """What ran plainly in a traced run runs plainly again: it must save the same tensors."""
    frame = find_checkpoint() if CURRENT.tracing else None
    if frame is not None:  # it is None where gradients are off
        frame.recompute_fn = all_plain()(frame.recompute_fn)


def _wrap_checkpoint(plain: Callable[..., Any]) -> Callable[..., Any]:
    def checkpoint_observed(*args: Any, **kwargs: Any) -> Iterator[Any]:
        generator = plain(*args, **kwargs)
        state = find_recorded()
        if state is None:
            next(generator)
            _run_again_alike()
            yield
            yield from generator
            return
        with state.unrecorded():  # what checkpointing does around the function is no part of it
            next(generator)
            _run_again_alike()
            written = state.inner.look()
        state.regions.append(Region(state.next_region, state.memory.latest))
        state.next_region += 1
        try:
            yield
        except BaseException as error:
            generator.throw(error)
            raise
        finally:
            state.regions.pop()
        with state.unrecorded():
            if not state.inner.is_as(written):
                state.refuse(Refusal("checkpoint-writes", CHECKPOINT_WRITES, range_of(state)))
            next(generator, None)

    return checkpoint_observed


PATCHES = (
    Patch(nn.Module, "__call__", _wrap_module_call),
    Patch(autograd_function._SingleLevelFunction, "apply", _wrap_apply),
    Patch(torch._C.ScriptFunction, "__call__", _wrap_script_call),
    Patch(torch.Tensor, "_make_subclass", _wrap_make_subclass),
    Patch(
        torch.Tensor, "as_subclass", _wrap_method(Call("call_method", "as_subclass", "as_subclass"))
    ),
    Patch(torch.Tensor, "set_", _wrap_method(Call("call_method", "set_", "set_", writes=True))),
    Patch(torch.overrides, "has_torch_function", _wrap_has_torch_function),
    Patch(torch.overrides, "has_torch_function_unary", _wrap_for_users),
    Patch(torch.overrides, "has_torch_function_variadic", _wrap_for_users),
    Patch(torch, "from_numpy", _wrap_from_numpy),
    *blocks.PATCHES,
    Patch(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _wrap_checkpoint),
    *levels.PATCHES,
)
_OF_TORCH = Patches(lambda: PATCHES)
# Recording makes tens of objects where the run makes one, and most of them stay. 36 layers: a trace
# takes a median of 384 → 275 ms, a compiled first call 908 → 564; a hundred times is no faster.
_OF_PYTHON = Patches(lambda: (*pythonhooks.find_patches(), *outside.PATCHES, RarerCollections(10)))
