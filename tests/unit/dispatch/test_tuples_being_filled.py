"""A tuple that is being filled when open numbers are taken back gets plain ones."""

from __future__ import annotations

import pytest
import torch
from support import check_same
from unit.dispatch.sidebyside import BACKENDS

import tripwire


def tell(n):
    return 3 if type(n) is int else 5


def either(n, k):
    return n if k == 0 or n < 4 else tell(n)


FILLED = {
    "a generator": lambda x, n: x * sum(tuple(either(n, k) for k in range(2))),
    "many": lambda x, n: (x * 2, tuple(either(n, k) for k in range(30))),
    "mapped": lambda x, n: (x * 2, tuple(map(either, [n] * 3, range(3)))),
    "arguments": lambda x, n: x * max(*map(either, [n] * 12, range(12))),
    "in a tuple": lambda x, n: (x * n, (n, tuple(either(n, k) for k in range(4)))),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FILLED)
def test_a_tuple_that_is_being_filled_gets_plain_numbers(name, backend) -> None:
    call = FILLED[name]
    compiled = tripwire.compile(call, backend=backend)
    for n in (2, 3, 4, 5, 3):
        x = torch.arange(n + 8.0)
        check_same(call(x, n), compiled(x, n))
