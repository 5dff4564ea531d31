"""Sources are the same if they lead the same way."""

from __future__ import annotations

import pytest
import torch

from tripwire.reading.sources import Item, Local


@pytest.mark.parametrize(
    "key", [float("nan"), torch.ones(3), "name"], ids=["nan", "tensor", "text"]
)
def test_an_item_is_the_same_under_the_same_key_whatever_that_says_of_being_equal(key) -> None:
    one, other = Item(Local("d"), key), Item(Local("d"), key)
    assert one == other
    assert hash(one) == hash(other)
    assert one != Item(Local("e"), key)
    assert one != Local("d")
