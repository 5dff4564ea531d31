"""Checks: a file's claims are checked before anything is built from it.

Every reference must lead to a node, every blob must exist, every view must lie within its blob, and
every name must have its value. Each node is checked on its own, so that none has to be held in
memory. Whether a node that it refers to is of the right kind is checked when both are put together.
The sums are Python ints, so no shape is too large to be refused.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tripwire.errors import BadRecord
from tripwire.recording.format import nodes
from tripwire.recording.format.blobs import ITEM_SIZES, StoredBlobs
from tripwire.recording.format.container import OBJECTS, damaged
from tripwire.recording.format.nodes import NODE_TYPES
from tripwire.recording.format.rows import check_part, too_large

_INT64 = 1 << 63


# --- references ---


_MANY = (tuple[nodes.Slot, ...], tuple[nodes.Reference, ...])


@functools.cache
def find_slot_fields(cls: type[msgspec.Struct]) -> tuple[tuple[str, bool], ...]:
    """The fields of a node that are slots, each with whether it is many."""
    found = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if hint in (nodes.Slot, nodes.Reference):
            found.append((name, False))
        elif hint in _MANY:
            found.append((name, True))
    return tuple(found)


for _kind in NODE_TYPES:  # now: it compiles, and reading a record compiles nothing
    find_slot_fields(_kind)


def slots_of(node: nodes.Node) -> Iterator[nodes.Slot]:
    """Every slot of a node, in order."""
    for name, many in find_slot_fields(type(node)):
        value = getattr(node, name)
        if many:
            yield from value
        else:
            yield value


def _check_slot(slot: nodes.Slot, count: int) -> None:
    if type(slot) is tuple and slot[0] >= count:
        raise damaged(f"{OBJECTS} refers to a node that it doesn't have")
    if type(slot) is int and not -_INT64 <= slot < _INT64:
        raise damaged(f"a number in {OBJECTS} has more than 64 bits")


# --- tables ---


class TableCheck:
    """Goes through a table once, part by part, and raises `BadRecord` where it can't be built."""

    def __init__(
        self,
        roots: Mapping[str, nodes.Slot],
        sizes: TableSizes,
        blobs: StoredBlobs,
        members: Mapping[str, object],
    ) -> None:
        self._roots = roots
        self._sizes = sizes
        self._blobs = blobs
        self._members = members
        self._copies = sizes.copies  # bytes that arrays may still take
        self._begun: msgspec.Struct | None = None  # what is to go on
        for name, slot in roots.items():
            _check_slot(slot, sizes.nodes)
            if name in _ROOTS and type(slot) is not tuple:
                raise _no_root(name)

    def check_code(self, code: nodes.Code, is_whole: bool) -> None:
        """One part of the code of a function."""
        self._check_begun(code, is_whole)
        _check_member(code.source, "src/", self._members)
        _check_member(code.marshalled, "code/", self._members)

    def check_node(self, number: int, node: nodes.Node, is_whole: bool) -> None:
        """One part of a node."""
        self._check_begun(node, is_whole)
        for slot in slots_of(node):
            _check_slot(slot, self._sizes.nodes)
        check = _CHECKS.get(type(node))
        if check is not None:
            check(node, self._sizes, self._blobs)
        if isinstance(node, nodes.Array):
            self._copies -= self._blobs[node.blob].size
            if self._copies < 0:
                raise too_large("Copies of arrays")
        for name, wanted in _ROOTS.items():
            if self._roots.get(name) == (number,) and not isinstance(node, (wanted, nodes.Opaque)):
                raise _no_root(name)

    def _check_begun(self, part: msgspec.Struct, is_whole: bool) -> None:
        if self._begun is not None:
            check_part(self._begun, part)
        self._begun = None if is_whole else self._begun or part


@dataclass(frozen=True, slots=True)
class TableSizes:
    """How many nodes and codes a table says that it has; how many bytes its arrays may take.

    Each array has its own copy of its blob's bytes.
    """

    nodes: int
    codes: int
    copies: int


def _check_member(name: str | None, folder: str, members: Mapping[str, object]) -> None:
    if name is not None and not (name.startswith(folder) and name in members):
        raise damaged(f"a source or code that {OBJECTS} names isn't there")


def _no_root(name: str) -> BadRecord:
    return damaged(f"its {name} are no {_ROOTS[name].__name__.lower()}")


# What the roots of a call are; or opaque, where there was no room for one.
_ROOTS: Mapping[str, type[nodes.Node]] = {
    "args": nodes.Tuple,
    "kwargs": nodes.Dict,
    "locals": nodes.Dict,
    "builtins": nodes.Dict,
    "accessed": nodes.Dict,
    "code_options": nodes.Dict,
    "generators": nodes.Dict,
    "patches": nodes.List,
}


# --- nodes ---


def _check_pairs(names: Sequence[object], values: Sequence[object]) -> None:
    if len(names) != len(values):
        raise damaged("the numbers of names or keys and of values differ")


_Named = nodes.TensorExtras | nodes.Class | nodes.Namespace | nodes.Module


def _check_named(node: _Named, *_: object) -> None:
    _check_pairs(node.names, node.values)


def _check_object(node: nodes.Object, *_: object) -> None:
    _check_pairs(node.names, node.values)
    _check_pairs(node.slots, node.slot_values)


def _check_function(node: nodes.Function, sizes: TableSizes, _: object) -> None:
    if node.code >= sizes.codes:
        raise damaged(f"{OBJECTS} refers to a code that it doesn't have")


def _check_range(node: nodes.Range, *_: object) -> None:
    for slot in (node.start, node.stop, node.step):
        if type(slot) is not int and type(slot) is not tuple:  # a large int is a node
            raise damaged("a range isn't made of ints")
    if node.step == 0:
        raise damaged("a range has the step 0")


def _check_geometry(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    if dtype not in ITEM_SIZES:
        raise damaged("a tensor has a dtype that isn't known")
    if len(shape) != len(stride) or len(shape) > 64:
        raise damaged("a tensor has another number of strides than of sizes")
    if any(number >= 1 << 62 for number in (*shape, *stride)) or math.prod(shape) >= 1 << 62:
        raise damaged("a tensor has a shape that no tensor has")


def _check_blob(blob: int, blobs: StoredBlobs) -> None:
    if blob >= len(blobs):
        raise damaged(f"{OBJECTS} refers to a blob that isn't there")


def _check_view(node: nodes.TensorView, _: object, blobs: StoredBlobs) -> None:
    _check_blob(node.blob, blobs)
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
    if node.kind != "array":
        _check_geometry(node.dtype, node.shape, node.stride)


def _check_array(node: nodes.Array, _: object, blobs: StoredBlobs) -> None:
    _check_blob(node.blob, blobs)
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

_CHECKS: Mapping[type, Callable[[typing.Any, TableSizes, StoredBlobs], None]] = {
    nodes.Range: _check_range,
    nodes.Dict: lambda node, *_: _check_pairs(node.keys, node.values),
    nodes.Tensor: lambda node, _, blobs: _check_blob(node.blob, blobs),
    nodes.TensorView: _check_view,
    nodes.Withheld: _check_withheld,
    nodes.TensorExtras: _check_named,
    nodes.Array: _check_array,
    nodes.Object: _check_object,
    nodes.Function: _check_function,
    nodes.Wrapped: _check_wrapped,
    nodes.Class: _check_named,
    nodes.Namespace: _check_named,
    nodes.Module: _check_named,
}
