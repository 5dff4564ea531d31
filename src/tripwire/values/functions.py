"""Functions of NumPy's and of torch's that take open numbers, and leave them open.

NumPy asks an argument that it doesn't know for `__array_ufunc__` and `__array_function__`. A number
comes out where every argument is a number, or holds plain ones only. The guard function calls the
same function, so it gets the same bits. Whatever else NumPy is asked closes the numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from tripwire.values.classes import FLOATS, is_exactly
from tripwire.values.numbers import (
    OpenFloat,
    OpenInt,
    attempt,
    close_values,
    find_ledger,
    is_numpys,
    is_open,
    is_taken,
    iter_leaves,
    may_be_open,
    of_run,
)

# --- NumPy's: `np.exp(-0.1 * step)`, `np.interp(step, [0, 10], [1.0, 0.1])` ---

_LONGEST = 64  # numbers of a list


def _compute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives, as an open number where it is a float of NumPy's."""
    ledger = find_ledger(*args)
    operands = tuple(map(_operand, args))
    if ledger is None or kwargs or None in operands or any(map(is_taken, args)):
        return _call_closed(function, args, kwargs)
    value = attempt(function, *operands)
    if not (is_numpys(value) and may_be_open(value)) or not ledger.can_call(function):
        _close(args, function.__name__)
        return value
    return ledger.compute((function, *(of_run(ledger, one) for one in operands)), value)


def _operand(value: Any) -> Any:
    """A number, or a tuple of plain ones; None: anything else."""
    if is_open(value) or is_exactly(value, int, bool, *FLOATS):
        return value
    is_list = is_exactly(value, list, tuple) and len(value) <= _LONGEST
    return tuple(value) if is_list and all(is_exactly(v, int, *FLOATS) for v in value) else None


def _call_closed(function: Any, args: Any, kwargs: Any) -> Any:
    _close((args, kwargs), function.__name__)
    return function(*close_values(args), **close_values(kwargs))


def _close(given: Any, by: str) -> None:
    for number in filter(is_open, iter_leaves(given)):
        if number.ledger.is_live():
            number.ledger.close(number, by)


def _array_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    if method == "__call__":
        return _compute(ufunc, inputs, kwargs)
    return _call_closed(getattr(ufunc, method), inputs, kwargs)


def _array_function(self: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return _compute(function, args, kwargs)


def _install(cls: Any) -> None:
    cls.__array_ufunc__ = _array_ufunc
    cls.__array_function__ = _array_function


_install(OpenInt)
_install(OpenFloat)


# --- torch's functions of numbers ---------------------------------------------------------------
# They take an open number for a symbol, and give symbols. What they do with plain numbers leaves
# open ones open.


def _sym_max(left: Any, right: Any) -> Any:
    return _promote(right if right > left else left, left, right)


def _sym_min(left: Any, right: Any) -> Any:
    return _promote(right if right < left else left, left, right)


def _promote(number: Any, *operands: Any) -> Any:
    return float(number) if any(is_exactly(one, *FLOATS, OpenFloat) for one in operands) else number


def _sym_ite(condition: Any, found: Any, otherwise: Any) -> Any:
    return found if condition else otherwise


_SYM_MATH = "sqrt cos cosh sin sinh tan tanh asin acos atan log2"
OF_NUMBERS: dict[object, Callable[..., Any]] = {
    torch.sym_max: _sym_max,
    torch.sym_min: _sym_min,
    torch.sym_sum: sum,
    torch.sym_ite: _sym_ite,
    torch.sym_not: operator.not_,
    torch.sym_float: float,
    torch.sym_int: int,
    **{getattr(torch, f"_sym_{name}"): getattr(math, name) for name in _SYM_MATH.split()},
}
