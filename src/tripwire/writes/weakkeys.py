"""Weak keys: a dictionary whose keys are objects themselves, not what they are equal to.

A key is held weakly, and its entry goes with it. An object that was made at a dead key's
address finds nothing: an entry is used only if its reference still leads to the key asked for.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar, overload

from tripwire.values.classes import isinstance, name_of

T = TypeVar("T")
D = TypeVar("D")


class _Key(weakref.ref[object]):
    """A weak reference that remembers the address of what it led to."""

    __slots__ = ("address",)

    address: int


class ExactWeakKeyDictionary(Generic[T]):
    """A mapping from objects, by identity, to values. Keys need not be hashable."""

    __slots__ = ("__weakref__", "_entries", "_forget")

    def __init__(self) -> None:
        self._entries: dict[int, tuple[_Key, T]] = {}
        this = weakref.ref(self)  # a dictionary that is let go dies at once, without the collector

        # Runs before the key's memory is free, so the address can't belong to a new key yet.
        def forget(key: weakref.ref[object]) -> None:
            mapping = this()
            if mapping is not None and isinstance(key, _Key):
                found = mapping._entries.get(key.address)
                if found is not None and found[0] is key:
                    del mapping._entries[key.address]

        self._forget = forget

    def _find(self, key: object) -> tuple[_Key, T] | None:
        found = self._entries.get(id(key))
        # A dead reference leads to None, and None can't be a key.
        return found if found is not None and key is not None and found[0]() is key else None

    def __getitem__(self, key: object) -> T:
        found = self._find(key)
        if found is None:
            raise KeyError(key)
        return found[1]

    @overload
    def get(self, key: object) -> T | None: ...
    @overload
    def get(self, key: object, default: D) -> T | D: ...
    def get(self, key: object, default: D | None = None) -> T | D | None:
        """The key's value, or the default."""
        found = self._find(key)
        return default if found is None else found[1]

    def __contains__(self, key: object) -> bool:
        return self._find(key) is not None

    def __setitem__(self, key: object, value: T) -> None:
        found = self._find(key)
        if found is not None:
            self._entries[id(key)] = (found[0], value)
            return
        try:
            reference = _Key(key, self._forget)
        except TypeError:
            raise TypeError(
                f"{name_of(type(key))} objects can't be weakly referenced, so they can't be "
                "keys of an ExactWeakKeyDictionary. A class of your own can be, with "
                "'__weakref__' among its __slots__."
            ) from None
        reference.address = id(key)
        self._entries[id(key)] = (reference, value)

    def __delitem__(self, key: object) -> None:
        if self._find(key) is None:
            raise KeyError(key)
        del self._entries[id(key)]

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget every entry."""
        self._entries.clear()

    def __repr__(self) -> str:
        return f"<ExactWeakKeyDictionary of {len(self)}>"
