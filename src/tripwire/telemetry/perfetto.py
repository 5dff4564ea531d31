"""Perfetto: a log as a Chrome trace, in the object form.

Spans are complete events ("X") with the process and thread ids that they had; processes and
threads have their names. Within a thread spans nest or follow each other, and never overlap, which
viewers rely on. The file is written while the log is read: it may be larger than memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from tripwire.files import replacing
from tripwire.telemetry.chromium import ChromiumEvent
from tripwire.telemetry.reader import Logged, LogReader, too_large
from tripwire.telemetry.schema import (
    CompileFinished,
    Counts,
    Instant,
    Recompiled,
    RecordWritten,
    Retired,
    RunRefused,
    SpanDone,
    ThreadNamed,
)

MOST_LANES = 100_000


def write_chrome_trace(log: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Write the trace of a log's directory; Perfetto and chrome://tracing open it."""
    with replacing(target) as file:
        stream_trace(LogReader(log), file)
    return Path(target)


def stream_trace(reader: LogReader, file: IO[bytes]) -> None:
    """Write a trace while its log is read, twice: the first time for the earliest moment."""
    begin = min((logged.wall_ns for logged in reader), default=0)
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    separator = b"\n"
    for event in build_events(reader, begin):
        file.write(separator + msgspec.json.encode(event))
        separator = b",\n"
    file.write(b'\n],"otherData":{"start_wall_ns":"%d"}}\n' % begin)


def build_events(logged_events: Iterable[Logged], begin_ns: int) -> Iterator[ChromiumEvent]:
    """Events of the Chrome format, in microseconds since `begin_ns` of the calendar."""
    seen: set[str] = set()
    lanes: dict[tuple[str, int], _Lane] = {}
    for logged in logged_events:
        process, event = logged
        if process.token not in seen:
            seen.add(process.token)
            yield _name("process_name", process.pid, 0, process.label)
        ns = logged.wall_ns - begin_ns
        pid, tid = process.pid, event.thread
        match event:
            case ThreadNamed():
                yield _name("thread_name", pid, tid, event.name)
            case SpanDone():
                lane = lanes.setdefault((process.token, tid), _Lane())
                if len(lanes) > MOST_LANES:
                    raise too_large("threads", MOST_LANES, "a timeline")
                start, end = lane.place(ns, ns + event.duration_ns, event.depth)
                yield ChromiumEvent(
                    name=event.name,
                    ph="X",
                    ts=start / 1000,
                    dur=(end - start) / 1000,
                    pid=pid,
                    tid=tid,
                    args=_args(event),
                )
            case Counts():
                for group, names in event.groups.items():
                    args: dict[str, object] = dict(names)
                    yield ChromiumEvent(
                        name=group, ph="C", ts=ns / 1000, pid=pid, tid=tid, args=args
                    )
            case _:
                found = _instant(event)
                if found is not None:
                    name, args = found
                    yield ChromiumEvent(
                        name=name, ph="i", ts=ns / 1000, pid=pid, tid=tid, s="t", args=args
                    )


class _Lane:
    """One thread. Spans come in the order of their ends, each after those inside it."""

    def __init__(self) -> None:
        self._latest: list[tuple[int, int]] = []  # depth and end, at most one for each depth

    def place(self, start: int, end: int, depth: int) -> tuple[int, int]:
        """Start and end, moved behind the span before at the same depth if a clock went wrong."""
        while self._latest and self._latest[-1][0] > depth:
            self._latest.pop()
        if self._latest and self._latest[-1][0] == depth:
            start = max(start, self._latest.pop()[1])
        end = max(start, end)
        self._latest.append((depth, end))
        return start, end


def _name(kind: str, pid: int, tid: int, name: str) -> ChromiumEvent:
    return ChromiumEvent(
        name=kind, ph="M", ts=0, pid=pid, tid=tid, cat="__metadata", args={"name": name}
    )


def _args(event: SpanDone) -> dict[str, object]:
    args: dict[str, object] = dict(event.data)
    known = {"compile_id": event.compile_id, "error": event.error, "key": event.key}
    args.update({name: value for name, value in known.items() if value is not None})
    return args


def _instant(event: object) -> tuple[str, dict[str, object]] | None:
    """What else is worth a mark in the timeline."""
    match event:
        case Instant():
            return event.name, dict(event.data)
        case Retired():
            return f"retired: {event.source}", _fields(event)
        case RunRefused():
            return f"refused: {event.slug}", _fields(event)
        case Recompiled():
            return f"recompiled: {event.function}", _fields(event)
        case RecordWritten():
            return "record written", _fields(event)
        case CompileFinished():
            return f"compiled: {event.metrics.co_name or '?'}", {"compile_id": event.compile_id}
    return None


def _fields(event: msgspec.Struct) -> dict[str, object]:
    skipped = ("time_ns", "thread")
    return {k: v for k, v in msgspec.structs.asdict(event).items() if k not in skipped and v}
