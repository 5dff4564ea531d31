"""A tensor takes an object for an index whose `__index__` would give an open number."""

from __future__ import annotations

import pytest
import torch
from support import check_same
from unit.dispatch.sidebyside import BACKENDS

import tripwire


class Position:
    def __init__(self, place):
        self.place = place

    def __index__(self):
        return self.place


class Last:
    def __init__(self, tensor):
        self.shape = tensor.shape

    def __index__(self):
        return self.shape[0] - 1


OFFSETS = {"first": 0}


class Offset:
    def __index__(self):
        return OFFSETS["first"]


def write(x, n):
    x = x * 1
    x[Position(n)] = 1.0
    return x


def write_some(x, n):
    x = x * 1
    x[Position(1) : Position(n)] = n
    return x


def by_offset(x, n):
    OFFSETS["first"] = n - 1
    return x[Offset()] * n


INDEXED = {
    "an item": lambda x, n: x[Position(n)],
    "a computed one": lambda x, n: x[Position(n * 2 - 1)] + n,
    "up to a size": lambda x, n: x[Position(1) : Position(x.shape[0])],
    "one end": lambda x, n: x[n - 1 : Position(n + 1)],
    "a step": lambda x, n: x[:: Position(n)],
    "a dimension": lambda x, n: x[:, None][Position(n), 0],
    "beside an open one": lambda x, n: x[:, None][Position(n), n - n] * n,
    "after dots": lambda x, n: x[..., Position(n)],
    "the last": lambda x, n: x[Last(x)] * n,
    "a global": by_offset,
    "out of a tensor": lambda x, n: x[Position(int(x[1]))],
    "written": write,
    "several written": write_some,
    "of a list": lambda x, n: x * [1, 2, 3, 4, 5, 6, 7, 8, 9][Position(n)],
}
WRONG = {
    "a text": lambda x, n: x[Position(str(n))],
    "beyond the end": lambda x, n: x[Position(n + 90)],
    "in a list": lambda x, n: x[[Position(n)]],
}


def check_calls(call, backend) -> tripwire.Statistics:
    compiled = tripwire.compile(call, backend=backend)
    for n in (2, 3, 4, 5, 3):
        x = torch.arange(n + 8.0)
        check_same(call(x, n), compiled(x, n))
    return compiled.statistics()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", INDEXED)
def test_an_object_that_gives_an_open_number_is_an_index(name, backend) -> None:
    check_calls(INDEXED[name], backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRONG)
def test_an_object_that_is_no_index_raises_as_in_plain_python(name, backend) -> None:
    def call(x, n):
        try:
            return WRONG[name](x, n) * n
        except Exception as error:
            return x * n, type(error).__name__, str(error)

    check_calls(call, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_object_with_a_fixed_index_leaves_numbers_open(backend) -> None:
    assert check_calls(lambda x, n: x[Position(1)] * n, backend).hits >= 2
