"""Details: the graph, guards, wires and reads of a compile, as JSON within a budget of bytes.

The page reads them one compile at a time. When all of them together grow beyond the budget, those
of the fastest compiles go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from tripwire.report.model import Graph, NodeRow, Rows, Seen, UserLine, cut
from tripwire.telemetry.metrics import CompilationMetrics
from tripwire.telemetry.schema import GraphNode, ReadRow

BYTES = 24 << 20  # of all details together
NODES = 50_000  # of one graph
ROWS = 5_000  # wires, or reads, of one compile
SOURCE = 200_000  # characters of one guard function


class Details:
    """What is kept of each compile, by its number."""

    def __init__(self, most_bytes: int = BYTES) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._parts: dict[int, dict[str, bytes]] = {}
        self._finished: list[tuple[int, int]] = []  # (microseconds, compile), a heap
        self.left_out: set[int] = set()

    def add(self, compile: int, part: str, value: object) -> None:
        """Keep a part of a compile; the same part again replaces it."""
        if compile in self.left_out:
            return
        encoded = msgspec.json.encode(value)
        parts = self._parts.setdefault(compile, {})
        self._bytes += len(encoded) - len(parts.get(part, b""))
        parts[part] = encoded
        while self._bytes > self._most:
            self._drop_lightest()

    def finish(self, compile: int, duration_us: int) -> None:
        """Say how long a compile took: the fastest ones may go."""
        heapq.heappush(self._finished, (duration_us, compile))

    def find(self, compile: int) -> bytes | None:
        """The detail of a compile as a JSON object, or None."""
        parts = self._parts.get(compile)
        if not parts:
            return None
        return b"{%s}" % b",".join(b'"%s":%s' % (k.encode(), v) for k, v in parts.items())

    def _drop_lightest(self) -> None:
        while self._finished:
            _, lightest = heapq.heappop(self._finished)
            if lightest in self._parts:
                break
        else:
            lightest = next(iter(self._parts))  # the oldest that never ended
        self.left_out.add(lightest)
        self._bytes -= sum(map(len, self._parts.pop(lightest).values()))


def build_graph(nodes: Sequence[GraphNode]) -> Graph:
    """A graph with numbers for what repeats."""
    kept = nodes[:NODES]
    numbers = {node.name: number for number, node in enumerate(kept)}
    scopes: dict[str, int] = {}
    places: dict[UserLine, int] = {}
    rows = []
    for node in kept:
        place = UserLine(
            cut(node.file),
            node.line,
            cut(node.function, 200),
            cut(node.text),
            cut(node.excerpt, 2_000),
        )
        rows.append(
            NodeRow(
                cut(node.name, 200),
                cut(node.op, 40),
                cut(node.target),
                [numbers[name] for name in node.inputs if name in numbers],
                scopes.setdefault(cut(node.scope), len(scopes)),
                places.setdefault(place, len(places)),
                cut(node.shape),
            )
        )
    return Graph(rows, list(scopes), list(places), len(nodes) - len(kept))


def build_rows(rows: Sequence[ReadRow]) -> Rows:
    """Wires or reads."""
    kept = [
        Seen(cut(row.source), cut(row.seen, 1_000), cut(row.file), row.line, cut(row.text))
        for row in rows[:ROWS]
    ]
    return Rows(kept, len(rows) - len(kept))


def plain_metrics(metrics: CompilationMetrics) -> dict[str, object]:
    """What is known of a compile, without what isn't."""
    return {name: _short(value) for name, value in msgspec.to_builtins(metrics).items()}


def _short(value: object) -> object:
    if isinstance(value, str):
        return cut(value, 4_000)
    if isinstance(value, (list, tuple)):  # a stack
        return [_short(part) for part in value[:100]]
    return value
