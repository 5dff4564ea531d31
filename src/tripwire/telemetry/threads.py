"""Threads: what each thread has open, what it has timed, and what it has counted.

Only the owning thread writes its state, so nothing here takes a lock where time is measured, or
where `count("frames", "hit")` counts. Readers add the threads up; what a finished thread leaves is
kept. A forked child begins with nothing: its figures are its own, and no lock is held there.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

from msgspec import Struct

from tripwire.forks import make_lock

KEPT_DURATIONS = 1024  # the latest of each key; totals count all of them


class OpenEvent(Struct, gc=False):  # made in C: 0.24 → 0.08 µs against a class with slots
    """A span or timeline event that has begun and not ended."""

    name: str
    key: str
    start_ns: int
    inside_ns: int = 0  # the part of it that its children took
    compile_id: str | None = None
    is_backward: bool | None = None
    data: dict[str, object] | None = None  # for the timeline
    logged: dict[str, object] | None = None  # the part of it that goes to the log as well
    owner: object = None  # who ends it
    has_column: bool = False  # its time is a figure of the metrics
    guards: list[AbstractContextManager[object]] | None = None  # left when it ends


class Total:
    """What the spans of one key took. Nested ones of the same key count once."""

    __slots__ = ("calls", "durations_ns", "errors", "ns")

    def __init__(self) -> None:
        self.ns = 0
        self.calls = 0
        self.errors = 0
        self.durations_ns: deque[int] = deque(maxlen=KEPT_DURATIONS)

    def add(self, other: Total) -> None:
        """Take another total in."""
        self.ns += other.ns
        self.calls += other.calls
        self.errors += other.errors
        self.durations_ns.extend(other.durations_ns.copy())


class ThreadState:
    """The open events, totals and counts of one thread."""

    __slots__ = ("compile_id", "counts", "ident", "name", "stack", "thread", "totals")

    def __init__(self) -> None:
        thread = threading.current_thread()
        self.thread = weakref.ref(thread)
        self.name = thread.name
        self.ident = threading.get_native_id()
        self.clear()

    def clear(self) -> None:
        """Nothing is open, nothing was counted."""
        self.stack: list[OpenEvent] = []
        self.compile_id: str | None = None  # of the compile that is going on
        self.totals: dict[str, Total] = {}
        self.counts: dict[str, dict[str, int]] = {}

    @property
    def finished(self) -> bool:
        """Whether its thread is gone: nobody writes here any more."""
        thread = self.thread()
        return thread is None or not thread.is_alive()

    def find_open(self, name: str) -> OpenEvent | None:
        """The innermost open event of that name."""
        return next((e for e in reversed(self.stack) if e.name == name), None)


class _LocalState(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()
        with _lock:
            _states.append(self.state)


_lock = make_lock()
_states: list[ThreadState] = []
_left_totals: dict[str, Total] = {}  # of threads that are gone
_left_counts: dict[str, dict[str, int]] = {}
local = _LocalState()


def merge_totals() -> dict[str, Total]:
    """The totals of all threads by key, in the order in which the keys were met."""
    merged: dict[str, Total] = {}
    with _lock:
        _fold_finished()
        for totals in (_left_totals, *(state.totals for state in _states)):
            _add_totals(merged, totals)
    return merged


def clear_totals() -> None:
    """Forget the durations of all threads."""
    with _lock:
        _fold_finished()
        _left_totals.clear()
        for state in _states:
            state.totals = {}


def forget_open_events() -> None:
    """Nothing is open in any thread. A thread that is ending an event ends it on its old stack."""
    with _lock:
        for state in _states:
            state.stack = []


def _fold_finished() -> None:
    for state in [state for state in _states if state.finished]:
        _add_totals(_left_totals, state.totals)
        _add_counts(_left_counts, state.counts)
        _states.remove(state)


# A copy of a dict is made in one step, while its owner goes on writing.
def _add_totals(into: dict[str, Total], totals: dict[str, Total]) -> None:
    for key, total in totals.copy().items():
        into.setdefault(key, Total()).add(total)


def _add_counts(into: dict[str, dict[str, int]], counts: dict[str, dict[str, int]]) -> None:
    for group, names in counts.copy().items():
        sums = into.setdefault(group, {})
        for name, count in names.copy().items():
            sums[name] = sums.get(name, 0) + count


def _after_fork_in_child() -> None:
    state = local.state
    _states[:] = [state]
    _left_totals.clear()
    _left_counts.clear()
    state.clear()
    state.ident = threading.get_native_id()


os.register_at_fork(after_in_child=_after_fork_in_child)


# --- counters -------------------------------------------------------------------------------------


class CounterStatistics(Struct, frozen=True):
    """All counts at one moment."""

    groups: Mapping[str, Mapping[str, int]]
    frames: int
    ops: int

    def __getitem__(self, group: str) -> Mapping[str, int]:
        return self.groups.get(group, _NOTHING)

    def __str__(self) -> str:
        return "\n".join(
            f"{group}: " + ", ".join(f"{name}={count}" for name, count in sorted(names.items()))
            for group, names in sorted(self.groups.items())
        )


_NOTHING: Mapping[str, int] = MappingProxyType({})


def count(group: str, name: str, by: int = 1) -> None:
    """Add to one count."""
    counts = local.state.counts
    try:
        counts[group][name] += by
    except KeyError:
        counts.setdefault(group, {}).setdefault(name, 0)
        counts[group][name] += by


def statistics() -> CounterStatistics:
    """The counts of all threads."""
    merged: dict[str, dict[str, int]] = {}
    with _lock:
        _fold_finished()
        for counts in (_left_counts, *(state.counts for state in _states)):
            _add_counts(merged, counts)
    groups = {group: MappingProxyType(names) for group, names in merged.items()}
    return CounterStatistics(
        MappingProxyType(groups),
        groups.get("frames", _NOTHING).get("total", 0),
        groups.get("ops", _NOTHING).get("total", 0),
    )


def reset_counters() -> None:
    """Every count is zero again."""
    with _lock:
        _fold_finished()
        _left_counts.clear()
        for state in _states:
            state.counts = {}
