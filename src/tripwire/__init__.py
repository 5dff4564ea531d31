"""tripwire: a tracing compiler front end for PyTorch."""

from tripwire.api import trace
from tripwire.errors import (
    CannotTrace,
    InputMismatch,
    StateError,
    TraceDiffers,
    TracerWarning,
    TripwireError,
)
from tripwire.tracing import Trace, Tracer

__all__ = [
    "CannotTrace",
    "InputMismatch",
    "StateError",
    "Trace",
    "TraceDiffers",
    "Tracer",
    "TracerWarning",
    "TripwireError",
    "trace",
]
