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
    DICT_FORMS,
    LARGEST_LINE,
    MEMORY_FLOOR,
    ROOTS,
    check_member,
    check_node,
    check_root,
    check_slot,
    check_tensors,
    estimate_memory,
)
from tripwire.recording.container import damaged
from tripwire.recording.lines import (
    NameCount,
    count_names,
    count_slots,
    items_of,
    split_names,
    split_rows,
)
from tripwire.recording.nodes import AnyNode, Items, Reference, Slot

# What is built of a line, beyond its own JSON: a node, a name, an entry in a dict, a reference.
_NODE, _NAME, _ENTRY, _REFERENCE = 128, 64, 64, 96
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
        for _, source, marshalled in self.head.files:
            check_member(source, "src/", members)
            check_member(marshalled, "code/", members)
        codes = 0
        for line in _lines(self.text, *self.code_lines):
            _check_line(line, file_size)
            if _decode(line, _CODE).file >= len(self.head.files):
                raise damaged("objects.json refers to a file that it doesn't have")
            codes += 1
        check = _LineCheck(self, codes, blobs, file_size)
        for line in _lines(self.text, *self.node_lines):
            _check_line(line, file_size)
            check.take(_decode(line, _NODE_LINE), estimate_memory(line))
        check.finish()

    def build(self) -> nodes.Table:
        """The table, of a text that was checked."""
        codes = tuple(self._build_code(line) for line in _lines(self.text, *self.code_lines))
        words = [word for word, _ in split_names(self.head.words, ())]
        tensors = [
            nodes.Tensor(blob + i, kind, device)
            for count, blob, kind, device in self.head.tensors
            for i in range(count)
        ]
        builder = _Builder(words, codes, self.head.count + len(tensors))
        for line in _lines(self.text, *self.node_lines):
            builder.take(_decode(line, _NODE_LINE))
        found, forms = builder.finish()
        return nodes.Table(self.head.roots, (*found, *tensors, *forms), codes)

    def _build_code(self, line: bytes) -> nodes.Code:
        code = _decode(line, _CODE)
        file, source, marshalled = self.head.files[code.file]
        return nodes.Code(
            code.name,
            file,
            code.line,
            source,
            code.place,
            marshalled,
            code.free,
            code.flags,
            code.lines,
        )


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

    def __init__(self, words: Sequence[str], codes: Sequence[nodes.Code], count: int) -> None:
        self._words = words
        self._codes = codes
        self._count = count  # of nodes and tensors: forms are numbered on from there
        self._found: list[AnyNode] = []
        self._forms: list[AnyNode] = []
        self._line: nodes.Node | None = None
        self._more: list[lines.More] = []  # what follows that line

    def take(self, line: nodes.Node) -> None:
        """The next line."""
        match line:
            case lines.More():
                self._more.append(line)
            case lines.Again(count=count):
                self._end_line()
                self._found += self._found[-1:] * count
            case _:
                self._end_line()
                self._line = line

    def finish(self) -> tuple[list[AnyNode], list[AnyNode]]:
        """All nodes, and the forms of modules."""
        self._end_line()
        return self._found, self._forms

    def _end_line(self) -> None:
        if self._line is not None:
            self._found += self._build(self._line)
        self._line = None
        self._more = []

    def _build(self, line: nodes.Node) -> Iterable[AnyNode]:
        replace = msgspec.structs.replace
        match line:
            case lines.Libraries():
                (module,) = self._strings(line.module)
                return [nodes.Library(module, name) for name in self._strings(line.names)]
            case lines.Object():
                names, values = self._attributes(line)
                rest = line.content, line.slots, line.slot_values
                return (nodes.Object(line.cls, names, values, *rest),)
            case lines.Modules():
                return self._build_modules(line)
            case lines.Extras():
                names, values = self._attributes(line)
                tensors = cast("list[Reference]", list(split_rows(line.tensors)))
                pairs = itertools.zip_longest(tensors, split_rows(line.grads))
                return [nodes.TensorExtras(*pair, line.cls, names, values) for pair in pairs]
            case lines.Function():
                return (self._build_function(line),)
            case lines.Dict():
                values = self._slots(line.values, *(more.values for more in self._more))
                return (nodes.Dict(self._items(line.keys), values, line.form, line.factory),)
            case lines.List():
                return (nodes.List(self._items(line.items)),)
            case lines.Tuple():
                return (nodes.Tuple(self._items(line.items)),)
            case lines.Set():
                return (nodes.Set(self._items(line.items), line.frozen),)
            case nodes.Deque() | nodes.NamedTuple():
                return (replace(line, items=self._items(line.items)),)
            case nodes.String():
                return (nodes.String("".join((line.text, *self._pieces()))),)
            case nodes.Bytes() | nodes.Text():
                pieces = map(binascii.a2b_base64, self._pieces())
                return (replace(line, data=b"".join((line.data, *pieces))),)
            case nodes.Class() | nodes.Namespace() | nodes.Module():
                values = self._slots(line.values, *(more.values for more in self._more))
                return (replace(line, names=self._items(line.names), values=values),)
        return (cast("AnyNode", line),)

    def _build_modules(self, line: lines.Modules) -> Iterator[nodes.ModuleObject]:
        """Each module, with the values that the form has for all."""
        tables = [[text] for text in line.keys]
        if tables:
            tables[-1] += self._pieces()
        keys = tuple(self._strings(*texts) for texts in tables)
        names, held = self._strings(line.names), self._strings(line.tables)
        form = (self._count + len(self._forms),)
        self._forms.append(nodes.ModuleForm(line.cls, names, held, keys))
        more = (more.items for more in self._more if type(more.items) is not str)
        values = self._slots(line.values, *more)
        width = len(values) // line.count
        row: list[Slot] = [None] * (width + len(line.columns))
        for column, constant in zip(line.columns, line.constants, strict=True):
            row[column] = constant
        shared = set(line.columns)
        own = [column for column in range(len(row)) if column not in shared]
        for start in range(0, line.count * width, width) if width else [0] * line.count:
            for column, value in zip(own, values[start : start + width], strict=True):
                row[column] = value
            yield nodes.ModuleObject(form, tuple(row))

    def _build_function(self, line: lines.Function) -> nodes.Function:
        qualname = self._codes[line.code].name
        return nodes.Function(
            qualname.rpartition(".")[2] if line.name is None else line.name,
            qualname if line.qualname is None else line.qualname,
            line.code,
            line.namespace,
            line.defaults,
            line.kwdefaults,
            line.closure,
            line.attributes,
            line.special,
        )

    def _items(self, first: Items) -> tuple[Slot, ...]:
        """The items of a line, and of those that follow it."""
        return self._slots(first, *(more.items for more in self._more))

    def _slots(self, *parts: Items) -> tuple[Slot, ...]:
        return tuple(
            slot
            for part in parts
            for slot in (self._strings(part) if isinstance(part, str) else split_rows(part))
        )

    def _pieces(self) -> Iterator[str]:
        return (more.items for more in self._more if isinstance(more.items, str))

    def _strings(self, *texts: str) -> tuple[str, ...]:
        return tuple(name for text in texts for name, _ in split_names(text, self._words))

    def _attributes(
        self, line: lines.Object | lines.Extras
    ) -> tuple[tuple[str, ...], tuple[Slot, ...]]:
        names: list[str] = []
        values: list[Slot] = []
        parts = ((more.items, more.values) for more in self._more)
        for text, known in ((line.names, line.values), *parts):
            given = iter(self._slots(known))
            for name, is_none in split_names(cast("str", text), self._words):
                names.append(name)
                values.append(None if is_none else next(given))
        return tuple(names), tuple(values)


# --- checking ---


class _LineCheck:
    """What a pass over the lines has to remember: the lengths of words, a few numbers."""

    def __init__(self, spelled: Spelled, codes: int, blobs: StoredBlobs, file_size: int) -> None:
        self._blobs = blobs
        self._codes = codes
        self._room = max(MEMORY_FLOOR, file_size) - estimate_memory(spelled.text)
        self._width = 0  # how many values the latest modules have
        self._owed = 0  # values that they still need
        self._last = -1  # the last that all of them share
        self._modules = 0
        self._tensors = 0  # those of the latest extras
        self._before: nodes.Node | None = None
        self._memory = 0  # what the latest line takes, with those that belong to it
        self._words: Sequence[int] = ()  # words refer to none
        self._count(spelled.head.words)
        self._words = [len(word) for word, _ in split_names(spelled.head.words, ())]
        self._left = self._count_all = spelled.head.count
        self._nodes = self._left + sum(run[0] for run in spelled.head.tensors)
        for count, blob, kind, device in spelled.head.tensors:
            self._spend(_NODE * count)
            check_tensors(count, blob, kind, device, blobs)
        self._roots: dict[int, list[str]] = {}  # those that are still to be seen, by their nodes
        for name, slot in spelled.head.roots.items():
            check_slot(slot, self._nodes)
            if name in ROOTS:
                at = slot[0] if type(slot) is tuple else self._nodes
                self._roots.setdefault(at, []).append(name)

    def take(self, line: nodes.Node, memory: int) -> None:
        """The next line, and what its JSON takes."""
        if isinstance(line, lines.Again):
            self._take_again(line)
            return
        if not isinstance(line, lines.More):
            self._end_line()
            self._memory = 0
        self._memory += memory
        for item in items_of(line):
            check_slot(item, self._nodes)
            if type(item) is tuple:
                self._spend(_REFERENCE * (item[-1] - item[0]))
        if isinstance(line, lines.More):
            self._take_more(line)
        else:
            self._before = line
            self._count_nodes(line, self._take_node(line))

    def finish(self) -> None:
        """All lines were seen."""
        self._end_line()
        if self._left:
            raise damaged("objects.json has another number of nodes than it says")
        for names in self._roots.values():  # a plain value, a tensor, a module
            check_root(names[0], None)

    def _take_node(self, line: nodes.Node) -> int:
        """Check what isn't a further line of something; returns how many nodes it stands for."""
        match line:
            case lines.Modules():
                return self._take_modules(line)
            case lines.Extras():
                return self._take_extras(line)
            case lines.Libraries():
                if self._count(line.module) != 1:
                    raise damaged("a library isn't one name")
                return self._count(line.names)
            case lines.Object():
                if len(line.slots) != len(line.slot_values):
                    raise damaged("an object has another number of slots than of values")
                self._check_attributes(line.names, line.values)
            case lines.Function():
                if line.code >= self._codes:
                    raise damaged("objects.json refers to a code that it doesn't have")
            case lines.Dict():
                self._check_pairs(line.keys, line.values)
                if line.form not in DICT_FORMS:
                    raise damaged("a dict has a form that isn't known")
            case lines.List() | lines.Tuple() | lines.Set():
                self._count_items(line.items)
            case _:
                check_node(line, self._blobs)
        return 1

    def _count_nodes(self, line: nodes.Node, count: int) -> None:
        if not count:
            raise damaged("a line of objects.json stands for nothing")
        at = self._count_all - self._left
        self._left -= count
        for number in [one for one in self._roots if at <= one < at + count]:
            for name in self._roots.pop(number):
                check_root(name, line)

    def _take_again(self, line: lines.Again) -> None:
        before = self._before
        if before is None or isinstance(before, _MANY_NODES):
            raise damaged("there is nothing that could be there again")
        self._spend(line.count * self._memory)
        self._count_nodes(before, line.count)
        self._before = None

    def _end_line(self) -> None:
        """Nothing more of a line follows."""
        if isinstance(self._before, lines.Modules):
            own = self._width - len(self._before.columns)
            if self._modules * own != self._owed or self._last >= self._width:
                raise damaged("modules have other values than names")
            self._spend(self._modules * (_NODE + _ENTRY * self._width))

    def _take_more(self, line: lines.More) -> None:
        match self._before:
            case lines.Object():
                self._check_attributes(_only_text(line), line.values)
                return
            case lines.Extras():
                names = self._check_attributes(_only_text(line), line.values)
                self._spend(_ENTRY * names * (self._tensors - 1))
                return
            case lines.Dict():
                self._check_pairs(line.items, line.values)
                return
            case nodes.Class() | nodes.Namespace() | nodes.Module():
                if isinstance(line.items, str) or any(type(n) is not str for n in line.items):
                    raise damaged("a name in objects.json isn't one")
                self._check_pairs(line.items, line.values)
                return
            case lines.Modules(keys=keys):
                if not isinstance(line.items, str):
                    self._owed += count_slots(line.items)
                elif keys:
                    self._width += self._count(line.items)
                else:
                    raise damaged("there are more names for a table that isn't there")
            case nodes.String():
                _only_text(line)
            case nodes.Bytes() | nodes.Text():
                _check_base64(_only_text(line))
            case lines.List() | lines.Tuple() | lines.Set() | nodes.Deque() | nodes.NamedTuple():
                self._count_items(line.items)
            case _:
                raise damaged("there is more of something that has no items")
        if line.values:
            raise damaged("there are values for something that has none")

    def _take_modules(self, line: lines.Modules) -> int:
        columns = line.columns
        if self._count(line.tables) != len(line.keys) or len(columns) != len(line.constants):
            raise damaged("modules have other names than values")
        if any(a >= b for a, b in itertools.pairwise(columns)):
            raise damaged("modules have a value where there is no place")
        self._width = self._count(line.names) + sum(map(self._count, line.keys))
        self._owed = count_slots(line.values)
        self._last = columns[-1] if columns else -1
        self._modules = line.count
        return line.count

    def _take_extras(self, line: lines.Extras) -> int:
        self._tensors = count_slots(line.tensors)
        if line.grads and count_slots(line.grads) != self._tensors:
            raise damaged("there is another number of gradients than of tensors")
        names = self._check_attributes(line.names, line.values)
        self._spend(self._tensors * _NODE + _ENTRY * names * (self._tensors - 1))
        return self._tensors

    def _check_pairs(self, names: Items, values: Items) -> None:
        if self._count_items(names) != self._count_items(values):
            raise damaged("there are more names or keys than values, or less")

    def _check_attributes(self, text: str, values: Items) -> int:
        """How many names a text has; those that aren't of None have a value each."""
        count = self._count_names(text)
        if isinstance(values, str) or count.given != count_slots(values):
            raise damaged("an object has another number of names than of values")
        return count.names

    def _count_items(self, items: Items) -> int:
        """How many slots there are, or strings."""
        return self._count(items) if isinstance(items, str) else count_slots(items)

    def _count(self, text: str) -> int:
        """How many names a text has, none of them of None."""
        count = self._count_names(text)
        if count.names != count.given:
            raise damaged("a name in objects.json has no value")
        return count.names

    def _count_names(self, text: str) -> NameCount:
        count = count_names(text, self._words)
        self._spend(_NAME * count.names + count.added)
        return count

    def _spend(self, amount: int) -> None:
        self._room -= amount
        self._memory += amount
        if self._room < 0:
            raise _too_large(0)


_MANY_NODES = (lines.Modules, lines.Extras, lines.Libraries)


def _only_text(line: lines.More) -> str:
    if not isinstance(line.items, str):
        raise damaged("there is more of something, but not the text that it needs")
    return line.items


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
_CODE = msgspec.json.Decoder(lines.Code)
_NODE_LINE: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    Union[lines.LINES]  # noqa: UP007
)
