"""Reach: what a run comes to, and by which path, taken before the run can change it.

It follows the run step by step. Arguments are met when the run begins, the globals that a function
names when it first starts, and with them its cells and defaults. What an object holds is copied
when the object is met; what lies behind an attribute is met when the attribute is read (reader.py).
Containers are met with all that they hold. A tensor that was neither met nor made by a recorded
call has no known origin. Nothing here runs a property, a `__getattr__` or a method of the user's,
pytree functions excepted.

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
import logging
import operator
import re
import struct
import sys
import threading
import types
import weakref
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

import torch
from torch import nn

from tripwire.env import is_library_file, is_library_module
from tripwire.reading.account import RECORDED
from tripwire.reading.bytecode import find_uses
from tripwire.reading.holders import (
    ABSENT,
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
    Holder,
    Holders,
    LibraryNamesKind,
    NamesKind,
    TableKind,
    is_link,
    strong,
)
from tripwire.reading.names import find_global_names
from tripwire.reading.reader import (
    ACCESSORS,
    HOOK_TABLES,
    LOOKUPS,
    MODULE_TABLES,
    Twin,
    answers_itself,
    build_reader,
    can_be_read,
    is_shadowed,
    may_be_made,
)
from tripwire.reading.sources import (
    Attr,
    Cell,
    Global,
    Imported,
    Item,
    Referent,
    Running,
    Source,
    TypeOf,
)
from tripwire.reading.structure import has_pytree, iter_pytree
from tripwire.reading.tensors import PLAIN_TENSORS
from tripwire.reading.uses import Step, StepKind, Uses
from tripwire.rulebook.purity import find_impurity
from tripwire.rulebook.rules import Refuse, words
from tripwire.values.belongings import (
    CONTAINERS,
    hides_state,
    is_array,
    is_library_class,
    is_library_function,
    is_librarys,
    is_looked_into,
    is_numpy_constant,
    is_pythons,
    name_of_module,
)
from tripwire.values.callables import functions_behind
from tripwire.values.classes import (
    can_be_written,
    class_dict,
    ids_of,
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
    elements_of,
    own_dict,
    parts_of,
    slots_of,
)
from tripwire.values.numbers import OpenFloat, OpenInt
from tripwire.writes.patches import unhooked

# A container past this size is not looked into: its tensors, if any, have no known origin.
LARGEST_CONTAINER = 10_000

_LEAVES = ids_of(
    *(type(None), bool, int, float, complex, str, bytes, range, type(...), object),
    *(type(NotImplemented), OpenInt, OpenFloat),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    types.ClassMethodDescriptorType,
    type(namedtuple("_", "x").x),  # type: ignore[attr-defined]  # a field's descriptor
    type(abc.ABC._abc_impl),  # type: ignore[attr-defined]  # a guard asks for its token
)
# In classes: what Python, abc, typing and dataclasses keep there for themselves.
MADE_BY_PYTHON = words(
    "__dict__ __weakref__ __annotations__ __annotate__ __annotate_func__ __slots__ __match_args__ "
    "__type_params__ __static_attributes__ __orig_bases__ __parameters__ __abstractmethods__ "
    "_abc_impl __dataclass_fields__ __dataclass_params__"
)
# Looked up on classes by the interpreter itself, without a name in any code.
SPECIAL = frozenset(
    f"__{name}__"
    for name in words(
        "call getattr getattribute setattr delattr get set delete set_name len bool iter "
        "next contains getitem setitem delitem missing eq ne lt le gt ge hash add radd "
        "iadd sub rsub isub mul rmul imul matmul rmatmul imatmul truediv rtruediv "
        "itruediv floordiv rfloordiv ifloordiv mod rmod imod pow rpow ipow and rand iand "
        "or ror ior xor rxor ixor lshift rlshift ilshift rshift rrshift irshift neg pos "
        "abs invert int float complex index round trunc floor ceil enter exit repr str "
        "format bytes instancecheck subclasscheck new init reversed length_hint "
        "class_getitem init_subclass prepare torch_function dict slots match_args del"
    )
)
_INDEXED_MODULES = (nn.ModuleList, nn.Sequential, nn.ParameterList)
_KEYED_TABLE = {nn.ModuleDict: "_modules", nn.ParameterDict: "_parameters"}
_IMMUTABLE = ids_of(re.Pattern, datetime.date, datetime.timedelta, Decimal, struct.Struct)
# Functions of nn.Module that go through its tables key by key.
_TABLE_WALKERS = words(
    "named_modules modules named_children children _named_members named_parameters "
    "parameters named_buffers buffers apply _apply state_dict train requires_grad_ "
    "zero_grad __dir__"
)
PROXIES = ids_of(weakref.ProxyType, weakref.CallableProxyType)
BYTES = (bytearray, array.array)
_MEMO_TYPE = type(functools.lru_cache(len))

Reached = Iterator[tuple[object, Source]]


class Reach:
    """Tensors go to `on_tensor`; other objects are kept alive and known by identity."""

    def __init__(
        self,
        on_tensor: Callable[[torch.Tensor, Source, bool], None],
        aside: Callable[..., None],
    ) -> None:
        self._on_tensor = on_tensor
        self._aside = aside  # calls a function, and records nothing meanwhile
        self._waiting: dict[str, list[tuple[object, Source]]] = {}  # in classes, until named
        self.reader = build_reader(self._on_read, self._on_name, self._waiting)
        self.names_read: dict[int, frozenset[str]] = {}  # of objects that were met, once closed
        self._found_own: set[tuple[int, str]] = set()  # what the run wrote before it read it
        self._held: dict[int, list[Holder]] = {}  # of objects that were met, by identity
        self._by_code: dict[int, list[tuple[types.FunctionType, Source, str | None]]] = {}
        self._started: set[int] = set()  # code objects, by identity
        self._closed: dict[int, object] = {}  # sets whose members weren't met, by identity
        self._hashes_by_code = False  # a class was met that may compare itself with such a member
        self._entered: set[int] = set()  # functions whose cells and defaults are known
        self._walked: set[int] = set()  # classes
        self._watched: set[int] = set()  # classes through which lookups are told
        self._looks_unseen = False  # a class answers itself, or was met after the run
        self._is_over = False
        self._is_open = False  # attributes may be looked up behind the reader's back
        self._met: dict[int, object] = {}  # objects whose reads are told
        self._sources: dict[int, Source] = {}
        self._alive: list[object] = []  # an id means something only while its object lives
        self._tags: dict[int, dict[str, Any]] = {}  # attributes of tensors, by their identity
        self._classes: set[int] = set()
        self._python_modules: dict[int, types.ModuleType] = {}
        self._open_modules: dict[int, tuple[types.ModuleType, Source]] = {}  # any name may be taken
        self._uses: Uses | None = None  # of the function that begins
        self._module_names: dict[int, set[str]] = {}  # of Python modules, those reached
        self._names: set[str] = set()  # attribute names of the code that ran so far
        self.generators: list[tuple[torch.Generator, int]] = []  # with their seeds
        self.holders = Holders()
        self.paths: dict[int, list[Source]] = {}  # every path of a container
        self.object_at: dict[int, tuple[object, int]] = {}  # by the identity of its first path
        self.spelled_names: set[str] = set()  # by attrgetter and its like
        self.hides_names = False  # an alias of getattr was bound before the run
        self.modules: list[tuple[nn.Module, Source, bool]] = []
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
        """The run is over: keep what was read, and let go of the state, which holds this."""
        self.reader.close()
        self.holders.open_number = None
        self._is_over = True
        self.names_read = {key: self.reader.names_of(met) for key, met in self._met.items()}
        self._on_tensor, self._aside = _ignore, _ignore

    def is_written_first(self, holder: Holder, name: str, before: object) -> bool:
        """Whether the run found its own value when it first read an attribute."""
        if holder.kind is not SLOTS and holder.kind is not ATTRIBUTES:
            return False
        if holder.kind is ATTRIBUTES and may_be_made(type(holder.owner), name):
            return False
        if self.holders.is_planted(holder, name):
            return False
        if (id(holder.owner), name) in self._found_own:
            return True
        first = self.reader.first_of(holder.owner, name, before)
        return before is not ABSENT and first is not before

    @functools.cached_property
    def all_names_read(self) -> frozenset[str]:
        """Names under which anything was read."""
        return frozenset().union(*self.names_read.values())

    @property
    def names_looked_up(self) -> frozenset[str] | None:
        """Names under which anything was asked for that a user's class holds; None: untold."""
        names = None if self._looks_unseen else self.reader.names_looked_up
        # Python asks for this when a class is made: its slot is its own, and nothing of it is told.
        return None if names is not None and "__init_subclass__" in names else names

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

    def attributes_of(self, owner: object) -> frozenset[str]:
        """The names of attributes of its own that an object had before the run."""
        held = (h.keys for h in self._held.get(id(owner), ()) if h.kind is ATTRIBUTES)
        return frozenset().union(*held)

    # --- reads ---

    def _on_read(self, owner: Any, name: str, value: object) -> None:
        # Half of what is told, a method of the owner's class, leads nowhere once its name is known.
        if type(value) is types.MethodType and name not in self._waiting:
            if name not in (own_dict(owner) or ()) and self._find_step(owner, name, value) is None:
                return
        self._aside(self._take_read, owner, name, value)

    def _on_name(self, name: str) -> None:
        self._aside(self._walk_waiting, frozenset({name}))

    def _take_read(self, owner: Any, name: str, value: object) -> None:
        """Meet what was found under a name for the first time."""
        if name in self._waiting:
            self._walk_waiting(frozenset({name}))
        below = (
            id(owner) not in self.fresh
            or isinstance(owner, PINNED)
            or any(owner is item for item in self.aliases)  # state, whatever passes it as well
        )
        if name == "__dict__":
            for holder in self._held[id(owner)]:
                self._walk_holder(holder, below)
        elif name in MODULE_TABLES and isinstance(owner, nn.Module):
            for holder in self._held[id(owner)]:
                if isinstance(holder.kind, TableKind) and holder.kind.name == name:
                    self._walk_holder(holder, below)
        else:
            step = self._find_step(owner, name, value)
            if step is not None:
                self.walk(value, step, below)
            elif (own_dict(owner) or {}).get(name) is value:
                self._found_own.add((id(owner), name))

    def _find_step(self, owner: Any, name: str, value: object) -> Source | None:
        """The path to a value, if its owner held it before the run."""
        for holder in self._held[id(owner)]:
            if name in holder.keys:
                kept = holder.kept[holder.keys.index(name)]
                return holder.step(name) if strong(kept) is value else None
        return None

    def _walk_holder(self, holder: Holder, anchored: bool) -> None:
        """Meet all that something held when it was met."""
        for value, step in _children_of(holder):
            self.walk(value, step, anchored)

    def _walk_waiting(self, names: frozenset[str]) -> None:
        """Meet what classes hold under these names."""
        for name in names & self._waiting.keys():
            for value, path in self._waiting.pop(name):
                self.walk(value, path, True)

    # --- paths ---

    def find_source(self, value: object) -> Source | None:
        """The first path that reached this very object."""
        return self._sources.get(id(value))

    def is_anchored(self, value: object) -> bool:
        """Whether a value is the same on every call."""
        return id(value) in self._sources and id(value) not in self.fresh

    def find_anchored(self, kinds: tuple[type, ...]) -> frozenset[int]:
        """Identities of what was reached, is of one of these classes and the same on every call."""
        return frozenset(
            id(value)
            for value in self._alive
            if issubclass(type(value), kinds) and self.is_anchored(value)
        )

    def walk(
        self, value: object, source: Source, anchored: bool, names: frozenset[str] = frozenset()
    ) -> None:
        """Reach everything below `value`. `names` limits what is read of Python modules."""
        queue: deque[tuple[Any, Source, bool]] = deque([(value, source, anchored)])
        while queue:
            item, path, anchored = queue.popleft()
            if item is _GETS_ATTRIBUTES:
                self._open_all()
            if item is operator.attrgetter:
                self._hide_names()
            if id(type(item)) in _LEAVES:
                continue
            if type(item) is types.BuiltinFunctionType and item in _LOOKS_BY_NAME:
                self._hide_names()
            if id(type(item)) in PROXIES:
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
                taken = self._find_taken(path)
                if taken is None:
                    self._open_modules.setdefault(id(item), (item, path))
                    taken = names | self._names
                queue.extend((v, p, True) for v, p in self._names_of(item, path, taken))
                continue
            if isinstance(item, CONTAINERS):
                self.paths.setdefault(id(item), []).append(path)
            if id(item) in self._sources:
                if anchored is (id(item) in self.fresh):
                    self.aliases.append(item)
                if self._closed.pop(id(item), None) is not None:
                    queue.extend((v, p, True) for v, p in self._members(item, path))
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
                if id(type(value)) not in _LEAVES:
                    yield value, Attr(path, name)
        if id(type(tensor)) not in PLAIN_TENSORS:
            yield from self._class_of(tensor, path)

    def walk_function(self, code: types.CodeType, namespace: dict[str, Any], module: str) -> None:
        """Reach the globals that a function's code names, before it runs."""
        globals_ = find_global_names(code)
        if not RECORDED.isdisjoint(globals_ & namespace.keys()):
            self._hide_names()
        self.holders.remember(namespace, NamesKind(globals_, module), None, True)
        uses = find_uses(code)
        for name, line in uses.passed.items():
            self._passed.setdefault(name, f"{code.co_filename}:{line}")
            if name in globals_:
                self._judge(name, namespace.get(name, vars(builtins).get(name)))
        if "__getattribute__" in uses.attributes and code.co_name not in LOOKUPS:
            self._open_all()
        names = self._add_names(uses)
        self._uses = uses
        for name in sorted(globals_ & namespace.keys()):
            of_sys = uses.steps.get(Step(StepKind.GLOBAL, name)) if namespace[name] is sys else None
            if of_sys is not None and "modules" in of_sys.attributes:
                self._walk_loaded_modules(uses, Global(module, name))
            if not self._meet_closed(namespace[name], uses, Global(module, name)):
                self.walk(namespace[name], Global(module, name), True)
        self._uses = None
        if "sys" in uses.imports:  # nobody knows which `modules` are its own
            self._walk_loaded_modules(uses, Imported("sys"))
        for name in sorted((globals_ & vars(builtins).keys()) - namespace.keys()):
            found = unhooked(vars(builtins)[name])
            if not is_pythons(found):
                self.walk(found, Global("builtins", name), True)
        self.walk_names(names)
        self._start(code)

    def walk_library_code(self, code: types.CodeType) -> None:
        """Code of torch's or the standard library's begins: only the twin learns from its names.

        What looks past classes' own lookups does so for a user's: `isinstance` of a protocol.
        """
        if "__getattribute__" in code.co_names and code.co_name not in LOOKUPS:
            self._open_all()
        if isinstance(self.reader, Twin) and code not in ACCESSORS:
            self._tell_twin(find_uses(code))
            if code.co_name in _TABLE_WALKERS:
                self.reader.open_tables()

    def see_computed(self, name: str) -> None:
        """An attribute is about to be looked up under a name that no code object tells."""
        if isinstance(self.reader, Twin):
            self._aside(self.reader.see_names, frozenset({name}))

    def _add_names(self, uses: Uses) -> frozenset[str]:
        """Attribute names of code that begins; those that are new."""
        if isinstance(self.reader, Twin):
            self._tell_twin(uses, users=True)
        names = (frozenset(uses.attributes) | uses.stored_attributes) - self._names
        self._names |= names
        return names

    def _tell_twin(self, uses: Uses, users: bool = False) -> None:
        self.reader.see_names(frozenset(uses.attributes))
        if users and not uses.attributes.keys().isdisjoint(MODULE_TABLES):
            self.reader.open_tables()
        if uses.has_dynamic_names or uses.opens_self:
            self._open_all()

    def _hide_names(self) -> None:
        """Attributes may be looked up under names that no code object tells."""
        self.hides_names = True
        if isinstance(self.reader, Twin):
            self._open_all()

    def _open_all(self) -> None:
        """Everything that was met, and will be, counts as read whole."""
        if not self._is_open:
            self._is_open = self.hides_names = True
            for key, item in tuple(self._met.items()):
                del self._met[key]
                below = key not in self.fresh or isinstance(item, PINNED)
                for holder in self._held[key]:
                    self._walk_holder(holder, below)

    def _start(self, code: types.CodeType) -> None:
        """A function's cells and defaults are read from its start on."""
        self._started.add(id(code))
        for function, path, name in self._by_code.pop(id(code), ()):
            if id(function) not in self._sources:
                self.walk(function, path if name is None else Attr(path, name), True)
            self._enter(function)

    def _enter(self, function: types.FunctionType) -> None:
        if id(function) in self._entered:
            return
        self._entered.add(id(function))
        path = self._sources[id(function)]
        for value, step in self._inside(function, path):
            self.walk(value, step, True)

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

    def _walk_loaded_modules(self, uses: Uses, path: Source) -> None:
        """Reach what a function takes from `sys.modules` by constant names."""
        use = uses.steps.get(Step(StepKind.ATTRIBUTE, "modules"))
        if use is None:
            return
        for key in use.keys:
            self.walk_import(str(key))
        if use.whole or use.attributes or use.stored_keys:
            self.opaque.append((sys.modules, Attr(path, "modules")))

    def walk_names(self, names: frozenset[str]) -> None:
        """Reach attributes of the Python modules and classes that are known so far."""
        self._walk_waiting(names)
        uses, self._uses = self._uses, None
        for python_module, path in tuple(self._open_modules.values()) if names else ():
            self.walk(python_module, path, True, names)
        self._uses = uses
        late = names & MADE_BY_PYTHON
        if late:
            self._walk_made(late)

    def walk_made_of(self, owner: object, name: str) -> None:
        """Reach what Python made for one class or function, which somebody asks for."""
        if isinstance(owner, types.FunctionType):
            path = self._sources.get(id(owner))
            if path is not None and name == "__annotations__":
                self.walk(owner.__annotations__, Attr(path, name), True)
            return
        cls = owner if isinstance(owner, type) else type(owner)
        holder = next((base for base in mro(cls) if name in class_dict(base)), None)
        path = next((path for base, path in self.classes if base is holder), None)
        if holder is not None and path is not None:
            self.walk(class_dict(holder)[name], Attr(path, name), True)

    def find_made(self, names: Iterable[str]) -> frozenset[str]:
        """Which names stand for something that Python makes, and weren't asked for so far."""
        return MADE_BY_PYTHON.intersection(names) - self._names

    def _walk_made(self, names: frozenset[str]) -> None:
        """Reach what Python made for classes and functions, once code asks for it."""
        self._names |= names
        for cls, path in tuple(self.classes):
            for name in names & class_dict(cls).keys():
                if name != "__annotations__":
                    self.walk(class_dict(cls)[name], Attr(path, name), True)
        if "__annotations__" in names:
            annotated = [pair for pair in self.classes if "__annotations__" in class_dict(pair[0])]
            for owner, path in (*annotated, *self.functions):
                for value, step in self._annotations_of(owner, path):
                    self.walk(value, step, True)

    def _annotations_of(self, owner: Any, path: Source) -> Reached:
        """What annotations lead to; the forms of torch's and of `typing` never change."""
        found, step = owner.__annotations__, Attr(path, "__annotations__")
        if id(found) not in self._sources:
            self._sources[id(found)] = step
            self._alive.append(found)
            self.holders.remember(found, ITEMS, step, True)
            for key, value in copy_dict(found).items():
                if id(type(value)) not in _LEAVES and not is_librarys(value):
                    yield value, Item(step, key)

    def _find_taken(self, path: Source) -> frozenset[str] | None:
        """The names that the function that begins takes from a Python module; None: any."""
        if self._uses is None or not isinstance(path, (Global, Attr)):
            return None
        kind = StepKind.GLOBAL if isinstance(path, Global) else StepKind.ATTRIBUTE
        use = self._uses.steps.get(Step(kind, path.name))
        if use is None or use.escapes or use.stored_keys or "__contains__" in use.attributes:
            return None
        return use.attributes

    def _meet_closed(self, item: object, uses: Uses, path: Global) -> bool:
        """Meet a set of classes that a function only asks for its members, and none of these.

        A registry may hold every class of a library: for Bert, 44 of the 84 that were met. What
        comes to the set by another way opens it.
        """
        use = uses.steps.get(Step(StepKind.GLOBAL, path.name))
        if type(item) is not set or use is None or use.escapes or use.updated:
            return False
        if self._hashes_by_code or id(item) in self.fresh:
            return False
        if use.attributes - {"__contains__"} or not all(map(_is_plain_class, elements_of(item))):
            return False
        self.paths.setdefault(id(item), []).append(path)
        if id(item) not in self._sources:
            self._sources[id(item)] = path
            self.object_at[id(path)] = (item, id(item))
            self._alive.append(item)
            self.holders.remember(item, MEMBERS, path, True)
            self._closed[id(item)] = item
        return True

    def _open_sets(self) -> None:
        """Meet the members of all sets: they are handed to the `__eq__` of what is asked for."""
        self._hashes_by_code = True
        while self._closed:
            _, item = self._closed.popitem()
            for value, path in self._members(item, self._sources[id(item)]):
                self.walk(value, path, True)

    def walk_import(self, name: str) -> None:
        """Reach what a function imports while it runs, and the packages around it."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            names = NamesKind(frozenset({name}), "sys.modules")
            self.holders.remember(sys.modules, names, None, True)
            self.walk(sys.modules.get(name), Imported(name), True)

    def walk_traced(self, function: types.FunctionType) -> None:
        """Reach the closure variables of the traced function, its defaults, and itself."""
        self.known_code.add(id(function.__code__))
        path = Running(function.__qualname__)
        self._sources[id(function)] = path
        self.object_at[id(path)] = (function, id(function))
        self._alive += function, path
        self._entered.add(id(function))
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
        if isinstance(item, torch.jit.ScriptModule):  # its tables are in C, and look like dicts
            self.opaque.append((item, path))
            return
        if isinstance(item, nn.Module):
            yield from self._meet_module(item, path, anchored)
            yield from self._class_of(item, path)
            return
        if issubclass(cls, type):
            yield from self._class_children(item, path)
            return
        elif issubclass(cls, types.FunctionType):
            yield from self._function_children(item, path)
            return
        elif issubclass(cls, dict):
            yield from self._items(item, path, anchored)
            if isinstance(item, defaultdict):
                self.holders.remember(item, FACTORY, path, anchored)
                yield item.default_factory, Attr(path, "default_factory")
        elif issubclass(cls, (list, tuple, deque)):
            yield from self._elements(item, path, anchored)
        elif issubclass(cls, set):
            self.holders.remember(item, MEMBERS, path, anchored)
            yield from self._members(item, path)
        elif issubclass(cls, frozenset):
            yield from self._members(item, path)
        elif issubclass(cls, PARTED):
            if issubclass(cls, functools.partial):
                self._judge_held(item.func, item, path)
            is_static = issubclass(cls, staticmethod)  # the class hands out the function itself
            for name, value in parts_of(item):
                yield value, path if is_static else Attr(path, name)
        elif issubclass(cls, torch.Generator):
            self.generators.append((item, item.initial_seed()))
        elif issubclass(cls, weakref.ReferenceType):
            self.holders.remember(item, WEAK, path, anchored)
            yield item(), Referent(path)
        elif issubclass(cls, ContextVar):
            self.holders.remember(item, CONTEXT, path, anchored)
            yield _value_of(item), Referent(path)
        elif isinstance(item, threading.local):
            self.holders.remember(item, THREAD_LOCAL, path, anchored)
            for name, value in copy_dict(item.__dict__).items():
                yield value, Attr(path, name)
            yield from self._class_of(item, path)
            return
        elif isinstance(item, _MEMO_TYPE):
            self.holders.remember(item, MEMO, path, anchored)
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
        elif id(cls) in _IMMUTABLE or is_numpy_constant(item):
            self.homes.add(module_of(cls).partition(".")[0])
            return
        elif is_array(item) and item.dtype.hasobject:
            self.opaque.append((item, path))
        elif is_array(item) or isinstance(item, BYTES):
            self.homes.add(module_of(cls))
            self.holders.remember(item, ARRAY, path, anchored)
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
        elif hides_state(cls) or not (own_dict(item) is not None or slots_of(cls)):
            self.opaque.append((item, path))
        if own_dict(item) is not None or can_be_written(cls):
            self.objects.append((item, path, anchored))
            yield from self._attributes(item, path, anchored)
            yield from self._class_of(item, path)

    def _module_class(self, module: types.ModuleType, path: Source) -> Reached:
        """What the class of a user's Python module holds: it may be the user's own."""
        if id(module) not in self._python_modules:
            self._python_modules[id(module)] = module
            if not is_library_module(name_of_module(module)):
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
            kind = LibraryNamesKind if library else NamesKind
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
        self.holders.remember(vars(logger.manager), LibraryNamesKind(_OF_MANAGER), manager, True)
        above: logging.Logger | None = logger
        while above is not None:
            self.holders.remember(vars(above), LibraryNamesKind(_OF_LOGGER), path, True)
            above, path = above.parent, Attr(path, "parent")

    def _class_of(self, item: object, path: Source) -> Reached:
        """What an object's class holds, once per class."""
        if id(type(item)) not in self._walked:
            yield from self._class_children(type(item), TypeOf(path))

    def _class_children(self, cls: type, path: Source) -> Reached:
        """Attributes of a class and its bases that aren't torch's or the standard library's."""
        self._walked.add(id(cls))
        self._alive += cls, path
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
            self.holders.remember(base, CLASS_DICT, path, True)
            self._watch_class(base)
            yield from self._held_by_class(base, path)
        if type(cls) is not type and not is_library_class(type(cls)):
            yield from self._class_children(type(cls), TypeOf(path))

    def _held_by_class(self, cls: type, path: Source) -> Reached:
        """What a class holds, under the names that are in use; the rest has to wait."""
        if class_dict(cls).get("__hash__") is not None:
            self._open_sets()
        names = self._names | (self.reader.names_looked_up or frozenset())
        for name, value in at_once(class_dict(cls).items):
            if id(type(value)) in _LEAVES or (name in MADE_BY_PYTHON and name not in names):
                continue
            starts = [self._await_start(f, path, name) for f in functions_behind(value)]
            is_special = name in SPECIAL and not (starts and all(starts))
            if name in names or is_special:
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
            self.holders.remember(cls, LIBRARY_CLASS, path, True)

    def _meet_module(self, module: nn.Module, path: Source, anchored: bool) -> Reached:
        self.modules.append((module, path, anchored))
        if isinstance(module, CONTAINERS):  # a list as well, say
            self.opaque.append((module, path))
        held = self._held[id(module)] = [
            self.holders.remember(module, ATTRIBUTES, path, anchored),
            *self._remember_slots(module, path, anchored),
        ]
        cls = type(module)
        space: dict[str, Any] = own_dict(module) or {}
        if _DISPATCHER in class_dict(cls):  # a compiled module runs the one that it stands for
            yield object.__getattribute__(module, _DISPATCHER).target, path
        keyed_table = _KEYED_TABLE.get(cls)
        for name in MODULE_TABLES:
            table = space.get(name)
            if table:
                indexed = issubclass(cls, _INDEXED_MODULES) and _is_numbered(table)
                kind = _TABLES[name, indexed, name == keyed_table]
                held.append(self.holders.remember(module, kind, path, anchored))
            else:
                self.empty_tables.append((module, name, path, anchored))
        for name in HOOK_TABLES:
            if not space.get(name):
                self.empty_tables.append((module, name, path, anchored))
        yield from self._meet(module)

    def _meet(self, item: object) -> Reached:
        """From now on reads are told; or else all that is held was read."""
        if can_be_read(type(item)) and not self._is_open:
            self._met[id(item)] = item
            self.reader.meet(item)
            return
        for holder in self._held[id(item)]:
            yield from _children_of(holder)

    def _items(self, item: dict[Any, Any], path: Source, anchored: bool) -> Reached:
        self.holders.remember(item, ITEMS, path, anchored)
        held = copy_dict(item)
        if self._is_too_large(item, held.values(), path):
            return
        for key, value in held.items():
            if id(type(key)) not in _LEAVES:
                yield key, Item(path, key)
            if id(type(value)) not in _LEAVES:
                yield value, Item(path, key)

    def _elements(self, item: Any, path: Source, anchored: bool) -> Reached:
        if is_namedtuple(type(item)):
            for name, value in zip(type(item)._fields, elements_of(item), strict=False):
                yield value, Attr(path, name)
            return
        if not isinstance(item, tuple):
            self.holders.remember(item, ELEMENTS, path, anchored)
        elements = elements_of(item)
        if self._is_too_large(item, elements, path):
            return
        for index, value in enumerate(elements):
            if id(type(value)) not in _LEAVES:
                yield value, Item(path, index)

    def _is_too_large(self, item: Any, values: Any, path: Source) -> bool:
        """Whether a container isn't looked into; what it holds must then show all there is."""
        if len(values) <= LARGEST_CONTAINER:
            return False
        if not _LEAVES.issuperset(map(id, map(type, values))):
            self.opaque.append((item, path))
        return True

    def _members(self, item: Any, path: Source) -> Reached:
        elements = elements_of(item)
        if not self._is_too_large(item, elements, path):
            for element in elements:
                yield element, Item(path, element)

    def _attributes(self, item: Any, path: Source, anchored: bool) -> Reached:
        held = self._held[id(item)] = self._remember_slots(item, path, anchored)
        if own_dict(item) is not None:
            held.append(self.holders.remember(item, ATTRIBUTES, path, anchored))
        if held:
            yield from self._meet(item)

    def _remember_slots(self, item: Any, path: Source, anchored: bool) -> list[Holder]:
        if not slots_of(type(item)):
            return []
        return [self.holders.remember(item, SLOTS, path, anchored)]

    def _function_children(self, function: types.FunctionType, path: Source) -> Reached:
        waits = self._await_start(function, path)
        if is_library_function(function) and not function.__closure__:
            return
        self.functions.append((function, path))
        yield from self._attributes(function, path, True)  # those that aren't there, too
        if "__annotations__" in self._names:
            yield from self._annotations_of(function, path)
        if not waits:
            self._entered.add(id(function))
            yield from self._inside(function, path)

    def _inside(self, function: types.FunctionType, path: Source) -> Reached:
        """What a function has with it when it runs."""
        self.holders.remember(function, CODE, path, True)
        yield from self._cells(function, path)
        if function.__defaults__:
            yield function.__defaults__, Attr(path, "__defaults__")
        if function.__kwdefaults__:
            yield function.__kwdefaults__, Attr(path, "__kwdefaults__")

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
        if any(id(type(part)) not in _LEAVES for part in parts):  # arguments of a methodcaller
            self.opaque.append((getter, path))

    def _memo_children(self, memo: Any, path: Source) -> Reached:
        yield memo.__wrapped__, Attr(path, "__wrapped__")
        # With a limit, the memo itself refers to what it holds; without, a dict of its own does.
        own, space = own_dict(memo), MEMO.space_of(memo)
        for value in (*space, *space.values(), *gc.get_referents(memo)):
            if value is not own and value is not space and not is_link(value):
                yield value, Attr(path, "cache")


# What a call must find unchanged itself, not an equal one.
PINNED = (nn.Module, type, types.FunctionType, types.BuiltinFunctionType)
_TABLES = {
    (name, indexed, keyed): TableKind(name, indexed=indexed, keyed=keyed)
    for name in MODULE_TABLES
    for indexed in (False, True)
    for keyed in (False, True)
}


_GETS_ATTRIBUTES = object.__getattribute__
_LOOKS_BY_NAME = (getattr, hasattr, setattr, delattr, vars, dir)  # as they are outside a run


def _is_plain_class(item: object) -> bool:
    """Whether it is a class that no code of its own compares with others."""
    return (
        isinstance(item, type)
        and type(item).__eq__ is type.__eq__
        and type(item).__hash__ is type.__hash__
    )


def _value_of(variable: ContextVar[object]) -> object:
    try:
        return variable.get()  # given a default, it would pass over its own
    except LookupError:
        return None


def _ignore(*_: object) -> None:
    """The run is over."""


def _is_numbered(table: dict[str, Any]) -> bool:
    """Whether the keys of a table are the positions of what it holds."""
    return all(key == str(index) for index, key in enumerate(at_once(table.keys)))


def _children_of(holder: Holder) -> Reached:
    """What something held when it was met, under the names by which it can be reached again."""
    for key, value in holder.before().items():
        if id(type(value)) in _LEAVES or key in MODULE_TABLES:
            continue
        in_table = isinstance(holder.kind, TableKind)
        if not (isinstance(value, torch.Tensor) and is_shadowed(type(holder.owner), key, in_table)):
            yield value, holder.step(key)


_COMPILED, _DISPATCHER = "tripwire.dispatch.compiled", "_tripwire_dispatcher"
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
