"""What others put in its place from call to call is checked by what it is, not by which it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire

# A program sets things between calls, and shows what each call gave; so many calls must be hits.
MODULE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({k: nn.Linear(2, 2) for k in "ab"})
        for head in self.heads.values():
            nn.init.constant_(head.weight, 0.5); nn.init.ones_(head.bias)
        self.kept = T(3)
        self.register_buffer("table", T(1))
        self.held = None
        self.log = []
        self.setup()
    def setup(self): pass
    def forward(self, x):
        return use(self, x)
net = Net()
call = net
"""
CASES = {
    "a tensor": (
        "def use(s, x): return x * s.held",
        "net.held = T(i); see(f(T(2)))",
        6,
    ),
    "a buffer": (
        "def use(s, x): return x * s.table",
        "net.table = T(i); see(f(T(2)))",
        6,
    ),
    "a tensor of another size": (
        "def use(s, x): return x * s.held.sum()",
        "net.held = torch.full((2 + i,), 1.5); see(f(T(2)))",
        5,
    ),
    "a tensor, nothing and a tensor": (
        "def use(s, x): return x if s.held is None else x * s.held",
        "net.held = None if i % 3 == 0 else T(i); see(f(T(2)))",
        5,
    ),
    "a tensor of another dtype": (
        "def use(s, x): return x * s.held",
        "net.held = T(i).to([torch.float32, torch.float64][i % 2]); see(f(T(2)))",
        5,
    ),
    "a tensor that wants a gradient": (
        "def use(s, x): return (x * s.held).sum()",
        "net.held = T(i).requires_grad_(i % 2 == 0); y = f(T(2))\n"
        "if i % 2 == 0: y.backward()\n"
        "see(y, net.held.grad)",
        4,
    ),
    "a tensor that is written in place": (
        "def use(s, x):\n    s.held.add_(x)\n    return s.held * 2",
        "net.held = T(i); before = net.held; see(f(T(2)), before, net.held is before)",
        5,
    ),
    "a tensor that is the argument, or isn't": (
        "def use(s, x):\n    x.add_(1)\n    return s.held * 2",
        "x = T(i); net.held = x if i % 2 else T(i); see(f(x), net.held)",
        4,
    ),
    "a tensor that is a parameter, or isn't": (
        "WORLD = {}\ndef use(s, x): return WORLD['t'] * s.heads['a'].weight[0]",
        "WORLD['t'] = T(i) if i % 3 else net.heads['a'].bias; see(f(T(2)))",
        3,
    ),
    "a tensor that the call hands back": (
        "def use(s, x): return x + 1, s.held",
        "net.held = T(i); y, held = f(T(2)); see(y, held, held is net.held)",
        6,
    ),
    "a tensor that the call keeps elsewhere": (
        "def use(s, x):\n    s.last = s.held\n    return x + s.held",
        "net.held = T(i); see(f(T(2)), net.last is net.held)",
        6,
    ),
    "a tensor that the call replaces as well": (
        "def use(s, x):\n    s.held = s.held + x\n    return s.held * 2",
        "if i % 2: net.held = T(i)\nelif net.held is None: net.held = T(0)\nsee(f(T(2)), net.held)",
        4,
    ),
    "a dict": (
        "def use(s, x): return x * s.held['a'] + len(s.held)",
        "net.held = {'a': 2.0, 'b': 'k'}; see(f(T(2)))",
        6,
    ),
    "a dict of other keys now and then": (
        "def use(s, x): return x * len(s.held)",
        "net.held = {'a': 2.0} if i % 2 else {'a': 2.0, 'c': 1}; see(f(T(2)))",
        5,
    ),
    "a dict with other tensors and numbers": (
        "def use(s, x): return x * s.held['t'] * s.held['n']",
        "net.held = {'t': T(i), 'n': 2.5 + i}; see(f(T(2)))",
        5,
    ),
    "a dict that the call fills": (
        "def use(s, x):\n    s.held['sum'] = x.sum()\n    return x + s.held['n']",
        "net.held = {'n': 3.0}; see(f(T(i)), net.held)",
        6,
    ),
    "a dict that the call counts in": (
        "def use(s, x):\n    s.held['n'] += 1\n    return x + s.held['n']",
        "net.held = {'n': 3 + i}; see(f(T(i)), net.held)",
        4,
    ),
    "a dict that somebody else holds, too": (
        "def use(s, x):\n    s.held['n'] = x.sum()\n    return x + len(SHARED)",
        "net.held = SHARED if i % 2 else {'n': 1}; see(f(T(i)), net.held, SHARED)",
        1,
        "SHARED = {}",
    ),
    "a dict that is written after it was put there": (
        "def use(s, x): return x * s.held['a']",
        "net.held = {'a': 2.0}; see(f(T(2))); net.held['a'] = 4.0 + i; see(f(T(2)))",
        6,
    ),
    "a list of modules": (
        "def use(s, x):\n    for one in s.held: x = one(x)\n    return x",
        "net.held = [net.heads['a'], net.heads['b']]; see(f(T(2)))",
        6,
    ),
    "a list of modules in another order": (
        "def use(s, x):\n    for one in s.held: x = one(x).relu()\n    return x",
        "net.held = [net.heads[k] for k in ('ab' if i % 2 else 'ba')]; see(f(T(2)))\n"
        "net.heads['a'].bias.data.fill_(i)",
        4,
    ),
    "a list of tensors, one of them written": (
        "def use(s, x):\n    s.held[1] += x\n    return s.held[0] + s.held[1]",
        "net.held = [T(i), T(1)]; see(f(T(2)), net.held)",
        5,
    ),
    "a list of one tensor twice, or of two": (
        "def use(s, x):\n    s.held[0].add_(1)\n    return s.held[0] * s.held[1]",
        "t = T(i); net.held = [t, t if i % 2 else T(i)]; see(f(T(2)), net.held)",
        4,
    ),
    "a list that grows": (
        "def use(s, x):\n    s.held.append(x.sum())\n    return x + 1",
        "net.held = []; see(f(T(i)), f(T(i)), net.held)",
        12,
    ),
    "a set": (
        "def use(s, x):\n    return x + len(s.held) + ('a' in s.held)",
        "net.held = {'a', 'b'} if i % 2 else {'b'}; see(f(T(2)))",
        5,
    ),
    "a deque": (
        "def use(s, x): return x * s.held[0] + len(s.held)",
        "net.held = collections.deque([T(i), 2.0], maxlen=2 + i % 2); see(f(T(2)))",
        4,
    ),
    "a tuple of tensors": (
        "def use(s, x): return x * s.held[0] + s.held[1]",
        "net.held = (T(i), T(i + 1)); see(f(T(2)))",
        6,
    ),
    "a dataclass": (
        "@dataclasses.dataclass\nclass Config:\n    scale: float\n    name: str = 'k'\n"
        "def use(s, x): return x * s.held.scale + len(s.held.name)",
        "net.held = Config(2.0, 'k' if i < 4 else 'kk'); see(f(T(2)))",
        5,
    ),
    "an object in an object": (
        "class Box: pass\n"
        "def box(**held):\n    made = Box(); vars(made).update(held); return made\n"
        "def use(s, x): return x * s.held.inner.t + s.held.n",
        "net.held = box(inner=box(t=T(i)), n=2); see(f(T(2)))",
        5,
    ),
    "an object whose class has a method": (
        "class Box:\n    def scale(self, x): return x * self.t\n"
        "def box(t):\n    made = Box(); made.t = t; return made\n"
        "def use(s, x): return s.held.scale(x)",
        "net.held = box(T(i))\nif i == 5: Box.scale = lambda self, x: x - self.t\nsee(f(T(2)))",
        4,
    ),
    "an object of another class": (
        "class A:\n    k = 2\nclass B:\n    k = 3\ndef use(s, x): return x * s.held.k",
        "net.held = (A, B)[i % 2](); see(f(T(2)))",
        4,
    ),
    "an object that gets an attribute of its own": (
        "class A:\n    k = 2.0\ndef use(s, x): return x * s.held.k",
        "net.held = A()\nif i % 2: net.held.k = 5.0\nsee(f(T(2)))",
        4,
    ),
    "an object with slots": (
        "class A:\n    __slots__ = ('t',)\n"
        "def make(t):\n    made = A(); made.t = t; return made\n"
        "def use(s, x): return x * s.held.t",
        "net.held = make(T(i)); see(f(T(2)))",
        5,
    ),
    "an object that the call writes to": (
        "class A:\n    n = 0\n"
        "def use(s, x):\n    s.held.n = s.held.n + 1\n    s.held.out = x * 2\n"
        "    return x + s.held.n",
        "net.held = A(); see(f(T(i)), net.held.n, net.held.out); see(f(T(i)), net.held.n)",
        0,
    ),
    "which of two it is": (
        "def use(s, x): return x * 2 if s.held is s.kept else x * 3",
        "net.held = net.kept if i % 2 else T(3); see(f(T(2)))",
        2,
    ),
    "which dict it is": (
        "FIRST = {'a': 1}\ndef use(s, x): return x * s.held['a'] + (s.held is FIRST)",
        "net.held = FIRST if i % 2 else {'a': 1}; see(f(T(2)))",
        2,
    ),
    "a global": (
        "CONTEXT = None\ndef use(s, x): return x * CONTEXT['t']",
        "globals()['CONTEXT'] = {'t': T(i)}; see(f(T(2)))",
        6,
    ),
    "an item of a dict that stays": (
        "WORLD = {}\ndef use(s, x): return x * WORLD['t']",
        "WORLD['t'] = T(i); see(f(T(2)))",
        6,
    ),
    "an element of a list that stays": (
        "WORLD = [None, 1]\ndef use(s, x): return x * WORLD[0] + len(WORLD)",
        "WORLD[0] = T(i); see(f(T(2)))",
        6,
    ),
    "an attribute of a class": (
        "class World: t = None\ndef use(s, x): return x * World.t",
        "World.t = T(i); see(f(T(2)))",
        6,
    ),
    "a tensor that is gone": (
        "def use(s, x): return x * s.held if hasattr(s, 'held') else x - 1",
        "net.held = T(i)\nif i % 3 == 2: del net.held\nsee(f(T(2)))",
        4,
    ),
    "a subclass of a tensor": (
        "class Mine(torch.Tensor): pass\ndef use(s, x): return x * s.held",
        "net.held = T(i).as_subclass(Mine) if i % 2 else T(i); see(f(T(2)))",
        2,
    ),
    "a view of the argument": (
        "def use(s, x):\n    x.add_(1)\n    return s.held.sum()",
        "x = T(i); net.held = x[:1] if i % 2 else T(i)[:1]; see(f(x), net.held)",
        2,
    ),
    "a module": (
        "def use(s, x): return s.held(x)",
        "net.held = net.heads['ab'[i % 2]]; see(f(T(2)))",
        5,
    ),
    "a function": (
        "def double(x): return x * 2\ndef use(s, x): return s.held(x)",
        "net.held = double if i % 2 else torch.sin; see(f(T(2)))",
        5,
    ),
    "a number in the place of a tensor": (
        "def use(s, x): return x * s.held",
        "net.held = T(i) if i % 2 else 2.5 + i; see(f(T(2)))",
        2,
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_exchanged_is_checked_by_what_it_is(
    case: str, backend: str, tmp_path: Path
) -> None:
    use, step, hits, *before = CASES[case]
    lines = "\n".join(f"        {line}" for line in step.splitlines())
    source = "\n".join(
        [
            *before,
            use,
            MODULE,
            "def go(f, see):\n    for i in range(8):",
            lines,
            "        see(net.log)",
        ]
    )
    check_twins(source, backend, tmp_path, hits=hits)


def test_a_model_that_is_moved_keeps_its_buffers_under_watch() -> None:
    """All at once is a move: what comes once would be fetched on each call."""
    net = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(8))).eval()
    fast = tripwire.compile(net, backend="eager")
    x = torch.ones(3, 2)
    fast(x)
    net.double()
    torch.testing.assert_close(fast(x.double()), net(x.double()))
    (entry,) = [one for one in tripwire.explain(fast).entries if one.state == "in use"]
    assert "running_mean" not in entry.guards
    assert any("running_mean" in wire.source for wire in entry.wires)


# Of two dicts the same path is said: that of a class, and that of one which takes its place.
TWO_OF_ONE_PATH = {
    "a number that each call counts": ("o.k['n'] = len(o.k)", "pass"),
    "a tensor beside it": ("o.k['last'] = t.detach(); o.k['n'] = len(o.k)", "pass"),
    "the hidden one changes": ("o.k['n'] = len(o.k)", "Base.k['n'] = 50 + i"),
    "both change": ("pass", "Base.k['n'] = 50 + i; o.k['n'] = i"),
    "the hidden one changes as the other does": ("pass", "Base.k['n'] = o.k['n'] = i"),
    "the hidden one is a float": ("pass", "Base.k['n'] = 50.5 + i; o.k['n'] = i"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", TWO_OF_ONE_PATH)
def test_numbers_of_two_places_with_one_path_are_two(
    case: str, backend: str, tmp_path: Path
) -> None:
    writes, step = TWO_OF_ONE_PATH[case]
    source = f"""
class Base: k = {{'b': 3.0}}
o = Base()
class Tally: n = 0
def call(x):
    Tally.n += 1
    t = x
    for v in o.k.values():
        t = t * v / 2
    {writes}
    return t
def go(f, see):
    for i in range(8):
        see(f(T()), o.k, Tally.n)
        Base.k['n'] = i
    o.__class__ = type('Other', (Base,), {{'k': {{'a': 2}}}})
    for i in range(8):
        see(f(T()), o.k, Base.k, Tally.n)
        {step}
    for i in range(3):
        see(f(T()), o.k, Base.k, Tally.n)
        Base.k['n'] = 70 + i
"""
    check_twins(source, backend, tmp_path)
