"""What open sizes cost beside torch.compile's dynamic shapes, in one process and interleaved.

Qwen3 of qwen3.py on the CPU, without grad. Batch and length are open on both sides from the start
(dynamic=True), and the graph is checked to serve other sizes.

    capture   from a model to its first result, 12 and 36 layers, with a back end that hands the
              graph back as it got it. "sizes fixed" is tripwire with dynamic=False. Dynamo is
              reset before each round, outside the clock. The first round, which isn't counted,
              pays for imports: sympy, and parts of Dynamo.
    hits      a call that hits at 36 layers, with a back end that returns one constant tensor:
              the dispatcher's work alone, with open sizes and without.
    steady    with Inductor, three sizes in turn: what a program gets whose batches vary.

Each aim is printed with what was measured. Of hits it is held against the lowest figures, which a
busy machine disturbs least; else against the median of the rounds.

    python benchmarks/bench_open.py [--rounds N] [--capture-rounds N] [--layers N] [--json PATH]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from qwen3 import TOKENS, VOCABULARY, build_qwen3
from side_by_side import (
    Figures,
    Side,
    compare,
    describe_machine,
    print_table,
    time_calls,
    time_sides,
    write_json,
)
from torch import fx, nn

import tripwire

FEW, SOME = LAYERS = (12, 36)
OPEN, FIXED, DYNAMO, EAGER = "sizes open", "sizes fixed", "torch.compile, dynamic", "eager"
SIZES = ((2, TOKENS), (3, TOKENS + 4), (4, TOKENS + 8))
CONSTANT = torch.zeros(1)


def hand_back(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The back end of a capture."""
    return module.forward


def build_constant(module: nn.Module, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The back end of hits."""
    return lambda *args: (CONSTANT,)


def draw(batch: int, length: int) -> torch.Tensor:
    """Tokens of a size."""
    return torch.randint(0, VOCABULARY, (batch, length))


def check_open(model: nn.Module, compiled: Any) -> None:
    """One trace must serve all sizes, and give what the plain model gives."""
    for size in SIZES:
        tokens = draw(*size)
        torch.testing.assert_close(compiled(tokens), model(tokens))
    seen = compiled.statistics()
    if seen.traces != 1:
        raise AssertionError(f"one trace for all sizes is expected: {seen}")


def run_capture(layers: int, rounds: int) -> list[Figures]:
    """Time captures, and print the table and the aim."""
    model, _ = build_qwen3(layers)
    tokens = draw(*SIZES[0])
    check_open(model, tripwire.compile(model, backend=hand_back, fullgraph=True, dynamic=True))

    def ours(dynamic: bool) -> object:
        return tripwire.compile(model, backend=hand_back, fullgraph=True, dynamic=dynamic)(tokens)

    def theirs() -> object:
        return torch.compile(model, backend=hand_back, fullgraph=True, dynamic=True)(tokens)

    sides = [
        Side(OPEN, lambda: ours(True)),
        Side(FIXED, lambda: ours(False)),
        Side(DYNAMO, theirs, prepare=torch._dynamo.reset),
    ]
    figures = time_sides(sides, rounds)
    print_table(f"Qwen3, {layers} layers, capture", figures, OPEN, unit="ms", scale=1e3)
    ratio = compare(figures, DYNAMO, OPEN)
    say("at least 10 times faster than Dynamo", ratio and ratio.middle >= 10, ratio)
    return figures


def run_hits(rounds: int) -> list[Figures]:
    """Time hits, and print the table and the aim."""
    model, _ = build_qwen3(SOME)
    tokens = draw(*SIZES[0])
    build = functools.partial(torch.compile, fullgraph=True, backend=build_constant)
    mine = functools.partial(tripwire.compile, fullgraph=True, backend=build_constant)
    # Dynamo first: it replaces nn.Module.__init__ when it is first used, which retires code.
    sides = {DYNAMO: build(model, dynamic=True), OPEN: mine(model, dynamic=True)}
    sides[FIXED] = mine(model, dynamic=False)
    for side in sides.values():
        side(tokens)
        if side(tokens) is not CONSTANT:
            raise AssertionError(f"{side} didn't run what the back end made")
    title = f"Qwen3, {SOME} layers, a hit"
    calls = {label: functools.partial(side, tokens) for label, side in sides.items()}
    figures = time_calls({title: calls}, rounds)[title]
    print_table(title, figures, FIXED, unit="µs", scale=1e6)
    lowest = {row.label: 1e6 * min(row.values) for row in figures}
    extra = lowest[OPEN] - lowest[FIXED]
    say("open sizes cost at most 1 µs more", extra <= 1, f"{extra:.2f} µs")
    return figures


def run_steady(layers: int, rounds: int) -> list[Figures]:
    """Time calls of several sizes behind Inductor, and print the table and the aim."""
    torch._dynamo.reset()
    model, _ = build_qwen3(layers)
    given = [draw(*size) for size in SIZES]
    ours = tripwire.compile(model, fullgraph=True, dynamic=True)
    sides = {DYNAMO: torch.compile(model, fullgraph=True, dynamic=True), OPEN: ours, EAGER: model}
    for side in sides.values():
        for tokens in itertools.chain(given, given):
            torch.testing.assert_close(side(tokens), model(tokens))
    title = f"Qwen3, {layers} layers, three sizes in turn with Inductor"
    calls = {label: functools.partial(_call_all, side, given) for label, side in sides.items()}
    figures = time_calls({title: calls}, rounds)[title]
    seen = ours.statistics()
    if seen.traces != 1:
        raise AssertionError(f"one trace, and hits from then on, are expected: {seen}")
    print_table(title, figures, OPEN, unit="µs", scale=1e6)
    ratio = compare(figures, OPEN, DYNAMO)
    say("not slower than torch.compile's dynamic code", ratio and ratio.middle <= 1, ratio)
    return figures


def _call_all(side: Callable[..., Any], given: Sequence[torch.Tensor]) -> None:
    for tokens in given:
        side(tokens)


def say(aim: str, is_met: object, found: object) -> None:
    """Print an aim, whether it is met, and what was found."""
    verdict = "NO FIGURE" if is_met is None else "met" if is_met else "MISSED"
    print(f"  {verdict:9}  {aim}: {found or ''}")


def main() -> None:
    """Read the options, time, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="what open sizes cost.")
    parser.add_argument("--rounds", type=int, default=60, help="counted batches of calls a side")
    parser.add_argument("--capture-rounds", type=int, default=3, help="counted captures a side")
    parser.add_argument("--layers", type=int, default=4, help="layers behind Inductor")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if min(options.rounds, options.capture_rounds, options.layers) < 1:
        parser.error("--rounds, --capture-rounds and --layers must be at least 1")

    warnings.simplefilter("ignore")
    logging.getLogger("tripwire").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{describe_machine()}; {options.rounds} interleaved rounds, medians")
    with torch.no_grad():
        capture = {
            f"{layers} layers": run_capture(layers, options.capture_rounds) for layers in LAYERS
        }
        hits = run_hits(options.rounds)
        steady = run_steady(options.layers, options.rounds)
    if options.json is not None:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        figures = {"unit": "s", "capture": capture, "hits": {f"{SOME} layers": hits}}
        figures |= {"steady": {f"{options.layers} layers": steady}}
        write_json(options.json, "bench_open", settings, figures)


if __name__ == "__main__":
    main()
