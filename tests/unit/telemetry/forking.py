"""Run something in a forked child and get its answer."""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_fork(work: Callable[[], T]) -> T:
    """What `work` returns in a child process made by os.fork."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads of its own
        child = os.fork()
    if child == 0:
        try:
            answer: tuple[bool, object] = (True, work())
        except BaseException:
            answer = (False, traceback.format_exc())
        os.write(writing, pickle.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        fine, value = pickle.load(pipe)
    os.waitpid(child, 0)
    assert fine, value
    return value  # type: ignore[return-value]
