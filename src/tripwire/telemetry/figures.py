"""Figures: where the time went and what was counted, told to people, to the log and to Prometheus.

They begin with the process, or when they were cleared. When the process ends they are handed over:
counters and runtime metrics to the log, times to the logger where somebody wants them.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from threading import Thread
from typing import Any, Literal, overload

from tripwire.errors import TelemetryError
from tripwire.telemetry.contexts import get_compilation_metrics, get_runtime_metrics_context
from tripwire.telemetry.log import emit
from tripwire.telemetry.schema import Counts
from tripwire.telemetry.threads import (
    Total,
    clear_totals,
    count,
    merge_totals,
    reset_counters,
    statistics,
)

logger = logging.getLogger("tripwire.telemetry")

TOTAL = "total_wall_time"
_WHOLE = ("compile",)  # the spans that are a whole: their sum is the total


@overload
def compile_times(repr: Literal["str"] = "str", aggregate: bool = False) -> str: ...
@overload
def compile_times(repr: Literal["csv"], aggregate: bool = False) -> tuple[list[str], list[str]]: ...
def compile_times(
    repr: Literal["str", "csv"] = "str", aggregate: bool = False
) -> str | tuple[list[str], list[str]]:
    """How long the spans of each key took: each one's time, or with `aggregate` their sum.

    "csv" gives headers and one row. Of a key with very many spans the latest 1,024 are listed.
    """
    totals = merge_totals()
    if repr == "csv":
        return list(totals), [_seconds(total, aggregate, 6) for total in totals.values()]
    if repr != "str":
        raise ValueError(f'repr={repr!r}: "str" or "csv"')
    rows = [(key, _seconds(total, aggregate, 4)) for key, total in totals.items()]
    return "tripwire compile times:\n" + tabulate(rows, ("Span", "Seconds"))


def tabulate(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Rows as a table of Markdown; columns of numbers stand to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.MARKDOWN)
    for at, name in enumerate(headers):
        numbers = bool(rows) and all(isinstance(row[at], int | float) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{v:g}" if isinstance(v, float) else str(v) for v in row))
    console = Console(
        file=io.StringIO(),
        width=1 << 20,
        color_system=None,
        markup=False,
        emoji=False,
        highlight=False,
        force_jupyter=False,
    )
    with console.capture() as shown:
        console.print(table)
    return shown.get().strip()


def calculate_time_spent() -> dict[str, float]:
    """Seconds by key, nested spans of a key counted once, and the total of all compiles."""
    spent = {key: total.ns / 1e9 for key, total in merge_totals().items()}
    spent[TOTAL] = sum(spent.get(key, 0.0) for key in _WHOLE)
    return spent


def print_time_report() -> None:
    """Print what `calculate_time_spent` says, in one line."""
    print("TIMING:", *(f"{key}:{round(s, 5)}" for key, s in calculate_time_spent().items()))


def increment_frame() -> None:
    """One more call was traced."""
    count("frames", "total")


def increment_op_count(by: int) -> None:
    """That many more torch calls were recorded."""
    count("ops", "total", by)


def reset_frame_count() -> None:
    """Begin anew: no times, no counts."""
    clear_totals()
    reset_counters()


def _seconds(total: Total, aggregate: bool, digits: int) -> str:
    if aggregate:
        return f"{total.ns / 1e9:.{digits}f}"
    return ", ".join(f"{ns / 1e9:.{digits}f}" for ns in total.durations_ns)


_summary_wanted = os.environ.get("TRIPWIRE_SUMMARY", "0") not in ("", "0")


def log_summary_at_exit(wanted: bool = True) -> None:
    """Log the times when the process ends; TRIPWIRE_SUMMARY=1 does the same."""
    global _summary_wanted
    _summary_wanted = wanted


def log_counters() -> None:
    """Leave all counters in the log, if there are any."""
    groups = {group: dict(names) for group, names in statistics().groups.items()}
    if groups:
        emit(Counts, groups=groups)


def dump_compile_times() -> None:
    """What happens at exit: metrics and counters are handed over, times logged if wanted."""
    get_runtime_metrics_context().finish()
    log_counters()
    if _summary_wanted and merge_totals():
        # A program that set no log up shows warnings only; whoever asked for a table gets one.
        level = logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING
        logger.log(level, "%s", compile_times(repr="str", aggregate=True))


atexit.register(dump_compile_times)


# --- Prometheus -----------------------------------------------------------------------------------

Sample = tuple[dict[str, str], float]


def prometheus_text() -> str:
    """All counters, span times and the failures of the latest compiles, in the text format."""
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

    class PrometheusCollector:
        def collect(self) -> Iterator[object]:
            for name, help_text, samples in _families():
                labels = list(samples[0][0]) if samples else []
                kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
                family = kinds[_kind(name)](name.removesuffix("_total"), help_text, labels=labels)
                for values, value in samples:
                    family.add_metric(list(values.values()), value)
                yield family

    core.REGISTRY.register(PrometheusCollector())
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
