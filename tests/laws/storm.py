"""A storm: threads call compiled functions while others write, compile, drop and collect.

Every channel has a version that only one thread writes. `begun` is set before a write and `done`
after it, so a call that started at `done` = lo and ended at `begun` = hi may have seen any version
from lo to hi, and nothing else. Values go in circles, so that retired entries come back.

Run as a script, in a process of its own: what crashes or hangs there fails one test, and says
where. Prints a line of figures as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from crew import Crew, Failed, begin
from torch import nn

import tripwire
from tripwire.writes.sentry import IS_COMPILED

ROUND = 5  # values per channel: fewer than entries that are kept
CALLERS = 8


class Channel:
    """One place that is written by one thread and read by a compiled function."""

    def __init__(self, name: str, function: Callable[..., Any], write: Callable[[int], None]):
        self.name = name
        self.function = function
        self.compiled = tripwire.compile(function, backend="eager")
        self._write = write
        self.begun = self.done = 0
        self._open: dict[int, int] = {}  # calls that are under way: thread → version at the start
        write(0)

    def write(self) -> None:
        # A value that comes back while one call goes on can't be told from one that stayed.
        while min(self._open.copy().values(), default=self.begun) <= self.begun + 1 - ROUND:
            time.sleep(0.001)
        self.begun += 1
        self._write(self.begun % ROUND)
        self.done = self.begun

    def call(self, compiled: Any, x: torch.Tensor) -> None:
        me = threading.get_ident()
        lo = self._open[me] = self.done
        try:
            got = compiled(x)
        finally:
            del self._open[me]
        hi = self.begun
        for value, start in zip(got.tolist(), x.tolist(), strict=True):
            seen = value - start
            if seen not in {float(v % ROUND) for v in range(lo, min(hi, lo + ROUND) + 1)}:
                raise Failed(f"{self.name}: {seen} is no value of versions {lo} to {hi}")


# --- what is read ------------------------------------------------------------------------------

SCALE = 0.0
TABLE = {"a": 0.0, "b": 1.0}
ROW = [0.0]
WEIGHT = torch.zeros(3)
CELL_MODULE: Any = None


class Settings:
    level = 0.0

    def __init__(self) -> None:
        self.value = 0.0


class Derived(Settings):
    pass


SETTINGS = Settings()
DERIVED = Derived()


def find_peak() -> int:
    """The most memory that this process had, in kilobytes.

    getrusage counts what its parent had when it forked.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + 0.0


def by_global(x: torch.Tensor) -> torch.Tensor:
    return x + SCALE


def by_attribute(x: torch.Tensor) -> torch.Tensor:
    return x + SETTINGS.value


def by_class(x: torch.Tensor) -> torch.Tensor:
    return x + DERIVED.level


def by_dict(x: torch.Tensor) -> torch.Tensor:
    return x + TABLE["a"]


def by_list(x: torch.Tensor) -> torch.Tensor:
    return x + ROW[0]


def by_helper(x: torch.Tensor) -> torch.Tensor:
    return helper(x)


def by_tensor(x: torch.Tensor) -> torch.Tensor:
    return x + WEIGHT


def by_default(x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    return x + shift


def make_helper(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def shift(x: torch.Tensor) -> torch.Tensor:
        return x + float(value)

    return shift


HELPERS = [make_helper(value) for value in range(ROUND)]
TENSORS = [torch.full((3,), float(value)) for value in range(ROUND)]


def by_cell() -> tuple[Callable[..., Any], Callable[[int], None]]:
    held = 0.0

    def read(x: torch.Tensor) -> torch.Tensor:
        return x + held

    def write(value: int) -> None:
        nonlocal held
        held = float(value)

    return read, write


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("shift", torch.zeros(3))
        self.factor = 0.0
        self.inner = nn.Identity()


class ByParameter(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class ByBuffer(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class ByFactor(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.factor


class Add(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value


class BySubmodule(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def build_channels() -> list[Channel]:
    def set_global(value: int) -> None:
        global SCALE
        SCALE = float(value)

    def set_helper(value: int) -> None:
        global helper
        helper = HELPERS[value]

    def set_tensor(value: int) -> None:
        global WEIGHT
        WEIGHT = TENSORS[value]

    def set_default(value: int) -> None:
        by_default.__defaults__ = (float(value),)

    parameter, buffer, factor, outer = ByParameter(), ByBuffer(), ByFactor(), BySubmodule()
    parameters = [nn.Parameter(tensor, requires_grad=False) for tensor in TENSORS]
    inners = [Add(float(value)) for value in range(ROUND)]
    read_cell, write_cell = by_cell()
    return [
        Channel("global", by_global, set_global),
        Channel("attribute", by_attribute, lambda v: setattr(SETTINGS, "value", float(v))),
        Channel("class", by_class, lambda v: setattr(Settings, "level", float(v))),
        Channel("dict", by_dict, lambda v: TABLE.__setitem__("a", float(v))),
        Channel("list", by_list, lambda v: ROW.__setitem__(0, float(v))),
        Channel("function", by_helper, set_helper),
        Channel("tensor", by_tensor, set_tensor),
        Channel("default", by_default, set_default),
        Channel("cell", read_cell, write_cell),
        Channel("parameter", parameter, lambda v: setattr(parameter, "weight", parameters[v])),
        Channel("buffer", buffer, lambda v: buffer._buffers.__setitem__("shift", TENSORS[v])),
        Channel("module attribute", factor, lambda v: setattr(factor, "factor", float(v))),
        Channel("submodule", outer, lambda v: setattr(outer, "inner", inners[v])),
    ]


class Own(nn.Module):
    """Called by one thread alone: its effects must come out as they do without the others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total += x
        return self.total * 2


# --- the storm -----------------------------------------------------------------------------------


class Storm(Crew):
    def __init__(self, seconds: float, seed: int) -> None:
        self.channels = build_channels()
        super().__init__(seconds, seed)
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        self.work([self.call] * CALLERS + [self.write] * 2 + [self.compile, self.collect])

    def call(self, number: int) -> None:
        chance = random.Random(self.seed + number)
        own, plain = Own(), Own()
        compiled = tripwire.compile(own, backend="eager")
        calls = 0
        while self.is_on():
            channel = chance.choice(self.channels)
            x = torch.tensor([float(chance.randrange(100)) for _ in range(3)])
            channel.call(channel.compiled, x)
            if calls % 8 == 0:
                if not torch.equal(compiled(x), plain(x)) or own.calls != plain.calls:
                    raise Failed(f"an effect of thread {number} was lost at call {calls}")
            calls += 1
        self.counts["calls"] += calls
        self.counts["own hits"] += tripwire.statistics(compiled).hits

    def write(self, number: int) -> None:
        chance = random.Random(self.seed + number)
        mine = self.channels[number % 2 :: 2]
        while self.is_on():
            channel = chance.choice(mine)
            channel.write()
            self.counts["writes"] += 1
            time.sleep(chance.choice((0.0, 0.0, 0.001, 0.01)))

    def compile(self, number: int) -> None:
        chance = random.Random(self.seed + number)
        while self.is_on():
            channel = chance.choice(self.channels)
            fresh = tripwire.compile(channel.function, backend="eager")
            for _ in range(3):
                channel.call(fresh, torch.ones(3))
            if chance.random() < 0.2:  # what the others use is compiled anew: it may have given up
                channel.compiled = fresh
            self.counts["compiles"] += 1

    def collect(self, number: int) -> None:
        while self.is_on():
            gc.collect()
            self.counts["collections"] += 1
            time.sleep(0.05)


def main() -> int:
    options = begin(argparse.ArgumentParser(), grace=60)
    sys.setswitchinterval(1e-4)
    storm = Storm(options.seconds, options.seed)
    storm.run()
    hits = sum(tripwire.statistics(channel.compiled).hits for channel in storm.channels)
    retired = sum(tripwire.statistics(channel.compiled).retired for channel in storm.channels)
    figures = {
        "sentry": "C" if IS_COMPILED else "twin",
        "seed": options.seed,
        "hits of the last": hits,
        "retired of the last": retired,
        "megabytes": find_peak() // 1024,
        **storm.counts,
        "errors": storm.errors,
    }
    print(json.dumps(figures))
    return 1 if storm.errors else 0


if __name__ == "__main__":
    sys.exit(main())
