"""Reach: what a run can read, and by which path, taken before the run reads it.

The walk goes through arguments when the run begins, and through the globals of each
function when it first runs. A tensor that is neither reached nor made by a recorded call
has no known origin. The walk looks into `__dict__`, slots, containers, cells and defaults;
it runs no property, no `__getattr__` and no method of the user's, pytree functions excepted.

What is reached through a module, a class or a function is *anchored*: the same things on every
call, as long as nobody writes to what leads there. What is reached through other arguments
comes anew with every call, by its path.
"""

from __future__ import annotations

import abc
import array
import builtins
import datetime
import functools
import gc
import itertools
import logging
import operator
import re
import struct
import sys
import threading
import types
import weakref
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

import torch
from torch import nn

from tripwire.callables import find_in_class, mro_of
from tripwire.env import is_library_module
from tripwire.tracing.belongings import (
    CONTAINERS,
    can_be_written,
    hides_state,
    is_array,
    is_library_class,
    is_library_function,
    is_librarys,
    is_looked_into,
    is_numpy_constant,
    is_pythons,
    module_of,
    name_of_module,
)
from tripwire.tracing.holders import (
    ARRAY,
    ATTRIBUTES,
    CELLS,
    CLASS_DICT,
    CODE,
    CONTEXT,
    ELEMENTS,
    FACTORY,
    ITEMS,
    LIBRARY_CLASS,
    MEMBERS,
    MEMO,
    SLOTS,
    THREAD_LOCAL,
    WEAK,
    Holders,
    LibraryNames,
    Names,
    Table,
    unhooked,
)
from tripwire.tracing.names import find_global_names
from tripwire.tracing.purity import find_impurity
from tripwire.tracing.rules import Refuse, words
from tripwire.tracing.sources import (
    Attr,
    Cell,
    Global,
    Imported,
    Item,
    Referent,
    Running,
    Source,
    TypeOf,
    bound_cells,
)
from tripwire.tracing.structure import (
    at_once,
    copy_dict,
    has_pytree,
    is_namedtuple,
    iter_pytree,
    own_dict,
    read_slots,
    slots_of,
)
from tripwire.tracing.uses import RECORDED, Step, StepKind, Uses, find_uses

# A container past this size is not looked into: its tensors, if any, have no known origin.
LARGEST_CONTAINER = 10_000

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, type(...), object}
    | {type(NotImplemented)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
    | {types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType}
    | {types.GetSetDescriptorType, types.MemberDescriptorType}
    | {types.ClassMethodDescriptorType}
    | {type(namedtuple("_", "x").x)}  # type: ignore[attr-defined]  # a field's descriptor
    | {type(abc.ABC._abc_impl)}  # type: ignore[attr-defined]  # a guard asks for its token
)
# In classes: what Python, abc, typing and dataclasses keep there for themselves.
_MADE_BY_PYTHON = words(
    "__dict__ __weakref__ __annotations__ __annotate__ __annotate_func__ __slots__ __match_args__ "
    "__type_params__ __static_attributes__ __orig_bases__ __parameters__ __abstractmethods__ "
    "_abc_impl __dataclass_fields__ __dataclass_params__"
)
_CODE_TYPES = (property, classmethod, staticmethod, functools.cached_property)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))  # hook tables and flags, mostly empty
_INDEXED_MODULES = (nn.ModuleList, nn.Sequential, nn.ParameterList)
_KEYED_TABLE = {nn.ModuleDict: "_modules", nn.ParameterDict: "_parameters"}
_NOT_SAVED = "_non_persistent_buffers_set"  # what state_dict leaves out; no call reads it
_IMMUTABLE = (re.Pattern, datetime.date, datetime.timedelta, Decimal, struct.Struct)
PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
BYTES = (bytearray, array.array)
_MEMO_TYPE = type(functools.lru_cache(len))

Reached = Iterator[tuple[object, Source]]


class Reach:
    """Tensors go to `on_tensor`; other objects are kept alive and known by identity."""

    def __init__(self, on_tensor: Callable[[torch.Tensor, Source, bool], None]) -> None:
        self._on_tensor = on_tensor
        self._sources: dict[int, Source] = {}
        self._alive: list[object] = []  # an id means something only while its object lives
        self._tags: dict[int, dict[str, Any]] = {}  # attributes of tensors, by their identity
        self._classes: set[int] = set()
        self._python_modules: dict[int, tuple[types.ModuleType, Source]] = {}
        self._module_names: dict[int, set[str]] = {}  # of Python modules, those reached
        self._names: frozenset[str] = frozenset()  # attribute names of the code that ran so far
        self.generators: list[tuple[torch.Generator, int]] = []  # with their seeds
        self.holders = Holders()
        self.paths: dict[int, list[Source]] = {}  # every path of a container
        self.edges: list[tuple[int, Source]] = []  # every step to an object, by its identity
        self.object_at: dict[int, tuple[object, int]] = {}  # by the identity of its first path
        self.spelled_names: set[str] = set()  # by attrgetter and its like
        self.hides_names = False  # an alias of getattr was bound before the run
        self.modules: list[tuple[nn.Module, Source, bool]] = []
        self.called: dict[int, nn.Module] = {}  # by the run: their hooks were looked at
        self.objects: list[tuple[object, Source, bool]] = []  # with attributes; no nn.Module
        self.classes: list[tuple[type, Source]] = []
        self.functions: list[tuple[types.FunctionType, Source]] = []
        self.opaque: list[tuple[object, Source]] = []  # C objects whose state can't be seen
        self.aliases: list[object] = []  # arguments, and below them, that are state as well
        self.fresh: dict[int, Source] = {}  # reached through arguments: id → path
        # Tables of modules that held nothing: whoever fills one changes what the module does.
        self.empty_tables: list[tuple[nn.Module, str, Source, bool]] = []
        self.handed_on: list[tuple[Refuse, str]] = []  # C functions for C code to call, and where
        self._passed: dict[str, str] = {}  # names that are handed to calls, and where
        self.homes: set[str] = set()  # modules of what was reached: of modules, classes, arrays
        self.known_code: set[int] = set()  # of reached functions, and of functions made inside
        self._remember_library_class(torch.Tensor, Global("torch", "Tensor"))

    def close(self) -> None:
        """Reach no more tensors: lets go of the state, which holds this."""
        self._on_tensor = _ignore

    def find_source(self, value: object) -> Source | None:
        """The first path that reached this very object."""
        return self._sources.get(id(value))

    def is_anchored(self, value: object) -> bool:
        """Whether a value is the same on every call."""
        return id(value) in self._sources and id(value) not in self.fresh

    def walk(
        self, value: object, source: Source, anchored: bool, names: frozenset[str] = frozenset()
    ) -> None:
        """Reach everything below `value`. `names` limits what is read of Python modules."""
        queue: deque[tuple[object, Source, bool]] = deque([(value, source, anchored)])
        while queue:
            item, path, anchored = queue.popleft()
            if item is _GETS_ATTRIBUTES or item is operator.attrgetter:
                self.hides_names = True
            if type(item) in _LEAVES:
                continue
            if type(item) is types.BuiltinFunctionType and item in _LOOKS_BY_NAME:
                self.hides_names = True
            if type(item) in PROXIES:
                item = behind_proxy(item)
                if item is None:
                    continue
                path = Referent(path)
            if isinstance(item, torch.Tensor):
                self._on_tensor(item, path, anchored)
                queue.extend((v, p, anchored) for v, p in self._below_tensor(item, path))
                continue
            if isinstance(item, types.ModuleType):  # each name once, and other names later
                queue.extend((v, p, True) for v, p in self._module_class(item, path))
                found = self._names_of(item, path, names | self._names)
                queue.extend((v, p, True) for v, p in found)
                continue
            known = self._sources.get(id(item))
            self.edges.append((id(item), path))
            if isinstance(item, CONTAINERS):
                self.paths.setdefault(id(item), []).append(path)
            if known is not None:
                if anchored and id(item) in self.fresh:
                    self.aliases.append(item)
                continue
            self._sources[id(item)] = path
            self.object_at[id(path)] = (item, id(item))
            self._alive.append(item)
            if not anchored:
                self.fresh[id(item)] = path
            below = anchored or isinstance(item, PINNED)
            queue.extend(
                (v, p, below or isinstance(p.base, TypeOf))  # a class is the same on every call
                for v, p in self._children(item, path, below)
            )

    def _below_tensor(self, tensor: torch.Tensor, path: Source) -> Reached:
        """What a tensor's own attributes lead to. That they are there is the state's to note."""
        attributes = own_dict(tensor)
        if attributes and id(attributes) not in self._tags:
            self._tags[id(attributes)] = attributes
            for name, value in copy_dict(attributes).items():
                if type(value) not in _LEAVES:
                    yield value, Attr(path, name)
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            yield from self._class_of(tensor, path)

    def walk_function(self, code: types.CodeType, namespace: dict[str, Any], module: str) -> None:
        """Reach the globals that a function's code names, before it runs."""
        globals_ = find_global_names(code)
        self.hides_names |= not RECORDED.isdisjoint(globals_ & namespace.keys())
        self.holders.remember(namespace, Names(globals_, module), None, True)
        uses = find_uses(code)
        for name, line in uses.passed.items():
            self._passed.setdefault(name, f"{code.co_filename}:{line}")
            if name in globals_:
                self._judge(name, namespace.get(name, vars(builtins).get(name)))
        names = (frozenset(uses.attributes) | uses.stored_attributes) - self._names
        self._names |= names
        for name in sorted(globals_ & namespace.keys()):
            if namespace[name] is sys:
                self._walk_loaded_modules(uses, name, Global(module, name))
            self.walk(namespace[name], Global(module, name), True)
        for name in sorted((globals_ & vars(builtins).keys()) - namespace.keys()):
            found = unhooked(vars(builtins)[name])
            if not is_pythons(found):
                self.walk(found, Global("builtins", name), True)
        self.walk_names(names)

    def _judge(self, name: str, value: object) -> None:
        """A C function that is handed to a call may be called by C code, which no event shows."""
        if isinstance(value, types.BuiltinFunctionType):
            refuse = find_impurity(value, library=False)
            if refuse is not None:
                self.handed_on.append((refuse, self._passed[name]))

    def _judge_held(self, function: object, holder: object, path: Source) -> None:
        """The same of one in a container or a partial: code that calls it from there can be C."""
        if isinstance(function, types.BuiltinFunctionType):
            if find_impurity(function, library=False) is not None:
                self.opaque.append((holder, path))

    def _walk_loaded_modules(self, uses: Uses, name: str, path: Source) -> None:
        """Reach what a function takes from `sys.modules` by constant names."""
        of_sys = uses.steps.get(Step(StepKind.GLOBAL, name))
        if of_sys is None or "modules" not in of_sys.attributes:
            return
        use = uses.steps[Step(StepKind.ATTRIBUTE, "modules")]
        for key in use.keys:
            self.walk_import(str(key))
        if use.whole or use.attributes or use.stored_keys:
            loaded = Attr(path, "modules")
            self.edges.append((id(sys.modules), loaded))
            self.opaque.append((sys.modules, loaded))

    def walk_names(self, names: frozenset[str]) -> None:
        """Reach attributes of the Python modules that are known so far."""
        for python_module, path in tuple(self._python_modules.values()) if names else ():
            self.walk(python_module, path, True, names)

    def walk_import(self, name: str) -> None:
        """Reach what a function imports while it runs."""
        if not is_library_module(name):
            self.holders.remember(sys.modules, Names(frozenset({name}), "sys.modules"), None, True)
            self.walk(sys.modules.get(name), Imported(name), True)

    def walk_traced(self, function: types.FunctionType) -> None:
        """Reach the closure variables of the traced function, its defaults, and itself."""
        self.known_code.add(id(function.__code__))
        path = Running(function.__qualname__)
        self._sources[id(function)] = path
        self.object_at[id(path)] = (function, id(function))
        self.edges.append((id(function), path))
        self._alive.append(function)
        self.functions.append((function, path))
        self.holders.remember(function, CODE, path, True)
        for value, source in self._cells(function, None):
            self.walk(value, source, True)
        if function.__kwdefaults__:
            self.walk(function.__kwdefaults__, Attr(path, "__kwdefaults__"), True)
        for value, source in self._attributes(function, path, True):
            self.walk(value, source, True)

    def _children(self, item: Any, path: Source, anchored: bool) -> Reached:
        cls = type(item)
        match item:
            case torch.jit.ScriptModule():  # its tables are C objects that look like dicts
                self.opaque.append((item, path))
                return
            case nn.Module():
                yield from self._module_children(item, path, anchored)
                yield from self._class_of(item, path)
                return
            case type():
                yield from self._class_children(item, path)
                return
            case types.FunctionType():
                yield from self._function_children(item, path)
                return
            case dict():
                yield from self._items(item, path, anchored)
                if isinstance(item, defaultdict):
                    self.holders.remember(item, FACTORY, path, anchored)
                    yield item.default_factory, Attr(path, "default_factory")
            case list() | tuple() | deque():
                yield from self._elements(item, path, anchored)
            case set():
                self.holders.remember(item, MEMBERS, path, anchored)
                yield from self._members(item, path)
            case frozenset():
                yield from self._members(item, path)
            case slice():
                for name in ("start", "stop", "step"):
                    yield getattr(item, name), Attr(path, name)
            case types.GenericAlias() | types.UnionType():
                yield getattr(item, "__origin__", None), Attr(path, "__origin__")
                yield item.__args__, Attr(path, "__args__")
            case types.MethodType():
                yield item.__self__, Attr(path, "__self__")
                yield item.__func__, Attr(path, "__func__")
            case torch.Generator():
                self.generators.append((item, item.initial_seed()))
            case functools.partial():
                self._judge_held(item.func, item, path)
                yield item.func, Attr(path, "func")
                yield item.args, Attr(path, "args")
                yield item.keywords, Attr(path, "keywords")
            case weakref.ReferenceType():
                self.holders.remember(item, WEAK, path, anchored)
                yield item(), Referent(path)
            case ContextVar():
                self.holders.remember(item, CONTEXT, path, anchored)
                yield _value_of(item), Referent(path)
            case _ if isinstance(item, threading.local):
                self.holders.remember(item, THREAD_LOCAL, path, anchored)
                for name, value in copy_dict(item.__dict__).items():
                    yield value, Attr(path, name)
                yield from self._class_of(item, path)
                return
            case _ if isinstance(item, _MEMO_TYPE):
                self.holders.remember(item, MEMO, path, anchored)
                yield from self._memo_children(item, path)
            case _ if isinstance(item, _CODE_TYPES):
                yield from _inside_descriptor(item, path)
            case types.BuiltinFunctionType():  # mostly it is judged when it is called
                if isinstance(path, Item):
                    self._judge_held(item, item, path)
                if not isinstance(item.__self__, types.ModuleType):
                    yield item.__self__, Attr(path, "__self__")
            case types.MethodWrapperType():
                self.hides_names |= item.__name__ == "__getattribute__"
                yield item.__self__, Attr(path, "__self__")
            case operator.attrgetter() | operator.methodcaller() | operator.itemgetter():
                self._spelled_by(item, path)
            case types.MappingProxyType():
                yield dict_behind(item), path
            case _ if cls in _IMMUTABLE or is_numpy_constant(item):
                self.homes.add(module_of(cls).partition(".")[0])
                return
            case _ if is_array(item) and item.dtype.hasobject:
                self.opaque.append((item, path))
            case _ if is_array(item) or isinstance(item, BYTES):
                self.homes.add(module_of(cls))
                self.holders.remember(item, ARRAY, path, anchored)
            case _ if has_pytree(item):
                yield from iter_pytree(item, path)
            case logging.Logger():
                self._remember_logger(item, path, anchored)
                return
            case _ if module_of(cls).partition(".")[0] in _MACHINERY:
                if not isinstance(item, _LOCKS):  # which are held for a moment, and free again
                    self.opaque.append((item, path))  # an event, a future, a thread, ...
                return
            case _ if cls.__module__ == _COMPILED:  # a compiled function's own attributes
                yield from self._attributes(item, path, anchored)
                return
            case _ if not is_looked_into(cls):
                return
            case _ if hides_state(cls) or not (own_dict(item) is not None or slots_of(cls)):
                self.opaque.append((item, path))
        if own_dict(item) is not None or can_be_written(cls):
            self.objects.append((item, path, anchored))
            yield from self._attributes(item, path, anchored)
            yield from self._class_of(item, path)

    def _module_class(self, module: types.ModuleType, path: Source) -> Reached:
        """What the class of a user's Python module holds: it may be the user's own."""
        known = self._python_modules.get(id(module))
        if known is not None and known[1] is path:
            return
        self._python_modules.setdefault(id(module), (module, path))
        if is_library_module(name_of_module(module)):
            return
        self.edges.append((id(module), path))
        if known is None:
            self.objects.append((module, path, True))
            yield from self._class_of(module, path)

    def _names_of(self, module: types.ModuleType, path: Source, names: frozenset[str]) -> Reached:
        space, module_name = own_dict(module) or {}, name_of_module(module)
        self.homes.add(module_name)
        library = is_library_module(module_name)
        if not library:
            names |= {"__getattr__"}  # which is asked for what isn't there
        known = self._module_names.setdefault(id(module), set())
        new = names - known
        known |= new
        if new:
            kind = LibraryNames if library else Names
            self.holders.remember(space, kind(frozenset(new)), path, True)
        for name in sorted(new & self._passed.keys()) if library else ():
            self._judge(name, space.get(name))
        for name in sorted(new & space.keys()):
            value = space[name]
            if not (library and is_librarys(value)):
                yield value, Attr(path, name)
            elif isinstance(value, type):
                self._remember_library_class(value, Attr(path, name))

    def _remember_logger(self, logger: logging.Logger, path: Source, anchored: bool) -> None:
        """What decides whether a logger is on: its level, or the nearest above it that has one."""
        self.holders.remember(logger, ATTRIBUTES, path, anchored)
        manager = Attr(path, "manager")
        self.holders.remember(logger.manager, ATTRIBUTES, manager, anchored)
        self.holders.remember(vars(logger.manager), LibraryNames(_OF_MANAGER), manager, True)
        above: logging.Logger | None = logger
        while above is not None:
            self.holders.remember(vars(above), LibraryNames(_OF_LOGGER), path, True)
            above, path = above.parent, Attr(path, "parent")

    def _class_of(self, item: object, path: Source) -> Reached:
        """What an object's class holds, once per class."""
        yield from self._class_children(type(item), TypeOf(path))

    def _class_children(self, cls: type, path: Source) -> Reached:
        """Attributes of a class and its bases that aren't torch's or the standard library's."""
        self._alive.append(path)
        for base in mro_of(cls):
            self.homes.add(module_of(base))
            if is_library_class(base):
                self._remember_library_class(base, path)
                continue
            self.edges.append((id(base), path))
            if id(base) in self._classes:
                continue
            self._classes.add(id(base))
            self.object_at.setdefault(id(path), (base, id(base)))
            self._alive.append(base)
            self.classes.append((base, path))
            self.holders.remember(base, CLASS_DICT, path, True)
            for name, value in at_once(vars(base).items):
                if type(value) in _LEAVES or name in _MADE_BY_PYTHON - self._names:
                    continue
                yield value, Attr(path, name)
        if type(cls) is not type and not is_library_class(type(cls)):
            yield from self._class_children(type(cls), TypeOf(path))

    def _remember_library_class(self, cls: type, path: Source) -> None:
        """A method of torch's that somebody replaces counts; what it holds isn't walked."""
        self.edges.append((id(cls), path))
        if id(cls) not in self._classes and can_be_written(cls):
            self._classes.add(id(cls))
            self._alive.append(cls)
            self.holders.remember(cls, LIBRARY_CLASS, path, True)

    def _module_children(self, module: nn.Module, path: Source, anchored: bool) -> Reached:
        self.modules.append((module, path, anchored))
        remember = self.holders.remember
        remember(module, ATTRIBUTES, path, anchored)
        cls = type(module)
        if isinstance(module, CONTAINERS):  # a list as well, say
            self.opaque.append((module, path))
        yield from self._slots(module, path, anchored)
        indexed = issubclass(cls, _INDEXED_MODULES)
        keyed_table = _KEYED_TABLE.get(cls)
        for table_name in MODULE_TABLES:
            table = module.__dict__.get(table_name)
            if not table:
                self.empty_tables.append((module, table_name, path, anchored))
                continue
            keyed = table_name == keyed_table
            kind = _TABLES[table_name, indexed, keyed]
            remember(module, kind, path, anchored)
            position = itertools.count()
            for name, value in at_once(table.items):
                if issubclass(type(value), torch.Tensor) and hasattr(type(module), name):
                    continue  # a table is asked last, so the class's attribute is found
                if indexed and name == str(next(position)):
                    yield value, Item(path, int(name))
                elif keyed:
                    yield value, Item(path, name)
                else:
                    yield value, Attr(path, name)
        for name in HOOK_TABLES:
            if not module.__dict__.get(name):
                self.empty_tables.append((module, name, path, anchored))
        for name, value in copy_dict(module.__dict__).items():
            if type(value) in _LEAVES or name in MODULE_TABLES or name == _NOT_SAVED:
                continue
            if (name not in _MODULE_INTERNALS or value) and not _is_shadowed(module, name, value):
                yield value, Attr(path, name)

    def _items(self, item: dict[Any, Any], path: Source, anchored: bool) -> Reached:
        self.holders.remember(item, ITEMS, path, anchored)
        if self._is_too_large(item, dict.values(item), path):
            return
        for key, value in copy_dict(item).items():
            if type(key) not in _LEAVES:
                yield key, Item(path, key)
            if type(value) not in _LEAVES:
                yield value, Item(path, key)

    def _elements(self, item: Any, path: Source, anchored: bool) -> Reached:
        if is_namedtuple(type(item)):
            for name in type(item)._fields:
                yield getattr(item, name), Attr(path, name)
            return
        if not isinstance(item, tuple):
            self.holders.remember(item, ELEMENTS, path, anchored)
        if self._is_too_large(item, item, path):
            return
        for index, value in enumerate(at_once(functools.partial(iter, item))):
            if type(value) not in _LEAVES:
                yield value, Item(path, index)

    def _is_too_large(self, item: Any, values: Any, path: Source) -> bool:
        """Whether a container isn't looked into; what it holds must then show all there is."""
        if len(item) <= LARGEST_CONTAINER:
            return False
        if not set(at_once(lambda: map(type, values))) <= _LEAVES:
            self.opaque.append((item, path))
        return True

    def _members(self, item: Any, path: Source) -> Reached:
        if not self._is_too_large(item, item, path):
            for element in at_once(functools.partial(iter, item)):
                yield element, Item(path, element)

    def _attributes(self, item: Any, path: Source, anchored: bool) -> Reached:
        attributes = own_dict(item)
        if attributes is not None:
            self.holders.remember(item, ATTRIBUTES, path, anchored)
            for name, value in copy_dict(attributes).items():
                if type(value) not in _LEAVES and not _is_shadowed(item, name, value):
                    yield value, Attr(path, name)
        yield from self._slots(item, path, anchored)

    def _slots(self, item: Any, path: Source, anchored: bool) -> Reached:
        if slots_of(type(item)):
            self.holders.remember(item, SLOTS, path, anchored)
            for name, value in read_slots(item).items():
                yield value, Attr(path, name)

    def _function_children(self, function: types.FunctionType, path: Source) -> Reached:
        self.known_code.add(id(function.__code__))
        if is_library_function(function) and not function.__closure__:
            return
        self.functions.append((function, path))
        self.holders.remember(function, CODE, path, True)
        yield from self._cells(function, path)
        if function.__defaults__:
            yield function.__defaults__, Attr(path, "__defaults__")
        if function.__kwdefaults__:
            yield function.__kwdefaults__, Attr(path, "__kwdefaults__")
        yield from self._attributes(function, path, True)  # those that aren't there, too

    def _cells(self, function: types.FunctionType, path: Source | None) -> Reached:
        if function.__closure__:
            self.holders.remember(function, CELLS, path, True)
        for name, value in bound_cells(function).items():
            yield value, Cell(path, name)

    def _spelled_by(self, getter: Any, path: Source) -> None:
        """Names that C code will look up: they are in no code object."""
        parts = getter.__reduce__()[1]
        self.spelled_names.update(
            name for part in parts if isinstance(part, str) for name in part.split(".")
        )
        if any(type(part) not in _LEAVES for part in parts):  # arguments of a methodcaller
            self.opaque.append((getter, path))

    def _memo_children(self, memo: Any, path: Source) -> Reached:
        yield memo.__wrapped__, Attr(path, "__wrapped__")
        for result in MEMO.read(memo)[1]:
            links = type(result).__name__ == "_lru_list_elem"
            for held in gc.get_referents(result) if links else [result]:
                yield held, Attr(path, "cache")


# What a call must find unchanged itself, not an equal one.
PINNED = (nn.Module, type, types.FunctionType, types.BuiltinFunctionType)
_TABLES = {
    (name, indexed, keyed): Table(name, indexed=indexed, keyed=keyed)
    for name in MODULE_TABLES
    for indexed in (False, True)
    for keyed in (False, True)
}


def _inside_descriptor(item: Any, path: Source) -> Reached:
    match item:
        case property():
            for name in ("fget", "fset", "fdel"):
                yield getattr(item, name), Attr(path, name)
        case functools.cached_property():
            yield item.func, Attr(path, "func")
        case staticmethod():
            yield item.__func__, path
        case classmethod():
            yield item.__func__, Attr(path, "__func__")


_GETS_ATTRIBUTES = object.__getattribute__
_LOOKS_BY_NAME = (getattr, hasattr, setattr, delattr, vars, dir)  # as they are outside a run


def _value_of(variable: ContextVar[object]) -> object:
    try:
        return variable.get()  # given a default, it would pass over its own
    except LookupError:
        return None


def _ignore(tensor: torch.Tensor, source: Source, anchored: bool) -> None:
    """The run is over."""


def _is_shadowed(item: object, name: str, value: object) -> bool:
    """Whether `getattr` would find something else: a property of the class, say."""
    if not issubclass(type(value), torch.Tensor):
        return False
    of_class = find_in_class(type(item), name)
    return hasattr(type(of_class), "__set__") or hasattr(type(of_class), "__delete__")


_COMPILED = "tripwire.dispatch.compiled"
_OF_LOGGER = frozenset({"level", "disabled", "parent"})
_OF_MANAGER = frozenset({"_disable"})
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_MACHINERY = ("threading", "_thread", "concurrent", "asyncio", "multiprocessing", "queue")


def dict_behind(proxy: types.MappingProxyType[Any, Any]) -> object:
    """The mapping that a proxy shows."""
    return gc.get_referents(proxy)[0]


def behind_proxy(proxy: Any) -> object:
    """What a weak proxy stands for; None once that is gone."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None
