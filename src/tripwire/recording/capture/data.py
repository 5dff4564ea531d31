"""Data: plain values, containers and instances become nodes.

Python's own exact types are known by their type. Of other objects, state is read from the dict and
the slots that Python itself gave them. An object with hidden state in C is left out, with a reason,
unless it shows its state as plain data: enums, dates, NumPy's generators.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import functools
import io
import logging
import pathlib
import random
import re
import struct
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tripwire.recording.capture.origin import Treatment
from tripwire.recording.capture.wrapped import encode_generator, is_generator
from tripwire.recording.format import nodes
from tripwire.recording.format.checks import array_item_size
from tripwire.recording.format.nodes import AnyNode, Reference, Slot
from tripwire.values.classes import class_dict, is_heap_type, is_kind, mro
from tripwire.values.contents import has_hidden_state, own_dict, read_slots, slot_count

if TYPE_CHECKING:
    from tripwire.recording.capture.encode import Draft, Encoder


_HASHED_PLAINLY = (str, int, bool, float, bytes, type(None))


def is_utf8(text: str) -> bool:
    """Whether JSON can hold a string."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_text(text: str) -> AnyNode:
    """A string that isn't written in place."""
    if is_utf8(text):
        return nodes.String(text)
    return nodes.Text(text.encode("utf-8", "surrogatepass"))


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _encode_int(encoder: Encoder, value: int) -> AnyNode:
    if not encoder.can_hold_int(value):
        reason = f"it has {value.bit_length()} bits: more than the record has room for"
        return encoder.leave_out(int, reason)
    return nodes.BigInt(f"{value:x}")


def _encode_bytes(encoder: Encoder, value: bytes | bytearray) -> AnyNode:
    if not encoder.can_hold_bytes(len(value)):
        reason = f"it has {len(value)} bytes: more than the record has room for"
        return encoder.leave_out(type(value), reason)
    return nodes.Bytes(bytes(value), type(value) is bytearray)


# --- containers; each is given a subclass's instance too, as what it holds ---


Encode = Callable[["Encoder", Any], AnyNode]
_limit_of = collections.deque.__dict__["maxlen"].__get__


def _items_encoder(cls: Any, build: Callable[[tuple[Slot, ...], Any], AnyNode]) -> Encode:
    """For containers of one type: a node of their items, unless these are too many."""

    def encode(encoder: Encoder, value: Any) -> AnyNode:
        items = list(cls.__iter__(value))
        if encoder.can_hold(items):
            return build(encoder.slots(items, is_paid=True), value)
        reason = f"it has {len(items)} elements: more than the record has room for"
        return encoder.leave_out(type(value), reason)

    return encode


def _ordered_items(value: dict[object, object]) -> list[tuple[object, object]]:
    """Items in order. An OrderedDict looks its keys up as it goes, which may run their code."""
    items = list(dict.items(value))
    if is_kind(type(value), collections.OrderedDict):
        if all(any(type(key) is kind for kind in _HASHED_PLAINLY) for key, _ in items):
            order = list(collections.OrderedDict.__iter__(cast("Any", value)))
            return [(key, dict.__getitem__(value, key)) for key in order]
    return items


def _key_step(key: object) -> str:
    return f"[{key!r}]" if any(type(key) is kind for kind in _HASHED_PLAINLY) else "[...]"


def dict_encoder(form: nodes.DictForm) -> Encode:
    """For one form of dict."""

    def encode(encoder: Encoder, value: dict[object, object]) -> AnyNode:
        items = _ordered_items(value)
        if not encoder.can_hold([key for key, _ in items], [item for _, item in items]):
            reason = f"it has {len(items)} items: more than the record has room for"
            return encoder.leave_out(type(value), reason)
        keys = tuple(encoder.slot(key, "[key]", is_paid=True) for key, _ in items)
        values = tuple(encoder.slot(item, _key_step(key), is_paid=True) for key, item in items)
        factory: Slot = None
        if form == "default":
            found = collections.defaultdict.__dict__["default_factory"].__get__(value)
            factory = encoder.slot(found, ".default_factory")
        return nodes.Dict(keys, values, form, factory)

    return encode


# Types whose instances can be subclassed and then hold something besides attributes.
HOLDERS: Mapping[type, Encode] = {
    tuple: _items_encoder(tuple, lambda slots, _: nodes.Tuple(slots)),
    list: _items_encoder(list, lambda slots, _: nodes.List(slots)),
    set: _items_encoder(set, lambda slots, _: nodes.Set(slots)),
    frozenset: _items_encoder(frozenset, lambda slots, _: nodes.Set(slots, True)),
    collections.deque: _items_encoder(
        collections.deque, lambda slots, value: nodes.Deque(slots, _limit_of(value))
    ),
    collections.OrderedDict: dict_encoder("ordered"),
    collections.defaultdict: dict_encoder("default"),
    dict: dict_encoder("dict"),
}
SCALARS: Mapping[type, Encode] = {
    int: _encode_int,
    float: lambda _, v: nodes.Bits(_bits(v)),
    complex: lambda _, v: nodes.Complex(_bits(v.real), _bits(v.imag)),
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    type(...): lambda _, __: nodes.ConstantNode("Ellipsis"),
    type(NotImplemented): lambda _, __: nodes.ConstantNode("NotImplemented"),
    range: lambda encoder, v: nodes.Range(*encoder.slots((v.start, v.stop, v.step))),
    slice: lambda encoder, v: nodes.Slice(*encoder.slots((v.start, v.stop, v.step))),
}
# OrderedDict and Counter have attributes too, which are seldom used: see encode_instance.
# By id: a metaclass may have a hash of its own.
PLAIN: Mapping[int, Encode] = {
    id(cls): encode
    for cls, encode in (*SCALARS.items(), *HOLDERS.items())
    if cls is not collections.OrderedDict
}


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


_MadeBy = tuple[str, str, tuple[object, ...]]  # a module, a name in it, arguments


def _datetime(value: datetime.datetime) -> _MadeBy:
    day = (value.year, value.month, value.day)
    time = (value.hour, value.minute, value.second, value.microsecond)
    return "datetime", "datetime", (*day, *time, value.tzinfo)


def _time(value: datetime.time) -> _MadeBy:
    time = (value.hour, value.minute, value.second, value.microsecond)
    return "datetime", "time", (*time, value.tzinfo)


def _path(value: pathlib.PurePath) -> _MadeBy:
    pure = type(value).__name__.startswith("Pure")
    return "pathlib", "PurePath" if pure else "Path", (str(value),)


# Exact types alone: their methods are the library's own.
_CALLS: Mapping[type, Callable[[Any], _MadeBy]] = {
    datetime.timedelta: lambda v: ("datetime", "timedelta", (v.days, v.seconds, v.microseconds)),
    datetime.timezone: lambda v: ("datetime", "timezone", (v.utcoffset(None), v.tzname(None))),
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
        return nodes.CallNode(encoder.place(nodes.Library(module, name)), encoder.slots(args))
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
        return encoder.leave_out(cls, "part of its state is in C, where Python can't read it")
    state = named(own_dict(value) or {})
    if is_kind(cls, functools.singledispatchmethod) and "_method_cache" in state:
        state = {**state, "_method_cache": None}  # of 3.13, weak; without it, methods are made anew
    if base is object and own_dict(value) is None and cls is not object and not _is_open(cls):
        return encoder.leave_out(cls, "part of its state is in C, where Python can't read it")
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
        tables = tuple((name, len(row)) for name, row in rows.items())
        keys = tuple(key for row in rows.values() for key in row)
        form = nodes.ModuleForm(self._cls, tuple(taken), tables, keys)
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


# --- NumPy's arrays and scalars of plain dtypes, each as a blob of its own ---


def encode_array(encoder: Encoder, value: Any, cls: type) -> AnyNode | ArrayUse:
    """An array or a NumPy scalar. A view becomes an array of its own."""
    import numpy as np

    if cls is not np.ndarray and is_heap_type(cls):
        return encoder.leave_out(cls, "an instance of a subclass of a NumPy type")
    array = np.asarray(value)
    dtype = array.dtype.str
    if array.dtype.hasobject or array.dtype.fields or array_item_size(dtype) is None:
        return encoder.leave_out(cls, f"an array of {dtype}")
    path = encoder.path()
    treatment = encoder.policy.treat(path, value)
    scalar = cls is not np.ndarray
    use = ArrayUse(array, scalar, path, treatment, (0, 0) if scalar else _find_memory(array))
    encoder.blobs.add(use)
    return use


def _find_memory(array: Any) -> tuple[int, int]:
    """From where to where an array lies."""
    if not array.size:
        return 0, 0
    start: int = array.__array_interface__["data"][0]
    reach = [step * (size - 1) for size, step in zip(array.shape, array.strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return start + low, start + high + int(array.itemsize)


@dataclass(slots=True, eq=False)
class ArrayUse:
    """An array to keep; becomes a node when all tensors are known."""

    array: Any
    scalar: bool
    path: str
    treatment: Treatment
    memory: tuple[int, int]  # of the array itself, not of a copy that was kept
    why: str = "policy"
    blob: int = -1
    shares: bool = False

    @property
    def size(self) -> int:
        return int(self.array.nbytes)

    @property
    def fortran(self) -> bool:
        return bool(self.array.flags.f_contiguous and not self.array.flags.c_contiguous)

    def settle(self) -> None:
        """An array has one user: itself."""

    def form(self) -> tuple[str, tuple[int, ...]]:
        return "U8", (self.size,)

    def paths(self) -> list[str]:
        return [self.path]

    def chunks(self) -> Iterator[memoryview | bytes]:
        yield self.array.tobytes("F" if self.fortran else "C")

    def keep(self) -> None:
        if not self.scalar:
            self.array = self.array.copy(order="K")

    def grow(self) -> None:
        """Nothing more to find."""

    def node(self) -> AnyNode:
        shape, dtype = tuple(self.array.shape), self.array.dtype.str
        if self.treatment is Treatment.FULL:
            return nodes.Array(self.blob, dtype, shape, self.fortran, self.scalar)
        return nodes.Withheld(self.treatment.label, dtype, shape, (), "cpu", "array", None)
