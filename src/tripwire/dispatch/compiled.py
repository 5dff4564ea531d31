"""Compiled: what users hold. It behaves like its original; only calling it is dispatched."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from torch import nn

from tripwire.backends.registry import out_of_dynamo
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.dispatch.pipeline import Options
from tripwire.dispatch.tally import Statistics
from tripwire.env import is_fx_tracing
from tripwire.errors import BadOption
from tripwire.tracing.state import CURRENT
from tripwire.values.classes import class_dict, find_in_class, module_of, name_of
from tripwire.values.contents import slots_of

_P = ParamSpec("_P")
_R_co = TypeVar("_R_co", covariant=True)
_Self = TypeVar("_Self")
_Rest = ParamSpec("_Rest")


class CompiledFunction(Generic[_P, _R_co]):
    """A callable whose calls are dispatched. A copy, or what a pickle gives, has no entries yet."""

    __slots__ = ("__dict__", "__weakref__", "_dispatcher")

    def __init__(self, target: Callable[_P, _R_co], name: str, options: Options) -> None:
        functools.update_wrapper(self, target)
        self._dispatcher = Dispatcher(target, name, options)

    @out_of_dynamo
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        return self._dispatcher(*args, **kwargs)  # type: ignore[no-any-return]

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> CompiledFunction[_P, _R_co]: ...
    @overload
    def __get__(
        self: CompiledFunction[Concatenate[_Self, _Rest], _R_co],
        instance: _Self,
        owner: type | None = None,
    ) -> Callable[_Rest, _R_co]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def statistics(self) -> Statistics:
        """What it did so far."""
        return self._dispatcher.statistics()

    def __repr__(self) -> str:
        return f"<tripwire.compile of {self._dispatcher.target!r}>"

    def __reduce__(self) -> Any:
        dispatcher = self._dispatcher
        name = getattr(self, "__qualname__", "")
        if getattr(sys.modules.get(getattr(self, "__module__", "")), name, None) is self:
            return name  # a decorated function is found by its name, as functions are
        return CompiledFunction, (dispatcher.target, dispatcher.name, dispatcher.options)

    def __copy__(self) -> CompiledFunction[_P, _R_co]:
        dispatcher = self._dispatcher
        return CompiledFunction(dispatcher.target, dispatcher.name, dispatcher.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction[_P, _R_co]:
        dispatcher = self._dispatcher
        target = copy.deepcopy(dispatcher.target, memo)
        return CompiledFunction(target, dispatcher.name, dispatcher.options)


class CompiledModule:
    """Mixed into a subclass of the module's own class. Shares the module's `__dict__`.

    So parameters, hooks, attributes and flags are the module's own, whichever of the two is
    written, and `isinstance` says what it said before. An instance that the class's own methods
    make, a slice of a Sequential, say, has no original and is a plain module.
    """

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        """The user's class isn't asked: nobody subclassed it."""

    @out_of_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dispatcher = find_dispatcher(self)
        if dispatcher is None or is_fx_tracing():  # which knows this module only
            return nn.Module.__call__(self, *args, **kwargs)
        return dispatcher(*args, **kwargs)

    @property
    def _orig_mod(self) -> nn.Module:
        """The original, by the name that torch.compile's modules have for theirs."""
        dispatcher = find_dispatcher(self)
        if dispatcher is None:
            return super().__getattr__("_orig_mod")  # type: ignore[misc,no-any-return]
        return dispatcher.target  # type: ignore[return-value]

    def statistics(self) -> Statistics:
        """What the compiled module did so far."""
        return statistics(self)

    def __getattr__(self, name: str) -> Any:
        dispatcher = find_dispatcher(self)
        if dispatcher is None:
            return super().__getattr__(name)  # type: ignore[misc]
        return getattr(dispatcher.target, name)  # its class may have changed meanwhile

    def __reduce_ex__(self, protocol: Any) -> Any:
        dispatcher = find_dispatcher(self)
        if dispatcher is None:
            return super().__reduce_ex__(protocol)
        return compile_module, (dispatcher.target, dispatcher.name, dispatcher.options)

    def __copy__(self) -> Any:
        return self._copied(copy.copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._copied(functools.partial(copy.deepcopy, memo=memo))

    def _copied(self, copied: Callable[[Any], Any]) -> Any:
        dispatcher = find_dispatcher(self)
        if dispatcher is None:
            plain: Any = object.__new__(type(self))
            plain.__dict__ = copied(dict(self.__dict__))
            return plain
        return compile_module(copied(dispatcher.target), dispatcher.name, dispatcher.options)


def find_dispatcher(compiled: Any) -> Dispatcher | None:
    """The dispatcher behind something compiled."""
    if type(compiled) is CompiledFunction:
        return compiled._dispatcher
    try:
        dispatcher: Dispatcher = object.__getattribute__(compiled, "_tripwire_dispatcher")
    except AttributeError:
        return None
    return dispatcher


def statistics(compiled: Any) -> Statistics:
    """What a compiled function or module did so far."""
    dispatcher = find_dispatcher(compiled)
    if dispatcher is None:
        raise TypeError(f"{type(compiled).__name__} was not compiled by tripwire.")
    return dispatcher.statistics()


def compile_module(module: nn.Module, name: str, options: Options) -> nn.Module:
    """A compiled stand-in for a module."""
    compiled: Any = object.__new__(_compiled_class(type(module)))
    slot = class_dict(type(compiled))["_tripwire_dispatcher"]
    slot.__set__(compiled, Dispatcher(module, name, options))
    object.__setattr__(compiled, "__dict__", module.__dict__)
    return compiled  # type: ignore[no-any-return]


def _compiled_class(cls: Any) -> Any:
    """The subclass of a module's class whose instances are compiled; one per class."""
    for known in type.__subclasses__(cls):
        if "_tripwire_dispatcher" in class_dict(known):
            return known
    body: dict[str, Any] = {
        "__slots__": ("_tripwire_dispatcher",),
        "__module__": module_of(cls),
        "__qualname__": name_of(cls),
        "__doc__": class_dict(cls).get("__doc__"),
        "__class__": property(_class_of, _set_class),
        **{name: _forwarded(name) for name in slots_of(cls)},
    }
    own = find_in_class(cls, "statistics")
    if own is not None:
        body["statistics"] = own
    return type(cls)(name_of(cls), (CompiledModule, cls), body)


def _class_of(compiled: Any) -> type:
    dispatcher = find_dispatcher(compiled)
    return type(compiled) if dispatcher is None else type(dispatcher.target)


def _set_class(compiled: Any, cls: type) -> None:
    """What replaces the class of a module, a parametrization, say, replaces the original's."""
    dispatcher = find_dispatcher(compiled)
    if dispatcher is None:
        object.__setattr__(compiled, "__class__", cls)
    else:
        dispatcher.target.__class__ = cls


def _forwarded(name: str) -> property:
    """A slot has one place per object: the original's."""

    def target(compiled: Any) -> Any:
        dispatcher = find_dispatcher(compiled)
        assert dispatcher is not None
        return dispatcher.target

    return property(
        lambda self: getattr(target(self), name),
        lambda self, value: setattr(target(self), name, value),
        lambda self: delattr(target(self), name),
    )


def compile_class(cls: Any, name: str, options: Options) -> Any:
    """The class itself; calls of its instances are compiled from now on.

    A module's dispatcher is in torch's own place for it, which copies and pickles leave out.
    """
    plain: Any = find_in_class(cls, "__call__")
    if plain is None:
        raise BadOption(
            f"Instances of {name_of(cls)} can't be called. Compile a method of it instead.",
            slug="not-callable",
        )
    if not issubclass(cls, nn.Module):
        cls.__call__ = CompiledFunction(plain, name, options)
        return cls

    @out_of_dynamo
    @functools.wraps(plain)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._compiled_call_impl is None and not CURRENT.tracing:
            self._compiled_call_impl = Dispatcher(self._call_impl, name, options)
        return plain(self, *args, **kwargs)

    cls.__call__ = call
    return cls
