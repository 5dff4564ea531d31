"""Spelled: the text of objects.json, checked line by line, then built.

docs/record-format.md has the rules, recording/spelling.py the other direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Union, cast

import msgspec

from tripwire.errors import BadRecord
from tripwire.recording import lines, nodes
from tripwire.recording.blobs import StoredBlobs
from tripwire.recording.checks import (
    LARGEST_LINE,
    MEMORY_FLOOR,
    check_code,
    check_node,
    check_slot,
    check_tensors,
    estimate_memory,
    find_slot_fields,
)
from tripwire.recording.container import damaged
from tripwire.recording.lines import check_names, split_names
from tripwire.recording.nodes import AnyNode, Slot

_NAME_SIZE = 64  # what a name in a text takes
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
            check.take(_decode(line, _NODE))
        check.finish()

    def build(self) -> nodes.Table:
        """The table, of a text that was checked."""
        codes = tuple(_decode(line, _CODE) for line in _lines(self.text, *self.code_lines))
        found: list[nodes.Node] = []
        for line in _lines(self.text, *self.node_lines):
            _join(found, _decode(line, _NODE))
        words = [word for word, _ in split_names(self.head.words, ())]
        full: list[AnyNode] = []
        for node in found:
            if isinstance(node, lines.Modules):  # forms come first, in lines of their own numbers
                full += _part_modules(node, cast("lines.Form", found[node.form[0]]))
            elif isinstance(node, lines.Extras):
                full += _part_extras(node, words)
            else:
                full.append(_spread(node, words))
        for count, blob, kind, device in self.head.tensors:
            full += [nodes.Tensor(blob + i, kind, device) for i in range(count)]
        return nodes.Table(self.head.roots, tuple(full), codes)


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


def _join(found: list[nodes.Node], node: nodes.Node) -> None:
    """Take the next line: a node, or more of the last one."""
    if not isinstance(node, lines.More):
        found.append(node)
        return
    last, changed = found[-1], dict[str, object]()
    match last:
        case nodes.Dict():
            changed = {"keys": last.keys + node.items, "values": last.values + node.values}
        case lines.Object():
            names = _join_texts(last.names, node)
            changed = {"names": names, "values": last.values + node.values}
        case lines.Form():
            changed = {"keys": (*last.keys[:-1], _join_texts(last.keys[-1], node))}
        case lines.Modules():
            changed = {"values": last.values + node.items}
        case _:
            changed = {"items": cast("nodes.List", last).items + node.items}
    found[-1] = msgspec.structs.replace(last, **changed)


def _join_texts(text: str, more: lines.More) -> str:
    return " ".join(part for part in (text, cast("str", more.items[0])) if part)


def _part_modules(line: lines.Modules, form: lines.Form) -> Iterator[nodes.ModuleObject]:
    """Each module, with the values that the form has for all."""
    width = len(line.values) // line.count
    for i in range(line.count):
        values = list(line.values[i * width : (i + 1) * width])
        for column, constant in zip(form.columns, form.constants, strict=True):
            values.insert(column, constant)
        yield nodes.ModuleObject(line.form, tuple(values))


def _part_extras(line: lines.Extras, words: Sequence[str]) -> Iterator[nodes.TensorExtras]:
    names, values = _spread_attributes(line.names, line.values, words)
    for tensor, grad in itertools.zip_longest(line.tensors, line.grads):
        yield nodes.TensorExtras(tensor, grad, line.cls, names, values)


def _spread(node: nodes.Node, words: Sequence[str]) -> AnyNode:
    """The node of a line, with all that the line leaves out."""

    def spread(text: str) -> tuple[str, ...]:
        return tuple(name for name, _ in split_names(text, words))

    match node:
        case lines.Library():
            module = words[node.module] if isinstance(node.module, int) else node.module
            return nodes.Library(module, node.name)
        case lines.Form():
            keys = tuple(map(spread, node.keys))
            return nodes.ModuleForm(node.cls, spread(node.names), spread(node.tables), keys)
        case lines.Object():
            names, values = _spread_attributes(node.names, node.values, words)
            return nodes.Object(node.cls, names, values, node.content, node.slots, node.slot_values)
    return cast("AnyNode", node)


def _spread_attributes(
    text: str, values: tuple[Slot, ...], words: Sequence[str]
) -> tuple[tuple[str, ...], tuple[Slot, ...]]:
    found = split_names(text, words)
    known = iter(values)
    full = tuple(None if is_none else next(known) for _, is_none in found)
    return tuple(name for name, _ in found), full


_FIELDS = {cls: find_slot_fields(cls) for cls in lines.LINES}


def _slots_of(node: nodes.Node) -> Iterator[Slot]:
    for name, many in _FIELDS[type(node)]:
        value = getattr(node, name)
        yield from value if many else (value,)


class _LineCheck:
    """What a pass over the lines has to remember: a few bytes for each form."""

    def __init__(self, spelled: Spelled, blobs: StoredBlobs, file_size: int) -> None:
        self._blobs = blobs
        self._room = max(MEMORY_FLOOR, file_size) - estimate_memory(spelled.text)
        self._widths: list[int] = []  # how many values the modules of a form give
        self._shared: list[int] = []  # how many the form gives them
        self._words = 0  # words refer to none
        self._words = self._count(spelled.head.words)
        self._before: nodes.Node = lines.Form((0,))
        self._owed = 0  # values that modules still need
        self._left = spelled.head.count
        self._nodes = self._left + sum(run[0] for run in spelled.head.tensors)
        for count, blob, kind, device in spelled.head.tensors:
            self._spend(128 * count)
            check_tensors(count, blob, kind, device, blobs)
        for slot in spelled.head.roots.values():
            check_slot(slot, self._nodes)

    def take(self, node: nodes.Node) -> None:
        """The next node, or more of the last one."""
        for slot in _slots_of(node):
            check_slot(slot, self._nodes)
        match node:
            case lines.More():
                self._take_more(node)
                return
            case _ if self._owed:
                raise _wrong_width()
            case lines.Form():
                self._take_form(node)
            case lines.Modules():
                self._check_modules(node)
            case lines.Object():
                self._check_object(node)
            case lines.Extras():
                self._check_extras(node)
            case lines.Library():
                if isinstance(node.module, int) and node.module >= self._words:
                    raise damaged("objects.json refers to a word that it doesn't have")
            case _:
                check_node(node, self._blobs)
        self._before = node
        self._left -= _count_nodes(node)

    def finish(self) -> None:
        """All lines were seen."""
        if self._owed:
            raise _wrong_width()
        if self._left:
            raise damaged("objects.json has another number of nodes than it says")

    def _take_more(self, node: lines.More) -> None:
        match self._before:
            case lines.Object():
                self._check_attributes(_only_text(node), node.values)
                return
            case nodes.Dict():
                if len(node.items) != len(node.values):
                    raise damaged("there are more keys than values, or less")
                return
            case lines.Form(keys=keys) if keys:
                self._widths[-1] += self._count(_only_text(node))
            case lines.Modules():
                self._owed -= len(node.items)
            case _ if not isinstance(self._before, lines.WITH_ITEMS):
                raise damaged("there is more of something that has no items")
        if node.values:
            raise damaged("there are values for something that has none")

    def _take_form(self, node: lines.Form) -> None:
        if not isinstance(self._before, lines.Form):
            raise damaged("a form comes after other nodes")
        self._widths.append(self._find_width(node))
        self._shared.append(len(node.columns))

    def _check_modules(self, node: lines.Modules) -> None:
        number = node.form[0]
        if number >= len(self._widths):
            raise damaged("a module has no form")
        self._owed = node.count * self._widths[number] - len(node.values)
        self._spend(node.count * (128 + 8 * self._shared[number]))

    def _check_object(self, node: lines.Object) -> None:
        if len(node.slots) != len(node.slot_values):
            raise damaged("an object has another number of slots than of values")
        self._check_attributes(node.names, node.values)

    def _check_extras(self, node: lines.Extras) -> None:
        if not node.tensors or len(node.grads) not in (0, len(node.tensors)):
            raise damaged("there is another number of gradients than of tensors")
        self._check_attributes(node.names, node.values)
        self._spend(128 * len(node.tensors))

    def _check_attributes(self, names: str, values: tuple[Slot, ...]) -> None:
        if self._check_names(names)[1] != len(values):
            raise damaged("an object has another number of names than of values")

    def _find_width(self, form: lines.Form) -> int:
        """How many values modules of a form give themselves."""
        whole = self._count(form.names) + sum(map(self._count, form.keys))
        columns = form.columns
        if self._count(form.tables) != len(form.keys) or len(columns) != len(form.constants):
            raise damaged("a form has other names than values")
        last = columns[-1] if columns else -1
        if last >= whole or any(a >= b for a, b in itertools.pairwise(columns)):
            raise damaged("a form has a value where there is no place")
        return whole - len(columns)

    def _count(self, text: str) -> int:
        """How many names a text has, all with a value."""
        names, with_value = self._check_names(text)
        if names != with_value:
            raise damaged("a name in objects.json has no value")
        return names

    def _check_names(self, text: str) -> tuple[int, int]:
        self._spend(_NAME_SIZE * (text.count(" ") + 1))
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


def _only_text(node: lines.More) -> str:
    if len(node.items) != 1 or type(node.items[0]) is not str:
        raise damaged("there is more of an object or a form, but no text of names")
    return node.items[0]


def _wrong_width() -> BadRecord:
    return damaged("a module has another number of values than its form has names")


def _check_line(line: bytes, file_size: int) -> None:
    """A line is held while it is checked, so it may not take much."""
    if len(line) > LARGEST_LINE // 128 and not line.startswith(_BYTES):
        names = 0 if line.startswith(b'["') and not line.startswith(_NAMED) else line.count(b" ")
        if estimate_memory(line) + _NAME_SIZE * names > max(LARGEST_LINE, file_size):
            raise _too_large(len(line))


_BYTES = (b'["str",', b'["text",', b'["bytes",')  # as long in memory as they are here
_NAMED = (
    b'["object",',
    b'["nnform",',
    b'["extras",',
    b'["more",',
)  # and the first line, which has words


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
_NODE: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[lines.LINES])  # noqa: UP007
