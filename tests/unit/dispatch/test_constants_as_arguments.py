"""A tuple that is written out in a file is one object everywhere in it.

So what a function returns or stores may be the very tuple that it was passed, by chance.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tripwire

PAIR, DEEP = (2, 2), ((1, 2), (3, 4))
KEPT = SimpleNamespace(pair=None)


def returned(x, size):
    return x * size[0], (2, 2)


def returned_in_a_list(x, size):
    return [x * size[0], {"pair": (2, 2)}]


def returned_by_a_helper(x, size):
    return x * size[0], helper()


def helper():
    return (2, 2)


def appended(x, size, log=None):
    log = [] if log is None else log
    log.append((2, 2))
    return x * size[0], log


def stored(x, size):
    KEPT.pair = (2, 2)
    return x * size[0]


def either(x, size):
    return x * 2, size if x.dim() > 5 else (2, 2)


def the_argument(x, size):
    return x * size[0], size


def printed(x, size):
    print((2, 2))
    return x * size[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "program",
    [
        *(returned, returned_in_a_list, returned_by_a_helper, appended, stored, either),
        *(the_argument, printed),
    ],
)
def test_a_constant_that_was_passed_stays_the_constant(program, backend, capsys) -> None:
    assert any(one is PAIR for one in returned.__code__.co_consts)
    compiled = tripwire.compile(program, backend=backend)
    for size in (PAIR, PAIR, (2, 3), (2, 5), PAIR, (2, 7)):
        seen = []
        for call in (program, compiled):
            KEPT.pair = None
            seen.append(str((call(torch.ones(2), size), KEPT.pair, capsys.readouterr().out)))
        assert seen[0] == seen[1]
    assert compiled.statistics().hits >= 1


def test_a_part_of_a_constant_stays_a_part_of_it() -> None:
    def first(x, pair):
        for one in ((1, 2), (3, 4)):
            return x * pair[0], one
        return None

    compiled = tripwire.compile(first, backend="eager")
    for pair in (DEEP[0], DEEP[0], (1, 5), (1, 6)):
        assert compiled(torch.ones(2), pair)[1] == (1, 2)


def test_an_equal_tuple_of_the_callers_own_is_no_constant() -> None:
    compiled = tripwire.compile(returned, backend="eager")
    for _ in range(5):
        compiled(torch.ones(2), tuple(map(int, "22")))
    assert compiled.statistics().hits == 4
