"""Checkpoints: what ran plainly in a checkpointed region runs plainly again in its backward.

A call that is traced runs plain code, and later ones run compiled code, which saves other tensors
for its backward. `torch.utils.checkpoint` runs a region twice, and must find the tensors of the
second time where it found those of the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Admitting(Protocol):
    """An entry."""

    def admits(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> object | None:
        """Not None where a call is for this entry."""


class Region:
    """Checkpointed code in which a call was traced: that call and all later ones are plain.

    While it runs again, calls before that one are known by the entries that admitted them then.
    """

    def __init__(self, is_over: Callable[[], bool], before: Iterable[Admitting] = ()) -> None:
        self.is_over = is_over
        self._before = tuple(before)

    def is_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call in the region runs plainly."""
        if any(entry.admits(args, kwargs) is not None for entry in self._before):
            return False
        self._before = ()
        return True


def run_plainly_in(frame: Any, plain: set[object], entries: Iterable[Admitting]) -> None:
    """Keep a Region in a set for as long as the frame's code runs, now and when it runs again.

    `entries` are those that did not admit the call that is about to be traced.
    """
    ref = weakref.ref(frame)

    def is_over() -> bool:
        frame = ref()
        return frame is None or frame.forward_completed

    recompute = frame.recompute_fn

    def recompute_plainly(*args: Any) -> None:
        region = Region(lambda: False, entries)
        plain.add(region)
        try:
            recompute(*args)
        finally:
            plain.discard(region)

    frame.recompute_fn = recompute_plainly
    plain.add(Region(is_over))
