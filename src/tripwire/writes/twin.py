"""A sentry says whether anything that a compiled entry read may have been written since.

It errs on one side only: if a sentry is quiet, nothing that it watches was written; if it isn't
quiet, something may have been. Its caller compares the values behind each touch itself, so a sentry
that knows nothing is slow, never wrong. The class here is that sentry. It specifies the one in
`_watch.c`, which falls back to this behaviour for whatever it can't watch.
"""

from __future__ import annotations

import _thread
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple, final

from tripwire.values.classes import isinstance

TELLS = False  # whether a listener is ever called


class Touch(NamedTuple):
    """One suspicion: this dict or object may have been written."""

    is_dict: bool  # a dict of the first list, else an object of the second
    index: int  # type: ignore[assignment]  # position in that list; hides tuple.index
    writer: tuple[CodeType, int] | None  # code and line of all writes; None: unknown, or several
    writers: Sequence[tuple[Any, CodeType, int]] = ()  # in order, by key; None: of all keys


class Hidden(weakref.ref[Any]):
    """A weak reference that `weakref.getweakrefs` doesn't list, where the C module is built.

    torch.utils.swap_tensors refuses a tensor with a weak reference. This one does no harm: it leads
    to the same object before and after the swap, and the object's content is compared.
    """

    __slots__ = ()


@final
class Sentry:
    """Watches a fixed set of dicts and objects for one compiled entry.

    A dict is touched when an item under one of its keys (None: under any key) is added, replaced
    or deleted, by whatever means. An object is touched when its class or its whole `__dict__` is
    replaced, a function also when its code, defaults or names are, a class also when its bases or
    names are, a tensor also when its data or layout or `requires_grad` are.

    Watching keeps nothing alive, except dicts on Python 3.11 and objects whose type allows no weak
    reference. Once something watched has died, the sentry is used up: it is never quiet again, and
    names everything at each `take`. Then its owner should build another one.

    The listener is called without arguments soon after a dict was touched, where Python reports it:
    from 3.12 on, in C, before the next Python function starts. It isn't called for what was taken.
    """

    __slots__ = ("_touches",)

    def __init__(
        self,
        dicts: Sequence[tuple[dict[str, object], frozenset[str] | None]],
        objects: Sequence[object],
        listener: Callable[[], object] | None = None,
    ) -> None:
        self._touches = [Touch(True, index, None) for index in range(len(dicts))]
        self._touches += [Touch(False, index, None) for index in range(len(objects))]

    def is_quiet(self) -> bool:
        """Whether nothing was touched since creation or the last `take`; the hot path."""
        return False

    def take(self) -> list[Touch]:
        """Return what was touched since creation or the last `take`, dicts first, in order."""
        return list(self._touches)

    def close(self) -> None:
        """Stop watching: from now on never quiet, and nothing to take."""
        self._touches = []

    @property
    def is_spent(self) -> bool:
        """Whether something watched has died, so that a new sentry would see more."""
        return False


def count_switches() -> object:
    """Something that stays equal for as long as no other thread runs Python code."""
    # sys._current_frames() would count foreign threads too, and on 3.11 it can lock up (CPython
    # issue 106883): a collection inside it waits for a lock that it holds.
    return 0 if _thread._count() == 0 else object()


# Two more things that a hit does, and that C does faster.


def same_items(items: list[object], kept: tuple[object, ...]) -> bool:
    """Whether a list holds these very objects; a weak reference stands for what it refers to."""
    return len(items) == len(kept) and all(map(_is_kept, items, kept))


def _is_kept(item: object, kept: object) -> bool:
    if isinstance(kept, weakref.ref):
        return item is not None and item is kept()  # a dead one gives None
    return item is kept


def call(function: Callable[..., Any], first: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
    """Call a function with the items of both tuples."""
    return function(*(first + rest))
