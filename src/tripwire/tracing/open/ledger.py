"""Ledger: the open numbers of one run: what comes of them, and what Python decides by them.

It is what values/numbers.py wants. A question that the program asks is answered as in this run, and
becomes a condition of the trace. A number that something needs as a plain one is closed: it is its
value from then on. A number out of a tensor has no symbol, so whoever asks for it is asked again
before each call.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from tripwire.ranges import NOWHERE, SourceRange
from tripwire.tracing.branches import add_branch
from tripwire.tracing.open.formulas import Formulas
from tripwire.tracing.open.opening import LARGEST_OPEN, Decision, Opening
from tripwire.tracing.open.soundings import Soundings
from tripwire.tracing.open.symbols import (
    BY_PYTHON,
    Symbols,
    is_exact,
    is_of_numpy,
    is_open_symbol,
    spell_expression,
)
from tripwire.tracing.state import TracingState
from tripwire.values.classes import FLOATS, is_exactly, isinstance
from tripwire.values.numbers import Made, Number, OpenFloat, OpenInt, is_open, is_taken, symbolic

_MOST_SHOWN = 8  # members of a set
_LONGEST = 60  # operations in an expression; longer ones are closed


class RunLedger:
    """The open numbers of one run, and the answers that Python got about them."""

    soundings: Soundings

    def __init__(self, state: TracingState, opening: Opening) -> None:
        self._state = state
        self._opening = opening
        self._thread = get_ident()
        self._has_ended = False
        self.symbols = Symbols(takes=opening.takes)
        self.formulas = Formulas(state, self.symbols)
        self.decisions: list[Decision] = []
        self._conditions: dict[str, None] = {}  # about floats, in the guard function's words
        self._told = 0  # conditions that the environment had when it was last looked at
        self._handed_out: list[weakref.ref[Any]] = []
        self._at: SourceRange | None = None  # where something happened that is told later
        self._asked: set[int] = set()  # numbers out of tensors that were closed

    def is_live(self) -> bool:
        """Whether the run goes on, in this thread, in code that is observed.

        A hook isn't, nor a custom function, nor what a checkpoint runs again: each call runs those.
        """
        if self._has_ended or get_ident() != self._thread or self._state.refusal is not None:
            return False
        return not self._state.is_inside

    def compute(self, made: tuple[Any, ...], value: Number) -> Any:
        """What comes of a function and its operands, as an open number where it is one."""
        with self._state.aside():
            if any(map(is_taken, made[1:])):
                number = self._wrap_taken(value, made)
                self.formulas.note_made(number)
                return number
            of_floats = any(is_exactly(one, *FLOATS, OpenFloat) for one in (value, *made[1:]))
            if of_floats or made[0] in BY_PYTHON:
                if is_exactly(value, int) and abs(value) > LARGEST_OPEN:
                    return self._close_operands(made, value)
                if is_exactly(value, *FLOATS) and value == 0:  # no symbol knows which sign it has
                    self._note_zero(made, value)
                    return value
                symbol = self.symbols.compute(made, value)
                if is_exactly(value, int):
                    text = self.symbols.origin_of(
                        symbol.node._expr
                    )  # also where it is closed by now
                    self._conditions[f"abs({text}) <= {LARGEST_OPEN}"] = None
                return self._wrap(symbol, value, made)
            symbol = made[0](*map(symbolic, made[1:]))
            self.note_decisions()
            return self._wrap(symbol, value, made)

    def can_call(self, function: Any) -> bool:
        """Whether guards can call a function of NumPy's."""
        return is_of_numpy(function)

    def _note_zero(self, made: tuple[Any, ...], value: Number) -> None:
        """A float is zero in this run; others may come to another one."""
        condition = f"_same({self.symbols.print_made(made)}, {self.symbols.print(value)})"
        if condition not in self._conditions:
            self._conditions[condition] = None
            text = f"{self.symbols.spell_made(made)} == {value!r}"
            self.decisions.append(Decision(text, self._where()))

    def _close_operands(self, made: tuple[Any, ...], value: Number) -> Number:
        for operand in filter(is_open, made[1:]):
            self.close(operand, made[0].__name__)
        return value

    def node_of(self, number: OpenInt | OpenFloat) -> Any:
        """What a graph gets for a number: a node, or its value where it was closed."""
        return number.value if self.is_asked(number) else self.formulas.node_of(number)

    def hand_out(self, tensor: torch.Tensor, where: SourceRange) -> Any:
        """A number for a tensor of one element that is the shadow's own: nobody changes it."""
        with self._state.aside():
            number = self._wrap_taken(tensor.item(), None)
            self.formulas.note_taken(number, tensor)
            self.soundings.note_taken(number, tensor, where)
            return number

    def _wrap_taken(self, value: Any, made: Made) -> Any:
        is_float = is_exactly(value, *FLOATS)
        cls: Any = OpenFloat if is_float else OpenInt
        carrier = self.symbols.find_carrier(float if is_float else int)
        number = cls(float(value) if is_float else value, value, self, made, carrier)
        self._handed_out.append(weakref.ref(number))
        return number

    def is_asked(self, number: object) -> bool:
        """Whether a number out of a tensor was closed."""
        return id(number) in self._asked

    def _ask(self, take: Callable[..., object], numbers: tuple[Any, ...], value: object) -> None:
        """What a program made of numbers out of tensors is asked again before each call."""
        nodes = tuple(self.formulas.node_of(n) if is_open(n) else n for n in numbers)
        name = "item" if take is _itself else take.__name__
        add_branch(self._state, name, take, nodes, {}, value, self._where())

    def _wrap(self, symbol: Any, value: Any, made: Made = None) -> Any:
        if not is_open_symbol(symbol):
            return value
        cls: Any = OpenInt if isinstance(symbol, torch.SymInt) else OpenFloat
        number = cls(symbol, value, self, made)
        if self.symbols.count_operations(symbol) > _LONGEST:
            self.close(number, f"an expression of more than {_LONGEST} operations")
            return value
        self._handed_out.append(weakref.ref(number))
        return number

    def close(self, number: OpenInt | OpenFloat, by: str) -> None:
        """The number is its value from now on."""
        if not is_taken(number):
            is_computed = isinstance(number, OpenFloat) and number.made is not None
            if is_computed:
                with self._state.aside():
                    found = self._note_condition(operator.eq, number, number.value, True, by)
                    self.symbols.note_closed(number.symbol.node.expr.free_symbols, str(found))
            else:
                self._close(number.symbol, by)
        elif not self.is_asked(number):
            self._asked.add(id(number))
            self.formulas.keep(number)
            with self._state.aside():
                self._ask(_itself, (number,), number.value)

    def _close(self, symbol: Any, by: str) -> None:
        with self._state.aside():
            if is_open_symbol(symbol):
                text, value = spell_expression(symbol.node.expr), symbol.node.hint
                decision = Decision(f"{text} == {value}", self._where(), by)
                self.symbols.note_closed(symbol.node.expr.free_symbols, str(decision))
                if not bool(symbol == value):  # torch came to believe otherwise
                    self._pin(symbol.node.expr.free_symbols)
                self._told = len(self.symbols.env.guards)
                self.decisions.append(decision)

    def _pin_inexact(self, guards: Iterable[Any], by: str) -> None:
        """Let no other numbers come where torch computed with floats to answer a question."""
        for guard in guards:
            if not is_exact(guard.expr):
                decision = Decision(spell_expression(guard.expr), NOWHERE, by)
                self.symbols.note_closed(guard.expr.free_symbols, str(decision))
                self._pin(guard.expr.free_symbols)

    def _pin(self, symbols: Iterable[Any]) -> None:
        for expr in filter(self.symbols.is_of_call, symbols):
            value = self.symbols.symbol_of(expr).node.hint
            self._conditions[f"{self.symbols.origin_of(expr)} == {value!r}"] = None

    def decide(self, compare: Any, left: object, right: object, answer: bool) -> bool:
        """Note how a question of the program's was answered."""
        if is_taken(left) or is_taken(right):
            asked = (left,) if right is None else (left, right)
            with self._state.aside():
                self._ask(compare, asked, answer)
            return answer
        with self._state.aside():
            of_floats = any(is_exactly(one, *FLOATS, OpenFloat) for one in (left, right))
            if of_floats or compare is operator.contains:
                self._note_condition(compare, left, right, answer)
            else:
                assert bool(compare(symbolic(left), symbolic(right))) == answer
                self.note_decisions()
        return answer

    def _note_condition(
        self, compare: Any, left: object, right: object, answer: bool, closed_by: str = ""
    ) -> Decision:
        """A question about floats, or about members, is asked again as Python asked it."""
        if compare is operator.contains:
            sign, members = "in" if answer else "not in", left
            condition = f"{self.symbols.print(right)} {sign} {_spell_members(members)}"
            text = f"{self.symbols.spell(right)} {sign} {_spell_members(members, most=_MOST_SHOWN)}"
        else:
            sign = _SIGNS[compare]
            form = f"{{}} {sign} {{}}" if answer else f"not {{}} {sign} {{}}"
            condition = form.format(self.symbols.print(left), self.symbols.print(right))
            text = form.format(self.symbols.spell(left), self.symbols.spell(right))
        decision = Decision(text, self._where(), closed_by)
        if condition not in self._conditions:
            self._conditions[condition] = None
            self.decisions.append(decision)
        return decision

    def note_decisions(self, by: str = "") -> None:
        """What the environment was asked since the last time; by a torch call, perhaps."""
        fresh = self.symbols.env.guards[self._told :]
        self._told = len(self.symbols.env.guards)
        where = self._where() if fresh else NOWHERE
        for guard in fresh:
            needed = self.symbols.find_needed(guard.expr) if by else []
            decision = Decision(spell_expression(guard.expr), where, by if needed else "")
            self.decisions.append(decision)
            self.symbols.note_closed(needed, str(decision))

    def show(self, number: OpenInt | OpenFloat, asks: str, form: str, frame: FrameType) -> None:
        """A frame asks the number for a text, or for what is in a text."""
        outside = self._state.outside
        if outside is None or not outside.wait(self._state, number, asks, form, frame):
            self.close(number, f"{asks.strip('_')}()")

    def close_at(self, number: OpenInt | OpenFloat, by: str, where: SourceRange) -> None:
        """The same as `close`, for what happened earlier."""
        self._at = where
        try:
            self.close(number, by)
        finally:
            self._at = None

    def _where(self) -> SourceRange:
        return self._at or self._state.capture_range(2)


_SIGNS = {
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}


def _spell_members(members: Any, most: int | None = None) -> str:
    """A range, or a set, which Python makes once; for people, the first of its members."""
    if is_exactly(members, range):
        return repr(members)
    rest = ", ..." if most is not None and len(members) > most else ""
    return f"{{{', '.join(map(repr, members[:most]))}{rest}}}"


def _itself(number: object) -> object:
    return number
