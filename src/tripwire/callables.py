"""Callables: the code that runs when something is called, found without running any."""

from __future__ import annotations

import functools
import inspect
from types import CodeType, FunctionType, MethodType
from typing import Any


def find_code(target: Any) -> CodeType | None:
    """A callable's own code, as far as that is Python: what a decorator wrapped, not the wrapper.

    Of an object it is that of `forward`, or of `__call__`.
    """
    while isinstance(target, (functools.partial, MethodType)):
        target = target.func if isinstance(target, functools.partial) else target.__func__
    if not isinstance(target, FunctionType):
        wrapped = inspect.getattr_static(target, "__wrapped__", None)
        cls = type(target)
        for found in (wrapped, *(inspect.getattr_static(cls, n, None) for n in _CALLED)):
            if isinstance(found, FunctionType):
                target = found
                break
    if not isinstance(target, FunctionType):
        return None
    inner = target.__dict__.get("__wrapped__")
    return inner.__code__ if isinstance(inner, FunctionType) else target.__code__


_CALLED = ("forward", "__call__")
