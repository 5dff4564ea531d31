"""The public functions. Readers start here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tripwire.tracing import Trace, Tracer


def trace(fn_or_module: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Trace:
    """Run a callable once, for real, and return what it computed as a graph.

    Arguments go to the callable as they are. `Tracer` takes the options.
    """
    return Tracer().trace_call(fn_or_module, args, kwargs, stacklevel=3)
