"""speedscope: a log's spans as flame graphs, one profile for each thread of each process.

The format wants each thread in order, so all spans are in memory while the file is made: as few
bytes each, and no more than `SPANS`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tripwire.files import replacing
from tripwire.telemetry.perfetto import MOST_LANES
from tripwire.telemetry.reader import Logged, LogReader, too_large
from tripwire.telemetry.schema import SpanDone, ThreadNamed

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
SPANS = 10_000_000
FRAMES = 500_000  # names of spans

# Start, end, depth, frame. Packed spans sort as a flame graph opens them: the longer and the outer
# one first. 72 bytes each in a list, where a tuple of numbers has 200.
_SPAN = struct.Struct(">QQII")
_MIDDLE = 1 << 63


def write_speedscope(log: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Write the spans of a log's directory as a file that speedscope opens."""
    with replacing(target) as file:
        file.writelines(stream_speedscope(LogReader(log)))
    return Path(target)


def stream_speedscope(logged_events: Iterable[Logged]) -> Iterator[bytes]:
    """The file's content, piece by piece, with times in microseconds since the first span."""
    frames: dict[str, int] = {}
    lanes: dict[tuple[str, int], list[bytes]] = {}
    names: dict[tuple[str, int], str] = {}
    spans = 0
    for logged in logged_events:
        process, event = logged
        lane = process.token, event.thread
        if isinstance(event, ThreadNamed):
            names[lane] = event.name
        elif isinstance(event, SpanDone):
            frame = frames.setdefault(event.name, len(frames))
            start = logged.wall_ns
            packed = _pack(start, start + event.duration_ns, event.depth, frame)
            lanes.setdefault(lane, []).append(packed)
            names.setdefault(lane, str(event.thread))
            names.setdefault((process.token, -1), process.label)
            spans += 1
        for what, there, most in (
            ("threads", len(names), 2 * MOST_LANES),
            ("names of spans", len(frames), FRAMES),
            ("spans", spans, SPANS),
        ):
            if there > most:
                raise too_large(what, most, "speedscope")
    first = min((_unpack(span)[0] for spans in lanes.values() for span in spans), default=0)
    yield b'{"$schema":%s,"exporter":"tripwire","name":"tripwire",' % msgspec.json.encode(SCHEMA)
    yield b'"activeProfileIndex":0,"shared":{"frames":['
    yield from _joined(msgspec.json.encode({"name": name}) for name in frames)
    yield b']},"profiles":['
    separator = b""
    for lane, packed_spans in lanes.items():
        yield separator
        yield from _profile(f"{names[lane[0], -1]} {names[lane]}", packed_spans, first)
        separator = b",\n"
    yield b"]}\n"


def _pack(start: int, end: int, depth: int, frame: int) -> bytes:
    """A damaged log's times may lie beyond 64 bits: they are moved to the edge."""
    start, end = (min(max(-_MIDDLE, ns), _MIDDLE - 1) for ns in (start, end))
    return _SPAN.pack(start + _MIDDLE, _MIDDLE - 1 - end, depth, frame)


def _unpack(span: bytes) -> tuple[int, int, int]:
    start, end, _, frame = _SPAN.unpack(span)
    return start - _MIDDLE, _MIDDLE - 1 - end, frame


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    separator = b""
    for piece in pieces:
        yield separator + piece
        separator = b",\n"


def _profile(name: str, spans: list[bytes], first_ns: int) -> Iterator[bytes]:
    spans.sort()
    last = max(_unpack(span)[1] for span in spans)
    head = {"type": "evented", "name": name, "unit": "microseconds", "startValue": 0}
    yield msgspec.json.encode({**head, "endValue": (last - first_ns) / 1000})[:-1]
    yield b',"events":['
    yield from _joined(msgspec.json.encode(event) for event in _events(spans, first_ns))
    yield b"]}"


def _events(spans: list[bytes], first_ns: int) -> Iterator[dict[str, object]]:
    """Opens and closes in order. A span that reaches beyond the one around it is cut there."""
    stack: list[tuple[int, int]] = []  # end, frame

    def close(until: int) -> Iterator[dict[str, object]]:
        while stack and stack[-1][0] <= until:
            end, frame = stack.pop()
            yield {"type": "C", "frame": frame, "at": (end - first_ns) / 1000}

    for span in spans:
        start, end, frame = _unpack(span)
        yield from close(start)
        stack.append((min(end, stack[-1][0]) if stack else end, frame))
        yield {"type": "O", "frame": frame, "at": (start - first_ns) / 1000}
    yield from close(max((end for end, _ in stack), default=0))
