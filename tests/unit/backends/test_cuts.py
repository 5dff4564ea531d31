"""What no compiler can hold runs as it is, between parts that are compiled: nothing is raised."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tripwire
from tripwire.backends.limits import spell_picks
from tripwire.dispatch.compiled import find_dispatcher

BACKENDS = ["eager", "aot_eager"]


def matrix(factor=1.0):
    return torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]]).mul(factor).requires_grad_()


def holes():
    return (matrix() * torch.tensor([1.0, 0.0, 1.0])).detach().requires_grad_()


SIZED = [(matrix,), (matrix,), (holes,), (matrix,), (holes,), (matrix,)]


def numbers(*values):
    return [(matrix, lambda value=value: torch.tensor(value)) for value in values]


# --- programs ----------------------------------------------------------------------------------


class Schedule(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("alphas", torch.linspace(0, 1, 10))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x, t):
        return x * self.alphas[t] * self.scale


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.linspace(0, 1, 30).reshape(10, 3))

    def forward(self, x, t):
        return x * self.rows[t]


def several(x, t):
    return x[t, 1] + x[0, t] + x[t] + x[..., t].sum() + x[None, t, 1:].sum() + x[-1:, t]


def of_a_transposed(x, t):
    return x.t()[t] * 2


def returned(x, t):
    return x[t], x * 2


def changed_afterwards(x, t):
    y = x * 1
    row = y[t]
    y.add_(1)
    return row * 2


def changed_through(x, t):
    y = x * 1
    y[t].mul_(2)
    return y


def put_number(x, t):
    y = x.clone()
    y[t] = 0
    y[:, t] = 3.5
    return y


def put_tensor(x, t):
    y = x.clone()
    y[t] = y[0] * 2
    y[0, t] = y.sum()
    return y


def put_other_dtype(x, t):
    y = x.clone()
    y[t] = torch.arange(3)
    return y


def from_bound(x, n):
    y = x.clone()
    y[n[0] :] = 0
    return y


def until_bound(x, n):
    return x[:, : n[0]] * 2


def between_bounds(x, n):
    return x[:, n[0] : n[0] + 1].sum() + x


PICKS = [
    (Schedule, numbers(1, 2, -1, 2)),
    (Table, numbers(1, 2, 9, 2)),
    *((lambda f=f: f, numbers(0, 1, -1, 0)) for f in (several, of_a_transposed, returned)),
    *((lambda f=f: f, numbers(0, 1, -1, 0)) for f in (changed_afterwards, changed_through)),
    *((lambda f=f: f, numbers(0, 1, -1, 0)) for f in (put_number, put_tensor, put_other_dtype)),
    *(
        (lambda f=f: f, numbers([0], [1], [0], [1]))
        for f in (from_bound, until_bound, between_bounds)
    ),
]


def indices(x):
    return x.nonzero() + 1


def indices_apart(x):
    rows, columns = x.nonzero(as_tuple=True)
    return rows * columns, x[rows, columns].sum()


def where_positive(x):
    return torch.where(x > 0)[0] + 1


def selected(x):
    return (x * 2)[x > 0] * 3


def sum_of_selected(x):
    return x[x > 0].exp().sum() * x.relu()


def doubled_where(x):
    y = x.clone()
    mask = y > 0
    y[mask] = y[mask] * 2
    return y


def masked(x):
    return torch.masked_select(x, x > 0).exp()


def distinct(x):
    values, inverse, counts = torch.unique(x.detach(), return_inverse=True, return_counts=True)
    return values * counts, inverse, x * 2


def repeated(x):
    return torch.repeat_interleave(x, (x[:, 1] != 0).long() + 1, dim=0).exp()


def counted(x):
    return torch.bincount((x[0] > 0).long() * 2) + 1


def size_asked_for(x):
    chosen = x[x != 0]
    return chosen.reshape(chosen.shape[0], 1) * 2


def under_no_grad(x):
    with torch.no_grad():
        chosen = x[x > 0].sum()
    return x * chosen


def under_autocast(x):
    with torch.autocast("cpu"):
        y = x @ x.t()
        z = y[y > 0].sum() + (x @ x.t()).sum()
    return z.float() * x


SIZES = [
    indices,
    indices_apart,
    where_positive,
    selected,
    sum_of_selected,
    doubled_where,
    masked,
    distinct,
    repeated,
    counted,
    size_asked_for,
    under_no_grad,
    under_autocast,
]


def of_numbers(x):
    return torch.tensor([x.sum(), x.max()]) * 2 + x[:, :2]


def of_nested_numbers(x):
    return torch.tensor([[x[0, 0], 2.0], [3.0, x[1, 1]]]) + 1


def of_mixed(x):
    return torch.as_tensor([x.sum(), 1.0]).sum() + x


def like_another(x):
    return x.new_tensor([x.sum(), 1.0]).sum() + x


def of_one(x):
    return torch.tensor(x.sum()) + x


def filled(x):
    return torch.full((2, 3), x.sum().detach()) + torch.full_like(x, x[0, 0].detach()) * x


def filled_like_another(x):
    return x.new_full((2, 3), x.max().detach()) + x.sin()


def padded(x):
    return F.pad(x, (1, 1), value=x[0, 0].detach()) * 2


def added_in_part(x):
    return torch.add(x, x.sin(), alpha=x.max().detach())


def over_a_threshold(x):
    return F.threshold(x * 2, x.min().detach(), 0.0) + 1


NUMBERS = [
    of_numbers,
    of_nested_numbers,
    of_mixed,
    like_another,
    of_one,
    filled,
    filled_like_another,
    padded,
    added_in_part,
    over_a_threshold,
]


def parameter(x):
    made = nn.Parameter(x * 2)
    return made + 1, made


def parameter_of_another(x):
    made = nn.Parameter(x.detach() * 2)
    return (made * x).sum(), made


def parameter_without_gradient(x):
    made = nn.Parameter(x.detach() * 2, requires_grad=False)
    return made * x, made


def layer(x):
    made = nn.Linear(3, 2)
    with torch.no_grad():
        made.weight.fill_(0.5)
        made.bias.zero_()
    return made(x), made.weight


def leaf(x):
    made = torch.ones(3, requires_grad=True)
    return made, x * 2


def leaf_that_is_used(x):
    made = torch.zeros_like(x, requires_grad=True)
    return made, ((x + made) ** 2).sum()


def leaf_made_of_another(x):
    made = (x.detach() * 2).requires_grad_()
    return made, made * 2


def leaf_that_is_not_returned(x):
    made = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    return made * x.detach()


def leaf_by_assignment(x):
    with torch.no_grad():
        made = x * 2
    made.requires_grad = True
    return made, made.sin()


def leaf_in_a_buffer(x):
    made = torch.full((2, 3), 2.0, requires_grad=True)
    room = torch.zeros(2, 3)
    room[:, 1:] = made[:, 1:] * 3
    return room, made


class Tagged(torch.Tensor):
    pass


def of_another_class(x):
    return x.as_subclass(Tagged) * 2


def of_another_class_between(x):
    return (x.as_subclass(Tagged) * 2).as_subclass(torch.Tensor).exp() + 1


LEAVES = [
    parameter,
    parameter_of_another,
    parameter_without_gradient,
    layer,
    leaf,
    leaf_that_is_used,
    leaf_made_of_another,
    leaf_that_is_not_returned,
    leaf_by_assignment,
    leaf_in_a_buffer,
    of_another_class,
    of_another_class_between,
]


# --- beside the plain twin -----------------------------------------------------------------------


def outcome(call, model, make):
    """Everything that a call and its backward leave behind."""
    args = tuple(one() for one in make)
    result = call(*args)
    outputs = result if isinstance(result, tuple) else (result,)
    wanting = [output.sum() for output in outputs if output.requires_grad]
    if wanting:
        sum(wanting).backward()
    forms = [(type(o), o.requires_grad, o.is_leaf, o.dtype, o.stride()) for o in outputs]
    with torch._C.DisableTorchFunctionSubclass():
        values = [output.detach().clone() for output in outputs]
        leaves = [*args, *(o for o in outputs if o.is_leaf), *model.parameters()]
        grads = [leaf.grad for leaf in leaves if leaf.is_leaf]
    return forms, values, grads, [arg.detach() for arg in args]


def check_like_plain(make, calls, backend, **options):
    plain, model = make(), make()
    compiled = tripwire.compile(model, backend=backend, **options)
    for call in calls:
        torch.manual_seed(0)
        wanted = outcome(plain, _parameters(plain), call)
        torch.manual_seed(0)
        got = outcome(compiled, _parameters(model), call)
        assert got[0] == wanted[0]
        torch.testing.assert_close(got[1:], wanted[1:])
    return compiled


def _parameters(fn):
    return fn if isinstance(fn, nn.Module) else nn.Module()


def slugs_of(compiled):
    return [refusal.slug for refusal in find_dispatcher(compiled).refusals]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("make", "calls"), PICKS, ids=lambda v: getattr(v, "__name__", None))
def test_an_integer_in_a_tensor_is_an_index(make, calls, backend) -> None:
    compiled = check_like_plain(make, calls, backend)
    assert compiled.statistics().hits >= len(calls) - 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fn", SIZES, ids=lambda fn: fn.__name__)
def test_sizes_that_hang_on_values_are_cut_and_right(fn, backend) -> None:
    compiled = check_like_plain(lambda: fn, SIZED, backend)
    assert compiled.statistics().hits >= 4
    assert slugs_of(compiled) == (
        [] if backend == "eager" else ["graph-cut"] * len(slugs_of(compiled))
    )


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:Converting a tensor")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fn", NUMBERS, ids=lambda fn: fn.__name__)
def test_tensors_made_of_numbers_that_are_in_tensors(fn, backend) -> None:
    compiled = check_like_plain(lambda: fn, [(matrix,)] * 3, backend)
    assert compiled.statistics().hits == 2


# Those whose kernels are quickly compiled.
_QUICK = (leaf, parameter)


def _leaf_and_backend(fn, backend):
    is_slow = backend == "inductor" and fn not in _QUICK
    marks = pytest.mark.slow if is_slow else ()
    return pytest.param(fn, backend, id=f"{fn.__name__}-{backend}", marks=marks)


@pytest.mark.parametrize(
    ("fn", "backend"),
    [_leaf_and_backend(fn, backend) for fn in LEAVES for backend in (*BACKENDS, "inductor")],
)
def test_what_is_made_inside_keeps_its_class_and_its_gradient(fn, backend) -> None:
    compiled = check_like_plain(lambda: fn, [(matrix,)] * 3, backend)
    assert compiled.statistics().hits == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (Schedule, numbers(1, 2, -1, 2)),
        (lambda: put_number, numbers(0, 1, -1, 0)),
        (lambda: from_bound, numbers([0], [1], [0])),
        *((lambda f=f: f, SIZED) for f in (indices, doubled_where, distinct)),
        (lambda: of_numbers, [(matrix,)] * 3),
    ],
)
def test_cuts_are_right_with_inductor(make, calls) -> None:
    compiled = check_like_plain(make, calls, "inductor")
    assert compiled.statistics().hits >= len(calls) - 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(-1, 1, 32).reshape(2, 4, 4))

    def forward(self, x):
        ends = torch.tensor([1, 2], dtype=torch.int32)
        mixed = torch._grouped_mm(torch.cat([x, x[:, :1]], 1).tanh(), self.weights, offs=ends)
        return torch.relu(mixed * 2) + 1


class ExpertsByTheirPublicName(Experts):
    def forward(self, x):
        ends = torch.tensor([2, 2], dtype=torch.int32)
        mixed = nn.functional.grouped_mm(nn.functional.pad(x, (0, 1)), self.weights, offs=ends)
        return mixed.softmax(-1), mixed.sum()


def spoken(x):
    said = torch.stack([x, x * 2, x + 1]).log_softmax(-1)
    heard = torch.tensor([[1], [2]])
    return nn.functional.ctc_loss(said, heard, (3, 3), (1, 1)) * 2 + x.sum()


class Spoken(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.CTCLoss(reduction="none", zero_infinity=True)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        said = torch.stack([x, x * 2, x + 1, x - 1]) * self.scale
        lengths = torch.tensor([4, 3])
        heard = torch.tensor([1, 2, 2])
        return self.loss(said.log_softmax(-1), heard, lengths, torch.tensor([1, 2])).exp()


def spoken_without_gradients(x):
    with torch.no_grad():
        first = spoken(x * 3)
    return first * x.sigmoid()


UNFORMED = [
    Experts,
    ExpertsByTheirPublicName,
    lambda: spoken,
    Spoken,
    lambda: spoken_without_gradients,
]


@pytest.mark.parametrize(
    ("make", "backend"),
    [*itertools.product(UNFORMED, BACKENDS), (Experts, "inductor")]
    + [pytest.param(make, "inductor", marks=pytest.mark.slow) for make in UNFORMED[1:]],
)
def test_calls_whose_form_no_fake_tensor_tells(make, backend) -> None:
    compiled = check_like_plain(make, [(matrix,), (matrix,), (holes,), (matrix,)], backend)
    assert slugs_of(compiled) == ([] if backend == "eager" else ["graph-cut"])
    assert compiled.statistics().hits == 3


# --- what is told, and what is whole -----------------------------------------------------------


def test_an_index_that_nobody_can_tell_from_a_gather_stays_in_the_graph() -> None:
    compiled = check_like_plain(Schedule, numbers(1, 2, 3), "aot_eager", fullgraph=True)
    assert compiled.statistics().hits == 2
    assert slugs_of(compiled) == []


def test_a_graph_without_such_indices_is_left_as_it_is() -> None:
    module = tripwire.trace(lambda x: x[0] * 2, torch.ones(2)).graph_module
    assert spell_picks(module) is module


def test_a_cut_is_told_once_with_the_line(caplog) -> None:
    compiled = check_like_plain(lambda: selected, SIZED, "aot_eager")
    (refusal,) = find_dispatcher(compiled).refusals
    assert refusal.slug == "graph-cut"
    assert refusal.where.short.startswith("test_cuts.py:")
    assert caplog.text.count("is compiled in parts") == 1


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("fn", [selected, of_numbers, parameter, leaf], ids=lambda fn: fn.__name__)
def test_with_fullgraph_a_cut_is_an_error(fn) -> None:
    with pytest.raises(tripwire.CannotTrace) as caught:
        tripwire.compile(fn, backend="aot_eager", fullgraph=True)(matrix())
    assert caught.value.slug == "graph-cut"


def test_what_comes_before_and_after_is_compiled() -> None:
    parts = []

    def keep(module, inputs):
        parts.append([node.name for node in module.graph.nodes if node.op.startswith("call")])
        return module.forward

    def f(x):
        y = (x * 2).exp()
        chosen = y[x > 0].sum()
        return (y + chosen).sin().cos()

    compiled = check_like_plain(lambda: f, [(matrix,)] * 3, keep)
    assert compiled.statistics().hits == 2
    assert [len(part) for part in parts] == [3, 3]


def _span_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    span = torch.tensor(x.shape[0])
    return weight[4 - span : 4 + span, :] * 2 + x.sum()


def _rows_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight[torch.tensor(x.shape[0]) :].relu()


def _columns_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight[:, : torch.tensor(x.shape[0])] + 1


def _narrowed_by(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.narrow(0, 0, int(torch.tensor(x.shape[0]))) * 3


def _counted_by(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight[: (x > -100).sum() // 3].exp()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fn", [_span_of, _rows_of, _columns_of, _narrowed_by, _counted_by])
def test_a_parameter_s_part_whose_size_is_in_a_tensor_under_no_grad(fn, backend) -> None:
    # A view of a leaf that is made under no_grad is a leaf itself, which alone is no cut.
    weight = nn.Parameter(torch.randn(8, 3))
    fast = tripwire.compile(fn, backend=backend)
    with torch.no_grad():
        for size in (2, 2, 3, 3, 1, 2, 3):
            x = torch.randn(size, 3)
            torch.testing.assert_close(fast(x, weight), fn(x, weight))


def test_gradients_that_are_asked_for_inside_leave_the_graph_whole() -> None:
    def forces(x):
        place = x.detach().requires_grad_()
        energy = (place**3)[place > 0].sum()
        (slope,) = torch.autograd.grad(energy, place, create_graph=True)
        return slope.sum() * x, place

    check_like_plain(lambda: forces, [(matrix,)] * 3, "aot_eager")


def test_a_result_of_one_part_that_another_changes_in_place() -> None:
    def f(x):
        y = x * 2
        chosen = y[x > 0].sum()
        y.mul_(2)
        y[0].add_(chosen)
        return y.sin(), y

    check_like_plain(lambda: f, [(matrix,)] * 4, "aot_eager")


# --- a back end that fails ---------------------------------------------------------------------


def failing(monkeypatch):
    def compile_graph(*args):
        raise RuntimeError("no such luck")

    monkeypatch.setattr("tripwire.backends.inductor.compile_graph", compile_graph)


def test_a_back_end_with_a_name_that_fails_is_told_and_the_graph_runs(monkeypatch, caplog) -> None:
    failing(monkeypatch)
    compiled = check_like_plain(lambda: lambda x: x.sin() * 2, [(matrix,)] * 3, "inductor")
    assert compiled.statistics().hits == 2
    assert slugs_of(compiled) == ["backend-failed"]
    assert caplog.text.count("no such luck") == 1


def test_one_that_fails_on_a_part(monkeypatch, caplog) -> None:
    failing(monkeypatch)
    compiled = check_like_plain(lambda: selected, SIZED, "inductor")
    assert set(slugs_of(compiled)) == {"graph-cut", "backend-failed"}
    assert caplog.text.count("no such luck") == 1


@pytest.mark.parametrize("given", [{"fullgraph": True}, {"on_backend_error": "raise"}])
def test_it_is_an_error_where_that_is_asked_for(given, monkeypatch) -> None:
    failing(monkeypatch)
    with pytest.raises(tripwire.BackendFailed, match="no such luck"):
        tripwire.compile(lambda x: x * 2, backend="inductor", **given)(matrix())


# --- state that carries a past -----------------------------------------------------------------


class Recurrent(nn.Module):
    """Truncated backpropagation through time."""

    def __init__(self, cut_off):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.h = torch.zeros(2, 3)
        self.cut_off = cut_off

    def forward(self, x):
        self.h = torch.tanh(self.w * self.cut_off(self.h) + x)
        return self.h * 2


def without_grad(h):
    with torch.no_grad():
        return h * 1


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "cut_off",
    [
        torch.Tensor.detach,
        without_grad,
        lambda h: h.data,
        lambda h: h.detach().clone(),
        lambda h: h.detach()[:, :] + 0,
    ],
)
def test_a_state_whose_past_is_cut_off_trains(cut_off, backend) -> None:
    compiled = check_like_plain(lambda: Recurrent(cut_off), [(matrix,)] * 5, backend)
    assert compiled.statistics().hits == 3


class Offset(nn.Module):
    """Writes to a slice of a buffer that is as long as the input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(9, 4))

    def forward(self, x):
        x = self.layer(x)
        self.table[: len(x)] += 1
        count = x.detach().nonzero().shape[0]  # ends a part
        return self.layer(x).view(len(x), -1) * count * len(x)


def test_an_open_size_is_no_view_of_what_it_is_a_bound_of() -> None:
    """Parts got a copy of it, `size.clone()`."""
    torch.manual_seed(0)
    plain, mine = Offset(), Offset()
    mine.load_state_dict(plain.state_dict())
    compiled = tripwire.compile(mine, backend="aot_eager")
    for length in (5, 6, 7, 8, 8):
        x = torch.randn(length, 4)
        for module, call in ((plain, plain), (mine, compiled)):
            module.zero_grad()
            call(x).sum().backward()
        torch.testing.assert_close(mine.layer.weight.grad, plain.layer.weight.grad)
        torch.testing.assert_close(mine.table, plain.table)
    slugs = {refusal.slug for refusal in tripwire.explain(compiled).refusals}
    assert "backend-failed" not in slugs
