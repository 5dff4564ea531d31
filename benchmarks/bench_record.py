"""What it costs to be ready to record a call that fails, and how large the records are.

Everything runs on the CPU, without grad, and succeeds: the figures are what a program pays for
records that it never writes. Pairs, one batch of each side a round:

    20 tensors     a compiled call with 20 tensor arguments, whose back end hands back a constant:
                   the dispatcher's work alone, without and with `record_on_error`.
    a write        the same, where the graph adds to its first argument, four numbers, in place:
                   the armed call copies those four numbers, and nothing else.
    a draw         the same, where the graph draws from torch's generator, whose state is kept.
    plain          a plain function of two small tensors, bare and decorated, after its first call.

Copies of storages are counted in one call of each armed side.

Then the size of a record's file beside what it may be: the unique bytes of its tensors, 64 bytes
a tensor, 8 KB, and its source.

    python benchmarks/bench_record.py [--rounds N] [--json PATH]
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from side_by_side import (
    Calls,
    Figures,
    describe_machine,
    print_table,
    spread_of,
    time_calls,
    write_json,
)
from torch import nn

import tripwire
from tripwire.recording.format import nodes
from tripwire.recording.format.container import OBJECTS
from tripwire.recording.format.file import Record

ARMED, UNARMED = "armed", "unarmed"
BARE, DECORATED = "bare", "decorated"
LIMIT = 5  # µs
CONSTANT = torch.zeros(1)


def build_constant(module: nn.Module, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The back end of every side."""
    return lambda *args: (CONSTANT,)


def add_all(*tensors: torch.Tensor) -> torch.Tensor:
    """Reads all of its arguments."""
    return sum(tensors[1:], tensors[0])


def write_one(*tensors: torch.Tensor) -> torch.Tensor:
    """Changes its first argument."""
    tensors[0].add_(1)
    return add_all(*tensors)


def draw_one(*tensors: torch.Tensor) -> torch.Tensor:
    """Draws once."""
    return add_all(*tensors) + torch.rand(4)


def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A plain function."""
    return (x * y).sum()


# --- calls -----------------------------------------------------------------------------------


def build_pair(target: Callable[..., Any], folder: str) -> Calls:
    """A hit without and with a folder for records."""
    tensors = [torch.randn(4) for _ in range(20)]
    calls = {}
    for label, where in ((UNARMED, ""), (ARMED, folder)):
        compiled = tripwire.compile(
            target, backend=build_constant, fullgraph=True, record_on_error=where
        )
        compiled(*tensors)
        call = functools.partial(compiled, *tensors)
        if call() is not CONSTANT:
            raise AssertionError(f"{target} isn't compiled")
        calls[label] = call
    return calls


def build_plain(folder: str) -> Calls:
    """A plain call, bare and decorated."""
    x, y = torch.randn(4), torch.randn(4)
    recorded = tripwire.record_on_error(folder)(multiply)
    recorded(x, y)
    return {BARE: functools.partial(multiply, x, y), DECORATED: functools.partial(recorded, x, y)}


def count_copies(call: Callable[[], object]) -> int:
    """Storages that one call copies."""
    made = []
    real = torch.UntypedStorage.clone

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        made.append(storage)
        return real(storage)

    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]
    try:
        call()
    finally:
        torch.UntypedStorage.clone = real  # type: ignore[method-assign]
    return len(made)


def run_calls(rounds: int, folder: str) -> tuple[dict[str, list[Figures]], dict[str, int]]:
    """Time the pairs, print a table for each, and what is added."""
    programs = {
        "20 tensors": build_pair(add_all, folder),
        "20 tensors, a write": build_pair(write_one, folder),
        "20 tensors, a draw": build_pair(draw_one, folder),
        "plain": build_plain(folder),
    }
    copies = {title: count_copies(list(calls.values())[1]) for title, calls in programs.items()}
    figures = time_calls(programs, rounds)
    for title, (before, after) in figures.items():
        print_table(title, [before, after], before.label, unit="µs", scale=1e6)
        added = spread_of([1e6 * (b - a) for a, b in zip(before.values, after.values, strict=True)])
        lowest = 1e6 * (min(after.values) - min(before.values))
        print(
            f"  {after.label} adds {lowest:.2f} µs by the lowest figures; by rounds "
            f"{added.middle:.2f} µs ({added.low:.2f}–{added.high:.2f}); "
            f"storages copied: {copies[title]}"
        )
    return figures, copies


def judge(figures: dict[str, list[Figures]], copies: dict[str, int]) -> None:
    """Print the aim and whether it is met."""
    before, after = figures["20 tensors"]
    lowest = 1e6 * (min(after.values) - min(before.values))
    met = lowest <= LIMIT and copies["20 tensors"] == 0
    print(
        f"\naim: an armed hit with 20 tensors adds at most {LIMIT} µs and copies no tensor: "
        f"{lowest:.2f} µs, {copies['20 tensors']} copied: {'met' if met else 'MISSED'}"
    )


# --- files -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    """A record's file, in bytes, and what it may be."""

    label: str
    file: int
    allowed: int
    tensors: int
    blobs: int
    source: int
    table: int


def measure_file(label: str, path: Path) -> Size:
    """Hold a file against the promise."""
    with Record.open(path) as record:
        count = sum(
            isinstance(node, nodes.Tensor | nodes.TensorView) for node in record.table.nodes
        )
        blobs = sum(record.blobs[i].size for i in range(len(record.blobs)))
        source = sum(m.size for name, m in record.members.items() if name.startswith("src/"))
        table = record.members[OBJECTS].size
    allowed = blobs + 64 * count + 8192 + source
    return Size(label, path.stat().st_size, allowed, count, blobs, source, table)


def build_transformer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A 4-layer model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
    )
    return LlamaForCausalLM(config), {"input_ids": torch.randint(0, 1000, (1, 16))}


def run_sizes(folder: str) -> list[Size]:
    """Write records of some calls, and print their sizes."""
    model, inputs = build_transformer()
    mlp = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    many = [torch.randn(4) for _ in range(200)]
    calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
        "multiply": (multiply, (torch.randn(4), torch.randn(4)), {}),
        "20 tensors": (add_all, tuple(many[:20]), {}),
        "200 tensors": (add_all, tuple(many), {}),
        "8 linear layers": (mlp, (torch.randn(2, 64),), {}),
        "encoder layer": (layer, (torch.randn(2, 5, 64),), {}),
        "Llama, 4 layers": (model, (), inputs),
    }
    found = []
    for number, (label, (target, args, kwargs)) in enumerate(calls.items()):
        path = tripwire.record_call(Path(folder) / f"{number}.rec")(target, *args, **kwargs)
        found.append(measure_file(label, path))
    print("\nsizes in bytes")
    rows = [("call", "file", "allowed", "over blobs", "tensors", "source", "table", "")]
    for size in found:
        verdict = "met" if size.file <= size.allowed else "MISSED"
        over = size.file - size.blobs
        cells = (size.file, size.allowed, over, size.tensors, size.source, size.table)
        rows.append((size.label, *map(str, cells), verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for label, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join(["", label.ljust(widths[0]), *aligned]).rstrip())
    return found


def main() -> None:
    """Read the options, time, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="what it costs to be ready to record.")
    parser.add_argument("--rounds", type=int, default=60, help="counted batches a side")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")

    warnings.simplefilter("ignore")
    logging.getLogger("tripwire").setLevel(logging.ERROR)
    os.environ["TRIPWIRE_RECORD_CHECK"] = "0"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{describe_machine()}; {options.rounds} interleaved rounds, medians")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        figures, copies = run_calls(options.rounds, folder)
        sizes = run_sizes(folder)
    judge(figures, copies)
    if options.json is not None:
        document = {
            "unit": "s",
            "calls": figures,
            "copies": copies,
            "sizes": [asdict(size) for size in sizes],
        }
        write_json(options.json, "bench_record", {"rounds": options.rounds}, document)


if __name__ == "__main__":
    main()
