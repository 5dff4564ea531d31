"""Instances: objects by their class, their attributes and what they hold.

State is read from the dict and the slots that Python itself gave the object. What keeps state
that Python doesn't show, in C, is left out with a reason.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import io
import logging
import pathlib
import random
import re
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from tripwire.recording import nodes
from tripwire.recording.generators import encode_generator, is_generator
from tripwire.recording.looks import has_hidden_state, is_heap_type, is_kind, slot_count
from tripwire.recording.nodes import AnyNode, Reference, Slot
from tripwire.recording.plain import HOLDERS, dict_encoder, is_utf8
from tripwire.values.classes import class_dict, mro
from tripwire.values.contents import own_dict, read_slots

if TYPE_CHECKING:
    from tripwire.recording.encode import Draft, Encoder


# --- enums ---


def is_member(cls: type) -> bool:
    """Whether instances of a class are members of an enum."""
    return is_kind(cls, enum.Enum)


def encode_member(encoder: Encoder, value: object, cls: type) -> AnyNode:
    """A member, by its class and its value."""
    state = own_dict(value) or {}
    name = state.get("_name_")
    known = name if type(name) is str else None
    return nodes.EnumMember(
        encoder.reference(cls, ".__class__"), known, encoder.slot(state.get("_value_"), ".value")
    )


# --- values that a library's function makes again ---


def _timezone(value: datetime.timezone) -> tuple[str, str, tuple[object, ...]]:
    return "datetime", "timezone", (value.utcoffset(None), value.tzname(None))


def _timedelta(value: datetime.timedelta) -> tuple[str, str, tuple[object, ...]]:
    return "datetime", "timedelta", (value.days, value.seconds, value.microseconds)


def _datetime(value: datetime.datetime) -> tuple[str, str, tuple[object, ...]]:
    day = (value.year, value.month, value.day)
    time = (value.hour, value.minute, value.second, value.microsecond)
    return "datetime", "datetime", (*day, *time, value.tzinfo)


def _time(value: datetime.time) -> tuple[str, str, tuple[object, ...]]:
    time = (value.hour, value.minute, value.second, value.microsecond)
    return "datetime", "time", (*time, value.tzinfo)


def _path(value: pathlib.PurePath) -> tuple[str, str, tuple[object, ...]]:
    pure = type(value).__name__.startswith("Pure")
    return "pathlib", "PurePath" if pure else "Path", (str(value),)


# Exact types alone: their methods are the library's own.
_CALLS: Mapping[type, Callable[[Any], tuple[str, str, tuple[object, ...]]]] = {
    datetime.timedelta: _timedelta,
    datetime.timezone: _timezone,
    datetime.datetime: _datetime,
    datetime.time: _time,
    datetime.date: lambda v: ("datetime", "date", (v.year, v.month, v.day)),
    decimal.Decimal: lambda v: ("decimal", "Decimal", (str(v),)),
    uuid.UUID: lambda v: ("uuid", "UUID", (str(v),)),
    re.Pattern: lambda v: ("re", "compile", (v.pattern, v.flags)),
    logging.Logger: lambda v: ("logging", "getLogger", (v.name,)),
    pathlib.PosixPath: _path,
    pathlib.WindowsPath: _path,
    pathlib.PurePosixPath: _path,
    pathlib.PureWindowsPath: _path,
}

_CALLS_BY_ID = {id(cls): make for cls, make in _CALLS.items()}


# --- instances ---

# What a class may be built on, and what of it is the content: most derived first.
_CONTENT: Mapping[type, Callable[[Encoder, Any], Slot]] = {
    **{cls: (lambda e, v, put=put: e.place(put(e, v), "")) for cls, put in HOLDERS.items()},  # type: ignore[misc]  # mypy can't type a lambda's default
    int: lambda e, v: e.slot(int.__int__(v)),
    float: lambda e, v: e.slot(float.__float__(v)),
    complex: lambda e, v: e.slot(complex.__pos__(v)),
    str: lambda e, v: e.slot(str.__str__(v)),
    bytes: lambda e, v: e.slot(bytes.__getitem__(v, slice(None))),
    bytearray: lambda e, v: e.slot(bytearray.__getitem__(v, slice(None))),
    BaseException: lambda e, v: e.slot(BaseException.__dict__["args"].__get__(v), ".args"),
    random.Random: lambda e, v: e.slot(random.Random.getstate(v)),
}
# C types whose instances are their dict and nothing more.
_OPEN = (object, types.SimpleNamespace)
# What has a dict and still can't come back: it stands for something outside.
_LIVING: Mapping[type, str] = {
    threading.Thread: "a thread",
    weakref.WeakKeyDictionary: "a weak container",
    weakref.WeakValueDictionary: "a weak container",
    weakref.WeakSet: "a weak container",
    weakref.ref: "a weak reference",
    io.IOBase: "a stream",
    threading.Event: "a lock",
    threading.Condition: "a lock",
    threading.local: "state of a thread",
}
# By id: a metaclass may have a hash of its own.
_BASES = frozenset(map(id, (*_CONTENT, *_OPEN)))


def encode_instance(encoder: Encoder, value: Any, cls: type) -> AnyNode | Draft:
    """Any object that isn't a plain value, code or a tensor."""
    made_by = _CALLS_BY_ID.get(id(cls))
    if made_by is not None:
        module, name, args = made_by(value)
        return nodes.Call(encoder.place(nodes.Library(module, name)), encoder.slots(args))
    if cls is collections.OrderedDict and not own_dict(value):
        return HOLDERS[cls](encoder, value)
    if cls is collections.Counter and not own_dict(value):
        return dict_encoder("counter")(encoder, value)
    if is_kind(cls, tuple) and _has_fields(cls) and not own_dict(value):
        held = list(tuple.__iter__(value))
        if not encoder.can_hold(held):
            return encoder.leave_out(cls, "the record has no room left")
        items = encoder.slots(held, is_paid=True)
        return nodes.NamedTuple(encoder.reference(cls, ".__class__"), items)
    if is_generator(cls):
        return encode_generator(encoder, value, cls)
    for living, reason in _LIVING.items():
        if is_kind(cls, living):
            return encoder.leave_out(cls, reason)
    base = next((k for k in mro(cls) if id(k) in _BASES), object)
    if has_hidden_state(cls, base) and not is_kind(cls, BaseException):
        return encoder.leave_out(cls, "it keeps state that Python doesn't show")
    state = named(own_dict(value) or {})
    if base is object and own_dict(value) is None and cls is not object and not _is_open(cls):
        return encoder.leave_out(cls, "it keeps state that Python doesn't show")
    put = _CONTENT.get(base)
    if is_plain_module(cls):
        return ModuleDraft(encoder, cls, state)
    if not encoder.can_hold_attributes(state):
        return encoder.leave_out(cls, "the record has no room left")
    content = put(encoder, value) if put is not None else None
    return ObjectDraft(encoder, value, cls, state, content)


def _has_fields(cls: type) -> bool:
    """Whether a tuple's class is a namedtuple or one of C's struct sequences."""
    return any("_fields" in class_dict(k) or "n_sequence_fields" in class_dict(k) for k in mro(cls))


def _is_open(cls: type) -> bool:
    """Whether a class without a dict keeps all there is in slots: `class` statements alone do."""
    return all(k is object or (is_heap_type(k) and "__slots__" in class_dict(k)) for k in mro(cls))


def named(state: dict[Any, object]) -> dict[str, object]:
    """Attributes whose names JSON can hold: a dict may have any key."""
    return {name: value for name, value in state.items() if type(name) is str and is_utf8(name)}


class ObjectDraft:
    """An instance; its attributes are those that recorded code may take."""

    def __init__(
        self, encoder: Encoder, value: object, cls: type, state: dict[str, object], content: Slot
    ) -> None:
        self._encoder = encoder
        self._kind = cls
        self._cls: Reference = encoder.reference(cls, ".__class__")
        self._content = content
        self._state = state
        self._slots = read_slots(value)
        encoder.hold_attributes(self._slots)
        self._taken: dict[str, Slot] = {}
        self._taken_slots: dict[str, Slot] = {}
        self.grow()

    def grow(self) -> None:
        for have, taken in ((self._state, self._taken), (self._slots, self._taken_slots)):
            if len(have) == len(taken):
                continue
            for name, value in have.items():
                if name not in taken and self._encoder.names.wants(self._kind, name):
                    taken[name] = self._encoder.slot(value, f".{name}")

    def node(self) -> AnyNode:
        names = tuple(name for name in self._state if name in self._taken)
        slots = tuple(name for name in self._slots if name in self._taken_slots)
        return nodes.Object(
            self._cls,
            names,
            tuple(self._taken[name] for name in names),
            content=self._content,
            slots=slots,
            slot_values=tuple(self._taken_slots[name] for name in slots),
        )


# --- nn.Modules ---

_TABLES = ("_parameters", "_buffers", "_modules")
_SMALL = 1 << 31


def is_plain_module(cls: type) -> bool:
    """Whether instances are nn.Modules that keep everything in their dict."""
    torch = sys.modules.get("torch")
    if torch is None or not is_kind(cls, torch.nn.Module):
        return False
    return not has_hidden_state(cls, object) and not slot_count(cls)


class ModuleDraft:
    """An nn.Module: what a fresh one has too is left out, its tables are written in place."""

    def __init__(self, encoder: Encoder, cls: type, state: dict[str, object]) -> None:
        self._encoder = encoder
        self._kind = cls
        self._cls: Reference = encoder.reference(cls, ".__class__")
        self._tables = {name: state[name] for name in _TABLES if _is_table(state.get(name))}
        self._rows = {
            name: {key: encoder.slot(item, f".{key}") for key, item in dict.items(table)}
            for name, table in cast("dict[str, dict[str, object]]", self._tables).items()
        }
        self._state = _without_defaults(state, self._tables)
        self._taken: dict[str, Slot] = {}
        encoder.hold_module()
        encoder.hold_attributes(self._state)
        for row in self._rows.values():
            encoder.hold_attributes(row)
        self.grow()

    def grow(self) -> None:
        if len(self._state) == len(self._taken):
            return
        for name, value in self._state.items():
            if name not in self._taken and self._encoder.names.wants(self._kind, name):
                self._taken[name] = self._slot(value, name)

    def _slot(self, value: object, name: str) -> Slot:
        """A slot; `(3, 3)` is one node for a whole model of convolutions."""
        if type(value) is tuple and all(type(item) is int for item in value):
            if all(-_SMALL < item < _SMALL for item in value):
                return self._encoder.share(nodes.Tuple(value))
        return self._encoder.slot(value, f".{name}")

    def node(self) -> AnyNode:
        shared = [name for name, table in self._tables.items() if self._encoder.knows(table)]
        if shared:  # something else refers to the table itself: it stays a dict of its own
            taken = {
                **{name: self._encoder.reference(self._tables[name]) for name in shared},
                **self._taken,
            }
        else:
            taken = self._taken
        rows = {name: row for name, row in self._rows.items() if name not in shared}
        keys = tuple(tuple(row) for row in rows.values())
        form = nodes.ModuleForm(self._cls, tuple(taken), tuple(rows), keys)
        values = (*taken.values(), *(slot for row in rows.values() for slot in row.values()))
        return nodes.ModuleObject(self._encoder.share(form), values)


def _is_table(value: object) -> bool:
    return type(value) is dict and bool(value) and len(named(value)) == len(value)


def _without_defaults(state: dict[str, object], tables: dict[str, object]) -> dict[str, object]:
    torch = sys.modules["torch"]
    kept = {name: value for name, value in state.items() if name not in tables}
    for name, fresh in vars(torch.nn.Module()).items():
        if name in kept and _is_same(kept[name], fresh):
            del kept[name]
    return kept


def _is_same(value: object, fresh: object) -> bool:
    if value is fresh:  # True, None
        return True
    kind = type(value)
    if not any(kind is k for k in (dict, set, collections.OrderedDict)):
        return False
    return kind is type(fresh) and not value
