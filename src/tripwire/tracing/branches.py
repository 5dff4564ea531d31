"""Branches: a tensor's value that Python used. The trace holds for that value only."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from tripwire.ranges import Scope, SourceRange


class TracerWarning(torch.jit.TracerWarning):  # type: ignore[name-defined,misc]  # untyped
    """The trace holds only for a value that this run met, or leaves out a write of the run."""


HOOKS = "hooks"  # the `op` of a branch that asks whether tensors have hooks


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One value taken out of a tensor: which call took it, from what, and what it was."""

    op: str  # `item`, `__bool__`, `tolist`, `shape`, ...
    take: Callable[..., object]  # takes the value out again, from the same arguments
    inputs: tuple[fx.Node, ...]  # the tensors that it was taken from
    args: tuple[fx.node.Argument, ...]
    kwargs: dict[str, fx.node.Argument]
    value: object
    where: SourceRange
    scope: Scope
    writes: int = 0  # calls before this one that changed a tensor in place
    instead: tuple[Branch, ...] = ()  # values that settle this one, where it is a size

    def __str__(self) -> str:
        text = repr(self.value)
        text = text if len(text) <= 60 else text[:57] + "..."
        taken = ", ".join(node.name for node in self.inputs)
        return f"{self.op}({taken}) = {text} at {self.where.short}"


# What Python does with a tensor, in words that a reader of the warning knows.
_VERBS = {
    "__bool__": "Python asks whether a tensor is true",
    "is_nonzero": "Python asks whether a tensor is true",
    "__int__": "Python takes an int out of a tensor",
    "__index__": "Python takes an index out of a tensor",
    "__float__": "Python takes a float out of a tensor",
    "__complex__": "Python takes a complex number out of a tensor",
    "item": "Python takes a number out of a tensor",
    "tolist": "Python takes a list out of a tensor",
    "numpy": "Python takes a NumPy array out of a tensor",
    "__array__": "Python takes a NumPy array out of a tensor",
    "__contains__": "Python looks for a value in a tensor",
    "unbind": "Python iterates over a tensor whose size depends on values",
}


def warn_of(branch: Branch) -> None:
    """Warn at the user's line that the trace holds for this value."""
    verb = _VERBS.get(
        branch.op, f"Python uses the result of `{branch.op}`, which depends on values"
    )
    place = branch.where.place
    message = f"{verb}. This trace holds for the value of this run only: {branch}"
    if place is None:
        warnings.warn(message, TracerWarning, stacklevel=2)
    else:
        warnings.warn_explicit(message, TracerWarning, place.file, place.line)
