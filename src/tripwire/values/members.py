"""Members: what an open number has besides arithmetic and questions, as an int or a float has it.

A method that needs the value closes the number. Nothing can be set on a number. What tripwire keeps
there, and what only torch's symbols have, is found by their code alone: `hasattr(n, "value")` is
False.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from tripwire.env import is_library_file, is_own_code, is_own_file
from tripwire.values.classes import class_dict


def add_members(cls: Any, base: type, plain: Callable[[Any], Any]) -> None:
    """Give a class of open numbers every member of int or float that it hasn't yet."""
    for name in _SHOWING:
        if hasattr(base, name):
            setattr(cls, name, _showing(name))
    if base is float:
        cls.is_integer = _is_integer
    kept = {*vars(cls), *_OF_EVERY_OBJECT}
    for name in dir(base):
        if name not in kept:
            member = getattr(base, name)
            if callable(member):
                setattr(cls, name, _closing(name, plain))
            else:  # `real`, `imag`, `numerator`, `denominator`
                setattr(cls, name, property(_closing_attribute(name)))
    for name in _OF_CLASSES & {*dir(base)}:
        setattr(cls, name, getattr(base, name))
    cls.__doc__ = base.__doc__
    cls.__array__ = _to_array
    cls.__copy__ = lambda self: self
    cls.__deepcopy__ = lambda self, memo: self
    cls.__reduce_ex__ = _reduce
    cls.__setattr__ = lambda self, name, value: setattr(self.value, name, value)
    cls.__delattr__ = lambda self, name: delattr(self.value, name)
    cls.__dir__ = lambda self: dir(self.value)
    for name in ("ledger", "made", "symbol", "value"):
        setattr(cls, name, _Secret(name, _find(cls, name)))
    for name in {*dir(cls)} - {*dir(base), *vars(cls), *_HIDDEN_OTHERWISE} | {"node"}:
        setattr(cls, name, _SecretOfTorch(name, _find(cls, name)))


_SHOWING = ("__format__", "__str__", "__int__", "__index__", "__float__")
_OF_CLASSES = {"from_bytes", "fromhex", "__getformat__"}
_OF_EVERY_OBJECT = frozenset(
    {
        *("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__doc__"),
        *("__getattribute__", "__setattr__", "__delattr__", "__dir__", "__reduce__"),
        *("__getstate__", *_OF_CLASSES),
    }
)
_HIDDEN_OTHERWISE = {"__torch_function__", "__module__", "__weakref__", "__annotations__"}


# --- what needs the value -----------------------------------------------------------------------


def _is_integer(self: Any) -> bool:
    return bool(self % 1.0 == 0)


def _closing(name: str, plain: Callable[[Any], Any]) -> Callable[..., Any]:
    """A method that needs the value."""
    by = f"{name.strip('_')}()"

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.ledger.is_live():
            self.ledger.close(self, by)
        return getattr(self.value, name)(*map(plain, args), **kwargs)

    return method


def _showing(name: str) -> Callable[..., Any]:
    """A method that texts are made with."""

    def method(self: Any, *form: str) -> Any:
        if self.ledger.is_live():
            self.ledger.show(self, name, "".join(form), sys._getframe(1))
        return getattr(self.value, name)(*form)

    return method


def _closing_attribute(name: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        if self.ledger.is_live():
            self.ledger.close(self, name)
        return getattr(self.value, name)

    return get


def _to_array(self: Any, dtype: Any = None, copy: Any = None) -> Any:
    """As NumPy has it, which asks what it doesn't know for an array."""
    import numpy as np

    if self.ledger.is_live():
        self.ledger.close(self, "numpy")
    return np.array(self.value, dtype)


def _reduce(self: Any, protocol: int) -> Any:
    if self.ledger.is_live():
        self.ledger.close(self, "pickle")
    return type(self.value), (self.value,)


# --- what an int hasn't -------------------------------------------------------------------------


def _find(cls: type, name: str) -> Any:
    return next(class_dict(base)[name] for base in cls.__mro__ if name in class_dict(base))


class _Secret:
    """What tripwire keeps on an open number; no other code finds it."""

    def __init__(self, name: str, found: Any) -> None:
        self._name = name
        self._found = found

    def __get__(self, number: Any, cls: Any = None) -> Any:
        if number is None:
            return self._found
        if self._is_seen_by(sys._getframe(1).f_code):
            return self._found.__get__(number, cls)
        return getattr(number.value, self._name)  # which raises as an int does

    def __set__(self, number: Any, value: object) -> None:
        setattr(number.value, self._name, value)

    def _is_seen_by(self, code: CodeType) -> bool:
        return is_own_file(code.co_filename)


class _SecretOfTorch(_Secret):
    """What torch has on symbols; its C++ code asks for some of it, in the name of any function."""

    def _is_seen_by(self, code: CodeType) -> bool:
        return is_own_code(code) or is_library_file(code.co_filename) or not self._is_named(code)

    def _is_named(self, code: CodeType) -> bool:
        texts = (one for one in code.co_consts if type(one) in (tuple, frozenset))
        named = (code.co_names, code.co_consts, *texts)
        return any(self._name in names for names in named)
