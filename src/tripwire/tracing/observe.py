"""Observe: which Python functions run below the traced call.

Each code object is reported once per run, when it first starts, with its globals. From 3.12
on `sys.monitoring` tells, and goes quiet for a code object after its first start. Before
that `sys.setprofile` does; a profile function that was there is called as before, except a
profiler written in C, which can't be called: then only the traced function is looked at.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from tripwire.env import HAS_MONITORING, is_library_file, is_own_file

OnStart = Callable[[CodeType, dict[str, Any]], None]


class Observer:
    """Reports the user's code objects of one thread, each once."""

    def __init__(self, on_start: OnStart) -> None:
        self._on_start = on_start
        self._seen: dict[int, CodeType] = {}  # by identity: hashing code costs microseconds

    def see(self, frame: FrameType) -> None:
        """Report a frame's code if it is new, and not torch's or the standard library's."""
        code = frame.f_code
        if id(code) not in self._seen:
            self._seen[id(code)] = code
            file = code.co_filename
            if not is_library_file(file) and not is_own_file(file):
                self._on_start(code, frame.f_globals)

    # Recording an op makes a hundred Python calls. On 3.11 each would cost a profile event:
    # 18 ms of a 36-layer trace, bench_trace.py.

    def pause(self) -> None:
        """Stop looking until `resume`."""

    def resume(self) -> None:
        """Look again."""


class _ProfileObserver(Observer):
    def __init__(self, on_start: OnStart, before: Any) -> None:
        super().__init__(on_start)
        self._before = before

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.see(frame)
        if self._before is not None:
            self._before(frame, event, arg)

    def pause(self) -> None:
        if self._before is None:
            sys.setprofile(None)

    def resume(self) -> None:
        if self._before is None:
            sys.setprofile(self)


@contextmanager
def observing(on_start: OnStart) -> Iterator[Observer]:
    """Report every function of this thread that starts inside the `with`."""
    if HAS_MONITORING:
        yield from _observe_by_monitoring(on_start)
    else:
        yield from _observe_by_profile(on_start)


def _observe_by_profile(on_start: OnStart) -> Iterator[Observer]:
    before = sys.getprofile()
    if before is not None and not callable(before):
        yield Observer(on_start)
        return
    observer = _ProfileObserver(on_start, before)
    sys.setprofile(observer)
    try:
        yield observer
    finally:
        sys.setprofile(before)


# --- sys.monitoring: one tool for all threads ------------------------------------------------

_lock = threading.Lock()
_observers: dict[int, Observer] = {}  # by thread
_tool: int | None = None


def _observe_by_monitoring(on_start: OnStart) -> Iterator[Observer]:
    observer = Observer(on_start)
    thread = threading.get_ident()
    with _lock:
        _observers[thread] = observer
        _start_tool()
    try:
        yield observer
    finally:
        with _lock:
            del _observers[thread]
            _stop_tool()


def _start_tool() -> None:
    global _tool
    monitoring = sys.monitoring  # type: ignore[attr-defined]  # from 3.12 on
    if _tool is None:
        for tool in (4, 3):  # the ids that no tool of the standard library claims
            if monitoring.get_tool(tool) is None:
                monitoring.use_tool_id(tool, "tripwire")
                monitoring.register_callback(tool, monitoring.events.PY_START, _on_py_start)
                monitoring.set_events(tool, monitoring.events.PY_START)
                _tool = tool
                break
    monitoring.restart_events()  # code that went quiet for another thread is new to this one


def _stop_tool() -> None:
    global _tool
    if not _observers and _tool is not None:
        monitoring = sys.monitoring  # type: ignore[attr-defined]  # from 3.12 on
        monitoring.set_events(_tool, 0)
        monitoring.register_callback(_tool, monitoring.events.PY_START, None)
        monitoring.free_tool_id(_tool)
        _tool = None


def _on_py_start(code: CodeType, offset: int) -> object:
    observer = _observers.get(threading.get_ident())
    if observer is not None:
        observer.see(sys._getframe(1))
    # Quiet from now on, unless another thread has yet to see this code.
    return sys.monitoring.DISABLE if len(_observers) == 1 else None  # type: ignore[attr-defined]
