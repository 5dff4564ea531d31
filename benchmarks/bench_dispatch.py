"""What a compiled call costs beside torch.compile, in one process and interleaved.

Every back end hands back a function that returns one constant tensor, whatever the graph, so a
hit is the dispatcher's work alone: checking that the compiled code still holds for this call,
and collecting the graph's inputs. Everything runs on the CPU and without grad.

    one op      `x.sin()` of four numbers: what no program gets below.
    qwen3       Qwen3 of qwen3.py, 9, 36 and 72 layers: what a program's size adds. At 36 layers
                once more with the model's own output object, which each call gets anew.
    arguments   a list of 1 to 2,000 tensors of which one is used, 500 that all are, a nested
                dict of 5,000 ints that are all read.
    the world   a module that reads one place of a list of a million, and one that looks up one
                of 10,000 classes.

A hit is timed in batches of some milliseconds, one batch of each side a round, all programs in
the same rounds: so the growth from 9 to 72 layers is a ratio within a round as well. A call
outside the clock comes before each batch: every side finds its data in the processor's caches,
where a real program's own work would have pushed some of it out. Sides:

    tripwire          the sentries in C, where they were built.
    tripwire, twin    the same with their Python twin, which compares everything on each call.
    torch.compile     fullgraph=True, as for tripwire, and the same back end.

Two more things are timed:

    refused calls   a function and a module that read a clock, which no trace may: after some
                    calls they run as plain Python. The figure is what the dispatcher adds to
                    the plain call, the two in one round.
    first calls     at 36 layers, from a model to its first result. "trace" is `tripwire.trace`,
                    "observed run" the same with everything observed that compiled code depends
                    on, "first call" that and the entry's guards and wires. torch.compile's first
                    call is Dynamo's; torch._dynamo.reset() comes before it, outside the clock.
                    The round that isn't counted fills what both sides keep per code object.

Each aim is printed with what was measured. It is held against the lowest figures, which a busy
machine disturbs least; beside them stands the median of the rounds.

    python benchmarks/bench_dispatch.py [--rounds N] [--first-rounds N] [--json PATH]
"""

from __future__ import annotations

import argparse
import functools
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from qwen3 import build_qwen3
from side_by_side import (
    Calls,
    Figures,
    Side,
    describe_machine,
    print_table,
    spread_of,
    time_calls,
    time_sides,
    write_json,
)
from torch import nn

import tripwire
from tripwire.tracing import Tracer
from tripwire.validity import plan, table
from tripwire.writes import twin

FEW, SOME, MANY = LAYERS = (9, 36, 72)
TRIPWIRE, TWIN, DYNAMO = SIDES = ("tripwire", "tripwire, twin", "torch.compile")
EAGER, TRACE, OBSERVED = "eager", "trace", "observed run"
OURS, THEIRS = "tripwire, first call", "torch.compile, first call"
PLAIN, REFUSED = "plain", "refused"
ONE_OP = "one op"
OUTPUT = "Qwen3, 36 layers, its own output"

CONSTANT = torch.zeros(1)


def build_constant(module: nn.Module, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The back end of every side."""
    return lambda *args: (CONSTANT,)


def take_sine(x: torch.Tensor) -> torch.Tensor:
    """The smallest program."""
    return x.sin()


def read_clock(x: torch.Tensor) -> torch.Tensor:
    """A function that is refused."""
    time.monotonic()
    return x


class ReadsClock(nn.Module):
    """A module that is refused."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.monotonic()
        return x


# --- hits ------------------------------------------------------------------------------------


def build_hits(target: Callable[..., Any], *args: Any) -> Calls:
    """One call of each side that is compiled already. Raises where it isn't a hit."""
    theirs = torch.compile(target, backend=build_constant, fullgraph=True)
    theirs(*args)
    ours = _compile(target, *args)
    chosen = plan.Sentry, table.Table
    plan.Sentry, table.Table = twin.Sentry, None  # type: ignore[misc]
    try:
        pure = _compile(target, *args)
    finally:
        plan.Sentry, table.Table = chosen  # type: ignore[misc]
    calls = [functools.partial(compiled, *args) for compiled in (ours, pure, theirs)]
    for call in calls:
        result = call()
        if getattr(result, "logits", result) is not CONSTANT:
            raise AssertionError(f"{call.func} didn't run what the back end made")
    return dict(zip(SIDES, calls, strict=True))


def _compile(target: Callable[..., Any], *args: Any) -> Any:
    compiled = tripwire.compile(target, backend=build_constant, fullgraph=True)
    compiled(*args)
    return compiled


def take_first(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Uses one of many arguments."""
    return tensors[0].sin()


def add_all(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Uses all of them."""
    return sum(tensors)  # type: ignore[return-value]


def add_nested(x: torch.Tensor, nested: dict[str, dict[str, list[int]]]) -> torch.Tensor:
    """Reads a whole nested dict."""
    return x * sum(one["a"][0] for one in nested.values())


class ReadsPlace(nn.Module):
    """Reads one place of a long list."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.table = list(range(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table[5]


class Registered:
    """Of which there are many subclasses."""

    scale = 2.0


REGISTRY = {f"C{number}": type(f"C{number}", (Registered,), {}) for number in range(10_000)}


class LooksUp(nn.Module):
    """Takes one class out of a registry."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * REGISTRY["C77"].scale


def build_arguments() -> dict[str, Calls]:
    """Programs whose arguments, or whose world, are large."""
    x = torch.randn(4)
    many = {n: [torch.randn(4) for _ in range(n)] for n in (1, 10, 50, 500, 2000)}
    nested = {f"k{number}": {"a": [number]} for number in range(5000)}
    programs = {f"{n} tensors, one used": build_hits(take_first, many[n]) for n in many}
    programs["500 tensors, all used"] = build_hits(add_all, many[500])
    programs["a nested dict of 5,000"] = build_hits(add_nested, x, nested)
    programs["a list of a million"] = build_hits(ReadsPlace(1_000_000), x)
    programs["a registry of 10,000 classes"] = build_hits(LooksUp(), x)
    return programs


def build_refused(target: Callable[..., Any]) -> Calls:
    """A plain call, and that of a callable that is refused for good."""
    x = torch.zeros(1)
    refused = tripwire.compile(target, backend=build_constant)
    for _ in range(8):
        refused(x)
    seen = refused.statistics()
    if seen.refusals != seen.traces or seen.traces > 4 or seen.hits:
        raise AssertionError(f"{target} should be refused, and stay so: {seen}")
    return {PLAIN: functools.partial(target, x), REFUSED: functools.partial(refused, x)}


def run_hits(rounds: int) -> dict[str, list[Figures]]:
    """Time the hits and the refused calls, and print a table for each program."""
    programs = {ONE_OP: build_hits(take_sine, torch.randn(4))}
    programs |= {_title(layers): build_hits(*build_qwen3(layers)) for layers in LAYERS}
    model, tokens = build_qwen3(SOME)
    programs[OUTPUT] = build_hits(model.model, tokens)
    programs |= build_arguments()
    programs |= {"refused function": build_refused(read_clock)}
    programs |= {"refused module": build_refused(ReadsClock())}
    figures = time_calls(programs, rounds)
    for title, rows in figures.items():
        reference = TRIPWIRE if rows[0].label == TRIPWIRE else PLAIN
        what = "a call" if reference == PLAIN else "a hit"
        print_table(f"{title}, {what}", rows, reference, unit="µs", scale=1e6)
    return figures


def _title(layers: int) -> str:
    return f"Qwen3, {layers} layers"


# --- first calls -----------------------------------------------------------------------------


def run_first_calls(layers: int, rounds: int) -> list[Figures]:
    """Time what leads to a first result, and print the table."""
    model, x = build_qwen3(layers)

    def compile_ours() -> object:
        return _compile(model, x)

    def compile_theirs() -> object:
        compiled = torch.compile(model, backend=build_constant, fullgraph=True)
        compiled(x)
        return compiled

    sides = [
        Side(EAGER, lambda: model(x)),
        Side(TRACE, lambda: tripwire.trace(model, x)),
        Side(OBSERVED, lambda: Tracer().run(model, (x,), {}, complete=True)),
        Side(OURS, compile_ours),
        Side(THEIRS, compile_theirs, prepare=torch._dynamo.reset),
    ]
    figures = time_sides(sides, rounds)
    print_table(f"{_title(layers)}, first call", figures, TRACE, unit="ms", scale=1e3)
    return figures


# --- aims ------------------------------------------------------------------------------------


def judge(hits: dict[str, list[Figures]], first: list[Figures]) -> None:
    """Print every aim, what was measured, and whether it is met."""
    print("\naims, and what the lowest figures say")
    some = hits[_title(SOME)]
    what = f"a hit at {SOME} layers, at least 20 times cheaper than torch.compile"
    _say_ratio(what, _find(some, DYNAMO), _find(some, TRIPWIRE), low=20)
    for layers in (FEW, MANY):
        what = f"a hit at {layers} layers, as at {SOME} (±10%)"
        ours = _find(hits[_title(layers)], TRIPWIRE)
        _say_ratio(what, ours, _find(some, TRIPWIRE), low=0.9, high=1.1)
    _say_time("a hit of one op, at most 2 µs", _find(hits[ONE_OP], TRIPWIRE), 2)
    for title, rows in hits.items():
        if rows[0].label == TRIPWIRE:
            what = f"{title}, not dearer than torch.compile"
            _say_ratio(what, _find(rows, TRIPWIRE), _find(rows, DYNAMO), high=1)
    for title in ("refused function", "refused module"):
        plain, refused = hits[title]
        _say_time(f"{title}, at most 2 µs over the plain call", refused, 2, over=plain)
    what = f"an observed run at {SOME} layers, within 3 times the bare trace"
    _say_ratio(what, _find(first, OBSERVED), _find(first, TRACE), high=3)
    print("no aims")
    for side in SIDES:
        few, many = (_find(hits[_title(layers)], side) for layers in (FEW, MANY))
        _say_ratio(f"{side}, growth of a hit from {FEW} to {MANY} layers", many, few)
    _say_ratio(
        "torch.compile's first call, in tripwire's", _find(first, THEIRS), _find(first, OURS)
    )


def _find(rows: list[Figures], label: str) -> Figures:
    return next(row for row in rows if row.label == label)


def _say_ratio(
    what: str, row: Figures, by: Figures, *, low: float | None = None, high: float | None = None
) -> None:
    """The ratio of the lowest figures; then that of the rounds."""
    if row.error is not None or by.error is not None:
        print(f"  NO FIGURE  {what}: {row.error or by.error}")
        return
    lowest = min(row.values) / min(by.values)
    usual = spread_of([a / b for a, b in zip(row.values, by.values, strict=True)])
    is_met = (low is None or low <= lowest) and (high is None or lowest <= high)
    verdict = "met" if is_met else "MISSED"
    if low is None and high is None:
        verdict = ""
    print(f"  {verdict:9}  {what}: {lowest:.2f}x, rounds {usual}")


def _say_time(what: str, row: Figures, limit: float, *, over: Figures | None = None) -> None:
    """The lowest figure, or by how much it is above another's; then the median of the rounds."""
    others = [0.0] * len(row.values) if over is None else over.values
    lowest = 1e6 * (min(row.values) - min(others))
    usual = 1e6 * spread_of([a - b for a, b in zip(row.values, others, strict=True)]).middle
    verdict = "met" if lowest <= limit else "MISSED"
    print(f"  {verdict:9}  {what}: {lowest:.2f} µs, rounds {usual:.2f} µs")


def main() -> None:
    """Read the options, time, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="what a compiled call costs.")
    parser.add_argument("--rounds", type=int, default=60, help="counted batches of hits a side")
    parser.add_argument("--first-rounds", type=int, default=3, help="counted first calls a side")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if min(options.rounds, options.first_rounds) < 1:
        parser.error("--rounds and --first-rounds must be at least 1")

    warnings.simplefilter("ignore")
    logging.getLogger("tripwire").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{describe_machine()}; {options.rounds} interleaved rounds, medians")
    print(f"sentries in {'Python' if plan.Sentry is twin.Sentry else 'C'}")
    with torch.no_grad():
        first = run_first_calls(SOME, options.first_rounds)
        hits = run_hits(options.rounds)
    judge(hits, first)
    if options.json is not None:
        settings = {"rounds": options.rounds, "first_rounds": options.first_rounds}
        figures = {"unit": "s", "hits": hits, "first": {_title(SOME): first}}
        write_json(options.json, "bench_dispatch", settings, figures)


if __name__ == "__main__":
    main()
