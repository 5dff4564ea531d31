"""tripwire: a tracing compiler front end for PyTorch."""

from tripwire.api import compile, statistics, trace
from tripwire.errors import (
    BackendFailed,
    BadOption,
    CannotTrace,
    InputMismatch,
    StateError,
    TraceDiffers,
    TracerWarning,
    TripwireError,
)
from tripwire.tracing import Trace, Tracer
from tripwire.validity import Cause, Change, Watch, watch

__all__ = [
    "BackendFailed",
    "BadOption",
    "CannotTrace",
    "Cause",
    "Change",
    "InputMismatch",
    "StateError",
    "Trace",
    "TraceDiffers",
    "Tracer",
    "TracerWarning",
    "TripwireError",
    "Watch",
    "compile",
    "statistics",
    "trace",
    "watch",
]
