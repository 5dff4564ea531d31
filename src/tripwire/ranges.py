"""Source ranges: the whole Python call stack at the moment that a node was recorded.

Recording keeps code objects and instruction offsets only. Files, lines, columns and the
user's source text are looked up when somebody asks, so a range costs one tuple per node.
Frames that lie in torch or the standard library are kept and marked; those that are there
only because the run is observed are left out.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import CodeType
from typing import Generic, NamedTuple, TypeVar

from tripwire.env import is_dispatch_file, is_library_file

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Frame:
    """One stack entry: a line, and the columns of the call in it where Python knows them."""

    file: str
    line: int
    function: str
    columns: tuple[int, int] | None  # in characters; None where the call spans lines
    library: bool  # in torch or the standard library

    def __str__(self) -> str:
        return f"{self.file}({self.line}): {self.function}"

    @property
    def text(self) -> str:
        """The source line, stripped; empty where the file can't be read."""
        return linecache.getline(self.file, self.line).strip()


class SourceRange(NamedTuple):  # a tuple: 1.1 → 0.3 µs a node against a frozen dataclass
    """A call stack, innermost first."""

    raw: tuple[CodeType | int, ...]  # code, offset, code, offset, ...
    outer: SourceRange | None = None  # the stack around the enclosing module call, shared

    def pairs(self) -> Iterator[tuple[CodeType, int]]:
        """Code objects and instruction offsets, innermost first."""
        part: SourceRange | None = self
        while part is not None:
            parts = iter(part.raw)
            yield from zip(parts, parts, strict=True)
            part = part.outer

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Every frame of the stack, innermost first."""
        return tuple(self._walk())

    @property
    def place(self) -> Frame | None:
        """The innermost frame outside torch and the standard library, else the innermost."""
        first = None
        for frame in self._walk():
            if not frame.library:
                return frame
            first = first or frame
        return first

    def _walk(self) -> Iterator[Frame]:
        for code, offset in self.pairs():
            if not is_dispatch_file(code.co_filename):
                yield _frame(code, offset)

    def __str__(self) -> str:
        return "\n".join(map(str, self._walk()))

    def __repr__(self) -> str:
        return f"<SourceRange {self.short}>"

    @property
    def short(self) -> str:
        """`file.py:41`, with the file's last part only."""
        place = self.place
        if place is None:
            return "?"
        return f"{place.file.rpartition('/')[2]}:{place.line}"


NOWHERE = SourceRange(())


class PerCode(Generic[T]):
    """A cache by code object and instruction offset.

    Code objects hash and compare by content, which costs microseconds; here identity counts,
    and the cache keeps the code alive so that an identity is never reused.
    """

    def __init__(self, compute: Callable[[CodeType, int], T]) -> None:
        self._compute = compute
        self._entries: dict[tuple[int, int], tuple[T, CodeType]] = {}

    def __call__(self, code: CodeType, offset: int) -> T:
        found = self._entries.get((id(code), offset))
        if found is None:
            if len(self._entries) >= 65_536:  # a program that makes code without end
                self._entries.clear()
            found = self._entries[id(code), offset] = (self._compute(code, offset), code)
        return found[0]


def capture_range(
    depth: int, ends: tuple[CodeType | None, CodeType | None], outer: SourceRange | None
) -> SourceRange:
    """The stack from `depth` callers up to the first frame of `ends`, and `outer` beyond it.

    Outer stacks are taken once per module call and shared: a walk to the top for every node
    was a third of a trace's time on Python 3.12 (36 layers, 22 frames on average).
    """
    raw: list[CodeType | int] = []
    first, second = ends
    frame = sys._getframe(depth + 1)
    while frame is not None:
        code = frame.f_code
        if code is first or code is second:
            break
        raw.append(code)
        raw.append(frame.f_lasti)
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return SourceRange(tuple(raw), outer)


def is_library_caller(depth: int) -> bool:
    """Whether the frame `depth` callers up lies in torch or the standard library."""
    return is_library_file(sys._getframe(depth + 1).f_code.co_filename)


def _build_frame(code: CodeType, offset: int) -> Frame:
    file = code.co_filename
    line, end_line, start, end = next(islice(code.co_positions(), offset // 2, None))
    line = line or code.co_firstlineno
    columns = None
    if end_line == line and start is not None and end is not None:
        columns = _in_characters(linecache.getline(file, line), start, end)
    return Frame(file, line, code.co_qualname, columns, is_library_file(file))


def _in_characters(text: str, start: int, end: int) -> tuple[int, int]:
    """Columns of a code object count UTF-8 bytes; a reader counts characters."""
    if text.isascii():
        return start, end
    raw = text.encode()
    return len(raw[:start].decode(errors="replace")), len(raw[:end].decode(errors="replace"))


_frame = PerCode(_build_frame)
