"""Stands in for the package expecttest: compares inline texts, and never rewrites files."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

ACCEPT = False
_DIFFERS = "EXPECTTEST text differs"  # a word that judge.py takes for Dynamo's internals


class TestCase(unittest.TestCase):
    """What PyTorch's test cases inherit from."""

    longMessage = True  # unittest's name

    def assertExpectedInline(self, actual: object, expect: str, *_: Any, **__: Any) -> None:  # noqa: N802
        assert_expected_inline(actual, expect)

    def assertExpected(self, *_: Any, **__: Any) -> None:  # noqa: N802
        raise AssertionError(_DIFFERS)

    def assertExpectedRaisesInline(  # noqa: N802
        self,
        kind: type[Exception],
        call: Callable[..., Any],
        expect: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        try:
            call(*args, **kwargs)
        except kind as error:
            assert_expected_inline(error, expect)
        else:
            raise AssertionError("EXPECTTEST did not raise")


def assert_expected_inline(actual: object, expect: str, **_: Any) -> None:
    """Compare two texts, but for the space around them."""
    if str(actual).strip() != str(expect).strip():
        raise AssertionError(_DIFFERS)


def assert_eq(left: object, right: object) -> None:
    """Compare two values."""
    assert left == right
