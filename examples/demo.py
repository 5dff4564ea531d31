"""The story of tripwire in under two minutes and forty lines.

A small GPT is compiled and runs. Another file changes a value that it reads: the compiled code is
discarded, and tripwire names the line that wrote. Another model fails and leaves a record, which
another process replays. A report of all that is written.

    python examples/demo.py [--graph]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import settings
import torch
from torch import nn
from transformer import Transformer

import tripwire
from tripwire.running import logging_into


class Scaled(nn.Module):
    """A small GPT, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Transformer()
        self.scale = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.gpt(tokens) * self.scale


class Fragile(nn.Module):
    """A model with a bug: it changes its input, and then chokes on it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings of the tokens after the given ones."""
        tokens.add_(1)
        if int(tokens.max()) >= self.embedding.num_embeddings:
            raise ValueError(f"no embedding for token {int(tokens.max())}")
        return self.embedding(tokens)


def say(title: str) -> None:
    """A heading."""
    print(f"\n{title}")


def tell(text: object) -> None:
    """A line of the story."""
    print(f"   {text}")


def run_tripwire(*arguments: str) -> str:
    """What a command of tripwire's prints, run in a process of its own."""
    tell(f"$ tripwire {' '.join(arguments)}")
    command = [sys.executable, "-m", "tripwire", *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def show_graph(model: nn.Module, tokens: torch.Tensor) -> None:
    """One run becomes a graph, with the user's lines."""
    print(tripwire.trace(model, tokens).format(source=True))


def call(compiled: nn.Module, model: nn.Module, tokens: torch.Tensor, times: int) -> None:
    """Call both; they must agree."""
    for _ in range(times):
        if not torch.equal(compiled(tokens), model(tokens)):
            raise SystemExit("compiled code returned something else than the model")


def compile_model(model: nn.Module, tokens: torch.Tensor) -> nn.Module:
    """The first call is observed, the others run compiled code."""
    compiled = tripwire.compile(model, backend="eager")
    call(compiled, model, tokens, times=3)
    (entry,) = tripwire.explain(compiled).entries
    tell("Call 1 ran as plain Python and was observed:")
    tell(f"{entry.summary.ops} torch calls became a graph; {len(entry.wires)} things are watched.")
    tell(f"Calls 2 and 3 ran the compiled graph ({entry.hits} hits). Results equal the model's.")
    return compiled


def change_a_value(compiled: nn.Module, model: nn.Module, tokens: torch.Tensor) -> None:
    """Compiled code is never stale, and tripwire says who wrote."""
    settings.change(model)
    call(compiled, model, tokens, times=2)
    explained = tripwire.explain(compiled)
    tell("The compiled code was discarded before the next call, because of this write:")
    tell(explained.retirements[0])
    tell("Call 4 was observed again, call 5 ran new compiled code. Results equal the model's.")


def fail_and_replay(folder: Path) -> None:
    """A failing call becomes a file; another process runs it again."""
    compiled = tripwire.compile(Fragile(), record_on_error=folder)
    try:
        compiled(torch.tensor([3, 99]))
    except ValueError as error:
        tell(f"ValueError: {error}")
    (path,) = folder.glob("*.rec")
    tell("The call left a record: its code, its arguments as they were, what it read.")
    replayed = json.loads(run_tripwire("replay", str(path), "--trust", "--json"))
    if not replayed["reproduces"]:
        raise SystemExit("the replay ended in another way than the call")
    tell(f"{replayed['outcome']['type']}: {replayed['outcome']['message']}")
    tell("Another process failed in the same way. --pdb opens the debugger there.")


def main() -> None:
    """Tell it."""
    parser = argparse.ArgumentParser(description="The story of tripwire.")
    parser.add_argument("--graph", action="store_true", help="print the traced graph as well")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp(prefix="tripwire-demo-"))
    model = Scaled()
    tokens = torch.randint(0, 100, (1, 8))
    with logging_into(folder):
        if arguments.graph:
            show_graph(model, tokens)
        say("1. A small GPT is compiled.")
        compiled = compile_model(model, tokens)
        say("2. Another file, settings.py, changes a value that the model reads.")
        change_a_value(compiled, model, tokens)
        say("3. Another model fails.")
        fail_and_replay(folder)
    say("4. All of this is in a report: one page that needs no network.")
    page = run_tripwire("report", str(folder))
    tell(f"Open {page}")
    tell('in a browser. "Retirements" has the write of part 2, "Records" the failure of part 3.')
    say("Next: try it on a script of yours that uses torch.compile, without changing it:")
    tell("$ tripwire run --compile your_script.py")
    tell("README.md is one page. docs/tour.py explains all of tripwire as a script.")


if __name__ == "__main__":
    main()
