"""Written: which of its arguments a torch function changes.

The name tells of `add_`, and a version counter of most others. The counters don't tell of a norm's
statistics, of what `GradScaler` finds, nor of what a fused optimizer or a fake quantization keeps:
there the operator's schema does.
"""

from __future__ import annotations

from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from msgspec import Struct
from torch._ops import OpOverload, OpOverloadPacket

from tripwire.values.classes import isinstance


class WrittenArguments(Struct, frozen=True):
    """Arguments that a call changes, although neither its name nor a version counter shows it."""

    arguments: tuple[tuple[int, str], ...]  # positions and names
    flag: tuple[int, str, bool] | None = None  # only where this argument is true; and its default
    counted: bool = False  # a version counter does tell, but inference tensors have none

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The values of those arguments in one call."""
        if self.flag is not None:
            index, name, default = self.flag
            if not (args[index] if len(args) > index else kwargs.get(name, default)):
                return []
        found: list[Any] = [
            args[i] if len(args) > i else kwargs.get(name) for i, name in self.arguments
        ]
        return [value for value in found if not self.counted or value.is_inference()]


def _statistics(first: int, flag: str | None, default: bool = False) -> WrittenArguments:
    """Running statistics of a norm stand side by side; most norms update them on a flag."""
    arguments = ((first, "running_mean"), (first + 1, "running_var"))
    return WrittenArguments(arguments, None if flag is None else (5, flag, default))


_RENORM = WrittenArguments(((1, "weight"),), (3, "max_norm", False), counted=True)
_IN_FUNCTIONAL = {
    torch.nn.functional.batch_norm: _statistics(1, "training"),
    torch.nn.functional.instance_norm: _statistics(1, "use_input_stats", default=True),
    torch.nn.functional.embedding: _RENORM,
    torch.nn.functional.embedding_bag: _RENORM,
}
_IN_TORCH = {
    "batch_norm": _statistics(3, "training"),
    "native_batch_norm": _statistics(3, "training"),
    "_native_batch_norm_legit": _statistics(3, "training"),
    "cudnn_batch_norm": _statistics(3, "training"),
    "miopen_batch_norm": _statistics(3, "training"),
    "_batch_norm_with_update": _statistics(3, None),
    "instance_norm": _statistics(3, "use_input_stats"),
}


def find_written(func: Any) -> WrittenArguments | None:
    """What a function of torch's, or one that stands in for one, changes besides."""
    known = _IN_FUNCTIONAL.get(func) or _find_flag(func)
    if known is not None or not isinstance(func, BuiltinFunctionType):
        return known or _IN_TORCH.get(getattr(func, "__name__", ""))
    packet = getattr(torch.ops.aten, func.__name__, None)
    return find_written_by(func.__name__, [] if packet is None else list_overloads(packet))


def find_written_by(name: str, overloads: list[OpOverload[Any, Any]]) -> WrittenArguments | None:
    """What an operator of torch's changes besides."""
    return _IN_TORCH.get(name) or _find_marked(overloads)


def _find_flag(func: Any) -> WrittenArguments | None:
    """The first argument of `relu(x, inplace=True)` and its like."""
    if not isinstance(func, FunctionType):
        return None
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    if "inplace" not in names:
        return None
    return WrittenArguments(
        ((0, names[0]),), (names.index("inplace"), "inplace", False), counted=True
    )


def list_overloads(packet: OpOverloadPacket[Any, Any]) -> list[OpOverload[Any, Any]]:
    """All forms of an operator."""
    return [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]


def _find_marked(overloads: list[OpOverload[Any, Any]]) -> WrittenArguments | None:
    """Arguments that a schema marks as written; `out` arguments are seen on their own."""
    found = {
        (index, argument.name): None
        for overload in overloads
        for index, argument in enumerate(overload._schema.arguments)
        if argument.is_write and not argument.kwarg_only
    }
    return WrittenArguments(tuple(found)) if found else None


@cache
def writes_uncounted(name: str) -> bool:
    """Whether version counters may not tell what an operator of this name changes.

    They count changes of the first argument of `add_` and its like. Whether they count others
    differs: not the statistics of a norm, nor what `GradScaler` finds.
    """
    packet = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    also = None if packet is None else _find_marked(list_overloads(packet))
    return name in _IN_TORCH or (also is not None and also.arguments != ((0, "self"),))
