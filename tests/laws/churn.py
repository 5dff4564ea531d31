"""Everything that compiled functions read from grows and shrinks in other threads meanwhile.

What they read stays as it is, so each result is known. Looking through a container that another
thread writes to must neither fail nor end up with half of it.

    python tests/laws/churn.py --seconds 5 --seed 1
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from random import Random
from typing import Any

import torch
from crew import Crew, begin
from torch import nn

import tripwire

NAMES = [f"name{n}" for n in range(50)]
LONGEST = 50


class Record:
    factor = 2.0

    def __init__(self) -> None:
        self.shift = 1.0


class Table(dict):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


RECORD = Record()
PLAIN = {"factor": 2.0}
TABLE = Table(factor=2.0)
ORDERED = OrderedDict(factor=2.0)
MAKING: defaultdict[str, Any] = defaultdict(list, factor=2.0)
ROW = [2.0]
QUEUE = deque([2.0])
MEMBERS: set[object] = {2.0}
TENSOR = torch.full((3,), 2.0)
NET = Net()
DICTS = [PLAIN, TABLE, ORDERED, MAKING, RECORD.__dict__, NET.__dict__, TENSOR.__dict__, globals()]


def by_dicts(x: torch.Tensor) -> torch.Tensor:
    return x * PLAIN["factor"] * TABLE["factor"] * ORDERED["factor"] * MAKING["factor"]


def by_elements(x: torch.Tensor) -> torch.Tensor:
    return x * ROW[0] * QUEUE[0]


def by_member(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if 2.0 in MEMBERS else x


def by_object(x: torch.Tensor) -> torch.Tensor:
    return x * RECORD.factor + RECORD.shift


def by_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * TENSOR


def by_argument(x: torch.Tensor, table: dict[str, Any], record: Record) -> torch.Tensor:
    return x * table["factor"] + record.shift


READERS: list[tuple[Any, tuple[Any, ...]]] = [
    *((reader, ()) for reader in (by_dicts, by_elements, by_member, by_object, by_tensor, NET)),
    (by_argument, (PLAIN, RECORD)),
]


class Churn(Crew):
    def __init__(self, seconds: float, seed: int) -> None:
        super().__init__(seconds, seed)
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        self.work([self.call, self.call, self.write, self.write])

    def guarded(self, job: Any, number: int) -> None:
        chance = Random(self.seed + number)
        try:
            # On a busy machine it takes longer until there was enough to see.
            while not self.errors and (self.is_on() or self.counts["call"] < 20):
                job(chance)
                self.counts[job.__name__] += 1
        except BaseException as error:
            self.note(error)

    def call(self, chance: Random) -> None:
        reader, arguments = chance.choice(READERS)
        x = torch.rand(3)
        expected = reader(x, *arguments)
        compiled = tripwire.compile(reader, backend="eager")
        for _ in range(3):
            if not torch.equal(compiled(x, *arguments), expected):
                raise AssertionError(f"{reader} gave a wrong result")
        self.counts["hits"] += tripwire.statistics(compiled).hits

    def write(self, chance: Random) -> None:
        name = chance.choice(NAMES)
        for space in DICTS:
            space[name] = 1.0
            space.pop(chance.choice(NAMES), None)
        setattr(Record, name, 1.0)
        with suppress(AttributeError):
            delattr(Record, chance.choice(NAMES))
        for queue in (ROW, QUEUE):
            queue.append(1.0)
            if len(queue) > LONGEST:
                queue.pop()
        MEMBERS.symmetric_difference_update({name})
        NET._buffers[name] = TENSOR
        NET._modules[name] = nn.Identity()
        NET._buffers.pop(chance.choice(NAMES), None)
        NET._modules.pop(chance.choice(NAMES), None)


def main() -> int:
    options = begin(argparse.ArgumentParser(), grace=60)
    sys.setswitchinterval(1e-5)
    churn = Churn(options.seconds, options.seed)
    churn.run()
    print(json.dumps({**churn.counts, "errors": churn.errors}))
    return 1 if churn.errors else 0


if __name__ == "__main__":
    sys.exit(main())
