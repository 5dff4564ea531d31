"""Undo: compiled code that fails on a hit is undone, and the plain call is made in its place.

The plain call raises the same error at the user's line, after all the effects that came before it
(L3). What the run changes in place is kept before each run, where it is small: compiled code may
write at any moment, and Inductor's doesn't count its writes. Only where the runtime is the graph
itself do the tensors' version counters tell whether anything was written.

Not undone: what is large, gradients, what the user's code did inside a custom autograd function,
and anything on another device than the CPU, where values raise no error that a call could catch.
An error comes out as it is then, and effects outside tensors that came before it are lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tripwire.backends.registry import Runtime
from tripwire.reading.tensors import TensorMeta, meta_of, version_of
from tripwire.tracing.result import Trace
from tripwire.validity.probes import acts, draws
from tripwire.values.classes import isinstance

# Bytes that are copied before each run, at most; each copy counts for some, and takes about 3 µs.
LARGEST_COPY = 1 << 18
COST_OF_A_COPY = 1 << 14


@dataclass(frozen=True, slots=True)
class _TensorBefore:
    """A tensor as it was before a run."""

    tensor: torch.Tensor
    meta: TensorMeta
    maker: object  # its grad_fn
    version: int | None  # None: doesn't tell
    copy: torch.Tensor | None  # None: too large

    @staticmethod
    def of(tensor: torch.Tensor, counts: bool, copies: bool) -> _TensorBefore:
        version = version_of(tensor) if counts else None
        copy = tensor.detach().clone() if copies else None
        return _TensorBefore(tensor, meta_of(tensor), tensor.grad_fn, version, copy)

    def is_unwritten(self) -> bool:
        return self.version is not None and version_of(self.tensor) == self.version

    def can_return(self) -> bool:
        tensor = self.tensor
        return self.is_unwritten() or (
            self.copy is not None and meta_of(tensor) == self.meta and tensor.grad_fn is self.maker
        )

    def put_back(self) -> None:
        if not self.is_unwritten():
            assert self.copy is not None
            self.tensor.data.copy_(self.copy)  # through .data: not counted as a write


@dataclass(frozen=True, slots=True)
class Saved:
    """What a run may change, as it was before."""

    kept: tuple[_TensorBefore, ...]
    states: tuple[tuple[torch.Generator, torch.Tensor], ...]

    def restore(self) -> bool:
        """Whether everything could be put back."""
        if not all(kept.can_return() for kept in self.kept):
            return False
        with torch.inference_mode():  # which tensors made there ask for
            for kept in self.kept:
                kept.put_back()
        for generator, state in self.states:
            generator.set_state(state)
        return True


@dataclass(frozen=True, slots=True)
class Undo:
    """Knows what one entry's runs change."""

    written: tuple[int, ...]  # positions among the inputs
    generators: tuple[torch.Generator, ...]
    counts: bool  # every write is counted by its tensor
    copies: bool

    def save(self, inputs: tuple[torch.Tensor, ...]) -> Saved:
        """What is there before a run with these inputs."""
        return Saved(
            tuple(_TensorBefore.of(inputs[i], self.counts, self.copies) for i in self.written),
            tuple((generator, generator.get_state()) for generator in self.generators),
        )


def build_undo(
    trace: Trace, runtime: Runtime, *, has_effects: bool, answers: bool = False
) -> Undo | None:
    """How to undo a run. None where that is not needed, or not possible.

    answers: custom functions that ran are no hindrance (tracing/answers.py).
    """
    is_graph = getattr(runtime, "__self__", None) is trace.graph_module
    if not answers and (acts(trace) or (is_graph and not has_effects)):
        return None  # the graph alone leaves what plain code does
    written = tuple(i for i, wanted in enumerate(trace.inputs) if wanted.written)
    if not written and not draws(trace):
        return Undo((), (), is_graph, False)
    metas = [trace.inputs[i].meta for i in written]
    copies = sum(COST_OF_A_COPY + _bytes_of(meta) for meta in metas) <= LARGEST_COPY
    if not copies and not is_graph:
        return None
    if any(wanted.meta.device.type != "cpu" for wanted in trace.inputs):
        return None
    generators: tuple[torch.Generator, ...] = ()
    if draws(trace):
        given = (constant.value for constant in trace.constants)
        generators = (
            torch.default_generator,
            *(value for value in given if isinstance(value, torch.Generator)),
        )
    count = len(trace.numbers)
    return Undo(tuple(count + i for i in written), generators, is_graph, copies)


def _bytes_of(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize
