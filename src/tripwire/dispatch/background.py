"""Background: compilers work in one thread of their own, while calls run as plain Python.

The thread is there while there is work. It is no daemon, which torch's C++ code may not survive at
exit. When the program ends, work that hasn't begun is dropped, and what goes on is interrupted.
A process that is forked begins without any.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from tripwire.env import call_before_threads_end

_log = logging.getLogger("tripwire.backends")
Job = Callable[[], None]


class Interrupted(BaseException):
    """The program ends. Raised in the midst of what is compiled then."""


class Background:
    """Work of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def submit(self, job: Job) -> None:
        """Do this after all that was submitted before. What it raises is logged."""
        with self._lock:
            if self._is_over:
                return
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tripwire compiles")
                self._thread.start()

    def _work(self) -> None:
        try:
            while (job := self._take()) is not None:
                try:
                    job()
                except Exception:
                    _log.exception("Work in the background failed.")
                del job  # it may be the last that holds what it is for
        except Interrupted:
            pass

    def _take(self) -> Job | None:
        with self._lock:
            if self._jobs and not self._is_over:
                return self._jobs.popleft()
            self._thread = None
            return None

    def end(self) -> None:
        """The program ends, and waits for its threads."""
        with self._lock:
            self._is_over = True
            self._jobs.clear()
            thread = self._thread
        if thread is not None and thread.ident is not None:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))


BACKGROUND = Background()


def _begin_anew() -> None:
    BACKGROUND.__init__()  # type: ignore[misc]  # its lock may be held by a thread that isn't here


call_before_threads_end(BACKGROUND.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
