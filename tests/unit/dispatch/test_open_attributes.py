"""An open number has the attributes of an int or a float, and takes no others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import check_same
from unit.dispatch.sidebyside import BACKENDS

import tripwire

INTERNALS = ("node", "value", "symbol", "made", "ledger", "_sympy_", "__sym_max__", "__dict__")


def tag(n):
    n.tag = "seen"


def shadow_a_method(n):
    n.bit_length = 3


def hide_the_value(n):
    n.value = 3


def take_away(n):
    del n.value


HIDDEN: dict[str, Callable[[Any], object]] = {
    "set": tag,
    "a method": shadow_a_method,
    "what tripwire keeps": hide_the_value,
    "deleted": take_away,
    "setattr": lambda n: setattr(n, "k", 1),
    "computed names": lambda n: [hasattr(n, name) for name in INTERNALS],
    "a default": lambda n: getattr(n, "value", n) + 1,
    "read": lambda n: n.value,
    "torch's": lambda n: n.node,
    "its dict": lambda n: n.__dict__,
    "vars": lambda n: vars(n),
    "a doc": lambda n: n.__doc__,
    "all names": lambda n: dir(n),
}
ASKED: dict[str, Callable[[Any], object]] = {
    "its size": lambda n: n.__sizeof__(),
    "its memory": lambda n: sys.getsizeof(n),
    "what a copy needs": lambda n: n.__getnewargs__(),
    "a symbol": lambda n: isinstance(n, (torch.SymInt, torch.SymFloat)),
    "an array": lambda n: hasattr(n, "__array__"),
}
NUMBERS = {
    "an int": lambda i: i + 2,
    "a float": lambda i: i + 2.5,
    "a float of NumPy's": lambda i: np.float64(i + 2.5),
}


def check_asked(ask, numbers, backend, *, of_size: bool = False) -> tripwire.Statistics:
    def call(x, n):
        try:
            found = ask(x.shape[0] if of_size else n)
        except (AttributeError, TypeError) as error:
            found = type(error).__name__, str(error)
        return x * n, found

    compiled = tripwire.compile(call, backend=backend)
    for n in numbers:
        x = torch.arange(float(n) if of_size else 4.0)
        want, got = call(x, n), compiled(x, n)
        check_same(want, got)
        assert type(want[1]) is type(got[1])
    return compiled.statistics()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("name", HIDDEN)
def test_an_open_number_hides_what_a_plain_one_has_not(name, kind, backend) -> None:
    check_asked(HIDDEN[name], map(NUMBERS[kind], range(5)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HIDDEN)
def test_an_open_size_hides_what_a_plain_one_has_not(name, backend) -> None:
    assert check_asked(HIDDEN[name], range(2, 7), backend, of_size=True).hits == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("name", ASKED)
def test_an_open_number_answers_as_a_plain_one(name, kind, backend) -> None:
    check_asked(ASKED[name], map(NUMBERS[kind], range(5)), backend)
