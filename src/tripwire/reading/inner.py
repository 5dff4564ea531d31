"""Inner: what the code of a custom autograd function writes, it writes again on every call.

It isn't an effect of the run to be repeated beside it. Whatever was written is looked at before and
after each such function. Other code of the run may not write to the same place: nobody could tell
in which order. Nor may it have written anything before: the function may read it, and a compiled
call writes when all functions have run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tripwire.reading.holders import Holders, Write
from tripwire.reading.kinds import ElementsKind
from tripwire.rulebook.refusals import Refused
from tripwire.values.classes import ids_of, isinstance
from tripwire.values.sameness import same_plain

Place = tuple[int, Any]  # a holder's identity, and a key; of lists the whole
Written = dict[Place, object]
_UNWRITTEN = object()


class InnerWrites:
    """The places that custom functions of one run wrote to."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._latest: Written = {}  # as the function left it
        self._mixed: set[Place] = set()
        self._is_late = False  # a function ran after other code had written

    def look(self) -> Written:
        """Everything that was written so far, by anybody."""
        return _map(self._holders.find_writes())

    def note(self, before: Written) -> None:
        """A function ran since `before`."""
        after = self.look()
        self._is_late |= any(
            not _is_same(was, self._latest.get(place, _UNWRITTEN)) for place, was in before.items()
        )
        for place, was, now in _changes(before, after):
            if not _is_same(was, self._latest.get(place, _UNWRITTEN)):
                self._mixed.add(place)
            self._latest[place] = now

    def is_as(self, before: Written) -> bool:
        """Whether nothing was written since `before`."""
        return next(_changes(before, self.look()), None) is None

    def split(self, writes: list[Write]) -> tuple[list[Write], list[Write]]:
        """The run's own writes, and those of custom functions. Raises Refused."""
        if self._is_late:
            raise Refused("custom-function-writes", _LATE)
        if not self._latest:
            return writes, []
        final = _map(writes)
        for place, left in self._latest.items():
            if place in self._mixed or not _is_same(final.get(place, _UNWRITTEN), left):
                raise Refused("custom-function-writes", _MIXED)
        inner = [write for write in writes if _place_of(write) in self._latest]
        return [write for write in writes if _place_of(write) not in self._latest], inner


_MIXED = (
    "a custom autograd function writes to a place that other code of the run writes to as well. "
    "A compiled call can't keep the order of these writes. Write to it in one of them only."
)


_LATE = (
    "a custom autograd function reads or writes something besides its arguments, and runs after "
    "other code of the run has written to an attribute, an item or a variable. A compiled call "
    "writes only after all such functions have run, so this one could read an old value. Write "
    "after it, or pass it what it needs."
)


def _map(writes: Iterable[Write]) -> Written:
    return {_place_of(write): _value_of(write) for write in writes}


def _changes(before: Written, after: Written) -> Iterator[tuple[Place, object, object]]:
    for place in {**before, **after}:
        was, now = before.get(place, _UNWRITTEN), after.get(place, _UNWRITTEN)
        if not _is_same(was, now):
            yield place, was, now


def _place_of(write: Write) -> Place:
    is_list = isinstance(write.holder.kind, ElementsKind)
    return id(write.holder), None if is_list else write.key


def _value_of(write: Write) -> object:
    holder = write.holder
    return tuple(holder.owner) if isinstance(holder.kind, ElementsKind) else write.after


def _is_same(left: object, right: object) -> bool:
    if type(left) is tuple and type(right) is tuple:
        return len(left) == len(right) and all(map(_is_same, left, right))
    return left is right or (id(type(left)) in _PLAIN and same_plain(left, right))


_PLAIN = ids_of(int, float, bool, str, complex, type(None))
