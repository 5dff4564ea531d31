"""A compiled model trains beside its plain twin, and nothing may tell the two apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import tripwire

# Inductor's C++ compiler takes seconds for each graph.
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
# How close: the first runs the very same calls.
TOLERANCES = {"eager": 0.0, "aot_eager": 1e-6, "inductor": 2e-5}
WIDTH = 6


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], 0.05, momentum=0.9)


def square(call: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss that is computed outside the compiled callable."""
    return call(x).square().mean()


@dataclass
class Side:
    """One of the two."""

    model: nn.Module
    call: Any  # the compiled module, or the model itself
    optimizer: torch.optim.Optimizer


class Pair:
    """Two models made alike; the first is called through tripwire."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        backend: Any,
        *,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        shape: tuple[int, ...] = (3, WIDTH),
        tolerance: float | None = None,
        **options: Any,
    ) -> None:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(make())
        self.compiled = tripwire.compile(models[0], backend=backend, **options)
        calls = (self.compiled, models[1])
        self.sides = [
            Side(m, c, optimizer(m.parameters())) for m, c in zip(models, calls, strict=True)
        ]
        self.shape = shape
        self.tolerance = TOLERANCES[backend] if tolerance is None else tolerance
        self.steps = 0

    def same(self, results: list[Any]) -> None:
        """Both sides came to the same: tensors, or None, in nested values."""
        mine, plain = results
        torch.testing.assert_close(
            mine, plain, rtol=self.tolerance, atol=self.tolerance, equal_nan=True
        )

    def each(self, act: Callable[[Side], Any]) -> None:
        """Do something on both sides, and compare what comes of it."""
        self.same([act(side) for side in self.sides])

    def step(
        self, loss: Callable[[Any, torch.Tensor], torch.Tensor] = square, *, update: bool = True
    ) -> None:
        """One training step on both sides: losses, gradients and new weights are the same."""
        self.steps += 1

        def run(side: Side) -> tuple[Any, ...]:
            x = self.batch().requires_grad_()
            with self.seeded():
                value = loss(side.call, x)
            value.backward()
            found = (value.detach(), x.grad, gradients(side.model))
            if update:
                side.optimizer.step()
                side.optimizer.zero_grad()
            return found

        self.each(run)
        self.compare_state()

    def evaluate(self) -> None:
        """`eval()` and `no_grad`, then back to training."""

        def run(side: Side) -> torch.Tensor:
            side.call.eval()
            with torch.no_grad():
                value = side.call(self.batch())
            side.call.train()
            return value

        self.each(run)

    def play(self, loss: Callable[[Any, torch.Tensor], torch.Tensor] = square) -> None:
        """Steps, with an evaluation in between."""
        self.step(loss)
        self.step(loss)
        self.evaluate()
        self.step(loss)
        self.evaluate()
        self.step(loss)

    def compare_state(self) -> None:
        self.each(lambda side: {k: v.clone() for k, v in side.model.state_dict().items()})

    def batch(self) -> torch.Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(self.steps))

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        torch.manual_seed(1000 + self.steps)
        yield

    def check(self, *, traces: int, hits: int, entries: int | None = None) -> None:
        """How it ran: no more traces than these, and the rest of the calls hit."""
        found = self.compiled.statistics()
        assert (found.traces, found.hits, found.refusals) == (traces, hits, 0), found
        assert found.entries == (traces if entries is None else entries)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


class Mlp(nn.Module):
    """Two layers with a residual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
