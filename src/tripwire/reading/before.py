"""Before: memory and random generators as they were before something ran.

Records and checks keep both. Memory is copied once, just before the first write to it. The state
of a generator is kept before anything can draw from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Memory = tuple[str, int]  # a device and an address on it


def memory_of(storage: torch.UntypedStorage) -> Memory:
    """What memory a storage uses: two may use the same, those of torch.frombuffer or of DLPack."""
    return str(storage.device), int(storage.data_ptr() or -storage._cdata)


@dataclass(frozen=True, slots=True)
class Copy:
    """A storage's bytes from before a write. The storage is held, so that its number is its own."""

    storage: torch.UntypedStorage
    copied: torch.UntypedStorage

    @staticmethod
    def of(storage: torch.UntypedStorage) -> Copy:
        return Copy(storage, storage.clone())  # type: ignore[no-untyped-call]


Copies = dict[Memory, Copy]


class GeneratorStates:
    """States of torch's default generators and of given ones, as they were when each was kept."""

    __slots__ = ("_given", "_kept")

    def __init__(self, given: Iterable[torch.Generator] = ()) -> None:
        self._given = tuple(given)
        self._kept = [(_CPU, _CPU.get_state())]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            if not torch.cuda.is_current_stream_capturing():  # else nobody may ask now
                self.keep(torch.cuda.default_generators)
        self.keep(self._given)

    def keep(self, generators: Iterable[torch.Generator]) -> None:
        """Those that aren't kept yet, as they are now."""
        for generator in generators:
            if not any(known is generator for known, _ in self._kept):
                self._kept.append((generator, generator.get_state()))

    def find_moved(self) -> Iterator[tuple[torch.Generator, torch.Tensor]]:
        """Generators that something drew from since, with their states before."""
        for generator, state in self._kept:
            if not torch.equal(generator.get_state(), state):
                yield generator, state

    @contextmanager
    def as_before(self, all_of_them: bool = True) -> Iterator[None]:
        """Them as they were, for a while; or the given ones alone: other threads draw, too."""
        given = set(map(id, self._given))
        kept = [one for one in self._kept if all_of_them or id(one[0]) in given]
        now = [(generator, generator.get_state()) for generator, _ in kept]
        try:
            _set(kept)
            yield
        finally:
            _set(now)


_CPU = torch.default_generator


def _set(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)
