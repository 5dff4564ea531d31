"""What tripwire costs those who don't use it: attributes that no entry watches, 1.05 times at most.

Attribute reads and writes of plain objects, modules, classes and tensors, items of dicts,
globals and calls: all of things that no compiled code reads, some of a class of which another
object is watched. The same code is timed at five moments of one process:

    before       tripwire isn't imported yet.
    again        the same once more. Nothing has happened: this is the noise of the method.
    imported     after `import tripwire`.
    live         a small transformer is compiled, has hits, and its wires are in place.
    gone         the compiled model and the model are deleted, and garbage is collected.

At each moment the process forks, and the fork stays at that moment. Then the forks take turns,
some milliseconds each, so a slow moment of the machine falls on all alike; one after the other
they came out up to 1.9 times apart on a busy machine. They share every address. A turn is some
short batches of every statement; the statements are compiled once, before the first fork, and
unrolled, so that a loop costs next to nothing. The lowest batch of all turns counts.

Rounds repeat the whole in fresh processes. Each gives one ratio to "before"; the table shows the
median of these ratios with the lowest and the highest, and the aim is held against the median.

What tripwire patches while it traces must be the original at every moment: the benchmark looks
at it too, and exits with 1 where it isn't. Needs os.fork.

    python benchmarks/bench_bystander.py [--rounds N] [--turns N] [--json PATH]
"""

from __future__ import annotations

import argparse
import builtins
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import timeit
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from side_by_side import Figures, describe_machine, spread_of, write_json
from torch import nn

LIMIT = 1.05
WIDTH = 16
UNROLLED = 20
BATCH = 5e-5  # seconds
BATCHES = 4  # of each statement in a turn

BEFORE, AGAIN, IMPORTED, LIVE, GONE = MOMENTS = ("before", "again", "imported", "live", "gone")

PATCHED: tuple[tuple[Any, str], ...] = (
    (builtins, "getattr"),
    (builtins, "hasattr"),
    (nn.Module, "__call__"),
    (os._Environ, "__getitem__"),
    (torch.overrides, "has_torch_function"),
)


class Settings:
    """A plain object. The compiled model reads one of these."""

    kind = "plain"

    def __init__(self) -> None:
        self.scale = 2.0


class Other(Settings):
    """A plain object of a class that the compiled model doesn't know."""


class Changing(Settings):
    """A class that is written, and objects that change to it: apart, since that slows reads."""


class Changed(Settings):
    """What they change to."""


class Block(nn.Module):
    """A transformer's block that reads its settings and a flag."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.flag = True
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.flag:
            x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + torch.relu(self.linear(x)) * self.settings.scale


def hand_on(x: object = None) -> object:
    """A function to call."""
    return x


# --- statements --------------------------------------------------------------------------------

STATEMENTS = {
    "object read, watched class": "same.scale",
    "object write, watched class": "same.scale = 2.0",
    "object read, other class": "other.scale",
    "object write, other class": "other.scale = 2.0",
    "object.__class__ write": "changing.__class__ = Changed; changing.__class__ = Changing",
    "class attribute read": "Other.kind",
    "class attribute write": "Changed.kind = 'plain'",
    "nn.Module attribute read": "block.flag",
    "nn.Module attribute write": "block.flag = True",
    "nn.Module parameter read": "linear.weight",
    "nn.Module submodule read": "block.linear",
    "nn.Module call": "identity(1)",
    "dict item read": "items['key']",
    "dict item write": "items['key'] = 1",
    "Python module attribute read": "python_module.value",
    "Python module attribute write": "python_module.value = 1",
    "tensor.shape": "tensor.shape",
    "tensor.requires_grad read": "tensor.requires_grad",
    "tensor.requires_grad write": "tensor.requires_grad = False",
    "tensor.requires_grad_()": "tensor.requires_grad_(False)",
    "tensor.data write": "tensor.data = data",
    "parameter.grad read": "parameter.grad",
    "parameter.grad write": "parameter.grad = data",
    "function call": "function(1)",
    "function.__defaults__ write": "function.__defaults__ = (None,)",
    "getattr()": "getattr(same, 'scale')",
}
GLOBALS = {"global read": "value", "global write": "value = 1"}  # inside another module


def build_things() -> dict[str, object]:
    """What the statements read and write, by the names that they use."""
    python_module = ModuleType("bystander")
    vars(python_module)["value"] = 1
    return {
        "same": Settings(),
        "other": Other(),
        "Other": Other,
        "changing": Changing(),
        "Changing": Changing,
        "Changed": Changed,
        "block": Block(Settings()),
        "linear": nn.Linear(WIDTH, WIDTH),
        "identity": nn.Identity(),
        "items": {"key": 1},
        "python_module": python_module,
        "tensor": torch.randn(4),
        "data": torch.randn(4),
        "parameter": nn.Parameter(torch.randn(4)),
        "function": hand_on,
    }


def build_timers(things: dict[str, object]) -> dict[str, timeit.Timer]:
    """Every statement, compiled once. Its names are local variables, save for globals."""
    setup = "\n".join(f"{name} = things[{name!r}]" for name in things)
    timers = {
        label: timeit.Timer(_unroll(statement), setup, globals={"things": things})
        for label, statement in STATEMENTS.items()
    }
    namespace = vars(things["python_module"])
    for label, statement in GLOBALS.items():
        timers[label] = timeit.Timer(_unroll(statement), "global value", globals=namespace)
    return timers


def _unroll(statement: str) -> str:
    return "\n".join([statement] * UNROLLED)


def count_loops(timer: timeit.Timer) -> int:
    """How many loops make a batch."""
    loops = 1
    while (seconds := min(timer.repeat(5, loops))) < BATCH / 4:
        loops *= 2
    return max(1, round(loops * BATCH / seconds))


# --- one process and its forks -----------------------------------------------------------------


class Moment:
    """A fork of this process, which stays as the process is now and times when it is told to."""

    def __init__(self, timers: dict[str, timeit.Timer], loops: dict[str, int]) -> None:
        fork = multiprocessing.get_context("fork")
        self._end, other = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(other, timers, loops), daemon=True)
        self._process.start()
        self.seconds = dict.fromkeys(timers, float("inf"))

    def take_turn(self) -> None:
        """Time every statement; `seconds` keeps the lowest so far."""
        self._end.send(True)
        for label, seconds in self._end.recv().items():
            self.seconds[label] = min(self.seconds[label], seconds)

    def end(self) -> None:
        """Let the fork exit."""
        self._end.send(False)
        self._process.join()


def _serve(end: Connection, timers: dict[str, timeit.Timer], loops: dict[str, int]) -> None:
    while end.recv():
        end.send(time_statements(timers, loops))


def time_statements(timers: dict[str, timeit.Timer], loops: dict[str, int]) -> dict[str, float]:
    """Seconds of each statement, once: the lowest of some batches."""
    return {
        label: min(timer.repeat(BATCHES, loops[label])) / (loops[label] * UNROLLED)
        for label, timer in timers.items()
    }


def measure_once(turns: int) -> dict[str, Any]:
    """Every statement's seconds by moment, and what wasn't the original at some moment."""
    originals = [vars(owner)[name] for owner, name in PATCHED]
    replaced: list[str] = []
    moments: dict[str, Moment] = {}
    timers = build_timers(build_things())
    loops = {label: count_loops(timer) for label, timer in timers.items()}
    time_statements(timers, loops)

    def stay(moment: str) -> None:
        for (owner, name), original in zip(PATCHED, originals, strict=True):
            if vars(owner)[name] is not original:
                replaced.append(f"{moment}: {owner.__name__}.{name}")
        moments[moment] = Moment(timers, loops)

    if "tripwire" in sys.modules:
        raise AssertionError("tripwire is imported already")
    stay(BEFORE)
    stay(AGAIN)
    import tripwire

    stay(IMPORTED)
    model: Any = nn.Sequential(*(Block(Settings()) for _ in range(4))).eval()
    compiled: Any = tripwire.compile(model, fullgraph=True)
    x = torch.randn(1, 4, WIDTH)
    with torch.no_grad():
        for _ in range(100):
            compiled(x)
        stay(LIVE)
        seen = compiled.statistics()
        model[0].settings.scale = 3.0
        compiled(x)
    if (seen.traces, seen.hits) != (1, 99) or compiled.statistics().retired != 1:
        raise AssertionError(f"no entry was live, or none was watching: {seen}")
    del model, compiled
    gc.collect()
    stay(GONE)
    for _ in range(turns):
        for moment in moments.values():
            moment.take_turn()
    for moment in moments.values():
        moment.end()
    found = {name: moment.seconds for name, moment in moments.items()}
    return {"seconds": found, "replaced": replaced}


def measure_in_process(turns: int) -> dict[str, Any]:
    """`measure_once` in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure"]
    command += ["--turns", str(turns)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"exit status {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# --- all of them -------------------------------------------------------------------------------


def print_ratios(rows: dict[str, dict[str, Figures]]) -> list[str]:
    """Print a row per statement and a column per moment; return what misses the aim."""
    lines = [["statement", "before ns", *(f"{m} / before" for m in MOMENTS[1:])]]
    missed = []
    for label, by_moment in rows.items():
        before = by_moment[BEFORE].values
        line = [label, f"{1e9 * min(before):.1f}"]
        for moment in MOMENTS[1:]:
            pairs = zip(by_moment[moment].values, before, strict=True)
            ratio = spread_of([a / b for a, b in pairs])
            line.append(str(ratio))
            if moment != AGAIN and ratio.middle > LIMIT:
                missed.append(f"{label}, {moment}: {ratio}")
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for label, *cells in lines:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join(["", label.ljust(widths[0]), *aligned]))
    return missed


def main() -> None:
    """Read the options, measure, print, judge, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="what tripwire costs those who don't use it.")
    parser.add_argument("--rounds", type=int, default=7, help="fresh processes")
    parser.add_argument("--turns", type=int, default=150, help="turns of each moment")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.rounds, options.turns) < 1:
        parser.error("--rounds and --turns must be at least 1")
    torch.set_num_threads(1)
    if options.measure:
        print(json.dumps(measure_once(options.turns)))
        return

    print(f"{describe_machine()}; {options.rounds} processes, medians of their ratios")
    rows = {
        label: {moment: Figures(moment) for moment in MOMENTS} for label in STATEMENTS | GLOBALS
    }
    replaced: list[str] = []
    for _ in range(options.rounds):
        found = measure_in_process(options.turns)
        replaced += found["replaced"]
        for moment, by_label in found["seconds"].items():
            for label, seconds in by_label.items():
                rows[label][moment].values.append(seconds)
    missed = print_ratios(rows)
    print(f"  at most {LIMIT} times: {'NO' if missed else 'yes, all of them'}")
    for line in missed:
        print(f"    {line}")
    names = ", ".join(f"{owner.__name__}.{name}" for owner, name in PATCHED)
    print(f"  {names}: {'REPLACED' if replaced else 'the originals at every moment'}")
    for line in dict.fromkeys(replaced):
        print(f"    {line}")
    if options.json is not None:
        settings = {"rounds": options.rounds, "turns": options.turns}
        figures = {label: list(by_moment.values()) for label, by_moment in rows.items()}
        write_json(options.json, "bench_bystander", settings, {"unit": "s", **figures})
    if replaced:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
