"""Where a tensor begins in its memory matters only to code that asks, and to what overlaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import check_compiles, check_same
from torch import nn

import tripwire

BACKENDS = ["eager", "aot_eager"]
DATA = torch.arange(96.0).reshape(24, 4)


def play(
    fn: Callable[..., Any], calls: list[tuple[Any, ...]], backend: str, *, traces: int
) -> None:
    """Each call returns what the plain one does; all but the traced ones hit."""
    compiled = check_compiles(fn, calls, traces=traces, backend=backend, fullgraph=False)
    assert compiled.statistics().hits == len(calls) - traces


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def slices(x: torch.Tensor) -> list[tuple[torch.Tensor]]:
    return [(x[i : i + 4],) for i in range(0, len(x), 4)]


PARTS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "slices": (Net(), slices(DATA)),
    "split": (Net(), [(part,) for part in DATA.split(6)]),
    "rows": (Net(), [(row,) for row in DATA]),
    "columns": (lambda x: x * 2 + x.mean(), [(column,) for column in DATA.t()]),
    "timesteps": (lambda x, t: x * t, [(DATA[0], t) for t in torch.linspace(1, 0, 7)]),
    "int_steps": (lambda x, t: x * t.view(1, 1), [(DATA, t) for t in torch.arange(7)]),
    "two_parts": (lambda x, y: x @ y.t(), list(zip(DATA.split(3), DATA.flip(0).split(3)))),
    "views": (lambda x: x[1:].t(), slices(DATA)),
    "itself": (lambda x: (x, x.view(-1)[3:7]), slices(DATA)),
    "nested": (lambda batch: batch["x"] - batch["y"][0],
               [({"x": x, "y": [x.flip(0)]},) for x in DATA.split(2)]),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("fn", "calls"), PARTS.values(), ids=PARTS)
def test_one_trace_serves_every_part_of_a_tensor(fn: Any, calls: Any, backend: str) -> None:
    play(fn, calls, backend, traces=1)


def test_misaligned_parts_hit_behind_inductor() -> None:
    flat = torch.arange(64.0)
    calls = [(flat[i : i + 9], flat[2 * i + 1 : 2 * i + 10]) for i in (0, 1, 4, 7, 3)]
    play(lambda x, y: (x * y + 1, x[2:5]), calls, "inductor", traces=1)


def test_a_view_of_what_was_passed_is_of_its_memory() -> None:
    for backend in (*BACKENDS, "inductor"):
        compiled = tripwire.compile(lambda x: x[1:3], backend=backend)
        data = DATA.clone()
        for i in (0, 4, 8, 12):
            part = data[i : i + 4]
            found = compiled(part)
            assert found.storage_offset() == part[1:3].storage_offset()
            found.zero_()
            assert not data[i + 1 : i + 3].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_reach_the_part_that_was_passed(backend: str) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend=backend)
    grads = []
    for called in (net, compiled):
        data = DATA.clone().requires_grad_()
        for (part,) in slices(data):
            called(part).sum().backward()
        grads.append(data.grad)
    check_same(*grads)
    assert compiled.statistics().traces == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_written_to_a_part_lands_there(backend: str) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum()

    compiled = tripwire.compile(double, backend=backend)
    plain, data = DATA.clone(), DATA.clone()
    for i in (0, 4, 8, 12, 20):
        check_same(double(plain[i : i + 4]), compiled(data[i : i + 4]))
    check_same(plain, data)
    assert compiled.statistics().traces == 1


# --- where it does matter ---


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + x.storage_offset(),
        lambda x: x + getattr(x, "storage_" + "offset")(),
        lambda x: x.as_strided((3,), (1,), 5) + 1,
        lambda x: x.as_strided((3,), (1,)) + 1,
        lambda x: torch.as_strided(x, (2, 2), (2, 1), 1) * 2,
    ],
    ids=["asked", "asked_by_a_computed_name", "from_the_beginning", "from_here", "function"],
)
def test_a_part_elsewhere_is_right_where_the_place_matters(fn: Any, backend: str) -> None:
    flat = torch.arange(64.0)
    compiled = tripwire.compile(fn, backend=backend)
    for i in (0, 3, 8, 3, 0):
        check_same(fn(flat[i : i + 20]), compiled(flat[i : i + 20]))


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
@pytest.mark.parametrize(
    ("fn", "flat"),
    [
        (lambda x: x.view(torch.int32) + 1, torch.arange(64, dtype=torch.int16)),
        (lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 2)) * 2), torch.ones(64)),
    ],
    ids=["view", "view_as_complex"],
)
def test_a_view_as_another_dtype_fails_where_the_plain_one_does(
    fn: Any, flat: torch.Tensor, backend: str
) -> None:
    compiled = tripwire.compile(fn, backend=backend)
    for i in (0, 4, 8):
        check_same(fn(flat[i : i + 8]), compiled(flat[i : i + 8]))
    for called in (fn, compiled):
        with pytest.raises(RuntimeError, match="divisible"):
            called(flat[1:9])


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_that_come_to_overlap_are_another_case(backend: str) -> None:
    def shift(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    compiled = tripwire.compile(shift, backend=backend)
    plain, data = torch.arange(32.0), torch.arange(32.0)
    for i, j in ((0, 8), (0, 8), (0, 2), (4, 4), (0, 8), (8, 0)):
        expected = shift(plain[i : i + 4], plain[j : j + 4])
        check_same(expected, compiled(data[i : i + 4], data[j : j + 4]))
        check_same(plain, data)


def test_a_part_that_comes_to_overlap_state_is_another_case() -> None:
    flat = torch.arange(32.0)

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = flat[8:12]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * self.part

    model = Reads()
    compiled = tripwire.compile(model, backend="eager")
    for i in (0, 0, 8, 10, 0, 16):
        before = flat.clone()
        found = compiled(flat[i : i + 4])
        after = flat.clone()
        flat.copy_(before)
        check_same(model(flat[i : i + 4]), found)
        check_same(flat, after)


def test_explain_names_an_offset_only_where_it_is_asked() -> None:
    asked = tripwire.compile(lambda x: x + x.storage_offset(), backend="eager")
    plain = tripwire.compile(lambda x: x + 1, backend="eager")
    for compiled in (asked, plain):
        compiled(DATA[1])
    texts = [compiled._dispatcher.entries[0].source for compiled in (asked, plain)]
    assert ["storage_offset" in text for text in texts] == [True, False]


class Buffers(nn.Module):
    """Writes to what it is given and to one buffer, then reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(4))
        self.register_buffer("read", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        self.written.add_(2)
        return self.read * 3


def give(buffers: Buffers, x: torch.Tensor) -> None:
    buffers.read.data = x


def set_storage(buffers: Buffers, x: torch.Tensor) -> None:
    buffers.read.set_(x)


def give_a_view(buffers: Buffers, x: torch.Tensor) -> None:
    buffers.read.data = x.detach().view(2, 2).view(4)


def tie(buffers: Buffers, x: torch.Tensor) -> None:
    buffers.read.data = buffers.written


def tie_the_written(buffers: Buffers, x: torch.Tensor) -> None:
    buffers.written.set_(buffers.read)


@pytest.mark.parametrize("move", [give, set_storage, give_a_view, tie, tie_the_written])
@pytest.mark.parametrize("backend", BACKENDS)
def test_state_that_gets_memory_of_what_is_written_is_noticed(
    move: Callable[[Buffers, torch.Tensor], None], backend: str
) -> None:
    plain = Buffers()
    buffers = Buffers()
    compiled = tripwire.compile(buffers, backend=backend)
    for _ in range(3):
        check_same(plain(torch.ones(4)), compiled(torch.ones(4)))
    xs = torch.arange(4.0), torch.arange(4.0)
    kept = buffers.read.detach().clone(), buffers.written.detach().clone()
    move(plain, xs[0])
    move(buffers, xs[1])
    for _ in range(3):
        check_same(plain(xs[0]), compiled(xs[1]))
    for one in (plain, buffers):  # and apart again
        one.read.data, one.written.data = kept[0].clone(), kept[1].clone()
    hits = tripwire.statistics(compiled).hits
    for _ in range(3):
        check_same(plain(torch.ones(4)), compiled(torch.ones(4)))
    assert tripwire.statistics(compiled).hits == hits + 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_that_gets_new_memory_on_each_call_keeps_its_code(backend: str) -> None:
    average, written = torch.zeros(4), torch.zeros(4)

    def follow(x: torch.Tensor) -> torch.Tensor:
        written.add_(1)
        x.add_(1)
        average.data = average.data * 0.5 + x * 0.5
        return average * 2

    compiled: Any = tripwire.compile(follow, backend=backend)
    for _ in range(40):  # what follows may lie where the state was
        compiled(torch.ones(4))
    assert compiled.statistics().traces == 1
    check_same(average, torch.full((4,), 2.0))
