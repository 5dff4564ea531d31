"""Calls that take turns: one leaves something, the next takes it away. Both are compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

GO = """
def go(f, see):
    for i in range(14):
        if i == 6:
            put(T(5))
        if i == 9:
            put(None)
        see(f(T(i)), look())
"""
ATTRIBUTE = """
class Solver:
    kept = None

s = Solver()

def put(value):
    s.kept = value

def look():
    return s.kept
"""
# What holds it, and how the call looks for it, takes it away and leaves it.
PLACES = {
    "an attribute": (
        ATTRIBUTE,
        "s.kept is None",
        "y = x + s.kept\n    s.kept = None",
        "s.kept = x * 2",
    ),
    "an attribute that is deleted": (
        ATTRIBUTE.replace("    s.kept = value", "    vars(s).pop('kept', 0)\n    s.kept = value"),
        "s.kept is None",
        "y = x + s.kept\n    del s.kept",
        "s.kept = x * 2",
    ),
    "a global": (
        "k = None\ndef put(value):\n    global k\n    k = value\ndef look():\n    return k\n",
        "k is None",
        "y = x + k\n    k = None",
        "k = x * 2",
    ),
    "an item": (
        "D = {'k': None}\ndef put(value):\n    D['k'] = value\ndef look():\n    return D\n",
        "D['k'] is None",
        "y = x + D['k']\n    D['k'] = None",
        "D['k'] = x * 2",
    ),
    "an item that is taken out": (
        "D = {}\ndef put(value):\n    D.pop('k', 0)\n    if value is not None:\n"
        "        D['k'] = value\ndef look():\n    return D\n",
        "'k' not in D",
        "y = x + D.pop('k')",
        "D['k'] = x * 2",
    ),
    "an element": (
        "L = [None, 3]\ndef put(value):\n    L[0] = value\ndef look():\n    return L\n",
        "L[0] is None",
        "y = x + L[0]\n    L[0] = None",
        "L[0] = x * 2",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_is_left_and_taken_away_is_compiled(place, backend, tmp_path: Path) -> None:
    setup, asked, taken, left = PLACES[place]
    call = (
        f"def call(x):\n    {'global k' if place == 'a global' else 'pass'}\n"
        f"    if {asked}:\n        {left}\n        return x + 1\n    {taken}\n    return y\n"
    )
    explained = check_twins(setup + call + GO, backend, tmp_path, hits=7)
    assert explained.traces <= 6


def test_elements_that_change_their_places_stay_what_they_are(tmp_path: Path) -> None:
    source = """
A, B = [1], [2]
L = [A, B, None]

def call(x):
    L[0], L[1] = L[1], L[0]
    L[2] = x * L[0][0]
    return L[2] + 1

def go(f, see):
    for i in range(10):
        see(f(T(i)), L, L[0] is A, L[1] is A)
"""
    check_twins(source, "eager", tmp_path, hits=3)


# Methods that look back at several steps, as schedulers of diffusion do.
LOOKS_BACK = """
class Solver:
    def __init__(self):
        self.start()

    def start(self):
        self.order = self.lower = self.index = 0
        self.past = [None] * 3
        self.last = None

    def step(self, x):
        if self.last is not None:
            for k in range(self.order):
                x = x + k * self.last
        for i in range(2):
            self.past[i] = self.past[i + 1]
        self.past[-1] = x
        self.order = min(3, self.lower + 1, 20 - self.index)
        for one in self.past[-self.order:]:
            x = x * 0.5 + one
        self.last = x
        if self.lower < 3:
            self.lower += 1
        self.index += 1
        return x / self.index

solver = Solver()
call = solver.step

def go(f, see):
    for i in range(20):
        see(f(T(i)), solver.order, solver.index, solver.last, solver.past)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_method_that_looks_back_at_several_steps_is_compiled(backend, tmp_path: Path) -> None:
    check_twins(LOOKS_BACK, backend, tmp_path, hits=14)


BY_TABLE = """
ORDERS = [1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 1]

class Solver:
    index = 0
    past = (None, None)

s = Solver()

def call(x):
    order = ORDERS[s.index]
    first = s.past[-order]
    s.past = s.past[1], x
    s.index += 1
    return x if first is None else x + first

def go(f, see):
    for i in range(14):
        see(f(T(i)), s.index)
"""


def test_an_index_stays_open_if_its_number_stands_in_the_list_twice(tmp_path: Path) -> None:
    assert check_twins(BY_TABLE, "eager", tmp_path, hits=6).traces <= 8


RESET = """
class Solver:
    index = None

s = Solver()

def call(x):
    if s.index is None:
        s.index = 0
    s.index += 1
    return x * s.index

def go(f, see):
    for _ in range(5):
        for i in range(5):
            see(f(T(i)), s.index)
        s.index = None
"""


def test_a_counter_that_begins_anew_is_traced_once_for_its_beginning(tmp_path: Path) -> None:
    assert check_twins(RESET, "eager", tmp_path, hits=20).traces <= 4
