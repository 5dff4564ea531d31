"""Holders: each mutable thing that a run can reach, with what it held before the run.

What it held then is the read set; what differs afterwards was written by the run. Its kind
(kinds.py) knows how to take it apart. Tensors are held weakly, so that a tensor which the run drops
dies as in a plain run. Small values are held strongly, since their identities may be used again.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tripwire.imports import has_other_threads
from tripwire.reading.kinds import (
    ABSENT,
    AttributesKind,
    CellsKind,
    ClassDictKind,
    ElementsKind,
    Held,
    ItemsKind,
    Kind,
    LibraryClassKind,
    LibraryNamesKind,
    NamesKind,
    SlotsKind,
    TableKind,
    ThreadLocalKind,
    plain_key,
)
from tripwire.reading.reader import swap
from tripwire.reading.sources import Source
from tripwire.reading.tensors import TensorMeta, Traits, meta_of, traits_of
from tripwire.rulebook.refusals import Refused
from tripwire.values.classes import is_exactly, isinstance
from tripwire.values.contents import elements_of, name_of_module
from tripwire.values.identity import PLAIN, same_plain
from tripwire.values.numbers import holds_numbers, is_open
from tripwire.writes.patches import unhooked
from tripwire.writes.sentry import IS_COMPILED, Sentry, count_switches


class Holder(NamedTuple):  # a tuple: there are thousands
    """One mutable thing, and what it held before the run."""

    owner: Any
    kind: Kind
    path: Any  # a Source; None for the traced function's own cells
    anchored: bool  # the same thing on every call; else it is reached anew through an argument
    keys: Sequence[Any]
    kept: Sequence[Any]  # values, tensors by weak references

    def before(self) -> dict[Any, object]:
        """What it held; None for a tensor that died since."""
        return {k: strong(v) for k, v in zip(self.keys, self.kept, strict=True)}

    def order(self) -> tuple[Any, ...]:
        """The keys as they followed one another."""
        return tuple(map(plain_key, self.keys))

    def step(self, key: Any) -> Source:
        """The source of one key."""
        return self.kind.step(self.path, key)


def _growing(holder: Any) -> tuple[set[str], list[str], list[object]]:
    return holder.kind.names, holder.keys, holder.kept


class _Users(NamedTuple):
    """A weak reference of the user's, which is a value like any other."""

    ref: weakref.ref[Any]


def _is_loaded(old: object, new: object) -> bool:
    """Whether an import put a module into its package."""
    if old is not ABSENT or not isinstance(new, ModuleType):
        return False
    return sys.modules.get(name_of_module(new)) is new


def strong(kept: Any) -> object:
    """The value that was kept; None for a tensor that died since."""
    if type(kept) is _Users:
        return kept.ref
    return kept() if type(kept) is weakref.ref else kept


class Write(NamedTuple):
    """One key that holds something else after the run than before it."""

    holder: Holder
    key: Any
    before: object
    after: object

    @property
    def source(self) -> Source:
        """Where it was written."""
        return self.holder.step(self.key)

    @property
    def spot(self) -> tuple[int, Any]:
        """The place that was written, whichever holder leads to it."""
        return self.holder.kind.spot(self.holder.owner, self.key)


class TensorFacts(NamedTuple):
    """What is known of a tensor that may be gone by now."""

    meta: TensorMeta
    traits: Traits
    ref: weakref.ref[Any]  # one object per tensor


def may_plant(owner: object, kind: Kind) -> bool:
    """Whether a number that varies may be left open in such a place.

    Not in loggers: torch's shape environment, which answers for open numbers, asks those.
    """
    if not isinstance(kind, _PLANTED_IN) or isinstance(kind, _OF_LIBRARIES):
        return False
    if isinstance(kind, ElementsKind) and len(elements_of(owner)) > _LONGEST:
        return False
    if isinstance(kind, ThreadLocalKind) and not is_exactly(owner, threading.local):
        return False  # its own code may run when another thread asks first
    return not isinstance(owner, (logging.Logger, logging.Manager))


_PLANTED_IN = (
    *(AttributesKind, ItemsKind, NamesKind, CellsKind, SlotsKind, ClassDictKind),
    *(ElementsKind, ThreadLocalKind),
)
_LONGEST = 64  # list whose numbers are looked at one by one
_OF_LIBRARIES = (LibraryClassKind, LibraryNamesKind)


class _PlantedNumber(NamedTuple):
    """An open number in the place of a plain one, or a tuple of some, while the run goes on."""

    holder: Holder
    key: Any
    number: object
    plain: object


PLACES = (
    *(AttributesKind, SlotsKind, TableKind, ClassDictKind),
    *(ItemsKind, ElementsKind, CellsKind, NamesKind),
)


def _parts_of(holder: Holder) -> Sequence[object]:
    """What is part of a thing, and no path leads to it, among other values: dicts are asked for."""
    space = holder.kind.dict_of(holder.owner)
    if type(holder.kind) is AttributesKind and isinstance(holder.owner, nn.Module):
        return [space, *holder.kept]  # its tables, the empty ones as well
    if isinstance(holder.owner, FunctionType):
        return [space, holder.owner.__kwdefaults__]
    return [space]


class Holders:
    """Every holder that one run could reach."""

    def __init__(self) -> None:
        self.all: list[Holder] = []
        # Gives an open number, or a tuple of some, for what a holder has under a key; or None.
        self.open_number: Callable[[Holder, Any, Any], object] | None = None
        self._planted: dict[tuple[int, Any], _PlantedNumber] = {}  # open numbers, by spot
        self.planted: list[tuple[Holder, Any]] = []  # all that lead to one, and by which key
        self._spaces: dict[int, tuple[object, object]] | None = None
        self._switches = count_switches()
        # What another thread writes and puts back is as it was, and the run may have read it.
        self._sentries: list[tuple[Any, Sentry]] | None = (
            [] if IS_COMPILED and has_other_threads() else None
        )
        self._by_dict: defaultdict[int, list[Sentry]] = defaultdict(list)  # the same, by identity
        self._types: set[int] = set()  # met so far, by identity, and no tensors
        self._kinds: list[type] = []  # the same, alive
        self._facts: dict[int, tuple[TensorMeta, Traits]] = {}  # by a tensor's weak reference
        self._users: dict[int, _Users] = {}  # by identity

    def remember(self, owner: Any, kind: Kind, path: Any, anchored: bool) -> Holder:
        """Keep what `owner` holds now."""
        if self._sentries is not None and anchored and not isinstance(kind, _OF_LIBRARIES):
            names = frozenset(kind.names) if isinstance(kind, NamesKind) else None
            self.watch(kind.dict_of(owner), path, names)
        keys, values = self._read(owner, kind)
        holder = Holder(owner, kind, path, anchored, keys, self._keep(values))
        self.all.append(holder)
        if (self.open_number is not None or self._planted) and may_plant(owner, kind):
            self._plant(holder)
        return holder

    def watch(
        self, space: dict[Any, Any] | None, path: Any, names: frozenset[str] | None = None
    ) -> None:
        """From now on, note writes to a dict, where other threads may write."""
        if self._sentries is not None and space is not None:
            sentry = Sentry([(space, names)], [])
            self._sentries.append((path, sentry))
            self._by_dict[id(space)].append(sentry)

    def remember_library(self, space: dict[str, Any], path: Source) -> Holder:
        """A namespace of a library's, of which names are kept as they come into use."""
        holder = Holder(space, LibraryNamesKind(set()), path, True, [], [])
        self.all.append(holder)
        return holder

    def add_names(self, holder: Holder, names: Set[str]) -> list[str]:
        """Keep more names of a library's namespace; those of them that it has."""
        space, (known, keys, kept) = holder.owner, _growing(holder)
        known |= names
        present = sorted(names & space.keys())
        keys += present
        kept += self._keep(tuple([space[name] for name in present]))
        return present

    def _read(self, owner: Any, kind: Kind) -> Held:
        """What something holds, with plain numbers in the place of those that were planted."""
        keys, values = kind.read(owner)
        if not self._planted or not may_plant(owner, kind):
            return keys, values
        pairs = zip(keys, values, strict=True)
        return keys, tuple([self._unplant(owner, kind, key, value) for key, value in pairs])

    def _unplant(self, owner: Any, kind: Kind, key: Any, value: object) -> object:
        if not (is_open(value) or isinstance(value, tuple)):
            return value
        planted = self._planted.get(kind.spot(owner, key))
        return value if planted is None or planted.number is not value else planted.plain

    def _plant(self, holder: Holder) -> None:
        """Put open numbers in the place of those that are to be open, until the run is over."""
        owner, kind = holder.owner, holder.kind
        for key, value in zip(holder.keys, holder.kept, strict=True):
            if not holds_numbers(value):
                continue
            spot = kind.spot(owner, key)
            if spot not in self._planted and self.open_number is not None:
                number = self.open_number(holder, key, value)
                if number is not None and self._swap(holder, key, value, number):
                    self._planted[spot] = _PlantedNumber(holder, key, number, value)
            if spot in self._planted:
                self.planted.append((holder, key))

    def _swap(self, holder: Holder, key: Any, old: object, new: object) -> bool:
        """Put one value in another's place, if that is there; it isn't another thread's write."""
        owner, kind = holder.owner, holder.kind
        sentries = self._by_dict.get(kind.spot(owner, key)[0], ())
        quiet = [sentry for sentry in sentries if sentry.is_quiet()]
        is_done = swap(*kind.slot(owner, key), old, new)
        for sentry in quiet:
            sentry.take()
        return is_done

    @contextmanager
    def planting_nothing(self) -> Iterator[None]:
        """What is met in here was read already, as it is."""
        before, self.open_number = self.open_number, None
        try:
            yield
        finally:
            self.open_number = before

    def is_planted(self, holder: Holder, key: Any) -> bool:
        """Whether what a holder has under a key was open in the run."""
        return bool(self._planted) and holder.kind.spot(holder.owner, key) in self._planted

    @contextmanager
    def uprooted(self) -> Iterator[None]:
        """Inside, numbers are plain where open ones were planted: code runs that isn't observed."""
        away = [
            (holder, key, number, plain)
            for holder, key, number, plain in self._planted.values()
            if number is not None and self._swap(holder, key, number, plain)
        ]
        try:
            yield
        finally:
            for holder, key, number, plain in away:
                self._swap(holder, key, plain, number)  # unless that code has written there

    def uproot(self) -> None:
        """Put plain numbers back where open ones were planted, and still are."""
        self.open_number = None
        for spot, (holder, key, number, plain) in self._planted.items():
            if number is not None:
                self._swap(holder, key, number, plain)
            self._planted[spot] = _PlantedNumber(holder, key, None, plain)  # the number may die now

    def _keep(self, values: tuple[object, ...]) -> tuple[object, ...]:
        """What to keep so that identities tell values apart.

        A tensor's weak reference is one object as long as the tensor lives.
        """
        # Types are looked at first: most things hold no tensor. 16 → 9 ms for 36 layers.
        types = self._types
        if types.issuperset(map(id, map(type, values))):
            return values
        for cls in map(type, values):
            if not issubclass(cls, torch.Tensor) and cls is not weakref.ref:
                types.add(id(cls))
                self._kinds.append(cls)
        return tuple([v if id(type(v)) in types else self._refer(v) for v in values])

    def _refer(self, tensor: Any) -> weakref.ref[Any] | _Users:
        if type(tensor) is weakref.ref:
            return self._users.setdefault(id(tensor), _Users(tensor))
        ref = weakref.ref(tensor)
        # A run that replaces a tensor lets the old one die, and its shape may have been read.
        # Parameters aren't replaced by runs: their facts would cost a millisecond per layer.
        # One without a shape can't be asked.
        known = isinstance(tensor, torch.nn.Parameter) or id(ref) in self._facts
        if not known and not is_lazy(tensor):
            self._facts[id(ref)] = (meta_of(tensor), traits_of(tensor))
        return ref

    def facts_of(self, holder: Holder, key: Any) -> TensorFacts | None:
        """What is known of the tensor that was held before; None if it was none."""
        wanted = {key}  # asked as a dict is: a tensor in a key may not be compared
        for known, kept in zip(holder.keys, holder.kept, strict=True):
            if type(kept) is weakref.ref and known in wanted:
                facts = self._facts.get(id(kept))
                return None if facts is None else TensorFacts(*facts, kept)
        return None

    def find_place(self, value: object, path: str) -> tuple[Holder, Any] | None:
        """What holds a value under the name or position that a path says, on every call."""
        for holder in self.all:
            if holder.anchored and isinstance(holder.kind, PLACES):
                for key, kept in zip(holder.keys, holder.kept, strict=True):
                    if strong(kept) is value and is_exactly(key, str, int):
                        if str(holder.step(key)) == path:
                            return holder, key
        return None

    def find_library_writes(self, names: frozenset[str]) -> Iterator[tuple[Holder, str]]:
        """Which of these names the run changed in modules and classes of libraries."""
        for holder in self.all:
            if isinstance(holder.kind, _OF_LIBRARIES):
                keys, values = holder.kind.read(holder.owner)
                found = names.intersection(holder.keys).union(names.intersection(keys))
                if not found:
                    continue
                before, now = holder.before(), dict(zip(keys, values, strict=True))
                for name in sorted(found):
                    old, new = unhooked(before.get(name, ABSENT)), unhooked(now.get(name, ABSENT))
                    if old is not new and not same_plain(old, new) and not _is_loaded(old, new):
                        yield holder, name

    def find_owner(self, space: object) -> object:
        """Whose `__dict__` or table a dict is; None where it is nobody's. Asked after the run."""
        if self._spaces is None:
            self._spaces = {}
            for holder in reversed(self.all):
                parts = [one for one in _parts_of(holder) if one is not holder.owner]
                self._spaces |= dict.fromkeys(map(id, parts), (holder.path, parts))
        return self._spaces.get(id(space), (None, None))[0]

    def is_alone(self) -> bool:
        """Whether no other thread ran Python code since: all that was written, the run wrote."""
        return self._switches == count_switches()

    def check_unwritten(self, writes: Iterable[Write]) -> None:
        """Refuse writes that may be another thread's: what the run read can't be told then.

        What comes with the call is left to those who share it between threads.
        """
        if self.is_alone():
            return
        written = [write.source for write in writes if write.holder.anchored]
        written += [path for path, sentry in self._sentries or () if not sentry.is_quiet()]
        if written:
            raise Refused(
                "another-thread",
                f"{written[0] or 'a variable'} was written while another thread ran, perhaps by "
                "that thread, so this trace is discarded.",
            )

    def find_writes(self) -> Iterator[Write]:
        """What the run changed. A place that several holders share comes once for each of them."""
        shared: dict[tuple[int, Any], object] | None = None
        # Functions of one module share its globals; the first of them saw those before the run,
        # a later one perhaps what the run had put there.
        met: set[tuple[int, Any]] = set()
        for holder in self.all:
            if isinstance(holder.kind, _OF_LIBRARIES):  # hooks of other threads come and go there
                continue
            names = holder.kind.names if isinstance(holder.kind, NamesKind) else ()
            first = {(id(holder.owner), name) for name in names}
            first -= met
            met |= first
            keys, values = self._read(holder.owner, holder.kind)
            kept = self._keep(values)
            replaced = self._find_replaced(holder)
            is_same = len(kept) == len(holder.kept) and all(map(is_, kept, holder.kept))
            if is_same and keys == holder.keys and not replaced:
                continue
            before = dict(zip(holder.keys, holder.kept, strict=True))
            after = dict(zip(keys, kept, strict=True))
            # The same values in another order: one write stands for it, of a key that moved.
            if set(before) == set(after) and isinstance(holder.kind, ItemsKind):
                moved = next((a for b, a in zip(before, after, strict=True) if b != a), ABSENT)
                if moved is not ABSENT and all(before[k] is after[k] for k in before):
                    yield Write(holder, moved, strong(before[moved]), strong(after[moved]))
                    continue
            if shared is None:
                shared = self._find_shared()
            for key in dict.fromkeys((*before, *after)):
                if names and (id(holder.owner), key) not in first:
                    continue
                old, new = before.get(key, ABSENT), after.get(key, ABSENT)
                if shared:
                    old = shared.get(holder.kind.spot(holder.owner, key), old)
                is_equal = old is new or (id(type(old)) in PLAIN and same_plain(old, new))
                if key in replaced or not is_equal:
                    yield Write(holder, key, strong(old), strong(new))

    def _find_replaced(self, holder: Holder) -> set[Any]:
        """Keys whose open number is there no more: the same value may be another one next time."""
        if not self._planted:
            return set()
        return {
            planted.key
            for planted in self._planted.values()
            if planted.holder is holder
            and planted.number is not None
            and holder.kind.get(holder.owner, planted.key) is not planted.number
        }

    def _find_shared(self) -> dict[tuple[int, Any], object]:
        """What was first seen in places that more than one holder leads to.

        One that was reached while the run went on may have seen what the run had put there.
        """
        first: dict[tuple[int, Any], object] = {}
        shared: dict[tuple[int, Any], object] = {}
        dicts = {id(holder.owner) for holder in self.all if isinstance(holder.kind, ItemsKind)}
        for holder in self.all:
            if isinstance(holder.kind, CellsKind) or id(_dict_behind(holder)) in dicts:
                for key, kept in zip(holder.keys, holder.kept, strict=True):
                    spot = holder.kind.spot(holder.owner, key)
                    if spot in first:
                        shared[spot] = first[spot]
                    else:
                        first[spot] = kept
        return shared


def _dict_behind(holder: Holder) -> dict[Any, Any] | None:
    """A dict that code can also come to as such: an object's, or a table of a module."""
    if isinstance(holder.kind, (AttributesKind, TableKind, ItemsKind)):
        return holder.kind.dict_of(holder.owner)
    return None
