"""Lines: what stands in objects.json for nodes that a model has hundreds of.

Most nodes are written as they are. Names are the bulk of a record that has few tensors, so a list
of them is one text: `training 4 - dtype loss_type - layers.7 2:5`. Between the two dashes are
attributes that are None and have no value; 4 is the word of that number in the first line, as is
the 7 in a name of two parts; 2:5 is four words in a row.
docs/record-format.md has the rules.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import digits
from typing import Annotated, TypeGuard, cast

import msgspec

from tripwire.recording import nodes
from tripwire.recording.blobs import BlobRun
from tripwire.recording.checks import NODE_TYPES, find_slot_fields, prepare
from tripwire.recording.container import damaged
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


# --- names as a text ---


def join_names(names: Iterable[tuple[str, bool]], words: Mapping[str, int]) -> str:
    """A text of names, each with whether it has no value."""
    tokens: list[str] = []
    first = last = -1  # the words in a row that the last token is
    before = False
    for name, is_none in names:
        number = words.get(name)
        if is_none is not before:
            tokens.append(_TURN)
            last = -1
        before = is_none
        if number is None:
            tokens.append(".".join(_spell_part(part, words) for part in name.split(".")) or _EMPTY)
            last = -1
        elif last >= 0 and number == last + 1:
            last = number
            tokens[-1] = f"{first}:{last}"
        else:
            tokens.append(str(number))
            first = last = number
    return " ".join(tokens)


def are_names(slots: Sequence[object]) -> TypeGuard[Sequence[str]]:
    """Whether these are strings that stand in a text as they are, but for their words."""
    if not slots or not all(type(slot) is str for slot in slots):
        return False
    text = " ".join(cast("Sequence[str]", slots))
    return text.count(" ") == len(slots) - 1 and not _ODD_TEXT.search(text)


def split_names(text: str, words: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The names in a text that was checked, each with whether it has no value."""
    for token, is_none in _tokens(text):
        row = _ROW.fullmatch(token)
        if row is None:
            yield ".".join(_read_part(part, words) for part in token.split(".")), is_none
            continue
        for number in range(int(row[1]), int(row[2] or row[1]) + 1):
            yield words[number], is_none


class NameCount(typing.NamedTuple):
    """How many names a text has, how many of them have a value, and how much longer they are."""

    names: int
    given: int
    added: int


def count_names(text: str, words: Sequence[int]) -> NameCount:
    """Count the names in a text. `words` are the lengths of those that it may refer to.

    Raises `BadRecord` for a text that isn't one of names, or has numbers of no word.
    """
    counts = [0, 0]
    added = 0
    for token, is_none in _tokens(text):
        row = _ROW.fullmatch(token)
        if row is not None:
            first, last = int(row[1]), int(row[2] or row[1])
            if first > last or last >= len(words):
                raise damaged("objects.json refers to a word that it doesn't have")
            counts[is_none] += last - first + 1
            continue
        counts[is_none] += 1
        for part in _split(token, "."):
            if not token or not _PART.fullmatch(part):
                raise damaged("a name in objects.json isn't one")
            if token != _EMPTY and "%" in part and "%" in _ESCAPED.sub("", part):
                raise damaged("a name in objects.json isn't one")
            if part and part[0] in digits:
                if int(part) >= len(words):
                    raise damaged("objects.json refers to a word that it doesn't have")
                added += words[int(part)]
    return NameCount(sum(counts), counts[False], added)


def _tokens(text: str) -> Iterator[tuple[str, bool]]:
    """What stands between the spaces, with whether it is of None."""
    is_none = False
    for token in _split(text, " ") if text else ():
        if token == _TURN:
            is_none = not is_none
        else:
            yield token, is_none


def _split(text: str, separator: str) -> Iterator[str]:
    """One piece at a time: a text of a hostile file may be long."""
    start = 0
    while (end := text.find(separator, start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


_TURN = "-"
_ROW = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?")
_PART = re.compile(r"[0-9]{1,9}|[^-0-9].*|", re.DOTALL)
_EMPTY = "%"
# A reader counts brackets, commas and quotation marks, so a name has none.
_ODD = re.compile(r'^[-0-9]|[ %\[{,"]')
_ODD_TEXT = re.compile(r'^$|^ | $|  |[%\[{,"]|(?:^|[ .])[-0-9]')
_ESCAPED = re.compile(r"%([0-9a-f]{2})")


def _spell_part(part: str, words: Mapping[str, int]) -> str:
    if part in words:
        return str(words[part])
    return _ODD.sub(lambda match: f"%{ord(match[0]):02x}", part)


def _read_part(part: str, words: Sequence[str]) -> str:
    if part and part[0] in digits:
        return words[int(part)]
    return "" if part == _EMPTY else _ESCAPED.sub(lambda match: chr(int(match[1], 16)), part)
