"""Reach: what a run can read, and by which path, taken before the run reads it.

The walk goes through arguments when the run begins, and through the globals of each
function when it first runs. A tensor that is neither reached nor made by a recorded call
has no known origin. The walk looks into `__dict__`, slots, containers, cells and defaults;
it never runs a property, a `__getattr__` or any other code of the user's.

The contents of what was reached are remembered by identity, so that `find_writes` can tell
which containers and objects the run left changed.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tripwire.env import is_library_module, is_stdlib_module
from tripwire.tracing.sources import Attr, Cell, Global, Item, Source, TypeOf, cells_of
from tripwire.tracing.structure import (
    has_pytree,
    is_namedtuple,
    iter_pytree,
    read_slots,
    slots_of,
)

# A container past this size is not looked into: its tensors, if any, have no known origin.
LARGEST_CONTAINER = 10_000

_LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
    | {types.BuiltinFunctionType, types.CodeType, types.MethodDescriptorType}
)
_CODE_TYPES = (types.FunctionType, property, classmethod, staticmethod, types.MemberDescriptorType)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))  # hook tables and flags, mostly empty
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_INDEXED_MODULES = (nn.ModuleList, nn.Sequential, nn.ParameterList)
_KEYED_MODULES = (nn.ModuleDict, nn.ParameterDict)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a mutable object held when it was reached: keys, and the values' identities."""

    source: Source
    step: type[Attr] | type[Item]  # how a key continues the path
    owner: object
    read: Callable[[object], dict[object, int]]
    held: dict[object, int]


class Reach:
    """Tensors go to `on_tensor`; other objects are kept alive and known by identity."""

    def __init__(self, on_tensor: Callable[[torch.Tensor, Source], None]) -> None:
        self._on_tensor = on_tensor
        self._sources: dict[int, Source] = {}
        self._alive: list[object] = []  # an id means something only while its object lives
        self._contents: list[Contents] = []
        self._classes: dict[int, type] = {}

    def find_source(self, value: object) -> Source | None:
        """The first path that reached this very object."""
        return self._sources.get(id(value))

    def walk(self, value: object, source: Source, names: frozenset[str] = frozenset()) -> None:
        """Reach everything below `value`. `names` limits what is read of Python modules."""
        queue: deque[tuple[object, Source]] = deque([(value, source)])
        while queue:
            item, path = queue.popleft()
            kind = type(item)
            if kind in _LEAVES:
                continue
            if isinstance(item, torch.Tensor):
                self._on_tensor(item, path)
                continue
            key = id(item)
            if key in self._sources:
                continue
            self._sources[key] = path
            self._alive.append(item)
            queue.extend(self._children(item, path, names))

    def _children(
        self, item: object, path: Source, names: frozenset[str]
    ) -> Iterator[tuple[object, Source]]:
        if isinstance(item, nn.Module):
            yield from self._module_children(item, path)
            yield from self._class_of(item, path)
        elif isinstance(item, types.ModuleType):
            if not is_library_module(item.__name__):
                for name in names & vars(item).keys():
                    yield vars(item)[name], Attr(path, name)
        elif isinstance(item, type):
            yield from _class_children(item, path)
        elif isinstance(item, Mapping):
            yield from self._items(item, path)
        elif isinstance(item, (list, tuple, deque)):
            yield from self._elements(item, path)
        elif isinstance(item, types.FunctionType):
            yield from _function_children(item, path)
        elif isinstance(item, types.MethodType):
            yield item.__self__, Attr(path, "__self__")
            yield item.__func__, Attr(path, "__func__")
        elif isinstance(item, functools.partial):
            yield item.func, Attr(path, "func")
            yield item.args, Attr(path, "args")
            yield item.keywords, Attr(path, "keywords")
        elif has_pytree(item):
            yield from iter_pytree(item, path)
        elif not is_stdlib_module(type(item).__module__) or type(item) is types.SimpleNamespace:
            yield from self._attributes(item, path)
            yield from self._class_of(item, path)

    def _class_of(self, item: object, path: Source) -> Iterator[tuple[object, Source]]:
        """What an object's class holds, once per class."""
        cls = type(item)
        if id(cls) not in self._classes:
            self._classes[id(cls)] = cls
            yield from _class_children(cls, TypeOf(path))

    def _module_children(self, module: nn.Module, path: Source) -> Iterator[tuple[object, Source]]:
        indexed = isinstance(module, _INDEXED_MODULES)
        keyed = isinstance(module, _KEYED_MODULES)
        for table_name in _MODULE_TABLES:
            table = module.__dict__.get(table_name)
            if not table:
                continue
            self._remember(path, Attr, table, _dict_contents)
            for name, value in table.items():
                if indexed and name.isdigit():
                    yield value, Item(path, int(name))
                elif keyed:
                    yield value, Item(path, name)
                else:
                    yield value, Attr(path, name)
        self._remember(path, Attr, module.__dict__, _dict_contents)
        for name, value in module.__dict__.items():
            if type(value) in _LEAVES or name in _MODULE_TABLES:
                continue
            if name not in _MODULE_INTERNALS or value:
                yield value, Attr(path, name)

    def _items(
        self, item: Mapping[object, object], path: Source
    ) -> Iterator[tuple[object, Source]]:
        if len(item) > LARGEST_CONTAINER:
            return
        self._remember(path, Item, item, _dict_contents)
        for key, value in item.items():
            if type(value) not in _LEAVES:
                yield value, Item(path, key)

    def _elements(
        self, item: list[object] | tuple[object, ...] | deque[object], path: Source
    ) -> Iterator[tuple[object, Source]]:
        if len(item) > LARGEST_CONTAINER:
            return
        if is_namedtuple(type(item)):
            for name in type(item)._fields:  # type: ignore[union-attr]  # a namedtuple has fields
                yield getattr(item, name), Attr(path, name)
            return
        if not isinstance(item, tuple):
            self._remember(path, Item, item, _list_contents)
        for index, value in enumerate(item):
            if type(value) not in _LEAVES:
                yield value, Item(path, index)

    def _attributes(self, item: object, path: Source) -> Iterator[tuple[object, Source]]:
        attributes = getattr(item, "__dict__", None)
        if type(attributes) is dict:
            self._remember(path, Attr, attributes, _dict_contents)
            for name, value in attributes.items():
                if type(value) not in _LEAVES:
                    yield value, Attr(path, name)
        if slots_of(type(item)):
            self._remember(path, Attr, item, _slot_contents)
            for name, value in read_slots(item).items():
                yield value, Attr(path, name)

    def _remember(
        self,
        source: Source,
        step: type[Attr] | type[Item],
        owner: object,
        read: Callable[[object], dict[object, int]],
    ) -> None:
        self._contents.append(Contents(source, step, owner, read, read(owner)))

    def find_writes(self) -> Iterator[Source]:
        """Paths that hold something else than when they were reached, or nothing any more."""
        for contents in self._contents:
            before, after = contents.held, contents.read(contents.owner)
            if before != after:
                for key in dict.fromkeys((*before, *after)):
                    if before.get(key) != after.get(key):
                        yield contents.step(contents.source, key)  # type: ignore[arg-type]


def _dict_contents(owner: object) -> dict[object, int]:
    assert isinstance(owner, Mapping)
    return dict(zip(owner, map(id, owner.values()), strict=True))


def _list_contents(owner: object) -> dict[object, int]:
    assert isinstance(owner, (list, deque))
    return dict(enumerate(map(id, owner)))


def _slot_contents(owner: object) -> dict[object, int]:
    return {name: id(value) for name, value in read_slots(owner).items()}


def _class_children(cls: type, path: Source) -> Iterator[tuple[object, Source]]:
    """Attributes of a class and its bases that are neither functions nor torch's own."""
    found: set[str] = set()
    for base in cls.__mro__:
        if is_library_module(base.__module__):
            continue
        for name, value in vars(base).items():
            if name not in found and not name.startswith("__"):
                found.add(name)
                if type(value) not in _LEAVES and not isinstance(value, _CODE_TYPES):
                    yield value, Attr(path, name)


def _function_children(
    function: types.FunctionType, path: Source
) -> Iterator[tuple[object, Source]]:
    if is_library_module(function.__module__ or ""):
        return
    for name, cell in cells_of(function).items():
        try:
            yield cell.cell_contents, Cell(path, name)
        except ValueError:  # an empty cell
            continue
    if function.__defaults__:
        yield function.__defaults__, Attr(path, "__defaults__")
    if function.__kwdefaults__:
        yield function.__kwdefaults__, Attr(path, "__kwdefaults__")
    if function.__dict__:
        yield function.__dict__, Attr(path, "__dict__")


def walk_function(
    reach: Reach, code: types.CodeType, namespace: Mapping[str, object], module: str
) -> None:
    """Reach the globals that a function's code names, before it runs."""
    names = frozenset(code.co_names)
    for name in names & namespace.keys():
        value = namespace[name]
        if type(value) not in _LEAVES:
            reach.walk(value, Global(module, name), names)
