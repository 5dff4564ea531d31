"""ChromiumEventLogger: the timeline of this process, in memory and bounded.

Events begin and end per thread, in microseconds of the monotonic clock. What is open is the same
stack that spans use, so data can be attached to either by name; it appears with the end. While a
logger is active every span is in its timeline.
"""

from __future__ import annotations

import os
from collections import deque

import msgspec

from tripwire.errors import TelemetryError
from tripwire.telemetry import clock, spans
from tripwire.telemetry import log as event_log
from tripwire.telemetry.schema import Instant, make_plain_dict
from tripwire.telemetry.threads import OpenEvent, ThreadState, local, make_lock
from tripwire.telemetry.timelines import ChromiumEvent


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
        event = find_open_event(event_name)
        event.data = {**(event.data or {}), **data}

    def try_add_event_data(self, event_name: str, **data: object) -> None:
        """The same, or nothing where the event isn't open."""
        if local.state.find_open(event_name) is not None:
            self.add_event_data(event_name, **data)

    def increment(self, event_name: str, key: str, value: int) -> None:
        """Add to a number among an open event's data."""
        event = find_open_event(event_name)
        event.data = add_number(event.data, key, value)

    def add_to_set(self, event_name: str, key: str, value: object) -> None:
        """Add to a set among an open event's data."""
        event = find_open_event(event_name)
        event.data = add_member(event.data, key, value)

    def reset(self) -> None:
        """Nothing is open in this thread."""
        local.state.stack = []

    # --- beginning and ending ---------------------------------------------------------------------

    def log_event_start(
        self,
        event_name: str,
        time_ns: int | None = None,
        metadata: dict[str, object] | None = None,
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
        self,
        event_name: str,
        time_ns: int | None = None,
        metadata: dict[str, object] | None = None,
    ) -> None:
        """An event ends; so does, with a warning, what was opened inside and is open still."""
        state = local.state
        time_ns = clock.find_monotonic(time_ns)
        if not spans.close_overlapping(state, lambda open_: open_.name == event_name, time_ns):
            return
        event = state.stack.pop()
        if metadata:
            event.data = {**(event.data or {}), **metadata}
            event.logged = {**(event.logged or {}), **metadata}
        spans.finish_event(event, time_ns, state)
        if spans.timeline is not self:
            self.end(event, time_ns, state)

    def log_instant_event(
        self,
        event_name: str,
        time_ns: int | None = None,
        metadata: dict[str, object] | None = None,
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
