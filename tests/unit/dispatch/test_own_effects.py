"""Effects that a run itself may read again: from the end of a list, in the order of a dict."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

import tripwire

PROGRAMS: dict[str, tuple[str, str]] = {  # name: source, state
    "list in a list, appended to and measured from the end": (
        """
L = [[]]
def call(x):
    L[-1].append(1)
    if len(L[-1]) == 2:
        L.append([])
    return x * 2
""",
        "L",
    ),
    "dict in a list, counted from the end": (
        """
L = [{}]
def call(x):
    L[-1]["n"] = L[-1].get("n", 0) + 1
    return x * L[-1]["n"]
""",
        "L",
    ),
    "order of a dict": (
        """
D = {"a": 1.0, "b": 2.0}
def call(x):
    first = next(iter(D.values()))
    D["a"] = D.pop("a")
    return x * first
""",
        "list(D)",
    ),
    "order of an OrderedDict": (
        """
D = OrderedDict(a=1.0, b=2.0)
def call(x):
    D.move_to_end(next(iter(D)))
    return x * next(iter(D.values()))
""",
        "list(D)",
    ),
    "order that nothing reads": (
        """
D = OrderedDict(a=1.0, b=2.0)
def call(x):
    D.move_to_end(next(iter(D)))
    return x * D["a"]
""",
        "list(D)",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_state_are_those_of_plain_code(sentry, name) -> None:
    source, state = PROGRAMS[name]
    seen = []
    for is_compiled in (False, True):
        space: dict[str, Any] = {"OrderedDict": OrderedDict, "__name__": __name__}
        exec(source, space)
        call = tripwire.compile(space["call"], backend="eager") if is_compiled else space["call"]
        calls = [(call(torch.ones(1)).item(), repr(eval(state, space))) for _ in range(7)]
        seen.append(calls)
    assert seen[0] == seen[1]


_LAST = {
    "items": """
D = {"a": 2.0}
def call(x):
    for key, value in D.items():
        x = x * value + len(key)
    D["last"] = x
    return x
""",
    "attributes": """
class Holder: pass
holder = Holder()
D = vars(holder)
holder.a = 2.0
def call(x):
    for key, value in vars(holder).items():
        x = x * value + len(key)
    holder.last = x
    return x
""",
}


@pytest.mark.parametrize("form", _LAST)
def test_the_place_of_what_a_run_writes_among_the_others(sentry, form) -> None:
    seen = []
    for is_compiled in (False, True):
        space: dict[str, Any] = {"__name__": __name__}
        exec(_LAST[form], space)
        call = tripwire.compile(space["call"], backend="eager") if is_compiled else space["call"]
        results = [call(torch.ones(1)).item() for _ in range(4)]
        space["D"]["a"] = space["D"].pop("a")  # the same values, in another order
        seen.append(results + [call(torch.ones(1)).item() for _ in range(4)])
    assert seen[0] == seen[1]
