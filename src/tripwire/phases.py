"""Phases: the parts of tripwire's own work, as spans.

Telemetry needs msgspec. Where that isn't installed tripwire compiles all the same, unmeasured.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext

HAS_TELEMETRY = importlib.util.find_spec("msgspec") is not None


def _phase(name: str) -> AbstractContextManager[None]:
    if not HAS_TELEMETRY:
        return nullcontext()
    from tripwire.telemetry.spans import timed

    return timed(name, column_us=f"{name}_us")


def current_compile() -> str | None:
    """The id of the compile that is going on in this thread."""
    if not HAS_TELEMETRY:
        return None
    from tripwire.telemetry.compiles import current_compile_id

    return current_compile_id()


TRACE = _phase("trace")  # one observed run, from its arguments to a Trace
OBSERVE = _phase("observe")  # the run itself
PLAN = _phase("plan")  # guards and wires
ARM = _phase("arm")  # sentries
BACKEND = _phase("backend")
FIRST_RUN = _phase("first_run")  # of compiled code
RETIRE = _phase("retire")  # wires that were touched are compared
RECORD = _phase("record")  # a failing call is written
