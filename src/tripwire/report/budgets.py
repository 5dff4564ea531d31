"""Budgets: what a report keeps of events, however many there are.

A lane keeps the heaviest spans of its thread, in a bounded heap. A span is at least as long as
those inside it, so what is around a kept span is kept as well, and the lanes still nest. All lanes
share one budget: when a thread appears, the others give way. A group is one row with a count for
events that say the same.

The graph, guards, wires and reads of a compile are JSON, which the page reads one compile at a
time. When all of them together grow beyond their budget, those of the fastest compiles go first.

Besides, memory for all that is kept is limited by the size of the log (`Allowance`): a log of very
short lines, which no real program writes, leaves fewer rows than these.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from operator import attrgetter
from sys import getsizeof
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
from tripwire.telemetry.reader import Allowance
from tripwire.telemetry.schema import GraphNode, ReadRow, SpanDone, join_pieces

SPANS = 60_000  # of all lanes together
LANES = 256
MARKS = 300  # of one lane
GROUPS = 2_000
OCCURRENCES = 12  # that a group keeps: its first ones, then its latest

# Bytes that a row takes, beside its texts: what is found by its name takes an entry of a dict, too.
SPAN, MARK, LANE, GROUP, OCCURRENCE, PIECE = 260, 160, 900, 900, 200, 400
COUNT = 120  # a number under a name


def measure(*texts: str) -> int:
    """Bytes that texts take. Those that aren't ASCII hold their UTF-8, too, once it was written."""
    return sum(getsizeof(t) + (0 if t.isascii() else len(t.encode())) for t in texts)


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

    def trim(self, limit: int) -> int:
        """Keep the heaviest spans only; how many went."""
        before = len(self.heap)
        while len(self.heap) > limit:
            self.left_out_ns = max(self.left_out_ns, heapq.heappop(self.heap).duration_ns)
        return before - len(self.heap)


class Lanes:
    """All threads of all processes."""

    def __init__(self, allowance: Allowance, spans: int = SPANS, lanes: int = LANES) -> None:
        self._allowance = allowance
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
            if len(self._threads) >= self._lanes or not self._allowance.take(LANE):
                if len(self._turned_away) < 100_000 and self._allowance.take(LANE // 4):
                    self._turned_away.add(key)
                return None
            found = self._threads[key] = Thread(process, thread)
            self._limit = max(1, self._spans // len(self._threads))
            for other in self._threads.values():
                self._trim(other, self._limit)
        return found

    def _trim(self, lane: Thread, limit: int) -> None:
        self._allowance.give_back(SPAN * lane.trim(limit))

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
        paid = self._allowance.take(SPAN)
        self._trim(lane, self._limit if paid else len(heap) - 1)

    def add_mark(self, process: int, thread: int, mark: Moment) -> None:
        """Take in a moment."""
        lane = self.find(process, thread)
        cost = MARK + measure(mark.text)
        if lane is None or len(lane.marks) >= MARKS or not self._allowance.take(cost):
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
            # One after the other, by what is there: keys of three would be as large as the spans.
            spans.sort(key=attrgetter("duration_ns"), reverse=True)
            spans.sort(key=attrgetter("depth"))
            spans.sort(key=attrgetter("start_ns"))
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

    def __init__(self, allowance: Allowance, most: int = GROUPS) -> None:
        self._allowance = allowance
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
            texts = title, reason, place.file, place.excerpt, place.function
            cost = GROUP + measure(*texts) + _price(occurrence)
            if len(self._groups) >= self._most or not self._allowance.take(cost):
                self._left_out += 1
                return
            group = self._groups[key] = Group(title=title, reason=reason, place=place)
        group.count += 1
        process = occurrence.process
        if process in group.by_process or self._allowance.take(COUNT):
            group.by_process[process] = group.by_process.get(process, 0) + 1
        if group.occurrences:  # the first one was paid for with its group
            occurrence = self._make_room(group, occurrence)
        group.occurrences.append(occurrence)

    def _make_room(self, group: Group, latest: Occurrence) -> Occurrence:
        """Let others go for the latest; it comes without its texts where they can't be paid for."""
        if len(group.occurrences) >= OCCURRENCES:
            self._allowance.give_back(_price(group.occurrences.pop()))
        if self._allowance.take(_price(latest)):
            return latest
        del group.occurrences[1:]
        return Occurrence(latest.time_ns, latest.process, latest.compile)

    def rows(self, beginnings: list[int]) -> Groups:
        """The groups, most frequent first, with times since each process's `beginning`."""
        for group in self._groups.values():
            for occurrence in group.occurrences:
                occurrence.time_ns -= beginnings[occurrence.process]
        rows = sorted(self._groups.values(), key=lambda group: -group.count)
        return Groups(rows, self.total, self._left_out)


def _price(occurrence: Occurrence) -> int:
    return OCCURRENCE + measure(occurrence.before, occurrence.after)


# --- graphs, guards and reads, as JSON ---


BYTES = 24 << 20  # of all details together
NODES = 50_000  # of one graph
ROWS = 5_000  # wires, or reads, of one compile
SOURCE = 200_000  # characters of one guard function


class Details:
    """What is kept of each compile, by its number."""

    def __init__(self, allowance: Allowance, most_bytes: int = BYTES) -> None:
        self.allowance = allowance
        self._most = most_bytes
        self._bytes = 0
        self._parts: dict[int, dict[str, list[bytes]]] = {}
        self._finished: list[tuple[int, int]] = []  # (microseconds, compile), a heap
        self._ended: set[int] = set()  # those that are in it, or were
        self.left_out: set[int] = set()

    def add(self, compile: int, part: str, value: object, *, continues: bool = False) -> None:
        """Keep a part of a compile, or more of it; the same part again replaces it."""
        if compile in self.left_out:
            return
        encoded = msgspec.json.encode(value)
        parts = self._parts.setdefault(compile, {})
        if not continues:
            self._forget(parts.pop(part, []))
        pieces = parts.setdefault(part, [])
        if not self.allowance.take(PIECE + len(encoded)):
            self._drop(compile)
            return
        pieces.append(encoded)
        self._bytes += len(encoded)
        while self._bytes > self._most:
            self._drop_lightest()

    def finish(self, compile: int, duration_us: int) -> None:
        """Say how long a compile took: the fastest ones may go."""
        if compile not in self._ended:
            self._ended.add(compile)
            heapq.heappush(self._finished, (duration_us, compile))

    def __contains__(self, compile: int) -> bool:
        return bool(self._parts.get(compile))

    def find(self, compile: int, part: str) -> list[bytes]:
        """The pieces of a part, each as JSON."""
        return self._parts.get(compile, {}).get(part, [])

    def stream(self, compile: int) -> Iterator[bytes]:
        """The detail of a compile as a JSON object: of each part a list with its pieces."""
        yield b"{"
        for number, (part, pieces) in enumerate(self._parts.get(compile, {}).items()):
            yield b'%s"%s":[' % (b"," if number else b"", part.encode())
            yield from join_pieces(pieces, b",")
            yield b"]"
        yield b"}"

    def _drop_lightest(self) -> None:
        while self._finished:
            _, lightest = heapq.heappop(self._finished)
            if lightest in self._parts:
                break
        else:
            lightest = next(iter(self._parts))  # the oldest that never ended
        self._drop(lightest)

    def _drop(self, compile: int) -> None:
        self.left_out.add(compile)
        for pieces in self._parts.pop(compile).values():
            self._forget(pieces)

    def _forget(self, pieces: list[bytes]) -> None:
        size = sum(map(len, pieces))
        self._bytes -= size
        self.allowance.give_back(PIECE * len(pieces) + size)


def build_graph(nodes: Sequence[GraphNode], room: int) -> Graph:
    """A graph, or a stretch of one, with numbers for the scopes and lines that repeat."""
    kept = nodes[: max(0, room)]
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
                [cut(name, 200) for name in node.inputs],
                scopes.setdefault(cut(node.scope), len(scopes)),
                places.setdefault(place, len(places)),
                cut(node.shape),
            )
        )
    return Graph(rows, list(scopes), list(places), len(nodes) - len(kept))


def build_rows(rows: Sequence[ReadRow], room: int) -> Rows:
    """Wires or reads."""
    kept = [
        Seen(cut(row.source), cut(row.seen, 1_000), cut(row.file), row.line, cut(row.text))
        for row in rows[: max(0, room)]
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
