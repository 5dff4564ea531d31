"""Prices: what JSON takes in memory, told from its text before it is decoded.

Lists, items and strings have a price. A file of somebody else's is decoded only where the sum is
small enough.
"""

from __future__ import annotations

import re

# Beside its text: a list, an item of one, half of a string.
LIST, ITEM, QUOTE = 64, 32, 24

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_WIDE = re.compile(rb"[\xf0-\xff]|\\ud", re.IGNORECASE)
_HALF_WIDE = re.compile(rb"[\xc4-\xff]|\\u")


def estimate_memory(text: bytes) -> int:
    """At most what this JSON and decoding it takes: lists and structs, their items, strings.

    Of a text in pieces, the sum over the pieces is the same but for wide strings.
    """
    lists = text.count(b"[") + text.count(b"{")
    return LIST * lists + ITEM * text.count(b",") + QUOTE * text.count(b'"') + 2 * len(text)


def estimate_wide(text: bytes | bytearray) -> int:
    """What strings take beyond that: one wide character makes all of a string wide."""
    if text.isascii() and b"\\u" not in text:
        return 0
    return sum(_widen(found[0]) for found in _STRING.finditer(text))


def _widen(string: bytes) -> int:
    if string.isascii() and b"\\u" not in string:
        return 0
    return len(string) * (3 if _WIDE.search(string) else 1 if _HALF_WIDE.search(string) else 0)
