"""Rows: the table of objects as lines of JSON, none of which takes much to decode.

A line is one item of the table, or a part of one: a long list, text or dict takes several lines,
and continuation lines begin with a space. Each part is valid on its own, and is checked on its own.
So a reader holds one line at a time, however large the table is, and counts line by line how much
memory the whole table may take.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from tripwire.errors import BadRecord
from tripwire.files import LIST, estimate_memory, estimate_wide
from tripwire.recording.format import nodes
from tripwire.recording.format.container import OBJECTS, damaged
from tripwire.recording.format.manifest import encode_json
from tripwire.recording.format.nodes import NODE_TYPES, Code, Reference, Slot

# What a line and all that is decoded from it may take.
MOST_LINE = 1 << 17
# What all of them may take, one by one. A Transformer of 1,000 layers takes a third of it, the
# vocabulary of a tokenizer (250,000 words) most of it.
MOST_MEMORY = 48 << 20
# Less for a small file: so much, and so much for each of its bytes. A byte of JSON has no higher
# price than that of `[` in a wide string, so a table that isn't deflated always fits.
_SMALL, _PER_BYTE = 2 << 20, LIST + 2 + 3

_Row = TypeVar("_Row", bound=msgspec.Struct)


def most_memory(size: int) -> int:
    """What the table of a file of this size may take, and so may what it says twice."""
    return min(MOST_MEMORY, _SMALL + _PER_BYTE * size)


def too_large(what: str) -> BadRecord:
    """The error for a member that says too much."""
    return BadRecord(
        f"{what} would take more memory than a record may.\n"
        "tripwire writes no such file; it may have been made to do harm.",
        slug="record-too-large",
    )


# --- parts ---

_LONG_TEXTS = {
    nodes.String: "text",
    nodes.Text: "data",
    nodes.Bytes: "data",
    nodes.BigInt: "digits",
}
_LONG_LISTS = (tuple[Slot, ...], tuple[Reference, ...], tuple[str, ...])


def _find_long_fields(cls: type[msgspec.Struct]) -> tuple[str, ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    text = _LONG_TEXTS.get(cls)
    return tuple(name for name, hint in hints.items() if name == text or hint in _LONG_LISTS)


# The fields of which a line may have a part. Found now: it compiles, and reading compiles nothing.
_ROW_TYPES: tuple[type[msgspec.Struct], ...] = (*NODE_TYPES, Code)
_LONG_FIELDS = {cls: _find_long_fields(cls) for cls in _ROW_TYPES}


def _halve(row: _Row) -> tuple[_Row, _Row] | None:
    """The same in two parts; None if there is nothing to divide."""
    first, second = {}, {}
    for name in _LONG_FIELDS[type(row)]:
        value = getattr(row, name)
        half = len(value) // 2
        first[name], second[name] = value[:half], value[half:]
    if not any(first.values()):
        return None
    return msgspec.structs.replace(row, **first), msgspec.structs.replace(row, **second)


def join(parts: list[_Row]) -> _Row:
    """What several lines say together."""
    first = parts[0]
    if len(parts) == 1:
        return first
    whole: dict[str, object] = {}
    for name in _LONG_FIELDS[type(first)]:
        values = [getattr(part, name) for part in parts]
        is_list = isinstance(values[0], tuple)
        whole[name] = (
            tuple(itertools.chain.from_iterable(values)) if is_list else values[0][:0].join(values)
        )
    return msgspec.structs.replace(first, **whole)


def check_part(first: msgspec.Struct, part: msgspec.Struct) -> None:
    """Raise unless a line goes on with what an earlier one began."""
    long = _LONG_FIELDS[type(first)]
    if type(part) is not type(first) or any(
        getattr(first, name) != getattr(part, name)
        for name in first.__struct_fields__
        if name not in long
    ):
        raise damaged(f"{OBJECTS} goes on with another thing than it began")


# --- writing ---


def write_rows(rows: Iterable[msgspec.Struct]) -> Iterator[bytes]:
    """The lines of things, without the ends of lines."""
    for row in rows:
        lines = list(_write_parts(row))
        if isinstance(row, nodes.Node) and not all(map(_is_short, lines)):
            kind = type(row).__name__
            lines = list(_write_parts(nodes.Opaque(kind, "its names are too long for a record")))
        yield lines[0]
        yield from (b" " + line for line in lines[1:])


def _write_parts(row: msgspec.Struct) -> Iterator[bytes]:
    tag = row.__struct_config__.tag
    fields = _shorten(row)
    line = encode_json(fields if tag is None else [tag, *fields])
    halves = None if _is_short(line) else _halve(row)
    if halves is None:
        yield line
    else:
        for half in halves:
            yield from _write_parts(half)


def _shorten(row: msgspec.Struct) -> list[object]:
    """Its fields, without those at the end that have their default."""
    fields = list(msgspec.structs.astuple(row))
    defaults = type(row).__struct_defaults__
    least = len(fields) - len(defaults)
    while len(fields) > least and _is_equal(fields[-1], defaults[len(fields) - 1 - least]):
        fields.pop()
    return fields


def _is_equal(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


def _is_short(line: bytes) -> bool:
    """Whether a line takes no more than it may."""
    if _PER_BYTE * len(line) <= MOST_LINE:
        return True
    return 2 * len(line) <= MOST_LINE and estimate_memory(line) + estimate_wide(line) <= MOST_LINE


# --- reading ---


def weigh(pieces: Iterable[bytes], most: int) -> int:
    """How much memory is left for wide texts beside this table. Nothing is decoded for that."""
    for piece in pieces:
        most -= estimate_memory(piece)
        if most < 0:
            raise too_large(OBJECTS)
    return most


class TableLines:
    """The lines of a table, one after another: each, and all of them, within what they may take.

    `weigh` has said what all of them take but for wide texts, and what is left for those.
    """

    def __init__(self, pieces: Iterable[bytes], left: int) -> None:
        self._left = left
        self._lines = self._split(pieces)
        self._next = next(self._lines, None)

    def _split(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        held = bytearray()
        for piece in pieces:
            held += piece
            start = 0
            while (end := held.find(b"\n", start)) >= 0:
                yield self._check(bytes(held[start:end]))
                start = end + 1
            del held[:start]
            if 2 * len(held) > MOST_LINE:
                raise too_large(f"A line of {OBJECTS}")
        if held:
            raise damaged(f"{OBJECTS} ends within a line")

    def _check(self, line: bytes) -> bytes:
        if not _is_short(line):
            raise too_large(f"A line of {OBJECTS}")
        self._left -= estimate_wide(line)
        if self._left < 0:
            raise too_large(OBJECTS)
        return line

    def take(self) -> bytes:
        """The next line."""
        line = self._next
        if line is None:
            raise damaged(f"{OBJECTS} has fewer lines than it says")
        self._next = next(self._lines, None)
        return line

    def read(
        self, count: int, decoder: msgspec.json.Decoder[_Row]
    ) -> Iterator[tuple[int, _Row, bool]]:
        """So many things by number, in parts; whether the last part of each comes with it."""
        for number in range(count):
            while True:
                part = decode(self.take(), decoder)
                is_whole = self._next is None or not self._next.startswith(b" ")
                yield number, part, is_whole
                if is_whole:
                    break

    def read_whole(self, count: int, decoder: msgspec.json.Decoder[_Row]) -> Iterator[_Row]:
        """The same, each thing with all of its parts."""
        parts: list[_Row] = []
        for _, part, is_whole in self.read(count, decoder):
            parts.append(part)
            if is_whole:
                yield join(parts)
                parts.clear()

    def end(self) -> None:
        """Raise unless all was taken."""
        if self._next is not None:
            raise damaged(f"{OBJECTS} has more lines than it says")


_T = TypeVar("_T")


def decode(line: bytes, decoder: msgspec.json.Decoder[_T], name: str = OBJECTS) -> _T:
    """What a line says."""
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise damaged(f"{name}: {error}") from None
