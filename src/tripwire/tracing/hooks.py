"""Hooks: the only place that patches foreign code.

A torch-function mode doesn't see everything. While at least one thread traces, these are
patched as well: module calls (for scopes), custom autograd functions, scripted functions,
tensor subclassing, `set_`, autocast and inference mode, and checkpointing. Each patch asks for the
calling thread's state first and steps aside where there is none. The last tracer to leave
puts back exactly what was there, also after an exception.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.amp import autocast_mode
from torch.autograd import function as autograd_function
from torch.autograd import grad_mode

from tripwire.tracing.ranges import SourceRange
from tripwire.tracing.recorder import build_arguments, record
from tripwire.tracing.refusals import Refusal, Refused
from tripwire.tracing.rules import Call, Target
from tripwire.tracing.state import CURRENT, PythonCall, TracingState

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute that is replaced for a while."""

    owner: Any
    name: str
    value: object

    def apply(self) -> Callable[[], None]:
        """Replace the attribute; the result undoes it exactly."""
        before = vars(self.owner).get(self.name, _ABSENT)
        setattr(self.owner, self.name, self.value)

        def undo() -> None:
            if before is _ABSENT:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, before)

        return undo


_lock = threading.Lock()
_users = 0
_undo: list[Callable[[], None]] = []


@contextmanager
def installed() -> Iterator[None]:
    """Keep the patches in place; shared by every thread that traces."""
    global _users
    with _lock:
        if _users == 0:
            _apply_all()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _undo_all()


def _apply_all() -> None:
    try:
        for patch in PATCHES:
            _undo.append(patch.apply())
    except BaseException:
        _undo_all()
        raise


def _undo_all() -> None:
    while _undo:
        _undo.pop()()


def _recording() -> TracingState | None:
    state = CURRENT.state
    return state if state is not None and state.refusal is None else None


def _range(state: TracingState) -> SourceRange:
    return state.capture_range(2)


def _observe(
    state: TracingState,
    rule: Call,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    python: PythonCall | None = None,
) -> Any:
    """Run a call that the mode can't see, unobserved inside, and record it as one node."""
    where = _range(state)
    with _aside(state):
        nodes = None
        try:
            nodes = build_arguments(state, rule, args, kwargs, lambda: where)
        except Refused as refused:
            state.refuse(Refusal(refused.slug, refused.reason, where))
        value = run(*args, **kwargs)
        if nodes is not None:
            try:
                record(state, rule, nodes, args, kwargs, value, where, python)
            except Refused as refused:
                state.refuse(Refusal(refused.slug, refused.reason, where))
        return value


@contextmanager
def _aside(state: TracingState) -> Iterator[None]:
    """Record nothing: neither what a call does inside, nor what recording it asks of tensors."""
    CURRENT.state = None
    try:
        yield
    finally:
        CURRENT.state = state


# --- scopes ----------------------------------------------------------------------------------

_module_call = nn.Module.__call__


def _call_in_scope(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    state = CURRENT.state
    if state is None:
        return _module_call(self, *args, **kwargs)
    state.scopes.push(_module_path(state, self))
    outer = state.outer
    state.outer = state.capture_range(1)
    try:
        return _module_call(self, *args, **kwargs)
    finally:
        state.outer = outer
        state.scopes.pop()


CALL_IN_SCOPE = _call_in_scope.__code__


def _module_path(state: TracingState, module: nn.Module) -> str:
    source = state.reach.find_source(module)
    if source is None:  # made by the run, or read from something that isn't observed
        return f"{state.scopes.current.path}/{type(module).__name__}"
    return state.scope_paths.of(source)


# --- custom autograd functions -----------------------------------------------------------------


@lru_cache(maxsize=1024)
def _apply_of(function: type[torch.autograd.Function]) -> Target:
    return Target(function.apply, f"{function.__name__}_apply")


@classmethod  # type: ignore[misc]  # becomes a class method of torch's class
def _apply_observed(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # `Function.apply` reaches this through super(), so names bound before (`f = F.apply`) do too.
    run = super(autograd_function._SingleLevelFunction, cls).apply
    state = _recording()
    if state is None:
        return run(*args, **kwargs)
    if issubclass(cls, torch.utils.checkpoint.CheckpointFunction):
        state.refuse(
            Refusal(
                "reentrant-checkpoint",
                "re-entrant checkpointing runs the function again inside its backward, out of "
                "this trace's sight. Pass use_reentrant=False.",
                _range(state),
            )
        )
        return run(*args, **kwargs)
    kinds = "".join("d" if isinstance(arg, torch.Tensor) else "c" for arg in args)
    scalars = tuple(arg for arg in args if not isinstance(arg, torch.Tensor))
    rule = Call("call_function", _apply_of(cls), cls.__name__)
    return _observe(state, rule, run, args, kwargs, PythonCall(cls, kinds, scalars))


# --- scripted functions ------------------------------------------------------------------------

_script_call = torch._C.ScriptFunction.__call__


def _script_call_observed(self: Any, *args: Any, **kwargs: Any) -> Any:
    state = _recording()
    if state is None:
        return _script_call(self, *args, **kwargs)
    rule = Call("call_function", Target(self, f"{self.name}_script"), self.name)
    return _observe(state, rule, lambda *a, **k: _script_call(self, *a, **k), args, kwargs)


# --- tensors made or remade unseen --------------------------------------------------------------

_make_subclass = torch.Tensor._make_subclass
_as_subclass = torch.Tensor.as_subclass
_set = torch.Tensor.set_


def _make_subclass_observed(*args: Any, **kwargs: Any) -> Any:
    state = _recording()
    if state is None:
        return _make_subclass(*args, **kwargs)
    rule = Call("call_function", make_subclass, args[0].__name__.lower())
    return _observe(state, rule, _make_subclass, args, kwargs)


def _as_subclass_observed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    state = _recording()
    if state is None:
        return _as_subclass(self, *args, **kwargs)
    rule = Call("call_method", "as_subclass", "as_subclass")
    return _observe(state, rule, _as_subclass, (self, *args), kwargs)


def _set_observed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    state = _recording()
    if state is None:
        return _set(self, *args, **kwargs)
    rule = Call("call_method", "set_", "set_", writes=True)
    return _observe(state, rule, _set, (self, *args), kwargs)


def make_subclass(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The node target for tensors that a run wraps in a subclass, such as nn.Parameter."""
    made: torch.Tensor = _make_subclass(*args, **kwargs)
    return made


# --- contexts ----------------------------------------------------------------------------------


def _watch_context(
    cls: Any, enter: Callable[..., Any], leave: Callable[..., Any], settings: tuple[str, ...]
) -> tuple[Patch, Patch]:
    """Patches that record entering and leaving a context as a pair of nodes."""
    plain_enter, plain_exit = cls.__enter__, cls.__exit__

    def enter_observed(self: Any) -> Any:
        entered = plain_enter(self)
        state = _recording()
        if state is not None:
            rule = Call("call_function", enter, enter.__name__)
            values = tuple(getattr(self, name) for name in settings)
            where = _range(state)
            with _aside(state):
                node = record(state, rule, (values, {}), (), {}, None, where)
            assert node is not None  # a call without a result is always recorded
            state.contexts.setdefault(id(self), []).append(node)
        return entered

    def exit_observed(self: Any, *error: Any) -> Any:
        left = plain_exit(self, *error)
        state = _recording()
        if state is not None:
            opened = state.contexts.get(id(self))
            if opened:
                rule = Call("call_function", leave, leave.__name__)
                where = _range(state)
                with _aside(state):
                    record(state, rule, ((opened.pop(),), {}), (), {}, None, where)
            else:
                state.refuse(
                    Refusal(
                        "context-across-calls",
                        f"{cls.__name__} is left here but was entered before the traced call.",
                        _range(state),
                    )
                )
        return left

    return Patch(cls, "__enter__", enter_observed), Patch(cls, "__exit__", exit_observed)


# --- checkpointing -----------------------------------------------------------------------------

_checkpoint = torch.utils.checkpoint._checkpoint_without_reentrant_generator


def _checkpoint_observed(*args: Any, **kwargs: Any) -> Iterator[Any]:
    state = _recording()
    if state is None:
        yield from _checkpoint(*args, **kwargs)
        return
    generator = _checkpoint(*args, **kwargs)
    with _aside(state):  # what checkpointing does around the function is no part of it
        next(generator)
    state.regions.append(state.next_region)
    state.next_region += 1
    try:
        yield
    except BaseException as error:
        generator.throw(error)
        raise
    finally:
        state.regions.pop()
    with _aside(state):
        next(generator, None)


PATCHES = (
    Patch(nn.Module, "__call__", _call_in_scope),
    Patch(autograd_function._SingleLevelFunction, "apply", _apply_observed),
    Patch(torch._C.ScriptFunction, "__call__", _script_call_observed),
    Patch(torch.Tensor, "_make_subclass", staticmethod(_make_subclass_observed)),
    Patch(torch.Tensor, "as_subclass", _as_subclass_observed),
    Patch(torch.Tensor, "set_", _set_observed),
    *_watch_context(
        autocast_mode.autocast,
        autocast_mode._enter_autocast,
        autocast_mode._exit_autocast,
        ("device", "fast_dtype", "_enabled", "_cache_enabled"),
    ),
    *_watch_context(
        grad_mode.inference_mode,
        grad_mode._enter_inference_mode,
        grad_mode._exit_inference_mode,
        ("mode",),
    ),
    Patch(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _checkpoint_observed),
)
