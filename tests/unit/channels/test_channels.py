"""L1, channel by channel: whatever was written, a compiled call returns what a plain one does."""

import pytest
from unit.channels.cases import CASES
from unit.channels.cases_branches import HOPELESS
from unit.channels.channel import CALLS
from unit.channels.playing import check_agree, find_difference, play

import tripwire

needs_compile = pytest.mark.skipif(not hasattr(tripwire, "compile"), reason="no tripwire.compile")
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
def test_two_plain_twins_agree(case) -> None:
    check_agree(play(case), play(case))


@every_case
def test_a_stale_result_would_be_noticed(case) -> None:
    full = play(case)
    if not case.changes:
        return
    forms = len(full) // CALLS // 2  # each form of the arguments comes twice
    for skipped in range(1, case.writes + 1 if case.writes else forms):
        try:
            without = play(case, skip=skipped)
        except Exception:  # a later write needs this one
            continue
        assert find_difference(full, without), f"change {skipped} shows nowhere"
    check_agree(full, play(case))  # a case leaves nothing behind, also when cut short


@needs_compile
@every_case
def test_compiled_calls_return_what_plain_calls_return(case) -> None:
    expected = play(case)
    got = play(case, lambda call: tripwire.compile(call, backend="eager"))
    check_agree(expected, got)


@needs_compile
@pytest.mark.parametrize("case", tuple(HOPELESS), ids=str)
def test_what_is_not_meant_to_be_compiled_returns_the_same_all_the_same(case) -> None:
    expected = play(case)
    check_agree(expected, play(case, lambda call: tripwire.compile(call, backend="eager")))


def test_names_are_unique() -> None:
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)
