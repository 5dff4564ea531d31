"""A dict that makes what it is asked for is never asked by tripwire itself.

Looking for the reason of a miss goes past the check that failed, to items that are no longer there.
"""

from __future__ import annotations

import collections
import types

import pytest
import torch
from torch import nn

import tripwire


class Filling(dict):
    asked = 0

    def __missing__(self, key):
        Filling.asked += 1
        self[key] = 5.0
        return 5.0


def make_default(**items):
    return collections.defaultdict(lambda: 2.0, items)


KINDS = {
    "defaultdict": lambda: make_default(a=3.0, b=1.0),
    "subclass": lambda: Filling(a=3.0, b=1.0),
    "nested": lambda: collections.defaultdict(make_default, n=make_default(a=3.0), a=1.0),
    "tensors": lambda: collections.defaultdict(dict, a=1.0),
}
READS = {
    "item": lambda held, x: x * held.d["a"],
    "get": lambda held, x: x * held.d.get("a", 7.0),
    "in": lambda held, x: x * (held.d["a"] if "a" in held.d else 9.0),  # noqa: SIM401
    "length": lambda held, x: x * len(held.d),
    "nested": lambda held, x: x * held.d["n"]["a"] if "n" in held.d else x * 3,
}


def keep_state(held, x):
    """As optimizers do."""
    for one in held.tensors:
        state = held.d[one]
        state["sum"] = state["sum"] * 0.5 + 1 if "sum" in state else one.detach() * 2
        x = x + state["sum"].sum()
    return x


class Held(nn.Module):
    def __init__(self, read, held) -> None:
        super().__init__()
        self.read = read
        self.d, self.tensors = held.d, held.tensors

    def forward(self, x):
        return self.read(self, x)


WRITES = (
    lambda held: None,
    lambda held: dict.__setitem__(held.d, "z", 1.0),
    lambda held: held.d.pop("a", None),
    lambda held: held.d.pop("b", None),
    lambda held: dict.get(held.d, "n", {}).pop("a", None),
    lambda held: held.tensors.append(torch.ones(2)),
    lambda held: held.d.clear(),
)
CASES = [
    *(("defaultdict", READS[name]) for name in ("item", "get", "in", "length")),
    *(("subclass", READS[name]) for name in ("item", "get", "in", "length")),
    ("nested", READS["nested"]),
    ("tensors", keep_state),
]


def look(space: dict) -> list:
    """All of it, without asking it."""
    return [
        (type(key) if isinstance(key, torch.Tensor) else key, look(v) if isinstance(v, dict) else v)
        for key, v in dict.items(space)
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize(("kind", "read"), CASES)
def test_a_dict_that_fills_gaps_holds_what_plain_python_leaves_in_it(
    kind, read, as_module, backend
) -> None:
    plain, compiled = (
        types.SimpleNamespace(d=KINDS[kind](), tensors=[torch.ones(2), torch.ones(3)])
        for _ in range(2)
    )
    if as_module:
        plain_call = Held(read, plain)
        call = tripwire.compile(Held(read, compiled), backend=backend)
    else:
        plain_call = lambda x: read(plain, x)  # noqa: E731
        function = tripwire.compile(read, backend=backend)
        call = lambda x: function(compiled, x)  # noqa: E731
    for write in WRITES:
        write(plain)
        write(compiled)
        for number in range(3):
            x = torch.full((2,), number + 1.0)
            Filling.asked = 0
            wanted, asked = plain_call(x), Filling.asked
            Filling.asked = 0
            assert torch.equal(call(x), wanted)
            assert str(look(compiled.d)) == str(look(plain.d))
            assert Filling.asked == asked
