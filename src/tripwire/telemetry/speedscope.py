"""speedscope: a log's spans as flame graphs, one profile for each thread of each process.

The format wants each thread in order, so all spans are in memory while the file is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tripwire.telemetry.perfetto import describe
from tripwire.telemetry.reader import Logged, LogReader
from tripwire.telemetry.schema import SpanDone, ThreadNamed

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


class _Placed(NamedTuple):
    """A span; they sort as a flame graph opens them: the longer and the outer one first."""

    start: int
    minus_end: int
    depth: int
    frame: int


def write_speedscope(log: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Write the spans of a log's directory as a file that speedscope opens."""
    path = Path(target)
    path.write_bytes(msgspec.json.encode(build_speedscope(LogReader(log))))
    return path


def build_speedscope(logged_events: Iterable[Logged]) -> dict[str, object]:
    """The file's content, with times in microseconds since the first span."""
    frames: dict[str, int] = {}
    lanes: dict[tuple[str, int], list[_Placed]] = {}
    names: dict[tuple[str, int], str] = {}
    for logged in logged_events:
        process, event = logged
        lane = process.token, event.thread
        if isinstance(event, ThreadNamed):
            names[lane] = event.name
        elif isinstance(event, SpanDone):
            frame = frames.setdefault(event.name, len(frames))
            start = logged.wall_ns
            end = start + event.duration_ns
            lanes.setdefault(lane, []).append(_Placed(start, -end, event.depth, frame))
            names.setdefault(lane, str(event.thread))
            names.setdefault((process.token, -1), describe(process))
    first = min((span.start for spans in lanes.values() for span in spans), default=0)
    return {
        "$schema": SCHEMA,
        "exporter": "tripwire",
        "name": "tripwire",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": [
            _profile(f"{names[lane[0], -1]} {names[lane]}", spans, first)
            for lane, spans in lanes.items()
        ],
    }


def _profile(name: str, spans: list[_Placed], first_ns: int) -> dict[str, object]:
    """Opens and closes in order. A span that reaches beyond the one around it is cut there."""
    events: list[dict[str, object]] = []
    stack: list[tuple[int, int]] = []  # end, frame

    def close(until: int) -> None:
        while stack and stack[-1][0] <= until:
            end, frame = stack.pop()
            events.append({"type": "C", "frame": frame, "at": (end - first_ns) / 1000})

    for start, minus_end, _, frame in sorted(spans):
        close(start)
        stack.append((min(-minus_end, stack[-1][0]) if stack else -minus_end, frame))
        events.append({"type": "O", "frame": frame, "at": (start - first_ns) / 1000})
    close(max((end for end, _ in stack), default=0))
    return {
        "type": "evented",
        "name": name,
        "unit": "microseconds",
        "startValue": 0,
        "endValue": max(-span.minus_end - first_ns for span in spans) / 1000,
        "events": events,
    }
