"""A compiled call that runs Inductor's code: tripwire beside torch.compile and eager, interleaved.

The model is Qwen3 of qwen3.py on the CPU, at 12 and 36 layers, in two modes:

    inference   `model(tokens)` without grad, in eval mode.
    training    `model(tokens)` with grad, in train mode; cross entropy of the logits in plain
                torch for every side; `backward()`; `model.zero_grad()`, which drops the
                gradients. No optimizer: its step would be the same for every side.

Sides, all of them on the same module and the same tokens:

    eager           the plain module.
    tripwire        `tripwire.compile(model, fullgraph=True)`.
    torch.compile   `torch.compile(model, fullgraph=True)`.

Both compilers use Inductor as it comes, and both its caches on disk, which `--cache` names: the
first run of this benchmark pays for compiling (minutes, with gcc), later ones don't. Neither
is timed before it is compiled. Results are checked before that: logits, and in training every
gradient, must be close to eager's. tripwire must have traced once, and have hit ever after.

The two graphs differ a little, and part of the ratio may come from that. transformers asks whether
Dynamo is tracing it, and if so builds an attention mask that the eager run does without; tripwire
compiles what the eager run does.

A round runs one batch of calls of each side, after a call outside the clock. The aim is held
against the median of the rounds' ratios, not the ratio of the lowest figures: calls take
milliseconds, and on a busy machine few run undisturbed. In five runs there the median at 12
layers in training lay between 0.82 and 0.96, that of the lowest figures between 0.46 and 1.61.
torch runs on one thread: the tensors are tiny.

    python benchmarks/bench_steady.py [--layers N ...] [--rounds N] [--cache PATH] [--json PATH]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import os
import time
import warnings
from pathlib import Path

import torch
from qwen3 import VOCABULARY, build_qwen3
from side_by_side import (
    Calls,
    Figures,
    compare,
    describe_machine,
    print_table,
    time_calls,
    write_json,
)
from torch import nn

import tripwire

EAGER, TRIPWIRE, DYNAMO = ("eager", "tripwire", "torch.compile")
INFERENCE, TRAINING = MODES = ("inference", "training")
CACHE = Path(__file__).resolve().parent.parent / "build" / "bench-cache"


def infer(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """What is timed in inference."""
    with torch.no_grad():
        return model(tokens)


def train(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What is timed in training, but for `zero_grad`."""
    logits: torch.Tensor = model(tokens)
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return logits


def train_and_drop(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    """What is timed in training."""
    train(model, tokens, targets)
    model.zero_grad()


def build_sides(mode: str, layers: int) -> tuple[dict[str, nn.Module], Calls]:
    """Each side's module, compiled and checked; and one call of it."""
    model, tokens = build_qwen3(layers)
    model.train(mode == TRAINING)
    sides = {
        EAGER: model,
        TRIPWIRE: tripwire.compile(model, fullgraph=True),
        DYNAMO: torch.compile(model, fullgraph=True),
    }
    targets = torch.randint(0, VOCABULARY, tokens.shape)
    checked = infer if mode == INFERENCE else functools.partial(train, targets=targets)
    expected = checked(model, tokens)
    gradients = take_gradients(model)
    # Dynamo first: it replaces nn.Module.__init__ when it is first used, which retires code of
    # tripwire's that was compiled before.
    for label in (DYNAMO, TRIPWIRE):
        start = time.perf_counter()
        for _ in range(3):  # the first result may come from a plain run
            torch.testing.assert_close(checked(sides[label], tokens), expected)
            torch.testing.assert_close(take_gradients(model), gradients)
        print(f"  {label}: ready and checked after {time.perf_counter() - start:.1f} s")
    timed = infer if mode == INFERENCE else functools.partial(train_and_drop, targets=targets)
    return sides, {label: functools.partial(timed, side, tokens) for label, side in sides.items()}


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of all parameters, which have none afterwards."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def run_mode(mode: str, layers: int, rounds: int) -> list[Figures]:
    """Build every side of one program, time it, and print the table and the aim."""
    torch._dynamo.reset()  # entries of another model would be asked first
    title = f"Qwen3, {layers} layers, {mode}"
    print(f"\n{title}")
    sides, calls = build_sides(mode, layers)
    figures = time_calls({title: calls}, rounds)[title]
    seen = sides[TRIPWIRE].statistics()
    if (seen.traces, seen.hits) != (1, seen.calls - 1):
        raise AssertionError(f"one trace, and hits from then on, are expected: {seen}")
    print_table(f"{title}, a call", figures, TRIPWIRE, unit="µs", scale=1e6)
    judge(figures)
    return figures


def judge(figures: list[Figures]) -> None:
    """Print the aim, and whether it is met."""
    ratio = compare(figures, TRIPWIRE, DYNAMO)
    verdict = "NO FIGURE" if ratio is None else "met" if ratio.middle <= 1 else "MISSED"
    print(f"  {verdict:9}  never slower than torch.compile: {ratio or ''}")


def main() -> None:
    """Read the options, time, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="what a call costs with Inductor.")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 36], help="layers of Qwen3")
    parser.add_argument("--rounds", type=int, default=100, help="counted batches a side")
    parser.add_argument("--cache", type=Path, default=CACHE, help="both compilers' caches")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if min(options.rounds, *options.layers) < 1:
        parser.error("--rounds and --layers must be at least 1")

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.cache.resolve() / "inductor")
    os.environ["TRIPWIRE_CACHE_DIR"] = str(options.cache.resolve() / "tripwire")
    warnings.simplefilter("ignore")
    logging.getLogger("tripwire").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{describe_machine()}; {options.rounds} interleaved rounds, medians")
    figures: dict[str, dict[str, list[Figures]]] = {mode: {} for mode in MODES}
    for layers, mode in itertools.product(options.layers, MODES):
        figures[mode][f"{layers} layers"] = run_mode(mode, layers, options.rounds)
    if options.json is not None:
        settings = {"rounds": options.rounds, "layers": options.layers}
        write_json(options.json, "bench_steady", settings, {"unit": "s", **figures})


if __name__ == "__main__":
    main()
