"""Walking: live objects that a call could read, found from its arguments and its callable.

The walk asks Python what each object holds. It does not ask tripwire what the call read: the judge
must not share the opinion of the judged. Two things narrow it down. It looks only into functions
whose code ran in the plain call (a profile function saw it), and only at globals that this code
names. Code and classes of torch and the standard library count as constant, except the `forward` of
modules; of their objects, it looks only into containers.
"""

from __future__ import annotations

import contextvars
import dis
import enum
import functools
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from tripwire.auditing import holdings
from tripwire.auditing.findings import PlaceKind, Unreached
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.env import is_library_file, is_library_module, is_own_code
from tripwire.values.classes import class_dict, isinstance, module_of, mro, name_of

LARGEST = 10_000  # items of a container that is looked into

_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(torch.dtype, torch.device, types.CodeType),
)
_TABLES = (
    ("_parameters", PlaceKind.PARAMETER),
    ("_buffers", PlaceKind.BUFFER),
    ("_modules", PlaceKind.SUBMODULE),
)
_WRAPPERS: dict[int, tuple[str, ...]] = {
    id(types.MethodType): ("__func__", "__self__"),
    id(staticmethod): ("__func__",),
    id(classmethod): ("__func__",),
    id(property): ("fget", "fset"),
    id(functools.partial): ("func", "args", "keywords"),
    id(functools.cached_property): ("func",),
    id(functools._lru_cache_wrapper): ("__wrapped__",),
}
_OWN = "tripwire"


class Ran:
    """Code that ran in a call, and the names in it."""

    def __init__(self, codes: Iterable[types.CodeType]) -> None:
        self.codes = frozenset(codes)
        users = [code for code in self.codes if not _is_library_code(code)]
        self.names = frozenset(name for code in users for name in code.co_names)
        # What `getattr`, `hasattr` and `os.environ` are asked for.
        self.texts = frozenset(
            text
            for code in users
            for text in code.co_consts
            if isinstance(text, str) and text.isidentifier()
        )

    @staticmethod
    def of(call: Callable[[], Any]) -> tuple[Ran, Any]:
        """Make a call, and note which code runs."""
        codes: set[types.CodeType] = set()

        def note(frame: types.FrameType, event: str, _: Any) -> None:
            if event == "call":
                codes.add(frame.f_code)

        before: Any = sys.getprofile()
        sys.setprofile(note)
        try:
            result = call()
        finally:
            sys.setprofile(None)
            if callable(before):
                sys.setprofile(before)
            elif before is not None:  # cProfile's object, which is no function
                before.enable()
        return Ran(codes), result

    @staticmethod
    def before(target: Any) -> Ran:
        """A guess, for what must be kept before the first call."""
        methods = (
            [m for cls in mro(type(target)) for m in class_dict(cls).values()]
            if not _is_library(type(target))
            else []
        )
        return Ran(
            nested
            for function in (plain_function(target), *methods)
            if isinstance(function, types.FunctionType) and not _is_library_code(function.__code__)
            for nested in _nested(function.__code__)
        )


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _is_library_code(code: types.CodeType) -> bool:
    return is_library_file(code.co_filename) or is_own_code(code)


def _is_library(cls: type) -> bool:
    name = module_of(cls)
    top = name.partition(".")[0]
    return top in ("", "builtins", "numpy", _OWN) or is_library_module(name)


def plain_function(value: Any) -> Any:
    """What a method binds, or a static or class method wraps; anything else is itself."""
    bound = (types.MethodType, staticmethod, classmethod)
    return value.__func__ if isinstance(value, bound) else value


class Walk:
    """All that was found from some roots."""

    def __init__(self, ran: Ran) -> None:
        self._ran = ran
        self.holdings: list[holdings.Holding] = []
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.generators: list[torch.Generator] = []
        self.arrays: list[tuple[str, Any]] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self.functions: list[tuple[str, types.FunctionType]] = []
        self.unreached: list[Unreached] = []
        self.known: dict[int, str] = {}  # every object that was met, by identity
        self._alive: list[Any] = []
        self._todo: deque[tuple[str, Any]] = deque()

    def visit(self, path: str, value: Any) -> None:
        """Walk from a value, breadth first: the shortest path names an object."""
        self._todo.append((path, value))
        while self._todo:
            self._look_at(*self._todo.popleft())

    def add_environment(self) -> None:
        """Environment variables, as far as the code that ran names any."""
        names = frozenset(text for text in self._ran.texts if text.isupper())
        if "environ" in self._ran.names or "getenv" in self._ran.names:
            self._hold(
                holdings.HeldEnvironment("os.environ", cast("dict[str, Any]", os.environ), names)
            )

    def add_arguments(self, arguments: holdings.HeldArguments) -> None:
        """Walk from what a call is given."""
        self._hold(arguments)
        while self._todo:
            self._look_at(*self._todo.popleft())

    # --- one object ---

    def _look_at(self, path: str, value: Any) -> None:
        # issubclass of the type: isinstance would ask the object, which may run the user's code.
        cls = type(value)
        if issubclass(cls, _LEAVES) or id(value) in self.known:
            return
        self.known[id(value)] = path
        self._alive.append(value)
        dispatcher = find_dispatcher(value)
        if dispatcher is not None:
            self._todo.append((path, dispatcher.target))
        elif issubclass(cls, torch.Tensor):
            self.tensors[id(value)] = (path, value)
            if holdings.own_dict(value):
                self._hold(holdings.HeldAttributes(path, value))
        elif issubclass(cls, torch.Generator):
            self.generators.append(value)
        elif cls is contextvars.ContextVar:
            self._hold(holdings.HeldContext(path, value))
        elif issubclass(cls, threading.local):
            self._hold(holdings.HeldThreadLocal(path, value))
        elif issubclass(cls, nn.Module):
            self._look_at_module(path, value)
        elif issubclass(cls, type):
            self._look_at_class(value)
        elif issubclass(cls, types.ModuleType):
            space = holdings.own_dict(value) or {}
            self._look_at_namespace(str(space.get("__name__", path)), space)
        elif cls is types.FunctionType:
            self._look_at_function(path, value)
        elif not self._unwrap(path, value):
            self._look_at_object(path, value)

    def _hold(self, holding: holdings.Holding) -> None:
        self.holdings.append(holding)
        for key, value in holding.contents().items():
            self._todo.append((holding.spell(key), value))

    def _look_at_module(self, path: str, module: nn.Module) -> None:
        self.modules.append((path, module))
        held: Any = holdings.own_dict(module) or {}
        for name, kind in _TABLES:
            if isinstance(held.get(name), dict):
                self._hold(holdings.HeldTable(path, held[name], kind))
        self._look_at_instance(path, module)

    def _look_at_instance(self, path: str, value: Any) -> None:
        if holdings.own_dict(value) is not None:
            self._hold(holdings.HeldAttributes(path, value))
        slots = _slots_of(type(value))
        if slots:
            self._hold(holdings.HeldSlots(path, value, slots))
        self._todo.append((name_of(type(value)), type(value)))

    def _look_at_object(self, path: str, value: Any) -> None:
        is_container = self._look_at_items(path, value)
        if not _is_library(type(value)) or issubclass(type(value), types.SimpleNamespace):
            self._look_at_instance(path, value)
        elif not is_container and not callable(value):
            kind = f"{module_of(type(value))}.{name_of(type(value))}"
            self.unreached.append(Unreached(path, f"what a {kind} holds is a library's own"))

    def _look_at_items(self, path: str, value: Any) -> bool:
        """Whether it is a container."""
        cls = type(value)
        if _is_array(cls):
            self.arrays.append((path, value))
            self._todo.append((f"{path}.base", value.base))  # whose memory it may have
            return True
        if not issubclass(cls, (dict, list, deque, set, tuple, frozenset)):
            return False
        if len(value) > LARGEST:
            self.unreached.append(Unreached(path, f"it has more than {LARGEST} items"))
        elif issubclass(cls, dict):
            self._hold(holdings.HeldItems(path, value))
        elif issubclass(cls, (list, deque)):
            self._hold(holdings.HeldElements(path, value))
        elif issubclass(cls, set):
            self._hold(holdings.HeldMembers(path, value))
        else:
            for index, item in enumerate(value):
                self._todo.append((f"{path}[{index}]", item))
        return True

    def _unwrap(self, path: str, value: Any) -> bool:
        """Whether it stands for others: what is behind it is looked at instead."""
        names = _WRAPPERS.get(id(type(value)))
        if names is None:
            return False
        if type(value) is functools._lru_cache_wrapper:
            self.unreached.append(Unreached(path, "results in its cache"))
        for name in names:
            self._todo.append((path, getattr(value, name)))
        return True

    # --- code ---

    def _look_at_function(self, path: str, function: types.FunctionType) -> None:
        if function.__code__ not in self._ran.codes or _is_library_code(function.__code__):
            return
        path = function.__qualname__
        self.functions.append((path, function))
        for made in (holdings.HeldCells, holdings.HeldDefaults, holdings.HeldCode):
            self._hold(made(path, function))
        if function.__dict__:
            self._hold(holdings.HeldAttributes(path, function))
        space = function.__globals__
        self._look_at_namespace(str(space.get("__name__", "globals")), space)
        self._todo.extend(_find_imported(function))

    def _look_at_namespace(self, name: str, space: dict[str, Any]) -> None:
        if (
            id(space) in self.known
            or is_library_module(name)
            or name.partition(".")[0] in ("numpy", _OWN)
        ):
            return
        self.known[id(space)] = name
        self._hold(holdings.HeldGlobals(name, space, self._ran.names))

    def _look_at_class(self, cls: type) -> None:
        for base in mro(cls):
            if base is not cls and id(base) in self.known:
                continue
            self.known[id(base)] = name_of(base)
            self._alive.append(base)
            if not _is_library(base):
                self._hold(holdings.HeldClassBody(name_of(base), base))
            elif issubclass(base, nn.Module) and "forward" in class_dict(base):
                self._hold(holdings.HeldClassBody(name_of(base), base, frozenset({"forward"})))


def _find_imported(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Loaded modules that a function may import: its names, in its package or one around it."""
    codes = [code for code in _nested(function.__code__) if _IMPORT in code.co_code[::2]]
    space = function.__globals__
    package = str(space.get("__package__") or space.get("__name__", "").rpartition(".")[0])
    parts = package.split(".")
    around = ["", *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]
    for name in {name for code in codes for name in code.co_names}:
        for parent in around:
            whole = f"{parent}.{name}".strip(".")
            yield whole, sys.modules.get(whole)


_IMPORT = dis.opmap["IMPORT_NAME"]


def _is_array(cls: type) -> bool:
    """Whether it is NumPy's. Its scalars have the methods of arrays, and can't change."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and issubclass(cls, numpy.ndarray)


def _slots_of(cls: type) -> dict[str, Any]:
    return {
        name: slot
        for base in mro(cls)
        if not _is_library(base)
        for name, slot in class_dict(base).items()
        if isinstance(slot, types.MemberDescriptorType)
    }
