"""Mutation: code that read an object is invalidated when the object is changed.

A tracker belongs to one object. It holds code weakly and tells it once, after the change. The
object is watched only while there is code to tell, so its class is as it was when the last
code is told or gone.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import ClassVar, Protocol

from tripwire.ranges import Frame
from tripwire.writes import watching
from tripwire.writes.subscriptions import can_refer, ensure_patched
from tripwire.writes.watching import Change, Watch
from tripwire.writes.weakkeys import ExactWeakKeyDictionary

__all__ = ["MutationTracker", "ensure_patched", "watch"]

log = logging.getLogger("tripwire.watch")


class GuardedCode(Protocol):
    """Code that holds only while what it read is unchanged."""

    def invalidate(self, ref: weakref.ref[GuardedCode]) -> object:
        """Called once, with the reference that led here, when something read was changed."""


class MutationTracker:
    """The mutations of one object, counted while it is watched, and the code that they concern."""

    db: ClassVar[ExactWeakKeyDictionary[MutationTracker]] = ExactWeakKeyDictionary()
    # Objects without weak references, while they are watched.
    pinned: ClassVar[dict[int, tuple[object, MutationTracker]]] = {}

    def __init__(self) -> None:
        self.mutation_count = 0
        self.writer: Frame | None = None  # of the latest mutation; None if a check found it
        self.watchers: list[weakref.ref[GuardedCode]] = []
        self._watch: Watch | None = None

    @classmethod
    def find(cls, obj: object) -> MutationTracker | None:
        """The tracker of an object that is or was watched."""
        pinned = cls.pinned.get(id(obj))
        return cls.db.get(obj) if pinned is None else pinned[1]

    def on_mutation(self, name: object) -> None:
        """Count a mutation, and invalidate the code that wasn't told yet."""
        self.mutation_count += 1
        with _lock:
            told, self.watchers = self.watchers, []
        self._rest()
        for ref in told:
            code = ref()
            if code is not None:
                try:
                    code.invalidate(ref)
                except Exception:
                    log.warning("invalidating %r for %r raised", code, name, exc_info=True)

    def track(self, guarded_code: GuardedCode) -> None:
        """Tell this code of the next mutation."""
        with _lock:
            self.watchers.append(weakref.ref(guarded_code, self._forget))

    def check(self) -> bool:
        """Compare with what was there, for writes that nothing saw; whether there were any."""
        watch = self._watch
        return watch is not None and bool(watch.check())

    def _forget(self, ref: weakref.ref[GuardedCode]) -> None:
        with _lock:
            self.watchers = [watcher for watcher in self.watchers if watcher is not ref]
        self._rest()

    def _arm(self, obj: object) -> None:
        """Watch the object, if nobody did meanwhile and the code is still there."""
        if self._watch is not None:
            return
        fresh: Watch | None = watching.watch(obj, self._changed)
        with _lock:
            if self._watch is None and self.watchers:
                self._watch, fresh = fresh, None
        if fresh is not None:
            fresh.cancel()

    def _changed(self, change: Change) -> None:
        self.writer = change.where
        self.on_mutation(change.name)

    def _rest(self) -> None:
        """End the watch if there is no code left to tell."""
        with _lock:
            if self.watchers:
                return
            watch, self._watch = self._watch, None
            for address, (_, tracker) in tuple(self.pinned.items()):
                if tracker is self:
                    del self.pinned[address]
        if watch is not None:
            watch.cancel()


_lock = threading.RLock()


def watch(obj: object, guarded_code: GuardedCode) -> MutationTracker:
    """From now on a mutation of `obj` invalidates `guarded_code`.

    Works for whatever `tripwire.watch` works for, and sees what that sees: attribute writes at
    once, other writes when `check()` of the tracker is called.
    """
    with _lock:
        tracker = MutationTracker.find(obj) or MutationTracker()
        tracker.track(guarded_code)
        if can_refer(obj):
            MutationTracker.db[obj] = tracker
        else:
            MutationTracker.pinned[id(obj)] = (obj, tracker)
    try:
        tracker._arm(obj)
    except BaseException:  # it can't be watched
        tracker.watchers.clear()
        tracker._rest()
        raise
    return tracker
