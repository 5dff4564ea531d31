"""Small models written for the tests: what users write who don't use `transformers`.

Rows are like those of architectures.py. A forward pass is a function of its inputs; nothing is
drawn inside. Every model has a number in an attribute that its forward reads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models.architectures import Architecture, MakeInputs
from torch import nn

BATCH = 2
STEPS = 5
WIDTH = 16
NODES = 7
EDGES = 12


class Cnn(nn.Module):
    """Convolutions, batch norm, pooling, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, WIDTH, 3, padding=1, groups=4),
            nn.BatchNorm2d(WIDTH),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.hidden = nn.Linear(WIDTH * 4, WIDTH)
        self.head = nn.Linear(WIDTH, 10)
        self.temperature = 0.5

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.features(pixels).flatten(1)
        return self.head(F.relu(self.hidden(x))) / self.temperature


class UNet(nn.Module):
    """Down, across, up; skips are joined at sizes that are read from tensors."""

    def __init__(self, widths: tuple[int, ...] = (8, 12, 16)) -> None:
        super().__init__()
        ins = (3, *widths[:-1])
        self.down = nn.ModuleList(
            nn.Conv2d(i, o, 3, padding=1) for i, o in zip(ins, widths, strict=True)
        )
        joined = [(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)]
        self.up = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in joined)
        self.mix = nn.Linear(widths[-1], widths[-1])
        self.last = nn.Conv2d(widths[0], 2, 1)
        self.slope = 0.1

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        skips, x = [], pixels
        for conv in self.down:
            x = F.leaky_relu(conv(x), self.slope)
            skips.append(x)
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = self.mix(x.movedim(1, -1)).movedim(-1, 1)
        skips.pop()
        for conv in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = F.leaky_relu(conv(torch.cat([x, skip], dim=1)), self.slope)
        return self.last(F.interpolate(x, size=pixels.shape[-2:]))


class Recurrent(nn.Module):
    """An LSTM or a GRU of torch's own, in both directions."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.scale = 2.0

    def forward(self, steps: torch.Tensor) -> tuple[torch.Tensor, Any]:
        seen, state = self.rnn(steps)
        return self.head(F.relu(self.hidden(seen))) * self.scale, state


class CellLoop(nn.Module):
    """A cell written by hand, stepped over time in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.gates = nn.Linear(2 * WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.forget = 1.0

    def forward(self, steps: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(steps)
        memory = x.new_zeros(x.shape[0], WIDTH)
        outputs = []
        for now in x.unbind(1):
            keep, take, show = self.gates(torch.cat([now, memory], -1)).chunk(3, -1)
            memory = (keep + self.forget).sigmoid() * memory + take.tanh()
            outputs.append(show.sigmoid() * memory.tanh())
        return {"outputs": self.head(torch.stack(outputs, 1)), "memory": memory}


class GraphNet(nn.Module):
    """Messages along edges: gathered, scattered, normalised by degree."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.message = nn.Linear(2 * WIDTH, WIDTH)
        self.update = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.rounds = 2
        self.damping = 0.5

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        degree = torch.zeros(nodes.shape[0]).index_add_(0, target, torch.ones(target.shape[0]))
        x = self.embed(nodes)
        for _ in range(self.rounds):
            sent = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
            got = torch.zeros_like(x).scatter_add_(0, target[:, None].expand_as(sent), sent)
            most = torch.zeros_like(x).scatter_reduce(
                0, target[:, None].expand_as(sent), sent, "amax", include_self=False
            )
            mean = got / degree.clamp(min=1)[:, None] + self.damping * most
            x = x + torch.tanh(self.update(torch.cat([x, mean], -1)))
        return self.head(x)


class Detector(nn.Module):
    """Boxes from anchors, overlaps, suppression by masks; as many boxes out as are good."""

    def __init__(self, boxes: int = 6) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, WIDTH, 3, stride=4)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, 3)
        self.offsets = nn.Linear(WIDTH, 4)
        self.boxes = boxes
        self.overlap = 0.3

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.backbone(pixels)
        rows, columns = x.shape[-2:]
        y, z = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        anchors = torch.stack([z, y, z + 2, y + 2], -1).flatten(0, 1).float()
        x = F.relu(self.hidden(x.flatten(2).transpose(1, 2)))
        best, labels = self.scores(x).sigmoid().max(-1)
        boxes = anchors + self.offsets(x).tanh()
        best, order = best.topk(self.boxes, dim=-1)
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        keep = self._suppress(boxes)
        return {
            "boxes": boxes[keep],
            "labels": labels.gather(1, order)[keep],
            "scores": torch.where(keep, best, torch.zeros_like(best)),
            "found": keep.sum(-1),
        }

    def _suppress(self, boxes: torch.Tensor) -> torch.Tensor:
        low = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
        high = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        area = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
        union = area[:, :, None] + area[:, None] - shared
        overlaps = shared / union.clamp(min=1e-6) > self.overlap
        keep = torch.ones(boxes.shape[:2], dtype=torch.bool)
        for i in range(self.boxes):
            later = torch.arange(self.boxes) > i
            keep = keep & ~(overlaps[:, i] & later & keep[:, i : i + 1])
        return keep


class Denoiser(nn.Module):
    """A block of a diffusion model: a time embedding shifts and scales what is convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.first = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.last = nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.period = 10000.0

    def forward(self, noisy: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        half = WIDTH // 2
        rates = torch.exp(-math.log(self.period) * torch.arange(half) / half)
        angles = step[:, None].float() * rates
        when = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        scale, shift = when[..., None, None].chunk(2, dim=1)
        x = F.silu(self.norm(self.first(noisy)) * (1 + scale) + shift)
        flat = x.flatten(2).transpose(1, 2)
        mixed, _ = self.attention(flat, flat, flat, need_weights=False)
        return self.last(x + mixed.transpose(1, 2).reshape(x.shape)) + noisy


class Mixture(nn.Module):
    """Experts that get the tokens which chose them; how many that are is never asked."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(experts)
        )
        self.chosen = 2
        self.temperature = 0.7

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        x = self.embed(steps).flatten(0, 1)
        weights, choice = (self.router(x) / self.temperature).softmax(-1).topk(self.chosen)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(choice == number)
            result.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return result.view_as(steps)


class Autoencoder(nn.Module):
    """A variational autoencoder; the noise is passed in."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.to_moments = nn.Linear(WIDTH, 8)
        self.decode = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.beta = 0.25

    def forward(self, data: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, spread = self.to_moments(F.relu(self.encode(data))).chunk(2, -1)
        found = self.decode(mean + noise * torch.exp(0.5 * spread))
        divergence = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(-1).mean()
        return {"found": found, "loss": F.mse_loss(found, data) + self.beta * divergence}


class Reader(nn.Module):
    """Tokens of texts of different lengths; the longest one is read out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)
        self.scale = 4.0

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        tokens = tokens[:, :longest]
        padding = torch.arange(longest) >= lengths[:, None]
        x = self.encoder(self.embed(tokens) * self.scale, src_key_padding_mask=padding)
        x = x.masked_fill(padding[..., None], 0).sum(1) / lengths[:, None]
        return self.head(x)


class Tied(nn.Module):
    """One weight in two places, a buffer that is written, and another that is a table."""

    table: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.linspace(-1, 1, 50 * WIDTH).view(50, WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.scale = 0.5

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.mix(self.embed(tokens) + self.table[tokens]) * self.scale
        return self.head(x) + lengths[:, None, None] * self.calls


def _seeded(seed: int, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _inputs(**shapes: tuple[int, ...]) -> MakeInputs:
    def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
        return _seeded(seed, **shapes)

    return inputs


def _graph(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, NODES, (2, EDGES), generator=generator)
    return _seeded(seed, nodes=(NODES, WIDTH)) | {"edges": edges}


def _noisy(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    step = torch.randint(0, 1000, (BATCH,), generator=generator)
    return _seeded(seed, noisy=(BATCH, 4, 8, 8)) | {"step": step}


def _texts(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 50, (BATCH, 9), generator=generator)
    lengths = torch.tensor([7, 3 + seed])
    return {"tokens": tokens, "lengths": lengths}


def _own(name: str, make: Callable[[], nn.Module], inputs: MakeInputs) -> Architecture:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make().eval()

    return Architecture(name, "handmade", build, inputs)


_STEPS = _inputs(steps=(BATCH, STEPS, WIDTH))

HANDMADE: tuple[Architecture, ...] = (
    _own("cnn", Cnn, _inputs(pixels=(BATCH, 3, 16, 16))),
    _own("unet", UNet, _inputs(pixels=(BATCH, 3, 18, 14))),
    _own("lstm", functools.partial(Recurrent, nn.LSTM), _STEPS),
    _own("gru", functools.partial(Recurrent, nn.GRU), _STEPS),
    _own("cell-loop", CellLoop, _STEPS),
    _own("graph-net", GraphNet, _graph),
    _own("detector", Detector, _inputs(pixels=(BATCH, 3, 24, 24))),
    _own("denoiser", Denoiser, _noisy),
    _own("mixture", Mixture, _STEPS),
    _own("autoencoder", Autoencoder, _inputs(data=(BATCH, WIDTH), noise=(BATCH, 4))),
    _own("reader", Reader, _texts),
    _own("tied", Tied, _texts),
)
