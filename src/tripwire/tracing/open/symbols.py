"""Symbols: what stands for the open numbers of a run, in a shape environment of torch's.

Each symbol is a size, a stride or a number of the call: it has an expression that gives its value
on another call, in the guard function's words, and a place that users know.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, uninteresting_files
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from tripwire.imports import import_dynamo
from tripwire.tracing.open.opening import Place, spell_place
from tripwire.values.classes import FLOATS, is_exactly, isinstance
from tripwire.values.identity import same_plain
from tripwire.values.numbers import LARGEST_SHIFT, OpenInt, is_numpys, is_open, plain


class _NotingEnvironment(ShapeEnv):
    """One that remembers whose value somebody needed, and not only the answer to a question."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.needed: set[Any] = set()

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        if sym_node.pytype is not bool:
            self.needed |= sym_node.expr.free_symbols
        return super().evaluate_sym_node(sym_node, *args, **kwargs)


class Symbols:
    """The symbols of one run, and how to find their values on another call."""

    def __init__(self, *, takes: bool) -> None:
        import_dynamo()
        from torch._dynamo.source import ConstantSource

        uninteresting_files()  # so does torch's first decision about a symbol, through this
        self.name_source = ConstantSource
        forget_environments()  # of runs that came to nothing
        # Sizes that are equal by chance may differ, and what values decide on is no size.
        self.env = _NotingEnvironment(
            duck_shape=False, allow_scalar_outputs=takes, allow_dynamic_output_shape_ops=False
        )
        self.closed: dict[Place, str] = {}  # what was closed, and by what
        self._places: dict[Any, Place] = {}
        self._origins: dict[Any, str] = {}  # in the guard function's words
        self._symbols: dict[Any, Any] = {}  # as torch has them
        self._carriers: dict[type, Any] = {}
        self.computed: dict[str, Any] = {}  # floats that Python computes, by expression
        self._leaves: dict[Any, frozenset[Any]] = {}  # of those: the symbols that they come of
        self.tables: dict[str, tuple[Any, ...]] = {}  # of which an open index picks one
        self._shared: set[Any] = set()  # what was picked, and stands elsewhere in its table, too

    def make(self, value: Any, expression: str) -> Any:
        """A symbol for an int or a float that an expression gives."""
        source = self.name_source(expression)
        symbol = self.env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        make: Any = self.env.create_symintnode
        if is_exactly(value, *FLOATS):
            value, make = float(value), self.env.create_symfloatnode
        return make(symbol, hint=value, source=source)

    def bound(self, symbol: Any, least: int, most: int) -> None:
        """No call has an int beyond these."""
        self.env.var_to_range[symbol.node.expr] = ValueRanges(least, most)

    def find_carrier(self, kind: type) -> Any:
        """A symbol that is there only because torch wants one."""
        if kind not in self._carriers:
            self._carriers[kind] = self.make(kind(3), f"taken_{kind.__name__}")
        return self._carriers[kind]

    @property
    def carriers(self) -> tuple[Any, ...]:
        """Symbols that stand for no number of the call."""
        return tuple(self._carriers.values())

    def compute(self, made: tuple[Any, ...], value: float) -> Any:
        """A symbol of its own for what Python computes with floats.

        An expression of torch's takes sums in another order, which gives another float.
        """
        text = self.print_made(made)
        if text not in self.computed:
            symbol = self.computed[text] = self.make(value, text)
            self.note(symbol, text)
            operands = [o.symbol.node.expr for o in made[1:] if is_open(o)]
            leaves = (self.leaves_of(expr.free_symbols) for expr in operands)
            self._leaves[symbol.node.expr] = frozenset().union(*leaves)
            if made[0] is operator.getitem and made[1].count(value) > 1:
                self._shared.add(symbol.node.expr)
        return self.computed[text]

    def is_computed(self, expr: Any) -> bool:
        """Whether Python computes it, from floats."""
        return expr in self._leaves

    def leaves_of(self, symbols: Iterable[Any]) -> frozenset[Any]:
        """The symbols of the call that these are, or were computed from."""
        return frozenset().union(*(self._leaves.get(one, frozenset({one})) for one in symbols))

    def note(self, symbol: object, expression: str, place: Place | None = None) -> None:
        """Remember where a symbol's value comes from."""
        expr = expression_of(symbol)
        if not isinstance(expr, int) and expr.is_Symbol:
            self._origins.setdefault(expr, expression)
            self._symbols.setdefault(expr, symbol)
            if place is not None:
                self._places.setdefault(expr, place)

    def origin_of(self, expr: Any) -> str:
        """The expression that gives a symbol's value."""
        return self._origins[expr]

    def is_of_call(self, expr: Any) -> bool:
        """Whether it stands for something of a call, and isn't there for torch alone."""
        return expr in self._origins

    def symbol_of(self, expr: Any) -> Any:
        """A symbol as torch has it."""
        return self._symbols[expr]

    def note_closed(self, symbols: Iterable[Any], why: str) -> None:
        """These are fixed from now on; not the index of a number that a list has twice."""
        for place in self._places_of(set(symbols) - self._shared):
            self.closed.setdefault(place, why)

    def is_news(self, symbol: Any) -> bool:
        """Whether something that it is computed from isn't known to be closed."""
        return any(place not in self.closed for place in self._places_of({symbol}))

    def _places_of(self, symbols: Iterable[Any]) -> list[Place]:
        found = map(self._places.get, self.leaves_of(symbols))
        return [place for place in found if place is not None]

    def find_needed(self, expr: Any) -> list[Any]:
        """Symbols of an expression that are fixed because a torch call needed their value."""
        needed = self.env.needed & expr.free_symbols
        return [symbol for symbol in needed if not self.env.replace(symbol).free_symbols]

    def count_operations(self, symbol: Any) -> int:
        """How long the expression is that gives a number."""
        expr = symbol.node.expr
        count: int = self._origins.get(expr, "").count("(") + expr.count_ops()
        return count

    def find_fixed(self) -> dict[Place, Any]:
        """What was to be open, and is fixed: its symbol."""
        return {
            place: symbol
            for symbol, place in self._places.items()
            if not self.env.replace(symbol).free_symbols
        }

    def find_open(self) -> dict[Place, Any]:
        """What is still open: its symbol."""
        return {
            place: symbol
            for symbol, place in self._places.items()
            if self.env.replace(symbol).free_symbols
        }

    def list_open(self) -> tuple[str, ...]:
        """What is still open, each with its symbol, for people."""
        return tuple(f"{spell_place(*p)} = {symbol}" for p, symbol in self.find_open().items())

    def name(self, symbol: Any) -> str:
        """What users call a symbol, or a float that is computed from some."""
        if symbol in self._places:
            return spell_place(*self._places[symbol])
        places = {self._origins[one]: place for one, place in self._places.items()}
        words = re.split(r"(\w+)", self._origins[symbol])
        return "".join(spell_place(*places[w]) if w in places else w for w in words)

    def print(self, number: Any) -> str:
        """A number in the guard function's words."""
        if is_open(number) and number.made is None and is_open_symbol(number.symbol):
            return f"({_Printer(self._origins).doprint(number.symbol.node.expr)})"
        return self._compose(number, self.print)

    def spell(self, number: Any) -> str:
        """A number by its symbols, as `list_open` has them."""
        if is_open(number) and number.made is None and is_open_symbol(number.symbol):
            return spell_expression(number.symbol.node.expr)
        return self._compose(number, self.spell)

    def print_made(self, made: tuple[Any, ...]) -> str:
        """What is to be computed, in the guard function's words."""
        return _spell(made, self.print)

    def spell_made(self, made: tuple[Any, ...]) -> str:
        """What is to be computed, with symbols for open numbers."""
        return _spell(made, self.spell)

    def _name_table(self, numbers: tuple[Any, ...]) -> str:
        """What the guard function calls numbers of which it picks one."""
        known = (name for name, one in self.tables.items() if same_plain(one, numbers))
        name = next(known, f"table{len(self.tables)}")
        self.tables[name] = numbers
        return name

    def _compose(self, number: Any, write: Callable[[Any], str]) -> str:
        if is_exactly(number, tuple):
            return self._name_table(number)
        if not is_open(number) or not is_open_symbol(number.symbol):
            value = plain(number)
            text = repr(float(value)) if is_numpys(value) else repr(value)
            return f"numpy.float64({text})" if is_numpys(value) else text
        return _spell(number.made, write)


def _spell(made: tuple[Any, ...], write: Callable[[Any], str]) -> str:
    operands = tuple(map(write, made[1:]))
    is_whole = made[0] is operator.pow and all(is_exactly(o, int, OpenInt) for o in made[1:])
    form = _POWER_OF_TWO_INTS if is_whole else _SPELLED.get(made[0])
    if form is not None:
        return form.format(*operands)
    module = "math." if made[0].__module__ == "math" else ""  # or of builtins
    module = "numpy." if is_of_numpy(made[0]) else module
    return f"{module}{made[0].__name__}({', '.join(operands)})"


def is_of_numpy(function: Any) -> bool:
    """Whether NumPy has this function under its name."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and getattr(numpy, function.__name__, None) is function


_SPELLED = {
    operator.add: "({} + {})",
    operator.sub: "({} - {})",
    operator.mul: "({} * {})",
    operator.truediv: "({} / {})",
    operator.floordiv: "({} // {})",
    operator.mod: "({} % {})",
    operator.pow: "({} ** {})",
    operator.neg: "(-{})",
    operator.pos: "(+{})",
    operator.abs: "abs({})",
    operator.getitem: "{}[{}]",
    operator.and_: "({} & {})",
    operator.or_: "({} | {})",
    operator.xor: "({} ^ {})",
    operator.lshift: f"({{}} << min({{}}, {LARGEST_SHIFT}))",  # a decision excludes larger ones
    operator.rshift: "({} >> {})",
}
_POWER_OF_TWO_INTS = f"(({{}}) ** min({{}}, {LARGEST_SHIFT}))"


# Python computes these of ints, too: torch's algebra has nothing like them.
BY_PYTHON = frozenset(
    {operator.getitem, min, max, operator.and_, operator.or_, operator.xor}
    | {operator.lshift, operator.rshift, operator.pow, math.gcd, math.lcm, math.isqrt}
)


class _Printer(PythonPrinter):
    """Writes expressions as Python, symbols by where they come from."""

    def __init__(self, origins: dict[Any, str]) -> None:
        super().__init__()
        self._origins = origins

    def _print_Symbol(self, expr: Any) -> str:  # noqa: N802
        return self._origins[expr]


def spell_expression(expr: Any) -> str:
    """An expression of torch's as Python, by symbols."""
    spelled: str = PythonPrinter().doprint(expr)
    return spelled


def forget_environments() -> None:
    """Empty the caches that torch keeps for all shape environments: they hold each for ever."""
    for member in vars(ShapeEnv).values():
        clear = getattr(member, "cache_clear", None)
        if clear is not None:
            clear()


def is_open_symbol(symbol: object) -> bool:
    """Whether it is a symbol that isn't fixed."""
    is_symbol = isinstance(symbol, (torch.SymInt, torch.SymFloat))
    return is_symbol and bool(symbol.node.expr.free_symbols)  # type: ignore[attr-defined]


def is_exact(question: Any) -> bool:
    """Whether a question computes with no floats: torch's algebra of them isn't Python's."""
    is_leaf = question.is_Symbol or question.is_Number
    is_kind = is_leaf or question.is_integer or question.is_Relational or question.is_Boolean
    return is_kind and all(map(is_exact, question.args))


def expression_of(symbol: Any) -> Any:
    """What torch knows of a symbol; a plain number as it is."""
    return symbol.node.expr if isinstance(symbol, (torch.SymInt, torch.SymFloat)) else symbol
