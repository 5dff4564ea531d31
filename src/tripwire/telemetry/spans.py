"""Spans: a timed stretch of work, as a `with` block or a decorator.

A span is a description and holds no state: one object may be entered again while it is open, and
by any thread. What is open lies on its thread's stack. When spans are off, entering and leaving
one is a C function that does nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ParamSpec, Protocol, TypeVar

from msgspec import Struct, structs

from tripwire.errors import TelemetryError
from tripwire.telemetry import clock
from tripwire.telemetry import log as event_log
from tripwire.telemetry.contexts import (
    RuntimeMetricsContext,
    get_metrics_context,
    get_runtime_metrics_context,
)
from tripwire.telemetry.metrics import TIME_COLUMNS
from tripwire.telemetry.schema import SpanDone, make_plain_dict
from tripwire.telemetry.threads import OpenEvent, ThreadState, Total, forget_open_events, local
from tripwire.values.classes import name_of

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("tripwire.telemetry")


class Timeline(Protocol):
    """Hears of events as they begin and end, in their own thread."""

    def begin(self, event: OpenEvent, state: ThreadState) -> None:
        """An event has begun."""

    def end(self, event: OpenEvent, end_ns: int, state: ThreadState) -> None:
        """An event has ended."""


timeline: Timeline | None = None


class _Keyed(Struct, frozen=True, eq=False, gc=False):
    key: str


class Span(_Keyed, frozen=True, eq=False, kw_only=True, gc=False):  # nothing leads back to one
    """`with timed("trace", column_us="trace_us"): ...`, or `@timed("trace")` on a function.

    `column_us` names the field of `CompilationMetrics` that the time is added to: of the compile
    that is going on in this thread, else of the runtime metrics. `event_name` is the name in the
    timeline where it isn't the key. `wait_counter` names one of torch's counters; the outermost
    span with a column feeds `compile`, or `runtime_overheads` outside of a compile. What a span
    doesn't say of its compile and of backward is taken from the one around it.
    """

    event_name: str | None = None
    metadata: dict[str, object] | None = None
    column_us: str | None = None
    compile_id: str | None = None
    is_backward: bool | None = None
    wait_counter: str | None = None

    def of(self, compile_id: str | None) -> Span:
        """The same for work after a compile; inside of another compile it is part of that one."""
        return structs.replace(self, compile_id=local.state.compile_id or compile_id)

    def __enter__(self) -> None:
        _enter(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _leave(self, kind)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def timed_function(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return timed_function


timed = Span


def _enter(span: Span) -> None:
    start = clock.monotonic_ns()  # first: what opening it costs is the span's own, nobody else's
    column, metadata = span.column_us, span.metadata
    if column is not None and column not in TIME_COLUMNS:
        raise _bad_column(column)
    state = local.state
    stack = state.stack
    compile_id, is_backward = span.compile_id or state.compile_id, span.is_backward
    if stack:  # outside of a compile, what is known of the span around holds for those inside
        around = stack[-1]
        compile_id = compile_id or around.compile_id
        is_backward = around.is_backward if is_backward is None else is_backward
    event = OpenEvent(
        span.event_name or span.key,
        span.key,
        start,
        0,
        compile_id,
        is_backward,
        None if metadata is None else metadata.copy(),
        metadata,
        span,
        column is not None,
    )
    profiler = _profiler or _find_profiler()
    if profiler is not None:
        counters = [span.wait_counter] if span.wait_counter else []
        if column is not None and not any(open_.has_column for open_ in stack):
            counters.append("compile" if state.compile_id else "runtime_overheads")
        if counters or profiler._is_profiler_enabled:
            event.guards = _enter_guards(span, counters, profiler)
    stack.append(event)
    if timeline is not None:
        timeline.begin(event, state)


def _leave(span: Span, kind: type[BaseException] | None) -> None:
    state = local.state
    stack = state.stack
    if not stack or stack[-1].owner is not span:
        now = clock.monotonic_ns()
        if not close_overlapping(state, lambda event: event.owner is span, now):
            return
    event = stack.pop()
    key = span.key
    outermost, within_column = True, False
    for around in stack:
        if around.key == key:
            outermost = False
        if around.has_column:
            within_column = True
    total = state.totals.get(key)
    if total is None:
        total = state.totals[key] = Total()
    column = span.column_us if outermost else None
    if column is not None:
        context = get_metrics_context()
        gathered = context if context.in_progress() else _runtime(event)
    end = clock.monotonic_ns()  # late, for the same reason
    took = end - event.start_ns
    if stack:
        stack[-1].inside_ns += took
    total.calls += 1
    total.durations_ns.append(took)
    if kind is not None:
        total.errors += 1
    if outermost:
        total.ns += took
    if column is not None:
        gathered.add_time(column, took // 1000)
        if not within_column and column != "duration_us":
            gathered.add_time("duration_us", took // 1000)
    if event.guards is not None or timeline is not None or event_log.current is not None:
        finish_event(event, end, state, kind)


def finish_event(
    event: OpenEvent, end_ns: int, state: ThreadState, kind: type[BaseException] | None = None
) -> None:
    """Tell the profiler, the timeline and the log that an event, off the stack now, has ended."""
    if event.guards is not None:
        for guard in reversed(event.guards):
            guard.__exit__(None, None, None)
    if timeline is not None:
        timeline.end(event, end_ns, state)
    if event_log.current is not None:
        event_log.write(
            SpanDone(
                time_ns=event.start_ns,
                thread=state.ident,
                compile_id=event.compile_id,
                name=event.name,
                duration_ns=end_ns - event.start_ns,
                depth=len(state.stack),
                key=None if event.key == event.name else event.key,
                is_backward=event.is_backward,
                error=None if kind is None else name_of(kind),
                data=make_plain_dict(event.logged),
            )
        )


def close_overlapping(
    state: ThreadState, is_wanted: Callable[[OpenEvent], bool], end_ns: int
) -> bool:
    """Bring the innermost wanted event to the top: what was opened after it ends with it.

    False where there is none: it was closed by an earlier repair, or before a fork or a reset.
    """
    stack = state.stack
    at = next((i for i in range(len(stack) - 1, -1, -1) if is_wanted(stack[i])), None)
    if at is None:
        level = logging.WARNING if stack else logging.DEBUG
        logger.log(level, "an event ended that is no longer open; its end is ignored")
        return False
    while len(stack) > at + 1:
        event = stack.pop()
        logger.warning(
            "%s was still open when an event around it ended, and ends with it", event.name
        )
        finish_event(event, end_ns, state)
    return True


def _runtime(event: OpenEvent) -> RuntimeMetricsContext:
    """The metrics of work outside a compile, which know what the first span there said."""
    runtime = get_runtime_metrics_context()
    if not runtime.in_progress():
        backward = event.is_backward
        runtime.start(
            compile_id=event.compile_id,
            is_runtime=True,
            is_forward=None if backward is None else not backward,
        )
    return runtime


def _bad_column(column: str) -> TelemetryError:
    if not column.endswith("_us"):
        return TelemetryError(
            f"column_us={column!r}: times are kept in microseconds, in columns whose names end "
            "in _us.",
            slug="column-unit",
        )
    return TelemetryError(
        f"column_us={column!r}: CompilationMetrics has no such field.", slug="column-unknown"
    )


# --- torch's profiler, where torch is loaded ------------------------------------------------------


class _Profiler(Protocol):
    _is_profiler_enabled: bool

    def record_function(self, name: str) -> AbstractContextManager[object]:
        """A named range."""


_profiler: _Profiler | None = None


def _find_profiler() -> _Profiler | None:
    global _profiler
    _profiler = sys.modules.get("torch.autograd.profiler")
    return _profiler


def _enter_guards(
    span: Span, counters: Sequence[str], profiler: _Profiler
) -> list[AbstractContextManager[object]] | None:
    guards: list[AbstractContextManager[object]] = []
    if profiler._is_profiler_enabled:
        guards.append(profiler.record_function(f"{span.event_name or span.key} (tripwire)"))
    if counters:
        monitor = sys.modules.get("torch.monitor") or sys.modules.get("torch._C._monitor")
        counter = getattr(monitor, "_WaitCounter", None)
        if counter is not None:
            guards += [counter(f"tripwire.wait_counter.{name}").guard() for name in counters]
    for guard in guards:
        guard.__enter__()
    return guards or None


# --- on and off -----------------------------------------------------------------------------------

_ON = Span.__enter__, Span.__exit__
_on = True


def is_enabled() -> bool:
    """Whether spans are measured."""
    return _on


def enable() -> None:
    """Measure spans from now on."""
    global _on
    _on = True
    _swap(*_ON)


def disable() -> None:
    """Measure no spans from now on. Those that are open are forgotten."""
    global _on
    _on = False
    # Builtin functions don't bind: both run without a Python frame and return something false.
    # 0.21 → 0.13 µs a span against methods that return; bench_telemetry.py, span off.
    _swap({}.clear, "".format)
    forget_open_events()


def _swap(enter: Callable[..., object], leave: Callable[..., object]) -> None:
    Span.__enter__ = enter  # type: ignore[method-assign, assignment]
    Span.__exit__ = leave  # type: ignore[method-assign, assignment]


if os.environ.get("TRIPWIRE_TELEMETRY") == "0":
    disable()
