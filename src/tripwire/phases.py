"""Phases: the parts of tripwire's own work, as spans, and the figures of each compile."""

from __future__ import annotations

from tripwire.telemetry.contexts import get_metrics_context, get_runtime_metrics_context
from tripwire.telemetry.spans import Span, timed


def _phase(name: str, column: str | None = None, is_backward: bool | None = None) -> Span:
    return timed(name, column_us=column or f"{name}_us", is_backward=is_backward)


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


TRACE = _phase("trace")  # one observed run, from its arguments to a Trace
OBSERVE = _phase("observe")  # the run itself
PLAN = _phase("plan")  # guards and wires
ARM = _phase("arm")  # sentries
BACKEND = _phase("backend")
FIRST_RUN = _phase("first_run")  # of compiled code
RETIRE = _phase("retire")  # wires that were touched are compared
RECORD = _phase("record")  # a failing call is written
# Parts of what a back end takes.
CACHE_GET = _phase("cache_get", "cache_get_time_us")  # compiled code out of the store
CACHE_PUT = _phase("cache_put", "cache_put_time_us")
BACKWARD = _phase("backward", "backward_time_us", is_backward=True)  # the graph of a backward
