"""Wires: a compiled entry dies when something it read is written.

When its sentry says that something may have been written, a wire compares what it guards with what
was seen. (A sentry that can't tell always says so.) A wire holds values weakly where Python allows
it, so a watched object dies when nobody else holds it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from msgspec.structs import replace

from tripwire.reading.kinds import (
    ABSENT,
    CellsKind,
    ContextKind,
    ElementsKind,
    Kind,
    MembersKind,
    SlotsKind,
)
from tripwire.reading.names import fingerprint
from tripwire.reading.reader import answers_itself
from tripwire.reading.sources import Attr, Source
from tripwire.reading.tensors import TensorMeta, Traits, meta_of, traits_of
from tripwire.rulebook.refusals import GONE, Cause, Writer
from tripwire.validity.kept import (
    ITSELF,
    VALUE_SLOT,
    Alike,
    Held,
    Keeper,
    Kept,
    is_reference,
    refer,
)
from tripwire.validity.table import TableRow
from tripwire.values.classes import find_in_class, is_exactly, isinstance, mro, name_of
from tripwire.values.contents import cells_of, copy_dict, own_dict, slots_of
from tripwire.values.identity import PLAIN, code_of, same_plain
from tripwire.writes.sentry import same_items
from tripwire.writes.twin import Touch


class Writers:
    """Who wrote, as a sentry noted it: key by key, or for an object as a whole."""

    __slots__ = ("_all", "_by_key", "_whole")

    def __init__(self, touch: Touch | None = None, owner: Touch | None = None) -> None:
        self._by_key: dict[object, tuple[CodeType, int]] = {}
        self._all: tuple[CodeType, int] | None = None  # who cleared the dict, for all other keys
        for one in (owner, touch):
            for key, code, line in () if one is None else one.writers:
                if key is None:
                    self._by_key.clear()
                    self._all = code, line
                else:
                    self._by_key[key] = code, line
        self._whole = None if touch is None else touch.writer

    def of(self, key: object) -> Writer | None:
        """Who wrote under a key; None where it isn't known."""
        if is_exactly(key, str, int, bytes):  # those are noted one by one
            return _writer(self._by_key.get(key, self._all))
        return _writer(self._whole)

    @property
    def whole(self) -> Writer | None:
        """Who changed an object other than by its attributes."""
        return None if self._by_key else _writer(self._whole)


def _writer(place: tuple[CodeType, int] | None) -> Writer | None:
    if place is None:
        return None
    code, line = place
    return Writer(code.co_filename, line, code.co_qualname)


NOBODY = Writers()


@functools.lru_cache(1024)  # most dicts of an entry share one set
def _are_names(keys: frozenset[Any]) -> bool:
    return all(type(key) is str for key in keys)


class DictWire:
    """Some keys of one dict, or all of them."""

    __slots__ = ("_ignored", "_kept", "_order", "_step", "_wanted", "owner", "space", "was_changed")

    def __init__(
        self,
        space: dict[Any, Any],
        wanted: frozenset[Any] | None,
        step: Callable[[Any], Source],
        ignored: frozenset[Any],
        held: Held,
        before: dict[Any, object],
        order: tuple[Any, ...] | None = None,
        keeper: Keeper = ITSELF,
    ) -> None:
        self.space = space
        self.owner: int | None = None  # the object whose attributes these are, by its position
        self._wanted = wanted - ignored if wanted is not None and ignored else wanted
        self._ignored = ignored
        self.was_changed = bool(before)  # by the run itself: it isn't as it was
        self._step = step
        now = self._read()
        if before:  # what the run itself changed must be again as it was
            now |= before
            now = {key: value for key, value in now.items() if value is not ABSENT}
        # Half of it is plain, and kept as it is: a first call makes thousands of these.
        self._kept: dict[Any, object] = {
            key: value if keeper.is_by_value(value) else keeper.keep(value, held)
            for key, value in now.items()
        }
        self._order = (order or tuple(now)) if wanted is None else None

    def _read(self) -> dict[Any, object]:
        wanted, ignored = self._wanted, self._ignored
        if wanted is not None and len(wanted) < len(self.space):
            found = [(key, dict.get(self.space, key, ABSENT)) for key in wanted]
            return {key: value for key, value in found if value is not ABSENT}
        now = copy_dict(self.space)
        if wanted is None:
            return {k: v for k, v in now.items() if k not in ignored} if ignored else now
        return {k: v for k, v in now.items() if k in wanted}

    @property
    def keys(self) -> frozenset[str] | None:
        """What a sentry should look at: names, or everything."""
        wanted = self._wanted
        return wanted if wanted is not None and _are_names(wanted) else None

    def rows(self) -> list[tuple[Source, str]]:
        """What is compared, for people: sources, and what was seen."""
        return [(self._step(key), _describe_kept(kept)) for key, kept in self._kept.items()]

    def spell(self, key: object) -> Source:
        """How a value of the dict is reached."""
        return self._step(key)

    @property
    def has_plain_keys(self) -> bool:
        """Whether no key can be a tensor, or hold one."""
        return all(map(_is_plain_key, self._kept)) and all(map(_is_plain_key, self._wanted or ()))

    def list_tensors(self) -> list[tuple[Any, torch.Tensor]]:
        """Tensors that were seen, and are alive, with their keys."""
        pairs = [(key, kept.get()) for key, kept in self._kept.items() if isinstance(kept, Kept)]
        return [(key, value) for key, value in pairs if isinstance(value, torch.Tensor)]

    def fits(self, space: dict[Any, Any]) -> bool:
        """Whether another dict holds what was seen in this one."""
        before, self.space = self.space, space
        try:
            return not self.find_causes(NOBODY)
        finally:
            self.space = before

    def find_causes(self, writers: Writers) -> tuple[Cause, ...]:
        """Every key that holds something else now."""
        now = self._read()
        changed = [
            (key, _describe_kept(kept), now.get(key, ABSENT))
            for key, kept in self._kept.items()
            if not _is_kept(kept, now.get(key, ABSENT))
        ]
        changed += [(key, "nothing", value) for key, value in now.items() if key not in self._kept]
        if changed or self._order is None:
            return tuple(
                Cause(self._step(key), old, _describe_new(value, old), writers.of(key))
                for key, old, value in changed
            )
        order = self._read_order(self._order)
        if same_plain(self._order, order):
            return ()
        return (Cause(self._step(next(iter(order), None)), "one order", "another order", None),)

    def _read_order(self, before: tuple[Any, ...]) -> tuple[Any, ...]:
        """The keys as they follow one another; of those that the run writes, the old ones."""
        new = self._ignored.difference(before)
        return tuple(key for key in copy_dict(self.space) if key not in new)


def _is_plain_key(key: object) -> bool:
    return id(type(key)) in PLAIN or isinstance(key, (type, FunctionType))


def _is_kept(kept: object, value: object) -> bool:
    return kept.is_same(value) if isinstance(kept, Kept) else same_plain(kept, value)


def _describe_kept(kept: object) -> str:
    return str(kept) if isinstance(kept, Kept) else str(fingerprint(kept))


def _describe_new(value: object, old: str) -> str:
    found = str(fingerprint(value))
    return f"{found}, another object" if found == old else found


_NOTHING = object()  # can't be written to


class ObjectWire:
    """What an object is, beside what its dict holds: its class, its dict, a tensor's form.

    A function's code and a partial's arguments are held strongly: they die with their owner, and so
    does the entry. A function that neither ran nor was looked into is watched only for its texts
    and its dict, and may die: if the path to it was read, that path is watched, too.
    """

    __slots__ = ("_cls", "_facts", "_labels", "_may_die", "_path", "_ref", "_space")

    def __init__(
        self,
        value: object,
        path: Source,
        held: Held,
        on_death: Callable[[object], None] | None,  # None: it may die
        facts: Facts | None = None,
        labels: frozenset[str] = frozenset(),
    ) -> None:
        self._may_die = on_death is None
        self._ref = held.refer_to(value) or refer(value, on_death)
        self._path = path
        self._cls = type(value)
        self._space = id(own_dict(value))  # kept alive by its object, which is compared first
        self._facts = _facts_of(value) if facts is None else facts
        self._labels = {n: _label_of(value, n) for n in sorted(labels)} if labels else {}

    @property
    def value(self) -> object:
        """The object, or None where it is gone and wasn't to die."""
        value = self._ref()
        return _NOTHING if value is None and self._may_die else value

    @property
    def refer(self) -> Callable[[], object]:
        """What gives the object; None once it is gone."""
        return self._ref

    def fits(self, value: object) -> bool:
        """Whether another object is what this one was, its own dict aside."""
        if type(value) is not self._cls:
            return False
        return not self._facts or all(map(_same_fact, _facts_of(value), self._facts))

    def follow(self, value: object) -> None:
        """Be about another object from now on, which the reference leads to already."""
        self._space = id(own_dict(value))

    def is_about(self, ref: object) -> bool:
        """Whether this is the reference to the object."""
        return self._ref is ref

    def gone(self) -> Cause:
        """What to say when the object died."""
        return Cause(self._path, _class(self._cls), GONE, None)

    def moved(self, writers: Writers) -> Cause:
        """What to say when a tensor got memory of another one, or left it."""
        return Cause(self._path, "its memory", "other memory", writers.whole)

    def rows(self) -> list[tuple[Source, str]]:
        """What is compared, for people."""
        return [(self._path, _class(self._cls))]

    def find_cause(self, writers: Writers) -> Cause | None:
        """How the object differs now."""
        value = self._ref()
        if value is None:
            return None if self._may_die else self.gone()
        if type(value) is not self._cls:
            return Cause(self._path, _class(self._cls), _class(type(value)), writers.whole)
        if id(own_dict(value)) != self._space:
            return Cause(self._path, "its own __dict__", "another __dict__", writers.whole)
        facts = _facts_of(value)
        if self._facts and not all(map(_same_fact, facts, self._facts)):
            return Cause(self._path, _describe(self._facts), _describe(facts), writers.whole)
        for name, seen in self._labels.items():
            found = _label_of(value, name)
            if not same_plain(found, seen):
                old, new = str(fingerprint(seen)), str(fingerprint(found))
                return Cause(Attr(self._path, name), old, new, writers.whole)
        return None


def _class(cls: type) -> str:
    return f"{name_of(cls)} object"


def _label_of(value: object, name: str) -> object:
    """What a function or a class is called; what a class holds in its dict has a wire there."""
    if isinstance(value, FunctionType):
        return getattr(value, name)
    if isinstance(value, type) and name in ("__name__", "__qualname__"):
        return type.__dict__[name].__get__(value)
    return None


Facts = tuple[object, ...]


def _facts_of(value: object) -> Facts:
    if isinstance(value, torch.Tensor):
        return meta_of(value), traits_of(value)
    if isinstance(value, FunctionType):
        return code_of(value), value.__defaults__, value.__kwdefaults__
    if isinstance(value, type):
        return (mro(value),)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return ()


def _same_fact(left: object, right: object) -> bool:
    if isinstance(left, (TensorMeta, Traits)):
        return left == right
    return same_plain(left, right)


def _describe(facts: Facts) -> str:
    match facts:
        case (TensorMeta() as meta, Traits() as traits):
            leaf = "" if traits.is_leaf else ", no leaf"
            return f"{name_of(traits.cls)} {meta.full}{leaf}"
        case (CodeType() as code, defaults, kwdefaults):
            return f"code of {code.co_qualname}:{code.co_firstlineno}, {defaults}, {kwdefaults}"
        case (_, tuple() as args, dict() as keywords):
            return f"partial with {len(args)} arguments and {len(keywords)} keywords"
        case (tuple() as mro,):
            return "bases " + ", ".join(name_of(cls) for cls in mro[1:])
    return "?"


class PulledWire:
    """Something that no sentry can watch: looked at on every call."""

    __slots__ = ("_ignored", "_kept", "_keys", "_kind", "_owner", "_step", "_wanted")

    def __init__(
        self,
        way: Callable[[], object],
        kind: Kind,
        step: Callable[[Any], Source],
        wanted: frozenset[Any] | None,
        ignored: frozenset[Any],
        before: dict[Any, object],
        keeper: Keeper = ITSELF,
    ) -> None:
        self._owner = way
        self._kind = kind
        self._step = step
        self._wanted = None if wanted is None else wanted - ignored
        # What a set as a whole was like is what counts there.
        self._ignored = frozenset() if isinstance(kind, MembersKind) else ignored
        keys, values = self._read()
        if before:
            now = dict(zip(keys, values, strict=True)) | before
            now = {key: value for key, value in now.items() if value is not ABSENT}
            keys, values = tuple(now), tuple(now.values())
        self._keys = keys
        self._kept = [keeper.keep(value) for value in values]

    def _read(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        owner: Any = self._owner()
        if self._wanted is not None and type(owner) is list:  # of which a place or two was read
            places = tuple(place for place in sorted(self._wanted) if place < len(owner))
            return places, tuple(owner[place] for place in places)
        keys, values = (("gone",), (ABSENT,)) if owner is None else self._kind.read(owner)
        wanted, ignored = self._wanted, self._ignored
        if wanted is None and not ignored:
            return keys, values
        pairs = [
            (k, v)
            for k, v in zip(keys, values, strict=True)
            if (wanted is None or k in wanted) and k not in ignored
        ]
        return tuple(k for k, _ in pairs), tuple(v for _, v in pairs)

    @property
    def has_plain_keys(self) -> bool:
        """Whether no key can be a tensor, or hold one."""
        return all(map(_is_plain_key, self._keys))

    def list_tensors(self) -> list[torch.Tensor]:
        """Tensors that were seen, and are alive."""
        values = [kept.get() for kept in self._kept]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def spell(self, constant: Callable[[object], str]) -> str | None:
        """A quick test of the same, as an expression; a miss proves nothing."""
        owner: Any = self._owner()
        kept = self._kept
        if isinstance(self._kind, CellsKind) and self._wanted is None:
            cells = cells_of(owner)
            if not self._keys or set(cells) - self._ignored != set(self._keys):
                return None
            names = [f"{constant(cells[key])}.cell_contents" for key in self._keys]
            return " and ".join(k.spell(n, constant) for n, k in zip(names, kept, strict=True))
        if isinstance(self._kind, SlotsKind):
            return self._spell_slots(owner, constant)
        if isinstance(self._kind, ElementsKind) and type(owner) is list and self._wanted:
            place = getattr(self._owner, "__self__", None)  # an Alike's, or nobody's
            found = f"{constant(place)}._value" if place else constant(owner)
            pairs = zip(self._keys, kept, strict=True)
            return " and ".join(k.spell(f"{found}[{key}]", constant) for key, k in pairs) or None
        is_whole = self._wanted is None and not self._ignored
        if isinstance(self._kind, ElementsKind) and type(owner) is list and is_whole:
            items = tuple(k.item for k in kept)
            if all(item is not ABSENT for item in items):
                place = getattr(self._owner, "__self__", None)  # an Alike's, or nobody's
                found = f"{constant(place)}._value" if place else constant(owner)
                return f"{constant(same_items)}({found}, {constant(items)})"
        if isinstance(self._kind, MembersKind) and self._wanted is None:
            values = tuple(k.get() for k in kept)
            if all(is_exactly(value, str, type) for value in values):  # equal means the same
                return f"list({constant(self._owner)}() or ()) == {constant(list(values))}"
        if isinstance(self._kind, ContextKind):
            found = f"{constant(owner)}.get({constant(ABSENT)})"
            return kept[0].spell(found, constant) if kept else f"{found} is {constant(ABSENT)}"
        return None

    def rows_of_table(self) -> list[TableRow]:
        """The same test as rows; a row that fails asks this wire. None of them where C can't."""
        found = self._find_rows()
        rows = [row for row in found if row is not None]
        return rows if len(rows) == len(found) else []

    def _find_rows(self) -> list[TableRow | None]:
        owner: Any = self._owner()
        pairs = list(zip(self._keys, self._kept, strict=True))
        is_whole = self._wanted is None and not self._ignored
        if isinstance(self._kind, CellsKind) and self._wanted is None:
            cells = cells_of(owner)
            if self._keys and set(cells) - self._ignored == set(self._keys):
                return [kept.fill(TableRow("cell", x=cells[key], z=self)) for key, kept in pairs]
        elif (
            isinstance(self._kind, SlotsKind) and self._spell_slots(owner, lambda _: "") is not None
        ):
            slots = slots_of(type(owner))
            rows = [
                (slots[key], kept.fill(TableRow("slot", x=owner, z=self))) for key, kept in pairs
            ]
            return [row and replace(row, y=(slot, row.y)) for slot, row in rows]
        elif isinstance(self._kind, ElementsKind) and type(owner) is list and is_whole:
            items = tuple(kept.item for kept in self._kept)
            if all(item is not ABSENT for item in items):
                place = getattr(self._owner, "__self__", None)  # an Alike's, or nobody's
                if place is None:
                    return [TableRow("items", x=owner, y=items, z=self)]
                if isinstance(place, Alike):
                    return [TableRow("items", x=place, y=(VALUE_SLOT, items), z=self, flag=True)]
        elif isinstance(self._kind, MembersKind) and is_whole:
            values = tuple(kept.get() for kept in self._kept)
            is_quick = is_reference(self._owner)
            if is_quick and all(is_exactly(value, str, type) for value in values):
                return [TableRow("members", x=self._owner, y=values, z=self)]
        elif isinstance(self._kind, ContextKind):
            row = TableRow("context", x=(owner, ABSENT), y=ABSENT, z=self)
            return [self._kept[0].fill(row) if self._kept else row]
        return []

    def _spell_slots(self, owner: object, constant: Callable[[object], str]) -> str | None:
        slots = slots_of(type(owner))
        wanted = slots.keys() - self._ignored
        wanted = wanted if self._wanted is None else wanted & self._wanted
        if not wanted or set(wanted) != set(self._keys):  # an empty one raises when it is asked
            return None
        if type(self._owner) is weakref.ref or answers_itself(type(owner)):
            return None
        if any(find_in_class(type(owner), key) is not slots[key] for key in self._keys):
            return None
        name, pairs = constant(owner), zip(self._keys, self._kept, strict=True)
        return " and ".join(kept.spell(f"{name}.{key}", constant) for key, kept in pairs)

    def is_same(self) -> bool:
        """Whether it holds what it held."""
        keys, values = self._read()
        return keys == self._keys and all(
            kept.is_same(value) for kept, value in zip(self._kept, values, strict=True)
        )

    def rows(self) -> list[tuple[Source, str]]:
        """What is compared, for people: sources, and what was seen."""
        pairs = zip(self._keys, self._kept, strict=True)
        return [(self._step(key), str(kept)) for key, kept in pairs]

    def find_causes(self, writers: Writers) -> tuple[Cause, ...]:
        """Every key that holds something else now."""
        keys, values = self._read()
        now = dict(zip(keys, values, strict=True))
        before = dict(zip(self._keys, self._kept, strict=True))
        causes = []
        for key in dict.fromkeys((*before, *now)):
            value = now.get(key, ABSENT)
            kept = before.get(key)
            if kept is None or not kept.is_same(value):
                old = "nothing" if kept is None else str(kept)
                causes.append(Cause(self._step(key), old, str(fingerprint(value)), writers.of(key)))
        if not causes and keys != self._keys:
            causes.append(Cause(self._step(keys[0]), "one order", "another order", None))
        return tuple(causes)
