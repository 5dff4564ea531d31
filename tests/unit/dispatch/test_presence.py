"""Whether something is there is one read, what it is another: lists that grow stay open."""

from __future__ import annotations

import itertools

import pytest
import torch
from unit.dispatch.sidebyside import BACKENDS

import tripwire

# What the call does; writes before some of the calls; how many of all calls run compiled code.
PROGRAMS = {
    "a list made where there is none": (
        "if 'loss' not in h: h['loss'] = []\nh['loss'].append(1.0)",
        ["del h['loss']", "h['loss'] = [9.0]", "h.clear()", "h['o'] = 1", "h['loss'].pop()"],
        10,
    ),
    "setdefault": (
        "h.setdefault('loss', []).append(1.0)",
        ["del h['loss']", "h['loss'] = [9.0]", "h['loss'].pop()"],
        6,
    ),
    "setdefault of a number": (
        "n = h.setdefault('n', 2)\nx = x * n",
        ["h['n'] = 5", "del h['n']", "h['n'] = 7", "h['n'] = 8"],
        6,
    ),
    "setdefault by computed names": (
        "for k, v in {'a': 1.0, 'b': 2.0}.items(): h.setdefault(k, []).append(v)",
        ["del h['a']", "h['b'] = [5]", "h['b'].pop()"],
        6,
    ),
    "lists by computed names": (
        "for k in ('a', 'b'):\n    if k not in h: h[k] = []\n    h[k].append(1.0)",
        ["del h['a']", "h['b'] = [5]", "h.clear()"],
        6,
    ),
    "an attribute made where there is none": (
        "if not hasattr(o, 'q'): o.q = []\no.q.append(2.0)",
        ["del o.q", "o.q = [5]", "o.q.pop()", "O.q = [7]", "del O.q"],
        10,
    ),
    "hasattr alone": (
        "x = x * (2 if hasattr(o, 'f') else 3)",
        ["o.f = 1", "o.f = 2", "del o.f", "O.f = 5", "del O.f", "O.f = property(lambda s: s.no)"],
        10,
    ),
    "hasattr, then the value": (
        "if hasattr(o, 'n'): x = x * o.n",
        ["o.n = 2", "o.n = 3", "del o.n", "O.n = 4", "del O.n"],
        8,
    ),
    "in, then the value": (
        "if 'n' in h: x = x * h['n']",
        ["h['n'] = 5", "h['n'] = 6", "del h['n']", "h['n'] = 7.5"],
        8,
    ),
    "in, then a counter": (
        "if 'n' in h: h['n'] += 1\nx = x + 1",
        ["h['n'] = 5", "h['n'] = 6", "del h['n']"],
        6,
    ),
    "in, then the length": (
        "if 'loss' in h: x = x * len(h['loss'])\nh.setdefault('loss', []).append(1.0)",
        ["h['loss'].append(2.0)", "del h['loss']", "h['loss'] = [3.0]"],
        0,
    ),
    "in, by a computed name, then the value": (
        "k = 'a'\nif k in h: x = x * h[k]\nh[k] = h.get(k, 0) + 1",
        ["del h['a']", "h['a'] = 5", "h['b'] = 7"],
        4,
    ),
    "a value in a list": (
        "k = [1.0]\nx = x * (2 if k in values else 3)",
        ["values.append([1.0])", "values[0].append(2)", "values.append([2.0])", "values.clear()"],
        4,
    ),
    "a value in a dict's values": (
        "k = 1.0\nx = x * (2 if k in h.values() else 3)",
        ["h['a'] = 1.0", "h['a'] = 2.0", "h['b'] = 1"],
        4,
    ),
    "an attribute, by a computed name": (
        "k = 'a'\nx = x * (2 if k in o.__dict__ else 3)",
        ["o.a = 1", "del o.a", "o.b = 1"],
        4,
    ),
    "names that are state": (
        "for k in o.names:\n    if k not in h: h[k] = []\n    h[k].append(1.0)",
        ["o.names = ['a']", "o.names.append('c')", "h.clear()", "o.names = []"],
        4,
    ),
}


def build(body: str):
    """The function, in a world of its own."""
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    world = {"h": {}, "values": [], "O": type("O", (), {"names": ("a", "b")})}
    world["o"] = world["O"]()
    exec(f"def call(x):\n{lines}    return x * 2\n", world)
    return world


def show(world) -> str:
    return repr((world["h"], vars(world["o"]), world["values"]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_presence_is_followed_and_nothing_more(name, backend) -> None:
    body, writes, hits = PROGRAMS[name]
    plain, mine = build(body), build(body)
    compiled = tripwire.compile(mine["call"], backend=backend)
    steps = itertools.chain(("", ""), *((write, "", "") for write in [*writes, *writes[::-1]]))
    for n, write in enumerate(steps):
        for world in (plain, mine):
            try:
                exec(write, world)
            except (AttributeError, KeyError, IndexError):
                assert write.startswith("del") or "[0]" in write or "pop" in write
        x = torch.ones(2) + n
        torch.testing.assert_close(compiled(x), plain["call"](x))
        assert show(mine) == show(plain), write
    assert compiled.statistics().hits >= hits
