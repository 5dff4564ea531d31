"""Turns: which thread compiles, and when; the others run plain code meanwhile.

One thread at a time traces and compiles a callable. A turn belongs to whoever holds its token. It
ends when the token is given back. It also ends if the token dies (an interrupt came in between),
and in a forked child, where the threads of the parent don't exist.

With `background=True` compilers work in one thread of their own, which exists while there is work.
It isn't a daemon, because torch's C++ code may crash in a daemon thread at exit. When the program
ends, work that hasn't begun is dropped, and running work is interrupted. A forked process begins
without any.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tripwire.env import call_before_threads_end
from tripwire.forks import make_lock


class Token:
    """Whoever holds it has the turn."""

    __slots__ = ("__weakref__", "process", "thread")

    def __init__(self) -> None:
        self.process, self.thread = os.getpid(), threading.get_ident()


class Turn:
    """The turn to compile one callable: one thread has it at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition(make_lock())
        self._token: weakref.ref[Token] | None = None

    def take(self) -> Token | None:
        """The turn, or None where somebody has it."""
        token = Token()
        with self._changed:
            if self._find_holder() is not None:
                return None
            self._token = weakref.ref(token)
        return token

    def give_back(self, token: Token) -> None:
        """Let the next one take it."""
        with self._changed:
            if self._find_holder() is token:
                self._token = None
            self._changed.notify_all()

    def pass_on(self) -> Token:
        """The turn goes from this thread, which has it, to whoever holds this token."""
        token = Token()
        with self._changed:
            self._token = weakref.ref(token)
        return token

    @contextmanager
    def taken(self) -> Iterator[Token | None]:
        """Inside, the turn is this thread's, unless it is another's."""
        token = self.take()
        try:
            yield token
        finally:
            if token is not None:
                self.give_back(token)

    def wait(self) -> bool:
        """Until nobody has it. False where this thread itself does, and would wait for ever."""
        with self._changed:
            while (holder := self._find_holder()) is not None:
                if holder.thread == threading.get_ident():
                    return False
                del holder
                self._changed.wait(_LOOK_AGAIN)
        return True

    def _find_holder(self) -> Token | None:
        token = None if self._token is None else self._token()
        return token if token is not None and token.process == os.getpid() else None


_LOOK_AGAIN = 0.1  # seconds: a token may die untold


# --- a thread for compilers ---


_log = logging.getLogger("tripwire.backends")
Job = Callable[[], None]


class Interrupted(BaseException):
    """The program ends. Raised inside the compile that is running then."""


class Background:
    """Jobs of one process, done one by one in a thread of their own."""

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
                except Exception:  # the next job has nothing to do with it
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
os.register_at_fork(after_in_child=_begin_anew)
