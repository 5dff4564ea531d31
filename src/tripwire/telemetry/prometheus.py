"""Prometheus: the counters and times of this process in the text format.

The text needs no package. `serve_metrics` answers over HTTP through `prometheus_client`, where
that is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from threading import Thread
from typing import Any

from tripwire.errors import TelemetryError
from tripwire.telemetry.history import get_compilation_metrics
from tripwire.telemetry.threads import merge_totals, statistics

Sample = tuple[dict[str, str], float]


def prometheus_text() -> str:
    """All counters, span times and the failures of the latest compiles."""
    lines: list[str] = []
    for name, help_text, samples in _families():
        lines.append(f"# HELP {name} {help_text}")
        lines.append(f"# TYPE {name} {_kind(name)}")
        for labels, value in samples:
            inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
            lines.append(f"{name}{{{inside}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def serve_metrics(port: int = 9464, address: str = "127.0.0.1") -> tuple[Any, Thread]:
    """Answer Prometheus on a port, from a thread that ends with the process.

    Returns prometheus_client's server, which `shutdown()` stops, and its thread.
    """
    try:
        client = import_module("prometheus_client")
        core = import_module("prometheus_client.core")
    except ImportError as error:
        raise TelemetryError(
            "prometheus_client isn't installed, so nothing can answer over HTTP.\n"
            "pip install 'tripwire[prometheus]', or write prometheus_text() to a file.",
            slug="exporter-missing",
        ) from error

    class Collector:
        def collect(self) -> Iterator[object]:
            for name, help_text, samples in _families():
                labels = list(samples[0][0]) if samples else []
                kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
                family = kinds[_kind(name)](name.removesuffix("_total"), help_text, labels=labels)
                for values, value in samples:
                    family.add_metric(list(values.values()), value)
                yield family

    core.REGISTRY.register(Collector())
    server, thread = client.start_http_server(port, address)
    return server, thread


def _families() -> Iterable[tuple[str, str, list[Sample]]]:
    totals = sorted(merge_totals().items())
    yield (
        "tripwire_events_total",
        "Counters of tripwire, by group and name.",
        [
            ({"group": group, "name": name}, count)
            for group, names in sorted(statistics().groups.items())
            for name, count in sorted(names.items())
        ],
    )
    yield (
        "tripwire_span_seconds_total",
        "Time in spans; nested spans of one key count once.",
        [({"key": key}, total.ns / 1e9) for key, total in totals],
    )
    yield (
        "tripwire_spans_total",
        "Spans that ended.",
        [({"key": key}, total.calls) for key, total in totals],
    )
    failures: dict[str, int] = {}
    for metrics in get_compilation_metrics():
        if metrics.fail_type is not None:
            failures[metrics.fail_type] = failures.get(metrics.fail_type, 0) + 1
    yield (
        "tripwire_recent_compile_failures",
        "Failures among the latest compiles.",
        [({"type": kind}, count) for kind, count in sorted(failures.items())],
    )


def _kind(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"


def _escape(text: str) -> str:
    return re.sub(r'[\\"\n]', lambda m: {"\n": r"\n"}.get(m[0], "\\" + m[0]), text)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
