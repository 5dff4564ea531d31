"""Reads: what a run read. Compiled code is right as long as all of it is unchanged.

The reader saw which attributes of objects were read, each by its name (reader.py). A user's class
counts as read under a name if that name was looked up anywhere. Globals, cells, attributes of
torch's classes and of Python modules, and keys of containers are found from the names in the code
that ran. That may be more than was read, never less. Lookups that found nothing are part of it.
docs/design/0006 says why.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, reduce
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from tripwire.env import is_installed_file, is_library_file, torch_path
from tripwire.ranges import SourceRange
from tripwire.reading.bytecode import find_uses
from tripwire.reading.holders import Holder
from tripwire.reading.kinds import (
    AttributesKind,
    CellsKind,
    ClassDictKind,
    CodeKind,
    ItemsKind,
    LibraryClassKind,
    LibraryNamesKind,
    MembersKind,
    NamesKind,
    SlotsKind,
    TableKind,
    ThreadLocalKind,
)
from tripwire.reading.meeting import INSIDE
from tripwire.reading.names import Lines, Read, fingerprint, makes_texts, needs_plain_numbers
from tripwire.reading.reach import Reach
from tripwire.reading.reader import LOOKUPS, MODULE_TABLES, answers_itself
from tripwire.reading.sources import Attr, Cell, Global, Item, Local, Source
from tripwire.reading.uses import Computed, Step, StepKind, Use, Uses, join, may_name_others, merge
from tripwire.rulebook.rules import words
from tripwire.values.classes import (
    FLOATS,
    SPECIAL,
    class_dict,
    find_in_class,
    is_exactly,
    is_namedtuple,
    isinstance,
    mro,
)
from tripwire.values.contents import all_codes, at_once, functions_behind
from tripwire.values.identity import is_containers_method, is_library_function

# What functions and classes are called; no dict of theirs holds all of it.
LABELS = words("__name__ __qualname__ __module__ __doc__ __annotations__")
_WHOLE = Use(whole=True)
_UNUSED = Use()
_APPENDED = Use(appended=True)
# Steps that no instruction names: what lies behind them may be used in any way.
_HIDDEN_STEPS = words(
    "__defaults__ __kwdefaults__ __self__ __func__ __wrapped__ func args keywords cache "
    "fget fset fdel mapping"
)
# What tells one tensor from another of the same form, as names of attributes or functions.
_OF_ONE_TENSOR = words(
    "_version grad _grad grad_fn _base output_nr retains_grad _cdata is_shared is_pinned "
    "_post_accumulate_grad_hooks _is_view storage_offset"
)
_TELLING_FUNCTIONS = words(
    "id hash __hash__ set frozenset _backward_hooks ref getweakrefs getrefcount WeakKeyDictionary "
    "WeakSet WeakValueDictionary"
)
_SET_MAKERS = frozenset({dis.opmap["BUILD_SET"], dis.opmap["SET_ADD"]})


def _join(codes: list[CodeType]) -> Uses:
    """What code uses together. A callable that is traced again runs the same, mostly."""
    key = tuple(map(id, codes))
    found = _joined.get(key)
    if found is None:
        if len(_joined) >= 64:
            _joined.clear()
        found = _joined[key] = join(map(find_uses, codes)), tuple(codes)
    return found[0]


_joined: dict[tuple[int, ...], tuple[Uses, tuple[CodeType, ...]]] = {}  # with what it is of, alive


class ReadSet:
    """Everything that one run could read, narrowed to what its code names."""

    def __init__(
        self,
        reach: Reach,
        codes: list[CodeType],
        computed: frozenset[str],
        tested: frozenset[str],
        adopted: set[int],
    ) -> None:
        self.holders = reach.holders.all
        self._reach = reach
        self._codes = codes
        # Names that the run computed, for getattr and its like, and names that C code looks up.
        self._computed = computed | reach.spelled_names
        self._handed_out = self._computed - (tested - reach.spelled_names)
        self._adopted = adopted  # codes that may run out of sight, by identity
        self._executed = {id(code) for code in codes}
        # By identity, of objects that the reach keeps alive.
        self._names_of: dict[int, frozenset[str] | None] = {}
        # Equal layers are read alike, and share their sets: by names, and by class and attributes.
        self._with_stored: dict[frozenset[str], frozenset[str]] = {}
        self._missed_by: dict[tuple[object, ...], frozenset[str]] = {}
        self._class_has: dict[int, frozenset[str]] = {}  # of modules' classes: their names

    @cached_property
    def uses(self) -> Uses:
        """What all the executed code may read and write."""
        return _join(self._codes)

    @cached_property
    def _users(self) -> list[CodeType]:
        """The executed code that isn't a library's."""
        return [code for code in self._codes if not is_library_file(code.co_filename)]

    @cached_property
    def _own_code(self) -> list[CodeType]:
        """The executed code that isn't an installed package's either."""
        return [code for code in self._codes if not is_installed_file(code.co_filename)]

    @cached_property
    def refused(self) -> tuple[str, SourceRange] | None:
        """What a user's function names that reads can't be told of, and where."""
        for code in self._users:
            found = find_uses(code).refused
            if found is not None:
                name, offset = found
                return name, SourceRange((code, offset))
        return None

    @cached_property
    def asks_for_classes(self) -> bool:
        """Whether a user's function tests what a value is an instance of."""
        asks = {"isinstance", "issubclass"}
        return not all(asks.isdisjoint(find_uses(code).globals) for code in self._users)

    @cached_property
    def labels(self) -> frozenset[str]:
        """Which of the names and texts of functions and classes a user's function may read."""
        names = (LABELS & find_uses(code).attributes.keys() for code in self._asking)
        # Of a function and a class, of its objects as well, `repr` shows this one.
        shown = {"__qualname__"} if any(map(makes_texts, self._asking)) else set()
        return (LABELS & self._computed).union(*names, shown)

    @cached_property
    def _asking(self) -> list[CodeType]:
        """The executed code that asks about functions and classes for the user."""
        return [
            code
            for code in self._codes
            if code.co_filename == inspect.__file__ or not is_library_file(code.co_filename)
        ]

    @cached_property
    def looks_inside(self) -> bool:
        """Whether the code, the cells and the defaults of functions that didn't run may be read."""
        named = (INSIDE & find_uses(code).attributes.keys() for code in self._asking)
        return any(named) or not INSIDE.isdisjoint(self._stored)

    @cached_property
    def stored(self) -> frozenset[str]:
        """Attribute names that a user's function stores, or that the run computed."""
        return self._computed.union(*(find_uses(code).stored_attributes for code in self._users))

    @cached_property
    def compares_identity(self) -> bool:
        """Whether a user's function may ask with `is` which list, set, tuple or dict it has."""
        asked = {one for code in self._users for one in find_uses(code).asked}
        return any(not any(map(self._is_code, one)) for one in asked)

    def _is_code(self, variable: Step) -> bool:
        """Whether a global or a free variable is a function, a class or a module all along."""
        stored = self.uses.stored_globals | {step.name for step in self.uses.replaced}
        if variable.name in stored or self.is_dynamic:
            return False
        found = self._find_held(variable.name)
        return bool(found) and all(isinstance(v, (FunctionType, type, ModuleType)) for v in found)

    def _find_held(self, name: object) -> list[object]:
        """What anything held under a name when it was met."""
        pairs = (zip(holder.keys, holder.kept, strict=True) for holder in self.holders)
        return [v for pair in pairs for k, v in pair if is_exactly(k, str) and k == name]

    @cached_property
    def tells_tensors_apart(self) -> bool:
        """Whether a tensor could be told from another of the same form, but for its values.

        By who it is, by where it is (sets walk through tensors by address), by its gradient, its
        hooks and its count of changes.
        """
        if self.compares_identity or self.is_dynamic or not _OF_ONE_TENSOR.isdisjoint(self.names):
            return True
        users = self._users
        return any(
            not _TELLING_FUNCTIONS.isdisjoint((*uses.globals, *uses.attributes))
            or not _SET_MAKERS.isdisjoint(code.co_code[::2])
            for code, uses in zip(users, map(find_uses, users), strict=True)
        )

    @cached_property
    def compares_numbers(self) -> bool:
        """Whether a user's function may ask with `is` which int or float it has, or for its type.

        Installed packages don't: in those, `is` between two variables is of objects.
        """
        return any(map(needs_plain_numbers, self._own_code)) or self.asks_which_number

    @cached_property
    def asks_which_number(self) -> bool:
        """Whether a user's function may ask with `is` which int or float it has."""
        asked = {one for code in self._own_code for one in find_uses(code).identities}
        if asked and any(code.co_name in LOOKUPS for code in self._own_code):
            return True
        return any(self.is_dynamic or not any(map(self._is_no_number, one)) for one in asked)

    def _is_no_number(self, operand: tuple[str, ...]) -> bool:
        """Whether what a global, or `self`, leads to can't be an open number.

        Nothing that was reached has a number, or what computes one, by such a name, and no code
        stored any.
        """
        names = operand[1:] if operand[0] == "" else operand
        stored = self.stored | self.uses.stored_attributes | self.uses.stored_globals
        if not stored.isdisjoint(names):
            return False
        for name in names:
            found = self._find_held(name)
            if any(is_exactly(v, int, *FLOATS) or hasattr(type(v), "__get__") for v in found):
                return False
            if not found and not (operand == (name,) and hasattr(builtins, name)):
                return False
            if not callable(getattr(torch.Tensor, name, callable)):  # a size, perhaps
                return False
        return True

    @cached_property
    def is_dynamic(self) -> bool:
        """Whether the executed code looks at objects as wholes: `vars(x)`, `x.__dict__`."""
        return self._reach.hides_names or any(map(self._is_dynamic, self._codes))

    def _is_dynamic(self, code: CodeType) -> bool:
        uses = find_uses(code)
        if torch_path(code.co_filename) in _OPENS_ITS_OWN:
            return False
        looks_by_name = _WHOLE_LOOKS.isdisjoint((*uses.globals, *uses.attributes))
        return uses.has_dynamic_names and not (code.co_name in LOOKUPS and looks_by_name)

    @cached_property
    def _opens_self(self) -> bool:
        """Whether a user's function writes attributes of `self` under names that it computes."""
        return any(find_uses(code).opens_self for code in self._users)

    @cached_property
    def _methods(self) -> dict[int, type]:
        """Executed code of methods, properties included, by identity: the class that has it."""
        return {
            id(code): cls
            for cls, _ in self._reach.classes
            for value in at_once(class_dict(cls).values)
            for function in functions_behind(value)
            for code in all_codes(function.__code__)
            if id(code) in self._executed
        }

    @cached_property
    def _stored(self) -> frozenset[str]:
        """Attribute names that any code stores to: storing an equal value leaves no difference."""
        return self.uses.stored_attributes | self._computed

    def names_of(self, owner: object) -> frozenset[str] | None:
        """The names under which an object was read or may have been written; None: all of it."""
        if id(owner) not in self._names_of:
            self._names_of[id(owner)] = self._find_names_of(owner)
        return self._names_of[id(owner)]

    def _find_names_of(self, owner: object) -> frozenset[str] | None:
        names = self._reach.names_read.get(id(owner))
        if names is not None:
            if "__dict__" in names:
                return None
            if names not in self._with_stored:
                self._with_stored[names] = names | self._stored
            return self._with_stored[names]
        if answers_itself(type(owner)) or self.is_dynamic:
            return None
        if isinstance(owner, SimpleNamespace) and self.use_of_container(owner).whole:
            return None  # C code compares and prints one with all its attributes
        return self.names

    @cached_property
    def names(self) -> frozenset[str]:
        """Attribute names that the executed code loads or stores, and those that were read."""
        named = frozenset(self.uses.attributes) | self.uses.stored_attributes
        return named | self._computed | self._reach.all_names_read

    @cached_property
    def _class_names(self) -> frozenset[str]:
        """Names that a user's class was asked for. A name in a branch that didn't run is none."""
        asked = self._reach.names_looked_up
        if asked is None or any(code.co_name == "__getattribute__" for code in self._codes):
            return self._library_names
        unseen = (find_uses(code).attributes for code in self._codes if self._looks_unseen(code))
        return asked.union(self._stored, SPECIAL, *unseen)

    def _looks_unseen(self, code: CodeType) -> bool:
        """Whether code looks up attributes where no reader is told: `cls.__dict__['name']`."""
        return id(code) in self._adopted or not _UNSEEN.isdisjoint(code.co_names)

    @cached_property
    def _library_names(self) -> frozenset[str]:
        return self.names | SPECIAL

    def is_executed(self, function: FunctionType) -> bool:
        """Whether a function's code ran."""
        return id(function.__code__) in self._executed

    def is_looked_into(self, function: FunctionType) -> bool:
        """Whether the code, the cells and the defaults of a function may have been read."""
        return self.looks_inside or self.is_executed(function)

    def filter_of(self, holder: Holder) -> frozenset[Any] | None:
        """The keys of a holder that count; None where all of them do."""
        match holder.kind:
            case NamesKind() as kind:
                return frozenset(kind.names)
            case CellsKind() | CodeKind():
                return None if self.is_looked_into(holder.owner) else frozenset()
            case AttributesKind() | SlotsKind():
                return self.names_of(holder.owner)
            case TableKind(name=name):
                return self.filter_of_table(holder.owner, name)
            case _ if self.is_dynamic:
                return None
            case ThreadLocalKind():
                return self.names
            case LibraryClassKind():
                return self._library_names
            case ClassDictKind():
                return self._class_names
            case ItemsKind():
                use = self.use_of_container(holder.owner)
                if not is_exactly(holder.owner, *_KNOWN_CONTAINERS):
                    return None
                keys = use.keys | use.stored_keys
                is_open = use.whole or use.attributes or Computed.KEY in keys
                return None if is_open else keys
            case _:
                use = self.use_of_container(holder.owner)
                if use.holds_matter:
                    return None
                if not is_exactly(holder.owner, *_KNOWN_CONTAINERS):
                    return None
                if getattr(holder.owner, "maxlen", None) is not None:
                    return None  # what is added may push out its like
                adds = use.appended and isinstance(holder.kind, MembersKind)  # nothing, perhaps
                return None if adds else frozenset()

    def filter_of_table(self, module: nn.Module, table: str) -> frozenset[str] | None:
        """The keys of a module's table that count; None where all of them do.

        A name is looked for in the tables, one after the other, where neither the module itself
        nor its class has it.
        """
        names = self.names_of(module)
        if names is None or table in names:
            return None
        wanted = self._missed(module, names)
        for before in MODULE_TABLES[: MODULE_TABLES.index(table)]:
            wanted = wanted.difference(module.__dict__.get(before) or ())
        return wanted

    def _missed(self, module: nn.Module, names: frozenset[str]) -> frozenset[str]:
        """Those of the names under which a module was read that it has no attribute for."""
        own = self._reach.attributes_of(module)
        key = names, id(type(module)), own
        if key not in self._missed_by:
            self._missed_by[key] = names.difference(own, self._names_in_class(type(module)))
        return self._missed_by[key]

    def _names_in_class(self, cls: type) -> frozenset[str]:
        if id(cls) not in self._class_has:
            names = (at_once(class_dict(base).keys) for base in mro(cls))
            self._class_has[id(cls)] = frozenset().union(*names)
        return self._class_has[id(cls)]

    def is_written_first(self, holder: Holder, key: Any, before: object) -> bool:
        """Whether the run wrote an attribute before it first read it."""
        if self.names_of(holder.owner) is None:  # it may have been read another way before
            return False
        return self._reach.is_written_first(holder, key, before)

    def is_only_stored(self, holder: Holder, key: Any) -> bool:
        """Whether nobody asked for an attribute: what it was before is nothing to the run."""
        if not isinstance(holder.kind, (AttributesKind, SlotsKind)) or self.is_dynamic:
            return False
        stores = find_in_class(type(holder.owner), "__setattr__")
        if isinstance(stores, FunctionType) and not is_library_function(stores):
            return False  # which may look at it, past its class's lookup
        if key in self.uses.attributes or key in self._computed:
            return False
        names = self._reach.names_read.get(id(holder.owner))
        return names is not None and "__dict__" not in names and key not in names

    def is_table_read(self, module: nn.Module, table: str) -> bool:
        """Whether a table of a module's hooks was looked at."""
        names = self.names_of(module)
        return names is None or table in names

    def use_of_container(self, container: object) -> Use:
        """How the executed code uses a container, by whatever path it comes to it."""
        paths = self._reach.paths.get(id(container))
        if not paths or self.is_dynamic:
            return _WHOLE
        use = _UNUSED
        for path in paths:
            use = merge(use, self._use_at(path))
        if use.only_grown and is_exactly(container, list, set, deque):
            use = replace(use, whole=False, only_grown=False)
        return _WHOLE if may_name_others(use, container) else use

    def find_places(self, sequence: object) -> frozenset[int] | None:
        """The places of a list or tuple that are all that the executed code reads of it.

        They are spelled there: `v[3]`. None where it may have read more, or less.
        """
        if not is_exactly(sequence, list, tuple):
            return None
        use = self.use_of_container(sequence)
        if use.whole or use.attributes or use.stored_keys or use.appended or use.updated:
            return None
        count = len(sequence)  # type: ignore[arg-type]  # it is a list or a tuple
        places = frozenset(
            k for k in use.keys if is_exactly(k, int) and 0 <= cast("int", k) < count
        )
        return cast("frozenset[int]", places) if places and places == use.keys else None

    def use_of_key(self, holder: Holder, key: Any) -> Use:
        """How the executed code uses what a holder holds under a key."""
        if self.is_dynamic:
            return _WHOLE
        if isinstance(holder.kind, ItemsKind):
            use = self.use_of_container(holder.owner)
            if use.whole or use.attributes or not is_exactly(holder.owner, *_KNOWN_CONTAINERS):
                return _WHOLE
            keys = use.keys & {key, Computed.KEY}
            found = [self.uses.steps.get(Step(StepKind.ITEM, one), _UNUSED) for one in keys]
            return reduce(merge, found, _UNUSED)
        return self._use_at(holder.step(key))

    def is_only_counted(self, holder: Holder, key: Any) -> bool:
        """Whether the executed code does nothing with a number but add constants to it."""
        use = self.use_of_key(holder, key)
        if not use.updated or use.tested or use.whole or use.keys or use.attributes:
            return False
        if isinstance(holder.kind, _OWN_ATTRIBUTES):
            if self._opens_self or self.names_of(holder.owner) is None:
                return False  # it may be stored under a computed name
        if any(Step(kind, key) in self.uses.replaced for kind in _kinds_of(holder)):
            return False
        return key not in self.uses.replaced_of_self or not self._is_stored_by(holder.owner, key)

    def _is_stored_by(self, owner: object, name: str) -> bool:
        """Whether a method that says `self.name = ...` ran, and may be one of this object."""
        bases = mro(owner if isinstance(owner, type) else type(owner))
        return any(
            self._methods.get(id(code), object) in bases
            for code in self._codes
            if name in find_uses(code).replaced_of_self
        )

    def _use_at(self, path: Source) -> Use:
        uses = self.uses
        match path:
            case Attr(owner, "__self__") if self._only_appends(owner):
                return _APPENDED
            case Attr(owner, name):
                if name in _HIDDEN_STEPS or self._is_taken_apart(owner):
                    return _WHOLE
                step = Step(StepKind.ATTRIBUTE, name)
                missing = _WHOLE if name in self.names else _UNUSED
                if name in self._handed_out:
                    return _WHOLE
            case Global(_, name):  # or `module.name`
                found = [
                    uses.steps[step]
                    for kind in (StepKind.GLOBAL, StepKind.ATTRIBUTE)
                    if (step := Step(kind, name)) in uses.steps
                ]
                return reduce(merge, found) if found else _WHOLE
            case Cell(_, name):  # or an argument that an inner function uses
                if Step(StepKind.LOCAL, name) in uses.steps:
                    return _WHOLE
                step, missing = Step(StepKind.FREE, name), _WHOLE
            case Local(name):
                step, missing = Step(StepKind.LOCAL, name), _WHOLE
            case Item(base, key):
                above = self._use_at(base)
                is_read = above.whole or above.attributes or may_name_others(above)
                if is_read or self._is_own_container(base):
                    return _WHOLE
                use = uses.steps.get(Step(StepKind.ITEM, key), _UNUSED)
                if Computed.KEY in above.keys:
                    use = merge(use, uses.steps[Step(StepKind.ITEM, Computed.KEY)])
                    if use.tested and not self._has_keys(base):
                        return _WHOLE  # `v in values` compares values
                return merge(use, self._from_the_end) if type(key) is int else use
            case _:
                return _WHOLE
        return uses.steps.get(step, missing)

    def _only_appends(self, path: Source) -> bool:
        """Whether a container's method is all that is there, and can only add to it."""
        method, _ = self._reach.object_at.get(id(path), (None, 0))
        is_append = is_containers_method(method) and method.__name__ == "append"
        return is_append and not self.looks_behind_methods

    @cached_property
    def looks_behind_methods(self) -> bool:
        """Whether what a method belongs to may be asked for; torch's own code asks no user's."""
        if "__self__" in self._computed or "__self__" in self._reach.all_names_read:
            return True
        codes = (code for code in self._codes if torch_path(code.co_filename) is None)
        return any("__self__" in find_uses(code).attributes for code in codes)

    @cached_property
    def _from_the_end(self) -> Use:
        """How what is reached by `v[-1]` is used, which may lie at any index."""
        found = [
            use
            for step, use in self.uses.steps.items()
            if step.kind is StepKind.ITEM and type(step.name) is int and step.name < 0
        ]
        return reduce(merge, found, _UNUSED)

    def _is_own_container(self, path: Source) -> bool:
        """Whether what is asked for at a path may find its items under other keys."""
        found = self._reach.object_at.get(id(path))
        return found is not None and type(found[0]) not in (*_KNOWN_CONTAINERS, tuple)

    def _has_keys(self, path: Source) -> bool:
        found = self._reach.object_at.get(id(path))
        return found is not None and isinstance(found[0], dict)

    def _is_taken_apart(self, path: Source) -> bool:
        """Whether a path leads to a named tuple whose elements are reached without their names."""
        found = self._reach.object_at.get(id(path))
        cls: Any = type(found[0]) if found is not None else None
        if found is None or not is_namedtuple(cls):
            return False
        use = self.use_of_container(found[0])
        return use.whole or bool(use.keys or use.attributes.difference(cls._fields))

    def may_store(self, holder: Holder, key: Any) -> bool:
        """Whether executed code may have written an attribute or a global."""
        if self.is_dynamic or self._opens_self:
            return True
        if key in self._stored or key in self.uses.stored_globals:
            return True
        return isinstance(holder.kind, _OWN_ATTRIBUTES) and self.names_of(holder.owner) is None

    def is_read(self, value: object, path: Source) -> bool:
        """Whether the executed code may have used a value."""
        return self.is_dynamic or self._use_at(path).is_any

    def relevant(self, holder: Holder) -> dict[Any, object]:
        """What a holder held before the run under the keys that count."""
        wanted = self.filter_of(holder)
        if wanted is None:
            wanted = self.find_places(holder.owner)
        before = holder.before()
        return before if wanted is None else {k: v for k, v in before.items() if k in wanted}

    def __iter__(self) -> Iterator[Read]:
        seen: set[str] = set()
        # What is torch's own comes last: a reader looks for his own names.
        for holder in sorted(self.holders, key=_is_library):
            for key, value in self.relevant(holder).items():
                source = holder.step(key)
                if str(source) not in seen:
                    seen.add(str(source))
                    yield Read(source, fingerprint(value), self.lines.find_name(key))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @cached_property
    def lines(self) -> Lines:
        """Where names stand in the code that ran."""
        return Lines(self._codes)

    def __str__(self) -> str:
        rows = [(str(r.source), str(r.seen), str(r.where or "")) for r in self]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"{s:{widths[0]}}  {v:{widths[1]}}  {w}".rstrip() for s, v, w in rows]
        return "\n".join([f"{len(rows)} reads", *lines])


def _kinds_of(holder: Holder) -> tuple[StepKind, ...]:
    """How code spells a step to what a holder holds."""
    match holder.kind:
        case NamesKind():
            return StepKind.GLOBAL, StepKind.ATTRIBUTE
        case CellsKind():
            return StepKind.FREE, StepKind.LOCAL
        case ItemsKind():
            return (StepKind.ITEM,)
    return (StepKind.ATTRIBUTE,)


def _is_library(holder: Holder) -> bool:
    return isinstance(holder.kind, (LibraryClassKind, LibraryNamesKind))


# What code names where it may find attributes that no reader is told of.
_UNSEEN = {"__dict__", "super"} if "LOAD_SUPER_ATTR" in dis.opmap else {"__dict__"}
_KNOWN_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
_OWN_ATTRIBUTES = (AttributesKind, SlotsKind)


# Of torch, these take `__dict__` of `self`, or of a function that they made.
_OPENS_ITS_OWN = frozenset({"nn/modules/module.py", "_functorch/apis.py"})
_WHOLE_LOOKS = frozenset({"vars", "dir", "attrgetter", "getmembers", "__dict__"})
