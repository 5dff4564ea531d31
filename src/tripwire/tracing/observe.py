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
from typing import Any, Protocol

from tripwire.env import HAS_MONITORING, is_library_file, is_own_file
from tripwire.errors import CannotTrace
from tripwire.tracing.rules import Refuse, find_refused_code

Profile = Callable[[FrameType, str, object], None]


class Listener(Protocol):
    """Who wants to know which functions run."""

    def on_start(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """A function of the user's starts for the first time in this run."""

    def on_refused(self, refuse: Refuse) -> None:
        """A function of torch's starts that can't be followed."""


class Observer:
    """Reports the user's code objects of one thread, each once."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._seen: dict[int, CodeType] = {}  # by identity: hashing code costs microseconds
        self.paused = False  # report nothing; set by whoever records
        self.profile: Profile | None = None  # to be taken out while paused; see Recorder

    def see(self, frame: FrameType) -> bool:
        """Report a frame's code if it is new; whether its later starts can go unseen."""
        code = frame.f_code
        if id(code) in self._seen:
            return True
        refuse = find_refused_code(code)
        if refuse is not None and _is_importing(frame):
            return False  # torch imports parts of itself when they are first used
        users = refuse is None and not is_library_file(code.co_filename)
        users = users and not is_own_file(code.co_filename)
        if self.paused and (users or refuse is not None):
            return False  # it runs inside an op, which is the op's business; it may run again
        self._seen[id(code)] = code
        if refuse is not None:
            self._listener.on_refused(refuse)
        elif users:
            self._listener.on_start(code, frame.f_globals)
        return True

    def pause(self) -> None:
        """Report nothing until `resume`."""
        self.paused = True
        if self.profile is not None and sys.getprofile() is self.profile:
            sys.setprofile(None)

    def resume(self) -> None:
        """Report again."""
        self.paused = False
        if self.profile is not None and sys.getprofile() is None:
            sys.setprofile(self.profile)

    def stop(self) -> None:
        """Report nothing more in this run; calling it again changes nothing."""


def _is_importing(frame: FrameType) -> bool:
    above: FrameType | None = frame
    while above is not None:
        if above.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        above = above.f_back
    return False


class _ProfileObserver(Observer):
    def __init__(self, listener: Listener, before: Any) -> None:
        super().__init__(listener)
        self._before = before

    def start(self) -> None:
        """Begin to look."""
        self._own = self._build_profile()
        if self._before is None:  # another's profile function must see everything
            self.profile = self._own
        sys.setprofile(self._own)

    def _build_profile(self) -> Profile:
        seen, see, before = self._seen, self.see, self._before

        def profile(frame: FrameType, event: str, arg: object) -> None:
            if event == "call" and id(frame.f_code) not in seen:
                see(frame)
            if before is not None:
                before(frame, event, arg)

        return profile

    def stop(self) -> None:
        self.profile = None
        if sys.getprofile() is self._own:  # the run may have set one of its own
            sys.setprofile(self._before)


@contextmanager
def observing(listener: Listener) -> Iterator[Observer]:
    """Report every function of this thread that starts inside the `with`."""
    if HAS_MONITORING:
        yield from _observe_by_monitoring(listener)
    else:
        yield from _observe_by_profile(listener)


def _observe_by_profile(listener: Listener) -> Iterator[Observer]:
    before = sys.getprofile()
    if before is not None and not callable(before):
        yield Observer(listener)
        return
    observer = _ProfileObserver(listener, before)
    observer.start()
    try:
        yield observer
    finally:
        observer.stop()


# --- sys.monitoring: one tool for all threads ------------------------------------------------

_lock = threading.Lock()
_observers: dict[int, Observer] = {}  # by thread
_tool: int | None = None


class _MonitoringObserver(Observer):
    def __init__(self, listener: Listener) -> None:
        super().__init__(listener)
        self._thread = threading.get_ident()

    def start(self) -> None:
        with _lock:
            _start_tool()
            _observers[self._thread] = self

    def stop(self) -> None:
        with _lock:
            if _observers.pop(self._thread, None) is not None:
                _stop_tool()


def _observe_by_monitoring(listener: Listener) -> Iterator[Observer]:
    observer = _MonitoringObserver(listener)
    observer.start()
    try:
        yield observer
    finally:
        observer.stop()


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
        else:
            raise CannotTrace(
                "Both tool ids of sys.monitoring that are free for others (3 and 4) are taken, so "
                "functions can't be observed. Free one: sys.monitoring.free_tool_id.",
                slug="no-monitoring-tool",
            )
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
    done = observer is not None and observer.see(sys._getframe(1))
    # Quiet from now on, unless another thread has yet to see this code.
    return sys.monitoring.DISABLE if done and len(_observers) == 1 else None  # type: ignore[attr-defined]
