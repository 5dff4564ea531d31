"""Watching: a listener is told when an object is changed, after the change.

Attribute writes and deletions on objects whose class can be patched are reported at once, with the
writer's line. Every other change (`__dict__` written directly, items of containers, attributes
of classes and Python modules) is found by comparison: at the next `check()`, or at the next
write that is reported. A change is reported once. A watch sees one level: what an object holds, not
what that holds in turn.

A watch doesn't keep an object alive that can be weakly referenced. As long as somebody holds the
`Watch` itself, it keeps alive the values that can't be (lists, dicts): otherwise a new one at the
same address could not be told from the old one.

Threads may write, check and cancel at once. If another thread overwrites a value before it is
looked at, that value isn't reported. No lock is held while user code runs.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tripwire.forks import make_lock
from tripwire.ranges import Frame, SourceRange
from tripwire.values.classes import name_of
from tripwire.writes import snapshots
from tripwire.writes.snapshots import Difference
from tripwire.writes.subscriptions import AttributeWrite, Subscription, can_patch, can_refer

log = logging.getLogger("tripwire.watch")


@dataclass(frozen=True, slots=True)
class Change:
    """One attribute or item that was written."""

    name: object  # attribute, key, index, or element of a set; ORDER where only that changed
    old: object  # ABSENT where there was nothing, GONE where the value has died since
    new: object  # ABSENT where it was deleted
    where: Frame | None  # the writer; None where the change was found by comparison

    def __str__(self) -> str:
        at = "" if self.where is None else f", at {self.where.file}:{self.where.line}"
        return f"{self.name}: {self.old!r} -> {self.new!r}{at}"


Listener = Callable[[Change], object]
_Seen = tuple[Change, AttributeWrite | None]  # a change, and the write that made it


def watch(obj: object, listener: Listener) -> Watch:
    """Tell `listener` of every change to an object, until the watch is cancelled.

    Works for modules of torch (parameters, buffers, submodules and hooks included), plain
    objects, dicts, lists, sets, deques, functions, classes and Python modules. A listener
    isn't told of attributes that it writes itself; one that raises is dropped and logged. An
    object that can't be weakly referenced (no `__weakref__` slot) lives until the cancel.
    """
    if not callable(listener):
        raise TypeError(
            f"a listener must be callable: it is called with each change. {listener!r} isn't."
        )
    if not snapshots.can_read(obj):
        raise TypeError(
            f"{name_of(type(obj))} objects can't be watched: they have no attributes or items "
            "that Python could compare. Watch the object that holds this one."
        )
    return Watch(obj, listener)


class Watch:
    """A listener's watch on one object. `with` checks and cancels at the end."""

    __slots__ = ("__weakref__", "_kept", "_watcher")

    def __init__(self, obj: object, listener: Listener) -> None:
        self._kept: Mapping[int, object] = {}
        self._watcher = _Watcher(obj, listener, self)

    @property
    def active(self) -> bool:
        """Whether the listener may still be told something."""
        return self._watcher.listener is not None and self._watcher.find() is not None

    @property
    def is_under_way(self) -> bool:
        """Whether this thread is inside of an attribute write, which is told when it is over."""
        return self._watcher.is_under_way()

    def find(self) -> object:
        """The object, or None when it has died."""
        return self._watcher.find()

    def check(self) -> tuple[Change, ...]:
        """Compare with what was there, tell the listener, and return what it was told."""
        return self._watcher.check()

    def cancel(self) -> None:
        """End the watch. What wasn't found yet isn't told."""
        self._watcher.end()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.check()
        self.cancel()

    def __repr__(self) -> str:
        obj = self._watcher.find() if self.active else None
        return "<Watch, over>" if obj is None else f"<Watch on {name_of(type(obj))}>"


class _Watcher:
    """What a patched class reaches. It lives with the object, also when nobody has the Watch."""

    def __init__(self, obj: object, listener: Listener, handle: Watch) -> None:
        self.listener: Listener | None = listener
        self._find: Callable[[], object] = weakref.ref(obj) if can_refer(obj) else lambda: obj
        self._handle = weakref.ref(handle)
        self._lock = make_lock()  # for the lines that replace `_held`, nothing else
        self._writes: list[AttributeWrite] = []
        self._telling: dict[int, list[_Seen]] = {}  # by thread, what is left to tell
        kept: dict[int, object] = {}
        self._held = snapshots.hold(snapshots.read(obj), kept)
        handle._kept = kept
        self._subscription: Subscription | None = None
        if can_patch(type(obj)):
            self._subscription = Subscription(obj, self)
            if self.listener is None:  # another thread wrote meanwhile, and the watch was ended
                self.end()

    def find(self) -> object:
        """The object, or None when it has died."""
        return self._find()

    # --- seen writes ---

    def is_under_way(self) -> bool:
        """Whether this thread writes just now."""
        return any(write.thread == threading.get_ident() for write in tuple(self._writes))

    def before(self, obj: object, write: AttributeWrite) -> Mapping[int, object]:
        """Tell what was written unseen, and keep what is there now for as long as it takes."""
        now = snapshots.read(obj)
        if write.thread not in self._telling and not snapshots.is_unchanged(self._held, now):
            self._tell(self._update(obj, {}))
        self._writes.append(write)
        return snapshots.values_of(now)

    def after(self, obj: object, write: AttributeWrite, before: Mapping[int, object]) -> None:
        """Tell what the write changed. One that raised may have changed something, too."""
        try:
            seen = self._update(obj, before)
            if self._subscription is not None:
                self._subscription.follow(obj)
        finally:
            self._writes.remove(write)
        self._tell(seen)

    def gone(self) -> None:
        """Forget everything about an object that has died."""
        self._subscription = None
        self._drop()

    # --- comparison ---

    def check(self) -> tuple[Change, ...]:
        """Compare, and tell what is found."""
        obj = self.find()
        if obj is None or self.listener is None:
            self.end()
            return ()
        if threading.get_ident() in self._telling:  # asked by the listener itself
            return ()
        seen = self._update(obj, {})
        if self._subscription is not None:
            self._subscription.follow(obj)
        self._tell(seen)
        return tuple(change for change, _ in seen)

    def _update(self, obj: object, alive: Mapping[int, object]) -> list[_Seen]:
        """What differs from what was held, which is then replaced.

        Whoever replaces it tells, so threads that compare at once don't tell twice. No lock is
        held while reading: collecting garbage there can run anything.
        """
        while self.listener is not None:
            held = self._held
            now = snapshots.read(obj)
            if snapshots.is_unchanged(held, now):
                break
            handle = self._handle()
            known = {**(handle._kept if handle is not None else {}), **alive}
            seen = [self._attribute(found) for found in snapshots.compare(held, now, known)]
            kept: dict[int, object] = {}
            marks = snapshots.hold(now, kept)
            with self._lock:
                if self._held is held and self.listener is not None:
                    self._held = marks
                    if handle is not None:
                        handle._kept = kept
                    return seen
        return []

    def _attribute(self, found: Difference) -> _Seen:
        """A difference with the write that made it, if that can be told."""
        writes = tuple(self._writes)
        by = next((w for w in reversed(writes) if _is_name(w.name, found.name)), None)
        if by is None and writes and {w.thread for w in writes} == {threading.get_ident()}:
            by = writes[-1]  # a method that stores under another name
        return Change(*found, None if by is None else _place(by.frame)), by

    # --- telling ---

    def _tell(self, seen: list[_Seen]) -> None:
        thread = threading.get_ident()
        if not seen:
            return
        if thread in self._telling:
            # The listener wrote: that isn't told, or a listener that always writes would never
            # end. What another thread is writing just now is.
            others = [pair for pair in seen if pair[1] is not None and pair[1].thread != thread]
            self._telling[thread].extend(others)
            return
        left = self._telling[thread] = list(seen)
        try:
            while left and (listener := self.listener) is not None:
                change, _ = left.pop(0)
                try:
                    listener(change)
                except Exception:
                    self.end()
                    log.warning(
                        "a listener raised when it was told of a change to %r, and is dropped",
                        change.name,  # values may be large, or hard to print
                        exc_info=True,
                    )
        finally:
            del self._telling[thread]

    def end(self) -> None:
        """Let go of the object, its class and the listener."""
        obj, subscription = self.find(), self._subscription
        self._subscription = None
        if subscription is not None and obj is not None:
            subscription.end(obj)
        if obj is not None and not can_refer(obj):
            self._find = lambda: None
        self._drop()

    def _drop(self) -> None:
        handle = self._handle()
        with self._lock:
            self.listener = None
            if handle is not None:
                handle._kept = {}


def _is_name(written: object, found: object) -> bool:
    return type(written) is str and type(found) is str and written == found


def _place(frame: FrameType | None) -> Frame | None:
    raw: list[Any] = []
    while frame is not None:
        raw += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return SourceRange(tuple(raw)).place
