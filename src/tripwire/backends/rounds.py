"""Rounds: CUDA graphs reuse the memory of a call's results when the next round begins.

Each compiled call is a round of its own, unless it is part of a larger one: a call that was
refused as a whole, whose modules are compiled each on its own and hand results to each other.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class _Thread(threading.local):
    in_round = False


_THREAD = _Thread()


@contextmanager
def one_round() -> Iterator[None]:
    """Compiled calls inside are one round."""
    outermost = not _THREAD.in_round
    if outermost:
        _begin()
        _THREAD.in_round = True
    try:
        yield
    finally:
        if outermost:
            _THREAD.in_round = False


def in_rounds(
    runtime: Callable[..., Any], stay: Sequence[int], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """A runtime that uses CUDA graphs: each call begins a round.

    Kernels take the inputs at `stay` where they are, and trust them to begin at a multiple of 16
    bytes. For those that don't, the plain graph runs.
    """

    @functools.wraps(runtime)
    def run(*inputs: Any) -> Any:
        if stay and not all(is_aligned(inputs[index]) for index in stay):
            return plain(*inputs)
        if not _THREAD.in_round:
            _begin()
        return runtime(*inputs)

    return run


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins where Inductor's kernels want it to."""
    return tensor.data_ptr() % 16 == 0


def _begin() -> None:
    guard = sys.modules.get("torch._dynamo.mutation_guard")
    if guard is not None:  # else nothing of torch's compilers is there
        guard.GenerationTracker.generation += 1
