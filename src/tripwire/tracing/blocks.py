"""Blocks: what a run enters and leaves with `with`, as pairs of nodes.

Autocast and inference mode are seen by their classes; `sdpa_kernel` by the function of torch's that
it calls when it begins and when it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention
from torch.amp import autocast_mode
from torch.autograd import grad_mode

from tripwire.ranges import SourceRange
from tripwire.reading.torchstate import find_autocast
from tripwire.rulebook.refusals import Refusal
from tripwire.rulebook.rules import STATE_SET, Call
from tripwire.tracing import attention
from tripwire.tracing.fxnodes import AUTOCAST_BY_HAND, record
from tripwire.tracing.state import CURRENT, TracingState
from tripwire.writes.patches import Patch


def find_recorded() -> TracingState | None:
    """What this thread records into now."""
    state = CURRENT.state
    return state if state is not None and state.refusal is None else None


def range_of(state: TracingState) -> SourceRange:
    """Where the user calls what is patched."""
    return state.capture_range(2)


def _watch_context(
    cls: Any, enter: Callable[..., Any], leave: Callable[..., Any], settings: tuple[str, ...]
) -> tuple[Patch, Patch]:
    """Patches that record entering and leaving a context as a pair of nodes."""

    def wrap_enter(plain: Callable[..., Any]) -> Callable[..., Any]:
        def enter_observed(self: Any) -> Any:
            check()
            return entered(self, plain(self))

        return enter_observed

    def wrap_exit(plain: Callable[..., Any]) -> Callable[..., Any]:
        def exit_observed(self: Any, *error: Any) -> Any:
            check()
            return left(self, plain(self, *error))

        return exit_observed

    def check() -> None:
        state = find_recorded()
        if state is not None and find_autocast() != state.autocast:
            state.refuse(Refusal("torch-state-changed", AUTOCAST_BY_HAND, range_of(state)))

    def entered(self: Any, result: Any) -> Any:
        state = find_recorded()
        if state is not None:
            values = tuple(getattr(self, name) for name in settings)
            _note_entered(state, id(self), enter, values, range_of(state))
        return result

    def left(self: Any, result: Any) -> Any:
        state = find_recorded()
        if state is not None:
            _note_left(state, id(self), leave, cls.__name__, range_of(state))
        return result

    return Patch(cls, "__enter__", wrap_enter), Patch(cls, "__exit__", wrap_exit)


def _note_entered(
    state: TracingState,
    block: int,
    enter: Callable[..., Any],
    values: tuple[Any, ...],
    where: SourceRange,
) -> None:
    state.autocast = find_autocast()
    rule = Call("call_function", enter, enter.__name__)
    with state.unrecorded():
        node = record(state, rule, (values, {}), (), {}, None, where)
    assert node is not None  # a call without a result is always recorded
    state.contexts.setdefault(block, []).append(node)


def _note_left(
    state: TracingState, block: int, leave: Callable[..., Any], name: str, where: SourceRange
) -> None:
    opened = state.contexts.get(block)
    if not opened:
        why = _ACROSS.format(name)
        state.refuse(Refusal("context-across-calls", why, where))
        return
    state.autocast = find_autocast()
    rule = Call("call_function", leave, leave.__name__)
    with state.unrecorded():
        record(state, rule, ((opened.pop(),), {}), (), {}, None, where)


_ACROSS = (
    "{} is left here but was entered before the traced call. Enter and leave it on the same side "
    "of the call."
)


def _wrap_sdpa_kernel(plain: Callable[..., Any]) -> Callable[..., Any]:
    def allow_observed(kernels: Any, set_order: bool = False) -> None:
        state = find_recorded()
        if state is None:
            plain(kernels, set_order)
            return
        block, ends = attention.find_block(kernels)
        with state.unrecorded():
            plain(kernels, set_order)
        if block is None:
            state.refuse(Refusal(STATE_SET.slug, STATE_SET.reason, range_of(state)))
        elif ends:
            _note_left(state, id(block), attention.EXIT, "sdpa_kernel", range_of(state))
        else:
            values = (tuple(map(int, kernels)), set_order)
            _note_entered(state, id(block), attention.ENTER, values, range_of(state))

    return allow_observed


PATCHES = (
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
    Patch(torch.nn.attention, "_sdpa_kernel", _wrap_sdpa_kernel),
)
