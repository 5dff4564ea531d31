"""Containers are copied in one go, also while somebody writes to them."""

from __future__ import annotations

import pytest

from tripwire.values.contents import at_once


def test_what_was_written_to_meanwhile_is_read_again() -> None:
    table, reads = {"a": 1}, []

    def iterate():
        for key in table:
            reads.append(key)
            if len(reads) == 1:
                table["b"] = 2  # as another thread might
            yield key

    assert at_once(iterate) == ("a", "b")
    assert reads == ["a", "a", "b"]


def test_an_error_of_the_containers_own_is_raised_the_first_time() -> None:
    asked = []

    def iterate():
        asked.append(1)
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        at_once(iterate)
    assert len(asked) == 1
