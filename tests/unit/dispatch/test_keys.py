"""Keys of dicts that are objects: a compiled call puts this call's object, not the traced one."""

from __future__ import annotations

import collections
import enum

import pytest
import torch
from unit.dispatch.sidebyside import BACKENDS

import tripwire


class Thing:
    pass


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


# What is done with a key `k` that comes with each call, and with another one, `other`.
PROGRAMS = {
    "put": "table[k] = 1.0",
    "put, and count": "table[k] = table.get(k, 0) + 1\nx = x * table[k]",
    "put where there is none": "if k not in table: table[k] = 1.0\nx = x + table[k]",
    "a default": "table.setdefault(k, []).append(1.0)",
    "asked": "x = x * (2 if k in table else 3)",
    "taken out": "table.pop(k, None)\nx = x * len(table)",
    "toggled": "if k in table: del table[k]\nelse: table[k] = 5",
    "in a tuple": "table[(k, 1)] = table.get((k, 1), 0) + 1",
    "in a set": "table[frozenset([k])] = 1",
    "made by the call": "table[Thing()] = 1.0\nx = x * len(table)",
    "in a dict of lists": "lists[k].append(1.0)",
    "in a counter": "counter[k] += 1",
    "in an ordered dict": "ordered[k] = 1\nordered.move_to_end(k)",
    "in an inner dict": "table.setdefault('a', {})[k] = 1",
    "of two": "table[k] = 1\ntable[other] = 2",
    "updated": "table.update({k: 1.0})",
    "a class": "table[type(k)] = 1",
    "a member": "table[Side.LEFT if x.sum() > 3 else Side.RIGHT] = 1.0",
}
TURNS = (0, 1, 0, 0, 2, 1, 1, 3, 0, 1, 2, 3, 0, 0, 1)


def build(body: str):
    world = {"table": {}, "lists": collections.defaultdict(list), "Thing": Thing, "Side": Side}
    world |= {"counter": collections.Counter(), "ordered": collections.OrderedDict()}
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    exec(f"def call(x, k, other):\n{lines}    return x * 2\n", world)
    return world


def show(value, names):
    """A container with its objects as names."""
    if isinstance(value, dict):
        return [(show(k, names), show(v, names)) for k, v in value.items()]
    if isinstance(value, (list, tuple, frozenset)):
        return [show(item, names) for item in value]
    if isinstance(value, (Thing, torch.Tensor)):
        return names.get(id(value), "another")
    return repr(value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [Thing, lambda: torch.ones(2)], ids=["objects", "tensors"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_key_is_the_object_of_this_call(name, make, backend) -> None:
    plain, mine = build(PROGRAMS[name]), build(PROGRAMS[name])
    compiled = tripwire.compile(mine["call"], backend=backend)
    pool = [make() for _ in range(4)]
    names = {id(one): f"key {index}" for index, one in enumerate(pool)}
    for n, turn in enumerate(TURNS):
        for world in (plain, mine):
            if n % 5 == 0:  # what was there at the first call is there again
                world["table"].clear()
                world["ordered"].clear()
        args = torch.ones(2) + n % 3, pool[turn], pool[turn - 1]
        torch.testing.assert_close(compiled(*args), plain["call"](*args))
        for kept in ("table", "lists", "counter", "ordered"):
            assert show(mine[kept], names) == show(plain[kept], names), n
