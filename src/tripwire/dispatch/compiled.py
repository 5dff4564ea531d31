"""Compiled: what users hold. It behaves like its original; only calling it is dispatched.

`watch_torch_compile` is for those who stay with torch.compile: it runs torch.compile's code, with
tripwire's wires beside it. The first call of a kind, and the second after a change, run as plain
Python and are observed, so that the wires know what to watch. All other calls are torch.compile's.
When a wire has tripped, Dynamo may recompile: then the cause is reported with its writer. Or Dynamo
keeps its code: then either the code reads the value on each call, or its results are stale, which
`check` finds out.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tripwire.backends.dynamo import DynamoCompile, DynamoCompiles, find_plain, prepare
from tripwire.backends.registry import out_of_dynamo
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.dispatch.pipeline import Options
from tripwire.dispatch.tally import Statistics
from tripwire.env import is_fx_tracing
from tripwire.errors import BadOption
from tripwire.rulebook.refusals import Cause, Refusal, Refused
from tripwire.tracing import Tracer
from tripwire.tracing.state import CURRENT
from tripwire.validity.plan import build_plan
from tripwire.validity.standing import Standing
from tripwire.values.classes import class_dict, find_in_class, isinstance, module_of, name_of
from tripwire.values.contents import answers_for_itself, slots_of

_P = ParamSpec("_P")
_R_co = TypeVar("_R_co", covariant=True)
_Self = TypeVar("_Self")
_Rest = ParamSpec("_Rest")


class CompiledFunction(Generic[_P, _R_co]):
    """A callable whose calls are dispatched. A copy, or what a pickle gives, has no entries yet."""

    __slots__ = ("__dict__", "__weakref__", "_dispatcher")

    def __init__(self, target: Callable[_P, _R_co], name: str, options: Options) -> None:
        names: tuple[str, ...] = functools.WRAPPER_ASSIGNMENTS
        if answers_for_itself(target):  # asked for others, it may raise or make something up
            names = ("__module__", "__doc__")
        functools.update_wrapper(self, target, names)
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
        target: Any = self._dispatcher.target
        return MethodType(self, instance) if _becomes_method(target, instance, owner) else self

    @property
    def __code__(self) -> CodeType:
        """The plain function's: `torch.export` asks a module's `forward` for it.

        `inspect` asks what has these three whether it is a coroutine function, or a generator's.
        """
        return self._dispatcher.target.__code__

    @property
    def __defaults__(self) -> tuple[Any, ...] | None:
        return self._dispatcher.target.__defaults__

    @property
    def __kwdefaults__(self) -> dict[str, Any] | None:
        return self._dispatcher.target.__kwdefaults__

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


def _becomes_method(target: Any, instance: object, owner: type | None) -> bool:
    """Whether a plain callable becomes a method of an instance whose class has it."""
    if instance is None or isinstance(target, staticmethod):
        return False
    if type(target) is FunctionType:
        return True
    get: Any = find_in_class(type(target), "__get__")  # a partial's, on 3.13, gives itself
    return get is not None and get(target, instance, owner) is not target


class CompiledModule:
    """Mixed into a subclass of the module's own class. Shares the module's `__dict__`.

    So the two share parameters, hooks, attributes and flags, and `isinstance` gives the same
    answers for both. An instance that the class's own methods make (a slice of a Sequential, say)
    has no original and is a plain module.
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

    def __setattr__(self, name: str, value: object) -> None:
        dispatcher = find_dispatcher(self)
        if dispatcher is None:
            super().__setattr__(name, value)
        elif name != "_orig_mod":
            setattr(dispatcher.target, name, value)  # whoever watches it is told who wrote
        elif value is not dispatcher.target:  # nn.Module would make it a submodule
            raise AttributeError("_orig_mod stays what was compiled. Compile the other module.")

    def __delattr__(self, name: str) -> None:
        dispatcher = find_dispatcher(self)
        if dispatcher is None:
            super().__delattr__(name)
        else:
            delattr(dispatcher.target, name)

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


def find_calls(compiled: Any) -> Dispatcher | None:
    """The dispatcher of something's calls, also of a method, or of what was compiled in place.

    `nn.Module.compile` and a decorated class leave a module as it is, and compile its calls.
    """
    if isinstance(compiled, MethodType):
        compiled = compiled.__func__
    dispatcher = find_dispatcher(compiled)
    if dispatcher is not None:
        return dispatcher
    if isinstance(compiled, nn.Module):
        calls: object = compiled._compiled_call_impl
    else:
        calls = find_in_class(type(compiled), "__call__")
    return calls if isinstance(calls, Dispatcher) else find_dispatcher(calls)


def statistics(compiled: Any) -> Statistics:
    """What a compiled function, method or module did so far."""
    dispatcher = find_calls(compiled)
    if dispatcher is None:
        raise BadOption(
            f"statistics takes what tripwire.compile returned, not {type(compiled).__name__}.",
            slug="not-compiled",
        )
    return dispatcher.statistics()


def compile_callable(target: Any, name: str, options: Options) -> Any:
    """The compiled form of a function, a module or a class; of what is compiled, the original's."""
    known = find_dispatcher(target)
    if known is not None:
        target = known.target
    if isinstance(target, nn.Module):
        return compile_module(target, name, options)
    if isinstance(target, type):
        return _compile_class(target, name, options)
    return CompiledFunction(target, name, options)


def compile_module(module: nn.Module, name: str, options: Options) -> nn.Module:
    """A compiled stand-in for a module."""
    compiled: Any = object.__new__(_compiled_class(type(module)))
    slot: Any = find_in_class(type(compiled), "_tripwire_dispatcher")
    slot.__set__(compiled, Dispatcher(module, name, options))
    object.__setattr__(compiled, "__dict__", module.__dict__)
    return compiled  # type: ignore[no-any-return]


def _compiled_class(cls: Any) -> Any:
    """The subclass of a module's class whose instances are compiled; one per class."""
    if issubclass(cls, CompiledModule):  # somebody derived a class from a compiled module's
        return cls
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


def _compile_class(cls: Any, name: str, options: Options) -> Any:
    """The class itself; calls of its instances are compiled from now on.

    A module's dispatcher is in torch's own place for it, which copies and pickles leave out.
    """
    plain: Any = find_in_class(cls, "__call__")
    if plain is None or issubclass(cls, type):
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


# --- torch.compile's own code, watched ---


logger = logging.getLogger("tripwire.recompiles")
_KINDS_KEPT = 8  # of calls
_SEEN_KEPT = 256


@dataclass(frozen=True, slots=True)
class Sighting:
    """What torch.compile did in one call, and what had changed before that call, if anything."""

    causes: tuple[Cause, ...]  # what was written; empty where no wire tripped
    compiles: tuple[DynamoCompile, ...]  # empty where it kept its code
    difference: str | None = None  # between its result and the plain one; None: not compared

    @property
    def is_stale(self) -> bool:
        """Whether the result was compared with the plain one, and was another."""
        return bool(self.difference)

    def __str__(self) -> str:
        changed = "; ".join(map(str, self.causes)) or "no change was seen in what the call reads"
        if self.compiles:
            reasons = " | ".join(_condition(one.reason) for one in self.compiles if one.reason)
            return f"torch.compile recompiled: {changed}. Dynamo says: {reasons or 'nothing'}"
        match self.difference:
            case None:
                verdict = "It reads this on each call, or its results are stale: use check=True"
            case "":
                verdict = "Its result is correct"
            case difference:
                verdict = f"Its result is STALE: {difference}"
        return f"torch.compile kept its code: {changed}. {verdict}"


def _condition(reason: str) -> str:
    """What Dynamo says, without the line that it shows behind it, and the stack below it."""
    return reason.partition("  # ")[0].strip()


class WatchedCompile:
    """What `watch_torch_compile` returns: called and used as the compiled callable itself."""

    def __init__(self, compiled: Callable[..., Any], check: bool) -> None:
        plain = None if find_dispatcher(compiled) else find_plain(compiled)
        if plain is None:
            raise BadOption(
                f"watch_torch_compile takes what torch.compile returned, not "
                f"{name_of(type(compiled))}. tripwire.compile watches by itself.",
                slug="not-compiled",
            )
        self._compiled = compiled
        self._plain = plain
        self._check = check
        self._standings: list[Standing] = []  # one for each kind of call
        # What was told of each: one that is gone has no causes of its own.
        self._told: WeakKeyDictionary[Standing, list[Cause]] = WeakKeyDictionary()
        self.sightings: list[Sighting] = []  # the latest
        self.refusal: Refusal | None = None  # why nothing is watched, where that is so

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call: torch.compile's, unless it is observed."""
        if self.refusal is not None or CURRENT.tracing:
            return self._compiled(*args, **kwargs)
        for standing in self._standings:
            if standing.admits(args, kwargs) is not None:
                return self._run(args, kwargs, ())
        found = {standing: self._find_causes(standing) for standing in self._standings}
        changed = [one for one in self._standings if found[one] or not one.is_in_use]
        self._standings = [one for one in self._standings if one not in changed]
        causes = tuple(dict.fromkeys(chain.from_iterable(found.values())))
        for standing in changed:
            standing.close()
        return self._run(args, kwargs, causes) if causes else self._observe(args, kwargs)

    def _find_causes(self, standing: Standing) -> Sequence[Cause]:
        """What was written of what a kind of call reads."""
        told = self._told[standing]
        if not standing.is_in_use:
            return standing.causes or told
        before = len(told)
        standing.look_at_pulled()  # lists, sets, cells and slots, whose writes nothing reports
        return told[before:]

    def _observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        prepare()  # what the call reads of nn.Module is as it will be
        run = Tracer().run(self._plain, args, kwargs, complete=True)
        self.refusal = run.refusal
        if run.trace is not None:
            told: list[Cause] = []
            standing = Standing(lambda causes, compile_id: told.extend(causes))
            self._told[standing] = told
            try:
                build_plan(run.trace, run.torch_state, standing)
                self._standings = [standing, *self._standings[: _KINDS_KEPT - 1]]
            except Refused as refused:
                self.refusal = refused.refusal
        if self.refusal is not None:
            logger.warning("torch.compile isn't watched: %s [%s]", self.refusal, self.refusal.slug)
        return run.result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], causes: tuple[Cause, ...]) -> Any:
        expected = self._run_copy(args, kwargs) if causes and self._check else None
        with DynamoCompiles() as compiles:
            result = self._compiled(*args, **kwargs)
        again = tuple(one for one in compiles if one.reason)
        difference = None if expected is None else _find_difference(result, expected)
        # What is compiled for the first time was never kept, and isn't compiled again.
        if again or difference or (causes and not compiles):
            self._note(Sighting(causes, again, difference))
        if compiles:  # Dynamo patches nn.Module while it compiles: that is nobody's write
            self._standings = [standing for standing in self._standings if standing.settle()]
        return result

    def _run_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
        """What the plain call returns, made with copies of everything that can be copied."""
        plain, args, kwargs = copy.deepcopy((self._plain, args, kwargs))
        with torch.random.fork_rng():
            return pytree.tree_leaves(plain(*args, **kwargs))

    def _note(self, sighting: Sighting) -> None:
        self.sightings = [*self.sightings[1 - _SEEN_KEPT :], sighting]
        level = logging.INFO if sighting.compiles else logging.WARNING
        logger.log(level, "%s", sighting)

    @property
    def stale(self) -> tuple[Sighting, ...]:
        """Calls in which torch.compile returned something else than the plain code."""
        return tuple(one for one in self.sightings if one.is_stale)


def _find_difference(result: object, expected: list[object]) -> str:
    found = pytree.tree_leaves(result)
    if len(found) != len(expected):
        return f"{len(found)} values, not {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if not isinstance(one, torch.Tensor):
            if one != other:
                return f"{one!r}, not {other!r}"
            continue
        try:
            torch.testing.assert_close(one, other, equal_nan=True)
        except AssertionError as error:
            return str(error).splitlines()[0]
    return ""
