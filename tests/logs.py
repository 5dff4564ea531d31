"""What tests write into logs: a header, and an event of each kind."""

from __future__ import annotations

from tripwire.telemetry import CompilationMetrics
from tripwire.telemetry.schema import (
    MAJOR,
    CompileFinished,
    CompileStarted,
    Counts,
    Event,
    GraphCaptured,
    GraphNode,
    GuardsBuilt,
    Header,
    Instant,
    ReadRow,
    ReadsSeen,
    Recompiled,
    RecordWritten,
    Retired,
    RunRefused,
    RuntimeMetrics,
    SpanDone,
    ThreadNamed,
    WiresArmed,
)

NAME = "tripwire-h-7-abc.jsonl"  # the file that this header's process would write


def build_header(**more: object) -> Header:
    """A process's header; `more` are fields that aren't as usual."""
    fields = {"major": MAJOR, "minor": 0, "host": "h", "pid": 7, "parent_pid": 1, "token": "abc"}
    clocks = {"start_wall_ns": 1000, "start_monotonic_ns": 0}
    return Header(**{**fields, **clocks, "python": "3", **more})


_ROW = ReadRow(source="L['x']", seen="1", file="f.py", line=3, text="x")
_NODE = GraphNode(name="a", op="call_function", target="F.linear", inputs=("b",), file="f.py")
_STAMP = {"time_ns": 9, "thread": 1, "compile_id": "0/0"}
EVENTS: list[Event] = [
    ThreadNamed(**_STAMP, name="main"),
    SpanDone(**_STAMP, name="trace", duration_ns=5, depth=1, data={"x": [1, None]}, error="E"),
    Instant(**_STAMP, name="begins", data={"a": [1.5, {"b": None}]}),
    Counts(**_STAMP, groups={"frames": {"hit": 3}}),
    CompileStarted(**_STAMP, function="f", file="f.py", line=1, backend="inductor"),
    CompileFinished(**_STAMP, metrics=CompilationMetrics(co_name="f", duration_us=5, trace_us=3)),
    RuntimeMetrics(**_STAMP, metrics=CompilationMetrics(start_time_us=5, is_runtime=True)),
    GraphCaptured(**_STAMP, nodes=(_NODE, _NODE)),
    GuardsBuilt(**_STAMP, source="def guard(): ...", count=3),
    WiresArmed(**_STAMP, wires=(_ROW,)),
    ReadsSeen(**_STAMP, reads=(_ROW, _ROW)),
    Retired(**_STAMP, source="G['k']", old="1", new="2", file="f.py", line=3, function="main"),
    RunRefused(**_STAMP, slug="s", reason="r", function="f", excerpt="time()\n~~~~^^"),
    RecordWritten(**_STAMP, path="/x.rec", function="f", exception="E"),
    Recompiled(**_STAMP, function="f", reasons=("x: 2 → 3",), user_contexts=("u",)),
]
