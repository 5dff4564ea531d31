"""Re-inplacing: tensors that could not be turned back in place, and what that costs in bytes.

A size that isn't known when a graph is compiled is left out of the bytes.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import ClassVar

from tripwire.telemetry.chromium import write_instant
from tripwire.telemetry.threads import make_lock


class ReInplaceTrigger(enum.Enum):
    """Who made the copy."""

    AUTO_FUNC_V1 = 1
    AUTO_FUNC_V2 = 2
    TRITON_OPS = 3


class ReinplaceCounters:
    """Counts by trigger, for the whole process."""

    _lock = make_lock()
    _tensors: ClassVar[Counter[ReInplaceTrigger]] = Counter()
    _bytes: ClassVar[Counter[ReInplaceTrigger]] = Counter()

    @classmethod
    def add_missed_opportunities(cls, trigger: ReInplaceTrigger, count: int) -> None:
        """So many tensors were copied."""
        with cls._lock:
            cls._tensors[trigger] += count

    @classmethod
    def add_missed_bytes(cls, trigger: ReInplaceTrigger, size: object) -> None:
        """So many bytes were; anything but a plain int is a dynamic size."""
        if type(size) is int:
            with cls._lock:
                cls._bytes[trigger] += size

    @classmethod
    def get_total_missed(cls) -> int:
        """Tensors, over all triggers."""
        return cls._tensors.total()

    @classmethod
    def get_total_missed_bytes(cls) -> int:
        """Bytes, over all triggers."""
        return cls._bytes.total()

    @classmethod
    def log(cls) -> None:
        """Leave an instant in the timeline and the log, if there is anything to tell."""
        named = [("missed_tensors", cls._tensors), ("missed_bytes", cls._bytes)]
        found = {f"{name}_{t.name}": n for name, counts in named for t, n in (+counts).items()}
        if found:
            write_instant("reinplace_counters", dict(found))

    @classmethod
    def clear(cls) -> None:
        """Nothing was missed."""
        with cls._lock:
            cls._tensors.clear()
            cls._bytes.clear()
