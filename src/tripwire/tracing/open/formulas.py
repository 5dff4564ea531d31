"""Formulas: how compiled code computes an open number.

A number that the graph uses is a node there: an input, or computed from inputs. One that the result
or an effect holds is computed by the guard function, or from a tensor that the graph returns.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from tripwire.ranges import NOWHERE, SourceRange
from tripwire.reading.structure import ComputedPlan, NumberPlan, PartPlan, TakenPlan
from tripwire.tracing.casts import CHOICES, IN_GRAPHS, mix
from tripwire.tracing.open.opening import NUMBER, NumberInput
from tripwire.tracing.open.symbols import Symbols
from tripwire.tracing.state import FACTS, NodeFacts, TracingState
from tripwire.values.classes import is_exactly, isinstance
from tripwire.values.numbers import OpenFloat, OpenInt, is_numpys, is_open, is_taken


class Formulas:
    """Finds how the open numbers of one run are computed on another call."""

    def __init__(self, state: TracingState, symbols: Symbols) -> None:
        self._state = state
        self._symbols = symbols
        self.inputs: dict[str, NumberInput] = {}  # of the graph, before all tensors
        self.outputs: list[str] = []  # numbers that the result holds, as expressions
        self._placeholders: list[fx.Node] = []
        self._nodes: dict[object, fx.Node] = {}  # of numbers, by expression or identity
        self._kept: list[object] = []  # numbers with a node, whose identity must not come again
        # Numbers out of tensors: alive, with the tensor that has the value.
        self._taken: dict[int, tuple[Any, torch.Tensor]] = {}
        self._risks: dict[int, Any] = {}  # computed with those, and Python may fail to

    def keep(self, number: object) -> None:
        """Keep a number alive until the run is over."""
        self._kept.append(number)

    def note_taken(self, number: Any, tensor: torch.Tensor) -> None:
        """A number was taken out of a tensor, which has its value on each call."""
        self._taken[id(number)] = number, tensor

    def note_made(self, number: Any) -> None:
        """A number was computed with one out of a tensor."""
        if number.made[0] not in _SAFE:
            self._risks[id(number)] = number

    def list_risks(self) -> list[Any]:
        """Numbers that Python computes again once a graph has run: it may raise where that didn't.

        So it does with ints, which a graph has in 64 bits, and Python in as many as it takes.
        """
        kept: list[Any] = self._kept
        ints = [n for n in kept if is_taken(n) and is_exactly(n, OpenInt) and n.made is not None]
        found = self._risks | {id(number): number for number in ints}
        for number in list(found.values()):
            for one in _iter_operands(number):
                found.pop(id(one), None)
        return list(found.values())

    # --- nodes ---

    def node_of(self, number: OpenInt | OpenFloat) -> Any:
        """The node that computes a number; its value where it was closed meanwhile."""
        if is_taken(number):
            return self._find_taken_node(number)
        expr = number.symbol.node.expr
        if not expr.free_symbols:
            return number.value
        made = number.made
        key: Any = expr if made is None else id(number)
        if key not in self._nodes:
            if made is None:
                self._nodes[key] = self._spell_expression(expr, number.symbol)
            elif self._symbols.is_computed(expr):  # by Python, before the graph runs
                return self._find_input(expr, number.symbol)
            else:
                self._nodes[key] = self._describe(self._call(made), number.symbol)
                self.keep(number)
        return self._nodes[key]

    def forget_node(self, number: object) -> None:
        """A number out of a tensor got a symbol, which has a node of its own."""
        self._nodes.pop(id(number), None)

    def _find_taken_node(self, number: OpenInt | OpenFloat) -> fx.Node:
        if id(number) not in self._nodes:
            if number.made is None:
                source = self._state.node_of(self._taken[id(number)][1])
                node = self._state.graph().call_method("item", (source,))
            else:
                node = self._call(number.made)
            self._nodes[id(number)] = self._describe(node, number.value)
            self.keep(number)
        return self._nodes[id(number)]

    def _call(self, made: tuple[Any, ...]) -> fx.Node:
        operands = tuple(self.node_of(o) if is_open(o) else o for o in made[1:])
        operands = tuple(float(o) if is_numpys(o) else o for o in operands)
        function: Any = made[0]
        if any(map(is_taken, made[1:])):
            function = IN_GRAPHS.get(function, function)
        inputs = [self._find_float(o) for o in made[1:]]
        is_mixed = function is made[0] and (any(inputs) or function in CHOICES)
        if is_mixed and any(map(is_taken, made[1:])):
            function = mix(function)
            operands = tuple(i or o for i, o in zip(inputs, operands, strict=True))
        return self._state.graph().call_function(function, operands)

    def _find_float(self, number: Any) -> fx.Node | None:
        """The input that an open float is, as the tensor that it comes in."""
        if not is_exactly(number, OpenFloat) or is_taken(number):
            return None
        node = self.node_of(number)
        if not isinstance(node, fx.Node) or node.target != "item":
            return None
        found: Any = node.args[0]
        return found if found.meta.get(NUMBER) is not None else None

    def _describe(self, node: fx.Node, symbol: Any) -> fx.Node:
        node.meta[FACTS] = NodeFacts(NOWHERE, self._state.scopes.current, None, memory=())
        node.meta["example_value"] = symbol
        node.meta[NUMBER] = None
        return node

    def _spell_expression(self, expr: Any, symbol: Any) -> fx.Node:
        """Nodes for the size of a tensor that the run made."""
        if expr.is_Symbol:
            return self._find_input(expr, symbol)
        graph = self._state.graph()
        tracer = fx.proxy.GraphAppendingTracer(graph)
        found = {}
        for one in sorted(expr.free_symbols, key=str):
            found[one] = fx.Proxy(self._find_input(one, self._symbols.symbol_of(one)), tracer)
        last = next(iter(reversed(graph.nodes)))  # torch 2.11 makes no iterator of it
        proxy = sympy_interp(_AsNodes, found, expr)
        while last.next.op != "root":
            last = self._describe(last.next, None)
        return self._describe(proxy.node, symbol)

    def _find_input(self, expr: Any, symbol: Any) -> fx.Node:
        """The node of a symbol: an input of the graph."""
        if expr in self._nodes:
            return self._nodes[expr]
        graph, origin = self._state.graph(), self._symbols.origin_of(expr)
        first = next(iter(graph.nodes), None)
        if self._placeholders:
            with graph.inserting_after(self._placeholders[-1]):
                node = graph.placeholder(str(expr))
        elif first is not None:
            with graph.inserting_before(first):
                node = graph.placeholder(str(expr))
        else:
            node = graph.placeholder(str(expr))
        self._placeholders.append(self._describe(node, symbol))
        self.inputs[origin] = node.meta[NUMBER] = NumberInput(node.name, origin, symbol)
        if isinstance(symbol, torch.SymFloat):
            node = self._describe(graph.call_method("item", (node,)), symbol)
        self._nodes[expr] = node
        return node

    def pass_size(self, size: Any) -> None:
        """Make a size an input of the graph, if it is a symbol."""
        if size.node.expr.is_Symbol:
            self._find_input(size.node.expr, size)

    def find_use(self, expr: Any) -> SourceRange:
        """Where a torch call first takes a symbol, or what is computed of it."""
        left = [self._nodes[expr]] if expr in self._nodes else []
        for node in left:
            for user in node.users:
                facts: NodeFacts | None = user.meta.get(FACTS)
                if NUMBER in user.meta:
                    left.append(user)
                elif facts is not None:
                    return facts.where
        return NOWHERE

    @property
    def last_input(self) -> fx.Node | None:
        """The last of the graph's inputs that are numbers."""
        return self._placeholders[-1] if self._placeholders else None

    # --- the end of the run ---

    def plan(self, number: OpenInt | OpenFloat, plan: Callable[[object], PartPlan]) -> PartPlan:
        """How a call gets a number that the result, or an effect, holds."""
        if not is_taken(number):
            return self.plan_output(self._symbols.print(number))
        if number.made is None:
            return TakenPlan(plan(self._taken[id(number)][1]))
        return ComputedPlan(number.made[0], tuple(map(plan, number.made[1:])))

    def plan_output(self, expression: str) -> PartPlan:
        """What the guard function finds for an expression of its variables."""
        self.outputs.append(expression)
        return NumberPlan(len(self.outputs) - 1)

    def end(self) -> None:
        """Let go of the run's numbers."""
        self._kept.clear()
        self._taken.clear()
        self._risks.clear()

    def forget(self) -> None:
        """Let go of the run: compiled code may keep this."""
        del self._state


def _node_of(function: Callable[..., Any]) -> Any:
    def add(number: fx.Proxy, dtype: torch.dtype) -> fx.Proxy:
        return number.tracer.create_proxy("call_function", function, (number,), {})

    return staticmethod(add)


class _AsNodes(PythonReferenceAnalysis):
    """Spells torch's formulas of sizes as nodes.

    torch's own analysis makes a number of these, and asks a proxy for its value.
    """

    identity = staticmethod(operator.pos)
    int_truediv = staticmethod(operator.truediv)
    trunc_to_int = _node_of(math.trunc)
    floor_to_int = _node_of(math.floor)
    ceil_to_int = _node_of(math.ceil)
    round_to_int = _node_of(round)


# Python computes these of any two numbers.
_SAFE = frozenset(
    {operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs, float}
    | {min, max}
)


def _iter_operands(number: Any) -> Iterator[Any]:
    """Numbers that are computed where this one is, and whose kind it shows."""
    for operand in number.made[1:] if number.made[0] is not operator.abs else ():
        if is_taken(operand) and operand.made is not None:
            yield operand
            yield from _iter_operands(operand)
