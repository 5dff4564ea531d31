"""Observe: which Python functions run below the traced call, and which C functions they call.

Each code object is reported once per run, when it first starts, with its globals. From 3.12 on,
`sys.monitoring` reports it, and is switched off for a code object after its first start. On 3.11,
`sys.setprofile` does. A profile function that was set before is still called. A profiler written in
C can't be called from here: then only the traced function is looked at.

Where calls are watched, every call of a C function is judged (see purity), and the first that
can't be in a trace is reported. Calls that tripwire makes don't count, nor do calls of code that an
import runs: a module's code doesn't run again at the next call.
"""

from __future__ import annotations

import gc
import logging
import opcode
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, MethodDescriptorType
from typing import Any, Protocol

from tripwire.env import HAS_MONITORING, HAS_QUICK_IN, is_library_file, is_own_file, torch_path
from tripwire.errors import CannotTrace
from tripwire.forks import make_lock
from tripwire.imports import find_native
from tripwire.rulebook.purity import (
    DRAWS,
    LASTING,
    LOGS,
    PURE,
    PURE_METHODS,
    GlobalGenerators,
    find_impurity,
    is_draw,
    may_draw_from_numpy,
)
from tripwire.rulebook.rules import Refuse, find_refused_code
from tripwire.values.classes import isinstance

Profile = Callable[[FrameType, str, Any], None]
Started = list[tuple[CodeType, dict[str, Any]]]  # code, and its globals


class Listener(Protocol):
    """Who wants to know which functions run."""

    def on_start(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """A function of the user's starts for the first time in this run."""

    def on_library_start(self, code: CodeType) -> None:
        """A function of torch's or the standard library's starts for the first time."""

    def on_refused(self, refuse: Refuse) -> None:
        """A function of torch's starts that can't be followed."""

    def on_impure(self, refuse: Refuse) -> None:
        """A C function is called that can't be in a trace; only the first call is reported."""


class _Nobody:
    """Listens to nothing."""

    def on_start(self, code: CodeType, namespace: dict[str, Any]) -> None:
        pass

    def on_library_start(self, code: CodeType) -> None:
        pass

    def on_refused(self, refuse: Refuse) -> None:
        pass

    def on_impure(self, refuse: Refuse) -> None:
        pass


_NOBODY = _Nobody()


def _is_own(frame: FrameType) -> bool:
    """Whether tripwire's own code starts; what its records generate has no file of its own."""
    file = frame.f_code.co_filename
    if file != "<string>":  # which can also be the user's, as all others of this kind are
        return is_own_file(file)
    module = str(frame.f_globals.get("__name__"))
    if module.startswith("namedtuple_"):  # its globals are empty: whoever makes one owns it
        return frame.f_back is not None and is_own_file(frame.f_back.f_code.co_filename)
    return module.partition(".")[0] == "tripwire"


class Observer:
    """Reports the user's code objects of one thread, each once, and the first impure call."""

    # Why not all that started was reported; empty where it was.
    blind = (
        "a profiler written in C is active, and on Python 3.11 functions can't be observed then. "
        "Call it once without the profiler."
    )

    def __init__(self, listener: Listener, watch_calls: bool) -> None:
        self._listener: Listener = listener
        self._seen: dict[int, CodeType] = {}  # by identity: hashing code costs microseconds
        self._own: set[int] = set()  # those of tripwire itself
        self.adopted: set[int] = set()  # those that may run out of sight
        self._imports = _count_imports(sys._getframe())
        self._generators = GlobalGenerators() if watch_calls else None
        self.watching = watch_calls  # for impure calls; until the first
        self.leaves_draws = False  # of Python's generators: somebody repeats them
        self.has_open = False  # numbers, about which containers are asked
        self.paused = False  # report nothing; set by whoever records
        self._inside: Started | None = None  # what starts while it is noted
        self.collecting = False  # report nothing either: callbacks of the collector run
        self._thread = threading.get_ident()
        self.profile: Profile | None = None  # to be taken out while paused; see Recorder

    def codes(self) -> list[CodeType]:
        """Every code object that has started, in order: the user's, torch's, the library's.

        What started only while paused isn't among them, nor is tripwire's own.
        """
        seen = list(self._seen.values())  # what comes next may start, too
        return [code for code in seen if id(code) not in self._own]

    def see(self, frame: FrameType) -> bool:
        """Report a frame's code if it is new; whether its later starts can go unseen."""
        code = frame.f_code
        if id(code) in self._seen:
            return self._inside is None  # what was only noted is to be seen afterwards
        own = _is_own(frame)
        if self._inside is not None and not (own or self.collecting):
            if not is_library_file(code.co_filename):
                self._inside.append((code, frame.f_globals))
            self._seen[id(code)] = code
            return False
        if (self.paused or self.collecting) and not own:
            return False  # it runs inside an op, which is the op's business; it may run again
        refuse = find_refused_code(code)
        if not own and self._is_importing(frame):
            return False  # a module's body runs once, and what it reads is no call's business
        self._seen[id(code)] = code
        if own:
            self._own.add(id(code))
        if refuse is not None:
            self._listener.on_refused(refuse)
        elif not own:
            if is_library_file(code.co_filename):
                self._listener.on_library_start(code)
            else:
                self._listener.on_start(code, frame.f_globals)
        return True

    def adopt(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Report a code object that started while paused."""
        self.adopted.add(id(code))
        if id(code) not in self._seen:
            self._seen[id(code)] = code
            self._listener.on_start(code, namespace)

    def judge(
        self,
        frame: FrameType,
        callee: object,
        first: object = None,
        why: Refuse | None = None,
    ) -> None:
        """Report a call that a frame makes, if it is the first that can't be in a trace.

        `first` is the call's first argument, to which an unbound method belongs. `why` is told in
        place of what is known of the callee alone.
        """
        file = frame.f_code.co_filename
        if self.paused or self.collecting or not self.watching or is_own_file(file):
            return
        library = is_library_file(file)
        refuse = find_impurity(callee, library)
        if refuse is None or self._is_importing(frame) or _serves_tripwire(frame):
            return
        if is_draw(callee):
            if not self.leaves_draws:
                self._report(DRAWS)
            return
        if why is not None:
            refuse = why
        elif file.startswith(_LOGGING):
            refuse = LOGS
        elif isinstance(callee, MethodDescriptorType) and isinstance(first, callee.__objclass__):
            # What is bound says more: a write to one of two streams is a print.
            refuse = find_impurity(callee.__get__(first), library) or refuse
        self._report(refuse)

    def is_unmoved(self) -> bool:
        """Whether Python's generator, and NumPy's, are where they were at the last look."""
        return self._generators is None or self._generators.find_draw() is None

    def look_again(self) -> None:
        """Somebody has drawn from one of them, and will again on each call."""
        if self._generators is not None:
            self._generators.look_again()

    def refuse_draw(self, why: Refuse) -> None:
        """A draw that nobody can repeat."""
        if self.watching:
            self._report(why)

    def forget(self) -> None:
        """Let go of the listener, and of all that it holds."""
        self._listener = _NOBODY

    def finish(self) -> None:
        """The run is over: report what no call showed."""
        if self.collecting:
            self.blind = _LOST_SIGHT
        watching, self.watching = self.watching, False  # finding out makes calls too
        if watching and self._generators is not None:
            refuse = self._generators.find_draw()
            if refuse is not None:
                self._report(refuse)

    def _report(self, refuse: Refuse) -> None:
        self.watching = False
        self._listener.on_impure(refuse)

    def _is_importing(self, frame: FrameType) -> bool:
        """Whether the run imports something here; the run itself may be part of an import."""
        return _count_imports(frame) > self._imports

    def pause(self) -> None:
        """Report nothing until `resume`."""
        self.paused = True
        if self.profile is not None and sys.getprofile() is self.profile:
            sys.setprofile(None)

    def resume(self) -> None:
        """Report again."""
        self.paused = False
        if self.profile is not None and sys.getprofile() is None:
            set_profile(self.profile)

    @contextmanager
    def noting(self) -> Iterator[Started]:
        """While paused: the user's code that starts in here, whether it did before or not."""
        seen, self._inside = dict(self._seen), []
        self._seen.clear()
        self._restart()
        if self.profile is not None and sys.getprofile() is None:
            set_profile(self.profile)
        try:
            yield self._inside
        finally:
            if self.profile is not None and sys.getprofile() is self.profile:
                sys.setprofile(None)
            self._inside = None
            self._seen.clear()
            self._seen.update(seen)

    def _restart(self) -> None:
        """Have code that went quiet tell of its starts again."""

    def __enter__(self) -> Observer:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.stop()

    def start(self) -> None:
        """Begin to look."""
        with _lock:
            _at_work[self._thread] = self
            if gc.callbacks and _begin_callbacks not in gc.callbacks:
                # In this order: the collector may run before the next line does.
                gc.callbacks.append(_end_callbacks)
                gc.callbacks.insert(0, _begin_callbacks)

    def stop(self) -> None:
        """Report nothing more in this run; calling it again changes nothing."""
        with _lock:
            if _at_work.get(self._thread) is self:
                del _at_work[self._thread]
            for callback in () if _at_work else (_begin_callbacks, _end_callbacks):
                if callback in gc.callbacks:
                    gc.callbacks.remove(callback)


_IMPORTER = "<frozen importlib._bootstrap>"
_LOGGING = logging.__file__.removesuffix("__init__.py")  # the folder: handlers are there too


def _count_imports(frame: FrameType | None) -> int:
    found = 0
    while frame is not None:
        found += frame.f_code.co_filename == _IMPORTER
        frame = frame.f_back
    return found


def _serves_tripwire(frame: FrameType) -> bool:
    """Whether the standard library works for tripwire here, as `warnings` does for a branch."""
    above: FrameType | None = frame
    while above is not None:
        file = above.f_code.co_filename
        if not is_library_file(file) or torch_path(file) is not None:
            return is_own_file(file)
        above = above.f_back
    return False


def observing(listener: Listener, watch_calls: bool = False) -> Observer:
    """Report every function of this thread that starts inside a `with` of what is returned.

    With `watch_calls`, report the first C call that can't be in a trace as well.
    """
    if HAS_MONITORING:
        return _MonitoringObserver(listener, watch_calls)
    before = sys.getprofile()
    if before is not None and not callable(before):
        return Observer(listener, watch_calls)
    return _ProfileObserver(listener, watch_calls, before)


# --- callbacks of the collector ----------------------------------------------------------------
# They run in the midst of a run and are no part of it. Ours are the first and the last of them,
# each time that it tells of its begin and of its end.

_LOST_SIGHT = (
    "the list gc.callbacks was changed while the garbage collector ran, so tripwire didn't see the "
    "functions that started after that. The next call is tried again."
)
_at_work: dict[int, Observer] = {}  # by thread
_lock = make_lock()  # a collection while it is held may make a call that is observed


def _begin_callbacks(phase: str, info: dict[str, int]) -> None:
    observer = _at_work.get(threading.get_ident())
    if observer is not None:
        if observer.collecting:
            observer.blind = _LOST_SIGHT
        observer.collecting = True


def _end_callbacks(phase: str, info: dict[str, int]) -> None:
    observer = _at_work.get(threading.get_ident())
    if observer is not None:
        observer.collecting = False


# --- sys.setprofile: one function for one thread ---------------------------------------------


def _sift_nothing(profile: Profile, *codes: object) -> Profile:
    """The twin of the sieve in C: the profile function finds out itself that it has nothing to do.

    The sieve keeps events from it: 36 layers of Qwen3 have 120,000, and it acts on 200 of them.
    """
    return profile


def _choose() -> tuple[Callable[..., Profile], Callable[[Profile], None]]:
    module = None if HAS_MONITORING else find_native("tracing._sieve")
    if module is None:
        return _sift_nothing, sys.setprofile
    return module.Sieve, module.set_profile


_build_sieve, set_profile = _choose()


class _ProfileObserver(Observer):
    blind = ""

    def __init__(self, listener: Listener, watch_calls: bool, before: Any) -> None:
        super().__init__(listener, watch_calls)
        self._before = before
        self._installed: Profile | None = None
        self._near_numpy: set[int] = set()  # codes that name NumPy, by identity

    def start(self) -> None:
        super().start()
        profile = self._build_profile()
        if self._before is not None:  # another's profile function must see everything
            self._installed = profile
            sys.setprofile(profile)
            return
        self._installed = self.profile = _build_sieve(
            profile, self._seen, self._own, self._near_numpy, PURE, PURE_METHODS, self.watching
        )
        set_profile(self.profile)

    def _build_profile(self) -> Profile:
        seen, see, before = self._seen, self.see, self._before
        own, near_numpy = self._own, self._near_numpy
        judge = self.judge if self.watching else None

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call":
                if id(frame.f_code) not in seen:
                    see(frame)
            elif event == "c_call" and judge is not None and id(frame.f_code) not in own:
                if arg not in PURE and (type(arg.__self__), arg.__name__) not in PURE_METHODS:
                    judge(frame, arg)
            if near_numpy:
                self._look_at_numpy(frame, event)
            if before is not None:
                before(frame, event, arg)

        return profile

    def see(self, frame: FrameType) -> bool:
        done = super().see(frame)
        code = frame.f_code
        if done and self.watching and id(code) not in self._own:
            users = not is_library_file(code.co_filename)
            if users and may_draw_from_numpy(code.co_names, frame.f_globals):
                self._near_numpy.add(id(code))
        return done

    def _look_at_numpy(self, frame: FrameType, event: str) -> None:
        """Catch a draw at the event that follows it, while its line is the one that runs."""
        at: FrameType | None = frame
        if event == "call" and _is_constant(frame.f_code):
            at = frame.f_back
        if at is None or id(at.f_code) not in self._near_numpy:
            return
        if self.paused or self.collecting:
            return
        if self.watching and self._generators is not None:
            refuse = self._generators.find_numpy_draw()
            if refuse is not None and not self._is_importing(at):
                self._report(refuse)

    def stop(self) -> None:
        if self.profile is not None and sys.getprofile() is not self.profile:
            # Python drops a profile function that raises; the run can take it away, too.
            self.blind = "the run replaced or removed tripwire's profile function."
        self.profile = None
        if self._installed is not None and sys.getprofile() is self._installed:
            sys.setprofile(self._before)  # unless the run has set one of its own
        super().stop()


def _is_constant(code: CodeType) -> bool:
    return is_library_file(code.co_filename) or is_own_file(code.co_filename)


# --- sys.monitoring: one tool for all threads ------------------------------------------------

_watched: dict[int, CodeType] = {}  # codes whose calls are reported, by identity
_TOOL_IDS, _TOOL_NAME = (4, 3), "tripwire"  # the ids that no tool of the standard library claims
_tool: int | None = None  # the one whose callbacks and events are set


class _MonitoringObserver(Observer):
    blind = ""

    def start(self) -> None:
        with _lock:
            super().start()
            _start_tool()

    def stop(self) -> None:
        with _lock:
            super().stop()
            _stop_tool()

    def _restart(self) -> None:
        sys.monitoring.restart_events()  # type: ignore[attr-defined]  # from 3.12 on


def _start_tool() -> None:
    global _tool
    monitoring = sys.monitoring  # type: ignore[attr-defined]  # from 3.12 on
    if _tool is None:
        tool = _take_tool_id()
        events = monitoring.events
        monitoring.register_callback(tool, events.PY_START, _on_py_start)
        monitoring.register_callback(tool, events.PY_RESUME, _on_py_start)
        monitoring.register_callback(tool, events.CALL, _on_call)
        monitoring.set_events(tool, events.PY_START | events.PY_RESUME)
        _tool = tool
    monitoring.restart_events()  # code that went quiet for another thread is new to this one


def _take_tool_id() -> int:
    monitoring = sys.monitoring  # type: ignore[attr-defined]  # from 3.12 on
    for tool in _TOOL_IDS:
        if monitoring.get_tool(tool) is None:
            monitoring.use_tool_id(tool, _TOOL_NAME)
        if monitoring.get_tool(tool) == _TOOL_NAME:
            return tool
    raise CannotTrace(
        "Both tool ids of sys.monitoring that are free for others (3 and 4) are taken, so "
        "functions can't be observed. Free one: sys.monitoring.free_tool_id.",
        slug="no-monitoring-tool",
    )


def _stop_tool() -> None:
    """Give the tool id back, however far `_start_tool` or the last call of this came."""
    global _tool
    if _at_work:
        return
    _tool = None
    monitoring = sys.monitoring  # type: ignore[attr-defined]  # from 3.12 on
    events = monitoring.events
    for tool in _TOOL_IDS:
        if monitoring.get_tool(tool) == _TOOL_NAME:
            monitoring.set_events(tool, 0)
            for code in _watched.values():
                monitoring.set_local_events(tool, code, 0)
            for event in (events.PY_START, events.PY_RESUME, events.CALL):
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)
    _watched.clear()


def _on_py_start(code: CodeType, offset: int) -> object:
    observer = _at_work.get(threading.get_ident())
    if observer is None or not observer.see(sys._getframe(1)):
        return None
    if not is_own_file(code.co_filename):
        _watch_inside(code, observer.watching, observer.has_open)
    # Quiet from now on, unless another thread has yet to see this code.
    return sys.monitoring.DISABLE if len(_at_work) == 1 else None  # type: ignore[attr-defined]


def _watch_inside(code: CodeType, calls: bool, members: bool) -> None:
    """Have the calls of one code object reported, and containers asked for members by their class.

    Most calls while a run is observed are recording's, and so no event for all code is set.
    No call site goes quiet: another callee may come next.

    A quick `in` can't be answered for an open number. Code whose instructions are watched has none.
    Nobody is told of these instructions.
    """
    if _tool is None or id(code) in _watched:
        return
    monitoring = sys.monitoring  # type: ignore[attr-defined]  # from 3.12 on
    wanted = monitoring.events.CALL if calls else 0
    if members and HAS_QUICK_IN and _IN in code.co_code[::2]:
        wanted |= monitoring.events.INSTRUCTION
    if wanted:
        _watched[id(code)] = code
        monitoring.set_local_events(_tool, code, wanted)


_IN = opcode.opmap["CONTAINS_OP"]


def _on_call(code: CodeType, offset: int, callee: object, first: object) -> None:
    kind = type(callee)
    if kind is FunctionType or (kind in LASTING and callee in PURE):
        return
    observer = _at_work.get(threading.get_ident())
    if observer is not None:
        observer.judge(sys._getframe(1), callee, first)
