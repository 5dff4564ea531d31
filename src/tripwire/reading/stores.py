"""Stores: what the code inside custom functions writes, and where it may write on another call.

Such code runs again on every call, so tripwire doesn't repeat its writes. To tell them apart, it
looks at everything that was written before and after each such function (`InnerWrites`). Two things
are refused: other code that writes to the same place, since nobody could tell in which order; and
other code that wrote anything before the function, since the function may read it, and a compiled
call makes its own writes only after all functions have run.

What such code writes may depend on anything: its arguments and whatever else it reads. So what it
wrote in the observed run tells nothing about later calls. No other code of the run may read or
write a place where it may store, by its bytecode (`Stores`): compiled code would use the value of
the observed run.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from tripwire.reading.bytecode import find_uses
from tripwire.reading.holders import Holder, Holders, Write
from tripwire.reading.kinds import (
    AttributesKind,
    CellsKind,
    ClassDictKind,
    ElementsKind,
    ItemsKind,
    LibraryClassKind,
    LibraryNamesKind,
    MembersKind,
    NamesKind,
    SlotsKind,
    TableKind,
)
from tripwire.reading.names import find_steps
from tripwire.reading.reach import Reach
from tripwire.reading.reads import ReadSet
from tripwire.reading.sources import Attr, Cell, Global, Item, Source
from tripwire.reading.uses import Computed, StepKind, Use, Uses, merge
from tripwire.rulebook.refusals import Refused
from tripwire.rulebook.rules import words
from tripwire.values.classes import ids_of, isinstance
from tripwire.values.contents import children
from tripwire.values.identity import CONTAINERS, same_plain

_ATTRIBUTES = (AttributesKind, SlotsKind, ClassDictKind, TableKind)
_CONTAINERS = (ItemsKind, ElementsKind, MembersKind)
_OF_LIBRARIES = (LibraryClassKind, LibraryNamesKind)
# What stores under names that the code doesn't tell.
_WRITERS = words("setattr delattr __setattr__ __delattr__ __dict__ vars globals exec eval")
_ONLY_READ = words("get items keys values copy index count")
_CELL_STORES = words("STORE_DEREF DELETE_DEREF")
_CHANGES_ITEMS = words("STORE_SUBSCR DELETE_SUBSCR")
_CHANGERS = words(
    "append appendleft extend extendleft insert pop popleft popitem remove clear update "
    "setdefault add discard sort reverse rotate"
)
_WHOLE = Use(whole=True)
SHARED = (
    "a custom function or a hook may write to {}, and other code of the run uses that, too. It may "
    "write another value on each call. Pass it to the function, or return it from there."
)


class Stores:
    """Names and containers that the code of custom functions may store to."""

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}
        self._globals: set[tuple[int, str]] = set()  # by namespace
        self._attributes: set[str] = set()
        self._cells: set[str] = set()
        self._containers: dict[Any, Use] = {}  # by names and keys that lead to them
        self._objects: dict[int, tuple[object, Use]] = {}  # those that globals lead to
        self._passed: dict[int, object] = {}  # containers among their arguments
        self._hides_names = self._changes_passed = False

    def add_passed(self, args: tuple[object, ...]) -> None:
        """Arguments of a custom function, whose code has other names for them."""
        self._passed |= {id(arg): arg for arg in args if isinstance(arg, CONTAINERS)}

    def add(self, code: CodeType, namespace: dict[str, Any], context: str | None) -> None:
        """A function ran; `context` is the argument that is nobody else's."""
        if id(code) in self._codes:
            return
        self._codes[id(code)] = code
        uses = find_uses(code)
        hides = uses.has_dynamic_names or uses.opens_self or uses.computes_names
        self._hides_names |= hides and not _WRITERS.isdisjoint(code.co_names)
        self._globals |= {(id(namespace), name) for name in uses.stored_globals}
        self._attributes |= (
            uses.stored_attributes if context is None else set(_find_stored(code, context))
        )
        found = list(dis.get_instructions(code))
        self._cells |= {i.argval for i in found if i.opname in _CELL_STORES}.intersection(
            code.co_freevars
        )
        changes_items = any(i.opname in _CHANGES_ITEMS for i in found)
        if changes_items or not _CHANGERS.isdisjoint(code.co_names):
            self._changes_passed = True
        for step, use in uses.steps.items():
            if step.kind is not StepKind.LOCAL and _may_change(use):
                name = step.name
                self._containers[name] = merge(use, self._containers.get(name, use))
                value = namespace.get(str(name)) if step.kind is StepKind.GLOBAL else None
                if isinstance(value, CONTAINERS):
                    _, known = self._objects.get(id(value), (value, use))
                    self._objects[id(value)] = value, merge(use, known)

    def check(self, reads: ReadSet, reach: Reach) -> None:
        """Raise Refused where other code uses what custom functions may store to."""
        for holder in reads.holders if self._codes else ():
            if not isinstance(holder.kind, _OF_LIBRARIES):
                for key in self._find_shared(reads, reach, holder):
                    raise Refused("custom-function-writes", SHARED.format(holder.step(key)))

    def _find_shared(self, reads: ReadSet, reach: Reach, holder: Holder) -> Iterator[Any]:
        wanted = reads.filter_of(holder)
        if isinstance(holder.kind, NamesKind):
            stored = {name for space, name in self._globals if space == id(holder.owner)}
            yield from sorted(wanted & (stored | self._attributes) if wanted else ())
        elif isinstance(holder.kind, CellsKind):
            yield from (key for key in holder.keys if wanted is None and key in self._cells)
        elif isinstance(holder.kind, _ATTRIBUTES):
            yield from self._find_attributes(reads, holder, wanted)
        elif isinstance(holder.kind, _CONTAINERS):
            paths = reach.paths.get(id(holder.owner), ())
            if any(_is_named(reads.uses, path) for path in paths):
                for use in self._find_uses(holder.owner, paths):
                    yield from _find_keys(holder, wanted, use)

    def _find_attributes(
        self, reads: ReadSet, holder: Holder, wanted: frozenset[Any] | None
    ) -> Iterator[str]:
        named = reads.uses.attributes.keys() | reads.uses.stored_attributes
        for name in sorted(named if self._hides_names else named & self._attributes):
            if isinstance(holder.kind, ClassDictKind) and name not in holder.keys:
                continue
            if wanted is None or name in wanted:
                yield name

    def _find_uses(self, container: object, paths: Sequence[Source]) -> Iterator[Use]:
        if id(container) in self._objects:
            yield self._objects[id(container)][1]
        if self._changes_passed and id(container) in self._passed:
            yield _WHOLE
        for path in paths:
            use = self._containers.get(_last_of(path))
            if use is not None:
                yield use
            while isinstance(path, Item):  # whoever has the whole has its parts
                path = path.owner
                use = self._containers.get(_last_of(path))
                if use is not None and (use.whole or Computed.KEY in use.keys):
                    yield _WHOLE


def _last_of(path: Source) -> object:
    match path:
        case Attr(_, name) | Cell(_, name) | Global(_, name) | Item(_, name):
            return name
    return None


def _find_keys(holder: Holder, wanted: frozenset[Any] | None, use: Use) -> Iterator[Any]:
    """Keys of a container that are wanted, and may be stored by code that uses it so."""
    named = use.appended or use.updated or use.whole or use.attributes - _ONLY_READ
    all_stored = named or Computed.KEY in use.stored_keys
    if isinstance(holder.kind, ItemsKind) and wanted is not None and not all_stored:
        yield from wanted & use.stored_keys
    elif wanted is None or wanted:
        yield next(iter(holder.keys), 0)


def _is_named(uses: Uses, path: Source) -> bool:
    """Whether code names the last step of a path."""
    match path:
        case Attr(_, name):
            return name in uses.attributes or name in uses.stored_attributes
        case Global(_, name):
            return name in uses.globals or name in uses.attributes
    return True


def _may_change(use: Use) -> bool:
    """Whether a container that is used so may hold something else afterwards."""
    changed = use.stored_keys or use.appended or use.updated or use.whole
    return bool(changed or use.attributes - _ONLY_READ or Computed.KEY in use.keys)


def _find_stored(code: CodeType, context: str) -> Iterator[str]:
    """Attributes that a code stores, but for those of its context."""
    found = [i for i in find_steps(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    is_kept = not any(i.opname.startswith("STORE_FAST") and i.argval == context for i in found)
    for before, store in pairwise(found):
        if store.opname in ("STORE_ATTR", "DELETE_ATTR"):
            loads = before.opname.startswith("LOAD_FAST") and before.argval == context
            if not (is_kept and loads and not store.is_jump_target):
                yield store.argval


# --- what they wrote in the observed run ---


Place = tuple[int, Any]  # a holder's identity, and a key; of lists the whole
Written = dict[Place, object]
_UNWRITTEN = object()


class InnerWrites:
    """The places that custom functions of one run wrote to."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._latest: Written = {}  # as the function left it
        self._made: dict[Place, tuple[object, ...]] = {}  # and all that is in it
        self._mixed: set[Place] = set()
        self._is_late = False  # a function ran after other code had written
        self._named: set[tuple[int, str]] = set()  # globals that functions read

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
            self._made[place] = _spread(now)

    def note_names(self, names: set[tuple[int, str]]) -> None:
        """A function ran that reads these globals, and nothing else besides its arguments."""
        self._named |= names
        written = self._holders.find_writes() if names else ()
        self._is_late |= any(write.spot in names for write in written)

    def is_as(self, before: Written) -> bool:
        """Whether nothing was written since `before`."""
        return next(_changes(before, self.look()), None) is None

    def split(self, writes: list[Write]) -> tuple[list[Write], list[Write]]:
        """The run's own writes, and those of custom functions. Raises Refused."""
        # A compiler reads globals when it compiles, and the run's writes are there by then.
        if self._is_late or any(write.spot in self._named for write in writes):
            raise Refused("custom-function-writes", _LATE)
        if not self._latest:
            return writes, []
        final = _map(writes)
        for place, left in self._latest.items():
            if place in self._mixed or not _is_same(final.get(place, _UNWRITTEN), left):
                raise Refused("custom-function-writes", _MIXED)
            if not _is_same(_spread(left), self._made[place]):
                raise Refused("custom-function-writes", _MIXED)
        inner = [write for write in writes if _place_of(write) in self._latest]
        return [write for write in writes if _place_of(write) not in self._latest], inner


_MIXED = (
    "a custom function or a hook, and other code of the run, write to the same place. A compiled "
    "call can't keep the order of these writes. Write to it in one of them only."
)


_LATE = (
    "a custom function or a hook may read or write something besides its arguments, and runs after "
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


def _spread(value: object) -> tuple[object, ...]:
    """What is in an object that a function made, all the way down; equal to none if that is far."""
    found: list[object] = []
    met, todo = set[int](), [value]
    while todo and len(met) < _DEEPEST:
        item = todo.pop()
        if id(item) in met or isinstance(item, _NOT_MADE) or id(type(item)) in _PLAIN:
            continue
        met.add(id(item))
        parts = children(item)
        found += parts
        todo += parts
    return (*found, object()) if todo else tuple(found)


_DEEPEST = 1000
_NOT_MADE = (torch.Tensor, torch.nn.Module, type, ModuleType, FunctionType)


def _is_same(left: object, right: object) -> bool:
    if type(left) is tuple and type(right) is tuple:
        return len(left) == len(right) and all(map(_is_same, left, right))
    return left is right or (id(type(left)) in _PLAIN and same_plain(left, right))


_PLAIN = ids_of(int, float, bool, str, complex, type(None))
