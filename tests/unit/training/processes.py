"""Run by torchrun in two processes: every case trains a compiled model beside a plain one.

Each rank writes what it saw as JSON, case by case; test_processes.py looks at it.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tripwire
from tripwire.dispatch.compiled import find_dispatcher

STEPS = 6
BACKEND = "aot_eager"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(4, 8, generator=generator)
    return x, x.sum(1, keepdim=True)


class Case:
    """One way to train, on one rank."""

    def __init__(self, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        self.compiled: list[Any] = []

    def compile(self, target: Any) -> Any:
        if not self._is_compiled:
            return target
        self.compiled.append(tripwire.compile(target, backend=BACKEND))
        return self.compiled[-1]

    def train(self, model: Any, net: Net, write_on: int | None = None) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        losses = []
        for step in range(STEPS):
            if step == 3 and dist.get_rank() == write_on:
                net.blocks[0].scale = 0.5  # retires code on this rank, and on no other
            x, y = data(step)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


def ddp_of_a_compiled_module(case: Case) -> list[float]:
    net = build()
    return case.train(DistributedDataParallel(case.compile(net)), net)


def ddp_compiled(case: Case) -> list[float]:
    net = build()
    losses = case.train(case.compile(DistributedDataParallel(net)), net)
    inner = net._compiled_call_impl
    case.compiled += [] if inner is None else [inner]
    return losses


def ddp_with_a_write_on_one_rank(case: Case) -> list[float]:
    net = build()
    return case.train(DistributedDataParallel(case.compile(net)), net, write_on=1)


def shard(net: Net) -> Net:
    mesh = init_device_mesh("cpu", (2,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def compile_forwards(case: Case, net: Net) -> None:
    for block in net.blocks:
        block.forward = case.compile(block.forward)


def fsdp_of_compiled_forwards(case: Case) -> list[float]:
    net = build()
    compile_forwards(case, net)
    return case.train(shard(net), net)


def fsdp_with_a_write_on_one_rank(case: Case) -> list[float]:
    net = shard(build())
    compile_forwards(case, net)
    return case.train(net, net, write_on=0)


def fsdp_compiled_whole(case: Case) -> list[float]:
    net = build()
    return case.train(case.compile(shard(net)), net)


def fsdp_of_compiled_modules(case: Case) -> list[float]:
    net = build()
    for index, block in enumerate(net.blocks):
        net.blocks[index] = case.compile(block)
    return case.train(shard(net), net)


def sharded_weights(case: Case) -> list[float]:
    """Tensor parallel: the weights are DTensors, and so is what is computed."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    for layer in (net[0], net[2]):
        for name, parameter in list(layer.named_parameters()):
            placed = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(layer, name, nn.Parameter(placed))
    model = case.compile(net)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        # Compiled code holds for one placement of its arguments.
        x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0) if step % 3 else Replicate()])
        loss = model(x).square().mean()
        loss.backward()
        for p in net.parameters():
            with torch.no_grad():
                p.sub_(0.1 * p.grad.redistribute(placements=p.placements))
            p.grad = None
        losses.append(loss.full_tensor().item())
    return losses


def a_collective_inside(case: Case) -> list[float]:
    def average(x: torch.Tensor) -> torch.Tensor:
        total = x * 2
        dist.all_reduce(total)
        return total / dist.get_world_size()

    call = case.compile(average)
    return [call(data(step)[0]).sum().item() for step in range(STEPS)]


CASES = [
    ddp_of_a_compiled_module,
    ddp_compiled,
    ddp_with_a_write_on_one_rank,
    fsdp_of_compiled_forwards,
    fsdp_with_a_write_on_one_rank,
    fsdp_compiled_whole,
    fsdp_of_compiled_modules,
    sharded_weights,
    a_collective_inside,
]


def describe(compiled: Any) -> dict[str, Any]:
    dispatcher = find_dispatcher(compiled) or compiled
    found = dispatcher.statistics()
    return {
        "calls": found.calls,
        "hits": found.hits,
        "traces": found.traces,
        "retired": found.retired,
        "slugs": sorted({refusal.slug for refusal in dispatcher.refusals}),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    seen: dict[str, Any] = {}
    for run in CASES:
        plain, case = run(Case(False)), Case(True)
        seen[run.__name__] = {
            "plain": plain,
            "compiled": run(case),
            "statistics": [describe(compiled) for compiled in case.compiled],
        }
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
