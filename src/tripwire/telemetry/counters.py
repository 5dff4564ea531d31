"""Counters: named groups of counts, written by any thread and added up when they are read.

`count("frames", "hit")` is the hot path. A frozen `CounterStatistics` is what readers get.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

from tripwire.telemetry.threads import clear_counts, local, merge_counts


class CounterStatistics(Struct, frozen=True):
    """All counts at one moment."""

    groups: Mapping[str, Mapping[str, int]]
    frames: int
    ops: int

    def __getitem__(self, group: str) -> Mapping[str, int]:
        return self.groups.get(group, _NOTHING)

    def __str__(self) -> str:
        return "\n".join(
            f"{group}: " + ", ".join(f"{name}={count}" for name, count in sorted(names.items()))
            for group, names in sorted(self.groups.items())
        )


_NOTHING: Mapping[str, int] = MappingProxyType({})


def count(group: str, name: str, by: int = 1) -> None:
    """Add to one count."""
    counts = local.state.counts
    try:
        counts[group][name] += by
    except KeyError:
        counts.setdefault(group, {}).setdefault(name, 0)
        counts[group][name] += by


def increment_frame() -> None:
    """One more call was traced."""
    count("frames", "total")


def increment_op_count(by: int) -> None:
    """That many more torch calls were recorded."""
    count("ops", "total", by)


def statistics() -> CounterStatistics:
    """The counts of all threads."""
    groups = {group: MappingProxyType(names) for group, names in merge_counts().items()}
    return CounterStatistics(
        MappingProxyType(groups),
        groups.get("frames", _NOTHING).get("total", 0),
        groups.get("ops", _NOTHING).get("total", 0),
    )


def reset_counters() -> None:
    """Every count is zero again."""
    clear_counts()
