"""Sources are the same if they lead the same way."""

from __future__ import annotations

import pytest
import torch

from tripwire.reading.sources import Item, KeyOf, Local, Roots


@pytest.mark.parametrize(
    "key", [float("nan"), torch.ones(3), "name"], ids=["nan", "tensor", "text"]
)
def test_an_item_is_the_same_under_the_same_key_whatever_that_says_of_being_equal(key) -> None:
    one, other = Item(Local("d"), key), Item(Local("d"), key)
    assert one == other
    assert hash(one) == hash(other)
    assert one != Item(Local("e"), key)
    assert one != Local("d")


def test_a_tensor_that_is_a_key_is_reached_by_which_it_is() -> None:
    key, value = torch.ones(3), torch.zeros(3)
    roots = Roots({"d": {key: value}}, None)
    assert KeyOf(Local("d"), key).fetch(roots) is key
    assert Item(Local("d"), key).fetch(roots) is value
    assert str(KeyOf(Local("d"), key)) != str(Item(Local("d"), key))
    with pytest.raises(LookupError):
        KeyOf(Local("d"), value).fetch(roots)
