"""Tracing: one real run of a callable becomes a graph that names its user's lines."""

from tripwire.ranges import Frame, SourceRange
from tripwire.reading.sources import Attr, Cell, Child, Global, Item, Local, Source, TypeOf
from tripwire.reading.tensors import TensorMeta
from tripwire.rulebook.refusals import Refusal
from tripwire.tracing.branches import Branch, TracerWarning
from tripwire.tracing.recorder import recording
from tripwire.tracing.result import Effect, Input, Row, Run, Trace, TraceStatistics
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
from tripwire.tracing.tracer import Tracer

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
    "TracerWarning",
    "TracingState",
    "TypeOf",
    "get_tracing_state",
    "get_value_trace",
    "recording",
    "set_tracing_state",
    "set_value_trace",
]
