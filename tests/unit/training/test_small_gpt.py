"""A small GPT trains to eager's loss with one entry for training and one for evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from unit.training.pairs import Pair

VOCABULARY, LENGTH, WIDTH, HEADS = 17, 16, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = self.attend(self.norms[0](x)).view(rows, length, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None):
        x = self.embed(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counting upwards from anywhere, by one or by two."""
    generator = torch.Generator().manual_seed(step)
    start, by = torch.randint(VOCABULARY, (8, 1), generator=generator), 1 + step % 2
    text = (start + by * torch.arange(LENGTH + 1)) % VOCABULARY
    return text[:, :-1], text[:, 1:]


def train(pair: Pair, steps: int) -> list[list[float]]:
    """Losses of both sides, with evaluations and a schedule on the way."""
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(side.optimizer, steps) for side in pair.sides
    ]
    losses: list[list[float]] = [[], []]
    for step in range(steps):
        tokens, targets = batch(step)
        for index, side in enumerate(pair.sides):
            side.optimizer.zero_grad(set_to_none=True)
            loss = side.call(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
            side.optimizer.step()
            schedules[index].step()
            losses[index].append(loss.item())
        if step % 10 == 9:
            tests = []
            for side in pair.sides:
                side.call.eval()
                with torch.no_grad():
                    tests.append(side.call(tokens))
                side.call.train()
            torch.testing.assert_close(*tests, rtol=0.01, atol=0.01)
    return losses


def adamw(parameters):
    return torch.optim.AdamW(parameters, 3e-3, weight_decay=0.01)


def check(backend: str, steps: int, layers: int, tolerance: float) -> list[float]:
    pair = Pair(lambda: Gpt(layers), backend, optimizer=adamw)
    losses = train(pair, steps)
    for mine, plain in zip(*losses, strict=True):
        assert mine == pytest.approx(plain, rel=tolerance, abs=tolerance)
    evaluations = steps // 10
    pair.check(traces=2, hits=steps + evaluations - 2)
    return losses[0]


@pytest.mark.parametrize(("backend", "tolerance"), [("eager", 0.0), ("aot_eager", 1e-4)])
def test_twenty_steps_learn_as_plain_steps_do(backend, tolerance) -> None:
    check(backend, 20, 1, tolerance)


@pytest.mark.slow
def test_two_hundred_steps_with_inductor_learn() -> None:
    losses = check("inductor", 200, 2, 5e-3)
    assert losses[-1] < losses[0] / 10  # it learns to count
