"""Compiles: the block that one compile runs in, its phases, and texts that users add to it.

Inside it spans and figures belong to that compile; at its end they are one `CompilationMetrics`.
The time that no span inside claims is a figure of its own. When something is compiled again, hooks
of the user's add a short text that a compiler can't know, such as the epoch.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from tripwire.errors import BadOption
from tripwire.telemetry import clock, spans
from tripwire.telemetry import log as event_log
from tripwire.telemetry.contexts import (
    MetricsContext,
    get_metrics_context,
    get_runtime_metrics_context,
)
from tripwire.telemetry.schema import CompileStarted
from tripwire.telemetry.spans import timed
from tripwire.telemetry.threads import local

logger = logging.getLogger("tripwire.telemetry")

_frames = itertools.count()


class CompileId(Struct, frozen=True, order=True):
    """The callable's number in this process, and the number of its compile: `3/1`."""

    frame_id: int
    frame_compile_id: int = 0

    def __str__(self) -> str:
        return f"{self.frame_id}/{self.frame_compile_id}"

    @classmethod
    def find(cls, text: str | None) -> CompileId | None:
        """The id that a text names, or None."""
        frame, _, compile_ = (text or "").partition("/")
        if not (frame.isdecimal() and compile_.isdecimal()):
            return None
        return cls(int(frame), int(compile_))


def new_frame_id() -> int:
    """A number for a callable that is compiled for the first time."""
    return next(_frames)


def current_compile_id() -> str | None:
    """The id of the compile that is going on in this thread."""
    return local.state.compile_id


@contextmanager
def compiling(
    compile_id: CompileId,
    *,
    function: str,
    file: str = "",
    line: int = 0,
    backend: str | None = None,
    **known: object,
) -> Iterator[MetricsContext]:
    """What runs inside is one compile; nested blocks belong to the outermost.

    known: more of its metrics.
    """
    if not spans.is_enabled():
        with MetricsContext(lambda given: None) as nobodys:
            yield nobodys
        return
    state = local.state
    context = get_metrics_context()
    if context.in_progress():
        with context:
            yield context
        return
    begin_log_ns = _log_ns()
    with context:
        context.update(
            {
                "compile_id": str(compile_id),
                "co_name": function,
                "co_filename": file,
                "co_firstlineno": line,
                "backend": backend,
                **known,
            }
        )
        collector = _CollectorClock()
        is_forward = known.get("is_forward")
        is_backward = None if is_forward is None else not is_forward
        root = timed("compile", column_us="duration_us", is_backward=is_backward)
        opened = None
        try:
            state.compile_id = str(compile_id)
            event_log.emit(
                CompileStarted,
                function=function,
                file=file,
                line=line,
                backend=backend,
                is_backward=bool(is_backward),
            )
            gc.callbacks.append(collector)
            with root:
                opened = state.stack[-1] if state.stack else None
                yield context
        finally:
            state.compile_id = None
            if collector in gc.callbacks:
                gc.callbacks.remove(collector)
            duration = context.get("duration_us")
            if opened is not None and isinstance(duration, int):
                free = max(0, duration - opened.inside_ns // 1000)
                context.set("unattributed_us", free, overwrite=True)
            context.set("gc_time_us", collector.ns // 1000, overwrite=True)
            context.set("logging_overhead_us", (_log_ns() - begin_log_ns) // 1000, overwrite=True)


class _CollectorClock:
    """Adds up what the garbage collector takes in one thread."""

    def __init__(self) -> None:
        self.ns = 0
        self._thread = threading.get_ident()
        self._begin: int | None = None

    def __call__(self, phase: str, info: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._begin = clock.monotonic_ns()
        elif self._begin is not None:
            self.ns += clock.monotonic_ns() - self._begin
            self._begin = None


def _log_ns() -> int:
    return event_log.current.spent_ns if event_log.current is not None else 0


# --- the phases of a compile, and its figures ---


def note_figures(**figures: object) -> None:
    """Say what figures are of the compile that is going on in this thread; None says nothing."""
    context = get_metrics_context()
    if context.in_progress():
        known = {name: value for name, value in figures.items() if value is not None}
        context.update(known, overwrite=True)


def add_figures(**amounts: int) -> None:
    """Add to figures of the compile that goes on in this thread, or of the runtime metrics."""
    context = get_metrics_context()
    for name, amount in amounts.items():
        if context.in_progress():
            context.increment(name, amount)
        else:
            get_runtime_metrics_context().increment(name, amount, {"is_runtime": True})


TRACE = timed("trace", column_us="trace_us")  # one observed run, from its arguments to a Trace
OBSERVE = timed("observe", column_us="observe_us")  # the run itself
PLAN = timed("plan", column_us="plan_us")  # guards and wires
ARM = timed("arm", column_us="arm_us")  # sentries
BACKEND = timed("backend", column_us="backend_us")
# Of compiled code.
FIRST_RUN = timed("first_run", column_us="first_run_us", is_backward=False)
RETIRE = timed("retire", column_us="retire_us")  # wires that were touched are compared
RECORD = timed("record", column_us="record_us")  # a failing call is written
# Parts of what a back end takes.
CACHE_GET = timed("cache_get", column_us="cache_get_time_us")  # compiled code out of the store
CACHE_PUT = timed("cache_put", column_us="cache_put_time_us")
# The graph of a backward.
BACKWARD = timed("backward", column_us="backward_time_us", is_backward=True)


# --- what users say of a recompile ----------------------------------------------------------------

LONGEST_CONTEXT = 256  # characters

Hook = Callable[[], str]

_hooks: tuple[Hook, ...] = ()


def register_hook_for_recompile_user_context(hook: Hook) -> None:
    """Ask `hook` at each recompile; of its text 256 characters are kept.

    A hook that raises is dropped, and logged once.
    """
    global _hooks
    if not callable(hook):
        raise BadOption(
            f"A hook for recompiles is a function without arguments that returns a text, not "
            f"{hook!r}.",
            slug="bad-option",
        )
    _hooks = (*_hooks, hook)


def get_hook_for_recompile_user_context() -> list[Hook] | None:
    """The hooks, or None where there are none."""
    return list(_hooks) or None


def reset_recompile_user_contexts() -> None:
    """Remove all hooks."""
    global _hooks
    _hooks = ()


def collect_user_contexts() -> tuple[str, ...]:
    """What the hooks say now."""
    global _hooks
    texts = []
    for hook in _hooks:
        try:
            texts.append(str(hook())[:LONGEST_CONTEXT])
        except Exception:
            _hooks = tuple(kept for kept in _hooks if kept is not hook)
            logger.exception("%r raised, and is no longer asked about recompiles", hook)
    return tuple(texts)
