"""Binding: a callable and its arguments as named locals, in declaration order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from tripwire.errors import CannotTrace
from tripwire.reading.sources import Local, Roots, Source
from tripwire.values.classes import find_in_class, isinstance
from tripwire.values.contents import answers_for_itself, name_callable


@dataclass(frozen=True, slots=True)
class Binding:
    """How a callable's arguments become locals; `self` is the module, object or method owner."""

    target: Callable[..., Any]
    name: str
    owner: object | None  # L['self'], where the callable has one
    function: FunctionType | None  # the Python function that will run, where it is known
    signature: inspect.Signature | None

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, object]:
        """Arguments by name, defaults filled in. Raises TypeError where a call would."""
        bound: dict[str, object] = {} if self.owner is None else {"self": self.owner}
        if self.signature is None:
            return bound | {f"arg{i}": value for i, value in enumerate(args)} | kwargs
        arguments = self.signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        return bound | arguments.arguments

    def expressions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
        """How to spell each local that this call passed, in terms of `args` and `kwargs`.

        Locals that are missing here don't come with the call: the owner, and defaults.
        """
        if self.signature is None:
            return {f"arg{i}": f"args[{i}]" for i in range(len(args))} | {
                name: f"kwargs[{name!r}]" for name in kwargs
            }
        spelled: dict[str, str] = {}
        named = dict.fromkeys(kwargs)
        position = 0
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                spelled[name] = f"args[{position}:]"
                position = len(args)
            elif parameter.kind is parameter.VAR_KEYWORD:
                rest = ", ".join(f"{key!r}: kwargs[{key!r}]" for key in named)
                spelled[name] = f"{{{rest}}}"
            elif parameter.kind is not parameter.KEYWORD_ONLY and position < len(args):
                spelled[name] = f"args[{position}]"
                position += 1
            elif name in named:
                del named[name]
                spelled[name] = f"kwargs[{name!r}]"
        return spelled

    @property
    def takes_keywords(self) -> bool:
        """Whether the callable sees the order in which keywords are passed."""
        return self.signature is None or any(
            parameter.kind is parameter.VAR_KEYWORD
            for parameter in self.signature.parameters.values()
        )

    def sources(self, bound: dict[str, object]) -> list[tuple[object, Source]]:
        """The arguments proper, with their sources; the owner is none of them."""
        return [
            (value, Local(name))
            for name, value in bound.items()
            if not (name == "self" and value is self.owner and self.owner is not None)
        ]

    def roots(self, bound: dict[str, object], namespaces: dict[str, dict[str, Any]]) -> Roots:
        """Where this call's sources begin."""
        return Roots(bound, self.function, namespaces)


def build_binding(target: Any) -> Binding:
    """Look at a callable. Raises CannotTrace for what can't be run in one go."""
    if not callable(target):
        raise CannotTrace(
            f"trace needs a callable, not {type(target).__name__} {target!r:.60}.",
            slug="not-callable",
        )
    function, owner = _find_function(target)
    _check_runs_at_once(function, target)
    return Binding(target, _name(target), owner, function, _signature(target))


def _find_function(target: Any) -> tuple[FunctionType | None, object | None]:
    if isinstance(target, FunctionType):
        return target, None
    if isinstance(target, MethodType):
        function = target.__func__
        if not isinstance(function, FunctionType):  # a method of C's, or a cached one
            return None, target
        return function, target.__self__
    if isinstance(target, functools.partial):
        return _find_function(target.func)[0], target
    if isinstance(target, nn.Module):
        forward = getattr(target.forward, "__func__", target.forward)
        return (forward if isinstance(forward, FunctionType) else None), target
    if isinstance(target, BuiltinMethodType) and isinstance(target.__self__, torch.Tensor):
        return None, target.__self__
    if isinstance(target, functools._lru_cache_wrapper):  # what it keeps decides on the call
        return None, target
    call = find_in_class(type(target), "__call__")
    if isinstance(call, FunctionType):
        return call, target
    return None, None


def _signature(target: Any) -> inspect.Signature | None:
    try:
        called = target
        if isinstance(target, nn.Module) and type(target).__call__ is nn.Module.__call__:
            called = target.forward
        elif answers_for_itself(target):  # `signature` asks it for `__signature__`
            called = find_in_class(type(target), "__call__")
            called = MethodType(called, target) if isinstance(called, FunctionType) else None
        return inspect.signature(called, follow_wrapped=False)  # a wrapper may take other names
    except (TypeError, ValueError):  # a builtin without one
        return None


def _name(target: Any) -> str:
    if isinstance(target, functools.partial):
        return _name(target.func)
    return name_callable(target)


def _check_runs_at_once(function: FunctionType | None, target: Any) -> None:
    code = function if function is not None else target
    if inspect.iscoroutinefunction(code):
        raise CannotTrace(
            f"{_name(target)} is a coroutine function: calling it runs nothing. "
            "Trace the function that computes, and await around it.",
            slug="coroutine-function",
        )
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise CannotTrace(
            f"{_name(target)} is a generator function: calling it runs nothing. "
            "Trace a function that returns its values, in a list or a tuple.",
            slug="generator-function",
        )
