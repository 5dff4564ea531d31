"""What people know from torch's own tracer."""

from __future__ import annotations

import warnings

import torch

import tripwire
from tripwire.tracing import get_value_trace

X = torch.ones(3, 2)


def trace_for(function):
    return tripwire.trace(function, X)


def test_callers_of_trace_are_the_end_of_each_stack() -> None:
    def inner(x):
        return x + 1

    trace = trace_for(lambda x: inner(x) * 2)
    for row in trace.rows:
        if row.node.op.startswith("call"):
            functions = [frame.function.rpartition(".")[2] for frame in row.where.frames]
            assert functions[-1] != "<lambda>"
            at = functions.index("trace_for")
            assert functions[at - 1] == "<lambda>"
            assert functions[at + 1] == "test_callers_of_trace_are_the_end_of_each_stack"


def test_who_gets_the_trace_names_no_value() -> None:
    trace = trace_for(lambda x: x + 1)
    assert "trace" not in {node.name for node in trace.graph.nodes}


def test_asking_for_a_value_trace_is_no_branch() -> None:
    def asking(x):
        y = x + 1
        assert get_value_trace(y).name == "y"
        return y * 2

    assert not trace_for(asking).branches


def test_a_filter_for_torchs_tracer_warnings_holds_for_ours() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        trace_for(lambda x: x * int(x.sum()))
    assert issubclass(tripwire.TracerWarning, torch.jit.TracerWarning)
