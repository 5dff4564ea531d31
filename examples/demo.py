"""The story of tripwire in under two minutes.

A small GPT is compiled and runs. A value is changed from another file; the code retires and
names the line. Another model fails and leaves a record, which is replayed in another process. A
report of all that is written.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
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
    print(f"\n--- {title}")


def trace(model: nn.Module, tokens: torch.Tensor) -> None:
    """One run becomes a graph."""
    start = time.perf_counter()
    found = tripwire.trace(model, tokens)
    print(found.format(source=True))
    print(f"traced in {(time.perf_counter() - start) * 1e3:.1f} ms")


def compile_and_change(model: nn.Module, tokens: torch.Tensor) -> None:
    """Compiled code is never stale."""
    compiled = tripwire.compile(model, backend="eager")
    for step in range(6):
        if step == 3:
            settings.change(model)
        same = torch.equal(compiled(tokens), model(tokens))
        done = compiled.statistics()
        print(f"call {step}: {done.traces} traced, {done.hits} hits, equal to the model: {same}")
        if not same:
            raise SystemExit("compiled code returned something else")
    print()
    print(tripwire.explain(compiled))


def fail_and_replay(folder: Path) -> None:
    """A failing call becomes a file; another process runs it again."""
    compiled = tripwire.compile(Fragile(), record_on_error=folder)
    try:
        compiled(torch.tensor([3, 99]))
    except ValueError as error:
        print(f"{error!r}")
        print(*error.__notes__)
    (path,) = folder.glob("*.rec")
    command = [sys.executable, "-m", "tripwire", "replay", str(path), "--trust"]
    replayed = subprocess.run(command, capture_output=True, text=True)
    print(replayed.stdout.strip())
    if "It reproduces." not in replayed.stdout:
        raise SystemExit(replayed.stderr)


def main() -> None:
    """Tell it."""
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp(prefix="tripwire-demo-"))
    model = Scaled()
    tokens = torch.randint(0, 100, (1, 8))
    with logging_into(folder):
        say("one run of a small GPT is observed")
        trace(model, tokens)
        say("it is compiled; settings.py changes a value before call 3")
        compile_and_change(model, tokens)
        say("another model fails, and leaves a record")
        fail_and_replay(folder)
    say("the report")
    command = [sys.executable, "-m", "tripwire", "report", str(folder)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
