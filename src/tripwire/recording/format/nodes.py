"""Nodes: the closed set of things that a record can hold.

A record's objects are one flat table. A *slot* is a small plain value written as itself, or
`[n]`, the nth node of the table. So sharing and cycles are references to one node, nothing
nests deeply, and nothing in a file can name code to run: classes and functions are nodes too,
and stay data until a replay is trusted.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

Index = Annotated[int, msgspec.Meta(ge=0)]
Reference = tuple[Index]
# Floats that JSON can't write (nan, infinities), large ints and lone surrogates are nodes.
Slot = None | bool | int | float | str | Reference
Bits64 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Device = Annotated[str, msgspec.Meta(max_length=64)]
DictForm = Literal["dict", "ordered", "default", "counter"]
# "" a plain tensor, "grad" one that requires grad, "graph" one that an operation made that needs a
# gradient, "inference", "param", "frozen" a parameter without requires_grad
TensorKind = Literal["", "grad", "graph", "inference", "param", "frozen"]


class Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One thing in the table, written as `[tag, field, ...]`.

    Fields at the end that have their default are left out.
    """


# --- plain values ---


class BigInt(Node, tag="int", frozen=True):
    """An int beyond 64 bits, in hexadecimal."""

    digits: Annotated[str, msgspec.Meta(pattern=r"\A-?[0-9a-f]+\Z")]


class Bits(Node, tag="bits", frozen=True):
    """A float by its 64 bits, in hexadecimal."""

    digits: Bits64


class Complex(Node, tag="complex", frozen=True):
    """A complex number by the bits of its parts."""

    real: Bits64
    imag: Bits64


class Text(Node, tag="text", frozen=True):
    """A string that UTF-8 can't hold: its bytes with surrogates passed."""

    data: bytes


class String(Node, tag="str", frozen=True):
    """A long string: one node however often it is used."""

    text: str


class Bytes(Node, tag="bytes", frozen=True):
    """Bytes, or a bytearray."""

    data: bytes
    mutable: bool = False


class ConstantNode(Node, tag="const", frozen=True):
    """A constant of Python's."""

    name: Literal["Ellipsis", "NotImplemented"]


class Range(Node, tag="range", frozen=True):
    """A range."""

    start: Slot
    stop: Slot
    step: Slot


class Slice(Node, tag="slice", frozen=True):
    """A slice."""

    start: Slot
    stop: Slot
    step: Slot


# --- containers ---


class Tuple(Node, tag="tuple", frozen=True):
    """A tuple."""

    items: tuple[Slot, ...] = ()


class NamedTuple(Node, tag="ntuple", frozen=True):
    """An instance of a namedtuple's class."""

    cls: Reference
    items: tuple[Slot, ...]


class List(Node, tag="list", frozen=True):
    """A list."""

    items: tuple[Slot, ...] = ()


class Set(Node, tag="set", frozen=True):
    """A set or a frozenset."""

    items: tuple[Slot, ...] = ()
    frozen: bool = False


class Deque(Node, tag="deque", frozen=True):
    """A deque."""

    items: tuple[Slot, ...] = ()
    limit: int | None = None


class Dict(Node, tag="dict", frozen=True):
    """A dict, in its order."""

    keys: tuple[Slot, ...] = ()
    values: tuple[Slot, ...] = ()
    form: DictForm = "dict"
    factory: Slot = None


# --- tensors and arrays ---


class Tensor(Node, tag="tensor", frozen=True):
    """A contiguous tensor that is the whole of its storage.

    The blob in tensors.safetensors has its dtype and shape.
    """

    blob: Index
    kind: TensorKind = ""
    device: Device = "cpu"


class TensorView(Node, tag="view", frozen=True):
    """A tensor of any other form, over the bytes of a blob."""

    blob: Index
    shape: tuple[Index, ...]
    offset: Index = 0
    kind: TensorKind = ""
    dtype: str = "float32"
    stride: tuple[Index, ...] | None = None  # None: contiguous
    first: Index = 0  # where the blob begins in the storage, in bytes: unused ends are not kept
    device: Device = "cpu"
    conjugated: bool = False
    negated: bool = False

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides, also of a contiguous one."""
        return default_strides(self.shape) if self.stride is None else self.stride


def default_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch counts them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


Statistics = tuple[float, float, float, float, float, float, float]


class Withheld(Node, tag="withheld", frozen=True):
    """A tensor whose values were left out, by policy, by size, or because they can't be kept."""

    policy: Annotated[str, msgspec.Meta(pattern=r"\A(statistics|shape|redacted)\Z")]
    dtype: str
    shape: tuple[Index, ...]
    stride: tuple[Index, ...]
    device: str
    kind: TensorKind | Literal["array"] = ""
    # lowest, highest, mean, standard deviation of the finite values; then how many values
    # are nan, inf and -inf
    statistics: Statistics | None = None


class TensorExtras(Node, tag="extras", frozen=True):
    """What is attached to a tensor: its gradient, its class and its Python attributes."""

    tensor: Reference
    grad: Slot = None
    cls: Slot = None
    names: tuple[str, ...] = ()
    values: tuple[Slot, ...] = ()


class Array(Node, tag="array", frozen=True):
    """A NumPy array or scalar over the bytes of a blob."""

    blob: Index
    dtype: str
    shape: tuple[Index, ...]
    fortran: bool
    scalar: bool


class TorchValue(Node, tag="torch", frozen=True):
    """A dtype, device, layout, memory format or size, as torch prints it."""

    kind: str
    text: str


class Generator(Node, tag="generator", frozen=True):
    """A torch.Generator of one's own."""

    device: str
    state: Reference


# --- objects, classes, functions ---


class Object(Node, tag="object", frozen=True):
    """An instance: its class, its attributes, and what it holds as a list, dict, ... if it is one.

    `names` are the keys of its `__dict__`; `slots` those of its slots.
    """

    cls: Reference
    names: tuple[str, ...] = ()
    values: tuple[Slot, ...] = ()
    content: Slot = None
    slots: tuple[str, ...] = ()
    slot_values: tuple[Slot, ...] = ()


class ModuleForm(Node, tag="nnform", frozen=True):
    """What nn.Modules of one class have in common: the names of their attributes.

    `tables` are `_parameters`, `_buffers` and `_modules` where they hold something, each with how
    many; `keys` are the names in them, one table after another.
    """

    cls: Reference
    names: tuple[str, ...] = ()
    tables: tuple[tuple[str, Index], ...] = ()
    keys: tuple[str, ...] = ()


class ModuleObject(Node, tag="nn", frozen=True):
    """An nn.Module: the values of its form's names, then of the keys of each table.

    Attributes that aren't there are as in a fresh nn.Module.
    """

    form: Reference
    values: tuple[Slot, ...] = ()


class CallNode(Node, tag="call", frozen=True):
    """A value that a library's callable makes from its arguments: a date, a pattern, a path."""

    function: Reference  # a Library node
    args: tuple[Slot, ...] = ()


class EnumMember(Node, tag="member", frozen=True):
    """A member of an enum, by its value: flags can have members without a name."""

    cls: Reference
    name: str | None
    value: Slot


class Library(Node, tag="library", frozen=True):
    """Something of torch, the standard library or an installed package, by where it lies."""

    module: str
    name: str = ""  # "" for the module itself


class CellNode(Node, tag="cell", frozen=True):
    """A closure cell."""

    content: Slot = None
    empty: bool = False


class Function(Node, tag="function", frozen=True):
    """A Python function of the user's."""

    name: str
    qualname: str
    code: Index  # in the table of codes
    namespace: Reference
    defaults: Slot = None
    kwdefaults: Slot = None
    closure: tuple[Reference, ...] = ()
    attributes: Slot = None  # its `__dict__`
    # `__module__`, `__doc__` and `__annotations__`, where they aren't what its code gives
    special: Slot = None


class Wrapped(Node, tag="wrapped", frozen=True):
    """Something around functions: `form` says what, `parts` in the order of its constructor.

    "method" (function, self), "builtin" (self, name) a method of a C object, "member" (class,
    name) a slot's descriptor, "called" (function, *args) what a call gave, "partial" (function,
    args, names, values, attributes), "staticmethod", "classmethod", "property" (get, set,
    delete, doc), "cached_property" (function, name), "lru_cache" (function, maxsize, typed,
    attributes), "singledispatch" (function, types, functions, attributes), "weakref" (target),
    "proxy" (mapping) a read-only view, "derived" (class, form, parts, attributes) an instance
    of a class that is built on one of these; of tripwire: "compiled" and "dispatcher" (target,
    name, back end, fullgraph, cache size, options, check), "recorded" (function). Of typing:
    "alias" (origin, args), "generic" (origin, args), "union" (args), "typevar" (name, bound,
    constraints, covariant, contravariant, inferred), "forward" (text).
    """

    form: str
    parts: tuple[Slot, ...]


class Class(Node, tag="class", frozen=True):
    """A class of the user's. `form` is "plain", "dataclass", "enum" or "namedtuple".

    `detail` is what the form needs beyond the attributes: the parameters of `dataclass`, the
    members of an enum, the fields and defaults of a namedtuple.
    """

    name: str
    qualname: str
    module: str
    meta: Reference
    bases: tuple[Reference, ...]
    names: tuple[str, ...] = ()
    values: tuple[Slot, ...] = ()
    form: str = "plain"
    detail: Slot = None


class Namespace(Node, tag="namespace", frozen=True):
    """The globals of a user's module, as far as recorded code names them.

    `imports` are modules that the code imports when it runs.
    """

    module: str
    names: tuple[str, ...] = ()
    values: tuple[Slot, ...] = ()
    imports: tuple[Reference, ...] = ()


class Module(Node, tag="module", frozen=True):
    """A user's Python module as a value: a dummy with the attributes that were accessed.

    `namespace` is the Namespace of its functions; nodes with the same one are one module.
    """

    name: str
    names: tuple[str, ...] = ()
    values: tuple[Slot, ...] = ()
    namespace: Slot = None


class Opaque(Node, tag="opaque", frozen=True):
    """Something that a record can't hold: what it was, and why not."""

    cls: str
    reason: str


AnyNode = (
    BigInt
    | Bits
    | Complex
    | Text
    | String
    | Bytes
    | ConstantNode
    | Range
    | Slice
    | Tuple
    | NamedTuple
    | List
    | Set
    | Deque
    | Dict
    | Tensor
    | TensorView
    | Withheld
    | TensorExtras
    | Array
    | TorchValue
    | Generator
    | Object
    | ModuleForm
    | ModuleObject
    | CallNode
    | EnumMember
    | Library
    | CellNode
    | Function
    | Wrapped
    | Class
    | Namespace
    | Module
    | Opaque
)
NODE_TYPES: tuple[type[Node], ...] = typing.get_args(AnyNode)


class Code(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The code of one function: where its source lies, and its marshalled form."""

    name: str  # qualified, as the compiler gave it
    file: str  # as Python names it in tracebacks
    line: Index  # of its first line in that file
    source: str | None  # a member under src/; None where the source isn't known
    further: tuple[Index, Index]  # where the `def` or `lambda` stands: lines from there, column
    # A member under code/: a marshalled tuple of which this is the item with the index of this
    # code in the table; for the interpreter of the manifest alone.
    marshalled: str | None = None
    free: tuple[str, ...] = ()  # names of its closure cells
    flags: int = 0  # what its file imports from `__future__`
    lines: tuple[Index, Index] = (0, 0)  # its lines in `source`: how many before it, how many

    @property
    def place(self) -> tuple[int, int]:
        """Line and column of the `def` or `lambda` in its file."""
        return self.line + self.further[0], self.further[1]


class Table(msgspec.Struct, frozen=True):
    """Every node, every code, and the nodes that the record starts from."""

    roots: dict[str, Slot]
    nodes: tuple[AnyNode, ...]
    codes: tuple[Code, ...] = ()


# --- entries of dicts and lists, where the objects aren't filled yet ---


def read_dict(table: Table, slot: Slot) -> Iterator[tuple[str, Slot]]:
    """The entries of a dict with names for keys, from its node: it may not be filled yet."""
    node = table.nodes[slot[0]] if type(slot) is tuple else None
    if isinstance(node, Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield read_text(table, key), value


def read_items(table: Table, slot: Slot) -> tuple[Slot, ...]:
    """The items of a list or tuple, from its node."""
    node = table.nodes[slot[0]] if type(slot) is tuple else None
    return node.items if isinstance(node, (List, Tuple)) else ()


def read_text(table: Table, slot: Slot) -> str:
    """A string, from its slot."""
    if isinstance(slot, str):
        return slot
    node = table.nodes[slot[0]] if type(slot) is tuple else None
    if isinstance(node, String):
        return node.text
    raise ValueError("a name isn't a string")


def find_hook_ids(table: Table) -> Iterator[int]:
    """The ids under which hooks of modules and optimizers are kept."""
    for node in table.nodes:
        match node:
            case Object():
                names = node.names
            case ModuleObject():
                form = table.nodes[node.form[0]]
                names = form.names if isinstance(form, ModuleForm) else ()
            case _:
                continue
        for name, slot in zip(names, node.values, strict=False):  # more values are in tables
            hooks = table.nodes[slot[0]] if type(slot) is tuple else None
            if name.endswith("_hooks") and isinstance(hooks, Dict):
                yield from (key for key in hooks.keys if type(key) is int)
