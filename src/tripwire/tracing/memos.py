"""Memos: where `lru_cache` would keep a tensor that the run itself made, the run has its own cache.

The key of such an entry is a tensor that nobody has before the run, and that no later call will
have: the next call makes another one. Only the run itself can ask twice. So these calls of a cached
function are answered by a cache of the run's, of the same size, and the real one stays as it is. In
the real one, each call would push out entries that other code put there.

A run is refused if such a tensor outlives it, as a result or in state, since somebody may ask about
it again; and if the run also asks the real cache, which plain code would have filled by then. Once
a run has asked the real cache about something else, the real cache answers all of its calls.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tripwire.imports import find_native
from tripwire.reading.holders import Holder
from tripwire.rulebook.refusals import Refused
from tripwire.tracing.state import CURRENT, TracingState
from tripwire.values.classes import isinstance
from tripwire.values.contents import own_dict

_casts = find_native("tracing._casts")


class RunMemos:
    """The memos that one run has for itself, and which others it asked."""

    def __init__(self, state: TracingState) -> None:
        self._state = state
        self._own: dict[int, Any] = {}  # by the identity of the memo whose place it takes
        self._keys: list[weakref.ref[torch.Tensor]] = []
        self.asked: set[int] = set()  # memos that answered as ever; `_casts.c` adds to it

    def find(self, memo: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """The memo that answers in this one's place; NotImplemented: none does."""
        if CURRENT.state is not self._state or self._state.refusal is not None:
            return NotImplemented
        given = (*args, *(kwargs or {}).values())
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        made = list(filter(self._is_made, tensors))
        if not made:
            return NotImplemented
        own = self._own.get(id(memo))
        if own is None and id(memo) not in self.asked:
            own = self._copy(memo)
        if own is None:
            return NotImplemented
        self._own[id(memo)] = own
        self._keys.extend(map(weakref.ref, made))
        return own

    def find_unneeded(self) -> frozenset[int]:
        """Memos whose contents didn't matter: each call of them was answered by another."""
        return frozenset(self._own)

    def find_places(self, holders: Iterable[Holder]) -> tuple[str, ...]:
        """How the paths begin to what those hold."""
        unneeded = self.find_unneeded()
        return tuple(f"{holder.step(0)}[" for holder in holders if id(holder.owner) in unneeded)

    def check(self, outputs: Iterable[torch.Tensor]) -> None:
        """Refuse a run after which the real memo would hold what somebody may ask for."""
        kept = {id(tensor) for tensor in outputs}
        if not self.asked.isdisjoint(self._own) or any(id(key()) in kept for key in self._keys):
            raise Refused(
                "volatile-source",
                "a function behind lru_cache is asked about a tensor that the run makes, and about "
                "others or by others, too, so what it finds in its memo would not fit the next "
                "call. Ask it about sizes, or outside the compiled callable.",
            )

    def _is_made(self, tensor: torch.Tensor) -> bool:
        known = self._state.values.find(tensor)
        return known is not None and known.node is not None and not known.sources

    def _copy(self, memo: Any) -> Any:
        """An empty memo for the same function; None for one that isn't quite `lru_cache`'s."""
        own = own_dict(memo) or {}
        function: Any = own.get("__wrapped__")
        told: Any = own.get("cache_parameters")
        is_plain = type(memo) is _MEMO and getattr(told, "__code__", None) in _PARAMETERS
        if not is_plain or not any(part is function for part in gc.get_referents(memo)):
            return None
        copied: Any = functools.lru_cache
        return copied(**told())(function)


_MEMO = functools._lru_cache_wrapper
_PARAMETERS = tuple(
    made.cache_parameters.__code__
    for made in (functools.lru_cache(len), functools.lru_cache(1)(len))
)


@contextmanager
def remembering(memos: RunMemos | None) -> Iterator[None]:
    """Have this thread's calls of functions behind lru_cache answered by the run."""
    try:
        if _casts is not None and memos is not None:
            find: Callable[..., Any] = memos.find
            _casts.start_remembering(find, memos.asked, torch.Tensor)
        yield
    finally:
        stop()


def stop() -> None:
    """Call such functions plainly again; telling it twice is fine."""
    if _casts is not None:
        _casts.stop_remembering()
