"""Timelines: a log's spans as others show them: Perfetto, speedscope, OpenTelemetry.

Within a thread spans nest or follow each other, and never overlap, which viewers rely on. A Chrome
trace is written while the log is read, so it may be larger than memory. A thread of a flame graph
must be in order: its spans are held, as few bytes each, and no more than an `Allowance` pays for.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from sys import getsizeof
from typing import IO, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tripwire.errors import TelemetryError
from tripwire.files import replacing
from tripwire.telemetry import schema
from tripwire.telemetry.reader import Allowance, Logged, LogReader, too_large

# Bytes that what is held takes, beside its texts: a thread, a span of a depth that others are
# inside of, and in a flame graph a span and a name.
_THREAD, _DEPTH, _HELD, _NAMED = 400, 150, 100, 200

# --- Perfetto and chrome://tracing: the Chrome trace format, in its object form -------------------


class ChromiumEvent(Struct, frozen=True, kw_only=True):
    """One event of the Chrome trace format."""

    name: str
    ph: str  # B, E, X, i or M
    ts: float
    pid: int
    tid: int
    cat: str = "tripwire"
    dur: float | UnsetType = UNSET
    s: str | UnsetType = UNSET  # how far an instant reaches: its thread
    args: dict[str, object] = {}


def write_chrome_trace(log: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Write the trace of a log's directory; Perfetto and chrome://tracing open it."""
    with replacing(target) as file:
        stream_trace(LogReader(log), file)
    return Path(target)


def stream_trace(reader: LogReader, file: IO[bytes]) -> None:
    """Write a trace while its log is read, twice: the first time for the earliest moment."""
    begin = min((logged.wall_ns for logged in reader), default=0)
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    file.writelines(
        schema.join_pieces(map(msgspec.json.encode, build_events(reader, begin)), b",\n")
    )
    file.write(b'\n],"otherData":{"start_wall_ns":"%d"}}\n' % begin)


def build_events(reader: LogReader, begin_ns: int) -> Iterator[ChromiumEvent]:
    """Events of the Chrome format, in microseconds since `begin_ns` of the calendar."""
    seen: set[str] = set()
    lanes: dict[tuple[str, int], _ThreadSpans] = {}
    allowance = Allowance(reader)
    for logged in reader:
        process, event = logged
        if process.token not in seen:
            _pay(allowance, _THREAD + getsizeof(process.token), "processes")
            seen.add(process.token)
            yield _name("process_name", process.pid, 0, process.label)
        ns = logged.wall_ns - begin_ns
        pid, tid = process.pid, event.thread
        match event:
            case schema.ThreadNamed():
                yield _name("thread_name", pid, tid, event.name)
            case schema.SpanDone():
                lane = lanes.get((process.token, tid))
                if lane is None:
                    _pay(allowance, _THREAD + getsizeof(process.token), "threads")
                    lane = lanes[process.token, tid] = _ThreadSpans()
                before = lane.depths
                start, end = lane.place(ns, ns + event.duration_ns, event.depth)
                _pay(allowance, _DEPTH * (lane.depths - before), "depths of spans")
                yield ChromiumEvent(
                    name=event.name,
                    ph="X",
                    ts=start / 1000,
                    dur=(end - start) / 1000,
                    pid=pid,
                    tid=tid,
                    args=_args(event),
                )
            case schema.Counts():
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


class _ThreadSpans:
    """One thread. Spans come in the order of their ends, each after those inside it."""

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: list[tuple[int, int]] = []  # depth and end, at most one for each depth

    @property
    def depths(self) -> int:
        """How many spans are held."""
        return len(self._latest)

    def place(self, start: int, end: int, depth: int) -> tuple[int, int]:
        """Start and end, moved behind the span before at the same depth if a clock went wrong."""
        while self._latest and self._latest[-1][0] > depth:
            self._latest.pop()
        if self._latest and self._latest[-1][0] == depth:
            start = max(start, self._latest.pop()[1])
        end = max(start, end)
        self._latest.append((depth, end))
        return start, end


def _pay(allowance: Allowance, size: int, what: str) -> None:
    if not allowance.take(size):
        raise too_large(what)


def _name(kind: str, pid: int, tid: int, name: str) -> ChromiumEvent:
    return ChromiumEvent(
        name=kind, ph="M", ts=0, pid=pid, tid=tid, cat="__metadata", args={"name": name}
    )


def _args(event: schema.SpanDone) -> dict[str, object]:
    args: dict[str, object] = dict(event.data)
    known = {"compile_id": event.compile_id, "error": event.error, "key": event.key}
    args.update({name: value for name, value in known.items() if value is not None})
    return args


def _instant(event: object) -> tuple[str, dict[str, object]] | None:
    """What else is worth a mark in the timeline."""
    match event:
        case schema.Instant():
            return event.name, dict(event.data)
        case schema.Retired():
            return f"retired: {event.source}", _fields(event)
        case schema.RunRefused():
            return f"refused: {event.slug}", _fields(event)
        case schema.Recompiled():
            return f"recompiled: {event.function}", _fields(event)
        case schema.RecordWritten():
            return "record written", _fields(event)
        case schema.CompileFinished():
            return f"compiled: {event.metrics.co_name or '?'}", {"compile_id": event.compile_id}
    return None


def _fields(event: msgspec.Struct) -> dict[str, object]:
    skipped = ("time_ns", "thread")
    return {k: v for k, v in msgspec.structs.asdict(event).items() if k not in skipped and v}


# --- speedscope: flame graphs, one profile for each thread of each process ------------------------

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

# Start, end, depth, frame. Packed spans sort as a flame graph opens them: the longer and the outer
# one first. 72 bytes each in a list, where a tuple of numbers has 200.
_SPAN = struct.Struct(">QQII")
_MIDDLE = 1 << 63


def write_speedscope(log: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Write the spans of a log's directory as a file that speedscope opens."""
    with replacing(target) as file:
        file.writelines(stream_speedscope(LogReader(log)))
    return Path(target)


def stream_speedscope(reader: LogReader) -> Iterator[bytes]:
    """The file's content, piece by piece, with times in microseconds since the first span."""
    frames: dict[bytes, int] = {}  # by name; a text may take four times as much
    lanes: dict[tuple[str, int], list[bytes]] = {}
    names: dict[tuple[str, int], bytes] = {}
    allowance = Allowance(reader)
    for logged in reader:
        process, event = logged
        lane = process.token, event.thread
        if isinstance(event, schema.ThreadNamed):
            name = event.name.encode()
            _pay(allowance, _NAMED + len(name), "names of threads")
            names[lane] = name
        elif isinstance(event, schema.SpanDone):
            name = event.name.encode()
            if name not in frames:
                _pay(allowance, _NAMED + len(name), "names of spans")
                frames[name] = len(frames)
            if lane not in lanes:
                _pay(allowance, _THREAD + getsizeof(process.token), "threads")
                lanes[lane] = []
            _pay(allowance, _HELD, "spans")
            start = logged.wall_ns
            packed = _pack(start, start + event.duration_ns, event.depth, frames[name])
            lanes[lane].append(packed)
            names.setdefault(lane, b"%d" % event.thread)
            if (process.token, -1) not in names:
                label = process.label.encode()
                _pay(allowance, _NAMED + len(label), "processes")
                names[process.token, -1] = label
    first = min((_unpack(span)[0] for spans in lanes.values() for span in spans), default=0)
    yield b'{"$schema":%s,"exporter":"tripwire","name":"tripwire",' % msgspec.json.encode(SCHEMA)
    yield b'"activeProfileIndex":0,"shared":{"frames":['
    encoded = (msgspec.json.encode({"name": name.decode()}) for name in frames)
    yield from schema.join_pieces(encoded, b",\n")
    yield b']},"profiles":['
    separator = b""
    for lane, packed_spans in lanes.items():
        yield separator
        name = b"%s %s" % (names[lane[0], -1], names[lane])
        yield from _profile(name.decode(), packed_spans, first)
        separator = b",\n"
    yield b"]}\n"


def _pack(start: int, end: int, depth: int, frame: int) -> bytes:
    """A damaged log's times may lie beyond 64 bits: they are moved to the edge."""
    start, end = (min(max(-_MIDDLE, ns), _MIDDLE - 1) for ns in (start, end))
    return _SPAN.pack(start + _MIDDLE, _MIDDLE - 1 - end, depth, frame)


def _unpack(span: bytes) -> tuple[int, int, int]:
    start, end, _, frame = _SPAN.unpack(span)
    return start - _MIDDLE, _MIDDLE - 1 - end, frame


def _profile(name: str, spans: list[bytes], first_ns: int) -> Iterator[bytes]:
    spans.sort()
    last = max(_unpack(span)[1] for span in spans)
    head = {"type": "evented", "name": name, "unit": "microseconds", "startValue": 0}
    yield msgspec.json.encode({**head, "endValue": (last - first_ns) / 1000})[:-1]
    yield b',"events":['
    yield from schema.join_pieces(map(msgspec.json.encode, _events(spans, first_ns)), b",\n")
    yield b"]}"


def _events(spans: list[bytes], first_ns: int) -> Iterator[dict[str, object]]:
    """Opens and closes in order. A span that reaches beyond the one around it is cut there."""
    ends, open_frames = array("q"), array("q")  # of spans that are open: there may be many

    def close(until: int) -> Iterator[dict[str, object]]:
        while ends and ends[-1] <= until:
            end, frame = ends.pop(), open_frames.pop()
            yield {"type": "C", "frame": frame, "at": (end - first_ns) / 1000}

    for span in spans:
        start, end, frame = _unpack(span)
        yield from close(start)
        ends.append(min(end, ends[-1]) if ends else end)
        open_frames.append(frame)
        yield {"type": "O", "frame": frame, "at": (start - first_ns) / 1000}
    yield from close(max(ends, default=0))


# --- OpenTelemetry: through an exporter of its own ------------------------------------------------

WAITING = 20_000  # spans that are held until the one around them ends


def export_spans(log: str | os.PathLike[str], provider: Any = None) -> int:
    """Hand a log's spans, with their times and parents, to OpenTelemetry; returns how many.

    Where they go is the business of the tracer provider that is given, or of the one that is set
    for the process.
    """
    try:
        trace = import_module("opentelemetry.trace")
    except ImportError as error:
        raise TelemetryError(
            "opentelemetry isn't installed.\npip install 'tripwire[opentelemetry]'.",
            slug="exporter-missing",
        ) from error
    reader = LogReader(log)
    sent = 0
    for path in reader.files:
        sent += _export(trace, reader.read_file(path), provider)
    return sent


def _export(trace: Any, events: Iterable[Logged], provider: Any) -> int:
    """Spans come after those inside them; a parent must be made first, so each tree is kept.

    Where more than `WAITING` wait for the one around them, they are sent without it.
    """
    tracer = trace.get_tracer("tripwire", tracer_provider=provider)
    waiting: dict[int, list[tuple[Logged, schema.SpanDone]]] = {}  # by thread
    held = sent = 0
    for logged in events:
        event = logged.event
        if not isinstance(event, schema.SpanDone):
            continue
        waiting.setdefault(event.thread, []).append((logged, event))
        held += 1
        for thread in (
            (event.thread,) if event.depth == 0 else (*waiting,) if held > WAITING else ()
        ):
            done = _send_tree(trace, tracer, waiting.pop(thread))
            sent, held = sent + done, held - done
    return sent + sum(_send_tree(trace, tracer, tree) for tree in waiting.values())


def _send_tree(trace: Any, tracer: Any, tree: list[tuple[Logged, schema.SpanDone]]) -> int:
    above: dict[int, Any] = {}  # the context of the latest span at each depth
    for logged, event in reversed(tree):  # the outermost first, later ones before earlier ones
        parent = above.get(event.depth - 1)
        span = tracer.start_span(
            event.name,
            context=parent,
            start_time=logged.wall_ns,
            attributes={
                "tripwire.process": logged.process.label,
                "thread.id": event.thread,
                **{f"tripwire.{k}": str(v) for k, v in event.data.items()},
                **({"tripwire.compile_id": event.compile_id} if event.compile_id else {}),
            },
        )
        if event.error:
            span.set_status(trace.Status(trace.StatusCode.ERROR, event.error))
        above[event.depth] = trace.set_span_in_context(span)
        span.end(logged.wall_ns + event.duration_ns)
    return len(tree)
