"""Compile events: data for the spans that are open, kept at the level that its caller names.

`CHROMIUM` data is in the timeline of this process. `PT2_COMPILE` data is in the log as well, with
the span that it belongs to, which must be part of a compile. `COMPILATION_METRIC` data is also in
the compile's metrics, and belongs to the outermost event. `ReinplaceCounters` leave one instant.
"""

from __future__ import annotations

import enum
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import ClassVar, ParamSpec

import msgspec

from tripwire.errors import TelemetryError
from tripwire.forks import make_lock
from tripwire.telemetry import clock, spans
from tripwire.telemetry import log as event_log
from tripwire.telemetry.contexts import MetricsContext, get_metrics_context
from tripwire.telemetry.schema import Instant, make_plain_dict
from tripwire.telemetry.threads import OpenEvent, ThreadState, local
from tripwire.telemetry.timelines import ChromiumEvent

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
        _add(event, log_level, add_all, metadata)

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
        _add(event, log_level, add_number, key, value)

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
        _add(event, log_level, add_member, key, value)

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


def _add(
    event: OpenEvent, log_level: Level, add: Callable[..., dict[str, object]], *entry: object
) -> None:
    """Add something to an event's data, and to what is logged of it where the level says so."""
    event.data = add(event.data, *entry)
    if log_level is not Level.CHROMIUM:
        event.logged = add(event.logged, *entry)


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
        """Count from zero again."""
        with cls._lock:
            cls._tensors.clear()
            cls._bytes.clear()


def add_missed(counts: Mapping[str, int]) -> None:
    """Take in what torch counted, by its names: `missed_tensors_TRITON_OPS`, `missed_bytes_...`."""
    for trigger in ReInplaceTrigger:
        tensors = counts.get(f"missed_tensors_{trigger.name}", 0)
        ReinplaceCounters.add_missed_opportunities(trigger, tensors)
        ReinplaceCounters.add_missed_bytes(trigger, counts.get(f"missed_bytes_{trigger.name}", 0))


# --- the timeline of this process, in memory and bounded ---
# Events begin and end per thread, in microseconds of the monotonic clock. What is open is the same
# stack that spans use, so data can be attached to either by name; it appears with the end. While a
# logger is active every span is in its timeline.


class ChromiumEventLogger:
    """Events as they happen; the latest `limit` of them are kept."""

    def __init__(self, limit: int = 65_536) -> None:
        self._events: deque[ChromiumEvent] = deque(maxlen=limit)
        self._added = 0

    # --- what is open -----------------------------------------------------------------------------

    def get_stack(self) -> list[str]:
        """The names of what is open in this thread, outermost first."""
        return [event.name for event in local.state.stack]

    def get_pt2_compile_substack(self) -> list[str]:
        """Those of them that belong to a compile."""
        return [event.name for event in local.state.stack if event.compile_id is not None]

    def get_outermost_event(self) -> str | None:
        """The first of them."""
        stack = local.state.stack
        return stack[0].name if stack else None

    def add_event_data(self, event_name: str, **data: object) -> None:
        """Attach data to an open event; it appears at its end."""
        _add(find_open_event(event_name), Level.CHROMIUM, add_all, data)

    def try_add_event_data(self, event_name: str, **data: object) -> None:
        """The same, or nothing where the event isn't open."""
        if local.state.find_open(event_name) is not None:
            self.add_event_data(event_name, **data)

    def increment(self, event_name: str, key: str, value: int) -> None:
        """Add to a number among an open event's data."""
        _add(find_open_event(event_name), Level.CHROMIUM, add_number, key, value)

    def add_to_set(self, event_name: str, key: str, value: object) -> None:
        """Add to a set among an open event's data."""
        _add(find_open_event(event_name), Level.CHROMIUM, add_member, key, value)

    def reset(self) -> None:
        """Nothing is open in this thread."""
        local.state.stack = []

    # --- beginning and ending ---------------------------------------------------------------------

    def log_event_start(
        self,
        event_name: str,
        time_ns: int | None = None,
        metadata: dict[str, object] | None = None,
        *,
        compile_id: str | None = None,
    ) -> None:
        """An event begins."""
        state = local.state
        time_ns = clock.find_monotonic(time_ns)
        event = OpenEvent(event_name, event_name, time_ns, owner=self)
        event.compile_id = compile_id or state.compile_id
        event.data = event.logged = dict(metadata or {})
        state.stack.append(event)
        self.begin(event, state)

    def log_event_end(
        self, event_name: str, time_ns: int | None = None, metadata: dict[str, object] | None = None
    ) -> None:
        """An event ends; so does, with a warning, what was opened inside and is open still."""
        state = local.state
        time_ns = clock.find_monotonic(time_ns)
        if not spans.close_overlapping(state, lambda open_: open_.name == event_name, time_ns):
            return
        event = state.stack.pop()
        if metadata:
            _add(event, Level.PT2_COMPILE, add_all, metadata)
        spans.finish_event(event, time_ns, state)
        if spans.timeline is not self:
            self.end(event, time_ns, state)

    def log_instant_event(
        self, event_name: str, time_ns: int | None = None, metadata: dict[str, object] | None = None
    ) -> None:
        """Something happened."""
        state = local.state
        time_ns = clock.find_monotonic(time_ns)
        self._add(
            ChromiumEvent(
                name=event_name,
                ph="i",
                ts=time_ns / 1000,
                pid=os.getpid(),
                tid=state.ident,
                s="t",
                args=_args(metadata, state.compile_id),
            )
        )

    def begin(self, event: OpenEvent, state: ThreadState) -> None:
        """A span or an event of our own has begun."""
        self._add(self._edge("B", event, event.start_ns, state))

    def end(self, event: OpenEvent, end_ns: int, state: ThreadState) -> None:
        """It has ended."""
        self._add(self._edge("E", event, end_ns, state))

    def _edge(self, ph: str, event: OpenEvent, ns: int, state: ThreadState) -> ChromiumEvent:
        args = _args(event.data, event.compile_id)
        if event.key != event.name:
            args = {"fn_name": event.key, **args}
        if event.is_backward is not None:
            args = {"is_backward": event.is_backward, **args}
        pid, tid = os.getpid(), state.ident
        return ChromiumEvent(name=event.name, ph=ph, ts=ns / 1000, pid=pid, tid=tid, args=args)

    def _add(self, event: ChromiumEvent) -> None:
        self._events.append(event)
        self._added += 1

    # --- reading ----------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """How many events the bound has cost."""
        return self._added - len(self._events)

    def events(self) -> list[ChromiumEvent]:
        """What is kept, in the order in which it was told."""
        return list(self._events)

    def clear(self) -> None:
        """Forget what happened."""
        self._events.clear()
        self._added = 0

    def as_json(self) -> bytes:
        """The object form of a trace. Ends whose beginnings were dropped are left out."""
        depths: dict[int, int] = {}
        kept = []
        for event in self._events.copy():
            depth = depths.get(event.tid, 0)
            if event.ph == "E" and depth == 0:
                continue
            depths[event.tid] = depth + {"B": 1, "E": -1}.get(event.ph, 0)
            kept.append(event)
        return msgspec.json.encode({"traceEvents": kept, "displayTimeUnit": "ms"})


_lock = make_lock()
_logger: ChromiumEventLogger | None = None


def get_chromium_event_logger() -> ChromiumEventLogger:
    """This process's logger, active from the first time that somebody asks for it."""
    global _logger
    with _lock:
        if _logger is None:
            _logger = ChromiumEventLogger()
            spans.timeline = _logger
        return _logger


def chromium_event_log_active() -> bool:
    """Whether somebody has asked for it."""
    return _logger is not None


def stop_chromium_event_logger() -> None:
    """Nobody wants the timeline any more."""
    global _logger
    with _lock:
        if spans.timeline is _logger:
            spans.timeline = None
        _logger = None


def _after_fork_in_child() -> None:
    if _logger is not None:
        _logger.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def write_instant(
    event_name: str, metadata: dict[str, object] | None = None, time_ns: int | None = None
) -> None:
    """An instant in the timeline if it is active, and in the log if there is one."""
    time_ns = clock.find_monotonic(time_ns)
    if _logger is not None:
        _logger.log_instant_event(event_name, time_ns, metadata)
    event_log.emit(Instant, time_ns=time_ns, name=event_name, data=metadata or {})


def find_open_event(event_name: str) -> OpenEvent:
    """The innermost open event of that name in this thread; an error where there is none."""
    state = local.state
    event = state.find_open(event_name)
    if event is None:
        opened = " > ".join(e.name for e in state.stack) or "nothing"
        raise TelemetryError(
            f"{event_name!r} isn't open in this thread ({opened} is), so nothing can be attached "
            "to it.\nAttach data inside its `with timed(...)` block.",
            slug="event-not-open",
        )
    return event


def add_all(data: dict[str, object] | None, more: dict[str, object]) -> dict[str, object]:
    """Data with more of it."""
    return {**(data or {}), **more}


def add_number(data: dict[str, object] | None, key: str, value: int) -> dict[str, object]:
    """Data with a number added to what stands under the key."""
    before = (data or {}).get(key, 0)
    if not isinstance(before, int | float):
        raise _another_kind(key, before, "a number")
    return {**(data or {}), key: before + value}


def add_member(data: dict[str, object] | None, key: str, value: object) -> dict[str, object]:
    """Data with a value added to the set under the key."""
    before = (data or {}).get(key, set())
    if not isinstance(before, set):
        raise _another_kind(key, before, "a set")
    return {**(data or {}), key: before | {value}}


def _another_kind(key: str, found: object, wanted: str) -> TelemetryError:
    return TelemetryError(
        f"{key}: the event's data holds a {type(found).__name__} under that key, not {wanted}.",
        slug="metric-of-another-kind",
    )


def _args(data: dict[str, object] | None, compile_id: str | None) -> dict[str, object]:
    plain = make_plain_dict(data)
    return plain if compile_id is None else {**plain, "compile_id": compile_id}
