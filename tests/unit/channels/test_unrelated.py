"""What wasn't read may be written: nothing is traced anew."""

import pytest
from unit.channels.cases import CASES
from unit.channels.playing import check_agree, observe, world_of

import tripwire

pytestmark = pytest.mark.skipif(not hasattr(tripwire, "compile"), reason="no tripwire.compile")


def play_around(case, number, wrap, read):
    """Two calls, an unrelated write, two calls: what they did, and a reading after each pair."""
    with world_of(case) as program:
        call = wrap(program.call)
        outcomes = [observe(program, call, n, 0) for n in (0, 1)]
        before = read(call)
        program.unrelated[number]()
        outcomes += [observe(program, call, n, 0) for n in (2, 3)]
        return outcomes, before, read(call)


@pytest.mark.parametrize("case", [case for case in CASES if case.unrelated], ids=str)
def test_a_write_beside_what_was_read_retires_nothing(case) -> None:
    for number in range(case.unrelated):
        expected, *_ = play_around(case, number, lambda call: call, lambda call: None)
        got, before, after = play_around(
            case,
            number,
            lambda call: tripwire.compile(call, backend="eager"),
            lambda compiled: compiled.statistics(),
        )
        check_agree(expected, got)
        assert before.refusals == 0
        assert before.traces > 0
        assert (after.traces, after.retired) == (before.traces, before.retired), f"write {number}"
