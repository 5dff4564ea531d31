"""Reach: what a run reaches, by which path, and what it held before the run could change it.

It follows the run step by step. Arguments are met when the run begins, the globals that a function
names when it first starts, and with them its cells and defaults. What an object holds is copied
when the object is met (meeting.py); what lies behind an attribute is met when the attribute is read
(reader.py). Containers are met with all that they hold. A tensor that was neither met nor made by a
recorded call has no known origin.

What is reached through a module, a class or a function is *anchored*: it is the same on every
call, as long as nobody writes to what leads there. What is reached through other arguments
is fetched on every call, by its path. So is the content of a place in which other code puts another
object from call to call (`exchanged`).
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tripwire.reading.account import RECORDED
from tripwire.reading.bytecode import find_uses
from tripwire.reading.holders import Holder, strong
from tripwire.reading.kinds import ABSENT, ATTRIBUTES, CODE, MEMBERS, SLOTS, NamesKind, TableKind
from tripwire.reading.meeting import INSIDE, LEAVES, Reached, shows_all
from tripwire.reading.names import find_global_names
from tripwire.reading.pythonmodules import OF_WHOLES, ModuleMeeting
from tripwire.reading.reader import (
    ACCESSORS,
    LOOKUPS,
    MODULE_TABLES,
    Twin,
    build_reader,
    may_be_made,
)
from tripwire.reading.sources import Attr, Global, Imported, Referent, Running, Source, TypeOf
from tripwire.reading.tensors import PLAIN_TENSORS
from tripwire.reading.uses import Step, StepKind, Uses
from tripwire.rulebook.rules import words
from tripwire.values.classes import (
    MADE_BY_PYTHON,
    class_dict,
    ids_of,
    is_exactly,
    isinstance,
    mro,
)
from tripwire.values.contents import (
    PROXIES,
    behind_proxy,
    copy_dict,
    elements_of,
    own_dict,
)
from tripwire.values.identity import (
    CONTAINERS,
    PINNED,
    is_pinned,
    is_pythons,
)
from tripwire.values.numbers import holds_numbers
from tripwire.writes.patches import unhooked

# Functions of nn.Module that go through its tables key by key.
_TABLE_WALKERS = words(
    "named_modules modules named_children children _named_members named_parameters "
    "parameters named_buffers buffers apply _apply state_dict train requires_grad_ "
    "zero_grad __dir__"
)
# Called by way of a class, of `super()` or of a slot, these read an object that nobody asked for
# anything.
_PAST_LOOKUPS = frozenset({"__getattribute__", "__getstate__", "__get__"})
_GETS_ATTRIBUTES, _GETS_STATE = object.__getattribute__, object.__getstate__
# They look attributes up by names that are computed; as they are outside a run.
_HIDING = ids_of(getattr, hasattr, setattr, delattr, vars, dir, operator.attrgetter)
# In a user's function, these look at a Python module as a whole.
_WHOLES = frozenset({"vars", "dir", "getmembers", "attrgetter"})
_LOOKING = ids_of(vars, dir, inspect.getmembers, operator.attrgetter)
_SHARED = (tuple, frozenset)  # constants of code that have an identity
# Methods that take all that an object holds; nothing of that is told where they are Python's own.
# `copy` asks objects for them.
_TAKE_ALL = frozenset({"__dir__", "__getstate__", "__reduce__", "__reduce_ex__"})


class Reach(ModuleMeeting):
    """Tensors go to `on_tensor`; other objects are met."""

    def __init__(
        self, on_tensor: Callable[[torch.Tensor, Source, bool], None], aside: Callable[..., None]
    ) -> None:
        super().__init__()
        self.reader = build_reader(self._on_read, self._on_name, self._waiting)
        self._on_tensor = on_tensor
        self._aside = aside  # calls a function, and records nothing meanwhile
        self.names_read: dict[int, frozenset[str]] = {}  # of objects that were met, once closed
        self._read_whole: set[int] = set()  # objects of which Python's own code took all
        self._found_own: set[tuple[int, str]] = set()  # what the run wrote before it read it
        self._tags: dict[int, dict[str, Any]] = {}  # attributes of tensors, by their identity
        self._asked_unmet = False  # `getattr` asked what wasn't met for what Python makes
        self.paths: dict[int, list[Source]] = {}  # every path of a container
        self.exchanged: frozenset[str] = frozenset()  # paths of what others exchange between calls
        self.exchanged_met: list[tuple[Holder, Any, object]] = []  # and what the run found there
        self.aliases: list[object] = []  # arguments, and below them, that are state as well
        self._remember_library_class(torch.Tensor, Global("torch", "Tensor"))

    def close(self) -> None:
        """The run is over: keep what was read, and let go of the state, which holds this."""
        self.reader.close()
        self.holders.open_number = None
        self._is_over = True
        self.names_read = {key: self._find_names_read(key) for key in self._met}
        self._on_tensor, self._aside = _ignore, _ignore

    def _find_names_read(self, key: int) -> frozenset[str]:
        names = self.reader.names_of(self._met[key])
        return names | {"__dict__"} if key in self._read_whole else names

    def is_written_first(self, holder: Holder, name: str, before: object) -> bool:
        """Whether the run found its own value when it first read an attribute."""
        is_made = holder.kind is not ATTRIBUTES or may_be_made(type(holder.owner), name)
        if holder.kind is not SLOTS and is_made:
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

    def attributes_of(self, owner: object) -> Sequence[str]:
        """The names of attributes of its own that an object had before the run."""
        held = (h.keys for h in self._held.get(id(owner), ()) if h.kind is ATTRIBUTES)
        return next(held, ())

    # --- reads, told as they happen ---

    def _on_read(self, owner: Any, name: str, value: object) -> None:
        # Half of what is told, a method of the owner's class, leads nowhere once its name is known.
        if type(value) is types.MethodType and name not in self._waiting:
            if name not in (own_dict(owner) or ()) and self._find_step(owner, name, value) is None:
                return
        self._aside(self._take_read, owner, name, value)

    def _on_name(self, name: str) -> None:
        self._aside(self._walk_waiting, frozenset({name}))

    def note_constants(self, codes: Iterable[types.CodeType]) -> None:
        """An argument that is also a constant of the code: nobody can tell which of them is meant.

        CPython has one tuple for all equal ones that are written out in a file.
        """
        constants = [one for code in codes for one in code.co_consts if is_exactly(one, *_SHARED)]
        for one in constants:  # grows
            constants += [inner for inner in one if is_exactly(inner, *_SHARED)]
        self.aliases += {id(one): one for one in constants if id(one) in self.fresh}.values()

    def _take_read(self, owner: Any, name: str, value: object) -> None:
        """Meet what was found under a name for the first time."""
        if name in self._waiting:
            self._walk_waiting(frozenset({name}))
        below = (
            id(owner) not in self.fresh
            or is_pinned(owner)
            or any(owner is item for item in self.aliases)  # state, whatever passes it as well
        )
        is_whole = name in _TAKE_ALL and isinstance(value, types.BuiltinFunctionType)
        if is_whole:
            self._read_whole.add(id(owner))
        if is_whole or name == "__dict__":
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

    def walk(self, value: object, source: Source, anchored: bool) -> None:
        """Reach everything below `value`."""
        queue: deque[tuple[Any, Source, bool]] = deque([(value, source, anchored)])
        while queue:
            item, path, anchored = queue.popleft()
            if item is _GETS_ATTRIBUTES or item is _GETS_STATE:
                self._open_all()
            if id(item) in _LOOKING:
                self._look_at_wholes()
            if id(item) in _HIDING:
                self._hide_names()
            if id(type(item)) in LEAVES:
                continue
            if anchored and self.exchanged and str(path) in self.exchanged:
                place = self._find_exchanged(item, str(path))
                if place is not None:
                    self.exchanged_met.append(place)
                    anchored = False
            if id(type(item)) in PROXIES:
                item = behind_proxy(item)
                if item is None:
                    continue
                path = Referent(path)
            if id(type(item)) in PLAIN_TENSORS or isinstance(item, torch.Tensor):
                self._on_tensor(item, path, anchored)
                queue.extend((v, p, anchored) for v, p in self._below_tensor(item, path))
                continue
            if isinstance(item, types.ModuleType):  # each name once, and other names later
                queue.extend((v, p, True) for v, p in self._meet_python_module(item, path))
                continue
            if isinstance(item, CONTAINERS):
                self.paths.setdefault(id(item), []).append(path)
            if id(item) in self._sources:
                if anchored is (id(item) in self.fresh):
                    self.aliases.append(item)
                if self._closed.pop(id(item), None) is not None:
                    queue.extend((v, p, True) for v, p in self._members(item, path))
                continue
            self._place(item, path)
            if not anchored:
                self.fresh[id(item)] = path
            below = anchored or is_pinned(item)
            queue.extend(
                (v, p, below or isinstance(p.base, TypeOf))  # a class is the same on every call
                for v, p in self._children(item, path, below)
            )

    def _place(self, item: object, path: Source) -> None:
        """An object is met at a path for the first time; both are kept, by their identities."""
        self._sources[id(item)] = path
        self.object_at[id(path)] = (item, id(item))
        self._alive += item, path

    def _find_exchanged(self, item: object, path: str) -> tuple[Holder, Any, object] | None:
        """Where it lies, if guards can compare another one with it, by what it is and holds."""
        if isinstance(item, torch.Tensor):
            if id(type(item)) not in PLAIN_TENSORS or isinstance(item, nn.Parameter):
                return None
        elif self.is_anchored(item) or isinstance(item, (*PINNED, types.ModuleType)):
            return None  # another path leads there, or it counts which one it is
        elif holds_numbers(item) or not (isinstance(item, CONTAINERS) or shows_all(item)):
            return None  # a tuple in whose place another may be planted, or it hides what it holds
        place = self.holders.find_place(item, path)
        return None if place is None else (*place, item)

    def _below_tensor(self, tensor: torch.Tensor, path: Source) -> Reached:
        """What a tensor's own attributes lead to. That they are there is the state's to note."""
        attributes = own_dict(tensor)
        if attributes and id(attributes) not in self._tags:
            self._tags[id(attributes)] = attributes
            for name, value in copy_dict(attributes).items():
                if id(type(value)) not in LEAVES:
                    yield value, Attr(path, name)
        if id(type(tensor)) not in PLAIN_TENSORS:
            yield from self._class_of(tensor, path)

    # --- functions that start, and the names in their code ---

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
        if not _PAST_LOOKUPS.isdisjoint(uses.attributes) and code.co_name not in LOOKUPS:
            self._open_all()
        names = self._add_names(uses)
        if not (_WHOLES.isdisjoint(uses.globals) and OF_WHOLES.isdisjoint(uses.attributes)):
            self._look_at_wholes()
        self._uses = uses
        for name in sorted(globals_ & namespace.keys()):
            value, path = namespace[name], Global(module, name)
            of_sys = uses.steps.get(Step(StepKind.GLOBAL, name)) if value is sys else None
            if of_sys is not None and "modules" in of_sys.attributes:
                self._walk_loaded_modules(uses, path)
            if not self._meet_closed(value, uses, path):
                self.walk(value, path, True)
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
            self._aside(self._open_all)
        if code.co_filename == inspect.__file__ and not INSIDE.isdisjoint(code.co_names):
            self._aside(self._look_inside)
        if isinstance(self.reader, Twin) and code not in ACCESSORS:
            self._aside(self._tell_twin, find_uses(code))
            if code.co_name in _TABLE_WALKERS:
                self._aside(self.reader.open_tables)

    def see_computed(self, name: str) -> None:
        """An attribute is about to be looked up under a name that no code object tells."""
        if name in INSIDE:
            self._aside(self._look_inside)
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

    def _start(self, code: types.CodeType) -> None:
        """A function's cells and defaults are read from its start on."""
        self._started.add(id(code))
        for function, path, name in self._by_code.pop(id(code), ()):
            if id(function) not in self._sources:
                self.walk(function, path if name is None else Attr(path, name), True)
            self._enter(function, self._sources[id(function)])

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
        for known, path in self._list_open() if names else ():
            for value, step in self._names_of(known, path, names):
                self.walk(value, step, True)
        if not INSIDE.isdisjoint(names):
            self._look_inside()
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
            self._asked_unmet |= path is None
            return
        self._asked_unmet |= isinstance(owner, types.ModuleType)
        cls = owner if isinstance(owner, type) else type(owner)
        is_whole = cls is owner and name == "__dict__"
        holders = (base for base in mro(cls) if name in class_dict(base))
        holder = cls if is_whole else next(holders, None)
        path = next((path for base, path in self.classes if base is holder), None)
        if holder is not None and path is not None:
            for made in MADE_BY_PYTHON & class_dict(holder).keys() if is_whole else (name,):
                self.walk(class_dict(holder)[made], Attr(path, made), True)
        self._asked_unmet |= path is None and holder is not None

    def find_made(self, codes: Iterable[types.CodeType]) -> frozenset[str]:
        """What Python makes for classes and functions, and code asks any of these for.

        Names that the run's own code has are known by now. `inspect` asks by `getattr`, one by one.
        """
        told = None if self._asked_unmet else inspect.get_annotations.__code__
        names = (find_uses(code).attributes for code in codes if code is not told)
        return MADE_BY_PYTHON.intersection(itertools.chain.from_iterable(names)) - self._names

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

    def _meet_closed(self, item: object, uses: Uses, path: Global) -> bool:
        """Meet a set of classes that a function only asks for its members, and none of these.

        A registry may hold every class of a library: for Bert, 44 of the 84 that were met. What
        comes to the set by another way opens it.
        """
        use = uses.steps.get(Step(StepKind.GLOBAL, path.name)) if type(item) is set else None
        if use is None or use.escapes or use.updated or use.attributes - {"__contains__"}:
            return False
        if self._hashes_by_code or id(item) in self.fresh:
            return False
        if not all(map(_is_plain_class, elements_of(item))):
            return False
        self.paths.setdefault(id(item), []).append(path)
        if id(item) not in self._sources:
            self._place(item, path)
            self.holders.remember(item, MEMBERS, path, True)
            self._closed[id(item)] = item
        return True

    def walk_import(self, name: str) -> None:
        """Reach what a function imports while it runs, and the packages around it."""
        for each in itertools.accumulate(name.split("."), "{}.{}".format):
            names = NamesKind(frozenset({each}), "sys.modules")
            self.holders.remember(sys.modules, names, None, True)
            self.walk(sys.modules.get(each), Imported(each), True)

    def walk_traced(self, function: types.FunctionType) -> None:
        """Reach the closure variables of the traced function, its defaults, and itself."""
        self.known_code.add(id(function.__code__))
        path = Running(function.__qualname__)
        self._place(function, path)
        self._entered.add(id(function))
        self.functions.append((function, path))
        self.holders.remember(function, CODE, path, True)
        for value, source in self._cells(function, None):
            self.walk(value, source, True)
        if function.__kwdefaults__:
            self.walk(function.__kwdefaults__, Attr(path, "__kwdefaults__"), True)
        for value, source in self._attributes(function, path, True):
            self.walk(value, source, True)


def _is_plain_class(item: object) -> bool:
    """Whether it is a class that no code of its own compares with others."""
    meta = type(item)
    return isinstance(item, type) and meta.__eq__ is type.__eq__ and meta.__hash__ is type.__hash__


def _ignore(*_: object) -> None:
    """Stands where listeners were, once the run is over."""
