"""Regions: checkpointed code is plain from the first call on that ran plainly in it.

`torch.utils.checkpoint` runs a region twice, and must find the tensors of the second time where it
found those of the first. A call that no entry takes, traced or not, runs plain code; a later one
may run compiled code, which saves other tensors for its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tripwire.dispatch.entry import Entry


class Regions:
    """Those in which calls of one callable run plainly."""

    def __init__(self) -> None:
        self.open: set[_Region] = set()

    def is_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether checkpointed code of this thread runs as it ran before."""
        me = get_ident()
        for region in tuple(self.open):
            if region.is_over():
                self.open.discard(region)
            elif region.thread == me and region.is_plain(args, kwargs):
                return True
        return False

    def note(self, frame: Any, entries: Iterable[Entry]) -> None:
        """Calls in a checkpoint's frame are plain from now on, now and when it runs again.

        `entries` are those that did not admit the call that is about to run plainly.
        """
        ref = weakref.ref(frame)
        regions = self.open

        def is_over() -> bool:
            frame = ref()
            return frame is None or frame.forward_completed

        recompute = frame.recompute_fn

        def recompute_plainly(*args: Any) -> None:
            region = _Region(lambda: False, entries)
            regions.add(region)
            try:
                recompute(*args)
            finally:
                regions.discard(region)

        frame.recompute_fn = recompute_plainly
        regions.add(_Region(is_over))


class _Region:
    """Checkpointed code in which a call ran plainly: that call and all later ones are plain.

    While it runs again, calls before that one are known by the entries that admitted them then.
    """

    def __init__(self, is_over: Callable[[], bool], before: Iterable[Entry] = ()) -> None:
        self.is_over = is_over
        self.thread = get_ident()
        self._before = tuple(before)

    def is_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call in the region runs plainly."""
        if any(entry.standing.admits(args, kwargs) is not None for entry in self._before):
            return False
        self._before = ()
        return True
