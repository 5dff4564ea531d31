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

from tripwire.recording import lines, nodes
from tripwire.recording.blobs import StoredBlobs
from tripwire.recording.checks import (
    LARGEST_HEAD,
    LARGEST_LINE,
    LIST,
    MEMORY_FLOOR,
    check_member,
    estimate_memory,
)
from tripwire.recording.container import damaged
from tripwire.recording.linecheck import LineCheck, too_large
from tripwire.recording.lines import split_rows
from tripwire.recording.nodes import AnyNode, Items, Reference, Slot
from tripwire.recording.segments import Layout
from tripwire.recording.words import Known, split_names

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
            raise too_large(f"{len(text)} bytes of JSON")
        first = text.find(b"\n")
        middle = text.find(b"\n" + lines.NODES + b"\n", first)
        if first < 0 or middle < 0 or not text.endswith(b"\n" + lines.END):
            raise damaged("objects.json isn't laid out in lines")
        line = text[:first]
        if estimate_memory(line) > max(LARGEST_HEAD, file_size // 8):
            raise too_large(f"{len(line)} bytes of JSON")
        if not line.endswith(lines.CODES):
            raise damaged("objects.json isn't laid out in lines")
        head = _decode(line.removesuffix(lines.CODES) + b"}", _HEAD)
        start = middle + len(lines.NODES) + 2
        return Spelled(text, head, (first + 1, middle), (start, len(text) - len(lines.END) - 1))

    def check(self, blobs: StoredBlobs, members: Mapping[str, object], file_size: int) -> None:
        """Raise `BadRecord` for a table that can't be built; keep nothing of it meanwhile."""
        for _, source, marshalled, _ in self.head.files:
            check_member(source, "src/", members)
            check_member(marshalled, "code/", members)
        room = max(MEMORY_FLOOR, file_size) - estimate_memory(self.text)
        check = LineCheck(self.head, blobs, room)
        for line in _lines(self.text, *self.code_lines):
            _check_line(line, file_size)
            check.take_codes(_decode(line, _CODES))
        for line in _lines(self.text, *self.node_lines):
            _check_line(line, file_size)
            check.take(_decode(line, _NODE_LINE), estimate_memory(line))
        check.finish()

    def build(self) -> nodes.Table:
        """The table, of a text that was checked."""
        pieces = tuple(piece for piece, _ in split_names(self.head.pieces, Known()))
        words = (word for word, _ in split_names(self.head.words, Known((), pieces)))
        known = Known(tuple(words), pieces)
        tensors = [
            nodes.Tensor(blob + i, kind, device)
            for count, blob, kind, device in self.head.tensors
            for i in range(count)
        ]
        builder = _Builder(known, self.head.files, self.head.count + len(tensors))
        for line in _lines(self.text, *self.code_lines):
            builder.take_codes(_decode(line, _CODES))
        for line in _lines(self.text, *self.node_lines):
            builder.take(_decode(line, _NODE_LINE))
        found, forms, codes = builder.finish()
        return nodes.Table(self.head.roots, (*found, *tensors, *forms), codes)


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
    if len(line) > LARGEST_LINE // (LIST + 1):
        if estimate_memory(line) > max(LARGEST_LINE, file_size // 8):
            raise too_large(f"{len(line)} bytes of JSON")


# --- building ---


class _Builder:
    """Nodes of lines that were checked."""

    def __init__(self, known: Known, files: Sequence[lines.File], count: int) -> None:
        self._known = known
        self._files = files
        self._codes: list[nodes.Code] = []
        self._short_names: list[str] = []  # of the functions that have them
        self._count = count  # of nodes and tensors: forms are numbered on from there
        self._found: list[AnyNode] = []
        self._forms: list[AnyNode] = []
        self._line: nodes.Node | None = None
        self._more: list[lines.More] = []  # what follows that line

    def take_codes(self, line: lines.Codes) -> None:
        """The next line of codes."""
        file, source, marshalled, flags = self._files[line.file]
        numbers, free = iter(line.numbers), iter(self._strings(line.free))
        for name in self._strings(line.names):
            first, further, column, count, own = itertools.islice(numbers, lines.NUMBERS)
            place, held = (first + further, column), tuple(itertools.islice(free, own))
            known = name, file, first, source, place, marshalled, held, flags, (0, count)
            self._codes.append(nodes.Code(*known))
            self._short_names.append(name.rpartition(".")[2])

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

    def finish(self) -> tuple[list[AnyNode], list[AnyNode], tuple[nodes.Code, ...]]:
        """All nodes, the forms of modules, and all codes."""
        self._end_line()
        return self._found, self._forms, _place_codes(self._codes)

    def _end_line(self) -> None:
        if self._line is not None:
            self._found += self._build(self._line)
        self._line = None
        self._more = []

    def _build(self, line: nodes.Node) -> Iterable[AnyNode]:
        replace = msgspec.structs.replace
        match line:
            case lines.Libraries():
                module = self._name(line.module)
                return [nodes.Library(module, name) for name in self._strings(line.names)]
            case lines.Object():
                names, values = self._attributes(line)
                end = len(names) - line.slots
                state, slots = (names[:end], values[:end]), (names[end:], values[end:])
                return (nodes.Object(line.cls, *state, line.content, *slots),)
            case lines.Modules():
                return self._build_modules(line)
            case lines.Extras():
                names, values = self._attributes(line)
                tensors = cast("list[Reference]", list(split_rows(line.tensors)))
                pairs = itertools.zip_longest(tensors, split_rows(line.grads))
                return [nodes.TensorExtras(*pair, line.cls, names, values) for pair in pairs]
            case lines.Functions():
                return self._build_functions(line)
            case lines.Cells():
                filled = [nodes.Cell(content) for content in split_rows(line.contents)]
                return [*filled, *[nodes.Cell(None, True)] * line.empty]
            case lines.Class():
                own = self._attributes(line)
                qualname = line.name if line.qualname is None else line.qualname
                named = line.name, qualname, self._name(line.module)
                made = nodes.Class(*named, line.meta, line.bases, *own)
                return (replace(made, form=line.form, detail=line.detail),)
            case lines.Namespace():
                own = self._attributes(line)
                return (nodes.Namespace(self._name(line.module), *own, line.imports),)
            case lines.Module():
                own = self._attributes(line)
                return (nodes.Module(self._name(line.module), *own, line.namespace),)
            case lines.Dict():
                values = self._slots(line.values, *(more.values for more in self._more))
                return (nodes.Dict(self._items(line.keys), values, line.form, line.factory),)
            case lines.List():
                return (nodes.List(self._items(line.items)),)
            case lines.Tuple():
                return (nodes.Tuple(self._items(line.items)),)
            case lines.Set():
                return (nodes.Set(self._items(line.items), line.frozen),)
            case lines.Deque():
                return (nodes.Deque(self._items(line.items), line.limit),)
            case lines.NamedTuple():
                return (nodes.NamedTuple(line.cls, self._items(line.items)),)
            case nodes.String():
                return (nodes.String("".join((line.text, *self._pieces()))),)
            case nodes.Bytes() | nodes.Text():
                pieces = map(binascii.a2b_base64, self._pieces())
                return (replace(line, data=b"".join((line.data, *pieces))),)
        return (cast("AnyNode", line),)

    def _build_modules(self, line: lines.Modules) -> Iterator[nodes.ModuleObject]:
        """Each module, with the values that the form has for all."""
        names, tables = self._strings(line.names, *self._pieces()), self._strings(line.tables)
        rest = iter(names[len(names) - sum(line.sizes) :])
        keys = tuple(tuple(itertools.islice(rest, size)) for size in line.sizes)
        own = names[: len(names) - sum(line.sizes)]
        form = (self._count + len(self._forms),)
        self._forms.append(nodes.ModuleForm(line.cls, own, tables, keys))
        more = (more.items for more in self._more if type(more.items) is not str)
        values = self._slots(line.values, *more)
        width = len(values) // line.count
        row: list[Slot] = [None] * (width + len(line.columns))
        for column, constant in zip(line.columns, line.constants, strict=True):
            row[column] = constant
        shared = set(line.columns)
        others = [column for column in range(len(row)) if column not in shared]
        for start in range(0, line.count * width, width) if width else [0] * line.count:
            for column, value in zip(others, values[start : start + width], strict=True):
                row[column] = value
            yield nodes.ModuleObject(form, tuple(row))

    def _build_functions(self, line: lines.Functions) -> Iterator[nodes.Function]:
        codes = [code for first in line.codes for code in range(first[0], first[-1] + 1)]
        cells = cast("list[Reference]", list(split_rows(line.closures)))
        width = len(cells) // len(codes)
        for i, code in enumerate(codes):
            yield nodes.Function(
                self._short_names[code] if line.name is None else line.name,
                self._codes[code].name if line.qualname is None else line.qualname,
                code,
                line.namespace,
                line.defaults,
                line.kwdefaults,
                tuple(cells[i * width : i * width + width]),
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

    def _name(self, text: str) -> str:
        (name,) = self._strings(text)
        return name

    def _strings(self, *texts: str) -> tuple[str, ...]:
        return tuple(name for text in texts for name, _ in split_names(text, self._known))

    def _attributes(self, line: lines.Attributed) -> tuple[tuple[str, ...], tuple[Slot, ...]]:
        names: list[str] = []
        values: list[Slot] = []
        parts = ((more.items, more.values) for more in self._more)
        for text, known in ((line.names, line.values), *parts):
            given = iter(self._slots(known))
            for name, is_none in split_names(cast("str", text), self._known):
                names.append(name)
                values.append(None if is_none else next(given))
        return tuple(names), tuple(values)


def _place_codes(codes: Iterable[nodes.Code]) -> tuple[nodes.Code, ...]:
    """Codes with their places in the source, which has the lines of all of them in order."""
    spans: dict[str | None, list[tuple[int, int]]] = {}
    for code in codes:
        if code.lines[1]:
            spans.setdefault(code.source, []).append((code.line, code.line + code.lines[1] - 1))
    layouts = {source: Layout(found) for source, found in spans.items()}
    return tuple(
        msgspec.structs.replace(code, lines=(layouts[code.source].before(code.line), code.lines[1]))
        if code.lines[1]
        else code
        for code in codes
    )


def _decode(line: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise damaged(f"objects.json: {error}") from None


_HEAD = msgspec.json.Decoder(lines.Head)
_CODES = msgspec.json.Decoder(lines.Codes)
_NODE_LINE: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    Union[lines.LINES]  # noqa: UP007
)
