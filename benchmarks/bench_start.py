"""The first call in a new process, with cold and with warm caches: tripwire beside torch.compile.

The model is Qwen3 of qwen3.py on the CPU, 12 layers unless `--layers` says otherwise,
without grad and in eval mode; `--training` takes train mode, with grad, and a backward pass of
the logits' sum in every call. Every measurement is a fresh process. torch is imported, the model
built and the package imported before the clock starts; then, with Inductor as it comes:

    eager           the plain module: what a first call takes without a compiler.
    tripwire        `tripwire.compile(model, fullgraph=True)(tokens)`.
    torch.compile   `torch.compile(model, fullgraph=True)(tokens)`.

    cold    the caches are folders made for this process: TORCHINDUCTOR_CACHE_DIR for both sides,
            TRIPWIRE_CACHE_DIR for tripwire. gcc compiles everything.
    warm    the folders that a cold process of the same side left. A new process, a few times.

What is taken of each process:

    first call        wall seconds from `compile(model)` to the first result.
    without imports   the same, less what imports took in it, as `python -X importtime` tells:
                      both sides import Inductor when they first need it.
    two calls         until the second result. tripwire's first result comes from the run that it
                      observes; its compiled code first runs in the second call, and in training
                      the backward pass is compiled only then.
    CPU               CPU seconds of the first call, in this process and those it waited for.
    import tripwire   wall seconds, before the clock; torch.compile comes with torch.
    peak memory       ru_maxrss when the second call is done; the model is small.

Sides are interleaved, cold and warm. One process of each side goes first and isn't counted: it
finds files in the system's page cache, or brings them there. Both results of each process are
compared with eager's, outside the clock. Aims are held against the medians of the rounds.

    python benchmarks/bench_start.py [--layers N] [--training] [--rounds N] [--cold N] [--json PATH]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from qwen3 import build_qwen3
from side_by_side import (
    Figures,
    compare,
    describe_machine,
    print_table,
    spread_of,
    write_json,
)
from torch import nn

EAGER, TRIPWIRE, DYNAMO = SIDES = ("eager", "tripwire", "torch.compile")
COLD, WARM = "cold", "warm"
FIRST, BARE, TWO = "first call", "without imports", "two calls"
CPU, IMPORT, MEMORY = "CPU", "import tripwire", "peak memory"
CLOCK_STARTS, CLOCK_STOPS = "# the clock starts", "# the clock stops"
AIM = 5.0


# --- one measurement: a process of its own ---------------------------------------------------


def measure_here(side: str, layers: int, training: bool) -> dict[str, float]:
    """What this process takes to the first and the second result, in seconds and bytes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokens = build_qwen3(layers)
    model.train(training)
    start = time.perf_counter()
    compile_side = find_compiler(side)
    imported = time.perf_counter() - start

    with torch.set_grad_enabled(training):
        print(CLOCK_STARTS, file=sys.stderr, flush=True)
        used, start = cpu_seconds(), time.perf_counter()
        compiled = compile_side(model)
        first = call(compiled, tokens)
        to_first, used = time.perf_counter() - start, cpu_seconds() - used
        print(CLOCK_STOPS, file=sys.stderr, flush=True)
        second = call(compiled, tokens)
        to_second = time.perf_counter() - start
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        check(model, tokens, first, second)
        if side == TRIPWIRE and compiled.statistics().hits != 1:
            raise AssertionError(f"the second call should hit: {compiled.statistics()}")
    return {FIRST: to_first, TWO: to_second, CPU: used, IMPORT: imported, MEMORY: peak}


def find_compiler(side: str) -> Callable[[nn.Module], Any]:
    """How one side compiles a module."""
    if side == DYNAMO:
        return functools.partial(torch.compile, fullgraph=True)
    if side == TRIPWIRE:
        import tripwire

        return functools.partial(tripwire.compile, fullgraph=True)
    return lambda model: model


Result = list[torch.Tensor]


def call(model: nn.Module, tokens: torch.Tensor) -> Result:
    """The logits; in training all gradients too, which the parameters don't have afterwards."""
    logits = model(tokens)
    if not logits.requires_grad:
        return [logits]
    logits.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [logits, *gradients]


def check(model: nn.Module, tokens: torch.Tensor, *results: Result) -> None:
    """Raise where a result isn't eager's."""
    expected = call(model, tokens)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def cpu_seconds() -> float:
    """CPU time of this process, and of those that it waited for."""
    own, others = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


# --- all of them -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Program:
    """What every process runs."""

    layers: int
    training: bool

    def __str__(self) -> str:
        return f"Qwen3, {self.layers} layers, {'training' if self.training else 'inference'}"

    def measure(self, side: str, caches: Path) -> dict[str, float]:
        """`measure_here` in a fresh process."""
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRIPWIRE_CACHE_DIR": str(caches / "tripwire"),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has bytecode
        command = [sys.executable, "-X", "importtime", str(Path(__file__).resolve())]
        command += ["--measure", side, "--layers", str(self.layers)]
        command += ["--training"] * self.training
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if not line.startswith("import time")]
            raise SystemExit("\n".join([f"{side}: exit status {done.returncode}", *said[-20:]]))
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return {**figures, BARE: figures[FIRST] - sum_imports(done.stderr)}


def sum_imports(said: str) -> float:
    """Seconds of all imports while the clock ran, out of what `-X importtime` says."""
    timed = said.partition(CLOCK_STARTS)[2].partition(CLOCK_STOPS)[0]
    own = re.findall(r"^import time: +(\d+) \|", timed, re.MULTILINE)
    return sum(map(int, own)) / 1e6


By = dict[str, dict[str, Figures]]  # by what is measured, by side


def measure_all(program: Program, cold: int, rounds: int) -> dict[str, By]:
    """Every side's figures with cold and with warm caches, from interleaved processes."""
    found: dict[str, By] = {COLD: {}, WARM: {}}

    def take(temperature: str, side: str, caches: Path) -> None:
        for what, value in program.measure(side, caches).items():
            sides = found[temperature].setdefault(what, {s: Figures(s) for s in SIDES})
            sides[side].values.append(value)

    with tempfile.TemporaryDirectory() as folder:

        def caches_of(side: str, number: int = 0) -> Path:
            return Path(folder, side, str(number))

        program.measure(EAGER, caches_of(EAGER))
        for number in range(cold):
            for side in SIDES:
                take(COLD, side, caches_of(side, number))
        for number in range(rounds + 1):
            for side in SIDES:
                if number == 0:
                    program.measure(side, caches_of(side))
                else:
                    take(WARM, side, caches_of(side))
    return found


def print_all(program: Program, found: dict[str, By]) -> None:
    """Print a table for each thing that was measured."""
    for temperature, by in found.items():
        for what in (FIRST, BARE, TWO, CPU):
            title = f"{program}, {temperature} caches: {what}"
            print_table(title, [*by[what].values()], TRIPWIRE, unit="ms", scale=1e3)
        title = f"{program}, {temperature} caches: {MEMORY}"
        print_table(title, [*by[MEMORY].values()], TRIPWIRE, unit="MiB", scale=2**-20)
    ours = spread_of([1e3 * value for value in found[WARM][IMPORT][TRIPWIRE].values])
    print(f"\n{IMPORT}: {ours.middle:.0f} ms ({ours.low:.0f}–{ours.high:.0f})")


def judge(found: dict[str, By]) -> None:
    """Print each aim, and whether it is met."""
    print("\naims, and what the medians say: torch.compile / tripwire")
    aims = (
        (WARM, FIRST, AIM),
        (WARM, BARE, AIM),
        (WARM, TWO, AIM),
        (COLD, FIRST, None),
        (COLD, TWO, None),
    )
    for temperature, what, aim in aims:
        ratio = compare([*found[temperature][what].values()], DYNAMO, TRIPWIRE)
        assert ratio is not None  # no side fails: that ends the run
        verdict = "no aim" if aim is None else "met" if ratio.middle >= aim else "MISSED"
        wanted = "" if aim is None else f", at least {aim:.0f} times"
        print(f"  {verdict:9}  {temperature} caches, {what}{wanted}: {ratio}")


def main() -> None:
    """Read the options, measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="the first call in a new process.")
    parser.add_argument("--layers", type=int, default=12, help="layers of Qwen3")
    parser.add_argument("--training", action="store_true", help="with grad, and a backward pass")
    parser.add_argument("--rounds", type=int, default=5, help="processes a side, warm")
    parser.add_argument("--cold", type=int, default=1, help="processes a side, cold")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--measure", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.rounds, options.cold, options.layers) < 1:
        parser.error("--rounds, --cold and --layers must be at least 1")
    if options.measure is not None:
        print(json.dumps(measure_here(options.measure, options.layers, options.training)))
        return

    torch.set_num_threads(1)  # as in every process, for the line below
    program = Program(options.layers, options.training)
    print(f"{describe_machine()}; {options.cold} cold and {options.rounds} warm rounds, medians")
    found = measure_all(program, options.cold, options.rounds)
    print_all(program, found)
    judge(found)
    if options.json is not None:
        settings = {
            name: getattr(options, name) for name in ("layers", "training", "rounds", "cold")
        }
        figures = {
            temperature: {what: [*sides.values()] for what, sides in by.items()}
            for temperature, by in found.items()
        }
        write_json(options.json, "bench_start", settings, {"unit": f"s; {MEMORY}: B", **figures})


if __name__ == "__main__":
    main()
