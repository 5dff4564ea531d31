"""What telemetry costs beside torch._dynamo.utils, in one process and interleaved.

A span is a `with` block around nothing, a count adds one to one counter. Each side runs a batch
of them a round; the figures include the loop around them, which is a side of its own. Sides:

    span off            `timed("key")` after `disable()`.
    span                `timed("key")` as a program has it: figures in memory, no log, no timeline.
    span, column        the same inside a compile, with a column of its metrics.
    span, two deep      an inner and an outer one; the figure is that of both.
    span, log           with an event for each in a log file.
    span, timeline      with the timeline of this process active.
    dynamo_timed        torch's, as it is after `import torch`: no trace is written.
    count               `count("group", "name")`.
    counters[...] += 1  torch's.

Afterwards: what part of a compile no phase claims. It is glue, and there in every compile, so the
least of several is compared with the least duration.

Each aim is printed with what was measured. It is held against the lowest figures, which a busy
machine disturbs least; beside them stands the median of the rounds.

    python benchmarks/bench_telemetry.py [--rounds N] [--batch N] [--json PATH]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from side_by_side import Figures, Side, describe_machine, print_table, time_sides, write_json
from torch import nn
from torch._dynamo.utils import compilation_time_metrics, counters, dynamo_timed

import tripwire
from tripwire import telemetry
from tripwire.telemetry import count, pytorch, timed
from tripwire.telemetry.compiles import CompileId, compiling

AIMS = {"span off": 0.2, "span": 2.0, "span, column": 2.0, "count": 0.3}  # microseconds each
UNCLAIMED = 0.05  # of a compile's time


def build_sides(batch: int, directory: str) -> list[Side]:
    """Every side, each with what it needs switched on or off around its batch."""
    block = range(batch)

    def empty() -> None:
        for _ in block:
            pass

    def spans() -> None:
        for _ in block:
            with timed("key"):
                pass

    def spans_off() -> None:
        telemetry.disable()
        try:
            spans()
        finally:
            telemetry.enable()

    def columns() -> None:
        with compiling(CompileId(0), function="f"):
            for _ in block:
                with timed("key", column_us="trace_us"):
                    pass

    def nested() -> None:
        for _ in block:
            with timed("outer"), timed("inner"):
                pass

    def logged() -> None:
        with telemetry.logging_to(directory):
            spans()

    def in_timeline() -> None:
        pytorch.get_chromium_event_logger()
        try:
            spans()
        finally:
            pytorch.stop_chromium_event_logger()

    def dynamo() -> None:
        for _ in block:
            with dynamo_timed("key"):
                pass

    def dynamo_column() -> None:
        for _ in block:
            with dynamo_timed("key", dynamo_compile_column_us="dynamo_cumulative_compile_time_us"):
                pass

    def counts() -> None:
        for _ in block:
            count("group", "name")

    def torch_counts() -> None:
        for _ in block:
            counters["group"]["name"] += 1

    def forget() -> None:
        compilation_time_metrics.clear()  # torch keeps each duration

    sides: list[tuple[str, Callable[[], None]]] = [
        ("loop", empty),
        ("span off", spans_off),
        ("span", spans),
        ("span, column", columns),
        ("span, two deep", nested),
        ("span, log", logged),
        ("span, timeline", in_timeline),
        ("dynamo_timed", dynamo),
        ("dynamo_timed, column", dynamo_column),
        ("count", counts),
        ("counters[...] += 1", torch_counts),
    ]
    return [Side(label, run, forget) for label, run in sides]


def print_aims(figures: list[Figures], batch: int) -> dict[str, dict[str, float]]:
    """Print each aim beside the lowest and the median; returns them."""
    found: dict[str, dict[str, float]] = {}
    print("\naims, microseconds")
    for row in figures:
        aim = AIMS.get(row.label)
        if aim is not None:
            values = sorted(value * 1e6 / batch for value in row.values)
            low, middle = values[0], values[len(values) // 2]
            found[row.label] = {"aim": aim, "lowest": low, "median": middle}
            word = "met" if low <= aim else "MISSED"
            print(f"  {row.label:14} ≤ {aim}: {low:.3f} (median {middle:.3f})  {word}")
    return found


def print_unclaimed(compiles: int = 12) -> dict[str, float]:
    """Print what part of a compile's time no phase claims, for small functions and modules."""
    found: dict[str, float] = {}
    print("\npart of a compile that no phase claims")
    programs: list[tuple[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]]] = [
        ("a function", lambda: lambda x: x * 2 + 1),
        ("six layers", lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])),
    ]
    for label, build in programs:
        telemetry.clear_compilation_metrics()
        for _ in range(compiles):
            tripwire.compile(build(), backend="eager")(torch.ones(2, 16))
        metrics = telemetry.get_compilation_metrics()
        share = min(m.unattributed_us or 0 for m in metrics) / min(
            m.duration_us or 1 for m in metrics
        )
        found[label] = share
        word = "met" if share <= UNCLAIMED else "MISSED"
        print(f"  {label:14} ≤ {UNCLAIMED:.0%}: {share:.1%}  {word}")
    return found


def main() -> None:
    """Run, print, and write a file if one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    print(describe_machine())
    with tempfile.TemporaryDirectory() as directory:
        figures = time_sides(build_sides(options.batch, directory), options.rounds)
    scale = 1e6 / options.batch
    print_table("spans and counts", figures, "dynamo_timed", unit="µs", scale=scale)
    aims = print_aims(figures, options.batch)
    unclaimed = print_unclaimed()
    if options.json:
        settings = {"rounds": options.rounds, "batch": options.batch}
        found = {"unit": "s a batch", "sides": figures, "aims in µs": aims, "unclaimed": unclaimed}
        write_json(options.json, "bench_telemetry", settings, found)


if __name__ == "__main__":
    main()
