"""Structured traces: a log as the files that `TORCH_TRACE` leaves, which tlparse opens.

One file per process. A line has a glog prefix and a JSON envelope; a payload follows on lines that
begin with a tab, and the envelope has its MD5. Strings that frames repeat are written once and
numbered. What torch has no word for (wires, reads, retirements, refusals) becomes artifacts.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from tripwire.files import check_no_link, make_folder, replacing
from tripwire.telemetry import schema
from tripwire.telemetry.compiles import CompileId
from tripwire.telemetry.metrics import CompilationMetrics
from tripwire.telemetry.reader import Allowance, Logged, LogReader, too_large

Envelope = dict[str, object]

INTERNED = 1_000  # strings that are remembered
_PATH = 800  # bytes that a path takes
_LONGEST_SOURCE = 200_000  # bytes of one guard function, as in reports
_PLACE = "tripwire/telemetry/log.py:1"
_SPLIT_BY = ("non_compliant_ops", "compliant_custom_ops", "restart_reasons")


def write_torch_trace(log: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[Path]:
    """Write one file for each process of a log into the directory `target`."""
    reader = LogReader(log)
    directory = Path(target)
    make_folder(directory)
    check_no_link(directory)
    written: list[Path] = []
    names: set[str] = set()
    allowance = Allowance(reader)
    for source in reader.files:
        events = reader.read_file(source)
        first = next(events, None)
        if first is None:
            continue
        process = first.process
        name = f"dedicated_log_torch_trace_{_tell_apart(process)}"
        if name in names:
            name = f"{name}_{len(written)}"
        names.add(name)
        path = directory / f"{name}.log"
        if not allowance.take(_PATH):
            raise too_large("processes")
        with replacing(path) as file:
            TraceWriter(file, process).add_all(itertools.chain((first,), events))
        written.append(path)
    return written


def _tell_apart(process: schema.Header) -> str:
    """A part of a file's name: digits and letters, whatever the log says."""
    rank = "" if process.rank is None else f"rank_{process.rank}_"
    token = process.token if re.fullmatch(r"[0-9a-zA-Z]{1,32}", process.token) else "log"
    return f"{rank}{process.pid}_{token}"


_Long = schema.GraphCaptured | schema.GuardsBuilt | schema.WiresArmed | schema.ReadsSeen


class _Payload(Struct, frozen=True):
    """A payload of which more may come."""

    event: _Long
    ns: int
    envelope: Envelope
    pieces: list[bytes]

    def goes_on_in(self, event: schema.Event) -> bool:
        before = self.event
        return (
            isinstance(event, type(before))
            and event.continues
            and (event.thread, event.compile_id) == (before.thread, before.compile_id)
        )

    def finish(self) -> list[bytes]:
        """The payload as torch has it."""
        match self.event:
            case schema.GraphCaptured():
                return [*schema.join_pieces(self.pieces, b"\n")]
            case schema.GuardsBuilt():
                return _guards(self.pieces)
        return [b"[", *schema.join_pieces(self.pieces, b","), b"]"]


class TraceWriter:
    """Writes the events of one process."""

    def __init__(self, file: IO[bytes], process: schema.Header) -> None:
        self._file = file
        self._process = process
        self._interned: dict[bytes, int] = {}
        self._held: _Payload | None = None
        self._strings = 0  # that were written

    def add_all(self, events: Iterable[Logged]) -> None:
        """Write events as they come."""
        for logged in events:
            self.add(logged)
        self._release()

    def add(self, logged: Logged) -> None:
        """Write one event, if the format has a place for it; its end may be in the next events."""
        event, ns = logged.event, logged.wall_ns
        if self._held is not None and not self._held.goes_on_in(event):
            self._release()
        match event:
            case schema.SpanDone():
                args = {**event.data, **({"error": event.error} if event.error else {})}
                self._chromium(event, ns, "X", event.name, args, event.duration_ns / 1000)
            case schema.Instant():
                self._chromium(event, ns, "i", event.name, dict(event.data))
            case schema.CompileStarted():
                frame = self._frame(event.file, event.line, event.function, ns)
                self._write(event, ns, {"dynamo_start": {"stack": [frame]}})
            case schema.CompileFinished():
                self._write(event, ns, {"compilation_metrics": _metrics(event.metrics)})
            case schema.RuntimeMetrics():
                self._artifact(event, ns, "runtime_metrics", event.metrics)
            case schema.GraphCaptured():
                sizes: dict[str, list[int]] = {}
                code = b"\n".join(_node(node).encode() for node in event.nodes)
                self._hold(event, ns, {"dynamo_output_graph": {"sizes": sizes}}, code)
            case schema.GuardsBuilt():
                self._hold(event, ns, {"dynamo_guards": {}}, event.source.encode())
            case schema.WiresArmed() | schema.ReadsSeen():
                part = schema.LONG[type(event)]
                rows = msgspec.json.encode(getattr(event, part))[1:-1]
                self._hold(event, ns, _name_artifact(f"tripwire_{part}"), rows)
            case (
                schema.Retired()
                | schema.RunRefused()
                | schema.Recompiled()
                | schema.RecordWritten()
            ):
                name = f"tripwire_{event.__struct_config__.tag}"
                self._artifact(event, ns, name, event)

    def _chromium(
        self,
        event: schema.Event,
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
        # Not indented: of data nested a thousand times, that would be four megabytes of spaces.
        self._write(event, ns, {"chromium_event": {}}, msgspec.json.encode(content))

    def _artifact(self, event: schema.Event, ns: int, name: str, content: object) -> None:
        self._write(event, ns, _name_artifact(name), msgspec.json.encode(content))

    def _hold(self, event: _Long, ns: int, envelope: Envelope, piece: bytes) -> None:
        """Keep a payload until its last piece has come: its sum stands before it."""
        if self._held is None:
            field = schema.LONG[type(event)]
            emptied = msgspec.structs.replace(event, **{field: getattr(event, field)[:0]})
            self._held = _Payload(emptied, ns, envelope, [])
        if piece:
            self._held.pieces.append(piece)

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._write(held.event, held.ns, held.envelope, held.finish())

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
        self,
        event: schema.Event,
        ns: int,
        envelope: Envelope,
        payload: bytes | list[bytes] | None = None,
    ) -> None:
        found = CompileId.find(event.compile_id)
        if found is not None:
            envelope["frame_id"] = found.frame_id
            envelope["frame_compile_id"] = found.frame_compile_id
            envelope["attempt"] = 0
        if self._process.rank is not None:
            envelope["rank"] = self._process.rank
        pieces = [payload] if isinstance(payload, bytes) else payload
        if pieces is not None:
            # A carriage return would end the line for the reader, and the sum would be another.
            digest = hashlib.md5(usedforsecurity=False)
            for piece in pieces:
                digest.update(piece.replace(b"\r", b"\\r"))
            envelope["has_payload"] = digest.hexdigest()
        self._line(ns, envelope, event.thread)
        if pieces is not None:
            self._file.write(b"\t")
            for piece in pieces:
                self._file.write(piece.replace(b"\r", b"\\r").replace(b"\n", b"\n\t"))
            self._file.write(b"\n")

    def _line(self, ns: int, envelope: Envelope, thread: int) -> None:
        moment = _moment(ns)
        prefix = f"V{moment:%m%d %H:%M:%S.%f} {thread or self._process.pid} {_PLACE}] "
        self._file.write(prefix.encode() + msgspec.json.encode(envelope) + b"\n")


def _name_artifact(name: str) -> Envelope:
    return {"artifact": {"name": name, "encoding": "json"}}


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


def _guards(source: Iterable[bytes]) -> list[bytes]:
    """A row for each line, as JSON, one after another: together they may be a great many."""
    pieces, rows = [b"["], bytearray()
    for line in io.BytesIO(b"".join(source)[:_LONGEST_SOURCE]):
        code = line.rstrip(b"\n").decode(errors="ignore")
        if code.strip():
            rows += b"," if rows or len(pieces) > 1 else b""
            rows += msgspec.json.encode({"code": code})
        if len(rows) > 1 << 15:
            pieces.append(bytes(rows))
            rows.clear()
    return [*pieces, bytes(rows), b"]"]


def _node(node: schema.GraphNode) -> str:
    place = f"  # {node.file}:{node.line} in {node.function}" if node.file else ""
    scope = f"  [{node.scope}]" if node.scope else ""
    shape = f": {node.shape}" if node.shape else ""
    return f"{node.name}{shape} = {node.op} {node.target}({', '.join(node.inputs)}){scope}{place}"
