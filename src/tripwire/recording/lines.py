"""Lines: what stands in objects.json for nodes that a model has hundreds of.

Most nodes are written as they are. Names are the bulk of a record that has few tensors, so a list
of them is one text: `training 4 - dtype loss_type - config`. Between the two dashes are attributes
that are None and have no value; 4 is the word of that number in the first line.
docs/record-format.md has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import digits
from typing import Annotated

import msgspec

from tripwire.recording import nodes
from tripwire.recording.blobs import BlobRun
from tripwire.recording.checks import NODE_TYPES, prepare
from tripwire.recording.container import damaged
from tripwire.recording.nodes import Index, Reference, Slot

# How many tensors, the number of the first one's blob, their kind, their device.
TensorRun = tuple[Index, Index, str, str]
Word = str | Index  # itself, or its number among the words of the first line

CODES, NODES, END = b',"codes":[', b'],"nodes":[', b"]}"


class Library(nodes.Node, tag="library", frozen=True):
    """Something of an installed package."""

    module: Word
    name: str = ""


class Object(nodes.Node, tag="object", frozen=True):
    """An instance. Attributes that are None have no value."""

    cls: Reference
    names: str = ""
    values: tuple[Slot, ...] = ()
    content: Slot = None
    slots: tuple[str, ...] = ()
    slot_values: tuple[Slot, ...] = ()


class Form(nodes.Node, tag="nnform", frozen=True):
    """Values that all modules of the form have: `columns` says which, in ascending order."""

    cls: Reference
    names: str = ""
    tables: str = ""
    keys: tuple[str, ...] = ()
    columns: tuple[Index, ...] = ()
    constants: tuple[Slot, ...] = ()


class Modules(nodes.Node, tag="nn", frozen=True):
    """So many modules of one form, one after another: the values of each that are its own."""

    form: Reference
    count: Annotated[int, msgspec.Meta(ge=1)]
    values: tuple[Slot, ...] = ()


class Extras(nodes.Node, tag="extras", frozen=True):
    """Tensors that have the same class and attributes, one after another, and their gradients."""

    tensors: tuple[Reference, ...]
    grads: tuple[Slot, ...] = ()  # none, or one for each
    cls: Slot = None
    names: str = ""
    values: tuple[Slot, ...] = ()


class More(nodes.Node, tag="more", frozen=True):
    """What the line before had no room for.

    Items of a container; keys and values of a dict; names and values of a class or module; values
    of modules. A single text: names of an object or of extras, with their values; names in the
    last table of a form; a piece of a string, or of bytes in base64.
    """

    items: tuple[Slot, ...] = ()
    values: tuple[Slot, ...] = ()


_REPLACED = (
    nodes.Library,
    nodes.Object,
    nodes.ModuleForm,
    nodes.ModuleObject,
    nodes.TensorExtras,
    nodes.Tensor,
)
LINES: tuple[type[nodes.Node], ...] = (
    *(cls for cls in NODE_TYPES if cls not in _REPLACED),
    *(Library, Object, Form, Modules, Extras, More),
)
prepare(LINES)
WITH_NAMES = (nodes.Class, nodes.Namespace, nodes.Module)
WITH_ITEMS = (nodes.List, nodes.Tuple, nodes.Set, nodes.Deque, nodes.NamedTuple)


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The first line. Tensors are numbered on from the last node."""

    roots: dict[str, Slot]
    count: Index  # of the nodes in the lines
    words: str = ""
    tensors: tuple[TensorRun, ...] = ()
    packed: tuple[BlobRun, ...] = ()  # blobs without an entry of their own in tensors.safetensors


# --- names as a text ---


def join_names(names: Iterable[tuple[str, bool]], words: Mapping[str, int]) -> str:
    """A text of names, each with whether it has no value."""
    tokens = []
    before = False
    for name, is_none in names:
        if is_none is not before:
            tokens.append(_TURN)
        tokens.append(str(words[name]) if name in words else _escape(name))
        before = is_none
    return " ".join(tokens)


def split_names(text: str, words: Sequence[str]) -> list[tuple[str, bool]]:
    """The names in a text that was checked, each with whether it has no value."""
    return [
        (words[int(token)] if token[0] in digits else _unescape(token), is_none)
        for token, is_none in _tokens(text)
    ]


def check_names(text: str, words: int) -> tuple[int, int]:
    """How many names a text has, and how many of them have a value.

    Raises `BadRecord` for a text that isn't one of names, or has numbers of no word.
    """
    counts = [0, 0]
    for token, is_none in _tokens(text):
        if not _NAME.fullmatch(token):
            raise damaged("a name in objects.json isn't one")
        if token[0] in digits and int(token) >= words:
            raise damaged("objects.json refers to a word that it doesn't have")
        counts[is_none] += 1
    return sum(counts), counts[False]


def _tokens(text: str) -> Iterator[tuple[str, bool]]:
    """Names and numbers of words, one at a time: a text of a hostile file may be long."""
    start = 0
    is_none = False
    while start < len(text):
        end = text.find(" ", start)
        end = len(text) if end < 0 else end
        token = text[start:end]
        if token == _TURN:
            is_none = not is_none
        else:
            yield token, is_none
        start = end + 1
    if text.endswith(" "):
        yield "", is_none


_TURN = "-"
_NAME = re.compile(r"[0-9]{1,9}|[^-0-9].*", re.DOTALL)
_ODD = re.compile(r"^[-0-9]|[ %]")
_ESCAPED = re.compile(r"%([0-9a-f]{2})")


def _escape(name: str) -> str:
    return _ODD.sub(lambda match: f"%{ord(match[0]):02x}", name) or "%"


def _unescape(name: str) -> str:
    return "" if name == "%" else _ESCAPED.sub(lambda match: chr(int(match[1], 16)), name)
