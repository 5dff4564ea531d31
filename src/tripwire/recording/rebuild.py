"""Rebuild: functions, modules and library things of a trusted record, live again.

Everything here can run a record's code sooner or later, so it is used only after somebody said
that the record is trusted. Functions are made from code alone; nothing of the user's runs while
they are made: no decorator, no class body, no metaclass, no `__init_subclass__`.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import os
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from tripwire.errors import CannotReplay
from tripwire.recording import nodes
from tripwire.recording.classmaker import ClassMaker
from tripwire.recording.defined import define
from tripwire.recording.nodes import AnyNode, Slot
from tripwire.recording.origin import is_library_module, resolve
from tripwire.recording.reading import read_dict
from tripwire.recording.recompiled import make_compiled, make_dispatcher
from tripwire.recording.shelf import Shelf

Value = Callable[[Slot], Any]


class Rebuilder:
    """Makes what isn't data out of a trusted table."""

    def __init__(self, table: nodes.Table, shelf: Shelf) -> None:
        self._table = table
        self._shelf = shelf
        self._classes = ClassMaker(table)
        self._modules: dict[int, types.ModuleType] = {}  # by the id of their namespace
        self._importable: dict[str, types.ModuleType] = {}
        self._defined: list[type | types.FunctionType] = []

    def needs(self, node: AnyNode) -> Iterable[Slot]:
        """What must have been made before `make` is called."""
        match node:
            case nodes.Function():
                return (node.namespace, *node.closure)
            case nodes.Wrapped():
                return node.parts
            case nodes.Class():
                return self._classes.needs(node)
            case nodes.Namespace():
                return (value for name, value in _items(node) if name == "__builtins__")
            case nodes.Module():
                return (node.namespace,)
        return ()

    def make(self, node: AnyNode, value: Value) -> object:
        """The thing, or a shell of it."""
        match node:
            case nodes.Library():
                return find_in_library(node)
            case nodes.Cell():
                return types.CellType()
            case nodes.Function():
                return self._make_function(node, value)
            case nodes.Wrapped():
                return _make_wrapped(node, value)
            case nodes.Class():
                cls = self._classes.make(node, value)
                self._defined.append(cls)
                return cls
            case nodes.Namespace():
                return self._make_namespace(node, value)
            case nodes.Module():
                return self._make_module(node, value)
        raise ValueError(f"{type(node).__name__} has no place here")

    def fill(self, node: AnyNode, made: Any, value: Value) -> None:
        """Put into a shell what belongs there."""
        match node:
            case nodes.Cell():
                if not node.empty:
                    made.cell_contents = value(node.content)
            case nodes.Function():
                self._fill_function(node, made, value)
            case nodes.Class():
                self._classes.fill(made, value)
            case nodes.Wrapped(form="lru_cache" | "singledispatch" | "derived"):
                entries = read_dict(self._table, node.parts[-1])
                made.__dict__.update((name, value(slot)) for name, slot in entries)
            case nodes.Namespace():
                made.update((name, value(slot)) for name, slot in _items(node))
            case nodes.Module():
                vars(made).update((name, value(slot)) for name, slot in _items(node))

    # --- functions ---

    def _make_function(self, node: nodes.Function, value: Value) -> types.FunctionType:
        code = self._shelf.code(node.code)
        free = self._table.codes[node.code].free
        cells = dict(zip(free, map(value, node.closure), strict=True))
        made = types.FunctionType(
            code, value(node.namespace), node.name, None, tuple(cells[n] for n in code.co_freevars)
        )
        made.__qualname__ = node.qualname
        self._defined.append(made)
        return made

    def _fill_function(self, node: nodes.Function, made: types.FunctionType, value: Value) -> None:
        made.__defaults__ = value(node.defaults)
        made.__kwdefaults__ = value(node.kwdefaults)
        if node.attributes is not None:
            made.__dict__ = value(node.attributes)
        for name, slot in read_dict(self._table, node.special):
            setattr(made, name, value(slot))

    # --- modules ---

    def _make_namespace(self, node: nodes.Namespace, value: Value) -> dict[str, object]:
        module = types.ModuleType(node.module)
        space = vars(module)
        if not node.module:
            del space["__name__"]
        own = [slot for name, slot in _items(node) if name == "__builtins__"]
        # A function takes its builtins from its namespace when it is made.
        space["__builtins__"] = value(own[0]) if own else vars(builtins)
        self._modules[id(space)] = module
        if node.module:
            self._importable.setdefault(node.module, module)
        return space

    def _make_module(self, node: nodes.Module, value: Value) -> types.ModuleType:
        space = value(node.namespace)
        module = self._modules[id(space)] if space is not None else types.ModuleType(node.name)
        self._importable[node.name] = module
        return module

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        """While this is open, code that imports the user's modules finds the record's."""
        define(self._defined, self._importable)
        ours = {n: m for n, m in self._importable.items() if not is_library_module(n)}
        for name, module in ours.items():
            if _is_package(module) or any(other.startswith(f"{name}.") for other in ours):
                vars(module).setdefault("__path__", [])
        before: dict[str, types.ModuleType | None] = {n: sys.modules.get(n) for n in ours}
        sys.modules.update(ours)
        try:
            yield
        finally:
            for name, known in before.items():
                if known is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = known


def _is_package(module: types.ModuleType) -> bool:
    """Whether what isn't found below a module is a missing module, and not a missing package."""
    return os.path.basename(str(vars(module).get("__file__"))) == "__init__.py"


def _items(node: nodes.Namespace | nodes.Module) -> Iterable[tuple[str, Slot]]:
    return zip(node.names, node.values, strict=True)


# --- libraries ---


def find_in_library(node: nodes.Library) -> object:
    """Import what a record names."""
    where = f"{node.module}.{node.name}" if node.name else node.module
    try:
        module = importlib.import_module(node.module)
    except ImportError as error:
        raise _not_here(where, f"importing {node.module} failed: {error}") from error
    try:
        return resolve(module, node.name)
    except AttributeError as error:
        raise _not_here(where, str(error)) from error


def _not_here(where: str, why: str) -> CannotReplay:
    return CannotReplay(
        f"The record uses {where}, which isn't here: {why}.\n"
        "Install the package in the version that the record's manifest names.",
        slug="replay-missing-library",
    )


# --- things around functions ---


def _make_wrapped(node: nodes.Wrapped, value: Value) -> object:
    make = _MAKERS.get(node.form)
    if make is None:
        raise ValueError(f"nothing is known of the form {node.form!r}")
    return make(*map(value, node.parts))


def _make_partial(
    function: Any, args: Any, names: Any, values: Any, attributes: Any
) -> functools.partial[Any]:
    made = functools.partial(function, *args, **dict(zip(names, values, strict=True)))
    if attributes is not None:
        made.__dict__ = attributes
    return made


def _make_cached_property(function: Any, name: Any) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _make_lru_cache(function: Any, maxsize: Any, typed: Any, _: object) -> object:
    return functools.lru_cache(maxsize, typed)(function)


def _make_singledispatch(function: Any, kinds: Any, functions: Any, _: object) -> object:
    made = functools.singledispatch(function)
    for kind, implementation in zip(kinds, functions, strict=True):
        made.register(kind, implementation)
    return made


def _make_derived(cls: Any, form: Any, parts: Any, _: object) -> object:
    """An instance of a class that is built on one of the others."""
    if form == "partial":
        function, args, names, values, _ = parts
        given = dict(zip(names, values, strict=True))
        return functools.partial.__new__(cls, function, *args, **given)
    base = _BASES[form]
    made = base.__new__(cls)
    if form == "cached_property":
        base.__init__(made, parts[0])
        made.attrname = parts[1]
    else:
        base.__init__(made, *parts)
    return made


_BASES: dict[str, Any] = {
    "property": property,
    "cached_property": functools.cached_property,
    "staticmethod": staticmethod,
    "classmethod": classmethod,
}


class _Gone:
    """Something that has died."""


def _make_weakref(target: Any) -> weakref.ref[Any]:
    return weakref.ref(_Gone() if target is None else target)


def _make_generic(origin: Any, args: Any) -> object:
    if origin is typing.Callable and type(args[0]) is tuple:
        args = (list(args[0]), *args[1:])
    if isinstance(origin, type) and not is_library_module(origin.__module__):
        # A class of the record's has no parameters yet that could be checked.
        return cast("Any", typing)._GenericAlias(origin, args)
    if isinstance(origin, typing._SpecialForm) and len(args) == 1:
        return origin[args[0]]  # ClassVar, Final, Required, ... take a type, and no tuple
    return origin[args]


def _make_union(args: Any) -> object:
    return functools.reduce(lambda a, b: a | b, args)


def _make_typevar(
    name: Any, bound: Any, constraints: Any, co: Any, contra: Any, infer: Any
) -> object:
    given = {"bound": bound, "covariant": co, "contravariant": contra}
    if infer and sys.version_info >= (3, 12):
        given["infer_variance"] = True
    return cast("Any", typing.TypeVar)(name, *constraints, **given)


_MAKERS: dict[str, Callable[..., object]] = {
    "method": types.MethodType,
    "builtin": getattr,
    "member": lambda cls, name: vars(cls)[name],
    "derived": _make_derived,
    "called": lambda function, *args: function(*args),
    "partial": _make_partial,
    "staticmethod": staticmethod,
    "classmethod": classmethod,
    "property": property,
    "cached_property": _make_cached_property,
    "lru_cache": _make_lru_cache,
    "compiled": make_compiled,
    "dispatcher": make_dispatcher,
    "recorded": lambda function: function,
    "singledispatch": _make_singledispatch,
    "weakref": _make_weakref,
    "proxy": types.MappingProxyType,
    "alias": types.GenericAlias,
    "generic": _make_generic,
    "union": _make_union,
    "typevar": _make_typevar,
    "forward": typing.ForwardRef,
}
