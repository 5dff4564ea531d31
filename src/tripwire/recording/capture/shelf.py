"""Shelf: the code objects of a record, marshalled and as source; put there, and taken again.

Source is kept as segments, those of one file in one member. On the interpreter that wrote the
record the codes are the very ones that ran. On another one the segments are compiled there, with
the file names, lines and columns that they had. Tracebacks show the record's lines, whether or
not the files are here.
"""

from __future__ import annotations

import importlib.util
import io
import linecache
import marshal
import os
import tokenize
import types
import zipimport
from collections.abc import Callable
from importlib.machinery import SourceFileLoader

from tripwire.errors import CannotReplay
from tripwire.recording.capture.segments import (
    Layout,
    Segment,
    SourceFile,
    compile_definition,
    find_definition,
    future_flags,
)
from tripwire.recording.format.nodes import Code, Table
from tripwire.values.classes import isinstance

Space = dict[str, object]


class Codes:
    """The code objects of one record, and the lines that they come from."""

    def __init__(self) -> None:
        self._codes: list[types.CodeType] = []
        self._segments: list[Segment | None] = []
        self._numbers: dict[int, int] = {}  # by identity: code objects compare by content
        self._files: dict[str, SourceFile] = {}

    def add(self, code: types.CodeType, space: Space | None = None) -> int:
        """The number of a code object in the table; `space` is the namespace that it runs in."""
        number = self._numbers.get(id(code))
        if number is None:
            segment = self._file(code.co_filename, space).find(code)
            number = self._numbers[id(code)] = len(self._codes)
            self._codes.append(code)
            self._segments.append(segment)
        return number

    @property
    def all(self) -> tuple[types.CodeType, ...]:
        """The code objects themselves."""
        return tuple(self._codes)

    def table(self) -> tuple[Code, ...]:
        """Every code, for the record's table."""
        placed = {name: _lay_out(segments) for name, segments in self._by_file().items()}
        members = {name: f"src/{i}.py" for i, name in enumerate(placed)}
        return tuple(
            _code_node(code, segment, members.get(code.co_filename), placed.get(code.co_filename))
            for code, segment in zip(self._codes, self._segments, strict=True)
        )

    def sources(self) -> dict[str, bytes]:
        """The files of the record that hold source."""
        found = {}
        for i, (name, segments) in enumerate(self._by_file().items()):
            lines = _lay_out(segments).cut(self._files[name].lines)
            found[f"src/{i}.py"] = "".join(lines).encode("utf-8", "surrogatepass")
        return found

    def marshalled(self, clean: Callable[[types.CodeType], types.CodeType]) -> dict[str, bytes]:
        """The file that holds marshalled code, each as `clean` leaves it."""
        if not self._codes:
            return {}
        return {_MARSHALLED: marshal.dumps(tuple(_marshallable(clean(c)) for c in self._codes))}

    def _by_file(self) -> dict[str, list[Segment]]:
        found: dict[str, list[Segment]] = {}
        for code, segment in zip(self._codes, self._segments, strict=True):
            if segment is not None:
                found.setdefault(code.co_filename, []).append(segment)
        return found

    def _file(self, name: str, space: Space | None) -> SourceFile:
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = SourceFile(_read_lines(name, space))
        return found


_MARSHALLED = "code/0"
_replayed: set[str] = set()  # files whose lines in tracebacks are a record's


def _read_lines(file: str, space: Space | None) -> list[str]:
    """The lines of a file, as the traceback module would show them.

    Not those of a replay (`Shelf._show`), which are another file's, or without secrets.
    """
    if file in _replayed and os.path.isfile(file):
        with tokenize.open(file) as opened:
            return opened.readlines()
    loader = dict.get(space, "__loader__") if space is not None else None
    if type(loader) in (SourceFileLoader, zipimport.zipimporter):  # no loader of the user's runs
        return linecache.getlines(file, space)
    return linecache.getlines(file)


def _marshallable(code: types.CodeType) -> types.CodeType | None:
    try:
        marshal.dumps(code)
    except ValueError:  # constants that no compiler makes
        return None
    return code


def _lay_out(segments: list[Segment]) -> Layout:
    return Layout((segment.first, segment.last) for segment in segments)


def _code_node(
    code: types.CodeType, segment: Segment | None, member: str | None, layout: Layout | None
) -> Code:
    marshalled = _MARSHALLED if _marshallable(code) is not None else None
    if segment is None or layout is None:
        line, further, lines = code.co_firstlineno, (0, 0), (0, 0)
        member = None
    else:
        line, (at, column) = segment.first, segment.place
        further = at - line, column
        lines = layout.before(segment.first), segment.last - segment.first + 1
    return Code(
        code.co_qualname,
        code.co_filename,
        line,
        member,
        further,
        marshalled,
        code.co_freevars,
        future_flags(code),
        lines,
    )


# --- taken again ---


class Shelf:
    """Code by its number in a table. `read` gives the record's members; `magic` its interpreter."""

    def __init__(self, table: Table, read: Callable[[str], bytes], magic: str) -> None:
        self._codes = table.codes
        self._read = read
        self._same = magic == importlib.util.MAGIC_NUMBER.hex()
        self._made: dict[int, types.CodeType] = {}
        self._marshalled: dict[str, object] = {}
        self._sources: dict[str, list[str]] = {}
        self._shown: dict[str, dict[int, str]] = {}

    def code(self, number: int) -> types.CodeType:
        """One code object; raises `CannotReplay` if it can't be had on this interpreter."""
        made = self._made.get(number)
        if made is None:
            if number >= len(self._codes):
                raise ValueError("a function's code isn't there")
            node = self._codes[number]
            made = self._load(number, node) or self._compile(node)
            if made is None:
                raise _no_code(node, self._same)
            self._made[number] = made
            self._show(node)
        return made

    def _load(self, number: int, node: Code) -> types.CodeType | None:
        if not self._same or node.marshalled is None:
            return None
        if node.marshalled not in self._marshalled:
            try:
                found = marshal.loads(self._read(node.marshalled))
            except (ValueError, EOFError, TypeError):
                found = ()
            self._marshalled[node.marshalled] = found
        codes = self._marshalled[node.marshalled]
        code = codes[number] if isinstance(codes, tuple) and number < len(codes) else None
        if isinstance(code, types.CodeType) and code.co_freevars == node.free:
            return code
        return None

    def _compile(self, node: Code) -> types.CodeType | None:
        lines = self._lines(node)
        found = find_definition(lines, node.line, node.place) if lines else None
        if found is None:
            return None
        return compile_definition(found, node.file, node.name, node.free, node.flags)

    def _lines(self, node: Code) -> list[str]:
        if node.source is None:
            return []
        if node.source not in self._sources:
            text = self._read(node.source).decode("utf-8", "surrogatepass")
            self._sources[node.source] = io.StringIO(text).readlines()
        before, count = node.lines
        return self._sources[node.source][before : before + count]

    def _show(self, node: Code) -> None:
        """Let tracebacks print the record's lines, where the file here hasn't the same."""
        lines = self._lines(node)
        there = linecache.getlines(node.file)[node.line - 1 : node.line - 1 + len(lines)]
        if not lines or there == lines:
            return
        shown = self._shown.setdefault(node.file, {})
        shown.update(enumerate(lines, node.line))
        text = [shown.get(number, "\n") for number in range(1, max(shown) + 1)]
        # Without a time the entry is never compared with a file.
        linecache.cache[node.file] = (sum(map(len, text)), None, text, node.file)
        _replayed.add(node.file)


def _no_code(node: Code, same: bool) -> CannotReplay:
    if node.source is None:
        why = "its source wasn't known when it was recorded"
        if not same:
            why += ", and another interpreter wrote the record"
    else:
        why = "this interpreter can't compile its source"
    return CannotReplay(
        f"{node.file}:{node.line}: {node.name} can't be built here: {why}.\n"
        "Replay with the Python version that the record's manifest names.",
        slug="replay-no-code",
    )
