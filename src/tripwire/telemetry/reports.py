"""Reports: where the time went, by key, since the process began or the figures were cleared."""

from __future__ import annotations

import atexit
import logging
import os
from typing import Literal, overload

from tripwire.telemetry.history import get_runtime_metrics_context
from tripwire.telemetry.log import emit
from tripwire.telemetry.schema import Counts
from tripwire.telemetry.tables import tabulate
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
        logger.info(compile_times(repr="str", aggregate=True))


atexit.register(dump_compile_times)
