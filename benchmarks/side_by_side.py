"""Shared by the benchmarks: measure several sides in one run, and print them side by side.

Rounds are interleaved (A, B, C, A, B, C, ...), so a slow moment of the machine falls on every
side alike. A ratio is taken within each round; the table shows the median of those ratios and
their lowest and highest, never a ratio of two figures from different runs.

Importing this module puts the checkout's `src` first on the path: the benchmarks measure the
tripwire beside them, installed or not.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))


BATCH = 1e-2  # seconds

Calls = dict[str, Callable[[], object]]  # by side: one call


@dataclass(frozen=True, slots=True)
class Side:
    """One thing to time. `prepare` runs before each round, outside the clock."""

    label: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


@dataclass(slots=True)
class Figures:
    """What was measured of one side, one value a round; `error` names why there is none."""

    label: str
    values: list[float] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and how far they lie apart."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f}x  ({self.low:.2f}–{self.high:.2f})"


def time_sides(sides: Sequence[Side], rounds: int, *, uncounted: int = 1) -> list[Figures]:
    """Seconds of every side in each of the interleaved rounds.

    One more round goes first and isn't counted: it pays for imports and caches. A side that
    raises keeps its error, and the other sides go on without it. Garbage is collected before
    each clock starts, and what a side returned is dropped after the clock has stopped.
    """
    figures = [Figures(side.label) for side in sides]
    for number in range(uncounted + rounds):
        for side, row in zip(sides, figures, strict=True):
            if row.error is not None:
                continue
            if side.prepare is not None:
                side.prepare()
            gc.collect()
            try:
                start = time.perf_counter()
                kept = side.run()
                seconds = time.perf_counter() - start
            except Exception as error:
                row.values, row.error = [], type(error).__name__
                continue
            del kept
            if number >= uncounted:
                row.values.append(seconds)
    return figures


def time_calls(programs: dict[str, Calls], rounds: int) -> dict[str, list[Figures]]:
    """Seconds a call of every side of every program, one value a round.

    A value comes from a batch of calls, after a call outside the clock. Batches are short: on a
    busy machine a short one has a chance to run undisturbed, and the lowest figure is its.
    """
    sides, numbers = [], []
    for calls in programs.values():
        for label, call in calls.items():
            number = _count_calls(call)
            sides.append(Side(label, functools.partial(_repeat, call, number), prepare=call))
            numbers.append(number)
    gc.collect()
    gc.freeze()  # or each collection between two batches walks every model and every guard
    timed = iter(zip(time_sides(sides, rounds), numbers, strict=True))
    gc.unfreeze()
    return {
        title: [
            Figures(row.label, [value / number for value in row.values], row.error)
            for row, number in itertools.islice(timed, len(calls))
        ]
        for title, calls in programs.items()
    }


def _repeat(call: Callable[[], object], number: int) -> None:
    for _ in itertools.repeat(None, number):
        call()


def _count_calls(call: Callable[[], object]) -> int:
    """How many calls make a batch. The first call, which may compile, isn't counted."""
    call()
    number = 1
    while True:
        start = time.perf_counter()
        _repeat(call, number)
        seconds = time.perf_counter() - start
        if seconds > BATCH / 4:
            return max(1, round(number * BATCH / seconds))
        number *= 2


def spread_of(values: Sequence[float]) -> Spread:
    """The median, the lowest and the highest."""
    return Spread(median(values), min(values), max(values))


def compare(figures: Sequence[Figures], label: str, reference: str) -> Spread | None:
    """How many times the reference a side takes, round by round; None where either failed."""
    rows = {row.label: row for row in figures}
    ours, theirs = rows[label], rows[reference]
    if ours.error is not None or theirs.error is not None:
        return None
    return spread_of([a / b for a, b in zip(ours.values, theirs.values, strict=True)])


def print_table(
    title: str, figures: Sequence[Figures], reference: str, *, unit: str, scale: float
) -> None:
    """Print a row per side: the median and the range in `unit`, and the ratio to `reference`.

    A value times `scale` is a figure in `unit`.
    """
    rows = [("side", f"median {unit}", f"range {unit}", f"x {reference}  (low–high)")]
    for row in figures:
        if row.error is not None:
            rows.append((row.label, row.error, "", ""))
            continue
        seen = spread_of([value * scale for value in row.values])
        ratio = compare(figures, row.label, reference)
        middle, between = f"{seen.middle:.1f}", f"{seen.low:.1f}–{seen.high:.1f}"
        rows.append((row.label, middle, between, str(ratio or "")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}")
    for label, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join(["", label.ljust(widths[0]), *aligned]).rstrip())


def describe_machine() -> str:
    """The versions and the processor count, in one line for the top of a run."""
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{os.cpu_count()} CPUs, torch threads: {torch.get_num_threads()}"
    )


def write_json(path: Path, benchmark: str, settings: dict[str, Any], figures: object) -> None:
    """Write a run's figures with its date, versions and processor count.

    `figures` is anything that `json` writes, with `Figures` in it wherever wanted.
    """
    document = {
        "benchmark": benchmark,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "settings": settings,
        "figures": figures,
    }
    path.write_text(json.dumps(document, indent=2, default=_as_plain) + "\n")


def _as_plain(value: object) -> object:
    if isinstance(value, Figures):
        return {"label": value.label, "values": value.values, "error": value.error}
    raise TypeError(f"{type(value).__name__} is no part of a benchmark's figures")
