"""What docs/trace.md says of other tracers is true of the torch that is installed."""

import warnings

import pytest
import torch
from support import quiet_trace, refusal_of
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

X = torch.tensor([1.0, 2.0])

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return nn.functional.layer_norm(self.layer(x), (2,))


def from_nowhere():
    hidden = iter([torch.tensor([10.0, 20.0]), torch.tensor([30.0, 40.0])])
    return lambda x: x + next(hidden)


def branching(x):
    return x * 2 if x.sum() > 0 else x


def test_a_tensor_from_nowhere_is_refused_where_others_make_it_a_constant() -> None:
    assert refusal_of(from_nowhere(), X) == "unknown-origin"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jit = torch.jit.trace(from_nowhere(), X, check_trace=False)
    assert jit(X * 0).tolist() == [10, 20]  # a constant
    assert make_fx(from_nowhere())(X)(X * 0).tolist() == [10, 20]  # a constant


def test_a_value_taken_by_python_is_a_branch_where_others_warn_or_raise() -> None:
    assert len(quiet_trace(branching, X).branches) == 1
    with pytest.warns(torch.jit.TracerWarning):
        torch.jit.trace(branching, X, check_trace=False)
    with pytest.raises(RuntimeError):
        make_fx(branching, tracing_mode="fake")(X)
    module = type("Branching", (nn.Module,), {"forward": lambda self, x: branching(x)})()
    with pytest.raises(Exception, match="data-dependent|Dynamic control flow|branch"):
        torch.export.export(module, (X,), strict=False)


def test_the_graph_has_calls_of_torch_where_others_have_operators() -> None:
    net = Net()
    ours = {str(row.node.target) for row in quiet_trace(net, X[None])}
    assert any("layer_norm" in target for target in ours)
    lowered = {str(node.target) for node in make_fx(net)(X[None]).graph.nodes}
    assert "aten.native_layer_norm.default" in lowered or "aten.layer_norm.default" in lowered
    assert any(target.startswith("aten.") for target in lowered)


def test_parameters_are_inputs_where_others_make_them_constants() -> None:
    net = Net()
    sources = {str(wanted.source) for wanted in quiet_trace(net, X[None]).inputs}
    assert "L['self'].layer.weight" in sources
    constants = [n for n in make_fx(net)(X[None]).graph.nodes if n.op == "get_attr"]
    assert constants
    exported = torch.export.export(net, (X[None],), strict=False)
    assert "layer.weight" in exported.graph_signature.parameters
