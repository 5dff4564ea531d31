"""Ordinary programs in which something varies, beside their plain twins and beside torch.compile.

Each program of varying_programs.py runs three times from the same seed: as plain Python, with
tripwire.compile, and with torch.compile. What each call gave must agree with plain Python to 1e-4.

    traces   graphs that were made: of tripwire, traces; of torch.compile, calls of its back end
    hits     share of the calls, after as many as may be traced, that ran compiled code which was
             there before; of torch.compile, calls that ran a graph and compiled none

A program is met when it is right, has at most as many traces as its row allows, and at least its
share of hits. Where a program calls what it compiled several times for one result (`generate`), its
calls are counted, not its results. torch runs on one thread.

    python benchmarks/varying.py [--backend NAME ...] [--only NAME ...] [--json PATH]
"""

from __future__ import annotations

import argparse
import logging
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import side_by_side  # noqa: F401  # puts `src` on the path
import torch
from side_by_side import describe_machine, write_json
from varying_programs import ROWS, Program, Row

import tripwire

BACKENDS = ("eager", "aot_eager", "inductor")
SIDES = ("tripwire", "torch.compile")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one program on one side."""

    traces: int
    calls: int
    hits: int
    late: int  # calls after as many as may be traced
    late_hits: int
    seconds: float
    wrong: str = ""  # the first difference from plain Python, or what was raised

    @property
    def share(self) -> float:
        """Of hits."""
        return self.late_hits / self.late if self.late else 0.0

    def is_met(self, row: Row) -> bool:
        """Whether a program is right and stays within its row."""
        return not self.wrong and self.traces <= row.traces and self.share >= row.hits

    def __str__(self) -> str:
        if self.wrong:
            return "wrong"
        return f"{self.traces} traces, {self.share:4.0%}"


class Counted:
    """Something compiled whose calls are counted one by one."""

    def __init__(self, fast: Callable[..., Any], read: Callable[[], tuple[int, int]]) -> None:
        self._fast = fast
        self._read = read  # traces so far, runs of compiled code so far
        self.hits: list[bool] = []

    @property
    def traces(self) -> int:
        """So far."""
        return self._read()[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traces, runs = self._read()
        try:
            return self._fast(*args, **kwargs)
        finally:
            traced, ran = self._read()
            self.hits.append(traced == traces and ran > runs)


class Side:
    """One compiler behind one back end; it keeps what it compiled."""

    def __init__(self, name: str, backend: str) -> None:
        self._name = name
        self._backend = backend
        self._graphs = self._runs = 0  # of torch.compile
        self.made: list[Counted] = []

    def compile(self, target: Any, **options: Any) -> Counted:
        """What a program calls."""
        make = self._ours if self._name == "tripwire" else self._theirs
        made = make(target, options)
        self.made.append(made)
        return made

    @property
    def traces(self) -> int:
        """Of all that was compiled."""
        return self._graphs or sum(made.traces for made in self.made)

    def _ours(self, target: Any, options: dict[str, Any]) -> Counted:
        fast: Any = tripwire.compile(target, backend=self._backend, **options)

        def read() -> tuple[int, int]:
            seen = fast.statistics()
            return seen.traces, seen.hits

        return Counted(fast, read)

    def _theirs(self, target: Any, options: dict[str, Any]) -> Counted:
        fast = torch.compile(target, backend=self._build, **options)
        return Counted(fast, lambda: (self._graphs, self._runs))

    def _build(self, module: Any, inputs: list[Any]) -> Callable[..., Any]:
        """The back end that was asked for; its graphs and their runs are counted."""
        self._graphs += 1
        run = torch._dynamo.lookup_backend(self._backend)(module, inputs)

        def counted(*args: Any) -> Any:
            self._runs += 1
            return run(*args)

        return counted


def run_program(program: Program, compile: Callable[..., Any]) -> list[Any]:
    """From the same seeds, all that it gives."""
    torch.manual_seed(0)
    random.seed(0)
    return list(program(compile))


def run_side(row: Row, side: Side, expected: list[Any]) -> Outcome:
    """One program on one side."""
    began = time.perf_counter()
    wrong = ""
    try:
        found = run_program(row.run, side.compile)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    except Exception as error:  # whatever a compiler raises is its outcome
        wrong = f"{type(error).__name__}: {error}"[:300]
    seconds = time.perf_counter() - began
    hits = [hit for made in side.made for hit in made.hits]
    late = hits[row.traces :]
    return Outcome(side.traces, len(hits), sum(hits), len(late), sum(late), seconds, wrong)


def run_row(row: Row, backend: str) -> dict[str, Outcome]:
    """One program behind one back end, on both sides."""
    outcomes = {}
    for name in SIDES:
        torch._dynamo.reset()
        expected = run_program(row.run, lambda target, **options: target)
        outcomes[name] = run_side(row, Side(name, backend), expected)
    return outcomes


def print_row(row: Row, outcomes: dict[str, Outcome]) -> None:
    """One line of the table, and what was wrong."""
    asked = f"{row.traces}, {row.hits:.0%}"
    cells = [f"{'met' if o.is_met(row) else 'MISSED':6} {o!s:16}" for o in outcomes.values()]
    times = " ".join(f"{outcome.seconds:6.1f}" for outcome in outcomes.values())
    print(f"{row.name:38} {asked:8} {'   '.join(cells)} {times}", flush=True)
    for name, outcome in outcomes.items():
        if outcome.wrong:
            print(f"    {name}: {outcome.wrong.splitlines()[0]}", flush=True)


def main() -> None:
    """Read the options, run, print, and write the outcomes where asked."""
    parser = argparse.ArgumentParser(description="programs in which something varies.")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    options = parser.parse_args()
    rows = [row for row in ROWS if options.only is None or row.name in options.only]

    warnings.simplefilter("ignore")
    for name in ("tripwire", "torch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(describe_machine())
    figures: dict[str, Any] = {}
    for backend in options.backend:
        print(f"\n{backend}: asked for (traces, hits), then {' and '.join(SIDES)}, then seconds")
        outcomes = {}
        for row in rows:
            outcomes[row.name] = run_row(row, backend)
            print_row(row, outcomes[row.name])
        for side in SIDES:
            met = sum(outcomes[row.name][side].is_met(row) for row in rows)
            wrong = sum(bool(outcomes[row.name][side].wrong) for row in rows)
            print(f"{side}: {met} of {len(rows)} met, {wrong} wrong or raising", flush=True)
        figures[backend] = {
            name: {side: asdict(outcome) for side, outcome in found.items()}
            for name, found in outcomes.items()
        }
    if options.json is not None:
        asked = {row.name: {"traces": row.traces, "hits": row.hits} for row in rows}
        write_json(options.json, "varying", {"asked": asked}, figures)


if __name__ == "__main__":
    main()
