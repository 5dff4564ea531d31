"""Imports: large imports run without garbage collection, and a compiler's imports retire nothing.

Python collects garbage during large imports: three passes over everything that torch holds, 0.4 of
the 2.3 s that importing Inductor takes, in vain, since what imports make stays alive.

Importing Inductor registers classes with abstract base classes. A run that called `isinstance` with
such a base class depends on its registrations, and compiled code is loaded or made after that run.
No object from before can be an instance of a class that the compiler brings. So its registrations
don't count. Other threads might register classes of their own meanwhile: if there are any,
everything is imported before the run.

A process that is forked while another thread imports waits for that module for ever: the thread
isn't there. What a call of compiled code imports is nothing that a program expects, so a fork waits
until that is done.

Dynamo and Inductor import each other. Two threads that begin in different places get halves of
modules, and both fail, also a user's that only makes an optimizer. So all begin at one place.
"""

from __future__ import annotations

import abc
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What compilers registered, in one item: guards hold this list, and subtract it from Python's count
# (`abc.get_cache_token`).
UNCOUNTED = [0]


_FORKS = threading.RLock()  # whoever has it may fork, or import much
os.register_at_fork(
    before=_FORKS.acquire, after_in_parent=_FORKS.release, after_in_child=_FORKS.release
)


@contextmanager
def importing() -> Iterator[None]:
    """Inside, garbage waits, and so do forks of other threads."""
    with _FORKS:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def import_dynamo() -> None:
    """Import Dynamo, before a part of it or of Inductor; another thread's import is waited for.

    Optimizers and checkpoints begin there, too. Profilers begin with Inductor.
    """
    with importing():
        if "torch._inductor" in sys.modules:
            importlib.import_module("torch._inductor")
        importlib.import_module("torch._dynamo")


# Reads, writes and the twins' comparisons count on the GIL: nothing is atomic without it.
HAS_GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()


def find_native(name: str) -> Any:
    """A C module of tripwire's; None without the GIL, where it isn't built, or TRIPWIRE_PURE=1."""
    if not HAS_GIL or os.environ.get("TRIPWIRE_PURE") == "1":
        return None
    try:
        return importlib.import_module(f"tripwire.{name}")
    except ImportError:
        return None


PROGRESS = "tripwire progress"  # a thread's name: it shows how long a compiler takes


def has_other_threads() -> bool:
    """Whether somebody else may register classes, or write to what a run reads."""
    return sum(thread.name != PROGRESS for thread in threading.enumerate()) > 1


@contextmanager
def uncounted_registrations() -> Iterator[None]:
    """Inside, classes that are registered with abstract ones are a compiler's own."""
    if has_other_threads():
        yield
        return
    before = count_registrations()
    try:
        yield
    finally:
        UNCOUNTED[0] += count_registrations() - before


def count_registrations() -> int:
    """With abstract classes; those of compilers left out."""
    return abc.get_cache_token() - UNCOUNTED[0]  # type: ignore[operator]  # an int in CPython
