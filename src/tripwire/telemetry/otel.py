"""OpenTelemetry: a log's spans, with their own times and parents, through an exporter of OTel.

Needs the package `opentelemetry-sdk`. Where the spans go is the business of the tracer provider
that the caller gives, or of the one that is set for the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from tripwire.errors import TelemetryError
from tripwire.telemetry.reader import Logged, LogReader
from tripwire.telemetry.schema import SpanDone


def export_spans(log: str | os.PathLike[str], provider: Any = None) -> int:
    """Hand a log's spans to OpenTelemetry; returns how many there were."""
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
    """Spans come after those inside them; a parent must be made first, so each tree is kept."""
    tracer = trace.get_tracer("tripwire", tracer_provider=provider)
    waiting: dict[int, list[tuple[Logged, SpanDone]]] = {}  # by thread
    sent = 0
    for logged in events:
        event = logged.event
        if not isinstance(event, SpanDone):
            continue
        tree = waiting.setdefault(event.thread, [])
        tree.append((logged, event))
        if event.depth == 0:
            sent += _send_tree(trace, tracer, tree)
            tree.clear()
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
