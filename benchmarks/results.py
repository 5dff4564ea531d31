"""Shared by the summary and the plots: what the benchmarks wrote, read again."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from side_by_side import Figures

FOLDER = Path(__file__).resolve().parent / "results"


class NoFigure(LookupError):
    """Nothing was measured."""


class SideFailed(NoFigure):
    """A side raised when it was measured."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the figures of one side are: a file, the titles that lead to it, and its label."""

    file: str
    path: tuple[str, ...]

    @staticmethod
    def of(file: str, *path: str) -> Place:
        """Written as it is thought."""
        return Place(file, path)

    def read(self) -> list[float]:
        """What was measured, one value a round."""
        found: Any = read_document(self.file)["figures"]
        *titles, label = self.path
        try:
            for title in titles:
                found = found[title]
        except KeyError as error:
            raise NoFigure(f"{self.file}.json has no {error}") from error
        row = next((row for row in found if row["label"] == label), None)
        if row is None:
            raise NoFigure(f"{self.file}.json has no {label!r}")
        figures = Figures(**row)
        if figures.error is not None:
            raise SideFailed(f"fails: {figures.error}")
        return figures.values


@functools.cache
def read_document(file: str) -> dict[str, Any]:
    """All that one run of a benchmark wrote."""
    path = FOLDER / f"{file}.json"
    if not path.exists():
        raise NoFigure(f"there is no {path.name}")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def describe_run(file: str) -> str:
    """When and with what a benchmark ran, in one line."""
    run = read_document(file)
    return (
        f"Python {run['python']}, torch {run['torch']}, {run['cpu_count']} CPUs, {run['date'][:10]}"
    )
