"""Lanes: of each thread the heaviest spans are kept, in a bounded heap.

A span is at least as long as those inside it, so what is around a kept span is kept as well, and
the lanes still nest. All lanes share one budget: when a thread appears, the others give way.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from tripwire.report.model import Lane, Mark, SpanRow
from tripwire.telemetry.schema import SpanDone

SPANS = 60_000  # of all lanes together
LANES = 256
MARKS = 300  # of one lane


class _Kept(NamedTuple):
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
        self.heap: list[_Kept] = []
        self.marks: list[Mark] = []
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
            heap, _Kept(duration, -event.depth, -lane.total, start, name, compile, error)
        )
        lane.trim(self._limit)

    def add_mark(self, process: int, thread: int, mark: Mark) -> None:
        """Take in a moment."""
        lane = self.find(process, thread)
        if lane is None or len(lane.marks) >= MARKS:
            self.marks_left_out += 1
        else:
            lane.marks.append(mark)

    def rows(self, beginnings: list[int]) -> list[Lane]:
        """The lanes, with times since each process's `beginning`."""
        found = []
        for key in sorted(self._threads):
            thread = self._threads[key]
            begin = beginnings[thread.process]
            spans = [
                SpanRow(
                    k.start_ns - begin, k.duration_ns, -k.minus_depth, k.name, k.compile, k.error
                )
                for k in thread.heap
            ]
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
