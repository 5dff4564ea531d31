"""Callables: the code behind what can be called, found without running any."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, GetSetDescriptorType, MethodType
from typing import Any

from tripwire.values.classes import find_in_class, isinstance
from tripwire.values.contents import bound_cells, parts_of


def find_function(target: Any) -> FunctionType | None:
    """The function that runs when something is called, as far as that is Python.

    Of an object it is what it says that it wraps, or its `forward`, or its `__call__`.
    """
    while isinstance(target, (functools.partial, MethodType)):
        target = target.func if isinstance(target, functools.partial) else target.__func__
    if not isinstance(target, FunctionType):
        found_in = [find_in_class(type(target), name) for name in _CALLED]
        for found in (_find_wrapped(target), *found_in):
            if isinstance(found, FunctionType):
                target = found
                break
    return target if isinstance(target, FunctionType) else None


def find_code(target: Any) -> CodeType | None:
    """A callable's own code: of what a decorator wrapped, not of the wrapper."""
    function = find_function(target)
    if function is None:
        return None
    inner = function.__dict__.get("__wrapped__")
    return inner.__code__ if isinstance(inner, FunctionType) else function.__code__


_CALLED = ("forward", "__call__")


def _find_wrapped(target: object) -> object:
    descriptor: Any = find_in_class(type(target), "__dict__")
    space = descriptor.__get__(target) if type(descriptor) is GetSetDescriptorType else {}
    if "__wrapped__" in space:
        return space["__wrapped__"]
    return find_in_class(type(target), "__wrapped__")


_DESCRIPTORS = (property, functools.cached_property, staticmethod, classmethod)


def functions_behind(*values: object, through_cells: bool = False) -> Iterator[FunctionType]:
    """Functions among attributes of a class: themselves, or behind descriptors and decorators.

    A decorator is followed to what it says that it wraps; `through_cells`: to all that it keeps.
    """
    waiting = [*values]
    met: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, _DESCRIPTORS):
            waiting += [part for _, part in parts_of(value)]
        elif isinstance(value, FunctionType) and id(value) not in met:
            met.add(id(value))
            waiting.append(value.__dict__.get("__wrapped__"))
            if through_cells:
                waiting += bound_cells(value).values()
            yield value


def all_codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those nested in it."""
    waiting = [code]
    while waiting:
        current = waiting.pop()
        yield current
        waiting += [const for const in current.co_consts if type(const) is CodeType]
