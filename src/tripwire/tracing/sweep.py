"""Sweep: no open number outlives its run.

Whatever holds one when the run is over holds its plain value from then on.
"""

from __future__ import annotations

import gc
from collections import deque
from types import CellType
from typing import Any

from tripwire.values.classes import class_dict, is_namedtuple, isinstance
from tripwire.values.contents import own_dict, slots_of


class Sweep:
    """Replaces open numbers by plain ones, wherever they are held."""

    def __init__(self, numbers: list[Any], tuples: dict[int, object]) -> None:
        self._numbers = numbers
        self._tuples = tuples  # with open numbers, by identity: what to put in their place
        self._replaced = {id(number): number.value for number in numbers}
        self._old: list[object] = list(numbers)  # alive, so that identities stay theirs

    def run(self, result: object) -> object:
        """Everywhere, and in a result; which may be another object then."""
        fresh: list[object] = list(self._numbers)
        while fresh:
            asked = tuple(fresh)  # one of our own: 3.13 counts what a list is unpacked into
            mine = {id(fresh), id(asked), id(self._old), id(self._numbers), id(self.__dict__)}
            holders = [h for h in gc.get_referrers(*asked) if id(h) not in mine]
            fresh = []
            for holder in holders:
                self._replace_in(holder, fresh)
            holders.clear()
        return self._replaced.get(id(result), result)

    def _find(self, value: object) -> Any:
        return self._replaced.get(id(value), value)

    @staticmethod
    def _put(space: dict[Any, Any], key: Any, value: object) -> None:
        """Into a dict; past it where it is a class's, which remembers what it held."""
        classes = gc.get_referrers(space) if "__module__" in space else ()
        for cls in classes:
            if isinstance(cls, type) and gc.get_referents(class_dict(cls))[0] is space:
                type.__setattr__(cls, key, value)
                return
        dict.__setitem__(space, key, value)

    def _replace_in(self, holder: Any, fresh: list[object]) -> None:
        if isinstance(holder, tuple):
            if id(holder) not in self._replaced and any(id(i) in self._replaced for i in holder):
                items = [self._find(item) for item in tuple.__iter__(holder)]
                cls = type(holder)
                made = tuple.__new__(cls, items) if is_namedtuple(cls) else cls(items)
                known = self._tuples.get(id(holder), holder)
                self._replaced[id(holder)] = made if known is holder else known
                self._old.append(holder)
                fresh.append(holder)
        elif isinstance(holder, dict):
            if any(id(key) in self._replaced for key in dict.keys(holder)):
                items = [(self._find(k), self._find(v)) for k, v in dict.items(holder)]
                dict.clear(holder)
                dict.update(holder, items)
            for key, value in list(dict.items(holder)):
                if id(value) in self._replaced:
                    self._put(holder, key, self._find(value))
        elif isinstance(holder, list):
            for index, value in enumerate(list.__iter__(holder)):
                if id(value) in self._replaced:
                    list.__setitem__(holder, index, self._find(value))
        elif isinstance(holder, deque):
            for index, value in enumerate(list(deque.__iter__(holder))):
                if id(value) in self._replaced:
                    deque.__setitem__(holder, index, self._find(value))
        elif isinstance(holder, set):
            for value in list(set.__iter__(holder)):
                if id(value) in self._replaced:
                    set.discard(holder, value)
                    set.add(holder, self._find(value))
        elif isinstance(holder, CellType):
            holder.cell_contents = self._find(holder.cell_contents)
        else:
            space = own_dict(holder)
            if space is not None:
                self._replace_in(space, fresh)
            for slot in slots_of(type(holder)).values():
                value = slot.__get__(holder)
                if id(value) in self._replaced:
                    slot.__set__(holder, self._find(value))
