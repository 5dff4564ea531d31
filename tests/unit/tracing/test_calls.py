"""Every kind of torch call is recorded; on other inputs the graph does what the function does."""

import operator

import pytest
import torch
from support import check_traces, quiet_trace, refusal_of
from torch import nn
from torch.nn import functional as F

import tripwire
from tripwire import InputMismatch


def one(seed: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_(),)


def two(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return one(seed) + one(seed + 100)


def plain(seed: int) -> tuple[torch.Tensor]:
    return (one(seed)[0].detach(),)


FUNCTIONS = {
    "function": lambda x: torch.sin(x),
    "method": lambda x: x.cos(),
    "operators": lambda x: (1 - x) * 2 / (x**2 + 3) - x @ x,
    "reflected operators": lambda x: 2 ** (1 / (3 + x.abs())),
    "comparison": lambda x: torch.where(x > 0, x, -x),
    "bitwise": lambda x: ~(x > 0) & (x < 1) | (x > 2),
    "property T": lambda x: x.T,
    "property mT": lambda x: x.mT,
    "property real": lambda x: torch.complex(x, x).real + torch.complex(x, x).imag,
    "property data": lambda x: x.data * 2,
    "index": lambda x: x[0] + x[:, 1] + x[..., -1] + x[1:3, None].sum(),
    "index by tensor": lambda x: x[torch.tensor([0, 2])],
    "index by mask": lambda x: x[x > -100].sum(),
    "view": lambda x: x.view(2, 8).transpose(0, 1).reshape(-1)[3:],
    "factory": lambda x: torch.zeros(4) + torch.ones_like(x) + x.new_full((4,), 3.0),
    "arange": lambda x: torch.arange(4) * x,
    "tensor literal": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "random": lambda x: x + torch.rand(4, 4) + torch.randn_like(x) + F.dropout(x, 0.5),
    "multiple outputs": lambda x: x.max(dim=0),
    "unpacked outputs": lambda x: sum(x.split([1, 3], dim=1)[0].unbind(0)),
    "one of many outputs": lambda x: torch.topk(x, 2).values,
    "nested lists": lambda x: torch.stack([x, torch.cat([x[:2], x[2:]])]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "functional": lambda x: F.layer_norm(F.gelu(x), (4,)),
    "loss": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "aten overload": lambda x: torch.ops.aten.mul.Tensor(x, x),
    "aten packet": lambda x: torch.ops.aten.add(x, x),
    "dtype and device": lambda x: x.to(torch.float64).to("cpu").to(x.dtype),
    "keyword arguments": lambda x: torch.sum(input=x, dim=1, keepdim=True),
    "iteration": lambda x: sum(row * i for i, row in enumerate(x)),
    "nan and inf": lambda x: x.masked_fill(x > 0, float("-inf")).nan_to_num(nan=float("nan")),
    "complex argument": lambda x: (x * 1j).abs(),
    "double where": lambda x: torch.where(torch.isnan(x), 0.0, x),
    "out argument": lambda x: torch.add(x.detach(), 1, out=torch.empty(4, 4)),
    "linalg": lambda x: torch.linalg.norm(x, dim=1),
    "fft": lambda x: torch.fft.rfft(x).real,
    "deepcopy": lambda x: __import__("copy").deepcopy(x.detach()) + 1,
    "parameter made inside": lambda x: nn.Parameter(x.detach() * 2) * x,
    "subclass": lambda x: x.as_subclass(torch.Tensor) * 2,
    "named result": lambda x: torch.linalg.slogdet(x).logabsdet,
    "scan": lambda x: torch.cumsum(x, 0) + torch.cummax(x, 1).values,
    "scatter": lambda x: torch.zeros(4, 4).scatter_add(0, torch.zeros(4, 4, dtype=torch.long), x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graph_does_what_the_function_does(name: str) -> None:
    trace = check_traces(FUNCTIONS[name], one)
    assert trace.statistics().ops > 0


IN_PLACE = {
    "method": lambda x: x.add_(1).mul_(2),
    "operator": lambda x: operator.imul(x, 3),
    "item assignment": lambda x: operator.setitem(x, 0, 5.0) or x,
    "item assignment by tensor": lambda x: operator.setitem(x, x > 0, 0.0) or x,
    "on a view": lambda x: x[1].fill_(9).sum(),
    "base read after a view changed": lambda x: (x.view(-1)[2:4].zero_(), x.clone())[1],
    "out": lambda x: torch.add(x, 1, out=x),
    "functional": lambda x: F.relu(x, inplace=True),
    "on an intermediate": lambda x: (x * 2).add_(1).sigmoid_(),
    "copy": lambda x: x.copy_(torch.ones(4, 4)),
    "index": lambda x: x.index_add_(0, torch.tensor([0]), torch.ones(1, 4)),
    "random": lambda x: x.normal_(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_calls_change_the_same_tensors(name: str) -> None:
    trace = check_traces(IN_PLACE[name], plain)
    assert trace.inputs[0].written == (name != "on an intermediate")


def test_writes_through_data_are_seen_though_they_count_no_version() -> None:
    def f(x):
        x.data.add_(1)
        return x * 2

    trace = check_traces(f, plain)
    assert trace.inputs[0].written


def test_batch_norm_updates_its_buffers_on_every_call_of_the_graph() -> None:
    model = nn.BatchNorm1d(4)
    trace = quiet_trace(model, torch.randn(8, 4))
    assert int(model.num_batches_tracked) == 1
    trace(torch.randn(8, 4))
    assert int(model.num_batches_tracked) == 2
    written = {str(i.source) for i in trace.inputs if i.written}
    assert written == {
        "L['self'].running_mean",
        "L['self'].running_var",
        "L['self'].num_batches_tracked",
    }


def test_batch_norm_writes_nothing_in_eval_mode() -> None:
    trace = quiet_trace(nn.BatchNorm1d(4).eval(), torch.randn(8, 4))
    assert not any(wanted.written for wanted in trace.inputs)


def test_an_input_returned_is_the_same_object() -> None:
    def f(x, y):
        return y, x.add_(1), x

    trace = check_traces(f, lambda s: plain(s) + plain(s + 1))
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    got = trace(x, y)
    assert got[0] is y
    assert got[1] is x
    assert got[2] is x


def test_outputs_that_share_storage_share_it() -> None:
    def f(x):
        y = x * 2
        return y, y[0], y.T

    got = check_traces(f, plain)(torch.ones(4, 4))
    pointers = {t.untyped_storage().data_ptr() for t in got}
    assert len(pointers) == 1
    got[1].zero_()
    assert got[0][0].sum() == 0


def test_a_tensor_returned_twice_is_one_object() -> None:
    def f(x):
        y = x + 1
        return [y, {"again": y}]

    got = check_traces(f, plain)(torch.ones(4, 4))
    assert got[0] is got[1]["again"]


def test_gradients_written_by_backward_inside_the_function() -> None:
    def f(x):
        y = (x * x).sum()
        y.backward()
        return x.grad * 2

    trace = check_traces(f, one, grads=False)
    x = one(5)[0]
    trace(x)
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_gradients_taken_inside_the_function_are_traced() -> None:
    def f(x):
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return g * x

    check_traces(f, one)


def test_custom_operators_are_recorded() -> None:
    @torch.library.custom_op("tripwire_tests::scale", mutates_args=())
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @torch.library.custom_op("tripwire_tests::bump_", mutates_args=("x",))
    def bump_(x: torch.Tensor) -> None:
        x += 1

    def f(x):
        bump_(x)
        return scale(x, 2.0) + torch.ops.tripwire_tests.scale(x, 3.0)

    trace = check_traces(f, plain)
    assert trace.inputs[0].written
    targets = [str(row.node.target) for row in trace]
    assert targets.count("tripwire_tests.scale.default") == 1
    assert "tripwire_tests.bump_.default" in targets


def test_scripted_functions_are_one_node() -> None:
    def double(x):
        return x * 2

    scripted = torch.jit.script(double)
    trace = check_traces(lambda x: scripted(x) + 1, one)
    assert trace.statistics().ops == 2


def test_recurrent_modules_and_attention_trace_whole() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True)
    check_traces(lstm, lambda s: (one(s)[0].reshape(2, 2, 4),))
    attention = nn.MultiheadAttention(4, 2).eval()
    check_traces(attention, lambda s: (one(s)[0].unsqueeze(1),) * 3)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    check_traces(encoder, lambda s: (one(s)[0].unsqueeze(1),))


def test_numpy_scalars_and_arrays_as_constants() -> None:
    np = pytest.importorskip("numpy")
    weights = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
    trace = check_traces(lambda x: x * torch.tensor(weights) * np.float64(2), one)
    weights[0] = 99  # the trace keeps its own copy
    check = torch.ones(4, 4)
    assert float(trace(check)[0, 0]) == 2.0
    assert len(trace.constants) >= 1


def draw(x, generator):
    return x + torch.rand(4, 4, generator=generator)


def test_a_generator_that_came_in_advances_with_every_call() -> None:
    generator = torch.Generator().manual_seed(0)
    zeros = torch.zeros(4, 4)
    trace = quiet_trace(draw, zeros, generator)
    generator.manual_seed(3)
    expected = draw(zeros, generator)
    generator.manual_seed(3)
    torch.testing.assert_close(trace(zeros, generator), expected, rtol=0, atol=0)
    assert not torch.equal(trace(zeros, generator), expected)


def test_another_generator_is_not_taken_for_the_first() -> None:
    trace = quiet_trace(draw, torch.zeros(4, 4), torch.Generator())
    with pytest.raises(InputMismatch) as caught:
        trace(torch.zeros(4, 4), torch.Generator())
    assert caught.value.slug == "input-structure"
    source = torch.Generator()

    def f(x):
        return draw(x, source)

    trace = quiet_trace(f, torch.zeros(4, 4))
    source = torch.Generator()
    with pytest.raises(InputMismatch) as caught:
        trace(torch.zeros(4, 4))
    assert caught.value.slug == "input-object"


def test_a_generator_made_by_the_run_is_refused() -> None:
    def f(x):
        return draw(x, torch.Generator().manual_seed(0))

    assert refusal_of(f, torch.zeros(4, 4)) == "generator-made-inside"


def test_set_is_recorded_though_no_mode_sees_it() -> None:
    def f(x):
        y = x.clone()
        y.set_(torch.ones(2))
        return y

    check_traces(f, plain)


def test_writes_through_numpy_memory_are_refused() -> None:
    pytest.importorskip("numpy")

    def f(x):
        y = x.clone()
        y.numpy()[0] = 5
        return y * 2

    assert refusal_of(f, torch.zeros(4, 4)) == "tensor-memory"
    check_traces(lambda x: x * float(x.numpy().shape[0]), plain)


def test_swapped_tensors_are_refused_and_the_run_goes_on() -> None:
    def f(x):
        a, b = x.clone(), x * 2
        torch.utils.swap_tensors(a, b)
        return a

    run = tripwire.Tracer().run(f, (torch.ones(2),), {})
    assert run.refusal.slug == "tensor-memory"
    assert run.result.tolist() == [2, 2]


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, m, v: torch.native_batch_norm(x, None, None, m, v, True, 0.5, 1e-5)[0],
        lambda x, m, v: torch._native_batch_norm_legit(x, None, None, m, v, True, 0.5, 1e-5)[0],
        lambda x, m, v: torch.ops.aten._batch_norm_with_update(x, None, None, m, v, 0.5, 1e-5)[0],
        lambda x, m, v: F.instance_norm(x, m, v),
    ],
)
def test_running_statistics_are_seen_to_change(norm) -> None:
    trace = quiet_trace(norm, torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3))
    assert [wanted.written for wanted in trace.inputs] == [False, True, True]


def test_overload_lookups_of_torch_itself_are_no_failures() -> None:
    def f(x, edges):
        return torch.histogramdd(x, edges).hist

    trace = quiet_trace(f, torch.randn(5, 2), [torch.arange(3.0)] * 2)
    assert trace.statistics().ops


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"a": 1, "b": {"d": 1}}, "L['d']['b']['c'] was a tensor when traced and is missing now"),
        ({"a": 1}, "L['d']['b'] was dict with 1 parts when traced and is missing now"),
        ({"a": 1, "b": {"c": 1}, "e": 2}, "L['d']['e'] was missing when traced and is a tensor"),
    ],
)
def test_a_mismatch_names_the_key_that_differs(given, told) -> None:
    def make(value):
        return (
            {k: make(v) for k, v in value.items()} if isinstance(value, dict) else torch.ones(value)
        )

    trace = tripwire.trace(lambda d: d["a"] + d["b"]["c"], make({"a": 1, "b": {"c": 1}}))
    with pytest.raises(tripwire.InputMismatch) as caught:
        trace(make(given))
    assert told in str(caught.value)
