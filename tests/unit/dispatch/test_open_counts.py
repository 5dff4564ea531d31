"""Sizes that values decide on: Python may count with them, and go by them, in compiled code."""

import pytest
import torch
from support import check_same
from torch import nn
from torch.nn.utils import rnn

import tripwire
from tripwire.tracing import casts

BACKENDS = ["eager", "aot_eager"]
needs_c = pytest.mark.skipif(casts._casts is None, reason="the C module answers `len`")


def mean_of_rows(x, mask):
    rows = mask.nonzero().squeeze(1)
    count = rows.shape[0]
    if count == 0:
        return x.sum(0), 0
    return x[rows].sum(0) / count, count


def mean_by_len(x, mask):
    chosen = x[mask]
    return chosen.sum(0) / max(len(chosen), 1), len(chosen)


def by_numel(x, mask):
    chosen = x[mask]
    return chosen.square().mean() if chosen.numel() else x.sum() * 0.0


def by_size(x, mask):
    found = torch.nonzero(mask)
    return x * found.size(0) + found.size(-1)


def many_or_few(x, mask):
    (rows,) = torch.where(mask)
    return x[rows].sum(0) if len(rows) > 8 else x[rows].sum(0) * 2


def share(x, mask):
    picked = torch.masked_select(x, mask[:, None])
    return x * (picked.shape[0] / x.numel()), picked.shape


history = []


def stored(x, mask):
    history.append(len(x[mask]))
    return x + history[-1]


PROGRAMS = {  # with at most this many traces
    "rows": (mean_of_rows, 3),
    "len": (mean_by_len, 3),
    "numel": (by_numel, 3),
    "size": (by_size, 2),
    "more or less": (many_or_few, 3),
    "a share": (share, 2),
    "stored": (stored, 2),
}


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_count_stays_open(name, backend) -> None:
    program, traces = PROGRAMS[name]
    compiled = tripwire.compile(program, backend=backend)
    for count in (5, 7, 3, 12, 9, 5, 0, 11, 4, 0, 15, 6):
        x = torch.randn(16, 4)
        mask = torch.zeros(16, dtype=torch.bool)
        mask[torch.randperm(16)[:count]] = True
        history.clear()
        expected = program(x, mask), list(history)
        history.clear()
        found = compiled(x, mask), list(history)
        check_same(expected, found)
        assert repr(expected[1]) == repr(found[1])
    assert compiled.statistics().traces <= traces


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_go_through_what_was_counted(backend) -> None:
    def loss(x, mask):
        chosen = x[mask]
        return chosen.square().sum() / len(chosen)

    compiled = tripwire.compile(loss, backend=backend)
    for count in (5, 7, 3, 12, 9):
        x = torch.randn(16, 4, requires_grad=True)
        mask = torch.arange(16) < count
        wanted = torch.autograd.grad(loss(x, mask), x)
        torch.testing.assert_close(torch.autograd.grad(compiled(x, mask), x), wanted)
    assert compiled.statistics().traces <= 2


def message_passing(x, mask):
    edges = torch.stack([torch.arange(len(x)), torch.arange(len(x)).flip(0)])
    source, target = torch.cat([edges[:, mask], edges], 1)
    degree = torch.bincount(target, minlength=len(x))
    return torch.zeros_like(x).index_add_(0, target, x.tanh()[source]) / degree[:, None]


def experts(x, mask):
    out = torch.zeros_like(x)
    for part in (mask, ~mask):
        (rows,) = torch.where(part)
        out.index_add_(0, rows, x[rows].tanh() * 2)
    return out.view(-1, 2, 2) * x.shape[0]


def written_rows(x, mask):
    out = torch.zeros_like(x)
    out[mask] = x[mask].exp()
    return out.reshape(2, -1), out.shape


def joined(x, mask):
    both = torch.cat([x[mask], x])
    return both.mean(0) * both.shape[0], both.shape


def decided_by_both(x, mask):
    both = torch.cat([x[mask], x])
    return both.sum() if len(both) > 12 else both.sum() * 2


def asked_for_strides(x, mask):
    both = torch.cat([x[mask], x]).t()
    return both.sum(1) if both.stride(1) == 4 and both.is_contiguous() else both.sum(1) * 2


def put_beside(x, mask):
    return x.index_add(0, mask.nonzero().squeeze(1), x[mask]).square() * x.shape[0]


BESIDE_OPEN_SIZES = {  # with at most this many traces
    "message passing": (message_passing, 2),
    "experts": (experts, 2),
    "rows that are written": (written_rows, 2),
    "joined": (joined, 2),
    "decided by both": (decided_by_both, 3),
    "strides": (asked_for_strides, 2),
    "put beside": (put_beside, 2),
}


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BESIDE_OPEN_SIZES)
def test_rows_that_values_choose_leave_sizes_open(name, backend) -> None:
    program, traces = BESIDE_OPEN_SIZES[name]
    compiled = tripwire.compile(program, backend=backend)
    for turn, size in enumerate((6, 10, 8, 14, 4, 12, 6, 16, 8)):
        x = torch.randn(size, 4, requires_grad=True)
        mask = torch.arange(size) % (turn + 2) == 1
        expected, found = program(x, mask), compiled(x, mask)
        check_same(expected, found)
        wanted = torch.autograd.grad(_sum(expected), x)
        torch.testing.assert_close(torch.autograd.grad(_sum(found), x), wanted)
    assert compiled.statistics().traces <= traces
    assert not tripwire.explain(compiled).closed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "use",
    [
        lambda x, rows: x[: len(rows)] + torch.zeros(rows.shape[0], 1),
        lambda x, rows: x.new_zeros(rows.shape) + 1,
        lambda x, rows: rows.view(rows.shape[0], 1) * 2,
        lambda x, rows: torch.stack([x[i] for i in range(len(rows))]),
        lambda x, rows: x * {3: 1.0, 5: 2.0}.get(len(rows), 3.0),
        lambda x, rows: (x * 1, f"{len(rows)} of {x.shape[0]}"),
        lambda x, rows: x.expand(rows.numel(), *x.shape).sum(0),
    ],
)
def test_a_count_that_something_needs_is_closed(use, backend) -> None:
    def program(x, mask):
        return use(x, mask.nonzero())

    compiled = tripwire.compile(program, backend=backend)
    for count in (5, 3, 5, 7, 3, 5):
        x = torch.randn(8, 4)
        mask = torch.arange(8) < count
        check_same(program(x, mask), compiled(x, mask))


class Reader(nn.Module):
    """Reads sequences of several lengths."""

    def __init__(self, cell, *, batch_first=True, pads=False, **options):
        super().__init__()
        self.cell = cell(4, 6, batch_first=batch_first, **options)
        self.batch_first = batch_first
        self.pads = pads

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, self.batch_first, enforce_sorted=False)
        packed, last = self.cell(packed)
        if not self.pads:
            return last
        y, counts = rnn.pad_packed_sequence(packed, self.batch_first)
        return y.tanh(), counts


READERS = {
    "last state": lambda: Reader(nn.LSTM),
    "time first": lambda: Reader(nn.GRU, batch_first=False),
    "both directions": lambda: Reader(nn.LSTM, bidirectional=True, num_layers=2),
    "all states": lambda: Reader(nn.GRU, pads=True),
    "simple": lambda: Reader(nn.RNN, pads=True, batch_first=False),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", READERS)
def test_packed_sequences_of_all_lengths_run_compiled_code(name, backend) -> None:
    torch.manual_seed(0)
    net = READERS[name]()
    compiled = tripwire.compile(net, backend=backend)
    for turn, length in enumerate((5, 9, 7, 3, 8, 12, 5)):
        x = torch.randn((3, length, 4) if net.batch_first else (length, 3, 4), requires_grad=True)
        lengths = torch.tensor([1 + turn % length, length, 2])
        expected, found = net(x, lengths), compiled(x, lengths)
        check_same(expected, found)
        wanted = torch.autograd.grad(_sum(expected), x)
        torch.testing.assert_close(torch.autograd.grad(_sum(found), x), wanted)
    assert compiled.statistics().traces <= 3


def _sum(value):
    if isinstance(value, tuple):
        return sum(map(_sum, value))
    return value.sum() if isinstance(value, torch.Tensor) and value.is_floating_point() else 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_length_that_is_too_long_raises_as_in_plain_python(backend) -> None:
    net = Reader(nn.LSTM)
    compiled = tripwire.compile(net, backend=backend)
    for length in (5, 9, 7):
        check_same(*(f(torch.ones(2, length, 4), torch.tensor([2, 5])) for f in (net, compiled)))
    for call in (net, compiled):
        with pytest.raises(RuntimeError, match="ength"):
            call(torch.ones(2, 6, 4), torch.tensor([2, 7]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packs", [False, True])
def test_a_total_length_out_of_a_tensor_is_heeded(backend, packs) -> None:
    def pad(x, lengths, total, packed):
        if packs:
            packed = rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        y, _ = rnn.pad_packed_sequence(packed, True, total_length=total.max().item())
        return y * 2, y.shape[1]

    compiled = tripwire.compile(pad, backend=backend)
    for total in (9, 10, 9, 12, 11, 10):
        x, lengths = torch.randn(3, 8, 4), torch.tensor([3, 8, 5])
        packed = rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        args = x, lengths, torch.tensor([1, total]), packed
        check_same(pad(*args), compiled(*args))
