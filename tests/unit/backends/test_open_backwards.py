"""Inductor's backward is for the sizes of the call: what it assumes of open ones is a condition."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tripwire

LENGTHS = (13, 17, 15, 20)  # the third is the first that could find code for another length
NETS = {
    "in one dimension": lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 4, 3)),
    "in two": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)),
    "with a stride": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 4, 3)),
    "transposed": lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.ConvTranspose1d(4, 3, 3)),
    "in groups": lambda: nn.Sequential(nn.Conv1d(3, 6, 3), nn.Conv1d(6, 6, 3, groups=6)),
    "with a norm": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)
    ),
    "with channels last": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(
        memory_format=torch.channels_last
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_inductor_trains_convolutions_of_several_lengths(name) -> None:
    net = NETS[name]()
    plain = copy.deepcopy(net)
    compiled = tripwire.compile(net)
    is_flat = isinstance(net[0], nn.Conv1d)
    for length in LENGTHS:
        x = torch.randn(2, 3, length) if is_flat else torch.randn(2, 3, length, 12)
        results = compiled(x), plain(x)
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        for result in results:
            result.square().mean().backward()
        for found, wanted in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)
    assert compiled.statistics().traces == 2


class Experts(nn.Module):
    """Each of two layers gets the rows that it is chosen for: the graph is compiled in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        x = x.view(-1, 8).tanh()
        chosen = x.sum(1) > 0
        out = torch.zeros_like(x)
        for layer, mask in zip(self.layers, (chosen, ~chosen), strict=True):
            rows = mask.nonzero().squeeze(1)
            out.index_add_(0, rows, layer(x[rows]))
        return out.relu()


COMPUTED = {
    "rows of two sequences": lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 8), nn.ReLU()),
    "in parts": Experts,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_inductor_trains_where_all_that_it_keeps_has_computed_sizes(name) -> None:
    net = COMPUTED[name]()
    plain = copy.deepcopy(net)
    compiled = tripwire.compile(net)
    for length in LENGTHS:
        x = torch.randn(2, length, 8)
        results = compiled(x), plain(x)
        torch.testing.assert_close(*results)
        for result in results:
            result.square().mean().backward()
        for found, wanted in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad)
    assert compiled.statistics().traces == 2
