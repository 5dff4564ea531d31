"""Scripts: compiled callables that a script called, with the arguments of their last calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from tripwire.dispatch.compiled import CompiledFunction, compile_module
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.values.classes import isinstance


@dataclass(frozen=True, slots=True)
class LastCall:
    """The last call of one compiled callable."""

    compiled: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Calls:
    """What was called so far."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Dispatcher, tuple[Any, ...], dict[str, Any]]] = {}
        self._depth = 0

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note calls in here. What a compiled callable calls inside is a part of it."""
        whole = Dispatcher.__call__

        def call(dispatcher: Dispatcher, *args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                self._last[id(dispatcher)] = (dispatcher, args, kwargs)
            self._depth += 1
            try:
                return whole(dispatcher, *args, **kwargs)
            finally:
                self._depth -= 1

        Dispatcher.__call__ = call  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Dispatcher.__call__ = whole  # type: ignore[method-assign]

    def last(self) -> list[LastCall]:
        """One per callable, in the order of first calls."""
        return [
            LastCall(_compile_again(dispatcher), args, kwargs)
            for dispatcher, args, kwargs in self._last.values()
        ]


def _compile_again(dispatcher: Dispatcher) -> Any:
    """The callable in its compiled form, which the script need not have kept."""
    if isinstance(dispatcher.target, nn.Module):
        return compile_module(dispatcher.target, dispatcher.name, dispatcher.options)
    return CompiledFunction(dispatcher.target, dispatcher.name, dispatcher.options)
