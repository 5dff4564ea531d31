"""An input that no used output leads to gets no gradient at all, as in plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from unit.training.pairs import BACKENDS, WIDTH, Pair

import tripwire
from tripwire.backends.backwards import find_feeds

backends = pytest.mark.parametrize("backend", BACKENDS)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH, bias=False)  # the norm would leave noise of one
        self.norm = nn.BatchNorm1d(WIDTH)
        self.left = nn.Linear(WIDTH, 2)
        self.right = nn.Linear(WIDTH, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.norm(self.trunk(x)).relu()
        return self.left(h) * self.scale, self.right(h.detach()), h, h.view(-1)


def decaying(parameters):
    """An optimizer to which None and zeros are two things."""
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.5)


@backends
def test_weights_of_an_unused_head_stay_where_they_are(backend) -> None:
    pair = Pair(TwoHeads, backend, optimizer=decaying)
    for used in ([0], [1], [0, 1], [2], [3], [1, 3], [0]):

        def loss(call, x, used=used):
            outputs = call(x)
            return sum(outputs[i].square().mean() for i in used)

        pair.step(loss)
    pair.check(traces=1, hits=6)


@backends
def test_inputs_that_are_results_of_other_compiled_calls(backend) -> None:
    def split(x, w, v):
        return x * w, v.sin(), x

    compiled = tripwire.compile(split, backend=backend, fullgraph=True)
    for seed in range(4):
        found = []
        for call in (compiled, split):
            torch.manual_seed(seed)
            x, w, v = (torch.randn(3, requires_grad=True) for _ in range(3))
            first, second, _ = call(x, w, v)
            third, fourth, fifth = call(first, second, v * 2)
            ((third, fourth, fifth)[seed % 3]).sum().backward()
            found.append([x.grad, w.grad, v.grad])
        assert [g is None for g in found[0]] == [g is None for g in found[1]]
        torch.testing.assert_close(found[0], found[1])


@backends
def test_an_output_that_was_written_to_leads_back_to_what_was_written(backend) -> None:
    def fill(x, w, v):
        one = torch.zeros(2, 3)
        one[0] = x * w
        two = torch.zeros(3)
        two.add_(v)
        return one, two

    compiled = tripwire.compile(fill, backend=backend, fullgraph=True)
    for seed in range(4):
        found = []
        for call in (compiled, fill):
            torch.manual_seed(seed)
            x, w, v = (torch.randn(3, requires_grad=True) for _ in range(3))
            call(x, w, v)[seed % 2].sum().backward()
            found.append([x.grad, w.grad, v.grad])
        assert [g is None for g in found[0]] == [g is None for g in found[1]]
        torch.testing.assert_close(found[0], found[1])
    assert compiled.statistics().hits == 3


def test_what_leads_where_is_read_off_the_graph() -> None:
    x, w, v, frozen = (torch.ones(3, requires_grad=grad) for grad in (True, True, True, False))

    def f(x, w, v, frozen):
        with torch.no_grad():
            cut = v * 2
        return x * w, w + cut, v * frozen

    trace = tripwire.trace(f, x, w, v, frozen)
    assert find_feeds(trace.graph) == {0: {0}, 1: {0, 1}, 2: {2}}
