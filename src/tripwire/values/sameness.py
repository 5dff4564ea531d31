"""Sameness: plain values are told by their type and bits; all others by who they are."""

from __future__ import annotations

from typing import Any

import torch

from tripwire.values.classes import ids_of

PLAIN = ids_of(
    *(type(None), bool, int, float, complex, str, bytes, type(...), range, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme),
)


def same_plain(left: Any, right: Any) -> bool:
    """Whether two plain values are one to Python: same type, same bits. 0.0 is not -0.0."""
    if left is right:
        return True
    cls = type(left)
    if cls is not type(right):
        return False
    if cls is float or cls is complex:
        return repr(left) == repr(right)  # nan is nan
    if cls is range:  # range(0, 3, 2) equals range(0, 4, 2), and has another stop
        return (left.start, left.stop, left.step) == (right.start, right.stop, right.step)
    if cls is slice:
        return all(map(same_plain, _bounds(left), _bounds(right)))
    if id(cls) in PLAIN:
        return bool(left == right)
    if cls is tuple:
        return len(left) == len(right) and all(map(same_plain, left, right))
    return False


def _bounds(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step
