"""Time to the first result of many small models: tripwire beside torch.compile, in one process.

Thirty-two architectures of `transformers` and four models of our own, from tests/models: two or
three layers, hidden sizes of 16 or 32, in eval mode and without grad. Each is one that both sides
capture whole. Bigger models show what a layer costs, these what everything else costs.

    eager           the module's plain run. Nothing is captured.
    trace           `tripwire.trace`: one real run, recorded.
    tripwire        `tripwire.compile` and its first call: an observed run, guards and wires.
    torch.compile   the same of Dynamo. torch._dynamo.reset() comes before, outside the clock.

Both compile with a back end that hands back the graph as it got it, under fullgraph=True: a model
that is refused has no figure, rather than a good one. torch runs on one thread.

    first           each model once, in a process that has compiled another model before, but not
                    this one: either side meets the library's code for the first time.
    again           interleaved rounds after that: what either side learns of a library's code once
                    in a process is not in the figures.

A model's ratio is torch.compile's time over tripwire's within a round. Over all models there are
two figures: the geometric mean of the models' ratios in each round, with the lowest and the highest
round; and the median model, with the lowest and the highest model. "first" has one round only.

    python benchmarks/bench_architectures.py [--rounds N] [--json PATH] [MODEL ...]
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from side_by_side import Figures, Side, compare, describe_machine, spread_of, time_sides, write_json
from torch import fx, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from models.architectures import ARCHITECTURES, Architecture  # noqa: E402  # the path comes first
from models.handmade import HANDMADE  # noqa: E402

import tripwire  # noqa: E402

MODELS = {row.name: row for row in (*ARCHITECTURES, *HANDMADE)}
CHOSEN = (
    *("llama", "qwen3", "gemma3", "phi", "gpt2", "gpt-neox", "opt", "falcon", "mpt", "xlnet"),
    *("bert", "roberta", "distilbert", "albert", "electra", "deberta-v2", "modernbert", "fnet"),
    *("t5", "bart", "mixtral", "gpt-oss", "mamba2", "rwkv"),
    *("vit", "dinov2", "convnext", "resnet", "wav2vec2", "whisper", "patchtst", "clip"),
    *("cnn", "unet", "graph-net", "denoiser"),
)
OTHER = "vilt"  # compiled before any of them: it pays for imports
EAGER, TRACE, OURS, THEIRS = "eager", "trace", "tripwire", "torch.compile"


def hand_back(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The back end of both sides."""
    return module.forward


def build_sides(model: nn.Module, inputs: dict[str, Any]) -> list[Side]:
    """Every side for one model."""

    def call_first(compile_: Callable[..., Any]) -> object:
        compiled = compile_(model, backend=hand_back, fullgraph=True)
        compiled(**inputs)
        return compiled

    return [
        Side(EAGER, lambda: model(**inputs)),
        Side(TRACE, lambda: tripwire.trace(model, **inputs)),
        Side(OURS, functools.partial(call_first, tripwire.compile)),
        Side(THEIRS, functools.partial(call_first, torch.compile), prepare=torch._dynamo.reset),
    ]


@dataclass(frozen=True, slots=True)
class Timed:
    """One model's figures."""

    first: list[Figures]
    again: list[Figures]


def run_model(row: Architecture, rounds: int) -> Timed:
    """Time every side on one model."""
    model, inputs = row.build(), row.inputs(0)
    gc.collect()
    gc.freeze()  # or each collection between two rounds walks all of transformers
    eager, trace, ours, theirs = build_sides(model, inputs)
    with torch.no_grad():
        first = time_sides([eager, ours, theirs], 1, uncounted=0)
        again = time_sides([eager, trace, ours, theirs], rounds, uncounted=0)
    torch._dynamo.reset()
    gc.unfreeze()
    return Timed(first, again)


COLUMNS = (f"{EAGER} ms", f"{TRACE} ms", f"{OURS} ms", f"{THEIRS} ms")
WIDEST = max(map(len, MODELS))


def print_head() -> None:
    """The names of the columns."""
    print(f"\n{'model':{WIDEST}}  {'  '.join(COLUMNS)}  again{'':18}first")


def print_row(name: str, timed: Timed) -> None:
    """One line of the table: the rounds' times, the rounds' ratio, the first one's ratio."""
    cells = [row.error or f"{median(row.values) * 1e3:.1f}" for row in timed.again]
    shown = "  ".join(cell.rjust(len(head)) for cell, head in zip(cells, COLUMNS, strict=True))
    again = str(compare(timed.again, THEIRS, OURS) or "no figure")
    first = take_ratios(timed.first)
    told = f"{first[0]:.2f}x" if first else "no figure"
    print(f"{name:{WIDEST}}  {shown}  {again:21}  {told}", flush=True)


def print_overall(title: str, figures: Sequence[list[Figures]]) -> None:
    """What holds over all models that have a figure."""
    models = [rounds for rows in figures if (rounds := take_ratios(rows))]
    print(f"\n{title}, {len(models)} of {len(figures)} models: {THEIRS} / {OURS}")
    if models:
        means = spread_of([geometric_mean(ratios) for ratios in zip(*models, strict=True)])
        print(f"  geometric mean (lowest–highest round): {means}")
        print(f"  median model (lowest–highest model): {spread_of(list(map(median, models)))}")


def take_ratios(figures: list[Figures]) -> list[float]:
    """How many times tripwire's time torch.compile's is, a value a round; none where one failed."""
    sides = {row.label: row for row in figures}
    return [a / b for a, b in zip(sides[THEIRS].values, sides[OURS].values, strict=False)]


def main() -> None:
    """Read the options, time every model, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="first calls of many small models.")
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="of tests/models; all by default"
    )
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds a side")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"no such models: {', '.join(unknown)}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    started = time.monotonic()
    print(f"{describe_machine()}; {options.rounds} interleaved rounds, medians")
    run_model(MODELS[OTHER], 1)
    timed = {}
    print_head()
    for name in options.models or CHOSEN:
        timed[name] = run_model(MODELS[name], options.rounds)
        print_row(name, timed[name])
    first = {name: model.first for name, model in timed.items()}
    again = {name: model.again for name, model in timed.items()}
    print_overall("first", list(first.values()))
    print_overall("again", list(again.values()))
    print(f"\n{time.monotonic() - started:.0f} s")
    if options.json is not None:
        settings = {"rounds": options.rounds}
        figures = {"unit": "s", "first": first, "again": again}
        write_json(options.json, "bench_architectures", settings, figures)


if __name__ == "__main__":
    main()
