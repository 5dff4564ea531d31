"""Forks: a child process waits for nothing that a thread of its parent held.

A forked child has only the thread that forked. What another thread was in the midst of is there as
it is after an interrupt, and nobody will go on with it.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, TypeVar

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_Lock = TypeVar("_Lock", threading.RLock, threading.Lock)


def make_lock() -> threading.RLock:
    """A lock that its holder may take again, from a finaliser or a signal handler, say."""
    return free_in_children(threading.RLock())


def free_in_children(lock: _Lock) -> _Lock:
    """The lock, which is free in a forked child, whoever held it."""
    _locks.add(lock)
    return lock


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the standard library does with its own


os.register_at_fork(after_in_child=_after_fork_in_child)
