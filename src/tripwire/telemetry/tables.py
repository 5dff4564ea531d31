"""Tables: rows in columns for a terminal, through `tabulate` where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module


def tabulate(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """A table as text; plain columns where the package is absent."""
    try:
        package = import_module("tabulate")
    except ImportError:
        return plain_table(rows, headers)
    return str(package.tabulate(rows, headers=headers))


def plain_table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Columns as wide as their widest cell; numbers stand to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(headers))]

    def line(values: Sequence[str]) -> str:
        placed = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(values, widths, numeric, strict=True)
        ]
        return "  ".join(placed).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *map(line, cells)])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
