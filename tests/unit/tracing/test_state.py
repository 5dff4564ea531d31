"""TracingState and its neighbours, used by hand."""

import threading

import pytest
import torch
from support import quiet_trace

import tripwire
from tripwire import StateError
from tripwire.tracing import (
    TracingState,
    get_tracing_state,
    get_value_trace,
    recording,
    set_tracing_state,
    set_value_trace,
)

X = torch.ones(2)


def started() -> TracingState:
    state = TracingState()
    set_value_trace(X, state.graph().placeholder("x"), state)
    return state


def test_a_state_records_what_runs_under_it() -> None:
    state = started()
    with recording(state):
        y = X + 1
        z = y.sin()
    assert get_value_trace(z, state).target == "sin"
    assert get_value_trace(z, state).args == (get_value_trace(y, state),)
    assert "call_method[target=sin]" in str(state)
    assert repr(state) == "<TracingState: 3 nodes, 3 live values, scope ''>"
    assert get_tracing_state() is None


def test_no_state_pauses_recording() -> None:
    state = started()
    with recording(state):
        set_tracing_state(None)
        X + 1
        set_tracing_state(state)
        X * 2
    assert [n.target for n in state.graph().nodes] == ["x", "mul"]


def test_scopes_open_and_close() -> None:
    state = started()
    state.push_scope("outer")
    state.push_scope("inner")
    assert state.current_scope() == "inner"
    state.pop_scope()
    state.push_scope("inner")
    assert state.current_scope() == "inner@1"
    state.pop_scope()
    state.pop_scope()
    assert state.current_scope() == ""
    with pytest.raises(StateError) as caught:
        state.pop_scope()
    assert caught.value.slug == "no-open-scope"


def test_nodes_carry_the_scope_that_was_open() -> None:
    state = started()
    with recording(state):
        state.push_scope("block")
        y = X + 1
        state.pop_scope()
    assert str(get_value_trace(y, state).meta["tripwire"].scope) == "block"


def test_another_graph_can_be_set() -> None:
    state = started()
    graph = torch.fx.Graph()
    state.set_graph(graph)
    assert state.graph() is graph
    set_value_trace(X, graph.placeholder("other"), state)
    with recording(state):
        X + 1
    assert [n.op for n in graph.nodes] == ["placeholder", "call_method"]


def test_the_current_state_is_found_inside_a_trace() -> None:
    found = []

    def f(x):
        state = get_tracing_state()
        found.append((state.current_scope(), get_value_trace(x).name))
        y = x + 1
        set_value_trace(y, get_value_trace(x))  # from now on x stands for y
        return y * 2

    trace = quiet_trace(f, X)
    assert found == [("", "x")]
    assert trace.find("mul").node.args[0].name == "x"


def test_unknown_tensors_have_no_value_trace() -> None:
    with pytest.raises(StateError) as caught:
        get_value_trace(torch.ones(3), started())
    assert caught.value.slug == "no-value-trace"


def test_without_a_state_there_is_an_error() -> None:
    with pytest.raises(StateError) as caught:
        get_value_trace(X)
    assert caught.value.slug == "no-tracing-state"


def test_a_state_is_current_in_one_thread_only() -> None:
    seen = []
    with recording(started()):
        thread = threading.Thread(target=lambda: seen.append(get_tracing_state()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_values_are_forgotten_with_their_tensors() -> None:
    state = started()
    with recording(state):
        for _ in range(100):
            X + 1
    assert len(state.values) == 1


# --- force_outplace ----------------------------------------------------------------------------


def test_force_outplace_records_the_out_of_place_form() -> None:
    def f(x):
        x.add_(1)
        x *= 2
        x.zero_()
        return x.sigmoid_() + x.relu_()

    trace = tripwire.Tracer(force_outplace=True).trace(f, torch.ones(2))
    targets = [str(n.target) for n in trace.graph.nodes if n.op.startswith("call")]
    assert targets[:2] == ["add", "mul"]
    assert not any(t.endswith("_") for t in targets)
    x = torch.ones(2)
    torch.testing.assert_close(trace(x), f(torch.ones(2)))
    assert x.tolist() == [1, 1]  # left alone
    assert not trace.inputs[0].written


@pytest.mark.parametrize(
    ("slug", "fn"),
    [
        ("no-outplace-form", lambda x: x.normal_()),
        ("no-outplace-form", lambda x: torch.add(x, 1, out=x)),
        ("no-outplace-form", lambda x: x.bernoulli_()),
        ("no-outplace-form", lambda x: x.resize_(1)),
        ("no-outplace-form", lambda x: torch.ops.aten.add_(x, 1)),
        ("outplace-alias", lambda x: (x[0].add_(1), x)[1]),
    ],
)
def test_force_outplace_refuses_what_would_change_meaning(slug, fn) -> None:
    with pytest.raises(tripwire.CannotTrace) as caught:
        tripwire.Tracer(force_outplace=True).trace(fn, torch.ones(2))
    assert caught.value.slug == slug


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.clone().eq_(1.0),
        lambda x: x.clone().logical_not_(),
        lambda x: x.clone().add_(torch.ones(2, dtype=torch.float64)),
        lambda x: x.clone().fill_(3),
        lambda x: (x * 1).zero_(),
    ],
)
def test_force_outplace_keeps_dtypes(fn) -> None:
    trace = tripwire.Tracer(force_outplace=True).trace(fn, torch.ones(2, requires_grad=True))
    for x in (torch.ones(2), torch.ones(2, requires_grad=True)):
        expected, got = fn(x), trace(x)
        torch.testing.assert_close(got, expected)
        assert got.dtype == expected.dtype


def test_force_outplace_keeps_gradients() -> None:
    def f(x):
        return (x * 1).zero_() + (x * 2).fill_(3) + (x * 3).mul_(x)

    trace = tripwire.Tracer(force_outplace=True).trace(f, torch.ones(2, requires_grad=True))
    for run in (f, trace):
        x = torch.full((2,), 2.0, requires_grad=True)
        (grad,) = torch.autograd.grad(run(x).sum(), x)
        assert grad.tolist() == [12, 12]


# --- check -------------------------------------------------------------------------------------


def test_check_accepts_a_function_of_its_inputs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout())
    tripwire.Tracer(check=True).trace(model, torch.randn(4, 2))
    assert int(model[1].num_batches_tracked) == 1  # the check's own runs are undone

    def bump(x):
        return x.add_(1)

    x = torch.ones(2)
    tripwire.Tracer(check=True).trace(bump, x)
    assert x.tolist() == [2, 2]


def test_check_finds_another_graph() -> None:
    calls = []

    def f(x):
        calls.append(1)
        return x * len(calls)

    with pytest.raises(tripwire.TraceDiffers, match="another graph") as caught:
        quiet_trace(f, X, tracer=tripwire.Tracer(check=True))
    assert caught.value.slug == "graph-differs"


def test_check_finds_another_result() -> None:
    class Hidden(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            Hidden.calls += 1
            return x + Hidden.calls

    with pytest.raises(tripwire.TraceDiffers) as caught:
        quiet_trace(lambda x: Hidden.apply(x), X, tracer=tripwire.Tracer(check=True))
    assert caught.value.slug == "result-differs"


def test_reads_show_the_users_names_before_torchs() -> None:
    module = torch.nn.Linear(2, 2)
    module.gain = 2.0
    trace = tripwire.trace(lambda x: module(x) * module.gain, torch.ones(2))
    sources = [str(read.source) for read in trace.reads]
    torchs = [source.startswith(("G[torch]", "T[")) for source in sources]
    assert "C['module'].gain" in sources
    assert torchs == sorted(torchs)
    assert any(torchs)
