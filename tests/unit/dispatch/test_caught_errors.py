"""What Python raises for this call's numbers may be caught: the other numbers take another way."""

from __future__ import annotations

import fractions
import math

import pytest
import torch
from support import check_same

import tripwire

BACKENDS = ["eager", "aot_eager"]
NAN, INF, HUGE = float("nan"), float("inf"), 10**400


def scalar(value):
    return torch.tensor(value)


# What a program computes, and with which numbers; Python raises for some of them.
RAISING = {
    "a quotient": (lambda x, v: x * (1 / v), [1, 2, 3, 0, 4, 0, 5]),
    "a quotient of floats": (lambda x, v: x * (7.5 // v), [1.0, 2.0, 3.0, 0.0, 4.0]),
    "a remainder": (lambda x, v: x * (7 % v), [1, 2, 3, 0, 4, 0, 5]),
    "divmod": (lambda x, v: x * divmod(7, v)[1], [1, 2, 3, 0, 4, 0, 5]),
    "a size": (lambda x, v: x * (1 / (v.shape[0] - 3)), [torch.ones(n) for n in (4, 5, 6, 3, 7)]),
    "a square": (lambda x, v: x * v**2, [1.0, 2.0, 3.0, 1e200, 4.0, -1e200, 5.0]),
    "a power of zero": (lambda x, v: x * 0.0 ** (v - 3.5), [4.0, 5.0, 6.0, 1.0, 7.0]),
    "an exponent": (lambda x, v: x * 10.0**v, [1, 2, 3, 500, 4]),
    "a logarithm": (lambda x, v: x * math.log(v), [1.0, 2.0, 3.0, 0.0, 4.0, -1.0, 5.0]),
    "what overflows": (lambda x, v: x * math.exp(v), [1.0, 2.0, 3.0, 1000.0, 4.0]),
    "of two numbers": (lambda x, v: x * math.pow(v, 0.5), [1.0, 2.0, 3.0, -1.0, 4.0]),
    "int": (lambda x, v: x * int(v * 1e308), [0.1, 0.2, 0.3, 10.0, 0.4]),
    "round": (lambda x, v: x * round(v * 1e308), [0.1, 0.2, 0.3, 10.0, 0.4]),
    "an int that no float is": (lambda x, v: x * (v * 1.5), [1, 2, 3, HUGE, 4, 5]),
    "out of a tensor": (lambda x, v: x * (1 / v.item()), list(map(scalar, [4.0, 5.0, 0.0, 6.0]))),
    "int of a tensor": (lambda x, v: x * int(v), list(map(scalar, [4.0, 5.0, NAN, 6.0, INF, 7.0]))),
    "a pick": (lambda x, v: x * [1, 2, 3, 4][v], [0, 1, 2, 5, 3, -9, 1]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", RAISING)
def test_an_error_that_the_program_catches_is_this_calls(name, order, backend) -> None:
    function, values = RAISING[name]

    def call(x, v):
        try:
            return function(x, v)
        except (ArithmeticError, ValueError, IndexError) as error:
            return x - len(type(error).__name__)

    compiled = tripwire.compile(call, backend=backend)
    for value in values[::order]:
        check_same(call(torch.ones(2), value), compiled(torch.ones(2), value))


def test_a_division_by_zero_that_is_caught_is_traced_once() -> None:
    def call(x, v):
        try:
            return x * (1 / v)
        except ZeroDivisionError:
            return x

    compiled = tripwire.compile(call, backend="eager")
    for value in (1, 2, 3, 0, 4, 0, 5, 0):
        check_same(call(torch.ones(2), value), compiled(torch.ones(2), value))
    assert compiled.statistics().traces == 3


def test_a_method_that_must_return_a_real_float_gets_plain_numbers() -> None:
    def call(x, ratio):
        return x * float(ratio)

    compiled = tripwire.compile(call, backend="eager")
    for n in (3, 4, 5, 6, 4):
        ratio = fractions.Fraction(n, 7)
        check_same(call(torch.ones(2), ratio), compiled(torch.ones(2), ratio))
