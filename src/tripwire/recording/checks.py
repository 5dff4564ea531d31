"""Checks: what a table says must be possible before anything is built from it.

Every reference leads to a node, every blob exists, every view lies within its blob. One node is
looked at by itself, so that a file can be checked without being held. The sums are Python ints, so
no shape is too large to be refused.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tripwire.recording import nodes
from tripwire.recording.blobs import ITEM_SIZES, StoredBlobs
from tripwire.recording.container import damaged

# What the JSON of a whole table may take when it is decoded: as much as the file, or this.
MEMORY_FLOOR = 32 << 20
# The same for one line of it, which is all that is held while a file is checked.
LARGEST_LINE = 1 << 19
LARGEST_HEAD = 1 << 21  # for the first: it has the shapes of all blobs
# What JSON takes, beside its text: a list, an item of one, half of a string.
LIST, ITEM, _QUOTE = 64, 32, 24
# What is built of it, beyond that: a node, a name in a text, a part of one, an entry in a dict, a
# reference.
NODE, NAME, PART, ENTRY, REFERENCE = 128, 64, 32, 64, 96

_INT64 = 1 << 63
_KINDS = ("", "grad", "graph", "inference", "param", "frozen")
_HEX = frozenset("0123456789abcdef-")


def estimate_memory(text: bytes) -> int:
    """At most what decoding this JSON allocates: lists and structs, their items, strings."""
    lists = text.count(b"[") + text.count(b"{")
    return LIST * lists + ITEM * text.count(b",") + _QUOTE * text.count(b'"') + len(text)


# --- references ---


_MANY = (
    *(tuple[nodes.Slot, ...], tuple[nodes.Reference, ...]),
    *(tuple[nodes.Item, ...], tuple[nodes.Row, ...], nodes.Items),
)


@functools.cache
def find_slot_fields(cls: type[msgspec.Struct]) -> tuple[tuple[str, bool], ...]:
    """The fields of a node or line that are slots, each with whether it is many."""
    found = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if hint in (nodes.Slot, nodes.Reference):
            found.append((name, False))
        elif hint in _MANY:
            found.append((name, True))
    return tuple(found)


def prepare(kinds: Iterable[type[msgspec.Struct]]) -> None:
    """Find the slots of these kinds now: it compiles, and reading a record compiles nothing."""
    for kind in kinds:
        find_slot_fields(kind)


NODE_TYPES: tuple[type[nodes.Node], ...] = typing.get_args(nodes.AnyNode)
prepare(NODE_TYPES)


def slots_of(node: nodes.Node) -> Iterator[nodes.Slot]:
    """Every slot of a node, in order."""
    for name, many in find_slot_fields(type(node)):
        value = getattr(node, name)
        if many:
            yield from value
        else:
            yield value


def check_slot(slot: nodes.Item, count: int) -> None:
    """Raise `BadRecord` for references to nodes that aren't among so many."""
    if type(slot) is tuple and not slot[0] <= slot[-1] < count:
        raise damaged("objects.json refers to a node that it doesn't have")
    if type(slot) is int and not -_INT64 <= slot < _INT64:
        raise damaged("a number in objects.json has more than 64 bits")


# --- nodes ---


def check_node(node: nodes.Node, blobs: StoredBlobs) -> None:
    """Raise `BadRecord` for a node that can't be built; its slots were checked."""
    check = _CHECKS.get(type(node))
    if check is not None:
        check(node, blobs)


def check_root(name: str, line: nodes.Node | None) -> None:
    """Raise `BadRecord` for a root of a call that isn't what its name says."""
    wanted = ROOTS[name]
    found = None if line is None else line.__struct_config__.tag
    if found not in (wanted, "opaque"):  # opaque: there was no room for it
        raise damaged(f"its {name} are no {wanted}")


def check_names(table: nodes.Table) -> None:
    """The same for arguments and generators that have no names."""
    for name in _NAMED:
        slot = table.roots.get(name)
        node = table.nodes[slot[0]] if type(slot) is tuple else None
        for key in node.keys if isinstance(node, nodes.Dict) else ():
            _check_name(table, key)


def _check_name(table: nodes.Table, key: nodes.Slot) -> None:
    node = table.nodes[key[0]] if type(key) is tuple else None
    if type(key) is not str and not isinstance(node, (nodes.String, nodes.Text)):
        raise damaged("the name of an argument or of a generator isn't a text")


# What a root is, by the tag of its line.
ROOTS: Mapping[str, str] = {
    "args": "tuple",
    "kwargs": "dict",
    "locals": "dict",
    "builtins": "dict",
    "code_options": "dict",
    "generators": "dict",
    "patches": "list",
}
_NAMED = ("locals", "generators")  # with texts for keys; a keyword may be of a class of its own


def check_member(name: str | None, folder: str, members: Mapping[str, object]) -> None:
    """Raise `BadRecord` for source or code that isn't in the file."""
    if name is not None and not (name.startswith(folder) and name in members):
        raise damaged("a source or code that objects.json names isn't there")


def check_tensors(count: int, blob: int, kind: str, device: str, blobs: StoredBlobs) -> None:
    """The same for tensors that are one blob each."""
    if blob + count > len(blobs):
        raise damaged("objects.json refers to a blob that isn't there")
    _check_kind(kind)
    if len(device) > 64:
        raise damaged("a tensor has a device that isn't one")


DICT_FORMS = ("dict", "ordered", "default", "counter")


def _check_digits(text: str, length: int | None = None) -> None:
    if not text or not _HEX.issuperset(text) or "-" in text[1:] or text == "-":
        raise damaged("a number isn't hexadecimal")
    if length is not None and (len(text) != length or "-" in text):
        raise damaged("a number has the wrong length")


def _check_int(node: nodes.BigInt, *_: object) -> None:
    _check_digits(node.digits)


def _check_bits(node: nodes.Bits, *_: object) -> None:
    _check_digits(node.digits, 16)


def _check_complex(node: nodes.Complex, *_: object) -> None:
    _check_digits(node.real, 16)
    _check_digits(node.imag, 16)


def _check_constant(node: nodes.Constant, *_: object) -> None:
    if node.name not in ("Ellipsis", "NotImplemented"):
        raise damaged("a constant has a name that isn't known")


def _check_range(node: nodes.Range, *_: object) -> None:
    for slot in (node.start, node.stop, node.step):
        if type(slot) is not int and type(slot) is not tuple:  # a large int is a node
            raise damaged("a range isn't made of ints")
    if node.step == 0:
        raise damaged("a range has the step 0")


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        raise damaged("a tensor has a kind that isn't known")


def _check_geometry(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    if dtype not in ITEM_SIZES:
        raise damaged("a tensor has a dtype that isn't known")
    if len(shape) != len(stride) or len(shape) > 64:
        raise damaged("a tensor has another number of strides than of sizes")
    if any(number >= 1 << 62 for number in (*shape, *stride)) or math.prod(shape) >= 1 << 62:
        raise damaged("a tensor has a shape that no tensor has")


def _check_view(node: nodes.TensorView, blobs: StoredBlobs) -> None:
    if node.blob >= len(blobs):
        raise damaged("objects.json refers to a blob that isn't there")
    _check_kind(node.kind)
    stride = node.strides
    _check_geometry(node.dtype, node.shape, stride)
    item = ITEM_SIZES[node.dtype]
    if 0 in node.shape:
        return
    if node.first % item:
        raise damaged("a tensor begins inside an element")
    low = node.offset * item - node.first
    span = sum((size - 1) * step for size, step in zip(node.shape, stride, strict=True))
    high = low + (span + 1) * item
    if low < 0 or high > blobs[node.blob].size:
        raise damaged("a tensor reaches beyond its blob")
    if (node.conjugated or node.negated) and not _can_flip(node):
        raise damaged("a tensor that isn't complex is conjugated")


def _can_flip(node: nodes.TensorView) -> bool:
    return node.dtype.startswith("complex") or (not node.conjugated and node.dtype.startswith("fl"))


def _check_withheld(node: nodes.Withheld, *_: object) -> None:
    if node.policy not in ("statistics", "shape", "redacted"):
        raise damaged("a tensor was left out by a policy that isn't known")
    if node.statistics is not None and len(node.statistics) != 7:
        raise damaged("a tensor's statistics aren't seven numbers")
    if node.kind == "array":
        return
    _check_kind(node.kind)
    _check_geometry(node.dtype, node.shape, node.stride)


def _check_array(node: nodes.Array, blobs: StoredBlobs) -> None:
    if node.blob >= len(blobs):
        raise damaged("objects.json refers to a blob that isn't there")
    if len(node.shape) > 64 or any(size >= 1 << 62 for size in node.shape):
        raise damaged("an array has a shape that no array has")
    size = array_item_size(node.dtype)
    if size is None or math.prod(node.shape) * size != blobs[node.blob].size:
        raise damaged("an array isn't as large as its blob")
    if node.scalar and node.shape:
        raise damaged("a scalar has a shape")


def array_item_size(dtype: str) -> int | None:
    """Bytes per element of a NumPy dtype written as `<f8`; None for one that isn't plain."""
    order, kind, digits = dtype[:1], dtype[1:2], dtype[2:].partition("[")[0]
    if order not in "<>|" or not digits.isdecimal() or not digits.isascii() or len(digits) > 9:
        return None
    if kind not in "biufcSUVmM" or (dtype.count("[") and kind not in "mM"):
        return None
    return int(digits) * (4 if kind == "U" else 1)


def _check_wrapped(node: nodes.Wrapped, *_: object) -> None:
    count = WRAPPED.get(node.form)
    if count is None:
        raise damaged("something is wrapped in a form that isn't known")
    if len(node.parts) != count and (node.form != "called" or not node.parts):
        raise damaged(f"a {node.form} has another number of parts than it is made of")


# The forms of `wrapped`, and how many parts each has; "called" has any number of arguments.
WRAPPED: Mapping[str, int] = {
    "method": 2,
    "builtin": 2,
    "member": 2,
    "called": 1,
    "partial": 5,
    "staticmethod": 1,
    "classmethod": 1,
    "property": 4,
    "cached_property": 2,
    "lru_cache": 4,
    "singledispatch": 4,
    "weakref": 1,
    "proxy": 1,
    "derived": 4,
    "compiled": 7,
    "dispatcher": 7,
    "recorded": 1,
    "alias": 2,
    "generic": 2,
    "union": 1,
    "typevar": 6,
    "forward": 1,
}

_CHECKS: Mapping[type, typing.Callable[[typing.Any, StoredBlobs], None]] = {
    nodes.BigInt: _check_int,
    nodes.Bits: _check_bits,
    nodes.Complex: _check_complex,
    nodes.Constant: _check_constant,
    nodes.Range: _check_range,
    nodes.TensorView: _check_view,
    nodes.Withheld: _check_withheld,
    nodes.Array: _check_array,
    nodes.Wrapped: _check_wrapped,
}
