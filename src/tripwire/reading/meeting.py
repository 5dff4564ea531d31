"""Meeting: what is noted about an object that a run reaches, and what lies directly below it.

An object is met once. What it holds is copied before the run can change it, and each value below it
gets a path. Where the reader sees attribute reads (reader.py), an attribute's value is met only
when the attribute is read. Nothing here runs a property, a `__getattr__` or a method of the user's,
pytree functions excepted.
"""

from __future__ import annotations

import abc
import datetime
import functools
import gc
import logging
import operator
import re
import struct
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque, namedtuple
from collections.abc import Generator, Iterator
from contextvars import ContextVar
from decimal import Decimal
from typing import Any, NamedTuple

import torch
from torch import nn

from tripwire.env import is_library_file
from tripwire.reading import kinds
from tripwire.reading.holders import Holder, Holders
from tripwire.reading.reader import (
    HOOK_TABLES,
    MODULE_TABLES,
    Reader,
    answers_itself,
    can_be_read,
    is_shadowed,
)
from tripwire.reading.sources import (
    Attr,
    Cell,
    Item,
    KeyOf,
    Referent,
    Source,
    TypeOf,
    has_pytree,
    iter_pytree,
)
from tripwire.rulebook.purity import draws_from_numpy, find_impurity
from tripwire.values.classes import (
    MADE_BY_PYTHON,
    SPECIAL,
    can_be_written,
    class_dict,
    find_in_class,
    hides_own,
    ids_of,
    is_exactly,
    is_namedtuple,
    isinstance,
    module_of,
    mro,
)
from tripwire.values.contents import (
    PARTED,
    at_once,
    bound_cells,
    copy_dict,
    dict_behind,
    elements_of,
    functions_behind,
    own_dict,
    parts_of,
    slots_of,
)
from tripwire.values.identity import (
    BYTES,
    CONTAINERS,
    MEMO_TYPE,
    VIEWS,
    hides_state,
    is_array,
    is_library_class,
    is_library_function,
    is_librarys,
    is_looked_into,
    is_numpy_constant,
    is_pinned,
)
from tripwire.values.numbers import OpenFloat, OpenInt

# A container past this size is not looked into: its tensors, if any, have no known origin.
LARGEST_CONTAINER = 10_000
LEAVES = ids_of(
    *(type(None), bool, int, float, complex, str, bytes, range, type(...), object),
    *(type(NotImplemented), OpenInt, OpenFloat),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme, torch.Size),
    torch.nn.attention.SDPBackend,
    *(types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    types.ClassMethodDescriptorType,
    type(namedtuple("_", "x").x),  # type: ignore[attr-defined]  # a field's descriptor
    type(abc.ABC._abc_impl),  # type: ignore[attr-defined]  # a guard asks for its token
)
_INDEXED_MODULES = (nn.ModuleList, nn.Sequential, nn.ParameterList)
_KEYED_TABLE = {nn.ModuleDict: "_modules", nn.ParameterDict: "_parameters"}
_IMMUTABLE = ids_of(re.Pattern, datetime.date, datetime.timedelta, Decimal, struct.Struct)
_TABLES = {
    (name, indexed, keyed): kinds.TableKind(name, indexed=indexed, keyed=keyed)
    for name in MODULE_TABLES
    for indexed in (False, True)
    for keyed in (False, True)
}
# Whoever names these may look into a function that doesn't run.
INSIDE = frozenset({"__code__", "__closure__", "__defaults__", "__kwdefaults__", "cell_contents"})
_COMPILED, _DISPATCHER = "tripwire.dispatch.compiled", "_tripwire_dispatcher"
_OF_LOGGER = frozenset({"level", "disabled", "parent"})
_OF_MANAGER = frozenset({"_disable"})
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_MACHINERY = ("threading", "_thread", "concurrent", "asyncio", "multiprocessing", "queue")

Reached = Iterator[tuple[object, Source]]


class _ClassFacts(NamedTuple):
    """What is asked of a class for each of its objects: a model has few classes."""

    can_be_read: bool
    has_slots: bool


class Meeting(ABC):
    """Objects are kept alive and known by identity; `walk` goes on with what is handed out."""

    reader: Reader

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[object, Source]]] = {}  # in classes, until named
        self._held: dict[int, list[Holder]] = {}  # of objects that were met, by identity
        self._by_code: dict[int, list[tuple[types.FunctionType, Source, str | None]]] = {}
        self._started: set[int] = set()  # code objects, by identity
        self._closed: dict[int, object] = {}  # sets whose members weren't met, by identity
        self._hashes_by_code = False  # a class was met that may compare itself with such a member
        self._entered: set[int] = set()  # functions whose cells and defaults are known
        self._looks_inside = False  # those that don't run are looked into as well
        self._walked: set[int] = set()  # classes
        self._known: dict[int, _ClassFacts] = {}  # by identity
        self._watched: set[int] = set()  # classes through which lookups are told
        self._looks_unseen = False  # a class answers itself, or was met after the run
        self._is_over = False
        self._is_open = False  # attributes may be looked up behind the reader's back
        self._met: dict[int, object] = {}  # objects whose reads are told
        self._sources: dict[int, Source] = {}
        self._alive: list[object] = []  # an id means something only while its object lives
        self._classes: set[int] = set()
        self._names: set[str] = set()  # attribute names of the code that ran so far
        self.generators: list[tuple[torch.Generator, int]] = []  # with their seeds
        self.holders = Holders()
        self.object_at: dict[int, tuple[object, int]] = {}  # by the identity of its first path
        self.spelled_names: set[str] = set()  # by attrgetter and its like
        self.hides_names = False  # an alias of getattr was bound before the run
        self.modules: list[tuple[nn.Module, Source, bool]] = []
        self.objects: list[tuple[object, Source, bool]] = []  # with attributes; no nn.Module
        self.classes: list[tuple[type, Source]] = []
        self.functions: list[tuple[types.FunctionType, Source]] = []
        self.opaque: list[tuple[object, Source]] = []  # C objects whose state can't be seen
        self.drawing: list[tuple[object, Source]] = []  # the same, behind functions that draw
        self.fresh: dict[int, Source] = {}  # reached through arguments: id → path
        # Tables of modules that held nothing: whoever fills one changes what the module does.
        self.empty_tables: list[tuple[nn.Module, list[str], Source, bool]] = []
        self.homes: set[str] = set()  # modules of what was reached: of modules, classes, arrays
        self.known_code: set[int] = set()  # of reached functions, and of functions made inside

    @abstractmethod
    def walk(self, value: object, source: Source, anchored: bool) -> None:
        """Meet a value and everything below it."""

    def _children(self, item: Any, path: Source, anchored: bool) -> Reached:
        cls = type(item)
        if isinstance(item, nn.Module):
            if isinstance(item, torch.jit.ScriptModule):  # its tables are in C, and look like dicts
                self.opaque.append((item, path))
                return
            yield from self._meet_module(item, path, anchored)
            yield from self._class_of(item, path)
            return
        if issubclass(cls, type):
            yield from self._class_children(item, path)
            return
        if issubclass(cls, types.FunctionType):
            yield from self._function_children(item, path)
            return
        if isinstance(item, threading.local):
            self.holders.remember(item, kinds.THREAD_LOCAL, path, anchored)
            for name, value in copy_dict(item.__dict__).items():
                yield value, Attr(path, name)
            yield from self._class_of(item, path)
            return
        is_builtin = yield from self._builtin_children(item, path, anchored)
        if is_builtin:
            pass
        elif id(cls) in _IMMUTABLE or is_numpy_constant(item):
            self.homes.add(module_of(cls).partition(".")[0])
            return
        elif is_array(item) and item.dtype.hasobject:
            self.opaque.append((item, path))
        elif is_array(item) or isinstance(item, BYTES):
            self.homes.add(module_of(cls))
            self.holders.remember(item, kinds.ARRAY, path, anchored)
        elif has_pytree(item):
            yield from iter_pytree(item, path)
        elif issubclass(cls, logging.Logger):
            self._remember_logger(item, path, anchored)
            return
        elif module_of(cls).partition(".")[0] in _MACHINERY:
            if not isinstance(item, _LOCKS):  # which are held for a moment, and free again
                self.opaque.append((item, path))  # an event, a future, a thread, ...
            return
        elif module_of(cls) == _COMPILED:  # a compiled function's own attributes
            yield from self._attributes(item, path, anchored)
            return
        elif not is_looked_into(cls):
            return
        elif not shows_all(item):
            self.opaque.append((item, path))
        if own_dict(item) is not None or can_be_written(cls):
            self.objects.append((item, path, anchored))
            yield from self._attributes(item, path, anchored)
            yield from self._class_of(item, path)

    def _builtin_children(
        self, item: Any, path: Source, anchored: bool
    ) -> Generator[tuple[object, Source], None, bool]:
        """What a container or a wrapper of Python's own holds; False for any other object."""
        cls = type(item)
        if issubclass(cls, dict):
            yield from self._items(item, path, anchored)
            if isinstance(item, defaultdict):
                self.holders.remember(item, kinds.FACTORY, path, anchored)
                yield item.default_factory, Attr(path, "default_factory")
        elif issubclass(cls, (list, tuple, deque)):
            yield from self._elements(item, path, anchored)
        elif issubclass(cls, set):
            self.holders.remember(item, kinds.MEMBERS, path, anchored)
            yield from self._members(item, path)
        elif issubclass(cls, frozenset):
            yield from self._members(item, path)
        elif issubclass(cls, PARTED):
            if issubclass(cls, functools.partial):
                self._judge_held(item.func, item, path)
            if draws_from_numpy(item):
                self.drawing.append((item.__self__, path))
                return True
            is_static = issubclass(cls, staticmethod)  # the class hands out the function itself
            for name, value in parts_of(item):
                yield value, path if is_static else Attr(path, name)
        elif issubclass(cls, torch.Generator):
            self.generators.append((item, item.initial_seed()))
        elif issubclass(cls, weakref.ReferenceType):
            self.holders.remember(item, kinds.WEAK, path, anchored)
            yield item(), Referent(path)
        elif issubclass(cls, ContextVar):
            self.holders.remember(item, kinds.CONTEXT, path, anchored)
            yield _value_of(item), Referent(path)
        elif isinstance(item, MEMO_TYPE):
            self.holders.remember(item, kinds.MEMO, path, anchored)
            yield from self._memo_children(item, path)
        elif issubclass(cls, types.BuiltinFunctionType):  # mostly it is judged when it is called
            if isinstance(path, Item):
                self._judge_held(item, item, path)
            if not isinstance(item.__self__, types.ModuleType):
                yield item.__self__, Attr(path, "__self__")
        elif issubclass(cls, types.MethodWrapperType):
            if item.__name__ == "__getattribute__":
                self._open_all()
            yield item.__self__, Attr(path, "__self__")
        elif issubclass(cls, (operator.attrgetter, operator.methodcaller, operator.itemgetter)):
            self._spelled_by(item, path)
        elif issubclass(cls, types.MappingProxyType):
            yield dict_behind(item), path
        elif is_exactly(item, *VIEWS):
            yield dict_behind(item.mapping), Attr(path, "mapping")
        else:
            return False
        return True

    def _remember_logger(self, logger: logging.Logger, path: Source, anchored: bool) -> None:
        """What decides whether a logger is on: its level, or the nearest above it that has one."""
        self.holders.remember(logger, kinds.ATTRIBUTES, path, anchored)
        manager = Attr(path, "manager")
        self.holders.remember(logger.manager, kinds.ATTRIBUTES, manager, anchored)
        self.holders.remember(
            vars(logger.manager), kinds.LibraryNamesKind(_OF_MANAGER), manager, True
        )
        above: logging.Logger | None = logger
        while above is not None:
            self.holders.remember(vars(above), kinds.LibraryNamesKind(_OF_LOGGER), path, True)
            above, path = above.parent, Attr(path, "parent")

    # --- classes ---

    def _class_of(self, item: object, path: Source) -> Reached:
        """What an object's class holds, once per class."""
        if id(type(item)) not in self._walked:
            yield from self._class_children(type(item), TypeOf(path))

    def _class_children(self, cls: type, path: Source) -> Reached:
        """Attributes of a class and its bases that aren't torch's or the standard library's."""
        self._walked.add(id(cls))
        self._alive += cls, path
        if id(cls) in LEAVES:
            return
        for base in mro(cls):
            self.homes.add(module_of(base))
            if is_library_class(base):
                self._remember_library_class(base, path)
                continue
            if id(base) in self._classes:
                continue
            self._classes.add(id(base))
            self.object_at.setdefault(id(path), (base, id(base)))
            self._alive.append(base)
            self.classes.append((base, path))
            self.holders.remember(base, kinds.CLASS_DICT, path, True)
            self._watch_class(base)
            yield from self._held_by_class(base, path)
        if type(cls) is not type and not is_library_class(type(cls)):
            yield from self._class_children(type(cls), TypeOf(path))

    def _held_by_class(self, cls: type, path: Source) -> Reached:
        """What a class holds, under the names that are in use; the rest has to wait."""
        if class_dict(cls).get("__hash__") is not None:
            self._open_sets()
        looked_up = self.reader.names_looked_up or frozenset()
        for name, value in at_once(class_dict(cls).items):
            if id(type(value)) in LEAVES:
                continue
            is_named = name in self._names or name in looked_up
            if name in MADE_BY_PYTHON and not is_named:
                continue
            starts = [self._await_start(f, path, name) for f in functions_behind(value)]
            is_special = name in SPECIAL and not (starts and all(starts))
            if is_named or is_special:
                yield value, Attr(path, name)
            else:
                self._waiting.setdefault(name, []).append((value, Attr(path, name)))

    def _await_start(
        self, function: types.FunctionType, path: Source, name: str | None = None
    ) -> bool:
        """What a function reads counts from its start on; whether that will be told.

        A class holds the function under a name.
        """
        code = function.__code__
        self.known_code.add(id(code))
        if is_library_file(code.co_filename) or id(code) in self._started:
            return False
        self._by_code.setdefault(id(code), []).append((function, path, name))
        return True

    def _remember_library_class(self, cls: type, path: Source) -> None:
        """A method of torch's that somebody replaces counts; what it holds isn't walked."""
        if id(cls) not in self._classes and can_be_written(cls):
            self._classes.add(id(cls))
            self._alive.append(cls)
            self.holders.remember(cls, kinds.LIBRARY_CLASS, path, True)

    def _watch_class(self, cls: type) -> None:
        """Have lookups told that pass a class: of its objects, of itself, and of those below it."""
        waiting = [cls]
        while waiting:
            one = waiting.pop()
            if id(one) not in self._watched:
                self._watched.add(id(one))
                self._alive.append(one)
                self._looks_unseen |= answers_itself(one) or answers_itself(type(one))
                self._looks_unseen |= self._is_over
                self.reader.watch(one)
                waiting += type.__subclasses__(one)

    def find_filled(self) -> str | None:
        """A table of a module that held nothing when it was met, and holds something now."""
        for module, tables, path, _ in self.empty_tables:
            space = own_dict(module) or {}
            if any(map(space.get, tables)):
                return next(f"{path}.{table}" for table in tables if space.get(table))
        return None

    # --- objects with attributes ---

    def _meet_module(self, module: nn.Module, path: Source, anchored: bool) -> Reached:
        self.modules.append((module, path, anchored))
        if isinstance(module, CONTAINERS):  # a list as well, say
            self.opaque.append((module, path))
        held = self._held[id(module)] = [
            self.holders.remember(module, kinds.ATTRIBUTES, path, anchored),
            *self._remember_slots(module, path, anchored),
        ]
        cls = type(module)
        space: dict[str, Any] = own_dict(module) or {}
        if _DISPATCHER in class_dict(cls):  # a compiled module runs the one that it stands for
            yield object.__getattribute__(module, _DISPATCHER).target, path
        keyed_table = _KEYED_TABLE.get(cls)
        empty = [name for name in (*MODULE_TABLES, *HOOK_TABLES) if not space.get(name)]
        self.empty_tables.append((module, empty, path, anchored))
        for name in empty if anchored else ():
            self.holders.watch(space.get(name), path)
        for name in MODULE_TABLES:
            table = space.get(name)
            if table:
                indexed = issubclass(cls, _INDEXED_MODULES) and all(
                    key == str(index) for index, key in enumerate(at_once(table.keys))
                )
                kind = _TABLES[name, indexed, name == keyed_table]
                held.append(self.holders.remember(module, kind, path, anchored))
        yield from self._meet(module)

    def _meet(self, item: object) -> Reached:
        """From now on reads are told; or else all that is held was read."""
        if self._know(type(item)).can_be_read and not self._is_open:
            self._met[id(item)] = item
            self.reader.meet(item)
            return
        for holder in self._held[id(item)]:
            yield from children_of(holder)

    def _open_all(self) -> None:
        """Everything that was met, and will be, counts as read whole."""
        if not self._is_open:
            self._is_open = self.hides_names = True
            for key, item in tuple(self._met.items()):
                del self._met[key]
                below = key not in self.fresh or is_pinned(item)
                for holder in self._held[key]:
                    self._walk_holder(holder, below)

    def _walk_holder(self, holder: Holder, anchored: bool) -> None:
        """Meet all that something held when it was met."""
        for value, step in children_of(holder):
            self.walk(value, step, anchored)

    def _know(self, cls: type) -> _ClassFacts:
        known = self._known.get(id(cls))
        if known is None:
            self._alive.append(cls)
            known = self._known[id(cls)] = _ClassFacts(can_be_read(cls), bool(slots_of(cls)))
        return known

    # --- containers ---

    def _items(self, item: dict[Any, Any], path: Source, anchored: bool) -> Reached:
        self.holders.remember(item, kinds.ITEMS, path, anchored)
        held = copy_dict(item)
        if self._is_too_large(item, held.values(), path):
            return
        for key, value in held.items():
            if id(type(key)) not in LEAVES:
                yield key, (KeyOf if isinstance(key, torch.Tensor) else Item)(path, key)
            if id(type(value)) not in LEAVES:
                yield value, Item(path, key)

    def _elements(self, item: Any, path: Source, anchored: bool) -> Reached:
        if is_namedtuple(type(item)):
            for name, value in zip(type(item)._fields, elements_of(item), strict=False):
                yield value, Attr(path, name)
            return
        if not isinstance(item, tuple):
            self.holders.remember(item, kinds.ELEMENTS, path, anchored)
        elements = elements_of(item)
        if self._is_too_large(item, elements, path):
            return
        for index, value in enumerate(elements):
            if id(type(value)) not in LEAVES:
                yield value, Item(path, index)

    def _is_too_large(self, item: Any, values: Any, path: Source) -> bool:
        """Whether a container isn't looked into; what it holds must then show all there is."""
        if len(values) <= LARGEST_CONTAINER:
            return False
        if not LEAVES.issuperset(map(id, map(type, values))):
            self.opaque.append((item, path))
        return True

    def _members(self, item: Any, path: Source) -> Reached:
        elements = elements_of(item)
        if not self._is_too_large(item, elements, path):
            for element in elements:
                yield element, Item(path, element)

    def _open_sets(self) -> None:
        """Meet the members of all sets: they are handed to the `__eq__` of what is asked for."""
        self._hashes_by_code = True
        while self._closed:
            _, item = self._closed.popitem()
            for value, path in self._members(item, self._sources[id(item)]):
                self.walk(value, path, True)

    def _attributes(self, item: Any, path: Source, anchored: bool) -> Reached:
        held = self._held[id(item)] = self._remember_slots(item, path, anchored)
        if own_dict(item) is not None:
            held.append(self.holders.remember(item, kinds.ATTRIBUTES, path, anchored))
        if held:
            yield from self._meet(item)

    def _remember_slots(self, item: Any, path: Source, anchored: bool) -> list[Holder]:
        if not self._know(type(item)).has_slots:
            return []
        return [self.holders.remember(item, kinds.SLOTS, path, anchored)]

    # --- functions ---

    def _function_children(self, function: types.FunctionType, path: Source) -> Reached:
        waits = self._await_start(function, path)
        if is_library_function(function) and not function.__closure__:
            return
        self.functions.append((function, path))
        yield from self._attributes(function, path, True)  # those that aren't there, too
        if "__annotations__" in self._names:
            yield from self._annotations_of(function, path)
        if self._looks_inside or not waits:
            self._entered.add(id(function))
            yield from self._inside(function, path)

    def _look_inside(self) -> None:
        """Code begins that may look into functions that don't run."""
        if not self._looks_inside:
            self._looks_inside = True
            for function, path in tuple(self.functions):
                self._enter(function, path)

    def _enter(self, function: types.FunctionType, path: Source) -> None:
        """Meet what a function has with it, once."""
        if id(function) not in self._entered:
            self._entered.add(id(function))
            for value, step in self._inside(function, path):
                self.walk(value, step, True)

    def _inside(self, function: types.FunctionType, path: Source) -> Reached:
        """What a function has with it when it runs."""
        self.holders.remember(function, kinds.CODE, path, True)
        yield from self._cells(function, path)
        if function.__defaults__:
            yield function.__defaults__, Attr(path, "__defaults__")
        if function.__kwdefaults__:
            yield function.__kwdefaults__, Attr(path, "__kwdefaults__")

    def _cells(self, function: types.FunctionType, path: Source | None) -> Reached:
        if function.__closure__:
            self.holders.remember(function, kinds.CELLS, path, True)
        for name, value in bound_cells(function).items():
            yield value, Cell(path, name)

    def _annotations_of(self, owner: Any, path: Source) -> Reached:
        """What annotations lead to; the forms of torch's and of `typing` never change."""
        found, step = owner.__annotations__, Attr(path, "__annotations__")
        if id(found) not in self._sources:
            self._sources[id(found)] = step
            self._alive.append(found)
            self.holders.remember(found, kinds.ITEMS, step, True)
            for key, value in copy_dict(found).items():
                if id(type(value)) not in LEAVES and not is_librarys(value):
                    yield value, Item(step, key)

    def _spelled_by(self, getter: Any, path: Source) -> None:
        """Names that C code will look up: they are in no code object."""
        parts = getter.__reduce__()[1]
        names = {name for part in parts if isinstance(part, str) for name in part.split(".")}
        self.spelled_names |= names
        if not INSIDE.isdisjoint(names):
            self._look_inside()
        if any(id(type(part)) not in LEAVES for part in parts):  # arguments of a methodcaller
            self.opaque.append((getter, path))

    def _judge_held(self, function: object, holder: object, path: Source) -> None:
        """The same of one in a container or a partial: code that calls it from there can be C."""
        if isinstance(function, types.BuiltinFunctionType):
            if find_impurity(function, library=False) is not None:
                self.opaque.append((holder, path))

    def _memo_children(self, memo: Any, path: Source) -> Reached:
        yield (own_dict(memo) or {}).get("__wrapped__"), Attr(path, "__wrapped__")
        # With a limit, the memo itself refers to what it holds; without, a dict of its own does.
        own, space = own_dict(memo), kinds.MEMO.space_of(memo)
        for value in (*space, *space.values(), *gc.get_referents(memo)):
            if value is not own and value is not space and not kinds.is_link(value):
                yield value, Attr(path, "cache")


def shows_all(item: object) -> bool:
    """Whether an object's attributes are all that there is to it."""
    cls = type(item)
    return not hides_state(cls) and (own_dict(item) is not None or bool(slots_of(cls)))


def _value_of(variable: ContextVar[object]) -> object:
    try:
        return variable.get()  # given a default, it would pass over its own
    except LookupError:
        return None


def children_of(holder: Holder) -> Reached:
    """What something held when it was met, under the names by which it can be reached again."""
    for key, value in holder.before().items():
        if id(type(value)) in LEAVES or key in MODULE_TABLES:
            continue
        in_table, cls = isinstance(holder.kind, kinds.TableKind), type(holder.owner)
        in_slot = holder.kind is kinds.SLOTS and find_in_class(cls, key) is slots_of(cls).get(key)
        if isinstance(value, torch.Tensor) and not in_slot and is_shadowed(cls, key, in_table):
            if in_table or not hides_own(cls, key):
                continue  # no path leads there
        yield value, holder.step(key)
