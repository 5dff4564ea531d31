"""Reach: what a run can read, and by which path, taken before the run reads it.

The walk goes through arguments when the run begins, and through the globals of each
function when it first runs. A tensor that is neither reached nor made by a recorded call
has no known origin. The walk looks into `__dict__`, slots, containers, cells and defaults;
it runs no property, no `__getattr__` and no method of the user's, pytree functions excepted.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tripwire.env import is_library_module, is_stdlib_module
from tripwire.tracing.contents import (
    MODULE_TABLES,
    Contents,
    held_by_cells,
    held_by_class,
    held_by_dict,
    held_by_items,
    held_by_list,
    held_by_module,
    held_by_names,
    held_by_set,
    held_by_slots,
)
from tripwire.tracing.names import find_global_names
from tripwire.tracing.sources import Attr, Cell, Global, Item, Source, TypeOf, bound_cells
from tripwire.tracing.structure import (
    has_pytree,
    is_namedtuple,
    iter_pytree,
    own_dict,
    read_slots,
    slots_of,
)

# A container past this size is not looked into: its tensors, if any, have no known origin.
LARGEST_CONTAINER = 10_000

_LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
    | {types.BuiltinFunctionType, types.CodeType, types.MethodDescriptorType}
    | {weakref.ProxyType, weakref.CallableProxyType, weakref.ReferenceType}
)
_CODE_TYPES = (property, classmethod, staticmethod, types.MemberDescriptorType)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))  # hook tables and flags, mostly empty
_INDEXED_MODULES = (nn.ModuleList, nn.Sequential, nn.ParameterList)
_KEYED_TABLE = {nn.ModuleDict: "_modules", nn.ParameterDict: "_parameters"}

Reached = Iterator[tuple[object, Source]]


class Reach:
    """Tensors go to `on_tensor`; other objects are kept alive and known by identity."""

    def __init__(self, on_tensor: Callable[[torch.Tensor, Source], None]) -> None:
        self._on_tensor = on_tensor
        self._sources: dict[int, Source] = {}
        self._alive: list[object] = []  # an id means something only while its object lives
        self._classes: set[int] = set()
        self._module_names: set[tuple[int, str]] = set()
        self.generators: list[tuple[torch.Generator, int]] = []  # with their seeds
        self.contents = Contents()

    def find_source(self, value: object) -> Source | None:
        """The first path that reached this very object."""
        return self._sources.get(id(value))

    def walk(self, value: object, source: Source, names: frozenset[str] = frozenset()) -> None:
        """Reach everything below `value`. `names` limits what is read of Python modules."""
        queue: deque[tuple[object, Source]] = deque([(value, source)])
        while queue:
            item, path = queue.popleft()
            if type(item) in _LEAVES:
                continue
            if isinstance(item, torch.Tensor):
                self._on_tensor(item, path)
            elif isinstance(item, types.ModuleType):  # each name once, and other names later
                queue.extend(self._names_of(item, path, names))
            elif id(item) not in self._sources:
                self._sources[id(item)] = path
                self._alive.append(item)
                queue.extend(self._children(item, path))

    def walk_function(self, code: types.CodeType, namespace: dict[str, Any], module: str) -> None:
        """Reach the globals that a function's code names, before it runs."""
        globals_ = find_global_names(code)
        step = functools.partial(Global, module)
        self.contents.remember(namespace, held_by_names(globals_), step)
        names = frozenset(code.co_names)  # attributes as well: those of Python modules
        for name in sorted(globals_ & namespace.keys()):
            self.walk(namespace[name], Global(module, name), names)

    def walk_cells(self, function: types.FunctionType, path: Source | None) -> None:
        """Reach the closure variables of a function; None for the traced one."""
        for value, source in self._cells(function, path):
            self.walk(value, source)

    def _children(self, item: Any, path: Source) -> Reached:
        match item:
            case nn.Module():
                yield from self._module_children(item, path)
                yield from self._class_of(item, path)
            case type():
                yield from self._class_children(item, path)
            case dict():
                yield from self._items(item, path)
                yield from self._attributes(item, path)
            case list() | tuple() | deque():
                yield from self._elements(item, path)
            case set():
                if len(item) <= LARGEST_CONTAINER:
                    self.contents.remember(item, held_by_set, functools.partial(Item, path))
            case types.FunctionType():
                yield from self._function_children(item, path)
            case types.MethodType():
                yield item.__self__, Attr(path, "__self__")
                yield item.__func__, Attr(path, "__func__")
            case torch.Generator():
                self.generators.append((item, item.initial_seed()))
            case functools.partial():
                yield item.func, Attr(path, "func")
                yield item.args, Attr(path, "args")
                yield item.keywords, Attr(path, "keywords")
            case _ if has_pytree(item):
                yield from iter_pytree(item, path)
            case _ if _is_looked_into(type(item)):
                yield from self._attributes(item, path)
                yield from self._class_of(item, path)

    def _names_of(self, module: types.ModuleType, path: Source, names: frozenset[str]) -> Reached:
        if is_library_module(module.__name__):
            return
        space = vars(module)
        new = [n for n in sorted(names) if (id(module), n) not in self._module_names]
        self._module_names.update((id(module), name) for name in new)
        if new:
            read = held_by_names(frozenset(new))
            self.contents.remember(space, read, functools.partial(Attr, path))
        for name in new:
            if name in space:
                yield space[name], Attr(path, name)

    def _class_of(self, item: object, path: Source) -> Reached:
        """What an object's class holds, once per class."""
        if id(type(item)) not in self._classes:
            self._classes.add(id(type(item)))
            self._alive.append(type(item))
            yield from self._class_children(type(item), TypeOf(path))

    def _class_children(self, cls: type, path: Source) -> Reached:
        """Attributes of a class and its bases that are neither functions nor torch's own."""
        found: set[str] = set()
        for base in cls.__mro__:
            if is_library_module(_module_of(base)):
                continue
            self.contents.remember(base, held_by_class, functools.partial(Attr, path))
            for name, value in vars(base).items():
                if name not in found and not name.startswith("__"):
                    found.add(name)
                    if isinstance(value, types.FunctionType):
                        yield from self._function_children(value, Attr(path, name))
                    elif type(value) not in _LEAVES and not isinstance(value, _CODE_TYPES):
                        yield value, Attr(path, name)

    def _module_children(self, module: nn.Module, path: Source) -> Reached:
        self.contents.remember(module, held_by_module, functools.partial(Attr, path))
        indexed = type(module) in _INDEXED_MODULES
        keyed = type(module) in _KEYED_TABLE
        position = itertools.count()
        for table_name in MODULE_TABLES:
            table = module.__dict__.get(table_name)
            if not table:
                continue
            for name, value in table.items():
                if _is_shadowed(module, name, value):
                    continue
                if indexed and name == str(next(position)):
                    yield value, Item(path, int(name))
                elif keyed and table_name == _KEYED_TABLE[type(module)]:
                    yield value, Item(path, name)
                else:
                    yield value, Attr(path, name)
        for name, value in module.__dict__.items():
            if type(value) in _LEAVES or name in MODULE_TABLES:
                continue
            if (name not in _MODULE_INTERNALS or value) and not _is_shadowed(module, name, value):
                yield value, Attr(path, name)

    def _items(self, item: dict[Any, Any], path: Source) -> Reached:
        if len(item) > LARGEST_CONTAINER or type(item).__getitem__ is not dict.__getitem__:
            return
        self.contents.remember(item, held_by_items, functools.partial(Item, path))
        for key, value in dict.items(item):
            if type(value) not in _LEAVES:
                yield value, Item(path, key)

    def _elements(self, item: Any, path: Source) -> Reached:
        if len(item) > LARGEST_CONTAINER:
            return
        if is_namedtuple(type(item)):
            for name in type(item)._fields:
                yield getattr(item, name), Attr(path, name)
            return
        if not isinstance(item, tuple):
            self.contents.remember(item, held_by_list, functools.partial(Item, path))
        for index, value in enumerate(item):
            if type(value) not in _LEAVES:
                yield value, Item(path, index)

    def _attributes(self, item: Any, path: Source) -> Reached:
        attributes = own_dict(item)
        if attributes is not None:
            self.contents.remember(attributes, held_by_dict, functools.partial(Attr, path))
            for name, value in attributes.items():
                if type(value) not in _LEAVES and not _is_shadowed(item, name, value):
                    yield value, Attr(path, name)
        if slots_of(type(item)):
            self.contents.remember(item, held_by_slots, functools.partial(Attr, path))
            for name, value in read_slots(item).items():
                yield value, Attr(path, name)

    def _function_children(self, function: types.FunctionType, path: Source) -> Reached:
        if is_library_module(function.__module__ or ""):
            return
        yield from self._cells(function, path)
        if function.__defaults__:
            yield function.__defaults__, Attr(path, "__defaults__")
        if function.__kwdefaults__:
            yield function.__kwdefaults__, Attr(path, "__kwdefaults__")
        if function.__dict__:
            yield function.__dict__, Attr(path, "__dict__")

    def _cells(self, function: types.FunctionType, path: Source | None) -> Reached:
        if function.__closure__:
            self.contents.remember(function, held_by_cells, functools.partial(Cell, path))
        for name, value in bound_cells(function).items():
            yield value, Cell(path, name)


def _is_shadowed(item: object, name: str, value: object) -> bool:
    """Whether `getattr` would find something else: a property of the class, say."""
    return isinstance(value, torch.Tensor) and hasattr(type(item), name)


def _is_looked_into(cls: type) -> bool:
    """Objects of the standard library, of torch's insides and of tripwire hold no user's state."""
    module = _module_of(cls)
    if is_stdlib_module(module):
        return cls in (types.SimpleNamespace, argparse.Namespace)
    return not module.startswith("torch._") and module.partition(".")[0] != "tripwire"


def _module_of(cls: type) -> str:
    module = cls.__module__
    return module if isinstance(module, str) else ""
