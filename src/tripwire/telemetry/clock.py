"""The clock: everything in telemetry reads time here, so a test can hold it still.

Two readings: `monotonic_ns` for durations and order within a machine, `wall_ns` for people. A log's
header has both, taken together, which places every other reading on the calendar.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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
