"""A clock that tests hold in their hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tripwire.telemetry import clock


class FakeClock:
    """A clock that moves when it is told to, and by `step` after every reading."""

    __slots__ = ("now_ns", "step_ns", "wall_offset_ns")

    def __init__(self, now_ns: int = 0, *, step_ns: int = 0, wall_offset_ns: int = 0) -> None:
        self.now_ns = now_ns
        self.step_ns = step_ns
        self.wall_offset_ns = wall_offset_ns

    def advance(self, *, us: int = 0, ns: int = 0) -> None:
        """Move forward."""
        self.now_ns += us * 1000 + ns

    def read(self) -> int:
        now = self.now_ns
        self.now_ns += self.step_ns
        return now

    def read_wall(self) -> int:
        return self.now_ns + self.wall_offset_ns


@contextmanager
def using_clock(fake: FakeClock) -> Iterator[FakeClock]:
    """Telemetry reads `fake` inside the block."""
    with patch.multiple(clock, monotonic_ns=fake.read, wall_ns=fake.read_wall):
        yield fake
