"""Compiled: what users hold. A function, or a module that is its original in all but calling."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from tripwire.dispatch.dispatcher import Dispatcher, Options, Statistics


class CompiledFunction:
    """A callable whose calls are dispatched. Copies and pickles compile anew."""

    def __init__(self, target: Callable[..., Any], name: str, options: Options) -> None:
        functools.update_wrapper(self, target)
        self._dispatcher = Dispatcher(target, name, options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._dispatcher(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def statistics(self) -> Statistics:
        """What it did so far."""
        return self._dispatcher.statistics()

    def __repr__(self) -> str:
        return f"<tripwire.compile of {self._dispatcher.target!r}>"

    def __reduce__(self) -> Any:
        dispatcher = self._dispatcher
        return CompiledFunction, (dispatcher.target, dispatcher.name, dispatcher.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        dispatcher = self._dispatcher
        target = copy.deepcopy(dispatcher.target, memo)
        return CompiledFunction(target, dispatcher.name, dispatcher.options)


class CompiledModule:
    """Mixed into a subclass of the module's own class. Shares the module's `__dict__`.

    So parameters, hooks, attributes and flags are the module's own, whichever of the two is
    written, and `isinstance` says what it said before.
    """

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _dispatcher_of(self)(*args, **kwargs)

    def statistics(self) -> Statistics:
        """What the compiled module did so far."""
        return _dispatcher_of(self).statistics()

    def __reduce_ex__(self, protocol: Any) -> Any:
        dispatcher = _dispatcher_of(self)
        return compile_module, (dispatcher.target, dispatcher.name, dispatcher.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        dispatcher = _dispatcher_of(self)
        module: Any = copy.deepcopy(dispatcher.target, memo)
        return compile_module(module, dispatcher.name, dispatcher.options)


def _dispatcher_of(compiled: Any) -> Dispatcher:
    dispatcher: Dispatcher = object.__getattribute__(compiled, "_tripwire_dispatcher")
    return dispatcher


def compile_module(module: nn.Module, name: str, options: Options) -> nn.Module:
    """A compiled stand-in for a module."""
    cls: Any = type(module)
    compiled: Any = object.__new__(_compiled_class(cls))
    slot = type(compiled).__dict__["_tripwire_dispatcher"]
    slot.__set__(compiled, Dispatcher(module, name, options))
    object.__setattr__(compiled, "__dict__", module.__dict__)
    return compiled  # type: ignore[no-any-return]


@functools.cache
def _compiled_class(cls: Any) -> Any:
    body = {
        "__slots__": ("_tripwire_dispatcher",),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        **{name: value for name, value in vars(CompiledModule).items() if callable(value)},
    }
    return type(cls)(cls.__name__, (cls,), body)
