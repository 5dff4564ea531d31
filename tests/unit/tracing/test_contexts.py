"""Contexts entered inside a traced function act inside the graph, and only there."""

import pytest
import torch
from support import check_traces, quiet_trace, refusal_of, run_with_torch
from torch.utils.checkpoint import checkpoint

import tripwire


def one(seed: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_(),)


def no_grad(x):
    with torch.no_grad():
        y = x * 2
    return x * y, y


@torch.no_grad()
def decorated(x):
    return x * 2


def enable_grad(x):
    with torch.no_grad():
        with torch.enable_grad():
            y = x * 2
        z = x * 3
    return y, z


def set_grad(x):
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(True)
    with torch.set_grad_enabled(False):
        z = y * x
    return y, z, x * z


def autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x
        with torch.autocast("cpu", enabled=False):
            z = x @ x
    return y, z, x @ x


def inference(x):
    with torch.inference_mode():
        y = x * 2
    return y.clone(), x * 3


@pytest.mark.parametrize("fn", [no_grad, decorated, enable_grad, set_grad, autocast, inference])
def test_contexts_inside_the_function_are_traced(fn) -> None:
    check_traces(fn, one)


def test_inference_tensors_come_out_as_inference_tensors() -> None:
    def f(x):
        with torch.inference_mode():
            return x * 2

    trace = quiet_trace(f, torch.ones(2))
    assert trace(torch.ones(2)).is_inference()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("fn", [no_grad, autocast, inference])
def test_a_graph_that_fails_inside_a_context_leaves_torch_as_it_was(fn) -> None:
    trace = quiet_trace(fn, *one(0))
    graph = trace.graph_module
    broken = [n for n in graph.graph.nodes if n.op == "call_method"][0]
    broken.target = "no_such_method"
    graph.recompile()
    with pytest.raises(AttributeError):
        trace(*one(1))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_inference_mode_enabled()
    with torch.autocast("cpu"):
        pass  # the cache is dropped at nesting 0, so nesting must be as it was
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_a_trace_with_contexts_refuses_to_run_under_another_state() -> None:
    trace = quiet_trace(no_grad, *one(0))
    with torch.no_grad(), pytest.raises(tripwire.InputMismatch, match="grad mode"):
        trace(*one(0))


def test_a_trace_without_contexts_runs_under_no_grad_too() -> None:
    trace = quiet_trace(lambda x: x * 2, *one(0))
    with torch.no_grad():
        assert not trace(*one(0)).requires_grad


def test_checkpoint_is_recorded_inline_and_marked() -> None:
    def f(x):
        y = checkpoint(lambda t: (t * 2).sin(), x, use_reentrant=False)
        z = checkpoint(torch.cos, y, use_reentrant=False)
        return y + z

    trace = check_traces(f, one)
    assert [row.facts.region for row in trace] == [None, 0, 0, 1, None]


def test_reentrant_checkpoint_is_refused() -> None:
    def f(x):
        return checkpoint(lambda t: t * 2, x, use_reentrant=True)

    assert refusal_of(f, *one(0)) == "reentrant-checkpoint"


def test_a_context_entered_before_and_left_inside_is_refused() -> None:
    context = torch.autocast("cpu")
    context.__enter__()
    left = []

    def f(x):
        context.__exit__(None, None, None)
        left.append(True)
        return x * 2

    try:
        assert refusal_of(f, torch.ones(2)) == "context-across-calls"
    finally:
        if not left:
            context.__exit__(None, None, None)


def test_torchs_state_left_changed_is_refused() -> None:
    def f(x):
        torch.set_default_dtype(torch.float64)
        return x * torch.ones(2)

    try:
        assert refusal_of(f, torch.ones(2)) == "torch-state-changed"
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_first_checkpoint_of_a_process_is_traced() -> None:
    """Its first use imports parts of torch whose functions are refused when a run calls them."""
    code = (
        "import torch, tripwire\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "f = lambda x: checkpoint(torch.sin, x, use_reentrant=False)\n"
        "print(tripwire.trace(f, torch.ones(2)).statistics().ops)"
    )
    assert run_with_torch(code) == "1"
