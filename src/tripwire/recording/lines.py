"""Lines: what stands in objects.json for nodes that a model has hundreds of.

Most nodes are written as they are. Those here share a line with others, or have names, which are
one text (see words.py), or references in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from tripwire.recording import nodes
from tripwire.recording.blobs import BlobRun
from tripwire.recording.checks import NODE_TYPES, find_slot_fields, prepare
from tripwire.recording.nodes import Index, Item, Items, Reference, Row, Slot

# How many tensors, the number of the first one's blob, their kind, their device.
TensorRun = tuple[Index, Index, str, str]
# As Python names it in tracebacks; its members under src/ and code/; its `__future__` imports.
File = tuple[str, str | None, str | None, int]
Count = Annotated[int, msgspec.Meta(ge=1)]
# Numbers of codes, the first and the last in a row: no references, though written like them.
CodeRow = Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=2, title="codes")]

CODES, NODES, END = b',"codes":[', b'],"nodes":[', b"]}"


class Tuple(nodes.Node, tag="tuple", frozen=True):
    """A tuple."""

    items: Items = ()


class List(nodes.Node, tag="list", frozen=True):
    """A list."""

    items: Items = ()


class Set(nodes.Node, tag="set", frozen=True):
    """A set or a frozenset."""

    items: Items = ()
    frozen: bool = False


class Dict(nodes.Node, tag="dict", frozen=True):
    """A dict, in its order."""

    keys: Items = ()
    values: Items = ()
    form: str = "dict"
    factory: Slot = None


class Deque(nodes.Node, tag="deque", frozen=True):
    """A deque."""

    items: Items = ()
    limit: int | None = None


class NamedTuple(nodes.Node, tag="ntuple", frozen=True):
    """An instance of a namedtuple's class."""

    cls: Reference
    items: Items


class Libraries(nodes.Node, tag="library", frozen=True):
    """Things of one module of an installed package, one after another; "%" is the module."""

    module: str
    names: str = "%"


class Object(nodes.Node, tag="object", frozen=True):
    """An instance. Attributes that are None have no value. The last names are those of slots."""

    cls: Reference
    names: str = ""
    values: tuple[Item, ...] = ()
    content: Slot = None
    slots: Index = 0


class Modules(nodes.Node, tag="nn", frozen=True):
    """nn.Modules of one form, one after another: the values of each that are its own.

    The last names are the keys of the tables, as many for each as `sizes` says. Values that all
    modules have: `columns` says which, in ascending order.
    """

    cls: Reference
    names: str = ""
    tables: str = ""
    sizes: tuple[Index, ...] = ()
    values: tuple[Item, ...] = ()
    count: Count = 1
    columns: tuple[Index, ...] = ()
    constants: tuple[Slot, ...] = ()


class Extras(nodes.Node, tag="extras", frozen=True):
    """Tensors that have the same class and attributes, one after another, and their gradients."""

    tensors: tuple[Row, ...]
    grads: tuple[Item, ...] = ()  # none, or one for each
    cls: Slot = None
    names: str = ""
    values: tuple[Item, ...] = ()


class Cells(nodes.Node, tag="cell", frozen=True):
    """Closure cells with their contents, one after another, and so many empty ones."""

    contents: tuple[Item, ...] = ()
    empty: Index = 0


class Functions(nodes.Node, tag="function", frozen=True):
    """Python functions that have all but their codes and closures in common, one after another.

    Each has as many cells. Without a name it has that of its code.
    """

    codes: tuple[CodeRow, ...]
    namespace: Reference
    closures: tuple[Row, ...] = ()
    defaults: Slot = None
    kwdefaults: Slot = None
    attributes: Slot = None
    special: Slot = None
    name: str | None = None
    qualname: str | None = None


class Class(nodes.Node, tag="class", frozen=True):
    """A class. Without `qualname` that is its name."""

    module: str
    name: str
    meta: Reference
    bases: tuple[Reference, ...]
    names: str = ""
    values: tuple[Item, ...] = ()
    form: str = "plain"
    detail: Slot = None
    qualname: str | None = None


class Namespace(nodes.Node, tag="namespace", frozen=True):
    """The globals of a user's module."""

    module: str
    names: str = ""
    values: tuple[Item, ...] = ()
    imports: tuple[Reference, ...] = ()


class Module(nodes.Node, tag="module", frozen=True):
    """A user's Python module as a value."""

    module: str
    names: str = ""
    values: tuple[Item, ...] = ()
    namespace: Slot = None


class More(nodes.Node, tag="more", frozen=True):
    """What the line before had no room for.

    Items of a container; keys and values of a dict; values of modules. A text: names of something
    with attributes, with their values; names of modules; a piece of a string, or of bytes in
    base64.
    """

    items: Items = ()
    values: Items = ()


class Again(nodes.Node, tag="again", frozen=True):
    """So many nodes more that are as the line before, each a node of its own."""

    count: Count


Attributed = Object | Extras | Class | Namespace | Module  # with names and values
_OWN = (
    *(Tuple, List, Set, Deque, NamedTuple, Dict, Object, Class, Namespace, Module),
    *(Libraries, Modules, Extras, Functions, Cells, More, Again),
)
_REPLACED = {cls.__struct_config__.tag for cls in (*_OWN, nodes.ModuleForm, nodes.Tensor)}
LINES: tuple[type[nodes.Node], ...] = (
    *(cls for cls in NODE_TYPES if cls.__struct_config__.tag not in _REPLACED),
    *_OWN,
)
prepare(LINES)


class Codes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Codes of one file in a row, by its number in the first line.

    Of each the line, how many lines further and in which column it is defined, how many lines of
    the source are its own, and how many of the free names.
    """

    file: Index
    names: str
    numbers: tuple[Index, ...]
    free: str = ""


NUMBERS = 5  # of each code


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The first line. Tensors are numbered on from the last node."""

    roots: dict[str, Slot]
    count: Index  # of the nodes in the lines
    pieces: str = ""
    words: str = ""
    tensors: tuple[TensorRun, ...] = ()
    packed: tuple[BlobRun, ...] = ()  # blobs without an entry of their own in tensors.safetensors
    files: tuple[File, ...] = ()


# --- references in a row ---


def items_of(line: nodes.Node) -> Iterator[Item]:
    """Every item of a line, in order, but for those that a text stands for."""
    for name, many in find_slot_fields(type(line)):
        value = getattr(line, name)
        if not many:
            yield value
        elif type(value) is not str:
            yield from value


def join_rows(slots: Iterable[Slot]) -> tuple[Item, ...]:
    """Slots, with neighbours that refer to one node after another as a row."""
    items: list[Item] = []
    for slot in slots:
        last = items[-1] if items else None
        if type(slot) is tuple and type(last) is tuple and slot[0] == last[-1] + 1:
            items[-1] = (last[0], slot[0])
        else:
            items.append(slot)
    return tuple(items)


def split_rows(items: Iterable[Item]) -> Iterator[Slot]:
    """The slots."""
    for item in items:
        if isinstance(item, tuple):
            for number in range(item[0], item[-1] + 1):
                yield (number,)
        else:
            yield item


def count_slots(items: Iterable[Item]) -> int:
    """How many slots these stand for."""
    return sum(item[-1] - item[0] + 1 if type(item) is tuple else 1 for item in items)
