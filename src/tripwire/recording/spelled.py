"""Spelled: the text of objects.json, checked line by line, then built.

docs/record-format.md has the rules, recording/spelling.py the other direction.
"""

from __future__ import annotations

import binascii
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Union, cast

import msgspec

from tripwire.errors import BadRecord
from tripwire.recording import lines, nodes
from tripwire.recording.blobs import StoredBlobs
from tripwire.recording.checks import (
    LARGEST_LINE,
    MEMORY_FLOOR,
    ROOTS,
    check_code,
    check_node,
    check_root,
    check_slot,
    check_tensors,
    estimate_memory,
    slots_of,
)
from tripwire.recording.container import damaged
from tripwire.recording.lines import check_names, split_names
from tripwire.recording.nodes import AnyNode, Slot

# What is built of a line, beyond its own JSON: a node, a name of an attribute, an entry in a dict.
_NODE, _NAME, _ENTRY = 128, 64, 64
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Spelled:
    """The text of a table, its first line read."""

    text: bytes
    head: lines.Head
    code_lines: tuple[int, int]  # where they begin and end
    node_lines: tuple[int, int]

    @staticmethod
    def of(text: bytes, file_size: int) -> Spelled:
        """Read the first line; refuse what would take more memory than a table may."""
        if estimate_memory(text) > max(MEMORY_FLOOR, file_size):
            raise _too_large(len(text))
        first = text.find(b"\n")
        middle = text.find(b"\n" + lines.NODES + b"\n", first)
        if first < 0 or middle < 0 or not text.endswith(b"\n" + lines.END):
            raise damaged("objects.json isn't laid out in lines")
        line = text[:first]
        _check_line(line, file_size)
        if not line.endswith(lines.CODES):
            raise damaged("objects.json isn't laid out in lines")
        head = _decode(line.removesuffix(lines.CODES) + b"}", _HEAD)
        start = middle + len(lines.NODES) + 2
        return Spelled(text, head, (first + 1, middle), (start, len(text) - len(lines.END) - 1))

    def check(self, blobs: StoredBlobs, members: Mapping[str, object], file_size: int) -> None:
        """Raise `BadRecord` for a table that can't be built; keep nothing of it meanwhile."""
        for line in _lines(self.text, *self.code_lines):
            _check_line(line, file_size)
            check_code(_decode(line, _CODE), members)
        check = _LineCheck(self, blobs, file_size)
        for line in _lines(self.text, *self.node_lines):
            _check_line(line, file_size)
            check.take(_decode(line, _NODE_LINE))
        check.finish()

    def build(self) -> nodes.Table:
        """The table, of a text that was checked."""
        codes = tuple(_decode(line, _CODE) for line in _lines(self.text, *self.code_lines))
        builder = _Builder([word for word, _ in split_names(self.head.words, ())])
        for line in _lines(self.text, *self.node_lines):
            builder.take(_decode(line, _NODE_LINE))
        found = builder.finish()
        for count, blob, kind, device in self.head.tensors:
            found += [nodes.Tensor(blob + i, kind, device) for i in range(count)]
        return nodes.Table(self.head.roots, tuple(found), codes)


def _lines(text: bytes, start: int, end: int) -> Iterator[bytes]:
    """The lines of a part, without the commas between them. No line: `end` is before `start`."""
    while start <= end:
        stop = text.find(b"\n", start, end)
        is_last = stop < 0
        stop = end if is_last else stop
        if (text[stop - 1 : stop] == b",") is is_last:
            raise damaged("a line of objects.json ends as it can't")
        yield text[start : stop if is_last else stop - 1]
        start = stop + 1


def _check_line(line: bytes, file_size: int) -> None:
    """A line is held while it is checked, so it may not take much."""
    if len(line) > LARGEST_LINE // 64:
        if estimate_memory(line) > max(LARGEST_LINE, file_size // 8):
            raise _too_large(len(line))


# --- building ---


class _Builder:
    """Nodes of lines that were checked."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._found: list[AnyNode] = []
        self._forms: list[lines.Form] = []  # their nodes come first
        self._line: nodes.Node | None = None
        self._more: list[lines.More] = []  # what follows that line

    def take(self, line: nodes.Node) -> None:
        """The next line."""
        if isinstance(line, lines.More):
            self._more.append(line)
        else:
            self._end_line()
            self._line = line

    def finish(self) -> list[AnyNode]:
        """All nodes."""
        self._end_line()
        return self._found

    def _end_line(self) -> None:
        if self._line is not None:
            self._found += self._build(self._line)
        self._line = None
        self._more = []

    def _build(self, line: nodes.Node) -> Iterable[AnyNode]:
        replace = msgspec.structs.replace
        match line:
            case lines.Library():
                module = self._words[line.module] if isinstance(line.module, int) else line.module
                return (nodes.Library(module, line.name),)
            case lines.Object():
                names, values = self._attributes(line)
                rest = line.content, line.slots, line.slot_values
                return (nodes.Object(line.cls, names, values, *rest),)
            case lines.Form():
                self._forms.append(line)
                tables = [[text] for text in line.keys]
                if tables:
                    tables[-1] += self._pieces()
                keys = tuple(self._spread(*texts) for texts in tables)
                names, held = self._spread(line.names), self._spread(line.tables)
                return (nodes.ModuleForm(line.cls, names, held, keys),)
            case lines.Modules():
                return _part_modules(line, self._items(line.values), self._forms[line.form[0]])
            case lines.Extras():
                names, values = self._attributes(line)
                pairs = itertools.zip_longest(line.tensors, line.grads)
                return [nodes.TensorExtras(*pair, line.cls, names, values) for pair in pairs]
            case nodes.Dict():
                values = self._values(line.values)
                return (replace(line, keys=self._items(line.keys), values=values),)
            case nodes.String():
                return (nodes.String("".join((line.text, *self._pieces()))),)
            case nodes.Bytes() | nodes.Text():
                pieces = map(binascii.a2b_base64, self._pieces())
                return (replace(line, data=b"".join((line.data, *pieces))),)
            case _ if isinstance(line, lines.WITH_NAMES):
                values = self._values(line.values)
                return (replace(line, names=self._items(line.names), values=values),)
            case _ if isinstance(line, lines.WITH_ITEMS):
                return (replace(line, items=self._items(line.items)),)
        return (cast("AnyNode", line),)

    def _items(self, first: tuple[Slot, ...]) -> tuple[Slot, ...]:
        return (*first, *(slot for more in self._more for slot in more.items))

    def _values(self, first: tuple[Slot, ...]) -> tuple[Slot, ...]:
        return (*first, *(slot for more in self._more for slot in more.values))

    def _pieces(self) -> Iterator[str]:
        return (cast("str", more.items[0]) for more in self._more)

    def _spread(self, *texts: str) -> tuple[str, ...]:
        return tuple(name for text in texts for name, _ in split_names(text, self._words))

    def _attributes(
        self, line: lines.Object | lines.Extras
    ) -> tuple[tuple[str, ...], tuple[Slot, ...]]:
        names: list[str] = []
        values: list[Slot] = []
        parts = ((cast("str", more.items[0]), more.values) for more in self._more)
        for text, known in ((line.names, line.values), *parts):
            given = iter(known)
            for name, is_none in split_names(text, self._words):
                names.append(name)
                values.append(None if is_none else next(given))
        return tuple(names), tuple(values)


def _part_modules(
    line: lines.Modules, values: tuple[Slot, ...], form: lines.Form
) -> Iterator[nodes.ModuleObject]:
    """Each module, with the values that the form has for all."""
    width = len(values) // line.count
    row: list[Slot] = [None] * (width + len(form.columns))
    for column, constant in zip(form.columns, form.constants, strict=True):
        row[column] = constant
    shared = set(form.columns)
    own = [column for column in range(len(row)) if column not in shared]
    for start in range(0, line.count * width, width) if width else [0] * line.count:
        for column, value in zip(own, values[start : start + width], strict=True):
            row[column] = value
        yield nodes.ModuleObject(line.form, tuple(row))


# --- checking ---


class _LineCheck:
    """What a pass over the lines has to remember: a few bytes for each form."""

    def __init__(self, spelled: Spelled, blobs: StoredBlobs, file_size: int) -> None:
        self._blobs = blobs
        self._room = max(MEMORY_FLOOR, file_size) - estimate_memory(spelled.text)
        self._widths: list[int] = []  # how many values the modules of a form have
        self._shared: list[int] = []  # how many of them the form gives
        self._last = -1  # the last of those, in the latest form
        self._before: nodes.Node = lines.Form((0,))
        self._owed = 0  # values that modules still need
        self._tensors = 0  # those of the latest extras
        self._words = 0  # words refer to none
        self._words = self._count(spelled.head.words)
        self._left = spelled.head.count
        self._nodes = self._left + sum(run[0] for run in spelled.head.tensors)
        for count, blob, kind, device in spelled.head.tensors:
            self._spend(_NODE * count)
            check_tensors(count, blob, kind, device, blobs)
        self._count_all = self._left
        self._roots: dict[int, list[str]] = {}  # those that are still to be seen, by their nodes
        for name, slot in spelled.head.roots.items():
            check_slot(slot, self._nodes)
            if name in ROOTS:
                at = slot[0] if type(slot) is tuple else self._nodes
                self._roots.setdefault(at, []).append(name)

    def take(self, line: nodes.Node) -> None:
        """The next line."""
        for slot in slots_of(line):
            check_slot(slot, self._nodes)
        if isinstance(line, lines.More):
            self._take_more(line)
            return
        self._end_line()
        for name in self._roots.pop(self._count_all - self._left, ()):
            check_root(name, line)
        match line:
            case lines.Form():
                self._take_form(line)
            case lines.Modules():
                self._take_modules(line)
            case lines.Object():
                if len(line.slots) != len(line.slot_values):
                    raise damaged("an object has another number of slots than of values")
                self._check_attributes(line.names, line.values)
            case lines.Extras():
                self._take_extras(line)
            case lines.Library():
                if isinstance(line.module, int) and line.module >= self._words:
                    raise damaged("objects.json refers to a word that it doesn't have")
            case _:
                check_node(line, self._blobs)
        self._before = line
        self._left -= _count_nodes(line)

    def finish(self) -> None:
        """All lines were seen."""
        self._end_line()
        if self._left:
            raise damaged("objects.json has another number of nodes than it says")
        for names in self._roots.values():  # a plain value, a tensor, a module
            check_root(names[0], None)

    def _end_line(self) -> None:
        """Nothing more of a line follows."""
        if self._owed:
            raise damaged("a module has another number of values than its form has names")
        if isinstance(self._before, lines.Form) and self._widths:
            if self._last >= self._widths[-1]:
                raise damaged("a form has a value where there is no place")

    def _take_more(self, line: lines.More) -> None:
        match self._before:
            case lines.Object():
                self._check_attributes(_only_text(line), line.values)
                return
            case lines.Extras():
                names = self._check_attributes(_only_text(line), line.values)
                self._spend(_ENTRY * names * (self._tensors - 1))
                return
            case nodes.Dict():
                if len(line.items) != len(line.values):
                    raise damaged("there are more keys than values, or less")
                return
            case _ if isinstance(self._before, lines.WITH_NAMES):
                if len(line.items) != len(line.values) or any(
                    type(n) is not str for n in line.items
                ):
                    raise damaged("there are more names than values, or less")
                return
            case lines.Form(keys=keys) if keys:
                self._widths[-1] += self._count(_only_text(line))
            case lines.Modules():
                self._owed -= len(line.items)
            case nodes.String():
                _only_text(line)
            case nodes.Bytes() | nodes.Text():
                _check_base64(_only_text(line))
            case _ if not isinstance(self._before, lines.WITH_ITEMS):
                raise damaged("there is more of something that has no items")
        if line.values:
            raise damaged("there are values for something that has none")

    def _take_form(self, line: lines.Form) -> None:
        if not isinstance(self._before, lines.Form):
            raise damaged("a form comes after other nodes")
        columns = line.columns
        if self._count(line.tables) != len(line.keys) or len(columns) != len(line.constants):
            raise damaged("a form has other names than values")
        if any(a >= b for a, b in itertools.pairwise(columns)):
            raise damaged("a form has a value where there is no place")
        self._widths.append(self._count(line.names) + sum(map(self._count, line.keys)))
        self._shared.append(len(columns))
        self._last = columns[-1] if columns else -1

    def _take_modules(self, line: lines.Modules) -> None:
        number = line.form[0]
        if number >= len(self._widths):
            raise damaged("a module has no form")
        own = self._widths[number] - self._shared[number]
        self._owed = line.count * own - len(line.values)
        self._spend(line.count * (_NODE + _ENTRY * self._widths[number]))

    def _take_extras(self, line: lines.Extras) -> None:
        self._tensors = len(line.tensors)
        if not line.tensors or len(line.grads) not in (0, self._tensors):
            raise damaged("there is another number of gradients than of tensors")
        names = self._check_attributes(line.names, line.values)
        self._spend(self._tensors * _NODE + _ENTRY * names * (self._tensors - 1))

    def _check_attributes(self, text: str, values: tuple[Slot, ...]) -> int:
        """How many names a text has; those that aren't of None have a value each."""
        names, given = self._check_names(text)
        if given != len(values):
            raise damaged("an object has another number of names than of values")
        return names

    def _count(self, text: str) -> int:
        """How many names a text has, none of them of None."""
        names, given = self._check_names(text)
        if names != given:
            raise damaged("a name in objects.json has no value")
        return names

    def _check_names(self, text: str) -> tuple[int, int]:
        self._spend(_NAME * text.count(" "))
        return check_names(text, self._words)

    def _spend(self, amount: int) -> None:
        self._room -= amount
        if self._room < 0:
            raise _too_large(0)


def _count_nodes(line: nodes.Node) -> int:
    match line:
        case lines.Modules():
            return line.count
        case lines.Extras():
            return len(line.tensors)
    return 1


def _only_text(line: lines.More) -> str:
    if len(line.items) != 1 or type(line.items[0]) is not str:
        raise damaged("there is more of something, but not the one text that it needs")
    return line.items[0]


def _check_base64(text: str) -> None:
    try:
        binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise damaged(f"objects.json: {error}") from None


def _too_large(size: int) -> BadRecord:
    what = f"{size} bytes of JSON" if size else "what it stands for"
    return BadRecord(
        f"objects.json would take more memory than a record may: {what}.\n"
        "tripwire writes no such file; it may have been made to do harm.",
        slug="record-too-large",
    )


def _decode(line: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise damaged(f"objects.json: {error}") from None


_HEAD = msgspec.json.Decoder(lines.Head)
_CODE = msgspec.json.Decoder(nodes.Code)
_NODE_LINE: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    Union[lines.LINES]  # noqa: UP007
)
