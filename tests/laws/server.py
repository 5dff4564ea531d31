"""A server: eight threads call one compiled model, while adapters are switched and weights swapped.

Requests are of all lengths. The model's answer has three parts. `hidden` is the same whatever is
swapped, since new weights are copies: it is compared with the plain answer. `weights` and `adapter`
tell which version of each the call saw: one that was current while the call went on. Every other
call goes to the plain model, under the same load, and both are timed.

Run as a script, in a process of its own. Prints a line of figures as JSON.

    python tests/laws/server.py --seconds 60 --backend inductor
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from crew import Crew, Failed, begin
from torch import nn

import tripwire

CALLERS, WIDTH, LONGEST, ADAPTERS = 8, 32, 48, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(query, key, value)
        return x + F.gelu(self.feed(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.versions = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(4))
        self.adapters = nn.ModuleDict({str(n): nn.Linear(1, 1) for n in range(ADAPTERS)})
        for number, adapter in self.adapters.items():
            nn.init.zeros_(adapter.weight)
            nn.init.constant_(adapter.bias, float(number))
        self.active = "0"

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {
            "hidden": x,
            "weights": torch.stack([version * 1.0 for version in self.versions]),
            "adapter": self.adapters[self.active](torch.ones(1)),
        }


class Versions:
    """Of one thing that one thread writes: which are current from a moment to another."""

    def __init__(self, write: Callable[[int], None]) -> None:
        self._write = write
        self.begun = self.done = 0

    def write(self) -> None:
        self.begun += 1
        self._write(self.begun)
        self.done = self.begun


class Server(Crew):
    def __init__(self, seconds: float, seed: int, backend: str, pause: float) -> None:
        super().__init__(seconds, seed)
        torch.manual_seed(seed)
        self.model = Model().eval()
        self.compiled: Any = tripwire.compile(self.model, backend=backend)
        self.pause = pause  # between two adapters; weights stay ten times as long
        self.took: dict[str, list[float]] = {"compiled": [], "plain": []}
        self.memory: list[int] = []
        self.weights = Versions(self.swap)
        self.adapter = Versions(self.switch)
        chance = torch.Generator().manual_seed(seed)
        lengths = range(2, LONGEST)
        self.requests = [torch.randn(1, n, WIDTH, generator=chance) for n in lengths]
        with torch.no_grad():
            self.answers = [self.model(x)["hidden"] for x in self.requests]
            for x in self.requests[:4]:  # servers warm up
                self.compiled(x)
        self.ends = time.monotonic() + seconds  # from now on

    def swap(self, version: int) -> None:
        """New tensors for all weights; only the versions have other values."""
        state = {
            name: torch.full((), float(version)) if name.startswith("versions.") else weight.clone()
            for name, weight in self.model.state_dict().items()
        }
        self.model.load_state_dict(state, assign=True)

    def switch(self, version: int) -> None:
        self.model.active = str(version % ADAPTERS)

    # --- threads ---

    def run(self) -> None:
        jobs = [self.write_adapters, self.write_weights, self.measure]
        self.work([*[self.call] * CALLERS, *jobs])

    def guarded(self, job: Callable[[int], None], number: int) -> None:
        with torch.no_grad():
            super().guarded(job, number)

    def call(self, number: int) -> None:
        chance = random.Random(self.seed + number)
        while self.is_on():
            side = chance.choice(("compiled", "plain"))
            model = self.compiled if side == "compiled" else self.model
            index = chance.randrange(len(self.requests))
            weights, adapter = self.weights.done, self.adapter.done
            began = time.perf_counter()
            answer = model(self.requests[index])
            self.took[side].append(time.perf_counter() - began)
            self.check(side, answer, index, weights, adapter)
            time.sleep(chance.expovariate(200))

    def check(
        self, side: str, answer: dict[str, torch.Tensor], index: int, weights: int, adapter: int
    ) -> None:
        """`weights`, `adapter`: the versions that were there when the call began."""
        found = answer["hidden"]
        if not torch.allclose(found, self.answers[index], rtol=1e-4, atol=1e-4):
            worst = (found - self.answers[index]).abs().max().item()
            raise Failed(f"{side}: a request of {found.shape[1]} is off by {worst}")
        for seen in answer["weights"].tolist():
            if not weights <= seen <= self.weights.begun:
                raise Failed(f"{side}: weights {seen} in {weights} to {self.weights.begun}")
        may_be = {n % ADAPTERS for n in range(adapter, self.adapter.begun + 1)}
        if answer["adapter"].item() not in may_be:
            raise Failed(f"{side}: adapter {answer['adapter'].item()}, not of {may_be}")

    def write_adapters(self, number: int) -> None:
        while self.is_on():
            time.sleep(self.pause)
            self.adapter.write()

    def write_weights(self, number: int) -> None:
        while self.is_on():
            time.sleep(10 * self.pause)
            self.weights.write()

    def measure(self, number: int) -> None:
        while self.is_on():
            self.memory.append(find_memory())
            time.sleep(0.2)

    # --- figures ---

    def figures(self) -> dict[str, Any]:
        found = tripwire.statistics(self.compiled)
        third = len(self.memory) // 3
        return {
            "seed": self.seed,
            "calls": {side: len(took) for side, took in self.took.items()},
            "hits": found.hits,
            "traces": found.traces,
            "weights": self.weights.done,
            "adapters": self.adapter.done,
            **{f"{side} ms": describe(took) for side, took in self.took.items()},
            # Most of it is there after a third of the time.
            "megabytes": [max(self.memory[third : 2 * third]), max(self.memory[2 * third :])],
            "errors": self.errors,
        }


def describe(seconds: list[float]) -> dict[str, float]:
    """The middle, and what one call in a hundred exceeds, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": round(1000 * cuts[49], 2), "p99": round(1000 * cuts[98], 2)}


def find_memory() -> int:
    """What this process has, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--pause", type=float, default=0.5)
    options = begin(parser, grace=300)
    server = Server(options.seconds, options.seed, options.backend, options.pause)
    server.run()
    print(json.dumps(server.figures()))
    return 1 if server.errors else 0


if __name__ == "__main__":
    sys.exit(main())
