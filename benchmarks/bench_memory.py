"""Peak memory of a traced run against the same run in eager mode: at most 1.1 times.

The model is a row of residual blocks whose intermediates are large (16 MiB each by default)
beside what a graph weighs. Two modes:

    inference   no grad: eager frees an intermediate as soon as the next ones are made, so its
                peak is a few of them. A tracer that held on to them would need hundreds of MiB.
    training    grad on, forward and backward: autograd itself holds most intermediates.

Three sides in each mode:

    eager       the plain run.
    trace       tripwire.trace; the trace is alive until the end, as is eager's result.
    keep all    a negative control: a torch-function mode that appends every result to a list.
                It must come out above 1.1 times, or this benchmark couldn't fail.

Every measurement is a fresh process that runs its side once on one block and two rows, so that
imports and thread pools aren't counted, and then on the whole model and input. Rounds alternate
the sides. What is measured is the growth over the moment before the run; weights and input are
there already.

    CPU   "tensor bytes" adds up every allocation and release of torch's CPU allocator, in
          order, as torch.profiler reports them: exact, and free of noise. "resident set" is
          the process's peak (VmHWM, reset before the run), so graphs and Python objects are in
          it as well; Linux only. Large blocks go back to the system as soon as they are
          freed (MALLOC_MMAP_THRESHOLD_), so holes in the heap aren't.
    CUDA  torch.cuda.max_memory_allocated, reset before the run. Used where CUDA is available.

Exits with 1 where a trace needs more than 1.1 times, or where the control doesn't.

    python benchmarks/bench_memory.py [--rounds N] [--blocks N] [--tokens N] [--json PATH]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import Figures, compare, describe_machine, print_table, write_json
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

import tripwire

WIDTH = 1024
LIMIT = 1.1

EAGER, TRACE, KEEP_ALL = SIDES = ("eager", "trace", "keep all")
INFERENCE, TRAINING = MODES = ("inference", "training")
TENSORS, RESIDENT = "tensor bytes", "resident set"


class Block(nn.Module):
    """A residual block that makes four intermediates of its input's size."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(self.norm(x)))


class KeepAll(TorchFunctionMode):
    """The negative control: holds every result of every torch call."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[object] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        self.kept.append(value)
        return value


# --- one measurement: a process of its own ---------------------------------------------------


def run_side(side: str, mode: str, model: nn.Module, x: torch.Tensor) -> None:
    """Run the model once, in one side's way. All that the side holds lives until the end."""
    with torch.set_grad_enabled(mode == TRAINING):
        if side == TRACE:
            trace = tripwire.trace(model, x)
            result = trace.result
        elif side == KEEP_ALL:
            with KeepAll() as keeper:
                result = model(x)
            assert keeper.kept
        else:
            result = model(x)
        assert isinstance(result, torch.Tensor)
        if mode == TRAINING:
            result.sum().backward()


def measure_once(side: str, mode: str, blocks: int, tokens: int) -> dict[str, int]:
    """The peak growth in bytes, by way of measuring."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks))).to(device)
    x = torch.randn(tokens, WIDTH, device=device)

    def run() -> None:
        run_side(side, mode, model, x)

    def clean_up() -> None:
        model.zero_grad(set_to_none=True)
        gc.collect()

    run_side(side, mode, model[:1], x[:2])
    clean_up()
    if device == "cuda":
        return {TENSORS: _cuda_peak(run)}
    figures = {}
    if sys.platform == "linux":
        figures[RESIDENT] = _resident_peak(run)
        clean_up()
    figures[TENSORS] = _allocated_peak(run)
    return figures


def _cuda_peak(run: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _allocated_peak(run: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()  # negative for a release
        peak = max(peak, live)
    return peak


def _resident_peak(run: Callable[[], None]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present size
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise LookupError(name)


# --- all of them -------------------------------------------------------------------------------


def measure_in_process(side: str, mode: str, blocks: int, tokens: int) -> dict[str, int]:
    """`measure_once` in a fresh process."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "KINETO_LOG_LEVEL": "5"}
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", side, mode]
    command += ["--blocks", str(blocks), "--tokens", str(tokens)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{side}, {mode}: exit status {done.returncode}\n{done.stderr}")
    figures: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure_mode(mode: str, rounds: int, blocks: int, tokens: int) -> dict[str, list[Figures]]:
    """Every side's figures by way of measuring, from alternating rounds."""
    found: dict[str, dict[str, Figures]] = {}
    for _ in range(rounds):
        for side in SIDES:
            for way, peak in measure_in_process(side, mode, blocks, tokens).items():
                found.setdefault(way, {s: Figures(s) for s in SIDES})[side].values.append(peak)
    return {way: list(by_side.values()) for way, by_side in found.items()}


def judge(figures: list[Figures]) -> bool:
    """Print whether a trace stays within the limit and the control doesn't, in every round."""
    trace, control = compare(figures, TRACE, EAGER), compare(figures, KEEP_ALL, EAGER)
    assert trace is not None  # no side fails: that ends the run
    assert control is not None
    holds, fails = trace.high <= LIMIT, control.low > LIMIT
    print(
        f"  at most {LIMIT} times: {'yes' if holds else 'NO'}, {trace}; "
        f"the control is {'above' if fails else 'NOT ABOVE'} it"
    )
    return holds and fails


def main() -> None:
    """Read the options, measure both modes, print, judge, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="peak memory of a traced run against eager.")
    parser.add_argument("--rounds", type=int, default=3, help="processes a side and mode")
    parser.add_argument("--blocks", type=int, default=24, help="residual blocks")
    parser.add_argument("--tokens", type=int, default=4096, help="rows of the input: 4 KiB each")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--measure", nargs=2, metavar=("SIDE", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.rounds, options.blocks, options.tokens) < 1:
        parser.error("--rounds, --blocks and --tokens must be at least 1")
    if options.measure is not None:
        print(json.dumps(measure_once(*options.measure, options.blocks, options.tokens)))
        return

    each = options.tokens * WIDTH * 4 / 2**20
    where = "CUDA" if torch.cuda.is_available() else "CPU"
    print(f"{describe_machine()}; {options.rounds} alternating rounds, medians")
    print(f"{options.blocks} blocks on {where}, each intermediate {each:.1f} MiB")
    figures, holds = {}, True
    for mode in MODES:
        figures[mode] = measure_mode(mode, options.rounds, options.blocks, options.tokens)
        for way, rows in figures[mode].items():
            print_table(f"{mode}, peak {way}", rows, EAGER, unit="MiB", scale=2**-20)
            holds &= judge(rows)
    if options.json is not None:
        settings = {"rounds": options.rounds, "blocks": options.blocks, "tokens": options.tokens}
        write_json(
            options.json, "bench_memory", {**settings, "device": where}, {"unit": "B", **figures}
        )
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
