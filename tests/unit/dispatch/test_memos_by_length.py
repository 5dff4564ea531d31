"""A tensor that the call keeps for the next one, and makes anew for another length, stays open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import check_same
from torch import nn
from torch.nn import functional
from unit.dispatch.sidebyside import BACKENDS

import tripwire
from tripwire.reading.reader import SWAPS_AT_ONCE

LENGTHS = (5, 9, 12, 7, 5, 16, 3, 8, 11, 9, 14, 6)


class OneMask(nn.Module):
    """It is made again for each other length; only its size is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.mask is None or self.mask.shape[0] != length:
            self.mask = torch.tril(torch.ones(length, length))
        return self.mask @ x


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(2, 2), persistent=False)
        self.mask: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.mask.size(0) != length:
            self.mask = torch.tril(torch.ones(length, length))
        return self.mask @ x


class Table(nn.Module):
    """It grows; calls in between only read it."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self.table: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length > self.longest:
            self.longest = length
            self.table = torch.arange(length).float()[:, None].cos()
        result: torch.Tensor = x * self.table[:length]
        return result


class InADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"mask": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.kept["mask"] is None or len(self.kept["mask"]) != length:
            self.kept["mask"] = torch.ones(length, 1)
        found: torch.Tensor = self.kept["mask"]
        return x * found.cumsum(0)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with at most this many traces
    "one mask": (OneMask, 3),
    "a buffer": (Buffer, 3),
    "a table that grows": (Table, 3),
    "in a dict": (InADict, 3),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_made_anew_for_each_length_is_traced_a_few_times(name: str, backend: str) -> None:
    make, traces = PROGRAMS[name]
    plain, net = make(), make()
    fast = tripwire.compile(net, backend=backend)
    for turn, length in enumerate((*LENGTHS, *LENGTHS)):
        if turn == 15:
            for one in (plain, net):  # another one is there
                if isinstance(one, (OneMask, Buffer)):
                    one.mask = torch.full((length, length), 2.0)
        x = torch.randn(2, length, 3)
        check_same(fast(x), plain(x))
    found = tripwire.statistics(fast)
    if SWAPS_AT_ONCE:  # without the C modules some of these numbers are closed
        assert found.traces <= traces
        assert found.hits >= 2 * len(LENGTHS) - traces


class Layer(nn.Module):
    """Keeps its keys for the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(4, 8)
        self.keys: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys = self.qk(x).chunk(2, -1)
        if self.keys is not None:
            keys = torch.cat([self.keys, keys], 1)
        self.keys = keys
        return x + functional.scaled_dot_product_attention(queries, keys, keys)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layers", [2, 6])
def test_keys_that_layers_keep_need_four_traces(layers: int, backend: str) -> None:
    def decode(compile_it: Callable[[nn.Module], Any]) -> Iterator[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(*(Layer() for _ in range(layers)))
        fast = compile_it(net)
        with torch.no_grad():
            for length in (5, 7, 3):
                for layer in net:
                    layer.keys = None
                yield fast(torch.randn(1, length, 4))
                for _ in range(6):
                    yield fast(torch.randn(1, 1, 4))
        yield fast

    *expected, _ = decode(lambda net: net)
    *results, fast = decode(lambda net: tripwire.compile(net, backend=backend))
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
    assert tripwire.statistics(fast).traces <= 4
