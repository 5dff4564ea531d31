"""The law machine bites: whatever guard, wire or effect is broken, it notices.

A few faults are tried in each test run, all of them by `make mutate`. Chance decides which programs
are drawn: a fault that one seed misses within its steps is tried with the next.
"""

import pytest
from property.faults import FAULTS, ROWS
from property.machine import LawBroken, run

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


def _marked(fault):
    return pytest.param(fault, id=str(fault), marks=() if str(fault) in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("fault", [_marked(fault) for fault in FAULTS])
def test_the_machine_notices(fault, monkeypatch) -> None:
    fault.apply(monkeypatch)
    with pytest.raises(LawBroken):
        for seed in SEEDS:
            run(BUDGET, seed, shrink=False, backends=("eager",))  # what is broken is before it


def test_the_quick_ones_are_faults() -> None:
    assert QUICK.issubset(map(str, FAULTS))


def test_every_row_of_the_channel_table_is_broken_somewhere() -> None:
    assert {fault.row for fault in FAULTS} == set(ROWS)
