"""Tracing: one real run of a callable becomes a graph that names its user's lines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tripwire.ranges import Frame, SourceRange
    from tripwire.reading.sources import Attr, Cell, Child, Global, Item, Local, Source, TypeOf
    from tripwire.reading.tensors import TensorMeta
    from tripwire.rulebook.refusals import Refusal
    from tripwire.tracing.branches import Branch
    from tripwire.tracing.recorder import recording
    from tripwire.tracing.result import Effect, Input, Row, Trace, TraceStatistics
    from tripwire.tracing.state import (
        Constant,
        NodeFacts,
        PythonCall,
        TracingState,
        get_tracing_state,
        get_value_trace,
        set_tracing_state,
        set_value_trace,
    )
    from tripwire.tracing.tracer import Run, Tracer

__all__ = [
    "Attr",
    "Branch",
    "Cell",
    "Child",
    "Constant",
    "Effect",
    "Frame",
    "Global",
    "Input",
    "Item",
    "Local",
    "NodeFacts",
    "PythonCall",
    "Refusal",
    "Row",
    "Run",
    "Source",
    "SourceRange",
    "TensorMeta",
    "Trace",
    "TraceStatistics",
    "Tracer",
    "TracingState",
    "TypeOf",
    "get_tracing_state",
    "get_value_trace",
    "recording",
    "set_tracing_state",
    "set_value_trace",
]

# `uses` serves where torch isn't installed: names are imported when they are asked for.
_HOME = {
    "tripwire.ranges": ("Frame", "SourceRange"),
    "tripwire.tracing.branches": ("Branch",),
    "tripwire.tracing.recorder": ("recording",),
    "tripwire.rulebook.refusals": ("Refusal",),
    "tripwire.tracing.result": ("Effect", "Input", "Row", "Trace", "TraceStatistics"),
    "tripwire.reading.sources": (
        "Attr",
        "Cell",
        "Child",
        "Global",
        "Item",
        "Local",
        "Source",
        "TypeOf",
    ),
    "tripwire.tracing.state": (
        "Constant",
        "NodeFacts",
        "PythonCall",
        "TracingState",
        "get_tracing_state",
        "get_value_trace",
        "set_tracing_state",
        "set_value_trace",
    ),
    "tripwire.tracing.tracer": ("Run", "Tracer"),
    "tripwire.reading.tensors": ("TensorMeta",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULE_OF[name])
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
