"""A custom autograd function is one node, and its own backward runs, also twice."""

import torch
from support import check_traces, quiet_trace

from tripwire.tracing.state import FACTS


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x**3 * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 30 * x**2 * ctx.factor, None  # ten times too much, so that it shows


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(x, y=2.0):
        return x * y, x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.y = inputs[1]

    @staticmethod
    def backward(ctx, a, b):
        return a * ctx.y + b, None


cube = Cube.apply  # a name bound before any trace


def points(seed: int) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_(),)


def test_apply_is_one_node_and_its_own_backward_runs() -> None:
    trace = check_traces(lambda x: Cube.apply(x, 2.0) + 1, points)
    row = next(row for row in trace if row.facts.python)
    assert row.facts.python.function is Cube
    assert row.facts.python.kinds == "dc"
    assert row.facts.python.scalars == (2.0,)
    assert trace.statistics().ops == 2


def test_an_apply_bound_before_the_trace_is_seen() -> None:
    trace = check_traces(lambda x: cube(x, 1.0), points)
    assert [row.facts.python is not None for row in trace] == [False, True]


def test_second_order_gradients_equal_eagers() -> None:
    trace = quiet_trace(lambda x: Cube.apply(x, 2.0).sum(), *points(0))
    for run in (trace, lambda x: Cube.apply(x, 2.0).sum()):
        (x,) = points(3)
        (first,) = torch.autograd.grad(run(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(first, 60 * x**2)
        torch.testing.assert_close(second, 120 * x)


def test_several_outputs_and_setup_context() -> None:
    trace = check_traces(lambda x: TwoOutputs.apply(x), points)
    assert trace.statistics().ops == 3  # the call and its two parts


def test_what_runs_inside_forward_is_not_recorded() -> None:
    trace = quiet_trace(lambda x: Cube.apply(x, 2.0), *points(0))
    assert [n.op for n in trace.graph.nodes] == ["placeholder", "call_function", "output"]
    assert trace.graph.find_nodes(op="placeholder")[0].meta[FACTS].value.shape == (5,)
