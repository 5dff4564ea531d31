"""Which models are captured whole: tripwire beside torch.compile, torch.export and torch.jit.trace.

Every model of tests/models (tiny random ones of `transformers`, and those written for the tests)
is built, and captured by each side in turn, in eval mode and without grad:

    tripwire        tripwire.compile(model, backend="eager", fullgraph=True), first call
    torch.compile   torch.compile(model, backend="eager", fullgraph=True), first call
    torch.export    torch.export.export(model, (), inputs, strict=False)
    torch.jit.trace torch.jit.trace of a module that takes the inputs in order and returns the
                    result's tensors as a tuple, since it can't return much else; strict=False,
                    check_trace=False

What was captured is then called with the inputs, with others of the same shapes, with a mask that
leaves some tokens out or with other lengths where the model takes them, and with the first inputs
again. A plain twin of the model gets the same calls; results must agree with its results to 1e-4. A
side that raises anywhere is *refused*; one that returns something else is *wrong*. tripwire counts
as captured only if no call was refused and one ran compiled code. Model and twin are called once
beforehand, since some import modules or register hooks on themselves in their first call. Times are
of the first call or the capture itself, after a capture of something trivial, so that imports
aren't counted. torch runs on one thread.

Each model has a process of its own, with a limit of its memory and a time limit for each side. If a
side crashes the process or takes too long, the table says so, and the other sides go on in a new
process.

    python benchmarks/coverage.py [--only NAME ...] [--jobs N] [--limit SECONDS]
                                  [--markdown PATH] [--json PATH]

With --only, what the JSON file says of the other models is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import json
import logging
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import side_by_side  # noqa: F401  # puts `src` on the path
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from models.architectures import ARCHITECTURES, Architecture  # noqa: E402  # the path comes first
from models.handmade import HANDMADE  # noqa: E402
from support import tensors_of  # noqa: E402

import tripwire  # noqa: E402

MODELS = {row.name: row for row in (*ARCHITECTURES, *HANDMADE)}
Inputs = dict[str, Any]
LARGEST_MEMORY = 24 * 2**30  # address space, not what is resident
# Each model has a process of its own; what they all import is imported once.
FORKS = multiprocessing.get_context("forkserver")
IMPORTED = ["__main__", "transformers", "torch._dynamo", "torch.export", "tripwire.api"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one model on one side."""

    model: str
    side: str
    outcome: str  # "whole", "refused", "wrong", "too slow" or "crashed"
    seconds: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s" if self.outcome == "whole" else self.outcome


# --- the sides -----------------------------------------------------------------------------------

Capture = Callable[[nn.Module, Inputs], Callable[..., Any]]


class NotCaptured(Exception):
    """A call ran as plain Python."""


class _InOrder(nn.Module):
    """Takes tensors in order, and returns tensors."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.model = model
        self.names = list(names)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensors_of(self.model(**dict(zip(self.names, tensors, strict=True)))))


def _compile_with_tripwire(model: nn.Module, inputs: Inputs) -> Callable[..., Any]:
    return tripwire.compile(model, backend="eager", fullgraph=True)  # type: ignore[no-any-return]


def _compile_with_torch(model: nn.Module, inputs: Inputs) -> Callable[..., Any]:
    return torch.compile(model, backend="eager", fullgraph=True)


def _export(model: nn.Module, inputs: Inputs) -> Callable[..., Any]:
    return torch.export.export(model, (), copy.deepcopy(inputs), strict=False).module()


def _trace_with_jit(model: nn.Module, inputs: Inputs) -> Callable[..., Any]:
    given = tuple(copy.deepcopy(inputs).values())
    wrapped = _InOrder(model, inputs).eval()
    traced: Any = torch.jit.trace(wrapped, given, strict=False, check_trace=False)
    return lambda **named: traced(*named.values())


SIDES: dict[str, Capture] = {
    "tripwire": _compile_with_tripwire,
    "torch.compile": _compile_with_torch,
    "torch.export": _export,
    "torch.jit.trace": _trace_with_jit,
}
CAPTURE_WHEN_CALLED = ("tripwire", "torch.compile")


# --- one model -----------------------------------------------------------------------------------


def _variants(row: Architecture) -> Iterator[Inputs]:
    """The inputs of all calls, the captured one first."""
    yield row.inputs()
    yield row.inputs(seed=1)
    mask = row.inputs(seed=1).get("attention_mask")
    if mask is not None and bool((mask == 1).all()):
        padded = mask.clone()
        padded[0, -3:] = 0
        yield row.inputs(seed=1) | {"attention_mask": padded}
    lengths = row.inputs(seed=1).get("lengths")
    if lengths is not None:
        yield row.inputs(seed=1) | {"lengths": lengths.clamp(max=2)}
    yield row.inputs()


def _run_twin(row: Architecture, model: nn.Module) -> tuple[list[Inputs], list[Any]]:
    """Inputs that the plain model takes, and its results; some take no mask with zeros."""
    taken, results = [], []
    for inputs in _variants(row):
        with contextlib.suppress(RuntimeError):
            results.append(_call(model, inputs))
            taken.append(inputs)
    return taken, results


def _call(call: Callable[..., Any], inputs: Inputs) -> Any:
    torch.manual_seed(0)  # some models draw in eval mode, too
    return call(**copy.deepcopy(inputs))


def _find_difference(expected: Any, got: Any) -> str | None:
    left, right = tensors_of(expected), tensors_of(got)
    if len(left) != len(right):
        return f"{len(right)} tensors, where eager returns {len(left)}"
    for mine, theirs in zip(left, right, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"{theirs.dtype}{list(theirs.shape)}, not {mine.dtype}{list(mine.shape)}"
        if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True):
            return "other values than eager's"
    return None


def capture(row: Architecture, side: str) -> Outcome:
    """Capture a model, call it, and compare."""
    twin, model = row.build(), row.build()
    for each in (twin, model):
        _call(each, row.inputs())
    state = copy.deepcopy(model.state_dict())
    variants, wanted = _run_twin(row, twin)
    seconds = None
    try:
        captured, seconds = _time_capture(model, side, variants[0])
        model.load_state_dict(state)  # a capture may have counted calls
        for number, (inputs, expected) in enumerate(zip(variants, wanted, strict=True), 1):
            start = time.perf_counter()
            result = _call(captured, inputs)
            if number == 1 and side in CAPTURE_WHEN_CALLED:
                seconds = time.perf_counter() - start
            found = _find_difference(expected, result)
            if found:
                return Outcome(row.name, side, "wrong", seconds, f"call {number}: {found}")
        if side == "tripwire":
            _check_counts(captured)
    except Exception as error:
        return Outcome(row.name, side, "refused", seconds, _shorten(error))
    return Outcome(row.name, side, "whole", seconds)


def _time_capture(model: nn.Module, side: str, inputs: Inputs) -> tuple[Callable[..., Any], float]:
    trivial = {"input": torch.ones(2, 2)}
    _call(SIDES[side](nn.Linear(2, 2).eval(), trivial), trivial)
    torch.manual_seed(0)
    start = time.perf_counter()
    captured = SIDES[side](model, inputs)
    return captured, time.perf_counter() - start


def _check_counts(compiled: Any) -> None:
    counts = compiled.statistics()
    if counts.refusals or not counts.hits:
        raise NotCaptured(f"{counts.refusals} refusals, {counts.hits} hits")


def _shorten(error: Exception) -> str:
    """The first line that says something; a slug where tripwire gives one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    slug = getattr(error, "slug", None)
    if slug is not None:
        place, _, said = text.partition(": ")
        text = f"{slug}: {said or place} ({os.path.basename(place)})" if said else f"{slug}: {text}"
    else:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 160 else text[:157] + "..."


def run_one(name: str, sides: list[str], said: Connection) -> None:
    """The child process: says each side's outcome as soon as there is one."""
    resource.setrlimit(resource.RLIMIT_AS, (LARGEST_MEMORY, LARGEST_MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # models and compilers print, and the bar is on the screen
        os.dup2(nowhere, stream)
    for side in sides:
        with torch.no_grad():
            said.send(capture(MODELS[name], side))


# --- all models ----------------------------------------------------------------------------------


def examine(name: str, limit: float) -> list[Outcome]:
    """Every side's outcome on one model, from as many processes as that takes."""
    done: list[Outcome] = []
    while len(done) < len(SIDES):
        done += _run_child(name, list(SIDES)[len(done) :], limit)
    return done


def _run_child(name: str, sides: list[str], limit: float) -> Iterator[Outcome]:
    """Outcomes in order, until the process ends; at least one."""
    said, end = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=run_one, args=(name, sides, end))
    child.start()
    end.close()
    try:
        for side in sides:
            if not said.poll(limit):
                yield Outcome(name, side, "too slow", None, f"no answer in {limit:.0f} s")
                return
            try:
                yield said.recv()
            except EOFError:
                child.join()
                yield Outcome(name, side, "crashed", None, f"exit status {child.exitcode}")
                return
    finally:
        child.kill()
        child.join()


def examine_all(names: list[str], jobs: int, limit: float) -> list[Outcome]:
    """All models, with a bar that says how far it is."""
    bar = Progress(
        TextColumn("{task.description:28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    outcomes: list[Outcome] = []
    with bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("", total=len(names))
        for found in pool.map(lambda name: examine(name, limit), names):
            outcomes += found
            bar.update(task, advance=1, description=found[0].model)
    return outcomes


# --- telling -------------------------------------------------------------------------------------


def _totals(outcomes: list[Outcome]) -> dict[str, Counter[str]]:
    return {side: Counter(o.outcome for o in outcomes if o.side == side) for side in SIDES}


def _share(counts: Counter[str]) -> str:
    return f"{counts['whole']} of {counts.total()} ({counts['whole'] / counts.total():.0%})"


def _median(outcomes: list[Outcome], side: str) -> str:
    found = sorted(o.seconds for o in outcomes if o.side == side and o.outcome == "whole")  # type: ignore[type-var]
    return f"{found[len(found) // 2]:.2f} s" if found else "–"


def _rows(outcomes: list[Outcome]) -> Iterator[list[str]]:
    by_model: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_model.setdefault(outcome.model, {})[outcome.side] = outcome
    for name, found in by_model.items():
        yield [name, MODELS[name].family, *(str(found[side]) for side in SIDES)]


def _table(rows: Iterable[list[str]]) -> str:
    heads = ["model", "family", *SIDES]
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render_markdown(outcomes: list[Outcome]) -> str:
    """The page docs/coverage.md."""
    totals = _totals(outcomes)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")
    )
    python = ".".join(map(str, sys.version_info[:3]))
    kinds = ("whole", "refused", "wrong", "too slow", "crashed")
    summary = [
        "| | " + " | ".join((*kinds, "share whole", "median time")) + " |",
        "|---" * (len(kinds) + 3) + "|",
        *(
            f"| {side} | "
            + " | ".join(str(totals[side][kind]) for kind in kinds)
            + f" | {_share(totals[side])} | {_median(outcomes, side)} |"
            for side in SIDES
        ),
    ]
    reasons = [
        f"- **{o.model}**, {o.side}, {o.outcome}: {_escape(o.reason)}"
        for o in outcomes
        if o.outcome != "whole"
    ]
    how = (__doc__ or "").partition("    python benchmarks/coverage.py")[0].partition("\n\n")[2]
    return "\n".join(
        [
            "# Coverage",
            "",
            "Which models are captured whole, by tripwire and by its peers. Written by",
            f"`make coverage` on {date.today()}: Python {python}, {versions}.",
            "",
            *summary,
            "",
            "## How",
            "",
            how.strip(),
            "",
            "## Models",
            "",
            "A time means: captured whole, and right in every call.",
            "",
            _table(_rows(outcomes)),
            "",
            "## Reasons",
            "",
            *reasons,
            "",
        ]
    )


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")


def print_totals(outcomes: list[Outcome]) -> None:
    """The table, and how many of each side are whole."""
    width = max(map(len, MODELS))
    print(f"{'model':{width}}  " + "".join(f"{side:>17}" for side in SIDES))
    for name, _, *found in _rows(outcomes):
        print(f"{name:{width}}  " + "".join(f"{text:>17}" for text in found))
    for side, counts in _totals(outcomes).items():
        print(f"{side:16} {_share(counts):>18}   {dict(counts)}")


def _join(before: list[dict[str, Any]], now: list[Outcome]) -> list[Outcome]:
    """The outcomes of a run, and of an earlier one those of other models."""
    again = {outcome.model for outcome in now}
    kept = [Outcome(**row) for row in before if row["model"] not in again]
    order = list(MODELS)
    return sorted([*kept, *now], key=lambda outcome: order.index(outcome.model))


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(MODELS), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one side")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    FORKS.set_forkserver_preload(IMPORTED)
    with contextlib.suppress(KeyboardInterrupt):
        outcomes = examine_all(options.only or list(MODELS), options.jobs, options.limit)
        if options.only and options.json and options.json.exists():
            outcomes = _join(json.loads(options.json.read_text()), outcomes)
        print_totals(outcomes)
        if options.markdown:
            options.markdown.write_text(render_markdown(outcomes))
        if options.json:
            options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
