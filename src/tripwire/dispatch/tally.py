"""Tally: what one compiled callable did so far, in numbers, and what its hits saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tripwire.dispatch.telling import tell_retired
from tripwire.rulebook.refusals import Cause

if TYPE_CHECKING:
    from tripwire.dispatch.entry import Entry

_CAUSES_KEPT = 16


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a compiled callable did so far."""

    calls: int
    hits: int
    traces: int
    refusals: int
    retired: int
    entries: int
    causes: tuple[Cause, ...]  # of the latest retirements
    saved_us: int | None = None  # estimated, see `Saving`; None before enough hits were timed
    rebound: int = 0  # how often an entry took over tensors of the same form for replaced ones


@dataclass(frozen=True, slots=True)
class Saving:
    """What the hits of an entry saved: an estimate, on the careful side.

    The call was never run unobserved, so the time of a plain call isn't known. Its torch calls
    stand for it: they were timed during the observed run, without the cost of observing and without
    Python's own time between them. Of equal calls, the fastest counts for all. A call without an
    equal ran for the first time, and may have been slow: it counts for anything between nothing and
    what it took, whichever is nearest to no saving.

    The first few hits after the first run are timed as a whole, guards included; the median counts
    for all hits. On a GPU both sides are the time until the work is launched.
    """

    hits: int  # after the first run, which may have compiled
    timed: int  # of these
    torch_ns: int  # in the torch calls of the observed run
    once_ns: int  # of that, in calls with no other like them
    hit_ns: int

    @property
    def ns(self) -> int:
        """What is certain, all hits together; below zero, they cost that much."""
        most = self.most_ns
        return min(0, most) if most < self.hits * self.once_ns else most - self.hits * self.once_ns

    @property
    def most_ns(self) -> int:
        """The same with each torch call at what it took."""
        return self.hits * (self.torch_ns - self.hit_ns)


class Balance(NamedTuple):
    """The savings of several entries: those that saved time, and those that cost time."""

    saved_ns: int
    lost_ns: int


def add_saving(balance: Balance | None, saving: Saving | None) -> Balance | None:
    """Take one more in, where it is known."""
    if saving is None:
        return balance
    saved, lost = balance or (0, 0)
    return Balance(saved + max(0, saving.ns), lost + max(0, -saving.ns))


class Tally:
    """Counts of one callable. Entries count their own hits; the tally sums them on request."""

    def __init__(self) -> None:
        self.calls = self.traces = self.refusals = 0  # calls: without hits
        self.made = 0  # entries
        self._retired = 0
        self._rebound = 0
        self.causes: list[Cause] = []  # of the latest retirements
        self._hits = 0  # of entries that were dropped
        self._unused = 0  # entries that were dropped without a hit
        self._balance: Balance | None = None

    def note_retired(self, causes: tuple[Cause, ...], compile_id: str | None) -> None:
        """An entry was retired, which telemetry is told."""
        self._retired += 1
        self.causes = [*self.causes, *causes][-_CAUSES_KEPT:]
        tell_retired(causes, compile_id)

    def note_rebound(self) -> None:
        """An entry took over tensors that replaced its state."""
        self._rebound += 1

    def note_dropped(self, entry: Entry) -> None:
        """Keep the hits of an entry that goes."""
        self._hits += entry.hits
        self._unused += not entry.hits
        self._balance = add_saving(self._balance, entry.find_saving())

    def count_hits(self, entries: Sequence[Entry]) -> int:
        """Of these entries, and of those that were dropped."""
        return self._hits + sum(entry.hits for entry in entries)

    def count_unused(self, entries: Sequence[Entry]) -> int:
        """How many entries had no hit so far, of these and of those that were dropped."""
        return self._unused + sum(not entry.hits for entry in entries)

    def find_balance(self, entries: Sequence[Entry]) -> Balance | None:
        """What hits saved and cost; None where too few were timed."""
        balance = self._balance
        for entry in entries:
            balance = add_saving(balance, entry.find_saving())
        return balance

    def statistics(self, entries: Sequence[Entry]) -> Statistics:
        """Counts so far."""
        hits = self.count_hits(entries)
        balance = self.find_balance(entries)
        return Statistics(
            self.calls + hits,
            hits,
            self.traces,
            self.refusals,
            self._retired,
            sum(entry.standing.is_in_use for entry in entries),
            tuple(self.causes),
            None if balance is None else (balance.saved_ns - balance.lost_ns) // 1000,
            self._rebound,
        )
