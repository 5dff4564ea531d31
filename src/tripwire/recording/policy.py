"""Policy: how much of each tensor a record keeps.

A tensor shares its bytes with every other one of the same storage, so the strictest treatment
of any of them counts for all. A gradient is treated at least as strictly as its tensor.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from tripwire.errors import BadOption, CannotReplay


class Treatment(enum.IntEnum):
    """How much is kept, from everything to nothing."""

    FULL = 0
    STATISTICS = 1
    SHAPE = 2
    REDACTED = 3

    @staticmethod
    def of(name: str | Treatment) -> Treatment:
        """The treatment of that name: "full", "statistics", "shape" or "redacted"."""
        if isinstance(name, Treatment):
            return name
        if name.upper() not in Treatment.__members__:
            raise BadOption(
                f"{name!r} is no way to keep a tensor. Known: full, statistics, shape, redacted.",
                slug="bad-option",
            )
        return Treatment[name.upper()]

    @property
    def label(self) -> str:
        return self.name.lower()


class Omission(msgspec.Struct, frozen=True, array_like=True):
    """Something that isn't in a record, by its path, and why."""

    what: str
    why: str


def redacted(what: str, shape: tuple[int, ...]) -> CannotReplay:
    """The error where a value is needed that was kept out of the record on purpose."""
    return CannotReplay(
        f"An input of shape {list(shape)} (a {what}) was redacted when this was recorded.\n"
        "Record again with another policy for it.",
        slug="replay-redacted",
    )


Chooser = Callable[[str, object], "str | Treatment"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A treatment for each tensor by its path, and a cap on the bytes of all together.

    `choose` is a treatment for every tensor, a mapping from patterns of paths (as in
    `fnmatch`, the first that fits counts; none means full), or a function of the path and the
    tensor. Where the cap is passed, the largest tensors are kept as statistics only.
    """

    choose: str | Mapping[str, str] | Chooser = "full"
    cap: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choose, str):
            Treatment.of(self.choose)
        elif isinstance(self.choose, Mapping):
            for name in self.choose.values():
                Treatment.of(name)

    def treat(self, path: str, tensor: object) -> Treatment:
        """What is kept of a tensor."""
        if callable(self.choose):
            return Treatment.of(self.choose(path, tensor))
        if isinstance(self.choose, str):
            return Treatment.of(self.choose)
        for pattern, name in self.choose.items():
            if fnmatch.fnmatchcase(path, _literal_brackets(pattern)):
                return Treatment.of(name)
        return Treatment.FULL

    def describe(self) -> str:
        """The policy in words, for the manifest."""
        if callable(self.choose):
            chosen = "chosen by a function"
        elif isinstance(self.choose, str):
            chosen = self.choose
        else:
            chosen = ", ".join(f"{pattern}: {name}" for pattern, name in self.choose.items())
        return chosen if self.cap is None else f"{chosen}; at most {self.cap} bytes of tensors"


def _literal_brackets(pattern: str) -> str:
    """Paths are full of brackets (`args[0]`), so here they mean themselves."""
    return pattern.replace("[", "[[]")


KEEP_ALL = Policy()
