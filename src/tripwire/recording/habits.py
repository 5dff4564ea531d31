"""Habits: what a callable may do to what it is given, told from its code before it runs.

A call that may write is kept as it began before it runs. One that can't need not be: nothing
that it was given will have changed when it fails. To say too much costs time, to say too
little loses values, so whatever looks like a write is one.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from tripwire.tracing.rules import words

_STORES = frozenset(
    dis.opmap[name]
    for name in (
        "STORE_ATTR",
        "DELETE_ATTR",
        "STORE_SUBSCR",
        "DELETE_SUBSCR",
        "STORE_SLICE",
        "STORE_GLOBAL",
        "DELETE_GLOBAL",
        "STORE_NAME",
    )
    if name in dis.opmap
)
_STORE_DEREF = dis.opmap["STORE_DEREF"]
_BINARY_OP = dis.opmap["BINARY_OP"]
_IN_PLACE_FROM = next(
    number
    for number, (_, sign) in enumerate(dis._nb_ops)  # type: ignore[attr-defined]
    if sign.endswith("=")
)
_CHANGERS = words(
    "append appendleft extend extendleft insert add update setdefault pop popleft popitem clear "
    "remove discard sort reverse rotate send throw setattr delattr exec eval next"
)
_DRAWS = words("random numpy np Random default_rng generator Generator rng")
_IN_PLACE = re.compile(r"[A-Za-z_]*[A-Za-z0-9]_|__i[a-z]+__|__setitem__|__delitem__|_foreach_\w+_")
_KEYWORDS = frozenset({"out", "inplace"})
# Functions of torch that write to tensors which aren't their first argument.
_STATEFUL = frozenset({"batch_norm", "instance_norm", "embedding", "embedding_bag"})


@dataclass(frozen=True, slots=True)
class Habits:
    """What a callable's code may do."""

    writes: bool  # to anything that was there before
    draws: bool  # from a generator that isn't torch's own

    @property
    def are_harmless(self) -> bool:
        """Whether a failed call leaves what it was given as it was."""
        return not (self.writes or self.draws)


def find_habits(codes: Iterable[CodeType], objects: Iterable[object]) -> Habits:
    """The habits of recorded code, and of the modules among recorded objects."""
    writes = any(isinstance(value, nn.Module) and _changes_itself(value) for value in objects)
    draws = False
    for code in codes:
        names = frozenset(code.co_names)
        draws = draws or not _DRAWS.isdisjoint(names)
        writes = writes or _may_write(code, names)
    return Habits(writes, draws)


def _changes_itself(module: nn.Module) -> bool:
    """Whether a layer of torch's writes when it is called: running statistics, inplace=True."""
    state = module.__dict__
    return bool(state.get("inplace") or (state.get("training") and state.get("_buffers")))


def _may_write(code: CodeType, names: frozenset[str]) -> bool:
    if not _CHANGERS.isdisjoint(names) or any(map(_IN_PLACE.fullmatch, names)):
        return True
    if any(isinstance(c, tuple) and not _KEYWORDS.isdisjoint(c) for c in code.co_consts):
        return True
    free = len(code.co_varnames)
    raw = code.co_code
    for opcode, argument in zip(raw[::2], raw[1::2], strict=True):
        if opcode in _STORES or (opcode == _STORE_DEREF and argument >= free):
            return True
        if opcode == _BINARY_OP and argument >= _IN_PLACE_FROM:
            return True
    return any(
        isinstance(c, CodeType) and _may_write(c, frozenset(c.co_names)) for c in code.co_consts
    )


def find_written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """Tensors that a call of torch's is about to change in place, as far as its form tells."""
    name = getattr(func, "__name__", "")
    if _IN_PLACE.fullmatch(name) and args:
        yield from _tensors_in(args[:1])
    if name in _STATEFUL or kwargs.get("inplace") or any(a is True for a in args[1:]):
        yield from _tensors_in((*args, *kwargs.values()))
    if kwargs.get("out") is not None:
        yield from _tensors_in((kwargs["out"],))


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
