"""The share of channels that a compiler gets right, and what becomes of the others.

Right counts only if some call was served by code that an earlier call had compiled. The sides
are asked for the whole program in one graph, so that what they don't compile they refuse.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from unit.channels.channel import Case
from unit.channels.playing import REFUSALS, find_difference, play

import tripwire


class Verdict(enum.Enum):
    """What became of one case."""

    RIGHT = "right"  # compiled, and equal to plain code in every call
    RETRACED = "retraced"  # equal, but no call was served by what an earlier one compiled
    REFUSED = "refused"  # said so
    FAILED = "failed"  # raised what plain code doesn't raise
    WRONG = "wrong"  # returned or left behind something else


@dataclass(frozen=True)
class Finding:
    """One case, and what became of it."""

    case: str
    family: str
    verdict: Verdict
    why: str  # a refusal's reason; the call in which it went wrong


class Compiler:
    """A compiler of whole programs, which knows how often compiled code ran."""

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled callable."""
        raise NotImplementedError

    def hits(self) -> int:
        """How many calls were served by code that an earlier call compiled."""
        raise NotImplementedError


class Tripwire(Compiler):
    """tripwire.compile."""

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        self._compiled = tripwire.compile(call, fullgraph=True, backend="eager")
        return self._compiled

    def hits(self) -> int:
        return self._compiled.statistics().hits


class TorchCompile(Compiler):
    """torch.compile, with a back end that is `eager` and counts."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self._graphs = self._runs = 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(call, fullgraph=True, backend=self._backend)

    def hits(self) -> int:
        return self._runs - self._graphs

    def _backend(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        self._graphs += 1

        def run(*args: Any) -> Any:
            self._runs += 1
            return graph.forward(*args)

        return run


def classify(case: Case, make: type[Compiler]) -> Finding:
    """Play a case plain and compiled, and compare."""
    expected, compiler = play(case), make()
    try:
        difference = find_difference(expected, play(case, compiler.wrap))
    except REFUSALS as refusal:
        return Finding(case.name, case.family, Verdict.REFUSED, _reason(refusal))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(case.name, case.family, Verdict.FAILED, reason)
    if difference is not None:
        plain, compiled = difference
        verdict = Verdict.FAILED if compiled.raised and not plain.raised else Verdict.WRONG
        return Finding(case.name, case.family, verdict, f"{plain.where} {compiled.raised}")
    verdict = Verdict.RIGHT if compiler.hits() > 0 else Verdict.RETRACED
    return Finding(case.name, case.family, verdict, "")


def _reason(refusal: Exception) -> str:
    return getattr(refusal, "slug", None) or str(refusal).strip().splitlines()[0]


def load(path: Path) -> list[Finding]:
    """Findings that were kept in a file."""
    rows = json.loads(path.read_text())["findings"]
    return [Finding(**{**row, "verdict": Verdict(row["verdict"])}) for row in rows]


def keep(findings: list[Finding], path: Path) -> None:
    """Write findings to a file, one to a line, with the torch that gave them."""
    rows = [json.dumps({**asdict(f), "verdict": f.verdict.value}) for f in findings]
    start = f'{{"torch": {json.dumps(torch.__version__)}, "findings": ['
    path.write_text("\n".join([start, ",\n".join(rows), "]}"]) + "\n")


def render(sides: dict[str, list[Finding]]) -> Iterator[str]:
    """One table: families by verdicts, for each side; then what isn't right, by name."""
    verdicts = list(Verdict)
    families = list(dict.fromkeys(f.family for findings in sides.values() for f in findings))
    yield f"{'':24} cases" + "".join(f"  {name:>{9 * len(verdicts) - 2}}" for name in sides)
    yield f"{'':24}      " + "".join(f"{v.value:>9}" for v in verdicts) * len(sides)
    for family in [*families, "all"]:
        counts = [
            Counter(f.verdict for f in findings if family in (f.family, "all"))
            for findings in sides.values()
        ]
        cells = "".join(f"{count[v] or '·':>9}" for count in counts for v in verdicts)
        yield f"{family:24} {counts[0].total():5}{cells}"
    for name, findings in sides.items():
        yield f"{name}: {share(findings):.1%} right and compiled"
        for finding in findings:
            if finding.verdict is not Verdict.RIGHT:
                yield f"  {finding.verdict.value:8} {finding.family}: {finding.case}: {finding.why}"


def share(findings: list[Finding]) -> float:
    """The share of cases that ran compiled and were right."""
    return sum(f.verdict is Verdict.RIGHT for f in findings) / len(findings)
