"""Budgets: what a report keeps of events, however many there are.

A lane keeps the heaviest spans of its thread, in a bounded heap. A span is at least as long as
those inside it, so what is around a kept span is kept as well, and the lanes still nest. All lanes
share one budget: when a thread appears, the others give way. A group is one row with a count for
events that say the same.

The graph, guards, wires and reads of a compile are JSON, which the page reads one compile at a
time. When all of them together grow beyond their budget, those of the fastest compiles go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tripwire.report.model import (
    Graph,
    Group,
    Groups,
    Lane,
    Moment,
    NodeRow,
    Occurrence,
    Rows,
    Seen,
    SpanRow,
    UserLine,
    cut,
)
from tripwire.telemetry.metrics import CompilationMetrics
from tripwire.telemetry.schema import GraphNode, ReadRow, SpanDone

SPANS = 60_000  # of all lanes together
LANES = 256
MARKS = 300  # of one lane
GROUPS = 2_000
OCCURRENCES = 12  # that a group keeps: its first ones, then its latest


class _HeavySpan(NamedTuple):
    """A span as the heap orders it: the shortest first, of equals the innermost."""

    duration_ns: int
    minus_depth: int
    minus_order: int
    start_ns: int
    name: int
    compile: int
    error: str


class Thread:
    """One thread's spans and moments while they come in."""

    def __init__(self, process: int, thread: int) -> None:
        self.process = process
        self.thread = thread
        self.name = ""
        self.total = 0
        self.heap: list[_HeavySpan] = []
        self.marks: list[Moment] = []
        self.left_out_ns = 0

    def trim(self, limit: int) -> None:
        """Keep the heaviest spans only."""
        while len(self.heap) > limit:
            self.left_out_ns = max(self.left_out_ns, heapq.heappop(self.heap).duration_ns)


class Lanes:
    """All threads of all processes."""

    def __init__(self, spans: int = SPANS, lanes: int = LANES) -> None:
        self._spans = spans
        self._lanes = lanes
        self._threads: dict[tuple[int, int], Thread] = {}
        self._turned_away: set[tuple[int, int]] = set()
        self._limit = spans
        self.marks_left_out = 0

    @property
    def left_out(self) -> int:
        """Threads that have no lane."""
        return len(self._turned_away)

    def find(self, process: int, thread: int) -> Thread | None:
        """The thread's lane, made if need be; None where there are too many."""
        key = process, thread
        found = self._threads.get(key)
        if found is None:
            if len(self._threads) >= self._lanes:
                if len(self._turned_away) < 100_000:
                    self._turned_away.add(key)
                return None
            found = self._threads[key] = Thread(process, thread)
            self._limit = max(1, self._spans // len(self._threads))
            for other in self._threads.values():
                other.trim(self._limit)
        return found

    def add_span(self, process: int, event: SpanDone, start: int, name: int, compile: int) -> None:
        """Take in a span that begins at `start` on the calendar."""
        lane = self.find(process, event.thread)
        if lane is None:
            return
        lane.total += 1
        duration = max(0, event.duration_ns)
        heap = lane.heap
        if len(heap) >= self._limit and duration < heap[0].duration_ns:
            lane.left_out_ns = max(lane.left_out_ns, duration)
            return
        error = (event.error or "")[:80]
        heapq.heappush(
            heap, _HeavySpan(duration, -event.depth, -lane.total, start, name, compile, error)
        )
        lane.trim(self._limit)

    def add_mark(self, process: int, thread: int, mark: Moment) -> None:
        """Take in a moment."""
        lane = self.find(process, thread)
        if lane is None or len(lane.marks) >= MARKS:
            self.marks_left_out += 1
        else:
            lane.marks.append(mark)

    def rows(self, beginnings: list[int]) -> list[Lane]:
        """The lanes, with times since each process's `beginning`; they are handed over, once."""
        found = []
        for key in sorted(self._threads):
            thread = self._threads[key]
            begin = beginnings[thread.process]
            spans = []
            while thread.heap:  # given up one by one: together they would be here twice
                k = thread.heap.pop()
                spans.append(
                    SpanRow(
                        k.start_ns - begin,
                        k.duration_ns,
                        -k.minus_depth,
                        k.name,
                        k.compile,
                        k.error,
                    )
                )
            spans.sort(key=lambda span: (span.start_ns, span.depth, -span.duration_ns))
            for mark in thread.marks:
                mark.time_ns -= begin
            if spans or thread.marks:
                found.append(
                    Lane(
                        process=thread.process,
                        thread=thread.thread,
                        name=thread.name or f"thread {thread.thread}",
                        spans=spans,
                        marks=thread.marks,
                        total=thread.total,
                        left_out_ns=thread.left_out_ns,
                    )
                )
        return found


class Grouping:
    """Rows by what was written, where and by whom; or by the reason of a refusal."""

    def __init__(self, most: int = GROUPS) -> None:
        self._most = most
        self._groups: dict[tuple[str, str, UserLine], Group] = {}
        self._left_out = 0
        self.total = 0

    def add(self, title: str, reason: str, place: UserLine, occurrence: Occurrence) -> None:
        """Count one event."""
        self.total += 1
        key = title, reason, place
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= self._most:
                self._left_out += 1
                return
            group = self._groups[key] = Group(
                title=title, reason=reason, place=place, first_ns=occurrence.time_ns
            )
        group.count += 1
        group.last_ns = occurrence.time_ns
        process = occurrence.process
        group.by_process[process] = group.by_process.get(process, 0) + 1
        if len(group.occurrences) >= OCCURRENCES:
            group.occurrences.pop()
        group.occurrences.append(occurrence)

    def rows(self, beginnings: list[int]) -> Groups:
        """The groups, most frequent first, with times since each process's `beginning`."""
        for group in self._groups.values():
            for occurrence in group.occurrences:
                occurrence.time_ns -= beginnings[occurrence.process]
            # Clocks of processes differ by a constant; the first and the last are still told.
            group.first_ns = group.occurrences[0].time_ns
            group.last_ns = group.occurrences[-1].time_ns
        rows = sorted(self._groups.values(), key=lambda group: -group.count)
        return Groups(rows, self.total, self._left_out)


# --- graphs, guards and reads, as JSON ---


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
