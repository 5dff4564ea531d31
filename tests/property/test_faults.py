"""The law machine bites: whatever guard, wire or effect is broken, it notices.

A few faults are tried in each test run, all of them by `make mutate`.
"""

import pytest
from faults import FAULTS, ROWS
from machine import LawBroken, run

BUDGET = 2_000  # steps, as many as a test run takes
SEED = 1
QUICK = frozenset()


def _marked(fault):
    return pytest.param(fault, id=str(fault), marks=() if str(fault) in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("fault", [_marked(fault) for fault in FAULTS])
def test_the_machine_notices(fault, monkeypatch) -> None:
    fault.apply(monkeypatch)
    with pytest.raises(LawBroken):
        run(BUDGET, SEED, shrink=False)


def test_every_row_of_the_channel_table_is_broken_somewhere() -> None:
    assert {fault.row for fault in FAULTS} == set(ROWS)
