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

Held = tuple[tuple[object, ...], tuple[int, ...]]  # keys, and the identities of their values


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
            held = remembered.read(remembered.owner)
            if held != remembered.held:
                before = dict(zip(*remembered.held, strict=True))
                after = dict(zip(*held, strict=True))
                for key in dict.fromkeys((*before, *after)):
                    if before.get(key) != after.get(key):
                        yield remembered.step(key)


def held_by_dict(owner: dict[Any, Any]) -> Held:
    """Items of a dict; a subclass's own methods are passed by."""
    return tuple(dict.keys(owner)), tuple(map(id, dict.values(owner)))


def held_by_list(owner: list[Any] | deque[Any]) -> Held:
    """Elements by position."""
    return tuple(range(len(owner))), tuple(map(id, owner))


def held_by_set(owner: set[Any]) -> Held:
    """Elements, which are their own keys."""
    elements = tuple(set.__iter__(owner))
    return elements, tuple(map(id, elements))


def held_by_slots(owner: object) -> Held:
    """Filled slots."""
    return held_by_dict(read_slots(owner))


def held_by_class(owner: type) -> Held:
    """Attributes of a class itself."""
    return held_by_dict(dict(vars(owner)))


def held_by_cells(owner: dict[str, CellType]) -> Held:
    """Closure variables that are bound."""
    bound = {}
    for name, cell in owner.items():
        try:
            bound[name] = cell.cell_contents
        except ValueError:  # an empty cell
            continue
    return held_by_dict(bound)


def held_by_names(names: frozenset[str]) -> Callable[[dict[str, Any]], Held]:
    """Some names of a namespace."""
    return lambda owner: held_by_dict({name: owner[name] for name in names if name in owner})
