"""Contents: what mutable things held before a run, so that its writes can be told after it.

Values are remembered by identity only: a tensor that the run lets go dies as it would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType
from typing import Any

from tripwire.tracing.sources import Source
from tripwire.tracing.structure import read_slots

Held = dict[object, int]  # key → identity of the value


@dataclass(frozen=True, slots=True)
class _Remembered:
    owner: Any
    read: Callable[[Any], Held]
    held: Held
    step: Callable[[Any], Source]  # the path of a key


class Contents:
    """Everything that was remembered in one run."""

    def __init__(self) -> None:
        self._remembered: list[_Remembered] = []

    def remember(
        self, owner: Any, read: Callable[[Any], Held], step: Callable[[Any], Source]
    ) -> None:
        """Keep what `owner` holds now."""
        self._remembered.append(_Remembered(owner, read, read(owner), step))

    def find_writes(self) -> Iterator[Source]:
        """Paths that hold something else now than before, or nothing, or something new."""
        for remembered in self._remembered:
            before, after = remembered.held, remembered.read(remembered.owner)
            if before != after:
                for key in dict.fromkeys((*before, *after)):
                    if before.get(key) != after.get(key):
                        yield remembered.step(key)


def held_by_dict(owner: dict[Any, Any]) -> Held:
    """Items of a dict; a subclass's own methods are passed by."""
    return dict(zip(dict.keys(owner), map(id, dict.values(owner)), strict=True))


def held_by_list(owner: list[Any] | deque[Any]) -> Held:
    """Elements by position."""
    return dict(enumerate(map(id, owner)))


def held_by_set(owner: set[Any]) -> Held:
    """Elements, which are their own keys."""
    return {element: id(element) for element in set.__iter__(owner)}


def held_by_slots(owner: object) -> Held:
    """Filled slots."""
    return {name: id(value) for name, value in read_slots(owner).items()}


def held_by_class(owner: type) -> Held:
    """Attributes of a class itself."""
    return {name: id(value) for name, value in vars(owner).items()}


def held_by_cells(owner: dict[str, CellType]) -> Held:
    """Closure variables that are bound."""
    held: Held = {}
    for name, cell in owner.items():
        try:
            held[name] = id(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return held


def held_by_names(names: frozenset[str]) -> Callable[[dict[str, Any]], Held]:
    """Some names of a namespace."""
    return lambda owner: {name: id(owner[name]) for name in names if name in owner}
