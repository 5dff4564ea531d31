"""Alternatives: what the audit puts in the place of a value."""

from __future__ import annotations

import enum
from collections import deque

import numpy as np
import pytest
import torch

from tripwire.auditing.alternatives import find_other_plain


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Lonely(enum.Enum):
    ONLY = 1


PLAIN = [
    *(True, 3, 1.5, 2j, "a", b"a", Colour.RED, torch.float32, torch.float64, np.ones(2)),
    *((1, "a"), [object(), 1], {"a": object(), "b": 1}, {1}, frozenset({1}), deque([1])),
    *((), [], {}, set(), deque()),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_a_plain_value_has_another_one_of_its_type(value) -> None:
    (other,) = find_other_plain(value)
    assert type(other) is type(value)
    assert repr(other) != repr(value)


@pytest.mark.parametrize("value", [object(), Lonely.ONLY, [object()], {"a": object()}, len])
def test_what_isnt_plain_or_has_no_other_has_none(value) -> None:
    assert find_other_plain(value) is None
