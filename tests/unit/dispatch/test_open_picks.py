"""A number that an open index picks out of a list or a tuple is open, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire

TABLE = "TABLE = [8.0 / (i + 1) for i in range(12)]\nCOUNTS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)\n"
# How a program picks, what it does between calls, and how many of its calls hit at least.
CASES = {
    "a list": ("return x * TABLE[i]", "see(f(T(2), i))", 6),
    "two of a list": ("return x * (TABLE[i + 1] - TABLE[i])", "see(f(T(2), i))", 6),
    "a tuple of ints": ("return x * COUNTS[i] + COUNTS[i] // 2", "see(f(T(2), i))", 6),
    "from the end": ("return x * TABLE[-i - 1] + TABLE[-1]", "see(f(T(2), i))", 6),
    "a size": ("return x.repeat(COUNTS[i] + 1)", "see(f(T(2), i))", 5),
    "a decision": ("return x * 2 if TABLE[i] > 2.0 else x * 3", "see(f(T(2), i))", 5),
    "by a size": ("return x * TABLE[x.shape[0]]", "see(f(torch.ones(i + 2)))", 6),
    "a list that is written": (
        "return x * TABLE[i]",
        "TABLE[i] = 0.5 if i > 3 else TABLE[i]; see(f(T(2), i))",
        2,
    ),
    "a list that grows": (
        "return x * TABLE[i]",
        "see(f(T(2), i)); TABLE.append(1.5) if i == 4 else None",
        4,
    ),
    "beyond its end": (
        "return x * COUNTS[i]",
        "try: see(f(T(2), i * 2))\nexcept IndexError as error: see(str(error))",
        2,
    ),
    "with infinity in it": (
        "return x * ODD[i]",
        "see(f(T(2), i))",
        0,
        "ODD = [1.5, float('inf')] * 9",
    ),
    "with zeros in it": (
        "return x / (ODD[i] + 2.0), -ODD[i]",
        "see(f(T(2), i))",
        3,
        "ODD = [0.0, -0.0, 1.5, 2.5] * 3",
    ),
    "of two kinds": ("return x * ODD[i]", "see(f(T(2), i))", 0, "ODD = [1, 2.5] * 9"),
    "of words": ("return x * len(ODD[i])", "see(f(T(2), i))", 0, "ODD = ['a', 'bc'] * 9"),
    "made by the call": ("return x * [0.5 * k for k in range(1, 20)][i]", "see(f(T(2), i))", 6),
    "made of open numbers": ("return x * [i, i + 1, i * 2][i % 3]", "see(f(T(2), i))", 0),
    "a list that is passed": (
        "return x * j[i]",
        "see(f(T(2), i, [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]))",
        6,
    ),
    "handed back": ("return x + 1, TABLE[i], COUNTS[i]", "see(f(T(2), i))", 6),
    "stored": ("LAST.append(TABLE[i])\n    return x * 2", "see(f(T(2), i), LAST)", 6, "LAST = []"),
    "a slice": ("return x * sum(TABLE[i:i + 2])", "see(f(T(2), i))", 0),
    "a subclass": (
        "return x * ODD[i]",
        "see(f(T(2), i))",
        0,
        "class Mine(list):\n    def __getitem__(self, i): return -list.__getitem__(self, i)\n"
        "ODD = Mine([1.5, 2.5] * 9)",
    ),
    "a counter of its own": (
        "STATE['i'] += 1\n    return x * TABLE[STATE['i'] - 1]",
        "see(f(T(2)), STATE)",
        5,
        "STATE = {'i': 0}",
    ),
    "a number out of a tensor": ("return x * TABLE[int(x[0])]", "see(f(T(i)))", 6),
    "beyond its end, out of a tensor": (
        "return x * COUNTS[int(x[0])]",
        "try: see(f(T(i * 2)))\nexcept IndexError as error: see(str(error))",
        2,
    ),
    "of bools": (
        "return x * (2 if ODD[i] else 3)",
        "see(f(T(2), i))",
        0,
        "ODD = [True, False] * 9",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_what_an_open_index_picks(case: str, backend: str, tmp_path: Path) -> None:
    body, step, hits, *before = CASES[case]
    lines = "\n".join(f"        {line}" for line in step.splitlines())
    source = "\n".join(
        [
            TABLE,
            *before,
            f"def call(x, i=0, j=()):\n    {body}",
            "def go(f, see):\n    for i in range(8):",
            lines,
        ]
    )
    check_twins(source, backend, tmp_path, hits=hits)


def test_lists_are_plain_again_once_the_run_is_over() -> None:
    def call(x: torch.Tensor, i: int) -> torch.Tensor:
        return x * [0.5, 1.5, 2.5, 3.5][i]

    fast = tripwire.compile(call, backend="eager")
    for i in range(4):
        fast(torch.ones(2), i)
    assert fast.statistics().traces == 2
    numbers, index = [1.5, 2.5], torch.tensor(1)
    assert type(numbers[index]) is float
    with pytest.raises(TypeError):
        numbers[1.5]  # type: ignore[call-overload]
