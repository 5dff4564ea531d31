"""Time to capture a model: tripwire beside its peers, in one process and interleaved.

Two models, both on the CPU, in eval mode and without grad:

    qwen3   Qwen3 from transformers: random weights, hidden size 64, 16 tokens, no cache
    blocks  residual blocks of Linear, LayerNorm and GELU: width 64, batch 4

Each side gets the same module, which returns one tensor, and the same input. What is timed is
the whole call that leads from the module to a captured graph:

    eager               the module's plain run. Nothing is captured.
    tripwire.trace      one real run, recorded as an fx graph of torch calls with the user's
                        lines, scopes and branches. Python code for the graph isn't made yet.
    trace + codegen     the same, and `.graph_module`: the graph's Python code is made and
                        compiled.
    torch.jit.trace     one real run, recorded in C++ as a TorchScript graph of aten operators.
                        check_trace=False: it isn't run a second time to compare.
    make_fx, real       one real run, recorded below the dispatcher: each torch call is broken
                        up into the aten operators that it reaches, so the graph is longer and
                        lies lower. Parameters become constants of the graph. It refuses to
                        let Python read a tensor's value, which Qwen3 does when it looks for
                        packed sequences: then the table shows the error's class.
    torch.export        torch.export.export as it comes: Python runs once over fake tensors, below
                        the dispatcher, and sizes and values that Python asks for are checked.
                        The graph is one of aten operators, with the parameters as inputs.
    Dynamo capture      torch.compile with a back end that hands back the graph as it got it.
                        Python bytecode is interpreted over fake tensors, guards are built, and
                        the captured graph then runs once for real. No AOTAutograd, no Inductor.
                        torch._dynamo.reset() comes before every round, outside the clock.

transformers asks whether Dynamo or torch.jit is tracing it. If so it builds an attention mask
that the eager run does without, and some calls in each layer differ. It doesn't know tripwire,
which records what the eager run does. "graph nodes" in the output counts inputs as well, and
for torch.jit constants and attribute reads too.

lightning-thunder is no side: its latest release, 0.2.6, fails while it is imported beside torch
2.13 (it names Tensor.align_as, which is gone).

One round of every side goes first and isn't counted. Warnings are off for all sides: tripwire
and torch.jit both warn where Python reads a value. torch runs on one thread: the tensors are
tiny, and on a busy machine its pool of two made the same eager run take 5 ms or 1500 ms.

    python benchmarks/bench_trace.py [--rounds N] [--layers N] [--blocks N] [--json PATH]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from qwen3 import WIDTH, build_qwen3
from side_by_side import (
    Figures,
    Side,
    compare,
    describe_machine,
    print_table,
    time_sides,
    write_json,
)
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import tripwire

BATCH = 4

TRACE = "tripwire.trace"
DYNAMO = "Dynamo capture"


class Block(nn.Module):
    """A residual block of three plain layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(self.norm(x)))


def build_blocks(blocks: int) -> tuple[nn.Module, torch.Tensor]:
    """Plain residual blocks, and an input for them."""
    model = nn.Sequential(*(Block(WIDTH) for _ in range(blocks))).eval()
    return model, torch.randn(BATCH, WIDTH)


Captured = dict[str, list[int]]  # by side: the graphs of its last round, each as a node count


def build_sides(model: nn.Module, x: torch.Tensor, captured: Captured) -> list[Side]:
    """Every side for one model. A round leaves its graphs' sizes in `captured`."""

    def count(label: str, graph: fx.Graph) -> None:
        captured[label] = [*captured.get(label, []), len(graph.nodes)]

    def trace() -> object:
        return tripwire.trace(model, x)

    def trace_and_generate() -> object:
        return tripwire.trace(model, x).graph_module

    def script() -> object:
        return torch.jit.trace(model, (x,), check_trace=False)

    def proxy() -> object:
        return make_fx(model, tracing_mode="real")(x)

    def export() -> object:
        return torch.export.export(model, (x,))

    def hand_back(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        count(DYNAMO, module.graph)
        return module.forward

    def dynamo() -> object:
        return torch.compile(model, backend=hand_back)(x)

    def reset() -> None:
        torch._dynamo.reset()
        captured.pop(DYNAMO, None)

    return [
        Side("eager", lambda: model(x)),
        Side(TRACE, trace),
        Side("trace + codegen", trace_and_generate),
        Side("torch.jit.trace", script),
        Side("make_fx, real", proxy),
        Side("torch.export", export),
        Side(DYNAMO, dynamo, prepare=reset),
    ]


def count_nodes(model: nn.Module, x: torch.Tensor, captured: Captured) -> str:
    """How many nodes each side's graph has; captured again here, outside any clock."""
    counts = {
        TRACE: lambda: len(tripwire.trace(model, x).graph.nodes),
        "torch.jit.trace": lambda: len(
            list(torch.jit.trace(model, (x,), check_trace=False).inlined_graph.nodes())
        ),
        "make_fx": lambda: len(make_fx(model, tracing_mode="real")(x).graph.nodes),
        "torch.export": lambda: len(torch.export.export(model, (x,)).graph.nodes),
    }
    parts = []
    for label, measure in counts.items():
        try:
            parts.append(f"{label} {measure()}")
        except Exception as error:
            parts.append(f"{label} {type(error).__name__}")
    graphs = captured.get(DYNAMO, [])
    parts.append(f"Dynamo {sum(graphs)} in {len(graphs)} graph{'s' * (len(graphs) != 1)}")
    return ", ".join(parts)


def run_model(title: str, model: nn.Module, x: torch.Tensor, rounds: int) -> list[Figures]:
    """Time every side on one model, and print the table and the headline."""
    captured: Captured = {}
    with torch.no_grad():
        figures = time_sides(build_sides(model, x, captured), rounds)
        nodes = count_nodes(model, x, captured)
    print_table(title, figures, TRACE, unit="ms", scale=1e3)
    print(f"  graph nodes: {nodes}")
    print(f"  {DYNAMO} / {TRACE}: {compare(figures, DYNAMO, TRACE) or 'no figure'}")
    return figures


def main() -> None:
    """Read the options, time both models, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="tripwire's trace time beside its peers'.")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds a side")
    parser.add_argument("--layers", type=int, default=36, help="layers of Qwen3")
    parser.add_argument("--blocks", type=int, default=96, help="plain blocks")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if min(options.rounds, options.layers, options.blocks) < 1:
        parser.error("--rounds, --layers and --blocks must be at least 1")

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{describe_machine()}; {options.rounds} interleaved rounds, medians")
    figures = {
        "qwen3": run_model(
            f"Qwen3, {options.layers} layers", *build_qwen3(options.layers), options.rounds
        ),
        "blocks": run_model(
            f"{options.blocks} plain blocks", *build_blocks(options.blocks), options.rounds
        ),
    }
    if options.json is not None:
        settings = {"rounds": options.rounds, "layers": options.layers, "blocks": options.blocks}
        write_json(options.json, "bench_trace", settings, {"unit": "s", **figures})


if __name__ == "__main__":
    main()
