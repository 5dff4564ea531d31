"""Sizes that values decide on: Python may count with them, and go by them, in compiled code."""

import pytest
import torch
from support import check_same

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
