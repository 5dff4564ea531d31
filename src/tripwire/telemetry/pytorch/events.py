"""Compile events: data for what is going on, at the level that it deserves.

`CHROMIUM` data is in the timeline of this process. `PT2_COMPILE` data is in the log as well, with
the span that it belongs to, which must be part of a compile. `COMPILATION_METRIC` data is also in
the compile's metrics, and belongs to the outermost event. `ReinplaceCounters` leave one instant.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar, ParamSpec

from tripwire.errors import TelemetryError
from tripwire.telemetry.contexts import MetricsContext
from tripwire.telemetry.history import get_metrics_context
from tripwire.telemetry.pytorch.chromium import (
    add_member,
    add_number,
    find_open_event,
    write_instant,
)
from tripwire.telemetry.threads import OpenEvent, local, make_lock

P = ParamSpec("P")

_QUIET = frozenset({"event-not-open", "event-outside-compile", "metrics-not-in-progress"})


class CompileEventLogLevel(enum.Enum):
    """How far data goes; each level includes those before it."""

    CHROMIUM = 1
    PT2_COMPILE = 2
    COMPILATION_METRIC = 3


Level = CompileEventLogLevel


class CompileEventLogger:
    """Static methods only: what is open is known per thread."""

    @staticmethod
    def add_data(
        event_name: str, log_level: Level, overwrite: bool = False, **metadata: object
    ) -> None:
        """Attach data to an open event."""
        event, metrics = _find(event_name, log_level)
        if metrics is not None:
            metrics.update(metadata, overwrite)
        event.data = {**(event.data or {}), **metadata}
        if log_level is not Level.CHROMIUM:
            event.logged = {**(event.logged or {}), **metadata}

    @staticmethod
    def add_toplevel(log_level: Level, overwrite: bool = False, **metadata: object) -> None:
        """Attach data to the outermost event."""
        CompileEventLogger.add_data(_outermost(), log_level, overwrite, **metadata)

    @staticmethod
    def increment(event_name: str, log_level: Level, key: str, value: int = 1) -> None:
        """Add to a number of an open event."""
        event, metrics = _find(event_name, log_level)
        if metrics is not None:
            metrics.increment(key, value)
        event.data = add_number(event.data, key, value)
        if log_level is not Level.CHROMIUM:
            event.logged = add_number(event.logged, key, value)

    @staticmethod
    def increment_toplevel(
        key: str, value: int = 1, log_level: Level = Level.COMPILATION_METRIC
    ) -> None:
        """Add to a number of the outermost event."""
        CompileEventLogger.increment(_outermost(), log_level, key, value)

    @staticmethod
    def add_to_set(event_name: str, log_level: Level, key: str, value: object) -> None:
        """Add to a set of an open event."""
        event, metrics = _find(event_name, log_level)
        if metrics is not None:
            metrics.add_to_set(key, value)
        event.data = add_member(event.data, key, value)
        if log_level is not Level.CHROMIUM:
            event.logged = add_member(event.logged, key, value)

    @staticmethod
    def add_to_set_toplevel(
        key: str, value: object, log_level: Level = Level.COMPILATION_METRIC
    ) -> None:
        """Add to a set of the outermost event."""
        CompileEventLogger.add_to_set(_outermost(), log_level, key, value)

    @staticmethod
    def chromium(event_name: str, **metadata: object) -> None:
        """Data for the timeline only."""
        CompileEventLogger.add_data(event_name, Level.CHROMIUM, False, **metadata)

    @staticmethod
    def pt2_compile(event_name: str, **metadata: object) -> None:
        """Data for the timeline and the log."""
        CompileEventLogger.add_data(event_name, Level.PT2_COMPILE, False, **metadata)

    @staticmethod
    def compilation_metric(overwrite: bool = False, **metadata: object) -> None:
        """Data for the timeline, the log and the compile's metrics."""
        CompileEventLogger.add_toplevel(Level.COMPILATION_METRIC, overwrite, **metadata)

    @staticmethod
    def instant(
        event_name: str, metadata: dict[str, object] | None = None, time_ns: int | None = None
    ) -> None:
        """Something that has no duration."""
        write_instant(event_name, metadata, time_ns)

    @staticmethod
    def log_instant_event(
        event_name: str,
        metadata: dict[str, object] | None = None,
        time_ns: int | None = None,
        log_level: Level = Level.CHROMIUM,
    ) -> None:
        """`instant`, at a level that an instant can have."""
        if log_level is Level.COMPILATION_METRIC:
            raise TelemetryError(
                f"{event_name!r}: an instant can't be one of a compile's metrics.\n"
                "Use CHROMIUM or PT2_COMPILE, or compilation_metric(name=value).",
                slug="event-level",
            )
        write_instant(event_name, metadata, time_ns)

    @staticmethod
    def add_record_function_data(event_name: str, **metadata: object) -> None:
        """Show data as a range of its own in torch's profiler, if that is on."""
        profiler = sys.modules.get("torch.autograd.profiler")
        if profiler is not None and profiler._is_profiler_enabled and metadata:
            text = ", ".join(f"{key}={value}" for key, value in metadata.items())
            with profiler.record_function(f"{event_name}_data: {text}"):
                pass

    @staticmethod
    def try_add_pt2_compile(event_name: str, **metadata: object) -> None:
        """`pt2_compile`, or nothing where the event isn't open in a compile."""
        CompileEventLogger.try_(CompileEventLogger.pt2_compile, event_name, **metadata)

    @staticmethod
    def try_(method: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a method of this class; quiet where no event or compile is there to attach to."""
        try:
            method(*args, **kwargs)
        except TelemetryError as error:
            if error.slug not in _QUIET:
                raise


def _outermost() -> str:
    stack = local.state.stack
    if not stack:
        raise TelemetryError(
            "No event is open in this thread, so there is no outermost one to attach data to.\n"
            "Attach data inside a `with timed(...)` block.",
            slug="event-not-open",
        )
    return stack[0].name


def _find(event_name: str, log_level: Level) -> tuple[OpenEvent, MetricsContext | None]:
    """The event to attach to, and the metrics where the level includes them."""
    event = find_open_event(event_name)
    if log_level is Level.CHROMIUM:
        return event, None
    if log_level is Level.PT2_COMPILE:
        if event.compile_id is None:
            raise TelemetryError(
                f"{event_name!r} is open outside of any compile, so it is no compile event.\n"
                "Use the level CHROMIUM, or pass compile_id= to its span.",
                slug="event-outside-compile",
            )
        return event, None
    stack = local.state.stack
    if event is not stack[0]:
        raise TelemetryError(
            f"{event_name!r} isn't the outermost event ({stack[0].name!r} is), and metrics belong "
            "to that one.\nUse add_toplevel, increment_toplevel or add_to_set_toplevel.",
            slug="event-not-outermost",
        )
    metrics = get_metrics_context()
    if not metrics.in_progress():
        raise TelemetryError(
            f"{event_name!r} is open, but no compile is going on in this thread: there are no "
            "metrics to write to.",
            slug="metrics-not-in-progress",
        )
    return event, metrics


# --- tensors that could not be turned back in place -----------------------------------------------


class ReInplaceTrigger(enum.Enum):
    """Who made the copy."""

    AUTO_FUNC_V1 = 1
    AUTO_FUNC_V2 = 2
    TRITON_OPS = 3


class ReinplaceCounters:
    """Counts by trigger, for the whole process: tensors, and bytes where sizes are known."""

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


def add_missed(counts: Mapping[str, int]) -> None:
    """Take in what torch counted, by its names: `missed_tensors_TRITON_OPS`, `missed_bytes_...`."""
    for trigger in ReInplaceTrigger:
        tensors = counts.get(f"missed_tensors_{trigger.name}", 0)
        ReinplaceCounters.add_missed_opportunities(trigger, tensors)
        ReinplaceCounters.add_missed_bytes(trigger, counts.get(f"missed_bytes_{trigger.name}", 0))
