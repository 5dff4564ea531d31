"""Locks that a fork can't leave locked.

A child process has only the thread that forked; a lock that another thread held at that moment
would never be released there.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_made: weakref.WeakSet[Any] = weakref.WeakSet()


def make_lock() -> threading.RLock:
    """A lock that its holder may take again, from a finaliser or a signal handler, say."""
    lock = threading.RLock()
    _made.add(lock)
    return lock


def _after_fork_in_child() -> None:
    for lock in list(_made):
        lock._at_fork_reinit()  # as the standard library does with its own


os.register_at_fork(after_in_child=_after_fork_in_child)
