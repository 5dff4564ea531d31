"""A number out of a tensor may be a size: it is computed before the call, and stays open."""

import pytest
import torch
from support import check_same
from torch import nn
from torch.nn import functional

import tripwire
from tripwire.tracing import casts

BACKENDS = ["eager", "aot_eager"]
needs_c = pytest.mark.skipif(casts._casts is None, reason="the C module answers `int`")
LENGTHS = [(5, 3), (9, 2), (4, 7), (6, 5), (8, 8), (3, 9), (7, 4), (2, 6)]


def longest(x, lengths):
    count = int(lengths.max())
    mask = torch.arange(count)[None] < lengths[:, None]
    return (x[:, :count] * mask).sum(1)


def parts(x, lengths):
    first, second = lengths.tolist()
    return x[:, :first].sum(1), x[:, first : first + second].mean(1)


def split(x, lengths):
    return [part.sum(1) for part in x.split([*lengths.tolist(), 24 - sum(lengths.tolist())], 1)]


def one_place(x, lengths):
    return x[:, lengths[0].item()] + x[1, -lengths[1].item()]


def made(x, lengths):
    count = lengths.sum().item()
    return torch.zeros(count, 3).index_add(0, torch.arange(count) % 4, torch.ones(count, 3)), count


def of_a_number(x, lengths):
    """The second is found with the first."""
    first = lengths.max().item()
    second = x[:, :first].argmax(1).max().item() + 1
    return x[:, :second].cumsum(1), second


def divided(x, lengths):
    half = lengths.max().item() // 2 + 24 // lengths.min().item()
    return x[:, :half] * half


def by_a_share(x, lengths):
    share = (lengths.float().mean() / 10).item()
    return x[:, : int(24 * share)].sum(1)


def of_chosen_columns(x, lengths):
    chosen = x[:, x.sum(0) > 0]
    weights = torch.ones(chosen.shape[1]) * 2
    return chosen * weights, weights.sum()


def with_loops(x, lengths):
    """A graph's edges, each node's loop once."""
    edges = torch.stack([torch.arange(24) % lengths[0], torch.arange(24) % lengths[1]])
    edges = torch.cat([edges[:, edges[0] != edges[1]], torch.arange(9).repeat(2, 1)], 1)
    weights = x.new_ones((edges.size(1),))
    degrees = x.new_zeros(9).index_add(0, edges[1], weights)
    return degrees, weights * degrees[edges[0]], edges.size(1)


def chosen_after_a_write(x, lengths):
    kept = x.clone()
    kept[:, 3:] = 1
    kept = kept[kept > 0]
    return kept * torch.arange(len(kept))


def decided(x, lengths):
    count = int(lengths[0])
    return x[:, :count].sum(1) if count > 4 else x[:, count:].sum(1)


def used_before(x, lengths):
    """Compiled code computes with the number, and then takes it for a size."""
    count = lengths[0].item()
    scaled = x / count
    return scaled[:, :count].sum(1) + count


class Cache(nn.Module):
    """A tensor says where the next rows go, and the call moves it on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(64, 4))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x, lengths):
        begin = self.at.item()
        count = lengths[0].item()
        self.rows[begin : begin + count] = x[0, :count, None]
        self.at.add_(count)
        return self.rows[: begin + count].sum(0), begin


class Kept(nn.Module):
    """What Python stores is each call's own number."""

    def __init__(self):
        super().__init__()
        self.last, self.all = 0, []
        self.lin = nn.Linear(24, 24)

    def forward(self, x, lengths):
        self.last = int(lengths.max())
        self.all.append(self.last)
        return self.lin(x)[:, : self.last].sum(1)


PROGRAMS = {  # with at most this many traces
    "the longest": (lambda: longest, 2),
    "parts": (lambda: parts, 2),
    "a split": (lambda: split, 2),
    "one place": (lambda: one_place, 2),
    "a new tensor": (lambda: made, 2),
    "a number that is found with another": (lambda: of_a_number, 3),
    "a division": (lambda: divided, 3),
    "a share": (lambda: by_a_share, 2),
    "a decision": (lambda: decided, 3),
    "a number that was used before": (lambda: used_before, 2),
    "a cache that a tensor counts": (Cache, 3),
    "stored": (Kept, 2),
    "chosen columns": (lambda: of_chosen_columns, 3),
    "edges of a graph": (lambda: with_loops, 3),
    "chosen after a write": (lambda: chosen_after_a_write, 3),
}


def run(make, compile, lengths=LENGTHS):
    torch.manual_seed(0)
    program = make()
    fast = compile(program)
    results = []
    for pair in lengths:
        try:
            results.append(fast(torch.randn(2, 24), torch.tensor(pair)))
        except (IndexError, RuntimeError, ZeroDivisionError) as error:
            results.append(str(type(error)))
    state = [value.clone() for value in program.buffers()] if isinstance(program, nn.Module) else []
    return fast, results, [*state, *getattr(program, "all", ())]


def check_twins(make, backend, lengths=LENGTHS):
    compile_it = lambda program: tripwire.compile(program, backend=backend)  # noqa: E731
    fast, results, state = run(make, compile_it, lengths)
    _, expected, expected_state = run(make, lambda program: program, lengths)
    check_same(results, expected)
    check_same(state, expected_state)
    return tripwire.explain(fast)


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_number_out_of_a_tensor_is_an_open_size(name, backend):
    make, traces = PROGRAMS[name]
    explained = check_twins(make, backend)
    assert explained.traces <= traces
    assert explained.hits >= len(LENGTHS) - traces


def beyond(x, lengths):
    return x[:, lengths.max().item()]


def repeat(x, lengths):
    return x.repeat_interleave(lengths.max().item(), 1) / (24 // lengths.min().item())


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [lambda: beyond, lambda: repeat, lambda: divided])
def test_what_plain_code_raises_is_raised(make, backend):
    check_twins(make, backend, [(5, 3), (9, 2), (24, 7), (6, 5), (0, 8), (3, 0), (99, 4), (2, 6)])


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["the longest", "parts", "one place", "a new tensor", "a share"])
def test_zero_and_one_are_right(name, backend):
    make, _ = PROGRAMS[name]
    check_twins(make, backend, [(5, 3), (1, 2), (0, 7), (6, 1), (1, 1), (3, 0), (7, 4), (2, 6)])


def written_before(x, lengths):
    lengths.add_(1)
    return x[:, : lengths.max().item()].sum(1)


def drawn_after_a_dropout(x, lengths):
    x = functional.dropout(x)
    return x[:, : torch.randint(2, 20, ()).item()].sum(1)


def drawn_and_used(x, lengths):
    """Another thread may draw before the graph does."""
    count = torch.randint(2, 20, ())
    return x[:, : count.item()].sum(1) * count


def in_a_context(x, lengths):
    with torch.autocast("cpu"):
        count = (lengths.float() @ lengths.float()).sqrt().int().item()
        return x[:, :count].sum(1)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * float(HISTORY.append(1) or 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


HISTORY = []


def behind_a_function(x, lengths):
    return x[:, : Double.apply(lengths.float()).max().int().item()].sum(1)


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "program",
    [written_before, drawn_after_a_dropout, drawn_and_used, in_a_context, behind_a_function],
)
def test_a_number_that_no_call_knows_beforehand_is_closed(program, backend):
    explained = check_twins(lambda: program, backend, LENGTHS + LENGTHS)
    assert not any("out of a tensor" in text for e in explained.entries for text in e.summary.open)


def crop(x, lengths):
    first = torch.randint(0, 9, (1,)).item()
    return x[:, first : first + 4] * 2


def crop_of_a_drawn_size(x, lengths):
    """Each draw moves the generator that the next one draws from."""
    count = int(torch.randint(3, 9, ()))
    first = int(torch.randint(0, 24 - count, ()))
    return functional.dropout(x[:, first : first + count]).sum(1), first


def crop_after_a_draw(x, lengths):
    x = x + torch.randn(24)
    first = torch.multinomial(torch.ones(9), 1).item()
    return x[:, first : first + 4]


def crop_of_a_share(x, lengths):
    return x[:, : int(24 * torch.empty(1).uniform_(0.2, 0.9).item())].sum(1)


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "program", [crop, crop_of_a_drawn_size, crop_after_a_draw, crop_of_a_share]
)
def test_a_size_that_torch_draws_is_drawn_ahead(program, backend):
    def run_with(fast):
        torch.manual_seed(5)
        for turn in range(12):
            if turn == 8:
                torch.manual_seed(3)
            yield fast(torch.ones(2, 24), None), torch.get_rng_state()

    fast = tripwire.compile(program, backend=backend)
    check_same(list(run_with(fast)), list(run_with(program)))
    explained = tripwire.explain(fast)
    assert explained.traces <= 3
    assert explained.hits >= 9


@needs_c
def test_a_number_that_stays_is_closed_where_another_size_varies():
    def rows(x, width):
        return x.view(-1, width.item()).sum(0)

    fast = tripwire.compile(rows, backend="eager")
    for count in (8, 12, 20, 4):
        x = torch.randn(count)
        check_same(fast(x, torch.tensor(4)), rows(x, torch.tensor(4)))
    explained = tripwire.explain(fast)
    assert (explained.traces, explained.hits) == (2, 2)
    assert not any("out of a tensor" in text for e in explained.entries for text in e.summary.open)


@needs_c
def test_explain_names_the_line_that_took_the_number():
    fast = tripwire.compile(longest, backend="eager")
    for pair in LENGTHS[:3]:
        fast(torch.randn(2, 24), torch.tensor(pair))
    line = longest.__code__.co_firstlineno + 1
    opened = tripwire.explain(fast).entries[0].summary.open
    assert any(f"a number out of a tensor (test_sounded_sizes.py:{line})" in one for one in opened)


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_flow_through_what_has_such_a_size(backend):
    def train(compile_it):
        torch.manual_seed(0)
        lin = nn.Linear(24, 24)
        fast = compile_it(lambda x, lengths: lin(x)[:, : int(lengths.max())].square().mean())
        for pair in LENGTHS:
            lin.weight.grad = None
            fast(torch.randn(2, 24), torch.tensor(pair)).backward()
            yield lin.weight.grad.clone()

    expected = list(train(lambda f: f))
    check_same(list(train(lambda f: tripwire.compile(f, backend=backend))), expected)


@needs_c
def test_replaced_state_gives_its_own_number():
    net = nn.Module()
    net.register_buffer("count", torch.tensor(5))
    net.forward = lambda x: functional.relu(x[: net.count.item()])
    fast = tripwire.compile(net, backend="eager")
    x = torch.randn(24)
    for turn, count in enumerate((5, 9, 3, 7, 2, 8)):
        if turn % 2:
            net.count = torch.tensor(count)
        else:
            net.count.fill_(count)
        check_same(fast(x), x[:count].relu())
