"""Snapshots: what an object held, remembered so that it can be compared and can still die.

A snapshot is one level deep: an object's attributes and items, not what those hold in turn.
Two values are the same if they are one object, or plain values of one type with the same bits: 0.0
and -0.0 differ, nan and nan don't. Values are remembered weakly. A value without weak references is
remembered by its address and put into `kept`: as long as somebody holds `kept`, no other object can
get that address. No comparison runs user code.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from itertools import zip_longest
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import nn

from tripwire.values.classes import isinstance
from tripwire.values.contents import (
    at_once,
    bound_cells,
    dict_behind,
    elements_of,
    own_dict,
    read_slots,
    slots_of,
    spell_key,
)
from tripwire.values.identity import PLAIN, same_plain
from tripwire.values.numbers import plain
from tripwire.writes.subscriptions import see_through


class Missing(Enum):
    """What stands where there is no value, or no key, to be shown."""

    ABSENT = "absent"  # there was nothing, or is nothing now
    GONE = "gone"  # the value has died since, and nothing of it is left
    ORDER = "order"  # in place of a key: the same keys in another order

    def __repr__(self) -> str:
        return f"<{self.value}>"


ABSENT, GONE, ORDER = Missing.ABSENT, Missing.GONE, Missing.ORDER


class Difference(NamedTuple):
    """One attribute or item that isn't what it was."""

    name: object
    old: object
    new: object


# --- values --------------------------------------------------------------------------------------

_DEEPEST = 8  # tuples below are compared by identity


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value is told by its type and bits."""
    if type(value) is tuple:
        return depth < _DEEPEST and all(is_plain(v, depth + 1) for v in value)
    return id(type(value)) in PLAIN


class _Weak(weakref.ref[Any]):
    """A remembered value that may die."""

    __slots__ = ("address",)

    address: int


class _Address(NamedTuple):
    """A remembered value that can't be weakly referenced."""

    cls: type
    address: int


def remember(value: object, kept: dict[int, object]) -> object:
    """What stands for a value in a snapshot: itself, if it is plain."""
    if is_plain(value):
        return value
    try:
        weak = _Weak(value)
    except TypeError:
        kept[id(value)] = value
        return _Address(type(value), id(value))
    weak.address = id(value)
    return weak


def is_same(mark: object, value: object) -> bool:
    """Whether a value is what a mark stands for; a plain value stands for itself."""
    if type(mark) is _Weak:
        return value is not None and mark() is value
    if type(mark) is _Address:
        return mark.address == id(value) and mark.cls is type(value)
    return same_plain(mark, value)


def _recall(mark: object, alive: Mapping[int, object]) -> object:
    """The value that a mark stands for, or GONE."""
    if type(mark) is _Weak:
        value = mark()
        return GONE if value is None else value
    if type(mark) is _Address:
        return alive.get(mark.address, GONE)
    return mark


def _token(mark: object) -> object:
    """What tells keys apart: of a mark, and of the value that it stands for, the same."""
    if type(mark) is _Weak or type(mark) is _Address:
        return mark.address
    if not is_plain(mark):
        return id(mark)
    if type(mark) is tuple:
        return tuple, tuple(map(_token, mark))
    # 1, 1.0 and True are one key to a dict, and so are 0.0 and -0.0.
    return type(mark), repr(mark) if type(mark) in (float, complex) else mark


# --- parts ---------------------------------------------------------------------------------------


class Keys(Struct, frozen=True):
    """Values by key: attributes, or items of a mapping, or the elements of a set."""

    keys: tuple[object, ...]
    values: tuple[object, ...]
    label: str = ""  # the attribute that holds the table, where it isn't the object itself
    attribute: bool = False  # a key is the name of an attribute
    ordered: bool = False

    def is_unchanged(self, now: Keys) -> bool:
        """Whether nothing at all differs."""
        return (
            len(self.keys) == len(now.keys)
            and self.label == now.label
            and self.attribute == now.attribute
            and all(map(is_same, self.keys, now.keys))
            and all(map(is_same, self.values, now.values))
        )

    def compare(self, now: Keys, alive: Mapping[int, object]) -> Iterator[Difference]:
        """What differs, by name: first what is gone or another, then what is new."""
        before, after = self._by_token(), now._by_token()
        found = False
        stayed = set()
        for token, (key, mark) in before.items():
            if token in after and is_same(key, after[token][0]):
                stayed.add(token)
                new = after[token][1]
                if is_same(mark, new):
                    continue
            else:
                new = ABSENT
            found = True
            yield Difference(self.name_of(_recall(key, alive)), _recall(mark, alive), new)
        for token, (key, value) in after.items():
            if token not in stayed:
                found = True
                yield Difference(self.name_of(key), ABSENT, value)
        if self.ordered and not found and list(before) != list(after):
            old = tuple(_recall(key, alive) for key in self.keys)
            yield Difference(self.label or ORDER, old, now.keys)

    def _by_token(self) -> dict[object, tuple[object, object]]:
        return {_token(k): (k, v) for k, v in zip(self.keys, self.values, strict=True)}

    def name_of(self, key: object) -> object:
        """A key as a listener sees it."""
        return key if self.attribute else label_of(self.label, key)


class Positions(Struct, frozen=True):
    """Values by position."""

    values: tuple[object, ...]

    def is_unchanged(self, now: Positions) -> bool:
        """Whether nothing at all differs."""
        return len(self.values) == len(now.values) and all(map(is_same, self.values, now.values))

    def compare(self, now: Positions, alive: Mapping[int, object]) -> Iterator[Difference]:
        """What differs between the elements that both begin and both end with.

        So an insertion is one difference, though it moves everything behind it.
        """
        old, new = self.values, now.values
        start, shorter = 0, min(len(old), len(new))
        while start < shorter and is_same(old[start], new[start]):
            start += 1
        end = 0
        while end < shorter - start and is_same(old[-1 - end], new[-1 - end]):
            end += 1
        was, becomes = old[start : len(old) - end], new[start : len(new) - end]
        for index, (mark, value) in enumerate(zip_longest(was, becomes, fillvalue=ABSENT), start):
            if not is_same(mark, value):
                yield Difference(index, _recall(mark, alive), value)


Part = Keys | Positions
Snapshot = tuple[Part, ...]  # with values themselves where it was read, with marks where it is held


# --- reading -------------------------------------------------------------------------------------

_INNER = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
_INNER_ATTRIBUTES = frozenset({"_parameters", "_buffers", "_modules"})
_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__")


def can_read(obj: object) -> bool:
    """Whether an object holds anything that a snapshot would show."""
    cls = type(obj)
    if issubclass(cls, torch.Tensor):  # its values are written where Python doesn't see it
        return False
    if issubclass(cls, (type, dict, list, set, deque)):
        return True
    return own_dict(obj) is not None or bool(slots_of(cls))


def read(obj: Any) -> Snapshot:
    """What an object holds now."""
    cls = type(obj)  # isinstance would believe an object that lies about its class
    if issubclass(cls, type):
        return (_attributes(_class_space(obj)),)
    space = dict(own_dict(obj) or {})
    parts: list[Part] = []
    if issubclass(cls, nn.Module):
        parts.extend(_inner_tables(space))
    elif issubclass(cls, ModuleType):
        space.pop("__warningregistry__", None)  # Python's own notes on warnings given
    elif issubclass(cls, FunctionType):
        space.update({name: getattr(obj, name) for name in _FUNCTION})
        cells = bound_cells(obj)
        parts.append(Keys(tuple(cells), tuple(cells.values()), label="__closure__"))
    space.update(read_slots(obj))
    space["__class__"] = cls
    parts.insert(0, _attributes(space))
    if issubclass(cls, dict):
        parts.append(_items(obj, ""))
    elif issubclass(cls, (list, deque)):
        parts.append(Positions(elements_of(obj)))
    elif issubclass(cls, set):
        parts.append(_elements(obj, ""))
    return tuple(parts)


def dicts_of(obj: Any) -> list[tuple[dict[Any, Any], str]]:
    """The dicts that hold what a snapshot shows, each with its label."""
    cls = type(obj)
    if issubclass(cls, type):
        return [(dict_behind(vars(obj)), "")]  # type: ignore[list-item]  # a class has a dict
    found: list[tuple[dict[Any, Any], str]] = [(obj, "")] if issubclass(cls, dict) else []
    space = own_dict(obj)
    if space is not None:
        found.append((space, ""))
        if issubclass(cls, nn.Module):
            tables = [(dict.get(space, name), name) for name in _INNER]
            found += [(held, name) for held, name in tables if isinstance(held, dict)]
    return found


def label_of(table: str, key: object) -> object:
    """A key of one of an object's dicts, as a listener sees it."""
    return key if not table or table in _INNER_ATTRIBUTES else f"{table}[{spell_key(key)}]"


def _attributes(space: dict[str, Any]) -> Keys:
    # A run that is observed may have put an open number there for a while.
    return Keys(tuple(space), tuple(map(plain, space.values())), attribute=True)


def _class_space(cls: type) -> dict[str, Any]:
    """A class's own attributes. Descriptors that reach nothing but the class are left out."""
    space = see_through(dict(vars(cls)))
    space.pop("__dict__", None)
    space.pop("__weakref__", None)
    annotations = space.get("__annotations__")
    if type(annotations) is dict and not annotations:  # made by Python when somebody asks
        del space["__annotations__"]
    space["__bases__"] = cls.__bases__
    space["__class__"] = type(cls)
    return space


def _inner_tables(space: dict[str, Any]) -> Iterator[Part]:
    """Parameters, buffers, submodules and hooks; takes them out of the module's attributes.

    Most are empty, and an empty part is as good as none.
    """
    for name in _INNER:
        held = space.get(name)
        if type(held) is dict or type(held) is OrderedDict:
            del space[name]
            if held:
                yield _items(held, name)
        elif type(held) is set:
            del space[name]
            if held:
                yield _elements(held, name)


def _items(held: dict[Any, Any], label: str) -> Keys:
    pairs = at_once(partial(_pairs, held))
    keys = tuple([key for key, _ in pairs])
    values = tuple([plain(value) for _, value in pairs])
    return Keys(keys, values, label, attribute=label in _INNER_ATTRIBUTES, ordered=True)


def _pairs(held: dict[Any, Any]) -> Iterable[Any]:
    if isinstance(held, OrderedDict):  # it has an order of its own, which dict doesn't see
        try:
            return tuple(OrderedDict.items(held))
        except KeyError:  # somebody wrote past that order
            pass
    return dict.items(held)


def _elements(held: set[Any], label: str) -> Keys:
    elements = elements_of(held)
    return Keys(elements, elements, label)


# --- a whole snapshot ----------------------------------------------------------------------------


def hold(now: Snapshot, kept: dict[int, object]) -> Snapshot:
    """A snapshot as it is remembered."""

    def marks(values: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(remember(value, kept) for value in values)

    return tuple(
        Positions(marks(part.values))
        if isinstance(part, Positions)
        else Keys(marks(part.keys), marks(part.values), part.label, part.attribute, part.ordered)
        for part in now
    )


def is_unchanged(held: Snapshot, now: Snapshot) -> bool:
    """Whether nothing at all differs, order included."""
    return len(held) == len(now) and all(
        type(part) is type(other) and part.is_unchanged(other)  # type: ignore[arg-type]  # one class
        for part, other in zip(held, now, strict=True)
    )


def compare(held: Snapshot, now: Snapshot, alive: Mapping[int, object]) -> list[Difference]:
    """What differs, each name once. `alive` finds values that are remembered by address."""
    pairs = _pair(held, now)
    attributes: dict[object, Difference] = {}
    others: list[Difference] = []
    for old, new in pairs:
        if isinstance(old, Positions):
            assert isinstance(new, Positions)
            others.extend(old.compare(new, alive))
            continue
        assert isinstance(new, Keys)
        if old.is_unchanged(new):
            continue
        for found in old.compare(new, alive):
            if not old.attribute:
                others.append(found)
                continue
            # A module moves a name between its tables: gone from one, new in another.
            other = attributes.get(found.name)
            if other is None:
                attributes[found.name] = found
            else:
                was = other.old if found.old is ABSENT else found.old
                becomes = other.new if found.new is ABSENT else found.new
                attributes[found.name] = Difference(found.name, was, becomes)
    return [*attributes.values(), *others]


def _pair(held: Snapshot, now: Snapshot) -> Iterator[tuple[Part, Part]]:
    """Parts that belong together; a part that only one side has is met by an empty one."""

    def kind(part: Part) -> object:
        return type(part), (part.label, part.attribute) if isinstance(part, Keys) else None

    before = {kind(part): part for part in held}
    after = {kind(part): part for part in now}
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        yield old or _empty_like(new), new or _empty_like(old)


def _empty_like(part: Part | None) -> Part:
    if isinstance(part, Keys):
        return Keys((), (), part.label, part.attribute, part.ordered)
    return Positions(())


def values_of(snapshot: Snapshot) -> dict[int, object]:
    """Every value and key of a snapshot that was read, by address."""
    found = {}
    for part in snapshot:
        for value in part.values:
            found[id(value)] = value
        if isinstance(part, Keys) and not part.attribute:
            for key in part.keys:
                found[id(key)] = key
    return found
