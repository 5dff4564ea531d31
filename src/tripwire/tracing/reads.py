"""Reads: what a run read. Compiled code is right as long as all of it is unchanged.

A run can read an attribute only by a name, and names stand in the code that ran. So the read
set is what was reached, narrowed to the names of the executed code: every object that holds
`scale` was read if any executed line says `.scale`. That is more than what was read, never
less; docs/design/0006 tells why no attribute access is hooked. Absences are part of it.
"""

from __future__ import annotations

import dis
import functools
import linecache
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property, reduce
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from tripwire.callables import mro_of
from tripwire.env import is_library_file
from tripwire.tracing.belongings import IS_HEAP_TYPE, is_library_class
from tripwire.tracing.holders import (
    ABSENT,
    Attributes,
    Cells,
    ClassDict,
    Code,
    Holder,
    Items,
    LibraryClass,
    LibraryNames,
    Members,
    Names,
    Slots,
    Table,
    ThreadLocal,
)
from tripwire.tracing.reach import HOOK_TABLES, PROXIES, Reach
from tripwire.tracing.rules import words
from tripwire.tracing.sources import Attr, Cell, Global, Item, Local, Source
from tripwire.tracing.structure import PLAIN, at_once
from tripwire.tracing.uses import Step, StepKind, Use, Uses, find_uses, join, merge
from tripwire.tracing.values import meta_of

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
# What functions and classes are called; no dict of theirs holds all of it.
LABELS = words("__name__ __qualname__ __module__ __doc__ __annotations__")
_WHOLE = Use(whole=True)
_UNUSED = Use()
_CALLS_A_MODULE = words("_wrapped_call_impl _call_impl inner")
# Steps that no instruction names: what lies behind them may be used in any way.
_HIDDEN_STEPS = words(
    "__defaults__ __kwdefaults__ __self__ __func__ __wrapped__ func args keywords cache "
    "fget fset fdel"
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a value was, in short: type and text."""

    cls: type
    text: str

    def __str__(self) -> str:
        return self.text


def fingerprint(value: object) -> Fingerprint:
    """A value in short."""
    cls = type(value)
    if value is ABSENT or cls in PLAIN:
        text = repr(value)
    elif cls in PROXIES:  # what is asked of one that outlived its object raises
        text = f"{cls.__name__} object"
    elif isinstance(value, torch.Tensor):
        text = f"tensor {meta_of(value)}"
    elif isinstance(value, (list, tuple, dict, set, frozenset)):
        text = f"{cls.__name__} of {len(value)}"
    elif isinstance(value, type):
        text = f"class {value.__qualname__}"
    elif isinstance(value, FunctionType):
        text = f"function {value.__qualname__}"
    elif isinstance(value, CodeType):
        text = f"code of {value.co_qualname}"
    else:
        text = f"{cls.__qualname__} object"
    return Fingerprint(cls, text if len(text) <= 60 else text[:57] + "...")


@dataclass(frozen=True, slots=True)
class Read:
    """One observation that compiled code depends on."""

    source: Source  # how to reach the value again
    seen: Fingerprint  # what it was
    where: Place | None  # the user's line; None where no line names it


class Place(NamedTuple):
    """A line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"

    @property
    def text(self) -> str:
        """What stands there, as far as the file is still there."""
        return linecache.getline(self.file, self.line).strip()


class Lines:
    """Where names are first loaded in the code that ran; the user's lines before torch's."""

    def __init__(self, codes: list[CodeType]) -> None:
        self._codes = codes

    def find_name(self, name: object) -> Place | None:
        """The line that names something."""
        return self._places.get(name) if isinstance(name, str) else None

    def find(self, source: Source) -> Place | None:
        """The user's line that names a source, or else what leads to it; else torch's line."""
        found, step = None, cast("Source | None", source)
        while step is not None:
            place = self.find_name(step.key if isinstance(step, Item) else _name_of(step))
            if place is not None:
                if not is_library_file(place.file):
                    return place
                found = found or place
            step = step.base
        return found

    @cached_property
    def _places(self) -> dict[str, Place]:
        places: dict[str, Place] = {}
        for code in sorted(self._codes, key=lambda code: is_library_file(code.co_filename)):
            uses = find_uses(code)
            for name, line in (*uses.attributes.items(), *uses.globals.items()):
                places.setdefault(name, Place(code.co_filename, line))
            for step in dis.get_instructions(code) if code.co_freevars else ():
                line_of = step.positions.lineno if step.positions is not None else None
                if step.argval in code.co_freevars and line_of is not None:
                    places.setdefault(step.argval, Place(code.co_filename, line_of))
        return places


def _name_of(step: Source) -> str | None:
    return step.name if isinstance(step, (Attr, Global, Cell)) else None


class ReadSet:
    """Everything that one run could read, narrowed to what its code names."""

    def __init__(self, reach: Reach, codes: list[CodeType], computed: frozenset[str]) -> None:
        self.holders = reach.holders.all
        self._reach = reach
        self._codes = codes
        # Names that the run computed, for getattr and its like, and names that C code looks up.
        self._computed = computed | reach.spelled_names
        self._executed = {id(code) for code in codes}

    @cached_property
    def uses(self) -> Uses:
        """What all the executed code may read and write."""
        return join(map(find_uses, self._codes))

    @cached_property
    def refused(self) -> tuple[str, str] | None:
        """What a user's function names that reads can't be told of, and its line."""
        for code in self._codes:
            found = find_uses(code).refused
            if found is not None and not is_library_file(code.co_filename):
                return found[0], f"{code.co_filename}:{found[1]}"
        return None

    @cached_property
    def asks_for_classes(self) -> bool:
        """Whether a user's function tests what a value is an instance of."""
        return any(
            not {"isinstance", "issubclass"}.isdisjoint(find_uses(code).globals)
            for code in self._codes
            if not is_library_file(code.co_filename)
        )

    @cached_property
    def labels(self) -> frozenset[str]:
        """Which of the names and texts of functions and classes a user's function may read."""
        names = (
            LABELS & find_uses(code).attributes.keys()
            for code in self._codes
            if not is_library_file(code.co_filename)
        )
        return (LABELS & self._computed).union(*names)

    @cached_property
    def stored(self) -> frozenset[str]:
        """Attribute names that a user's function stores, or that the run computed."""
        names = (
            find_uses(code).stored_attributes
            for code in self._codes
            if not is_library_file(code.co_filename)
        )
        return self._computed.union(*names)

    @cached_property
    def compares_identity(self) -> bool:
        """Whether a user's function asks with `is` for more than None, True and False."""
        return any(
            find_uses(code).compares_identity and not is_library_file(code.co_filename)
            for code in self._codes
        )

    @cached_property
    def is_dynamic(self) -> bool:
        """Whether the executed code looks at objects as wholes: `vars(x)`, `x.__dict__`."""
        return self._reach.hides_names or any(map(self._is_dynamic, self._codes))

    def _is_dynamic(self, code: CodeType) -> bool:
        uses = find_uses(code)
        if code.co_filename.endswith("torch/nn/modules/module.py"):
            return False
        if uses.has_dynamic_names:
            return not (code.co_name in _ACCESSORS and _looks_by_name_only(uses))
        # `self` of a function that is no method may be anything; library classes are open anyhow.
        is_users = not is_library_file(code.co_filename)
        return uses.opens_self and is_users and id(code) not in self._methods

    @cached_property
    def _methods(self) -> dict[int, type]:
        """Executed code of methods, properties included, by identity: the class that has it."""
        return {
            id(code): cls
            for cls, _ in self._reach.classes
            for value in at_once(vars(cls).values)
            for function in _functions_in(value)
            for code in _codes_in(function.__code__)
            if id(code) in self._executed
        }

    @cached_property
    def _opened(self) -> frozenset[type]:
        """Classes with methods that look at `self` as a whole, and ran."""
        return frozenset(
            self._methods[id(code)]
            for code in self._codes
            if id(code) in self._methods and _opens(code)
        )

    def is_open(self, cls: type) -> bool:
        """Whether names in the code tell nothing of what was read of an object."""
        if not self._opened.isdisjoint(mro_of(cls)):
            return True
        written_in_python = bool(cls.__flags__ & IS_HEAP_TYPE)
        return written_in_python and is_library_class(cls) and not issubclass(cls, nn.Module)

    def _is_read_whole(self, owner: object) -> bool:
        if isinstance(owner, SimpleNamespace) and self.use_of_container(owner).whole:
            return True  # C code compares and prints one with all its attributes
        return self.is_open(type(owner))

    @cached_property
    def names(self) -> frozenset[str]:
        """Attribute names that the executed code loads or stores."""
        return frozenset(self.uses.attributes) | self.uses.stored_attributes | self._computed

    @cached_property
    def live(self) -> frozenset[int]:
        """Identities of objects that the executed code can come to, step by step, by name."""
        live: set[int] = set()
        waiting = self._reach.edges
        while True:
            left = []
            for edge in waiting:
                child, path = edge
                if child in live:
                    continue
                if self._is_live(path, live):
                    live.add(child)
                else:
                    left.append(edge)
            if len(left) == len(waiting):
                return frozenset(live)
            waiting = left

    def is_reachable(self, path: Source) -> bool:
        """Whether the executed code can come to what a path leads to."""
        return self._is_live(path, self.live)

    def _is_live(self, path: Source, live: Set[int]) -> bool:
        base = path.base
        if base is None:
            return True
        parent = self._reach.object_at.get(id(base))
        if parent is None:  # a Python module: its names are those of executed code
            return self._is_live(base, live)
        owner, owner_id = parent
        if owner_id not in live:
            return False
        match path:
            case Attr(_, name) if name in HOOK_TABLES and isinstance(owner, nn.Module):
                if not self._asks_for_hooks:
                    return owner_id in self._reach.called
        match path:
            case Cell() | Attr(_, "__defaults__" | "__kwdefaults__"):
                return not isinstance(owner, FunctionType) or self.is_executed(owner)
            case Attr() | Item() if isinstance(owner, nn.Module) and self._walks_tables:
                return True
            case Attr(_, name):
                return (
                    name in self.names
                    or self.is_dynamic
                    or name in _HIDDEN_STEPS
                    or name in SPECIAL
                    or not isinstance(name, str)
                    or self.is_open(type(owner))
                    or name.isdecimal()
                    or isinstance(owner, slice)  # which C code takes apart
                )
        return True

    @cached_property
    def _class_names(self) -> frozenset[str]:
        return self.names | SPECIAL

    @cached_property
    def _walks_tables(self) -> bool:
        """Whether code outside nn.Module's own lookups goes through tables of modules."""
        return any(
            {"_modules", "_parameters", "_buffers"} & find_uses(code).attributes.keys()
            for code in self._codes
            if not code.co_filename.endswith(_TABLE_FILES)
        ) or any(code.co_name in _TABLE_WALKERS for code in self._codes)

    @cached_property
    def _asks_for_hooks(self) -> bool:
        """Whether anybody but a module that is called looks at hooks of modules."""
        words = frozenset({*HOOK_TABLES, "_call_impl"})
        return (
            self.is_dynamic
            or not words.isdisjoint(self._computed)
            or any(
                not words.isdisjoint(find_uses(code).attributes)
                for code in self._codes
                if not code.co_filename.endswith("torch/nn/modules/module.py")
                or code.co_name not in _CALLS_A_MODULE
            )
        )

    def is_executed(self, function: FunctionType) -> bool:
        """Whether a function's code ran."""
        return id(function.__code__) in self._executed

    def filter_of(self, holder: Holder) -> frozenset[Any] | None:
        """The keys of a holder that count; None where all of them do."""
        if id(holder.owner) not in self.live and not isinstance(holder.kind, Names):
            return frozenset()
        match holder.kind:
            case Names() as kind:
                return kind.names
            case Cells() | Code():
                return None if self.is_executed(holder.owner) else frozenset()
            case _ if self.is_dynamic:
                return None
            case Attributes() | Slots() | ThreadLocal():
                return None if self._is_read_whole(holder.owner) else self.names
            case Table():
                return self.filter_of_tables(holder.owner)
            case LibraryClass():
                return self._class_names
            case ClassDict():
                return self._class_names
            case Items():
                use = self.use_of_container(holder.owner)
                if type(holder.owner) not in _KNOWN_CONTAINERS:
                    return None
                return None if use.whole or use.attributes else use.keys | use.stored_keys
            case _:
                use = self.use_of_container(holder.owner)
                if use.whole or use.keys or use.attributes or use.stored_keys:
                    return None
                if type(holder.owner) not in _KNOWN_CONTAINERS:
                    return None
                if getattr(holder.owner, "maxlen", None) is not None:
                    return None  # what is added may push out its like
                adds = use.appended and isinstance(holder.kind, Members)  # adds nothing, perhaps
                return None if adds else frozenset()

    def filter_of_tables(self, module: nn.Module) -> frozenset[str] | None:
        """The keys of a module's tables that count; None where all of them do."""
        whole = self._walks_tables or type(module).__module__ == _CONTAINER_MODULE
        return None if self.is_dynamic or whole or _is_container(module) else self.names

    def use_of_container(self, container: object) -> Use:
        """How the executed code uses a container, by whatever path it comes to it."""
        paths = self._reach.paths.get(id(container))
        if not paths or self.is_dynamic:
            return _WHOLE
        use = _UNUSED
        for path in paths:
            use = merge(use, self._use_at(path))
        return use

    def use_of_key(self, holder: Holder, key: Any) -> Use:
        """How the executed code uses what a holder holds under a key."""
        if self.is_dynamic:
            return _WHOLE
        if isinstance(holder.kind, Items):
            use = self.use_of_container(holder.owner)
            if use.whole or use.attributes or type(holder.owner) not in _KNOWN_CONTAINERS:
                return _WHOLE
            found = self.uses.steps.get(Step(StepKind.ITEM, key), _UNUSED)
            return found if key in use.keys else _UNUSED
        return self._use_at(holder.step(key))

    def _use_at(self, path: Source) -> Use:
        uses = self.uses
        match path:
            case Attr(_, name):
                if name in _HIDDEN_STEPS:
                    return _WHOLE
                step = Step(StepKind.ATTRIBUTE, name)
                missing = _WHOLE if name in self.names else _UNUSED
                if name in self._computed:
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
                if above.whole or above.attributes or self._is_own_container(base):
                    return _WHOLE
                use = uses.steps.get(Step(StepKind.ITEM, key), _UNUSED)
                return merge(use, self._from_the_end) if type(key) is int else use
            case _:
                return _WHOLE
        return uses.steps.get(step, missing)

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

    def may_store(self, holder: Holder, key: Any) -> bool:
        """Whether executed code may have written an attribute or a global."""
        uses = self.uses
        return (
            self.is_dynamic
            or key in uses.stored_attributes
            or key in uses.stored_globals
            or key in self._computed
            or (not isinstance(holder.kind, ClassDict) and self.is_open(type(holder.owner)))
        )

    def is_read(self, value: object, path: Source) -> bool:
        """Whether the executed code may have used a value."""
        if id(value) not in self.live:
            return False
        use = _WHOLE if self.is_dynamic else self._use_at(path)
        return use.whole or use.appended or use.updated or bool(use.keys or use.attributes)

    def relevant(self, holder: Holder) -> dict[Any, object]:
        """What a holder held before the run under the keys that count."""
        wanted = self.filter_of(holder)
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


def _is_library(holder: Holder) -> bool:
    return isinstance(holder.kind, (LibraryClass, LibraryNames))


# Functions through which attributes are looked up: names in them are names at their callers.
_KNOWN_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
_ACCESSORS = frozenset({"__getattribute__", "__getattr__", "__setattr__", "__delattr__"})
_CONTAINER_MODULE = "torch.nn.modules.container"
_TABLE_FILES = ("nn/modules/module.py", "nn/modules/container.py")
# Functions of nn.Module that go through its tables key by key.
_TABLE_WALKERS = words(
    "named_modules modules named_children children _named_members named_parameters "
    "parameters named_buffers buffers apply _apply state_dict train requires_grad_ "
    "zero_grad __dir__"
)


def _is_container(module: nn.Module) -> bool:
    return isinstance(
        module,
        (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict),
    )


def _opens(code: CodeType) -> bool:
    uses = find_uses(code)
    return uses.opens_self or (uses.has_dynamic_names and code.co_name in _ACCESSORS)


def _functions_in(value: object) -> Iterator[FunctionType]:
    """Functions in an attribute of a class: itself, or behind a descriptor or a decorator."""
    match value:
        case FunctionType():
            yield value
            yield from _functions_in(getattr(value, "__wrapped__", None))
        case property():
            for part in (value.fget, value.fset, value.fdel):
                yield from _functions_in(part)
        case classmethod() | staticmethod():
            yield from _functions_in(value.__func__)
        case functools.cached_property():
            yield from _functions_in(value.func)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes_in(const)


def _looks_by_name_only(uses: Uses) -> bool:
    return _WHOLE_LOOKS.isdisjoint(uses.globals) and _WHOLE_LOOKS.isdisjoint(uses.attributes)


_WHOLE_LOOKS = frozenset({"vars", "dir", "attrgetter", "getmembers", "__dict__"})
