"""Plain values and containers: Python's own exact types become nodes."""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from tripwire.recording import nodes
from tripwire.recording.looks import is_kind
from tripwire.recording.nodes import AnyNode, Slot

if TYPE_CHECKING:
    from tripwire.recording.encode import Encoder

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


def _encode_float(encoder: Encoder, value: float) -> AnyNode:
    return nodes.Bits(_bits(value))


def _encode_complex(encoder: Encoder, value: complex) -> AnyNode:
    return nodes.Complex(_bits(value.real), _bits(value.imag))


def _encode_bytes(encoder: Encoder, value: bytes | bytearray) -> AnyNode:
    if not encoder.can_hold_bytes(len(value)):
        reason = f"it has {len(value)} bytes: more than the record has room for"
        return encoder.leave_out(type(value), reason)
    return nodes.Bytes(bytes(value), type(value) is bytearray)


def _encode_range(encoder: Encoder, value: range) -> AnyNode:
    return nodes.Range(*encoder.slots((value.start, value.stop, value.step)))


def _encode_slice(encoder: Encoder, value: slice) -> AnyNode:
    return nodes.Slice(*encoder.slots((value.start, value.stop, value.step)))


# --- containers; each is given a subclass's instance too, as what it holds ---


Build = Callable[[tuple[Slot, ...]], AnyNode]


def _hold(encoder: Encoder, value: Any, items: list[Any], build: Build) -> AnyNode:
    """A container with its items, unless they are too many."""
    if encoder.can_hold(items):
        return build(encoder.slots(items, is_paid=True))
    reason = f"it has {len(items)} elements: more than the record has room for"
    return encoder.leave_out(type(value), reason)


def _encode_tuple(encoder: Encoder, value: tuple[object, ...]) -> AnyNode:
    return _hold(encoder, value, list(tuple.__iter__(value)), nodes.Tuple)


def _encode_list(encoder: Encoder, value: list[object]) -> AnyNode:
    return _hold(encoder, value, list(list.__iter__(value)), nodes.List)


def _encode_set(encoder: Encoder, value: set[object]) -> AnyNode:
    items = list(set.__iter__(value))
    return _hold(encoder, value, items, lambda slots: nodes.Set(slots, False))


def _encode_frozenset(encoder: Encoder, value: frozenset[object]) -> AnyNode:
    items = list(frozenset.__iter__(value))
    return _hold(encoder, value, items, lambda slots: nodes.Set(slots, True))


def _encode_deque(encoder: Encoder, value: collections.deque[object]) -> AnyNode:
    limit = collections.deque.__dict__["maxlen"].__get__(value)
    items = list(collections.deque.__iter__(value))
    return _hold(encoder, value, items, lambda slots: nodes.Deque(slots, limit))


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


def dict_encoder(form: str) -> Callable[[Encoder, Any], AnyNode]:
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
HOLDERS: Mapping[type, Callable[[Encoder, Any], AnyNode]] = {
    tuple: _encode_tuple,
    list: _encode_list,
    set: _encode_set,
    frozenset: _encode_frozenset,
    collections.deque: _encode_deque,
    collections.OrderedDict: dict_encoder("ordered"),
    collections.defaultdict: dict_encoder("default"),
    dict: dict_encoder("dict"),
}
SCALARS: Mapping[type, Callable[[Encoder, Any], AnyNode]] = {
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    type(...): lambda _, __: nodes.Constant("Ellipsis"),
    type(NotImplemented): lambda _, __: nodes.Constant("NotImplemented"),
    range: _encode_range,
    slice: _encode_slice,
}
# OrderedDict and Counter have attributes too, which are seldom used: see instances.py.
# By id: a metaclass may have a hash of its own.
PLAIN: Mapping[int, Callable[[Encoder, Any], AnyNode]] = {
    id(cls): encode
    for cls, encode in (*SCALARS.items(), *HOLDERS.items())
    if cls is not collections.OrderedDict
}
