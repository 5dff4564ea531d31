"""A type checker knows what `tripwire.compile` returns: the signature, or the class."""

from __future__ import annotations

import re
from pathlib import Path

from mypy import api

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from torch import nn
import tripwire

class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

def scale(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by

class Holder:
    @tripwire.compile
    def method(self, x: torch.Tensor, *, by: int) -> list[torch.Tensor]:
        return [x * by]

@tripwire.compile
def bare(x: torch.Tensor) -> torch.Tensor:
    return x

@tripwire.compile(backend="eager", fullgraph=True)
def with_options(x: torch.Tensor, n: int) -> int:
    return n

def disabled(is_slow: bool) -> None:
    reveal_type(tripwire.compile(scale, disable=is_slow))  # as it is, or compiled
    reveal_type(tripwire.compile(disable=is_slow)(scale))

reveal_type(tripwire.compile(Net()))
reveal_type(tripwire.compile(Net(), mode="reduce-overhead"))
reveal_type(tripwire.compile(backend="eager")(Net()))
reveal_type(tripwire.compile(scale))
reveal_type(tripwire.compile(scale)(torch.ones(1), by=3.0))
reveal_type(tripwire.compile(scale).statistics().hits)
reveal_type(bare)
reveal_type(with_options)
reveal_type(Holder.method)
reveal_type(Holder().method)
reveal_type(tripwire.record_on_error("records")(scale))
reveal_type(tripwire.record_call("records")(scale, torch.ones(1), by=3.0))
with tripwire.record_block("records") as recording:
    pass
reveal_type(recording.path)
reveal_type(tripwire.explain(bare))
reveal_type(tripwire.preview(scale, torch.ones(1)))
tripwire.compile(scale)(1)  # wrong: no tensor
tripwire.compile(scale, fulgraph=True)  # wrong: no such option
tripwire.record_call("records")(scale, torch.ones(1), on=3.0)  # wrong: no such argument
"""
REVEALED = {
    "tripwire.compile(scale, disable=is_slow)": "def (x: Tensor, by: float =) -> Tensor",
    "tripwire.compile(disable=is_slow)(scale)": "def (x: Tensor, by: float =) -> Tensor",
    "tripwire.compile(Net())": "Net",
    'tripwire.compile(Net(), mode="reduce-overhead")': "Net",
    'tripwire.compile(backend="eager")(Net())': "Net",
    "tripwire.compile(scale)": "CompiledFunction[[x: Tensor, by: float =], Tensor]",
    "tripwire.compile(scale)(torch.ones(1), by=3.0)": "Tensor",
    "tripwire.compile(scale).statistics().hits": "int",
    "bare": "CompiledFunction[[x: Tensor], Tensor]",
    "with_options": "CompiledFunction[[x: Tensor, n: int], int]",
    "Holder.method": "CompiledFunction[[self: Holder, x: Tensor, *, by: int], list[Tensor]]",
    "Holder().method": "def (x: Tensor, *, by: int) -> list[Tensor]",
    'tripwire.record_on_error("records")(scale)': "def (x: Tensor, by: float =) -> Tensor",
    'tripwire.record_call("records")(scale, torch.ones(1), by=3.0)': "Path",
    "recording.path": "Path | None",
    "tripwire.explain(bare)": "Explanation",
    "tripwire.preview(scale, torch.ones(1))": "Preview",
}


def test_a_type_checker_knows_the_signature_of_what_is_compiled(tmp_path, monkeypatch) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    monkeypatch.chdir(ROOT)  # its settings, and its cache, which `make lint` fills
    monkeypatch.setenv("MYPYPATH", "src")
    output, trouble, _ = api.run([str(file), "--no-error-summary", "--no-pretty"])
    assert not trouble
    lines = PROGRAM.splitlines()
    found, wrong = {}, set()
    for told in output.splitlines():
        place = re.match(r".*program\.py:(\d+): (?:error|note): (.*)", told)
        assert place, told
        line, text = lines[int(place[1]) - 1], place[2]
        if text.startswith("Revealed type is "):
            found[line.strip().removeprefix("reveal_type(").split("  #")[0][:-1]] = _short(text)
        else:
            wrong.add(line)
    assert found == REVEALED
    assert wrong == {line for line in lines if "# wrong" in line}


def _short(told: str) -> str:
    """A type without the modules of its names, and without mypy's own marks."""
    inner = told.removeprefix('Revealed type is "').rpartition('"')[0]
    short = re.sub(r"\b[\w.]+\.(?=\w)", "", inner).replace("Union[Path, None]", "Path | None")
    return re.sub(r"TypeVar\((\w+)\)", r"\1", short).replace("builtins.", "")
