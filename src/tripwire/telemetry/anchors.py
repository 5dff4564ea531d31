"""Anchors: source lines with carets under the part that matters.

The whole expression gets `~`, its operator, brackets or call parentheses `^`. An expression may
span several lines. Columns of code objects count UTF-8 bytes; people count characters.
"""

from __future__ import annotations

import ast
import io
import linecache
import tokenize
from collections.abc import Sequence
from types import CodeType
from typing import NamedTuple


class Anchor(NamedTuple):
    """Where the part that matters begins and ends, in lines from 0 and characters."""

    line: int
    column: int
    end_line: int
    end_column: int


def to_characters(text: str, byte_offset: int) -> int:
    """A column in characters for one in UTF-8 bytes."""
    if text.isascii():
        return byte_offset
    return len(text.encode()[:byte_offset].decode(errors="replace"))


def find_anchor(segment: str) -> Anchor | None:
    """The operator, subscript or argument list of an expression; None for other expressions."""
    try:
        # On a line of its own in parentheses an expression may span lines.
        tree = ast.parse(f"(\n{segment}\n)", mode="eval")
        tokens = list(tokenize.generate_tokens(io.StringIO(f"(\n{segment}\n)").readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return None
    lines = segment.split("\n")
    match tree.body:
        case ast.BinOp(left=before):
            return _operator(tokens, lines, before)
        case ast.Subscript(value=before) as whole:
            return _brackets(tokens, lines, before, whole, "[")
        case ast.Call(func=before) as whole:
            return _brackets(tokens, lines, before, whole, "(")
    return None


def _operator(
    tokens: list[tokenize.TokenInfo], lines: list[str], before: ast.expr
) -> Anchor | None:
    for token in _after(tokens, lines, before):
        if token.type == tokenize.OP and token.string != ")":
            return Anchor(token.start[0] - 2, token.start[1], token.end[0] - 2, token.end[1])
    return None


def _brackets(
    tokens: list[tokenize.TokenInfo],
    lines: list[str],
    before: ast.expr,
    whole: ast.expr,
    opening: str,
) -> Anchor | None:
    for token in _after(tokens, lines, before):
        if token.string == opening:
            end_line, end_column = _end(lines, whole)
            return Anchor(token.start[0] - 2, token.start[1], end_line, end_column)
    return None


def _after(
    tokens: list[tokenize.TokenInfo], lines: list[str], before: ast.expr
) -> list[tokenize.TokenInfo]:
    """The tokens behind an expression, comments and parentheses around it included."""
    line, column = _end(lines, before)
    return [token for token in tokens if (token.start[0] - 2, token.start[1]) >= (line, column)]


def _end(lines: list[str], node: ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    line = node.end_lineno - 2
    return line, to_characters(lines[line], node.end_col_offset)


def underline(lines: Sequence[str], column: int, end_column: int) -> str:
    """Source lines, each with its marks below; columns are in characters.

    `column` is in the first line, `end_column` in the last. Indentation isn't marked.
    """
    marks = []
    for number, line in enumerate(lines):
        begin = column if number == 0 else len(line) - len(line.lstrip())
        end = end_column if number == len(lines) - 1 else len(line.rstrip())
        marks.append([" "] * begin + ["~"] * max(0, end - begin))
    segment = "\n".join(
        line[column if n == 0 else 0 : end_column if n == len(lines) - 1 else None]
        for n, line in enumerate(lines)
    )
    anchor = find_anchor(segment)
    for number, row in enumerate(marks):
        shift = column if number == 0 else 0
        for at, mark in enumerate(row):
            if mark == "~" and (anchor is None or _inside(anchor, number, at - shift)):
                row[at] = "^"
    return "".join(
        f"{line.rstrip()}\n{''.join(row).rstrip()}\n"
        for line, row in zip(lines, marks, strict=True)
    )


def _inside(anchor: Anchor, line: int, column: int) -> bool:
    return (anchor.line, anchor.column) <= (line, column) < (anchor.end_line, anchor.end_column)


def format_source_range(
    file: str,
    line: int | None,
    end_line: int | None = None,
    column: int | None = None,
    end_column: int | None = None,
) -> str:
    """The source lines of a range with carets below; columns count bytes, as Python's do.

    Only the first line where the range isn't known, and nothing where the file can't be read.
    """
    if line is None:
        return ""
    lines = [
        linecache.getline(file, number).rstrip("\n")
        for number in range(line, (end_line or line) + 1)
    ]
    if not any(lines):
        return ""
    if end_line is None or column is None or end_column is None:
        return lines[0].rstrip()
    first, last = to_characters(lines[0], column), to_characters(lines[-1], end_column)
    return underline(lines, first, last)


def format_instruction(code: CodeType, offset: int) -> str:
    """The source of one instruction, by its offset in bytes as in `frame.f_lasti`."""
    for number, place in enumerate(code.co_positions()):
        if number == offset // 2:
            line, end_line, column, end_column = place
            return format_source_range(code.co_filename, line, end_line, column, end_column)
    return ""
