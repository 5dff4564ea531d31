"""Soundings: a number out of a tensor that is used as a size gets a symbol.

`n = int(lengths.max())`, then `x[:, :n]`, or `torch.ones(len(x[mask]))`: shapes depend on the
number, so the guard function must know it before the graph runs. Where a few calls lead from the
inputs to the tensor, the guard function makes these calls first (`Sounder` in validity/probes.py),
and takes the number for one that was passed. Only numbers that proved to vary are left open in this
way; others are closed.
"""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from torch import fx

from tripwire.ranges import SourceRange
from tripwire.tracing.branches import Branch
from tripwire.tracing.open.opening import Opening, spell_taken
from tripwire.tracing.result import is_random
from tripwire.tracing.state import TracingState
from tripwire.values.numbers import is_open, is_taken

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow

LARGEST_SOUNDING = 128  # calls that lead to a number


class Sounding(Struct, frozen=True):
    """A number that is computed before a call."""

    label: str  # its name in conditions
    branch: Branch  # how it was taken out of its tensor


class Soundings:
    """Of one run."""

    def __init__(self, shadow: Shadow, state: TracingState, opening: Opening) -> None:
        self._shadow: Shadow = weakref.proxy(shadow)  # which has this
        self._state = state
        self._opening = opening
        self._taken: dict[int, tuple[object, fx.Node, SourceRange]] = {}  # alive
        self.made: list[Sounding] = []
        self.seen: dict[str, list[int | float]] = {}  # numbers that were taken, by line
        self._varying: set[str] = set()  # lines

    def note_taken(self, number: Any, tensor: torch.Tensor, where: SourceRange) -> None:
        """A number was taken out of a tensor here."""
        self._taken[id(number)] = number, self._state.node_of(tensor), where
        line, value = where.short, number.value
        seen = self.seen.setdefault(line, [])
        if self._opening.takes_another(line, len(seen), value):
            self._varying.add(line)
        seen.append(value)

    def sound(self, number: Any) -> bool:
        """Give a number that a call takes for a size a symbol, if it may have one."""
        if not is_taken(number) or not self._may_sound(number):
            return False
        self._open(number)
        return not is_taken(number)

    def _may_sound(self, number: Any) -> bool:
        """Whether all that it was computed from can be known before a call."""
        if self._shadow.is_asked(number):
            return False
        if number.made is not None:
            return all(map(self._may_sound, filter(is_taken, number.made[1:])))
        _, node, where = self._taken[id(number)]
        return where.short in self._varying and _is_near(node)

    def _open(self, number: Any) -> None:
        if number.made is None:
            self._open_taken(number)
            return
        function, *operands = number.made
        for operand in filter(is_taken, operands):
            self._open(operand)
        if any(map(is_taken, operands)):
            return
        # Arithmetic asks whether divisors are zero, which is for compiled code to know.
        compute = function if function in _ARITHMETIC else self._compute
        self._name(number, compute(*operands) if compute is function else compute(number))

    def _compute(self, number: Any) -> Any:
        return self._shadow.compute(number.made, number.value)

    def _open_taken(self, number: Any) -> None:
        _, node, where = self._taken[id(number)]
        path = spell_taken(where.short)
        while path in self._shadow.numbers:
            path += "'"
        opened = self._shadow.open_number(number.value, path)
        if opened is not None:
            branch = Branch(
                *("sounding", torch.Tensor.item, (node,), (node,), {}, number.value, where),
                self._state.scopes.current,
            )
            self.made.append(Sounding(self._shadow.numbers[path].label, branch))
        self._name(number, opened)

    def _name(self, number: Any, opened: Any) -> None:
        """From now on a number is what an open one is."""
        if is_open(opened) and not is_taken(opened):
            number.symbol, number.node = opened.symbol, opened.symbol.node
            self._shadow.formulas.forget_node(number)

    def end(self) -> None:
        """Let go of the run's numbers."""
        self._taken.clear()

    def forget(self) -> None:
        """Let go of the run: compiled code may keep this."""
        del self._state


_ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod}
    | {operator.pow, operator.neg, operator.pos, operator.abs}
)


def _is_near(node: fx.Node) -> bool:
    """Whether few calls lead to a node, and none that draws."""
    found, left = {node}, [node]
    while left and len(found) <= LARGEST_SOUNDING:
        one = left.pop()
        if one.op != "placeholder" and is_random(one):
            return False
        fresh = set(one.all_input_nodes) - found
        found |= fresh
        left += fresh
    return not left
