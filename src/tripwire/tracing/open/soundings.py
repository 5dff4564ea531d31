"""Soundings: a number out of a tensor that is used as a size is computed before the graph runs.

`n = int(lengths.max())`, then `x[:, :n]`, or `torch.ones(len(x[mask]))`: shapes depend on the
number, so the guard function must know it before the graph runs. Where a few calls lead from the
inputs to the tensor, the guard function makes these calls first (`Sounder` in validity/probes.py),
and takes the number for one that was passed. Only numbers that proved to vary are left open in this
way; others are closed.

`i = torch.randint(0, 9, ()).item()`: what torch draws on the CPU is known before the call, too. The
guard function looks ahead: it makes the same draws, in the same order, with a copy of the
generator. The graph draws them from the generator itself.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from torch import fx

from tripwire.ranges import SourceRange
from tripwire.reading.tensors import TensorMeta
from tripwire.rulebook.rules import words
from tripwire.tracing.branches import Branch
from tripwire.tracing.open.opening import Opening, spell_taken
from tripwire.tracing.result import is_random, name_of
from tripwire.tracing.state import FACTS, NodeFacts, TracingState
from tripwire.values.classes import isinstance
from tripwire.values.numbers import is_open, is_taken, take_symbol

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow

LARGEST_SOUNDING = 128  # calls that lead to a number


class Sounding(Struct, frozen=True):
    """A number that is computed before a call."""

    label: str  # its name in conditions
    branch: Branch  # how it was taken out of its tensor


class Soundings:
    """The numbers of one run that are computed before a call."""

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
            take_symbol(number, opened.symbol)
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


# Calls that draw from a generator which is named, or else from the CPU's.
_DRAW = words(
    "rand randn randint randperm normal normal_ uniform_ bernoulli bernoulli_ multinomial poisson "
    "random_ exponential_ cauchy_ log_normal_ geometric_"
)


def find_draws(node: fx.Node, order: Iterable[fx.Node]) -> list[fx.Node] | None:
    """What is drawn from the CPU's generator up to a node of a graph, in the graph's order.

    None: some of it can't be drawn ahead from another generator, or isn't known.
    """
    found = []
    for one in order:
        facts: NodeFacts | None = one.meta.get(FACTS)
        if is_random(one) and one.kwargs.get("generator") is None:
            if name_of(one) not in _DRAW or not _is_small(one):
                return None
            found.append(one)
        elif facts is not None and facts.opaque:  # code of somebody's, which may draw
            return None
        if one is node:
            break
    return found


def _is_small(node: fx.Node) -> bool:
    """Whether a call makes a small tensor, on the CPU."""
    facts: NodeFacts | None = node.meta.get(FACTS)
    value = None if facts is None else facts.value
    if not isinstance(value, TensorMeta) or value.device.type != "cpu":
        return False
    return math.prod(value.shape) <= _MOST_DRAWN


_MOST_DRAWN = 4096  # numbers


def _is_near(node: fx.Node) -> bool:
    """Whether few calls lead to a node, with those that draw before one that does."""
    found, left, draws = {node}, [node], None
    while left and len(found) <= LARGEST_SOUNDING:
        one = left.pop()
        fresh = set(one.all_input_nodes)
        if one.op != "placeholder" and is_random(one) and draws is None:
            draws = find_draws(node, node.graph.nodes)
            if draws is None or one not in draws:
                return False
            fresh |= set(draws)
        fresh -= found
        found |= fresh
        left += fresh
    return not left
