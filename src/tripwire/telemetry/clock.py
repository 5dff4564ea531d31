"""The clock: everything in telemetry reads time here, so a test can hold it still.

Two readings: `monotonic_ns` for durations and order within a machine, `wall_ns` for people. A log's
header has both, taken together, which places every other reading on the calendar.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

monotonic_ns: Callable[[], int] = time.perf_counter_ns
wall_ns: Callable[[], int] = time.time_ns


def find_monotonic(time_ns: int | None) -> int:
    """A reading of either clock on the monotonic one; now, without one.

    PyTorch's callers pass `time.time_ns()`. The two clocks are decades apart, so a reading is of
    the one that it is nearer to.
    """
    now = monotonic_ns()
    if time_ns is None:
        return now
    wall = wall_ns()
    return now - (wall - time_ns) if abs(wall - time_ns) < abs(now - time_ns) else time_ns


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
    global monotonic_ns, wall_ns
    before = monotonic_ns, wall_ns
    monotonic_ns, wall_ns = fake.read, fake.read_wall
    try:
        yield fake
    finally:
        monotonic_ns, wall_ns = before
