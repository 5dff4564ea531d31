"""Memory: which memory a tensor has, so that it can be told what an in-place write can reach.

Every storage that the run made itself has a number of its own, views of it included. All
other memory is one, OUTSIDE: inputs may overlap in ways that no storage shows. A number never
goes to a second storage: a weak reference keeps a dead one's address from being used again.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tripwire.reading.tensors import PLAIN_TENSORS, iter_given
from tripwire.values.classes import isinstance

OUTSIDE = 0


class MemoryTable:
    """Storage → number, for the length of a run."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._refs: list[Any] = []
        self._hides = False  # a tensor was met whose memory is in other tensors
        weakref.finalize(self, _release, self._refs)

    def add_outside(self, tensor: torch.Tensor) -> None:
        """An input's memory."""
        storage = self._storage_of(tensor)
        if storage is not None:
            self._number(storage, OUTSIDE)

    @property
    def latest(self) -> int:
        """Memory that is met from now on has a greater number, or is OUTSIDE."""
        return len(self._refs)

    def find(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory."""
        storage = self._storage_of(tensor)
        return OUTSIDE if storage is None else self._numbers.get(storage._cdata, OUTSIDE)

    def add_results(self, value: Any, may_be_outside: bool) -> tuple[int, ...]:
        """The numbers of what a call returned.

        Memory that is met here first was made by the call, unless that may have returned
        tensors from elsewhere.
        """
        if isinstance(value, torch.Tensor):
            return (self._add_result(value, may_be_outside),)
        found = [self._add_result(tensor, may_be_outside) for tensor in iter_given(value)]
        return tuple(dict.fromkeys(found))

    def _add_result(self, tensor: torch.Tensor, may_be_outside: bool) -> int:
        storage = self._storage_of(tensor)
        if storage is None:
            return OUTSIDE
        found = self._numbers.get(storage._cdata)
        if found is not None:
            return found
        new = OUTSIDE if may_be_outside or self._hides else len(self._refs) + 1
        return self._number(storage, new)

    def _number(self, storage: torch.UntypedStorage, number: int) -> int:
        address = storage._cdata
        if address not in self._numbers:
            self._refs.append(storage._weak_ref())
            self._numbers[address] = number
        return self._numbers[address]

    def _storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """None for classes that may keep their values in other tensors, and for odd layouts."""
        plain = id(type(tensor)) in PLAIN_TENSORS and tensor.layout is torch.strided
        if plain and torch._C._has_storage(tensor):
            return tensor.untyped_storage()
        self._hides = True
        return None


def _release(refs: list[Any]) -> None:
    for ref in refs:
        torch.UntypedStorage._free_weak_ref(ref)  # type: ignore[no-untyped-call]  # torch's own
