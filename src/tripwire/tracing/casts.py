"""Casts: `float(t)`, `int(t)`, `len(t)`, and what `math` makes of open numbers, stay open.

`float` must return a float, and so must a tensor's `__float__`, so neither can return an open
number. Only the call can: while a run has something open, calls of the two classes go through
`_casts.c`, in the thread that runs. The classes stay the same objects for `is`, `isinstance` and
torch. Without the C module such a call closes the number.

A function behind `lru_cache` gets plain numbers, and closes them: an open number would not find
what was cached for a plain one.

What a list, a tuple or an array of numbers holds at an open index is open, too: `sigmas[i]`. The
guard function has the numbers, which are part of what the run read, and picks one.

Whether a set, a dict or a list has an open number is one question, and not one for each of its
members: `step in MILESTONES`. So is whether `SCHEDULE.get(step)` finds anything.

Functions of `math`, `len`, and `min` and `max` of floats, or of ints out of tensors, are handled in
the same way, under whatever name they were imported: they stay the same objects. So are methods
that are called on the class: `int.bit_length(n)`.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodDescriptorType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode

from tripwire.imports import find_native
from tripwire.rulebook.rules import Target
from tripwire.tracing.open.draws import draw
from tripwire.tracing.recorder import Recorder
from tripwire.tracing.state import CURRENT
from tripwire.values.classes import FLOATS, NUMPY_FLOAT, is_exactly, isinstance
from tripwire.values.identity import is_array
from tripwire.values.numbers import (
    OpenFloat,
    OpenInt,
    attempt,
    call_unbound,
    close_values,
    find_ledger,
    is_open,
    is_taken,
    iter_leaves,
    may_be_open,
    of_run,
    plain,
)


@contextmanager
def casting(*, draws: bool) -> Iterator[None]:
    """Answer this thread's casts, and draws, for a run that has something open."""
    try:
        if _casts is not None:
            asked_of = torch.Tensor, OpenInt, OpenFloat
            drawn = _draw if draws else None
            answers = _answer, asked_of, _close_given, _pick, _is_in
            _casts.start(*answers, _call, tuple(_ANSWERED), call_unbound, _METHODS, drawn)
        yield
    finally:
        stop()


def stop() -> None:
    """Make casts plainly again; telling it twice is fine."""
    if _casts is not None:
        _casts.stop()
        _casts.stop_making()


@contextmanager
def making() -> Iterator[None]:
    """Record the tensors that torch's own classes make: no mode sees `torch.Tensor([1.0])`."""
    try:
        if _casts is not None:
            _casts.start_making(_make, _MADE)
        yield
    finally:
        stop()


_casts = find_native("tracing._casts")
# Calls that take a number out of a tensor, and may give an open one.
TAKING = frozenset({"item", "tolist"} | ({"__float__", "__int__"} if _casts else set()))


_KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_MADE = (torch.Tensor, *(getattr(torch, f"{kind}Tensor") for kind in _KINDS))


def _make(cls: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What `torch.Tensor(...)` gives, as torch's functions make it; NotImplemented: by itself."""
    state = CURRENT.state
    if state is None or state.refusal is not None or kwargs:
        return NotImplemented
    if torch._C._get_default_device() != "cpu":  # by torch.set_default_tensor_type
        return NotImplemented
    dtype = torch.get_default_dtype() if cls is torch.Tensor else cls.dtype
    if len(args) == 1 and is_exactly(args[0], torch.Tensor, torch.nn.Parameter):
        given = args[0]
        is_plain = given.device.type == "cpu" and given.layout is torch.strided
        is_taken = is_plain and (cls is torch.Tensor or given.dtype == dtype)  # others raise
        return torch.ops.aten.alias(given) if is_taken else NotImplemented
    if len(args) == 1 and is_exactly(args[0], list, tuple):
        return torch.tensor(args[0], dtype=dtype, device="cpu")
    sizes = args[0] if len(args) == 1 and is_exactly(args[0], torch.Size) else args
    if all(is_exactly(size, int, OpenInt) for size in sizes):
        return torch.empty(sizes or (0,), dtype=dtype, device="cpu")
    return NotImplemented


def _answer(cls: type, value: Any) -> Any:
    """What `float(value)` or `int(value)` gives; NotImplemented: what it always gives."""
    state = CURRENT.state
    if state is None or state.refusal is not None or state.shadow is None:
        return NotImplemented
    if is_open(value):
        return state.shadow.cast(cls, value)
    mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
    if not isinstance(mode, Recorder) or not torch._C._is_torch_function_mode_enabled():
        return NotImplemented
    if not state.shadow.takes("item", (value,), {}):
        return NotImplemented
    number = mode.take_out(state.shadow, "item", value)
    return state.shadow.cast(cls, number) if is_open(number) else cls(number)


def _pick(owner: Any, index: Any) -> Any:
    """What numbers in a row have at an open index; NotImplemented: that is closed."""
    if not is_exactly(index, OpenInt) or not index.ledger.is_live():
        return NotImplemented
    if is_array(owner):
        if owner.ndim != 1 or owner.dtype != NUMPY_FLOAT:
            return NotImplemented
    elif not is_exactly(owner, list, tuple):
        return NotImplemented
    if not 1 < len(owner) <= _LONGEST_TABLE:
        return NotImplemented
    table, size = tuple(owner), len(owner)
    is_one_kind = all(is_exactly(one, type(table[0])) and may_be_open(one) for one in table)
    if not is_one_kind or not -size <= index.value < size:
        return NotImplemented
    if is_taken(index) and not index.ledger.sound(index):
        return NotImplemented
    index.ledger.decide(operator.lt, index, size, True)
    index.ledger.decide(operator.ge, index, -size, True)
    return index.ledger.compute((operator.getitem, table, index), table[index.value])


_LONGEST_TABLE = 4096  # numbers of a list, which are compared on each call


def _is_in(owner: Any, number: Any) -> Any:
    """Whether a container has an open number; NotImplemented: it looks itself, which closes it."""
    if not is_open(number) or not number.ledger.is_live() or not is_exactly(owner, *_CONTAINERS):
        return NotImplemented
    members = owner
    if not is_exactly(owner, range):
        if len(owner) > _MOST_MEMBERS or not all(map(_is_comparable, owner)):
            return NotImplemented
        members = tuple(sorted({one for one in owner if not is_exactly(one, *_NO_NUMBERS)}))
    is_in = plain(number) in members
    if is_in and is_exactly(owner, *_DICTS):  # what is there is looked up next
        return number.ledger.decide(operator.eq, number, plain(number), True)
    return len(members) > 0 and number.ledger.decide(operator.contains, members, number, is_in)


def _is_comparable(one: object) -> bool:
    """Whether all that may be equal to it are numbers of the same value, or none is."""
    if is_exactly(one, int, bool, *_NO_NUMBERS):
        return True
    return is_exactly(one, float) and math.isfinite(one)  # type: ignore[arg-type]  # it is a float


_DICTS = (dict, Counter, OrderedDict, defaultdict)
_CONTAINERS = (*_DICTS, set, frozenset, list, tuple, range)
_NO_NUMBERS = (str, bytes, type(None))
_MOST_MEMBERS = 4096


def _draw(generator: Any, bits: Any) -> Any:
    """What a random generator of Python's gives; NotImplemented: what it always gives."""
    state = CURRENT.state
    if state is None or state.refusal is not None or state.shadow is None:
        return NotImplemented
    return draw(state, generator, bits, sys._getframe(1))


def _close_given(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None, by: str = "lru_cache"
) -> tuple[Any, ...]:
    """With which arguments a function behind `lru_cache` is called."""
    given = args, kwargs or {}
    for number in filter(is_open, iter_leaves(given)):
        if number.ledger.is_live():
            number.ledger.close(number, by)
    closed: tuple[Any, ...] = close_values(given)
    return closed


_METHODS = tuple(
    method
    for cls in (int, float)
    for method in vars(cls).values()
    if is_exactly(method, MethodDescriptorType)
)


# --- functions ---------------------------------------------------------------------------------


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a function gives for open numbers or tensors; NotImplemented: what it always gives."""
    return _ANSWERED[function](function, args)


def _compute_float(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A function of `math`, which takes any number that it gets for a float."""
    numbers = [_answer(float, a) if isinstance(a, torch.Tensor) else a for a in args]
    if any(number is NotImplemented for number in numbers):
        return NotImplemented
    ledger = find_ledger(*numbers)
    if ledger is None:
        return NotImplemented
    value = attempt(function, *numbers)
    is_known = function in IN_GRAPHS if any(map(is_taken, numbers)) else may_be_open(value)
    if not is_known:
        return NotImplemented  # closes what is open
    return ledger.compute((function, *(of_run(ledger, one) for one in numbers)), value)


def _compute_int(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A function of `math` that takes ints and gives one."""
    ledger = find_ledger(*args)
    if ledger is None or not all(is_exactly(one, int, OpenInt) for one in args):
        return NotImplemented
    if any(map(is_taken, args)):
        return NotImplemented
    value = attempt(function, *args)
    return ledger.compute((function, *(of_run(ledger, one) for one in args)), value)


def _close_power(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`pow` of three numbers, which asks an open one that isn't the first for nothing."""
    if len(args) != 3 or find_ledger(*args) is None:
        return NotImplemented
    return function(*_close_given(args, None, "pow")[0])


def _ask(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`math.isnan` and its kin."""
    ledger = find_ledger(*args)
    if len(args) != 1 or ledger is None:
        return NotImplemented
    answer = function(plain(args[0]))
    if is_taken(args[0]):
        return ledger.decide(function, args[0], None, answer)
    if is_exactly(args[0], OpenFloat):  # of which only finite ones are open
        ledger.decide(operator.le, args[0], sys.float_info.max, True)
        ledger.decide(operator.ge, args[0], -sys.float_info.max, True)
    return answer


def _choose(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`min` and `max`, where what comes is a float whichever it is, or an int out of a tensor."""
    numbers = tuple(args[0]) if len(args) == 1 and is_exactly(args[0], list, tuple) else args
    ledger = find_ledger(*numbers)
    if ledger is None:
        return NotImplemented
    numbers = tuple(of_run(ledger, one) for one in numbers)
    is_taken_out = any(map(is_taken, numbers))
    kind = type(plain(numbers[0]))
    is_float = any(kind is one for one in FLOATS)  # a metaclass may have an `==`
    are_floats = is_float and all(is_exactly(plain(one), kind) for one in numbers)
    are_ints = is_taken_out and all(is_exactly(one, int, OpenInt) for one in numbers)
    if not (are_floats or are_ints):
        return NotImplemented
    if not is_taken_out and not all(math.isfinite(plain(one)) for one in numbers):
        return NotImplemented
    return ledger.compute((function, *numbers), function(*map(plain, numbers)))


def _measure(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`len` of a tensor."""
    state = CURRENT.state
    if state is None or state.refusal is not None or state.shadow is None or len(args) != 1:
        return NotImplemented
    (tensor,) = args
    shadow = state.shadow
    if not isinstance(tensor, torch.Tensor):
        return NotImplemented
    if shadow.fakes.find(tensor) is None and not shadow.takes_sizes(tensor):
        return NotImplemented
    return tensor.size(0) if tensor.dim() else NotImplemented


def _build_targets() -> Iterator[tuple[Callable[..., Any], Target]]:
    """What stands in a graph for a function of Python's."""
    for name in ("sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "tanh", "sin", "cos"):
        function = getattr(math, name)
        compute = functools.partial(_compute, function, getattr(torch, name))
        yield function, Target(compute, name)
    yield float, Target(torch.sym_float, "sym_float")
    yield int, Target(torch.sym_int, "sym_int")
    yield round, Target(_round, "round")


def _compute(function: Callable[..., Any], of_tensors: Callable[..., Any], *numbers: Any) -> Any:
    """Python's own function; a compiler, which has symbols instead, computes with tensors."""
    if not any(isinstance(number, (torch.SymInt, torch.SymFloat)) for number in numbers):
        return function(*numbers)
    if len(numbers) != 1:
        raise TypeError(f"{function.__name__} of two numbers out of tensors has no compiled form")
    return of_tensors(torch.scalar_tensor(numbers[0], dtype=torch.float64)).item()


def mix(function: Callable[..., Any]) -> Target:
    """A function of open floats, which come as tensors, and of numbers out of tensors.

    A compiler has no code for some that take a float of its inputs, and would fix it.
    """
    return Target(functools.partial(_mix, function), function.__name__)


def _mix(function: Callable[..., Any], *numbers: Any) -> Any:
    kinds = (float, int, torch.Tensor)
    if all(type(number) in kinds for number in numbers):
        return function(*(n.item() if isinstance(n, torch.Tensor) else n for n in numbers))
    are_ints = all(isinstance(number, (int, torch.SymInt)) for number in numbers)
    dtype = torch.int64 if are_ints else torch.float64
    tensors = [
        number if isinstance(number, torch.Tensor) else torch.scalar_tensor(number, dtype=dtype)
        for number in numbers
    ]
    if function in CHOICES:
        return functools.reduce(CHOICES[function], tensors).item()
    return function(*tensors).item()


def _smaller(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.where(right < left, right, left)  # also where one is nan


def _larger(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.where(right > left, right, left)


CHOICES: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {min: _smaller, max: _larger}


def _round(number: Any, digits: Any = None) -> Any:
    if digits is not None and isinstance(number, (torch.SymInt, torch.SymFloat)):
        raise TypeError("round() to some digits isn't the same in compiled code")
    return round(number, digits)


IN_GRAPHS = dict(_build_targets())
_COMPUTED = (
    *("sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "tanh"),
    *("asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "pow", "hypot"),
    *("fabs", "fmod", "copysign", "cbrt", "exp2", "degrees", "radians", "erf", "erfc", "gamma"),
    "lgamma",
)
_OF_INTS = ("gcd", "lcm", "isqrt")
_QUESTIONS = ("isnan", "isinf", "isfinite")
# By function that C has: who says what it gives.
_ANSWERED: dict[Callable[..., Any], Callable[[Any, tuple[Any, ...]], Any]] = {
    **{getattr(math, name): _compute_float for name in _COMPUTED},
    **{getattr(math, name): _compute_int for name in _OF_INTS},
    **{getattr(math, name): _ask for name in _QUESTIONS},
    pow: _close_power,
    min: _choose,
    max: _choose,
    len: _measure,
}
