"""Ahead: new code runs once within the first call, so that the next call doesn't wait for tuning.

On a GPU, Inductor's kernels are tuned when they first run, and CUDA graphs are recorded in the run
after that. The first call's result comes from the observed run. Within that call the new code runs
on the same inputs; what it returns is dropped, and what it writes is restored.

What a call writes may be the index of its next write, and an index out of bounds ends a process on
CUDA. So the new code finds counters as the call found them: whole numbers and single numbers are
copied before a torch call can change them (`Counters`). A cache holds what the call left there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tripwire.backends.backwards import trains
from tripwire.backends.cuts import runs_user_code
from tripwire.dispatch.originals import ChainedKeeper
from tripwire.errors import raise_interruption
from tripwire.reading.tensors import meta_of
from tripwire.telemetry.compiles import FIRST_RUN
from tripwire.tracing.result import Input, Trace, acts, draws, is_opaque
from tripwire.tracing.state import CallKeeper

LARGEST_COUNTER = 1 << 17  # numbers: tokens of a batch are of this kind, too
_FEW = 16

_log = logging.getLogger("tripwire.backends")
Code = Callable[[tuple[Any, ...]], object]


class Counters(ChainedKeeper):
    """Of a run's inputs, those that may say where it writes: as they were before it."""

    def __init__(self, inner: CallKeeper | None) -> None:
        super().__init__(inner)
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # alive, so ids are theirs

    def before_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for tensor in self.iter_inputs(args, kwargs):
                if id(tensor) not in self._before and _may_count(tensor):
                    self._before[id(tensor)] = tensor, tensor.detach().clone()
        super().before_call(func, args, kwargs)

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor as it was, if it may count."""
        return self._before.get(id(tensor), (None, None))[1]


def _may_count(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() <= (LARGEST_COUNTER if is_whole else _FEW)


def can_run_ahead(trace: Trace) -> bool:
    """Whether a run can be made again: it draws nothing, calls nothing, and no backward follows.

    What is saved for a backward would take its memory twice.
    """
    if draws(trace) or acts(trace) or is_opaque(trace):
        return False
    return not (trains(trace.graph) or runs_user_code(trace.graph))


def run_ahead(
    name: str,
    code: Code,
    runs: int,
    trace: Trace,
    given: tuple[torch.Tensor, ...],
    counters: Counters,
) -> None:
    """Run new code on a call's inputs, and leave them as they are."""
    numbers = tuple(number.value for number in trace.numbers)
    pairs = zip(trace.inputs, given, strict=True)
    written = [(wanted, tensor) for wanted, tensor in pairs if wanted.written]
    if not all(_can_return(wanted, tensor, counters) for wanted, tensor in written):
        return
    tensors = [tensor for _, tensor in written]
    try:
        with FIRST_RUN:
            with torch.inference_mode():  # which tensors made there ask for
                after = [tensor.detach().clone() for tensor in tensors]
            for _ in range(runs):
                with _put_back(tensors, after, counters):
                    code((*numbers, *given))
    except Exception as error:  # too little memory for two results, say: a hit tells of others
        raise_interruption(error)
        _log.info("The new code of %s could not be run ahead of the next call: %s", name, error)


def _can_return(wanted: Input, tensor: torch.Tensor, counters: Counters) -> bool:
    if type(tensor) is not torch.Tensor or meta_of(tensor) != wanted.meta:
        return False
    if tensor.requires_grad or tensor.layout is not torch.strided:
        return False
    return tensor.is_floating_point() or counters.find(tensor) is not None


@contextmanager
def _put_back(
    tensors: list[torch.Tensor], after: list[torch.Tensor], counters: Counters
) -> Iterator[None]:
    """Inside, counters are as the run found them; afterwards all tensors are as it left them.

    Also as often written: autograd asks that of what it saved.
    """
    versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
    try:
        with torch.inference_mode():
            for tensor in tensors:
                before = counters.find(tensor)
                if before is not None:
                    tensor.data.copy_(before)  # through .data: not counted as a write
        yield
    finally:
        with torch.inference_mode():
            for tensor, value in zip(tensors, after, strict=True):
                tensor.data.copy_(value)
        for tensor, version in versions:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
