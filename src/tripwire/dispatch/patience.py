"""Patience: which calls run as plain Python, and after how many tries.

Much code settles: on its first call it warns, fills a cache, makes a buffer, puts a hook on
itself. So a call that is refused is tried again a few times, and so is one whose run writes over
what it read. What was traced often for few hits isn't worth it.

A checkpointed region is plain from the first call on that was traced in it. A traced call runs
plain code, a later one compiled code, which saves other tensors for its backward;
`torch.utils.checkpoint` runs a region twice, and must find the tensors of the second time where
it found those of the first.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tripwire.reading.effects import Volatile
from tripwire.reading.reads import fingerprint
from tripwire.rulebook.refusals import Refusal
from tripwire.values.classes import isinstance

if TYPE_CHECKING:
    from tripwire.dispatch.entry import Entry

# A call that was refused this often stays plain.
REFUSALS_ALLOWED = 3
# Traces after which a callable must have been worth it: as many hits as traces.
TRACES_ON_TRUST = 16
# What models do when they first need it: put hooks on themselves, mark tensors.
_MAY_SETTLE = frozenset({"module-changed", "tensor-attribute"})


def key_of(target: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Calls that are refused alike: of one form, in one mode."""
    training = target.training if isinstance(target, nn.Module) else None
    return len(args), tuple(kwargs), training, torch.is_grad_enabled()


class Patience:
    """With the calls of one callable, by their keys."""

    def __init__(self, name: str, *, fullgraph: bool) -> None:
        self.plain: set[object] = set()  # keys of calls that stay plain, and regions
        self._name = name
        self._fullgraph = fullgraph
        self._refused: Counter[object] = Counter()
        self._unsettled: Counter[object] = Counter()
        self._hits_when_unsettled = 0

    def stay_plain(self, key: object) -> None:
        """Try no more. With fullgraph every such call raises: none may run plainly unseen."""
        if not self._fullgraph:
            self.plain.add(key)

    def note_volatile(
        self, volatile: tuple[Volatile, ...], key: object, hits: int
    ) -> Refusal | None:
        """A run wrote over what it read. A reason to make no entry, where that doesn't end.

        What settles after a few calls is compiled then, and so is what goes in circles.
        """
        if hits > self._hits_when_unsettled:
            self._unsettled[key] = 0
        self._hits_when_unsettled = hits
        if not self._may_settle(key):
            self.stay_plain(key)
            return _refuse_volatile(volatile[0])
        return None

    def find_distrust(self, key: object, traces: int, hits: int) -> Refusal | None:
        """A reason to try no more, once many traces brought few hits."""
        if traces <= TRACES_ON_TRUST or hits >= traces:
            return None
        self.stay_plain(key)
        return Refusal(
            "keeps-changing",
            f"{self._name} was traced {traces} times for {hits} hits. Something that it "
            "depends on keeps changing; the log tripwire.recompiles names it.",
        )

    def find_final(self, refusal: Refusal, key: object, traces: int, hits: int) -> Refusal | None:
        """The refusal that counts; None where the next call may do better."""
        if refusal.slug == "another-thread":  # bad luck, as long as it doesn't last
            return self.find_distrust(key, traces, hits)
        if refusal.slug in _MAY_SETTLE and self._may_settle(key):
            return None
        return refusal

    def _may_settle(self, key: object) -> bool:
        self._unsettled[key] += 1
        return self._unsettled[key] < REFUSALS_ALLOWED

    def note_refused(self, key: object) -> bool:
        """One more such call was refused. Whether they stay plain now."""
        self._refused[key] += 1
        if self._refused[key] < REFUSALS_ALLOWED:
            return False
        self.plain.add(key)
        return True

    def note_settled(self, key: object) -> None:
        """Such a call became an entry, and left what it read as it was."""
        self._unsettled[key] = self._refused[key] = 0

    # --- checkpointed regions ---

    def is_plain_in_region(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether checkpointed code, in which a call was traced, runs as it ran then."""
        for item in tuple(self.plain):
            if isinstance(item, _Region):
                if item.is_over():
                    self.plain.discard(item)
                elif item.is_plain(args, kwargs):
                    return True
        return False

    def note_region(self, frame: Any, entries: Iterable[Entry]) -> None:
        """Calls in a checkpoint's frame are plain from now on, now and when it runs again.

        `entries` are those that did not admit the call that is about to be traced.
        """
        ref = weakref.ref(frame)
        plain = self.plain

        def is_over() -> bool:
            frame = ref()
            return frame is None or frame.forward_completed

        recompute = frame.recompute_fn

        def recompute_plainly(*args: Any) -> None:
            region = _Region(lambda: False, entries)
            plain.add(region)
            try:
                recompute(*args)
            finally:
                plain.discard(region)

        frame.recompute_fn = recompute_plainly
        plain.add(_Region(is_over))


def _refuse_volatile(first: Volatile) -> Refusal:
    return Refusal(
        "volatile-source",
        f"the run reads {first.source} and leaves it changed ({fingerprint(first.before)} → "
        f"{fingerprint(first.after)}), so the next call finds something else. Counters that are "
        "only counted, and tensors, are fine.",
    )


class _Region:
    """Checkpointed code in which a call was traced: that call and all later ones are plain.

    While it runs again, calls before that one are known by the entries that admitted them then.
    """

    def __init__(self, is_over: Callable[[], bool], before: Iterable[Entry] = ()) -> None:
        self.is_over = is_over
        self._before = tuple(before)

    def is_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call in the region runs plainly."""
        if any(entry.standing.admits(args, kwargs) is not None for entry in self._before):
            return False
        self._before = ()
        return True
