"""The 28-layer Qwen3-0.6B shape on a CUDA device, tripwire beside torch.compile and eager.

Random weights, bfloat16, one sequence of 16 tokens, without grad. Needs a CUDA device, torch and
transformers; nothing else has to be installed, tripwire is imported from `src`.

    steady      milliseconds per call, sides interleaved in one process, the device waited for
                after each batch: eager, a CUDA graph of eager, torch.compile and tripwire, both
                with Inductor in mode "default" and "reduce-overhead".
    dispatch    microseconds of a hit with a back end that returns a constant.
    first call  seconds from `compile` to the first result in fresh processes, cold (a new cache
                folder) and warm, the import of the compiler included.

    python benchmarks/gpu.py [--layers N] [--rounds N] [--starts N] [--json PATH]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import Figures, Side, describe_machine, print_table, time_sides, write_json

import tripwire

EAGER, GRAPH = "eager", "CUDA graph of eager"
MODES = ("default", "reduce-overhead")
COMPILERS: dict[str, Callable[..., Any]] = {
    "torch.compile": torch.compile,
    "tripwire": tripwire.compile,
}
CONSTANT = torch.zeros(1)


def build(layers: int) -> tuple[Any, torch.Tensor]:
    """The model and its tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    return model, torch.randint(0, 1000, (1, 16), device="cuda")


def run(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """One call."""
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


def capture(model: Any, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A CUDA graph of the plain model."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(model, tokens)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(model, tokens)

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def build_sides(model: Any, tokens: torch.Tensor) -> dict[str, Callable[[], object]]:
    """One call of each side, compiled, and checked against eager."""
    wanted = run(model, tokens).float()
    sides: dict[str, Callable[[], object]] = {
        EAGER: lambda: run(model, tokens),
        GRAPH: capture(model, tokens),
    }
    for mode, (name, compile_) in itertools.product(MODES, COMPILERS.items()):
        compiled = compile_(model, mode=mode, fullgraph=True)
        for _ in range(5):
            given = run(compiled, tokens).float()
            difference = (given - wanted).abs().max() / wanted.abs().max()
            if difference > 0.03:  # bfloat16 through all layers, fused and not
                raise AssertionError(f"{name}, {mode}: off by {difference:.3f}")
        sides[f"{name}, {mode}"] = lambda compiled=compiled: run(compiled, tokens)
    return sides


def time_steady(sides: dict[str, Callable[[], object]], rounds: int) -> list[Figures]:
    """Seconds per call of each side."""
    number = 20

    def repeat(call: Callable[[], object]) -> None:
        for _ in range(number):
            call()
        torch.cuda.synchronize()

    timed = time_sides(
        [Side(label, lambda call=call: repeat(call), call) for label, call in sides.items()], rounds
    )
    for row in timed:
        row.values = [value / number for value in row.values]
    return timed


def time_hits(model: Any, tokens: torch.Tensor, rounds: int) -> list[Figures]:
    """Seconds per call where the compiled code does nothing."""
    sides = []
    for name, compile_ in COMPILERS.items():
        compiled = compile_(model, backend=lambda *_: lambda *_: (CONSTANT,), fullgraph=True)
        compiled(tokens, use_cache=False)
        call = lambda compiled=compiled: [compiled(tokens, use_cache=False) for _ in range(200)]  # noqa: E731
        sides.append(Side(name, call, call))
    timed = time_sides(sides, rounds)
    for row in timed:
        row.values = [value / 200 for value in row.values]
    return timed


# --- first calls, each in a process of its own -------------------------------------------------


def start(name: str, mode: str, layers: int) -> None:
    """Build, compile and call once; print the seconds."""
    model, tokens = build(layers)
    with torch.no_grad():
        run(model, tokens)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = run(COMPILERS[name](model, mode=mode, fullgraph=True), tokens)
        float(result.sum())
    print(json.dumps(time.perf_counter() - begin))


def time_starts(layers: int, starts: int) -> dict[str, list[Figures]]:
    """Cold and warm first calls of both compilers, one after the other."""
    cold = [Figures(f"{name}, {mode}") for mode in MODES for name in COMPILERS]
    warm = [Figures(row.label) for row in cold]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(starts + 1):
            for row in warm if number else cold:
                name, mode = row.label.split(", ")
                environment = {
                    **os.environ,
                    "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{name}-{mode}",
                    "TRIPWIRE_CACHE_DIR": f"{folder}/{name}-{mode}/own",
                }
                command = [sys.executable, __file__, "--start", name, mode, str(layers)]
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    row.error = (done.stderr.strip().splitlines() or ["failed"])[-1][:80]
                else:
                    row.values.append(json.loads(done.stdout.splitlines()[-1]))
    return {"cold": cold, "warm": warm}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--starts", type=int, default=2, help="warm starts of each side")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--start", nargs=3, metavar=("COMPILER", "MODE", "LAYERS"))
    options = parser.parse_args()
    if options.start:
        name, mode, layers = options.start
        start(name, mode, int(layers))
        return
    device = torch.cuda.get_device_name()
    print(f"{describe_machine()}, {device}")
    settings = {"layers": options.layers, "rounds": options.rounds, "device": device}
    figures: dict[str, list[Figures]] = {}

    def take(more: dict[str, list[Figures]]) -> None:
        """Written part by part: a run that is broken off leaves what it had."""
        figures.update(more)
        if options.json:
            write_json(options.json, "gpu", settings, figures)

    if options.starts:
        take(time_starts(options.layers, options.starts))
    for kind, rows in figures.items():
        reference = next((row.label for row in rows if row.label.startswith("tripwire")), "")
        print_table(f"first call, {kind}", rows, reference, unit="s", scale=1)
    model, tokens = build(options.layers)
    with torch.no_grad():
        take({"hits": time_hits(model, tokens, options.rounds)})
        title = "a hit, back end that does nothing"
        print_table(title, figures["hits"], "tripwire", unit="µs", scale=1e6)
        take({"steady": time_steady(build_sides(model, tokens), options.rounds)})
        title = f"{options.layers} layers, 16 tokens"
        print_table(title, figures["steady"], "tripwire, default", unit="ms", scale=1e3)


if __name__ == "__main__":
    main()
