"""Callables: the code that runs when something is called, found without running any."""

from __future__ import annotations

import functools
from types import CodeType, FunctionType, MethodType
from typing import Any


def find_code(target: Any) -> CodeType | None:
    """A callable's own code, as far as that is Python: what a decorator wrapped, not the wrapper.

    Of an object it is that of `forward`, or of `__call__`.
    """
    while isinstance(target, (functools.partial, MethodType)):
        target = target.func if isinstance(target, functools.partial) else target.__func__
    if not isinstance(target, FunctionType):
        found_in = [find_in_class(type(target), name) for name in _CALLED]
        for found in (_find_wrapped(target), *found_in):
            if isinstance(found, FunctionType):
                target = found
                break
    if not isinstance(target, FunctionType):
        return None
    inner = target.__dict__.get("__wrapped__")
    return inner.__code__ if isinstance(inner, FunctionType) else target.__code__


_CALLED = ("forward", "__call__")


def _find_wrapped(target: object) -> object:
    try:
        space = object.__getattribute__(target, "__dict__")
    except AttributeError:
        space = {}
    if "__wrapped__" in space:
        return space["__wrapped__"]
    return find_in_class(type(target), "__wrapped__")


def find_in_class(cls: type, name: str) -> object:
    """What a class or a base has under a name, as it lies there; None where there is nothing.

    Like `inspect.getattr_static`, which keeps every class that it is asked about alive (3.12.0 to
    3.12.3, cpython#118013).
    """
    return next((vars(base)[name] for base in mro_of(cls) if name in vars(base)), None)


def mro_of(cls: type) -> tuple[type, ...]:
    """The classes that Python looks through, whatever a metaclass says of itself."""
    found: tuple[type, ...] = _MRO.__get__(cls)
    return found


_MRO = type.__dict__["__mro__"]
