"""`type(x)(y)` makes a value of a type, and tells no open number from a plain one."""

from __future__ import annotations

import pytest
import torch
from support import check_same
from unit.dispatch.sidebyside import BACKENDS

import tripwire


def move(x, n):
    batch = {"x": [x, x + 1], "pair": (x, n), "step": n}
    return {
        key: type(value)(part * 2 for part in value) if isinstance(value, (list, tuple)) else value
        for key, value in batch.items()
    }


OPEN = {
    "lists and tuples only": move,
    "a list": lambda x, n: type([x])([x * n]),
    "a tuple": lambda x, n: type((x, n))((x * n, n + 1)),
    "a dict": lambda x, n: type({})(a=x * n),
    "unpacked": lambda x, n: type([])(*[[x * n]]),
    "a size": lambda x, n: (x * n, type(x.shape)([x.shape[0], 2])),
    "a number of texts": lambda x, n: (x * n, type(n)("7"), type(n)()),
    "a number of another": lambda x, n: (x * n, type(n)(2.5), type(n)(True), type(n / 2)(3)),
    "a number of open ones": lambda x, n: x * type(n)(n * 2) + type(n / 2)(n),
    "a number of a tensor": lambda x, n: (x * n, type(n)(x.sum())),
}
TELLING = {
    "kept": lambda x, n: (x * n, [kind := type(n), kind is int][1]),
    "compared, too": lambda x, n: (x * n, type(n)(3), type(n) is int),
    "in parentheses": lambda x, n: (x * n, (type(n) is int and str)(3)),
    "returned": lambda x, n: (x * n, (lambda value: type(value))(n) is int),
    "out of a list": lambda x, n: (x * n, [type(n)][0](3)),
    "mapped": lambda x, n: (x * n, [*map(type(n), ["1", "2"])]),
    "a method": lambda x, n: (x * n, type(n).from_bytes(b"1", "big")),
}


def check_calls(call, backend) -> tripwire.Statistics:
    compiled = tripwire.compile(call, backend=backend)
    for n in (2, 3, 4, 5, 7):
        x = torch.arange(float(n))
        want, got = call(x, n), compiled(x, n)
        check_same(want, got)
        assert repr(want) == repr(got)
    return compiled.statistics()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPEN)
def test_a_type_that_is_only_called_leaves_numbers_open(name, backend) -> None:
    assert check_calls(OPEN[name], backend).hits == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TELLING)
def test_a_type_that_is_looked_at_is_that_of_a_plain_number(name, backend) -> None:
    check_calls(TELLING[name], backend)
