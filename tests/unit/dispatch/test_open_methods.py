"""Methods that are taken out of `int` and `float` take open numbers as well."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest
import torch
from support import check_same
from unit.dispatch.sidebyside import BACKENDS

import tripwire
from tripwire.tracing import casts

pytestmark = pytest.mark.skipif(casts._casts is None, reason="the C module answers the calls")
bits = int.bit_length

OPEN = {  # with at least this many of six calls that hit
    "an operator": (lambda x, n: x * int.__add__(n, 1), 4),
    "an operator on the right": (lambda x, n: x * int.__radd__(n, 1), 4),
    "a size": (lambda x, n: x * int.__mul__(x.shape[0], 3), 4),
    "all sizes": (lambda x, n: x * functools.reduce(int.__mul__, x[:, None].shape), 4),
    "in a partial": (lambda x, n: x * functools.partial(int.__sub__, n)(3), 4),
    "a key": (lambda x, n: (x * 1, sorted([n, 4, 30], key=int.__neg__)), 3),
    "a comparison": (lambda x, n: x * 2 if int.__lt__(n, 5) else x, 3),
    "a float's": (lambda x, n: x * float.__add__(n / 2, 1.0), 4),
    "a float and an int": (lambda x, n: x * float.__mul__(n / 3, n), 4),
    "whether it is whole": (lambda x, n: x * 2 if float.is_integer(n / 2) else x, 3),
    "no such operand": (lambda x, n: (x * n, int.__add__(n, 1.5), int.__add__(n, "a")), 4),
}
CLOSED = {
    "mapped": lambda x, n: x * max(map(int.bit_length, [n, 1])),
    "under another name": lambda x, n: x * bits(n),
    "by a computed name": lambda x, n: x * getattr(int, "bit_count")(n),  # noqa: B009
    "out of a tensor": lambda x, n: x * int.bit_length(int(x.sum())),
    "of a plain int": lambda x, n: x * int.__add__(1, n),
    "reduced": lambda x, n: x * functools.reduce(int.__mul__, (2, n, n + 1)),
    "bytes": lambda x, n: (x * 1, int.to_bytes(n, 2, "big")),
    "named arguments": lambda x, n: (x * 1, int.to_bytes(n, length=2, byteorder="big")),
    "texts": lambda x, n: (x * 1, int.__repr__(n), float.hex(n / 2), int.__format__(n, "x")),
    "a hash": lambda x, n: (x * 1, int.__hash__(n), float.__hash__(n / 2)),
    "a ratio": lambda x, n: (x * 1, float.as_integer_ratio(n / 4)),
    "a float of NumPy's": lambda x, n: (x * 1, float.__add__(np.float64(n) / 3, 1.0)),
    "a caller": lambda x, n: (x * 1, operator.methodcaller("bit_length")(n)),
}
RAISING = {
    "another class's": lambda n: float.hex(n),
    "by zero": lambda n: int.__floordiv__(n, 0),
    "too few": lambda n: int.bit_length(),
    "too many": lambda n: int.bit_length(n, n),
    "too large": lambda n: int.to_bytes(n * 1000, 1, "big"),
    "by a wrong name": lambda n: int.to_bytes(n, width=2),
}


def check_calls(call, backend) -> tripwire.Statistics:
    compiled = tripwire.compile(call, backend=backend)
    for n in (2, 3, 5, 8, 13, 16):
        x = torch.arange(float(n))
        want, got = call(x, n), compiled(x, n)
        check_same(want, got)
    return compiled.statistics()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPEN)
def test_a_method_out_of_a_class_leaves_numbers_open(name, backend) -> None:
    call, hits = OPEN[name]
    assert check_calls(call, backend).hits >= hits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CLOSED)
def test_a_method_out_of_a_class_that_needs_the_value_closes_it(name, backend) -> None:
    check_calls(CLOSED[name], backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RAISING)
def test_a_method_out_of_a_class_raises_as_in_plain_python(name, backend) -> None:
    def call(x, n):
        try:
            return x * n, RAISING[name](n)
        except Exception as error:
            return x * n, type(error).__name__, str(error)

    check_calls(call, backend)


def test_methods_are_what_they_were_when_the_run_is_over() -> None:
    check_calls(lambda x, n: x * int.bit_length(n), "eager")
    assert int.bit_length(5) == 3 and int.__add__(2, 3) == 5 and (5).bit_length() == 3
    with pytest.raises(TypeError, match=r"doesn't apply to a 'str' object"):
        int.bit_length("a")
