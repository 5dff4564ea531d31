"""Back ends by name: tripwire's own, Inductor, and those that torch.compile knows."""

from __future__ import annotations

import pytest
import torch
from support import run_python
from torch import nn

import tripwire


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))


def check_trains(backend) -> None:
    """Results and gradients of compiled calls are the plain module's."""
    model, twin, x = build(), build(), torch.randn(3, 4)
    compiled = tripwire.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        given, wanted = compiled(x), twin(x)
        torch.testing.assert_close(given, wanted)
        given.square().sum().backward()
        wanted.square().sum().backward()
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)
    assert compiled.statistics().hits == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_back_end_by_name_gives_results_and_gradients(backend) -> None:
    check_trains(backend)


@pytest.mark.slow
def test_inductor_gives_results_and_gradients() -> None:
    check_trains("inductor")


def test_all_back_ends_that_torch_knows_are_listed() -> None:
    assert {"eager", "inductor", "aot_eager"} <= set(tripwire.list_backends())


def test_nothing_of_inductor_or_dynamo_is_imported_before_it_is_used() -> None:
    told = run_python(
        "import sys, torch, tripwire\n"
        "before = set(sys.modules)\n"
        "f = tripwire.compile(lambda x: x + 1, backend='inductor')\n"
        "new = set(sys.modules) - before\n"
        "print(sorted(m for m in new if m in ('torch._dynamo', 'torch._inductor')))"
    )
    assert told.strip() == "[]"
