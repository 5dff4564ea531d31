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
