"""tripwire: a tracing compiler front end for PyTorch."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

from tripwire.imports import importing

if TYPE_CHECKING:
    from tripwire.api import (
        compile,
        record_block,
        record_call,
        record_on_error,
        replacing_torch_compile,
        trace,
        watch_torch_compile,
    )
    from tripwire.auditing.findings import Audit, Finding, Status
    from tripwire.auditing.judge import Auditor, audit
    from tripwire.backends.registry import list_backends
    from tripwire.dispatch.compiled import statistics
    from tripwire.dispatch.telling import reset
    from tripwire.errors import (
        BackendFailed,
        BadOption,
        BadRecord,
        CannotReplay,
        CannotTrace,
        InputMismatch,
        StateError,
        TelemetryError,
        TraceDiffers,
        TripwireError,
        WrongResult,
    )
    from tripwire.explaining import explain, preview
    from tripwire.recording.capture.failures import record_last
    from tripwire.recording.capture.record import (
        DummyModule,
        ExecutionRecord,
        ExecutionRecorder,
        ModuleRecord,
        load_record,
    )
    from tripwire.recording.replay.rerun import replay
    from tripwire.tracing import Trace, Tracer, TracerWarning
    from tripwire.validity import Cause
    from tripwire.writes import Change, Watch, watch

__all__ = [
    "Audit",
    "Auditor",
    "BackendFailed",
    "BadOption",
    "BadRecord",
    "CannotReplay",
    "CannotTrace",
    "Cause",
    "Change",
    "DummyModule",
    "ExecutionRecord",
    "ExecutionRecorder",
    "Finding",
    "InputMismatch",
    "ModuleRecord",
    "StateError",
    "Status",
    "TelemetryError",
    "Trace",
    "TraceDiffers",
    "Tracer",
    "TracerWarning",
    "TripwireError",
    "Watch",
    "WrongResult",
    "audit",
    "compile",
    "explain",
    "list_backends",
    "load_record",
    "preview",
    "record_block",
    "record_call",
    "record_last",
    "record_on_error",
    "replacing_torch_compile",
    "replay",
    "reset",
    "statistics",
    "trace",
    "watch",
    "watch_torch_compile",
]

# A record can be opened where torch isn't installed: names are imported when they are asked for.
_HOME = {
    "tripwire.api": (
        "compile",
        "record_block",
        "record_call",
        "record_on_error",
        "replacing_torch_compile",
        "trace",
        "watch_torch_compile",
    ),
    "tripwire.auditing.findings": ("Audit", "Finding", "Status"),
    "tripwire.auditing.judge": ("Auditor", "audit"),
    "tripwire.backends.registry": ("list_backends",),
    "tripwire.dispatch.compiled": ("statistics",),
    "tripwire.dispatch.telling": ("reset",),
    "tripwire.explaining": ("explain", "preview"),
    "tripwire.recording.capture.failures": ("record_last",),
    "tripwire.recording.capture.record": (
        "DummyModule",
        "ExecutionRecord",
        "ExecutionRecorder",
        "ModuleRecord",
        "load_record",
    ),
    "tripwire.recording.replay.rerun": ("replay",),
    "tripwire.tracing": ("Trace", "Tracer", "TracerWarning"),
    "tripwire.validity": ("Cause",),
    "tripwire.writes": ("Change", "Watch", "watch"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.metadata.version("tripwire")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():
        module = importlib.import_module(_MODULE_OF.get(name, "tripwire.errors"))
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
