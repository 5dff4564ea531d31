"""Timelines: a log as others show it: Perfetto, speedscope, OpenTelemetry, tlparse.

Within a thread spans nest or follow each other, and never overlap, which viewers rely on. A Chrome
trace is written while the log is read, so it may be larger than memory. A thread of a flame graph
must be in order: its spans are held, as few bytes each, and no more than `SPANS`.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tripwire.errors import TelemetryError
from tripwire.files import check_no_link, make_folder, replacing
from tripwire.telemetry.compiles import CompileId
from tripwire.telemetry.metrics import CompilationMetrics
from tripwire.telemetry.reader import Logged, LogReader, too_large
from tripwire.telemetry.schema import (
    CompileFinished,
    CompileStarted,
    Counts,
    Event,
    GraphCaptured,
    GraphNode,
    GuardsBuilt,
    Header,
    Instant,
    ReadsSeen,
    Recompiled,
    RecordWritten,
    Retired,
    RunRefused,
    RuntimeMetrics,
    SpanDone,
    ThreadNamed,
    WiresArmed,
)

MOST_LANES = 20_000  # threads that one timeline holds

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
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    separator = b"\n"
    for event in build_events(reader, begin):
        file.write(separator)
        file.write(msgspec.json.encode(event))
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


# --- speedscope: flame graphs, one profile for each thread of each process ------------------------

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
SPANS = 10_000_000
FRAMES = 50_000  # names of spans

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
    frames: dict[bytes, int] = {}  # by name; a text may take four times as much
    lanes: dict[tuple[str, int], list[bytes]] = {}
    names: dict[tuple[str, int], bytes] = {}
    spans = 0
    for logged in logged_events:
        process, event = logged
        lane = process.token, event.thread
        if isinstance(event, ThreadNamed):
            names[lane] = event.name.encode()
        elif isinstance(event, SpanDone):
            frame = frames.setdefault(event.name.encode(), len(frames))
            start = logged.wall_ns
            packed = _pack(start, start + event.duration_ns, event.depth, frame)
            lanes.setdefault(lane, []).append(packed)
            names.setdefault(lane, b"%d" % event.thread)
            names.setdefault((process.token, -1), process.label.encode())
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
    yield from _joined(msgspec.json.encode({"name": name.decode()}) for name in frames)
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
    waiting: dict[int, list[tuple[Logged, SpanDone]]] = {}  # by thread
    held = sent = 0
    for logged in events:
        event = logged.event
        if not isinstance(event, SpanDone):
            continue
        waiting.setdefault(event.thread, []).append((logged, event))
        held += 1
        for thread in (
            (event.thread,) if event.depth == 0 else (*waiting,) if held > WAITING else ()
        ):
            done = _send_tree(trace, tracer, waiting.pop(thread))
            sent, held = sent + done, held - done
    return sent + sum(_send_tree(trace, tracer, tree) for tree in waiting.values())


def _send_tree(trace: Any, tracer: Any, tree: list[tuple[Logged, SpanDone]]) -> int:
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


# --- structured traces: a log as the files that `TORCH_TRACE` leaves, which tlparse opens ---
# One file per process. A line has a glog prefix and a JSON envelope; a payload follows on lines
# that begin with a tab, and the envelope has its MD5. Strings that frames repeat are written once
# and numbered. What torch has no word for (wires, reads, retirements, refusals) becomes artifacts.


Envelope = dict[str, object]

INTERNED = 20_000  # strings that are remembered
_LONGEST_SOURCE = 200_000  # characters of one guard function, as in reports
_PLACE = "tripwire/telemetry/log.py:1"
_SPLIT_BY = ("non_compliant_ops", "compliant_custom_ops", "restart_reasons")


def write_torch_trace(log: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[Path]:
    """Write one file for each process of a log into the directory `target`."""
    reader = LogReader(log)
    directory = Path(target)
    make_folder(directory)
    check_no_link(directory)
    written: list[Path] = []
    for source in reader.files:
        events = reader.read_file(source)
        first = next(events, None)
        if first is None:
            continue
        process = first.process
        path = directory / f"dedicated_log_torch_trace_{_tell_apart(process)}.log"
        if path in written:
            path = path.with_stem(f"{path.stem}_{len(written)}")
        with replacing(path) as file:
            writer = TraceWriter(file, process)
            writer.add(first)
            writer.add_all(events)
        written.append(path)
    return written


def _tell_apart(process: Header) -> str:
    """A part of a file's name: digits and letters, whatever the log says."""
    rank = "" if process.rank is None else f"rank_{process.rank}_"
    token = process.token if re.fullmatch(r"[0-9a-zA-Z]{1,32}", process.token) else "log"
    return f"{rank}{process.pid}_{token}"


class TraceWriter:
    """Writes the events of one process."""

    def __init__(self, file: IO[bytes], process: Header) -> None:
        self._file = file
        self._process = process
        self._interned: dict[bytes, int] = {}
        self._strings = 0  # that were written

    def add_all(self, events: Iterable[Logged]) -> None:
        """Write events as they come."""
        for logged in events:
            self.add(logged)

    def add(self, logged: Logged) -> None:
        """Write one event, if the format has a place for it."""
        event, ns = logged.event, logged.wall_ns
        match event:
            case SpanDone():
                self._span(event, ns)
            case Instant():
                self._chromium(event, ns, "i", event.name, dict(event.data))
            case CompileStarted():
                frame = self._frame(event.file, event.line, event.function, ns)
                self._write(event, ns, {"dynamo_start": {"stack": [frame]}})
            case CompileFinished():
                self._write(event, ns, {"compilation_metrics": _metrics(event.metrics)})
            case RuntimeMetrics():
                self._artifact(event, ns, "runtime_metrics", event.metrics)
            case GraphCaptured():
                sizes: dict[str, list[int]] = {}
                code = b"\n".join(_node(node).encode() for node in event.nodes)
                self._write(event, ns, {"dynamo_output_graph": {"sizes": sizes}}, code)
            case GuardsBuilt():
                self._write(event, ns, {"dynamo_guards": {}}, _guards(event.source))
            case WiresArmed() | ReadsSeen():
                rows_of = event.wires if isinstance(event, WiresArmed) else event.reads
                name = "tripwire_wires" if isinstance(event, WiresArmed) else "tripwire_reads"
                self._artifact(event, ns, name, rows_of)
            case Retired() | RunRefused() | Recompiled() | RecordWritten():
                name = f"tripwire_{event.__struct_config__.tag}"
                self._artifact(event, ns, name, event)

    def _span(self, event: SpanDone, ns: int) -> None:
        args = {**event.data, **({"error": event.error} if event.error else {})}
        self._chromium(event, ns, "X", event.name, args, event.duration_ns / 1000)

    def _chromium(
        self,
        event: Event,
        ns: int,
        phase: str,
        name: str,
        args: dict[str, object],
        duration_us: float | None = None,
    ) -> None:
        content: dict[str, object] = {
            "name": name,
            "ts": ns / 1000,
            "ph": phase,
            "cat": "tripwire",
            "pid": self._process.pid,
            "tid": event.thread,
            "args": {"compile_id": str(event.compile_id), **args},
        }
        if duration_us is not None:
            content["dur"] = duration_us
        if phase == "i":
            content["s"] = "t"
        payload = msgspec.json.format(msgspec.json.encode(content), indent=2)
        self._write(event, ns, {"chromium_event": {}}, payload)

    def _artifact(self, event: Event, ns: int, name: str, content: object) -> None:
        envelope: Envelope = {"artifact": {"name": name, "encoding": "json"}}
        self._write(event, ns, envelope, msgspec.json.encode(content))

    def _frame(self, file: str, line: int, function: str, ns: int) -> dict[str, object]:
        name = file.encode()  # a text may take four times as much
        number = self._interned.get(name)
        if number is None:
            if len(self._interned) >= INTERNED:
                self._interned.clear()  # they are written again, with other numbers
            number = self._interned[name] = self._strings
            self._strings += 1
            self._line(ns, {"str": [file, number]}, 0)
        return {"filename": number, "line": line, "name": function}

    def _write(
        self, event: Event, ns: int, envelope: Envelope, payload: bytes | None = None
    ) -> None:
        found = CompileId.find(event.compile_id)
        if found is not None:
            envelope["frame_id"] = found.frame_id
            envelope["frame_compile_id"] = found.frame_compile_id
            envelope["attempt"] = 0
        if self._process.rank is not None:
            envelope["rank"] = self._process.rank
        if payload is not None:
            # A carriage return would end the line for the reader, and the sum would be another.
            payload = payload.replace(b"\r", b"\\r")
            envelope["has_payload"] = hashlib.md5(payload, usedforsecurity=False).hexdigest()
        self._line(ns, envelope, event.thread)
        if payload is not None:
            self._file.write(b"\t")
            self._file.write(payload.replace(b"\n", b"\n\t"))
            self._file.write(b"\n")

    def _line(self, ns: int, envelope: Envelope, thread: int) -> None:
        moment = _moment(ns)
        prefix = f"V{moment:%m%d %H:%M:%S.%f} {thread or self._process.pid} {_PLACE}] "
        self._file.write(prefix.encode() + msgspec.json.encode(envelope) + b"\n")


def _moment(ns: int) -> datetime:
    try:
        return datetime.fromtimestamp(ns / 1e9, UTC)
    except (OverflowError, OSError, ValueError):  # a damaged log's time is on no calendar
        return datetime.fromtimestamp(0, UTC)


def _metrics(metrics: CompilationMetrics) -> dict[str, object]:
    """The metrics with torch's names; what it has as sets becomes lists again."""
    row = {name: value for name, value in metrics.as_row().items() if value is not None}
    for name in _SPLIT_BY:
        text = row.get(name)
        if isinstance(text, str):
            row[name] = text.split(",")
    if "fail_type" in row:
        row.setdefault("fail_reason", "")
    return row


def _guards(source: str) -> bytes:
    """A row for each line, as JSON, one after another: together they may be a great many."""
    rows = bytearray(b"[")
    for line in source[:_LONGEST_SOURCE].splitlines():
        if line.strip():
            rows += b"," if len(rows) > 1 else b""
            rows += msgspec.json.encode({"code": line})
    return bytes(rows + b"]")


def _node(node: GraphNode) -> str:
    place = f"  # {node.file}:{node.line} in {node.function}" if node.file else ""
    scope = f"  [{node.scope}]" if node.scope else ""
    shape = f": {node.shape}" if node.shape else ""
    return f"{node.name}{shape} = {node.op} {node.target}({', '.join(node.inputs)}){scope}{place}"
