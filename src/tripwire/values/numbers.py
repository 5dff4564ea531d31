"""Open numbers: ints and floats of a run whose value may differ on the next call.

An open number *is* a torch.SymInt or torch.SymFloat, so that torch takes it as an argument, and
*says* that it is an int or a float: `isinstance` is True. Arithmetic gives open numbers. A
comparison gives this run's answer, and is noted as a decision. Whatever else needs the value
*closes* the number: from then on it is this value. In other threads, and after the run, it behaves
as a plain number.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

import torch

from tripwire.env import is_own_code
from tripwire.values.classes import (
    FLOATS,
    NUMPY_FLOAT,
    is_exactly,
    is_namedtuple,
    isinstance,
    name_after,
)
from tripwire.values.identity import same_plain
from tripwire.values.members import add_members

Symbol = torch.SymInt | torch.SymFloat
Number = int | float
# How a number was computed: the function and what it got. None: it was there.
Made = tuple[Any, ...] | None


class Ledger(Protocol):
    """Who keeps the numbers of a run."""

    def is_live(self) -> bool:
        """Whether the run goes on, in this thread."""

    def compute(self, made: tuple[Any, ...], value: Number) -> Any:
        """What comes of a function and its operands, as an open number where it is one."""

    def can_call(self, function: Any) -> bool:
        """Whether guards can call a function of NumPy's."""

    def sound(self, number: OpenInt) -> bool:
        """Give a number out of a tensor a symbol, if it can be computed before a call."""

    def close(self, number: OpenInt | OpenFloat, by: str) -> None:
        """The number is its value from now on."""

    def show(self, number: OpenInt | OpenFloat, asks: str, form: str, frame: FrameType) -> None:
        """A frame calls a method that texts are made with: that closes the number.

        Unless only a printed text gets it.
        """

    def decide(self, compare: Any, left: object, right: object, answer: bool) -> bool:
        """Note how a question of the program's was answered."""


def is_open(value: object) -> bool:
    """Whether a value is an open number."""
    cls = type(value)
    return cls is OpenInt or cls is OpenFloat


def is_taken(value: object) -> bool:
    """Whether a number was taken out of a tensor, or computed with one that was.

    It has no symbol: only the graph knows its value on another call.
    """
    return is_open(value) and is_exactly(value.symbol, int, float)  # type: ignore[attr-defined]


def plain(value: Any) -> Any:
    """The value of an open number; all else as it is."""
    return value.value if is_exactly(value, OpenInt, OpenFloat) else value


def symbolic(value: Any) -> Any:
    """The symbol of an open number; all else as it is."""
    return value.symbol if is_exactly(value, OpenInt, OpenFloat) else value


def find_ledger(*values: Any) -> Ledger | None:
    """Who keeps the numbers of the run that goes on, if some of these are among them."""
    ledgers = (value.ledger for value in values if is_open(value))
    return next((ledger for ledger in ledgers if ledger.is_live()), None)


def of_run(ledger: object, value: Any) -> Any:
    """A value; a number of another run, which is over, as the plain one that it is by now."""
    return value.value if is_open(value) and value.ledger is not ledger else value


def holds_numbers(value: object) -> bool:
    """Whether it is an int or a float that may be left open, or a tuple with some in it."""
    if is_exactly(value, int, *FLOATS):
        return True
    if not issubclass(type(value), tuple):
        return False
    return is_taken_apart(value) and any(map(holds_numbers, tuple.__iter__(value)))  # type: ignore[arg-type]


def is_taken_apart(value: object) -> bool:
    """Whether it is a tuple of Python's own, or a named one."""
    return is_exactly(value, tuple) or is_namedtuple(type(value))


def spell_items(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What a tuple holds, with paths as users and guards spell them."""
    fields = None if is_exactly(value, tuple) else type(value)._fields
    for index, item in enumerate(tuple.__iter__(value)):
        yield f"{path}[{index}]" if fields is None else f"{path}.{fields[index]}", item


def iter_numbers(value: Any, path: str) -> Iterator[tuple[str, Number]]:
    """The ints and floats that a value is, or holds in tuples, with their paths."""
    if is_exactly(value, int, *FLOATS):
        yield path, value
    elif is_taken_apart(value):
        for step, item in spell_items(value, path):
            yield from iter_numbers(item, step)


def are_variants(left: Any, right: Any) -> bool:
    """Whether two values are one but for the ints and floats in them, which are of one type."""
    if type(left) is not type(right):
        return False
    if is_taken_apart(left):
        return len(left) == len(right) and all(map(are_variants, left, right))
    return is_exactly(left, int, *FLOATS) or left is right or bool(same_plain(left, right))


class _OffTheRun:
    """`__torch_function__` of an open number outside of its run: gives torch the plain number.

    In the run itself the recorder does that. Without either, torch would read a number like 7777777
    out of a symbol. Other threads use this, and code that kept a number in a C object.
    """

    def __get__(self, number: Any, cls: type) -> Callable[..., Any]:
        if number is not None and number.ledger.is_live():
            raise AttributeError("__torch_function__")
        return _call_with_plain


def _call_with_plain(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*close_values(args), **close_values(kwargs or {}))


def _is_number(value: object) -> bool:
    return is_exactly(value, int, bool, *FLOATS, OpenInt, OpenFloat)


def is_numpys(value: object) -> bool:
    """Whether a number is a float of NumPy's, open or plain."""
    return NUMPY_FLOAT is not float and is_exactly(plain(value), NUMPY_FLOAT)


def _operand(ledger: object, value: Any) -> Any:
    """What a number is in a computation of a run: `True` is 1, which symbols don't know."""
    return int(value) if is_exactly(value, bool) else of_run(ledger, value)


class _Open:
    """What every open number has."""

    __slots__ = ("__weakref__", "ledger", "made", "node", "symbol", "value")
    symbol: Symbol
    value: Number
    ledger: Ledger
    made: Made
    __torch_function__ = _OffTheRun()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """For tripwire an open number; for the user's `type(n)(x)` what int or float gives."""
        if not is_own_code(sys._getframe(1).f_code):
            return (int if issubclass(cls, torch.SymInt) else float)(*args, **kwargs)
        number = super().__new__(cls)
        number._fill(*args)
        return number

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """It is filled by now; `type(n)(n)` may be another number that is open."""

    def _fill(
        self, symbol: Any, value: Number, ledger: Ledger, made: Made = None, carrier: Any = None
    ) -> None:
        node = (symbol if carrier is None else carrier).node  # which torch looks for
        for slot, kept in zip(_SLOTS, (ledger, made, node, symbol, value), strict=True):
            slot.__set__(self, kept)  # nobody else can set anything


_SLOTS = [vars(_Open)[name] for name in ("ledger", "made", "node", "symbol", "value")]


def take_symbol(number: OpenInt | OpenFloat, symbol: Symbol) -> None:
    """Give a number that was taken out of a tensor the symbol that it got."""
    _, _, node, slot, _ = _SLOTS
    node.__set__(number, symbol.node)
    slot.__set__(number, symbol)


class OpenInt(_Open, torch.SymInt):
    """An int that isn't fixed."""

    __dict__ = property(lambda self: self.value.__dict__)  # an int has none
    __class__ = property(lambda self: int)


class OpenFloat(_Open, torch.SymFloat):
    """A float that isn't fixed; its value is one of Python's or of NumPy's, and says so."""

    __dict__ = property(lambda self: self.value.__dict__)  # an int has none
    __class__ = property(lambda self: type(self.value))

    def __getattr__(self, name: str) -> Any:
        if name == "item" and is_numpys(self):
            return lambda: self.ledger.compute((float, self), float(self.value))
        if hasattr(self.value, name) and self.ledger.is_live():
            self.ledger.close(self, name)
        return getattr(self.value, name)


# --- arithmetic --------------------------------------------------------------------------------


def _arithmetic(name: str, *, is_reflected: bool) -> Callable[[Any, Any], Any]:
    compute = getattr(operator, name)

    divides = name in ("truediv", "floordiv", "mod")

    def method(self: Any, other: Any) -> Any:
        left, right = (other, self) if is_reflected else (self, other)
        if not _is_number(other):
            return _close_for(self, other, name, lambda: compute(plain(left), plain(right)))
        value = attempt(compute, left, right)
        ledger = find_ledger(self, other)
        if ledger is None:
            return value
        left, right = _operand(ledger, left), _operand(ledger, right)
        if is_taken(left) or is_taken(right):
            return ledger.compute((compute, left, right), value)
        # Compiled code would give infinity, or end the process; NumPy's floats give infinity.
        if divides and is_open(right) and right.value != 0:
            ledger.decide(operator.ne, right, 0, True)
        if not may_be_open(value) or not all(map(_is_finite, (plain(left), plain(right)))):
            return _close_all(self, other, name, value)
        return ledger.compute((compute, left, right), value)

    return method


def _bitwise(name: str, *, is_reflected: bool) -> Callable[[Any, Any], Any]:
    compute = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        left, right = (other, self) if is_reflected else (self, other)
        if not is_exactly(other, int, bool, OpenInt):
            return _close_for(self, other, name, lambda: compute(plain(left), plain(right)))
        value = attempt(compute, left, right)
        ledger = find_ledger(self, other)
        if ledger is None:
            return value
        left, right = _operand(ledger, left), _operand(ledger, right)
        if is_taken(left) or is_taken(right) or not _stays_small(ledger, compute, right):
            return _close_all(self, other, name, value)
        return ledger.compute((compute, left, right), value)

    return method


def _no_shift(name: str, *, is_reflected: bool) -> Callable[[Any, Any], Any]:
    """Torch's symbols of floats have shifts; no float has. NumPy's say so in their own words."""
    compute = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not is_numpys(self):
            return NotImplemented
        return attempt(compute, *((other, self) if is_reflected else (self, other)))

    return method


def _stays_small(ledger: Ledger, compute: Any, right: Any) -> bool:
    """Whether a shift, or a power, is by few bits; of an open one that is decided."""
    if compute in (operator.lshift, operator.pow) and is_open(right):
        return ledger.decide(operator.le, right, LARGEST_SHIFT, right.value <= LARGEST_SHIFT)
    return True


LARGEST_SHIFT = 64


def _divmod(*, is_reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        left, right = (other, self) if is_reflected else (self, other)
        if not _is_number(other):
            return _close_for(self, other, "divmod", lambda: divmod(plain(left), plain(right)))
        both = attempt(divmod, left, right)
        return both if find_ledger(left, right) is None else (left // right, left % right)

    return method


def may_be_open(value: Any) -> bool:
    """Whether something that was computed may be an open number.

    A shape environment knows neither nan nor infinity.
    """
    return is_exactly(value, int) or (is_exactly(value, *FLOATS) and math.isfinite(value))


def _power(*, is_reflected: bool) -> Callable[..., Any]:
    """Symbols have powers of natural numbers alone; of floats Python computes them."""
    open_power = _arithmetic("pow", is_reflected=is_reflected)

    def method(self: Any, other: Any, modulus: Any = None) -> Any:
        base, exponent = (other, self) if is_reflected else (self, other)
        if modulus is not None or not _is_number(other):
            mine = (plain(base), plain(exponent), plain(modulus))
            return _close_for(self, other, "pow", lambda: pow(*mine))
        ledger = find_ledger(self, other)
        if ledger is not None and (is_taken(self) or is_taken(other)):
            made = (operator.pow, _operand(ledger, base), _operand(ledger, exponent))
            value = attempt(operator.pow, base, exponent)
            if is_exactly(value, int, float):
                return ledger.compute(made, value)
        natural = is_exactly(exponent, int) and 0 <= exponent <= _LARGEST_POWER
        if natural and is_exactly(base, OpenInt):
            return open_power(self, other)
        if ledger is not None and is_exactly(base, int) and is_exactly(exponent, OpenInt):
            return _power_of_int(ledger, base, of_run(ledger, exponent))
        if ledger is not None and (_is_float(base) or _is_float(exponent)):
            if not _is_float(exponent):
                return open_power(self, other)
            if plain(base) > 0:  # or it may be a complex number
                if is_open(base):
                    ledger.decide(operator.gt, of_run(ledger, base), 0, True)
                return open_power(self, other)
        return _close_all(self, other, "pow", attempt(operator.pow, base, exponent))

    return method


_LARGEST_POWER = 8


def _power_of_int(ledger: Ledger, base: int, exponent: Any) -> Any:
    """What Python gives of an open exponent: an int, or a float where that is negative."""
    value = attempt(operator.pow, base, exponent)
    if not is_open(exponent):
        return value
    if ledger.decide(operator.ge, exponent, 0, exponent.value >= 0):
        if _stays_small(ledger, operator.pow, exponent):
            return ledger.compute((operator.pow, base, exponent), value)
    elif 0 < base <= _LARGEST_EXACT:
        return ledger.compute((operator.pow, float(base), exponent), value)
    return _close_all(exponent, None, "pow", value)


_LARGEST_EXACT = 2**53  # int that floats have all of, up to here


def _is_float(value: object) -> bool:
    return is_exactly(value, *FLOATS, OpenFloat)


def _is_finite(value: Number) -> bool:
    return math.isfinite(value) if is_exactly(value, *FLOATS) else True


def _close_for(self: Any, other: object, by: str, compute: Callable[[], Any]) -> Any:
    """What comes of a number that can't be open itself: an enum's, a complex one."""
    if not issubclass(type(other), (int, float, complex)):
        return NotImplemented
    _close_all(self, other, by, None)
    return compute()


def attempt(function: Callable[..., Any], *numbers: Any) -> Any:
    """What a function gives for plain numbers, in the place of open ones.

    Where it raises, the program may go on because of that. So a divisor was zero, or else the
    numbers are closed.
    """
    try:
        return function(*map(plain, numbers))
    except Exception as error:
        live = [one for one in numbers if is_open(one) and one.ledger.is_live()]
        divisor = numbers[-1]
        is_zero = is_exactly(error, ZeroDivisionError) and plain(divisor) == 0
        if is_zero and any(one is divisor for one in live):
            divisor.ledger.decide(operator.ne, divisor, 0, False)
        else:
            for number in live:
                number.ledger.close(number, function.__name__)
        raise


def _close_all(self: Any, other: Any, by: str, value: Any) -> Any:
    for number in (self, other):
        if is_open(number) and number.ledger.is_live():
            number.ledger.close(number, by)
    return value


def _unary(name: str) -> Callable[[Any], Any]:
    compute = getattr(operator, name)

    def method(self: Any) -> Any:
        value = compute(self.value)
        ledger: Ledger = self.ledger
        if not ledger.is_live():
            return value
        return ledger.compute((compute, self), value)

    return method


def _rounding(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    by = f"{name.strip('_')}()"

    def method(self: Any, *digits: Any) -> Any:
        value = attempt(function, self, *digits)
        ledger: Ledger = self.ledger
        if is_exactly(self, OpenInt) and digits in ((), (None,)):
            return self if ledger.is_live() else value
        if not ledger.is_live():
            return value
        is_computed = is_taken(self) or (is_exactly(self, OpenFloat) and may_be_open(value))
        if is_computed and not any(map(is_open, digits)):
            return ledger.compute((function, self, *digits), value)
        for number in (self, *digits):
            if is_open(number):
                ledger.close(number, by)
        return value

    return method


_ROUNDINGS: dict[str, Callable[..., Any]] = {
    "__round__": round,
    "__floor__": math.floor,
    "__ceil__": math.ceil,
    "__trunc__": math.trunc,
}


# --- questions ---------------------------------------------------------------------------------


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not _is_number(other):
            return _close_for(self, other, name, lambda: compare(self.value, other))
        answer = compare(self.value, plain(other))  # NumPy's floats give a bool of NumPy's
        ledger = find_ledger(self, other)
        if ledger is None:
            return answer
        is_from_tensor = is_taken(self) or is_taken(other)
        is_finite = _is_finite(plain(other)) and _is_finite(self.value)
        if not is_from_tensor and not is_finite:
            if is_exactly(self, OpenInt) and not is_open(other):
                return answer  # every int compares alike with infinity, and with nan
            return _close_all(self, other, name, answer)
        ledger.decide(compare, _operand(ledger, self), _operand(ledger, other), bool(answer))
        return answer

    return method


def _is_true(self: Any) -> bool:
    ledger: Ledger = self.ledger
    answer = bool(self.value)
    return ledger.decide(operator.ne, self, 0, answer) if ledger.is_live() else answer


# --- classes -----------------------------------------------------------------------------------


def _complete(cls: Any, base: type, arithmetic: str) -> None:
    """Give an open number every method of int or float."""
    for name in arithmetic.split():
        setattr(cls, f"__{name}__", _arithmetic(name, is_reflected=False))
        setattr(cls, f"__r{name}__", _arithmetic(name, is_reflected=True))
    cls.__divmod__ = _divmod(is_reflected=False)
    cls.__rdivmod__ = _divmod(is_reflected=True)
    cls.__pow__ = _power(is_reflected=False)
    cls.__rpow__ = _power(is_reflected=True)
    for name in ("neg", "pos", "abs"):
        setattr(cls, f"__{name}__", _unary(name))
    for name in ("and_", "or_", "xor", "lshift", "rshift") if base is int else ():
        setattr(cls, f"__{name.strip('_')}__", _bitwise(name, is_reflected=False))
        setattr(cls, f"__r{name.strip('_')}__", _bitwise(name, is_reflected=True))
    for name in ("lshift", "rshift") if base is float else ():
        setattr(cls, f"__{name}__", _no_shift(name, is_reflected=False))
        setattr(cls, f"__r{name}__", _no_shift(name, is_reflected=True))
    if base is int:
        cls.__invert__ = lambda self: -self - 1
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(cls, f"__{name}__", _comparison(name))
    for name, function in _ROUNDINGS.items():
        setattr(cls, name, _rounding(function, name))
    cls.__bool__ = _is_true
    add_members(cls, base, plain)


_complete(OpenInt, int, "add sub mul truediv floordiv mod")
_complete(OpenFloat, float, "add sub mul truediv floordiv mod")
# In the words of errors that they raise, and of code that asks for types' names or prints types.
name_after(OpenInt, int)
name_after(OpenFloat, float)


def call_unbound(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """What a method gives that was taken out of int or float, in a tuple: `int.bit_length(n)`.

    None: no number of the run that goes on is among its arguments.
    """
    if find_ledger(*args) is None:
        return None
    own, named = {int: OpenInt, float: OpenFloat}[method.__objclass__], kwargs or {}

    @functools.wraps(method)
    def call_plainly(*numbers: Any) -> Any:
        return method(*numbers, **named)

    value = attempt(call_plainly, *args)
    if value is NotImplemented:
        return (value,)
    if is_exactly(args[0], own) and not any(map(is_numpys, args)):  # it would give one of NumPy's
        value = getattr(own, method.__name__)(*args, **named)
    else:
        for number in args:
            _close_all(number, None, method.__name__, None)
    return (value,)


# --- arguments of a call ------------------------------------------------------------------------


def iter_leaves(value: Any) -> Iterator[Any]:
    """What is in the containers that torch takes as arguments."""
    left = [value]  # a stack: generators in generators took twice the time
    while left:
        value = left.pop()
        cls = type(value)
        if issubclass(cls, (tuple, list)):
            left += [*value][::-1]
        elif issubclass(cls, dict):
            left += [*value.values()][::-1]
        elif cls is slice:
            left += value.step, value.stop, value.start
        else:
            yield value


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A call's arguments with other leaves."""
    if isinstance(value, (tuple, list)):
        items = [map_leaves(item, change) for item in value]
        if is_namedtuple(type(value)):
            return type(value)(*items)
        if is_exactly(value, torch.Size) and all(is_exactly(item, int) for item in items):
            return torch.Size(items)
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: map_leaves(item, change) for key, item in value.items()}
    if is_exactly(value, slice):
        return slice(*(change(bound) for bound in (value.start, value.stop, value.step)))
    return change(value)


def close_values(value: Any) -> Any:
    """A call's arguments with plain numbers in the place of open ones; the same if it has none."""
    return map_leaves(value, plain) if any(map(is_open, iter_leaves(value))) else value
