"""Playing a case: its calls and writes in order, and what the outside saw after each call.

A plain program and its compiled twin are played one after the other, each in a world of its
own, and their transcripts are compared. So a write to what both share, such as the default
dtype or a hook on all modules, happens once in each play. A transcript is plain data: tensors
are written out to the last bit, and what was one object is numbered alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import enum
import os
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.modules import module as nn_module
from unit.channels.channel import CALLS, Case, Program

from tripwire import TripwireError

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

REFUSALS = (TripwireError, TorchDynamoException, FailOnRecompileLimitHit)

_PLAIN = (type(None), int, float, complex, str, bytes, range, slice, torch.dtype, type(...))


class Outcome(NamedTuple):
    """What the outside saw of one call."""

    where: str
    raised: str  # the exception
    seen: Any  # the result, what became of the arguments, and the state


def play(case: Case, wrap: Wrap = lambda call: call, *, skip: int = 0) -> list[Outcome]:
    """What the outside saw of each call.

    With `skip`, that phase's change is left out: its write, or its other form of arguments.
    A compiler's refusal isn't an outcome of the program: it is raised.
    """
    with world_of(case) as program:
        call = wrap(program.call)
        outcomes = []
        for phase in range(program.phases):
            if 0 < phase <= len(program.writes) and phase != skip:
                program.writes[phase - 1]()
            for n in range(phase * CALLS, (phase + 1) * CALLS):
                outcomes.append(observe(program, call, n, 0 if phase == skip else phase))
        return outcomes


@contextlib.contextmanager
def world_of(case: Case) -> Iterator[Program]:
    """A case's program, built afresh; what it does to torch and to the process is undone."""
    with _kept_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = case.build()
        try:
            yield program
        finally:
            program.world.modes.close()
            for name in (program.world.__name__, program.neighbour):
                sys.modules.pop(name, None)


def observe(program: Program, call: Callable[..., Any], n: int, phase: int) -> Outcome:
    """Call once, with the arguments of the nth call."""
    arguments = program.calls(n, phase)
    torch.default_generator.manual_seed(n)  # torch.manual_seed keeps a stack for CUDA each time
    result, raised = None, ""
    try:
        result = call(*arguments.positional, **arguments.keywords)
    except REFUSALS:
        raise
    except Exception as error:
        raised = re.sub(r"\b(world|neighbour)_\d+", r"\1", f"{type(error).__name__}: {error}")
    seen = _Writer().write([result, [*arguments], program.state()])
    return Outcome(f"phase {phase}, call {n}", raised, seen)


def find_difference(expected: list[Outcome], got: list[Outcome]) -> tuple[Outcome, Outcome] | None:
    """The first outcome that differs, plain and compiled."""
    pairs = zip(expected, got, strict=True)
    return next(((left, right) for left, right in pairs if left[1:] != right[1:]), None)


def check_agree(expected: list[Outcome], got: list[Outcome]) -> None:
    """Nothing that the outside saw differs."""
    if difference := find_difference(expected, got):
        plain, compiled = difference
        lines = [plain.where, f"expected: {plain[1:]}", f"got:      {compiled[1:]}"]
        raise AssertionError("\n".join(lines))


class _Writer:
    """Writes values out as plain data, one call's values at a time."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, object]] = {}  # by id; the object is kept, so is its id

    def write(self, value: Any) -> Any:
        """Nested tuples and strings that are equal for equal values only."""
        kind = type(value).__name__
        if isinstance(value, _PLAIN):
            return f"{kind} {value!r}"
        if isinstance(value, enum.Enum):
            return f"{kind}.{value.name}"
        if isinstance(value, tuple | frozenset | np.generic):
            return (kind, *self._parts(value))
        if id(value) in self._met:
            return f"{kind} #{self._met[id(value)][0]} again"
        self._met[id(value)] = len(self._met), value
        return (f"{kind} #{self._met[id(value)][0]}", *self._parts(value))

    def _parts(self, value: Any) -> tuple[Any, ...]:
        match value:
            case torch.Tensor():
                return _write_tensor(value)
            case np.ndarray() | np.generic():
                return str(value.dtype), str(value.shape), str(value.tolist())
            case Mapping():
                return tuple((self.write(k), self.write(v)) for k, v in value.items())
            case list() | tuple() | deque():
                return tuple(self.write(item) for item in value)
            case set() | frozenset():
                return tuple(sorted(map(repr, value)))
            case _ if dataclasses.is_dataclass(value):
                return tuple(self.write(getattr(value, f.name)) for f in dataclasses.fields(value))
            case _:
                return ()


def _write_tensor(value: torch.Tensor) -> tuple[str, ...]:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        kind = f"{value.dtype} {tuple(value.shape)} requires_grad={value.requires_grad}"
        return kind, str(value.detach().tolist())


_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


@contextlib.contextmanager
def _kept_state() -> Iterator[None]:
    environment = dict(os.environ)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        with torch.enable_grad(), decimal.localcontext():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark
        for name in _GLOBAL_HOOKS:
            getattr(nn_module, name).clear()
