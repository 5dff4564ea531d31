"""Render: a trace as a table, one row per node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from tripwire.reading.tensors import TensorMeta
from tripwire.values.classes import isinstance

if TYPE_CHECKING:
    from tripwire.tracing.result import Row, Trace

_WIDEST = (24, 34, 28, 28, 28)  # columns: name, op, value, scope, place


def render_trace(trace: Trace, *, source: bool) -> str:
    """The header, one row per node, then branches and effects where there are any."""
    table = [("name", "op", "value", "scope", "where"), *(_row(row) for row in trace.rows)]
    widths = [min(max(len(row[i]) for row in table), widest) for i, widest in enumerate(_WIDEST)]
    texts = [row.where.place for row in trace.rows] if source else []
    lines = [_title(trace)]
    for number, cells in enumerate(table):
        line = "  ".join(_fit(cell, width) for cell, width in zip(cells, widths, strict=True))
        place = texts[number - 1] if source and number else None
        lines.append(f"{line}  {place.text}" if place is not None else line.rstrip())
    lines += [f"branch: {branch}" for branch in trace.branches]
    lines += [f"written, not in the graph: {effect}" for effect in trace.effects]
    return "\n".join(lines)


def _title(trace: Trace) -> str:
    count = trace.statistics()
    return (
        f"trace of {trace.name}: {count.ops} ops, {count.inputs} inputs, {count.scopes} scopes, "
        f"{count.branches} branches"
    )


def _row(row: Row) -> tuple[str, str, str, str, str]:
    node = row.node
    where = row.where.short if row.where.frames else "-"
    return node.name, _op(node), _value(row.facts.value), row.scope or "-", where


def _op(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"constant {node.target}"
    if node.op == "call_method":
        return f".{node.target}({_arguments(node)})"
    target: Any = node.target
    return f"{getattr(target, '__name__', target)}({_arguments(node)})"


def _arguments(node: fx.Node) -> str:
    words = [str(arg) for arg in node.args]
    words += [f"{key}={value}" for key, value in node.kwargs.items()]
    return ", ".join(words)


def _value(value: TensorMeta | tuple[TensorMeta | None, ...] | None) -> str:
    if isinstance(value, TensorMeta) or value is None:
        return str(value or "-")
    return f"({', '.join('-' if item is None else str(item) for item in value)})"


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"
