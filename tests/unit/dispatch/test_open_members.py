"""Whether a container has an open number is one question: it closes the number no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire
from tripwire.tracing import casts

pytestmark = pytest.mark.skipif(casts._casts is None, reason="the C module answers `in`")

GLOBALS = (
    "from collections import Counter, OrderedDict, defaultdict\n"
    "STEPS = {5, 12}\nRATES = {3: 0.5, 7: 0.25}\nLIST = [5, 12]\nCOUNTED = Counter([3, 5])\n"
    "MANY = set(range(3, 900, 5))\nMIXED = (3, 'a', None, True)\nPAIRS = [(1, 2), 7]\n"
    "SEEN = set()\n"
)
# What a program asks, what it does between calls, and how many of its 16 calls hit at least.
CASES = {
    "a set": ("return x * 2 if n in STEPS else x", "", 12),
    "not in a set": ("return x * 2 if n not in STEPS else x", "", 12),
    "a constant": ("return x * 2 if n in {4, 9, 11} else x", "", 12),
    "a list": ("return x * 2 if n in LIST else x", "", 12),
    "a range": ("return x * 2 if n in range(2, 12, 3) else x", "", 12),
    "a range that goes down": ("return x * 2 if n + 1 in range(12, 2, -3) else x", "", 12),
    "many": ("return x * 2 if n in MANY else x", "", 12),
    "none": ("return x * 2 if n in set() else x", "", 13),
    "of several kinds": ("return x * 2 if n in MIXED else x", "", 12),
    "of what may be equal to anything": ("return x * 2 if n in PAIRS else x", "", 11),
    "a dict": ("return x * RATES[n] if n in RATES else x", "", 11),
    "get": ("return x * RATES.get(n, 1.0)", "", 11),
    "get of nothing": ("r = RATES.get(n)\n    return x if r is None else x * r", "", 11),
    "a counter": ("return x * (2 if n in COUNTED else 3)", "", 11),
    "asked by its method": ("return x * (2 if RATES.__contains__(n) else 3)", "", 11),
    "a defaultdict": ("return x * (2 if n in defaultdict(int, RATES) else 3)", "", 11),
    "an ordered one": ("return x * OrderedDict(RATES).get(n, 4)", "", 11),
    "a size": ("return x * 2 if x.repeat(n + 2).shape[0] in {8, 10} else x", "", 12),
    "computed": ("return x * 2 if n * 2 + 1 in (9, 11) or n % 5 in {3} else x", "", 11),
    "a float": ("return x * 2 if n / 2 in {0.5, 3.0, 4} else x", "", 12),
    "out of a tensor": ("return x * (2 if int(x.sum()) in {8, 12} else 3)", "", 12),
    "a range, out of a tensor": ("return x * (2 if int(x.sum()) in range(8, 15) else 3)", "", 12),
    "a dict, out of a tensor": ("return x * RATES.get(int(x.sum()), 3.0)", "", 11),
    "a set that is written": ("return x * 2 if n in STEPS else x", "STEPS.add(i - 3)", 0),
    "a list that is written": ("return x * 2 if n in LIST else x", "LIST[0] = i + 4", 0),
    "a dict that is written": ("return x * RATES.get(n, 1.0)", "RATES[i + 2] = i * 0.5", 0),
    "it holds the number": ("return x * 2 if n in [n + 1, n] else x * 3", "", 12),
    "a class made by the call": (
        "class Mine(dict): pass\n    mine = Mine({4: 1})\n    return x * 2 if n in mine else x",
        "",
        0,
    ),
    "a class with an `in` of its own": ("return x * 2 if n in ODD else x", "", 12),
    "the call writes it": (
        "if n % 4 in SEEN: return x * 2\n    SEEN.add(n % 4)\n    return x",
        "",
        8,
    ),
}
ODD = "class Odd(dict):\n    def __contains__(self, n): return n > 7\nODD = Odd({3: 1})\n"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_whether_a_container_has_an_open_number(case: str, backend: str, tmp_path: Path) -> None:
    body, step, hits = CASES[case]
    source = "\n".join(
        [
            GLOBALS + ODD,
            f"def call(x, n):\n    {body}",
            "def go(f, see):\n    for i in range(16):\n        see(f(T(i), i))",
            f"        if i in (6, 9): {step or 'pass'}",
        ]
    )
    check_twins(source, backend, tmp_path, hits=hits)


def test_milestones_of_a_scheduler_close_no_counter() -> None:
    def train(compile_it):  # type: ignore[no-untyped-def]
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], 0.1)

        def step(x):  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.detach()

        fast = compile_it(step)
        found = [(fast(torch.randn(3, 4)), optimizer.param_groups[0]["lr"]) for _ in range(20)]
        return fast, found

    fast, found = train(lambda step: tripwire.compile(step, backend="eager"))
    torch.testing.assert_close(found, train(lambda step: step)[1], rtol=0, atol=0)
    assert fast.statistics().hits >= 14


def test_explain_names_the_first_members() -> None:
    many = frozenset(range(5, 300, 7))
    fast = tripwire.compile(lambda x, n: x * 2 if n in many else x, backend="eager")
    for n in (1, 2, 3):
        fast(torch.ones(2), n)
    told = str(tripwire.explain(fast))
    assert "not in {5, 12, 19, 26, 33, 40, 47, 54, ...}" in told


def test_containers_look_themselves_once_the_run_is_over() -> None:
    fast = tripwire.compile(lambda x, n: x * (n in {4, 9}), backend="eager")
    for n in range(6):
        fast(torch.ones(2), n)
    index = torch.tensor(4)
    assert 4 in {4, 9}
    assert index in [index]
    assert {4: 1}.get(4) == 1
    with pytest.raises(TypeError):
        [] in {4, 9}  # type: ignore[operator]  # noqa: B015
