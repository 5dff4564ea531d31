"""The law machine bites: whatever guard, wire or effect is broken, it notices.

A few faults are tried in each test run, all of them by `make mutate`. Chance decides which programs
are drawn: a fault that one seed misses within its steps is tried with the next.
"""

import re

import pytest
import torch
from property.faults import CONDITIONS, FAULTS, FAULTS_BY_NAME, ROWS
from property.habits import HABITS
from property.machine import LawBroken, run

import tripwire
from tripwire.validity.guards import GuardWriter

BUDGET = 2_000  # steps of each seed
SEEDS = (1, 2, 3)
QUICK = frozenset(
    {
        "L1: results are copies",
        "L1: results have no gradient",
        "L3: no effects",
        "L4: the program runs twice",
        "cells, defaults, code: cells",
        "class attributes: wires",
        "containers: elements of lists",
        "instance attributes: hooks",
        "instance attributes: wires",
        "plain arguments: values",
        "tensor arguments: aliasing",
        "tensor values: branches",
    }
)

# Faults that 6,000 steps of any production may miss, and the production that shows them.
SELDOM = {"tensor arguments: aliasing": "argument that is state"}
IN_HABITS = {  # a fault that programs about one production alone must show
    "cache that grows": "L3: no attribute written",
    "place in a cache": "instance attributes: wires",
    "table that is made longer on demand": "L3: no effects",
    "training step": "containers: items of dicts",
    "code inside a backward": "L3: what torch runs inside a call isn't seen",
    "running statistics": "instance attributes: wires",
    "weights that are one": "instance attributes: tables of modules",
    "tensors by name": "containers: items of dicts",
    "config whose fields vary": "objects as arguments: attributes",
    "numbers that calls pass": "L3: no effects",
    "numbers out of tensors": "tensor values: branches",
    "value that decides in the middle": "L3: nothing undone at a crossing",
    "what is printed and logged": "L3: nothing printed",
    "containers in a named tuple": "containers: items of dicts",
    "contexts and generators of one's own": "instance attributes: wires",
    "operators of a class": "class attributes: wires",
    "iterators of the library": "containers: elements of lists",
    "transforms of torch.func": "instance attributes: wires",
}


def _marked(fault):
    return pytest.param(fault, id=str(fault), marks=() if str(fault) in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("fault", [_marked(fault) for fault in FAULTS])
def test_the_machine_notices(fault, monkeypatch) -> None:
    fault.apply(monkeypatch)
    about = SELDOM.get(str(fault), "")
    with pytest.raises(LawBroken):
        for seed in SEEDS:  # behind "eager": what is broken is before any back end
            run(BUDGET, seed, shrink=False, backends=("eager",), about=about)


LATE = {  # what is broken, and the production that shows it: each only in a late backward
    "L1: globals that a backward reads are those of the call": "late backward that reads",
    "L1: results have no gradient": "results in parts",
    "instance attributes: hooks": "hooks between a call and its backward",
    "class attributes: wires": "late backward that is another by then",
    "instance attributes: tables of modules": "weights between a call and its backward",
}


@pytest.mark.parametrize("fault", LATE)
def test_a_production_with_late_backwards_shows_its_fault(fault, monkeypatch) -> None:
    FAULTS_BY_NAME[fault].apply(monkeypatch)
    with pytest.raises(LawBroken):
        for seed in SEEDS:
            run(400, seed, shrink=False, backends=("aot_eager",), about=LATE[fault])


@pytest.mark.parametrize("habit", [habit.name for habit in HABITS])
def test_a_habit_alone_shows_its_fault(habit, monkeypatch) -> None:
    FAULTS_BY_NAME[IN_HABITS[habit]].apply(monkeypatch)
    with pytest.raises(LawBroken):
        for seed in SEEDS:
            run(800, seed, shrink=False, backends=("eager",), about=habit)


def test_the_quick_ones_are_faults() -> None:
    assert QUICK.issubset(map(str, FAULTS))


def test_every_row_of_the_channel_table_is_broken_somewhere() -> None:
    assert {fault.row for fault in FAULTS} == set(ROWS)


class Sized:
    def __init__(self) -> None:
        self.items = [1, 2]


def test_the_conditions_that_faults_leave_out_are_those_of_guards(monkeypatch) -> None:
    met: list[str] = []
    whole = GuardWriter.check

    def check(self, path, condition, *rest):
        met.append(condition)
        whole(self, path, condition, *rest)

    def call(x, y, sized):
        return x * x.storage_offset() + y * (2 if y.is_leaf else 3) * len(sized.items)

    monkeypatch.setattr(GuardWriter, "check", check)
    y = torch.ones(2, requires_grad=True)
    tripwire.compile(call, backend="eager")(torch.arange(4.0)[2:], y, Sized())
    assert [one for one in CONDITIONS if not any(re.search(one, text) for text in met)] == []
