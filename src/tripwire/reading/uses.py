"""Uses: what a code object may read, told from its bytecode alone.

Attribute names, globals and keys are taken from the instructions, so nothing is hooked while
the code runs. Each instruction is carried out once, in order, on a stack of values of which
only the origin is known; whatever takes a value off that stack is a use of it. The walk
forgets the stack at every jump and at every place that a forward jump leads to, and a value
that is forgotten counts as used as a whole. So a `Use` says too much or the truth.

What no instruction names is not seen: special methods behind operators, an alias of
`getattr` under another name, attributes that C code looks up by itself.

One file, long as it is: it needs nothing but the standard library, so that it is tested
under every Python whose bytecode it reads.
"""

from __future__ import annotations

import dis
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from inspect import CO_VARARGS, CO_VARKEYWORDS
from itertools import product
from types import CodeType
from typing import NamedTuple

from tripwire.values.classes import isinstance


class StepKind(Enum):
    """By what a value was loaded last."""

    ATTRIBUTE = "attribute"
    GLOBAL = "global"
    FREE = "free variable"
    LOCAL = "argument"
    ITEM = "constant key"

    __hash__ = object.__hash__  # Enum's is written in Python: a step's hash 0.35 → 0.16 µs


class Step(NamedTuple):
    """The last step to a value: `.cfg`, the global `CFG`, `["scale"]`."""

    kind: StepKind
    name: object  # a str, or any constant where the kind is ITEM


@dataclass(frozen=True, slots=True)
class Use:
    """How the values behind one step are used, all occurrences together.

    A key is an entry's key where the value is a mapping, and an index in a list; asked of
    anything else, it says that the value is read as a whole. What was only asked for
    (`"k" in v`, `hasattr(v, "k")`) counts as a whole use of what lies behind `k`.
    """

    keys: frozenset[object] = frozenset()  # v["k"], v.get("k"), "k" in v
    stored_keys: frozenset[object] = frozenset()  # v["k"] = ..., del v["k"]
    attributes: frozenset[str] = frozenset()  # v.name, v.name = ..., v.method(), getattr(v, "name")
    appended: bool = False  # v.append(...) and the like, result unused
    updated: bool = False  # v += 1, v = v + 1: nothing else sees the old or the new value
    whole: bool = False  # everything else: iterated, passed on, stored, returned, called, ...
    # The same, but for methods of it that are called.
    escapes: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Uses:
    """What one code object may read and write. Lines are those of the first occurrence."""

    attributes: dict[str, int]  # loaded by instruction, or spelled by a string constant
    globals: dict[str, int]
    stored_attributes: frozenset[str]
    stored_globals: frozenset[str]
    imports: frozenset[str]  # as written, relative ones with their dots
    has_dynamic_names: bool  # attributes are read or written under computed names
    opens_self: bool  # the same, but of `self` only: `self.__dict__`, `super().__setattr__(k, v)`
    refused: tuple[str, int] | None  # reaches code, frames or objects behind our back
    passed: dict[str, int]  # globals and attributes that are handed to a call
    steps: dict[Step, Use]
    computes_names: bool = False  # `getattr` and its kin are given names that aren't constants
    compares_identity: bool = False  # `a is b`, where neither is None, True, False or `...`
    replaced: frozenset[Step] = frozenset()  # stored other than by a sum of what was there
    replaced_of_self: frozenset[str] = frozenset()  # the same, by `self.name = ...`


def find_uses(code: CodeType) -> Uses:
    """What `code` may read and write; functions nested in it are code objects of their own."""
    found = _found.get(id(code))
    if found is None:
        if len(_found) >= 65_536:  # a program that makes code without end
            _found.clear()
        found = _found[id(code)] = (_Walk(code).run(), code)
    return found[0]


# By identity: code objects hash and compare by content. The code is kept alive, so that its
# identity is never reused.
_found: dict[int, tuple[Uses, CodeType]] = {}


def merge(a: Use, b: Use) -> Use:
    """Used as `a` says in one place and as `b` says in another."""
    return Use(
        a.keys | b.keys,
        a.stored_keys | b.stored_keys,
        a.attributes | b.attributes,
        a.appended or b.appended,
        a.updated or b.updated,
        a.whole or b.whole,
        a.escapes or b.escapes,
    )


def join(uses: Iterable[Uses]) -> Uses:
    """The uses of many code objects together; of lines and refusals, the first one counts."""
    attributes: dict[str, int] = {}
    names: dict[str, int] = {}
    stored_attributes: set[str] = set()
    stored_globals: set[str] = set()
    imports: set[str] = set()
    dynamic = opens_self = computes_names = compares_identity = False
    refused = None
    passed: dict[str, int] = {}
    steps: dict[Step, Use] = {}
    replaced: set[Step] = set()
    replaced_of_self: set[str] = set()
    for one in uses:
        passed |= one.passed
        replaced |= one.replaced
        replaced_of_self |= one.replaced_of_self
        for name, line in one.attributes.items():
            attributes.setdefault(name, line)
        for name, line in one.globals.items():
            names.setdefault(name, line)
        stored_attributes |= one.stored_attributes
        stored_globals |= one.stored_globals
        imports |= one.imports
        dynamic = dynamic or one.has_dynamic_names
        opens_self = opens_self or one.opens_self
        computes_names = computes_names or one.computes_names
        compares_identity = compares_identity or one.compares_identity
        refused = refused or one.refused
        for step, use in one.steps.items():
            known = steps.get(step)
            if known is None:
                steps[step] = use
            elif known != use or known.escapes != use.escapes:
                steps[step] = merge(known, use)
    return Uses(
        attributes,
        names,
        frozenset(stored_attributes),
        frozenset(stored_globals),
        frozenset(imports),
        dynamic,
        opens_self,
        refused,
        passed,
        steps,
        computes_names,
        compares_identity,
        frozenset(replaced),
        frozenset(replaced_of_self),
    )


# --- names with a meaning ------------------------------------------------------------------------

# Which argument is the attribute's name, counted from the end where negative.
_NAME_ARGUMENT = {
    "getattr": 1,
    "hasattr": 1,
    "setattr": 1,
    "delattr": 1,
    "methodcaller": 0,
    "__getattribute__": -1,
    "__getattr__": -1,
    "__delattr__": -1,
    "__setattr__": -2,
}
# Builtins that are replaced while a run is observed, to record the names that they are given.
RECORDED = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_OF_SUPER = frozenset({"__getattribute__", "__getattr__", "__setattr__", "__delattr__"})
_TAKES_NAMES = frozenset({*_NAME_ARGUMENT, "attrgetter", "__import__"})

# Each of these reads all that an object has.
_WHOLE_OBJECT_GLOBALS = frozenset({"vars", "dir", "getmembers", "getattr_static"})
_WHOLE_OBJECT_ATTRIBUTES = frozenset(
    {"__dir__", "__getstate__", "__reduce__", "__reduce_ex__", "getattr_static", "getmembers"}
)

_REFUSED_GLOBALS = frozenset(
    {"globals", "eval", "exec", "compile", "_getframe", "currentframe", "get_referrers"}
)
_REFUSED_ATTRIBUTES = frozenset(
    {"_getframe", "_current_frames", "currentframe", "f_globals", "f_locals", "__globals__"}
)
_REFUSED_OF_MODULES = {  # too common as names to be refused wherever they occur
    "inspect": frozenset({"stack", "trace", "getinnerframes", "getouterframes"}),
    "gc": frozenset({"get_objects", "get_referrers", "get_referents"}),
    "builtins": frozenset({"globals", "eval", "exec", "compile"}),
}

# Only sums can be repeated without knowing the number: + - += -=, by CPython's numbers.
_SUMS = frozenset(
    number
    for number, (_, sign) in enumerate(dis._nb_ops)  # type: ignore[attr-defined]
    if sign in ("+", "-", "+=", "-=")
)
_IDENTITY_FUNCTIONS = frozenset({"is_", "is_not"})  # of the module operator
_GROWING = frozenset({"append", "extend", "add"})
# Taken without being called, such a method carries the whole container with it.
_CONTAINER_METHODS = frozenset(
    name
    for container in (dict, list, set, tuple, deque, OrderedDict, defaultdict, Counter)
    for name in dir(container)
) | {"__dict__"}

_FORMAT_ATTRIBUTE = re.compile(r"\.([^\W\d]\w*)")


def _names_in(constant: object) -> Iterator[str]:
    """Attribute names that a constant may spell: `"scale"`, `"block.scale"`, `("a", "b")`."""
    if isinstance(constant, str):
        if constant.isidentifier():
            yield constant
        elif "." in constant:
            parts = constant.split(".")
            if all(map(str.isidentifier, parts)):
                yield from parts
    elif isinstance(constant, (tuple, frozenset)):
        for part in constant:
            yield from _names_in(part)


# --- values on the stack -------------------------------------------------------------------------


class _Tally:
    """A `Use` while it is being counted."""

    __slots__ = (
        "appended",
        "attributes",
        "escapes",
        "keys",
        "stored_keys",
        "updated",
        "whole",
    )

    def __init__(self) -> None:
        self.keys: set[object] = set()
        self.stored_keys: set[object] = set()
        self.attributes: set[str] = set()
        self.appended = self.updated = self.whole = self.escapes = False

    def freeze(self) -> Use:
        if not (self.keys or self.stored_keys or self.attributes):
            return _PLAIN_USES[self.appended, self.updated, self.whole, self.escapes]
        return Use(
            frozenset(self.keys),
            frozenset(self.stored_keys),
            frozenset(self.attributes),
            self.appended,
            self.updated,
            self.whole,
            self.escapes,
        )


# Most values are used as a whole and no other way: to share these saves a fifth of the time.
_PLAIN_USES = {
    flags: Use(appended=flags[0], updated=flags[1], whole=flags[2], escapes=flags[3])
    for flags in product((False, True), repeat=4)
}


class _Value:
    """A value on the stack; where nothing at all is known of it, None stands there instead."""

    __slots__ = ()

    def escape(self) -> None:
        """It goes where its further use isn't followed."""


_NULL = _Value()  # the empty slot beside a callable that isn't a method


class _Const(_Value):
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def _is_singleton(value: _Value | None) -> bool:
    """Whether a value is one that Python has once."""
    return isinstance(value, _Const) and (
        value.value is None or value.value is ... or isinstance(value.value, bool)
    )


class _Loaded(_Value):
    """A value that one step led to, from `owner` where the step has one."""

    __slots__ = ("kind", "name", "owner", "tally")

    def __init__(self, kind: StepKind, name: object, tally: _Tally, owner: _Value | None) -> None:
        self.kind = kind
        self.name = name
        self.tally = tally
        self.owner = owner

    def escape(self) -> None:
        self.tally.whole = self.tally.escapes = True


class _Method(_Loaded):
    """An attribute that was loaded in order to be called."""

    __slots__ = ()

    def escape(self) -> None:
        super().escape()
        self.escape_owner()

    def escape_owner(self) -> None:
        if isinstance(self.owner, _Loaded):
            self.owner.tally.attributes.add(str(self.name))
            self.owner.tally.whole = True
        elif self.owner is not None:
            self.owner.escape()


class _Sum(_Value):
    """`value + 1`: an update, if it is stored where `value` came from."""

    __slots__ = ("value",)

    def __init__(self, value: _Loaded) -> None:
        self.value = value

    def escape(self) -> None:
        self.value.escape()


class _Grown(_Value):
    """What `value.append(...)` returned: nothing, if `value` is what it seems to be."""

    __slots__ = ("value",)

    def __init__(self, value: _Loaded) -> None:
        self.value = value

    def escape(self) -> None:
        self.value.escape()


_NAMED = (StepKind.GLOBAL, StepKind.ATTRIBUTE)


def _is_same(a: _Value | None, b: _Value | None) -> bool:
    """Whether both are one object: a copy on the stack, or one variable loaded twice."""
    if a is b:
        return a is not None
    return (
        isinstance(a, _Loaded)
        and isinstance(b, _Loaded)
        and a.kind is b.kind
        and a.kind not in (StepKind.ATTRIBUTE, StepKind.ITEM)
        and a.name == b.name
    )


# --- the walk ------------------------------------------------------------------------------------

_HAS_METHOD_BIT = sys.version_info >= (3, 12)  # LOAD_ATTR took over LOAD_METHOD
_NULL_FIRST = sys.version_info < (3, 13)  # the empty slot lies below the callable
_CACHE = dis.opmap["CACHE"]
_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
_CALL_KW = dis.opmap.get("CALL_KW", -1)  # 3.13: the names are a constant on the stack


class _Walk:
    """One pass over a code object's instructions."""

    def __init__(self, code: CodeType) -> None:
        variables = code.co_varnames
        cells = tuple(name for name in code.co_cellvars if name not in variables)
        arguments = code.co_argcount + code.co_kwonlyargcount
        arguments += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
        self.code = code
        self.raw = code.co_code
        self.consts = code.co_consts
        self.names = code.co_names
        self.variables = (*variables, *cells, *code.co_freevars)
        self.arguments = frozenset(variables[:arguments])
        self.shared = frozenset((*code.co_cellvars, *code.co_freevars))
        self.stack: list[_Value | None] = []
        self.at = 0  # offset of the instruction
        self.targets: set[int] = set()  # offsets that a jump seen so far leads to
        self.keywords = False  # KW_NAMES stood before the call
        self.tallies: dict[StepKind, dict[object, _Tally]] = {kind: {} for kind in StepKind}
        self.attributes: dict[str, int] = {}  # name → offset
        self.globals: dict[str, int] = {}
        self.stored_attributes: set[str] = set()
        self.stored_globals: set[str] = set()
        self.imports: set[str] = set()
        self.dynamic = False
        self.opens_self = False
        self.computes_names = False
        self.compares_identity = not _IDENTITY_FUNCTIONS.isdisjoint(code.co_names)
        self.foreign_dict = False  # `__dict__` is taken of something that isn't `self`
        self.refused: tuple[str, int] | None = None
        self.passed: dict[str, int] = {}
        self.replaced: set[Step] = set()
        self.replaced_of_self: set[str] = set()

    def run(self) -> Uses:
        raw = self.raw
        targets = self.targets
        argument = 0
        for at, opcode, low in zip(range(0, len(raw), 2), raw[::2], raw[1::2], strict=True):
            if opcode == _CACHE:
                continue
            if at in targets:
                self.give_up()
            argument = argument << 8 | low
            if opcode == _EXTENDED_ARG:
                continue
            self.at = at
            _CARRY_OUT[opcode](self, argument)
            argument = 0
        self.give_up()
        self.close()
        return self.freeze()

    def close(self) -> None:
        """Draw the conclusions that need every occurrence."""
        attributes = self.tallies[StepKind.ATTRIBUTE]
        for kind in (StepKind.GLOBAL, StepKind.ATTRIBUTE):
            tallies = self.tallies[kind]
            for name in _TAKES_NAMES & tallies.keys():
                if kind is StepKind.GLOBAL and name in RECORDED:
                    # Whatever name they are given is recorded when they run.
                    self.computes_names = self.computes_names or tallies[name].whole
                elif name in _OF_SUPER and "super" in self.globals:
                    self.opens_self = self.opens_self or tallies[name].whole
                elif name != "__import__":
                    self.dynamic = self.dynamic or tallies[name].whole
                elif tallies[name].whole:
                    self.refuse(name, (self.globals | self.attributes)[name])
                tallies[name].whole = True  # a call is one too
        namespace = attributes.get("__dict__")
        if namespace is not None:
            if namespace.whole or namespace.appended:
                self.dynamic = self.dynamic or self.foreign_dict
                self.opens_self = True
            stored = {k for k in namespace.stored_keys if isinstance(k, str)}
            self.stored_attributes |= stored
            for name in stored:
                self.replace(StepKind.ATTRIBUTE, name)
            for key in namespace.keys:
                self.load_named(key)
        self.dynamic = (
            self.dynamic
            or not _WHOLE_OBJECT_ATTRIBUTES.isdisjoint(attributes)
            or not _WHOLE_OBJECT_GLOBALS.isdisjoint(self.globals)
        )

    def freeze(self) -> Uses:
        steps = {}
        for kind, tallies in self.tallies.items():
            for name, tally in tallies.items():
                if kind is not StepKind.LOCAL or name in self.arguments:
                    steps[Step(kind, name)] = tally.freeze()
        refused = self.refused
        return Uses(
            self.lines(self.attributes),
            self.lines(self.globals),
            frozenset(self.stored_attributes),
            frozenset(self.stored_globals),
            frozenset(self.imports),
            self.dynamic,
            self.opens_self,
            refused and (refused[0], self.lines({refused[0]: refused[1]})[refused[0]]),
            self.lines(self.passed),
            steps,
            self.computes_names,
            self.compares_identity,
            frozenset(self.replaced),
            frozenset(self.replaced_of_self),
        )

    def lines(self, offsets: dict[str, int]) -> dict[str, int]:
        """Offsets, in the order of the code, replaced by lines."""
        first = self.code.co_firstlineno
        ranges = self.code.co_lines()
        end, line = 0, first
        found = {}
        for name, offset in offsets.items():
            while offset >= end:
                _, end, known = next(ranges)
                line = known or first
            found[name] = line
        return found

    # What the handlers below are made of.

    def pop(self) -> _Value | None:
        return self.stack.pop() if self.stack else None

    def pop_const(self) -> _Const | None:
        """The constant on top; anything else there is used as a whole."""
        value = self.pop()
        if isinstance(value, _Const):
            return value
        if value is not None:
            value.escape()
        return None

    def drop(self, count: int) -> None:
        """Take values that are used as a whole."""
        for _ in range(count):
            value = self.pop()
            if value is not None:
                value.escape()

    def pad(self, depth: int) -> None:
        missing = depth - len(self.stack)
        if missing > 0:
            self.stack[:0] = [None] * missing

    def give_up(self, _: int = 0) -> None:
        self.drop(len(self.stack))

    def tally(self, kind: StepKind, name: object) -> _Tally:
        tallies = self.tallies[kind]
        found = tallies.get(name)
        if found is None:
            found = tallies[name] = _Tally()
        return found

    def refuse(self, name: str, at: int) -> None:
        if self.refused is None:
            self.refused = name, at

    def load_named(self, name: object) -> None:
        """An attribute is loaded by something that doesn't leave the value on the stack."""
        if isinstance(name, str):
            for part in name.split("."):  # attrgetter follows dots
                self.attributes.setdefault(part, self.at)
                tally = self.tally(StepKind.ATTRIBUTE, part)
                tally.whole = tally.escapes = True

    def attribute_of(self, owner: _Value | None, name: str, called: bool) -> _Loaded:
        """The value of `owner.name`."""
        self.attributes.setdefault(name, self.at)
        if name in _REFUSED_ATTRIBUTES:
            self.refuse(name, self.at)
        if name == "__dict__" and not self._is_self(owner):
            self.foreign_dict = True
        if isinstance(owner, _Loaded):
            if name in _REFUSED_OF_MODULES.get(str(owner.name), ()):
                self.refuse(name, self.at)
            if not called:
                owner.tally.attributes.add(name)
                if name in _CONTAINER_METHODS:
                    owner.escape()
        elif owner is not None:
            owner.escape()
        if name in ("format", "format_map"):  # "{0.scale}".format(x) loads `scale`
            if isinstance(owner, _Const) and isinstance(owner.value, str):
                for part in _FORMAT_ATTRIBUTE.findall(owner.value):
                    self.load_named(part)
            else:
                self.dynamic = True
        form = _Method if called else _Loaded
        return form(StepKind.ATTRIBUTE, name, self.tally(StepKind.ATTRIBUTE, name), owner)

    def _is_self(self, owner: _Value | None) -> bool:
        return (
            isinstance(owner, _Loaded)
            and owner.kind in (StepKind.LOCAL, StepKind.FREE)
            and owner.name == "self"
        )

    def item_of(self, owner: _Value | None, key: object) -> _Loaded:
        """The value of `owner[key]`."""
        if isinstance(owner, _Loaded):
            owner.tally.keys.add(key)
        elif owner is not None:
            owner.escape()
        return _Loaded(StepKind.ITEM, key, self.tally(StepKind.ITEM, key), owner)

    def store(
        self, value: _Value | None, kind: StepKind, name: object, owner: _Value | None
    ) -> None:
        """Store `value` behind a step: an update where it was computed from what was there."""
        for other in self.stack:
            if isinstance(other, _Sum):  # `v, v.n = w, v.n + 1`: `v` is another object by then
                other.escape()
        if isinstance(value, _Sum):
            old = value.value
            if old.kind is kind and old.name == name:
                if kind not in (StepKind.ATTRIBUTE, StepKind.ITEM) or _is_same(old.owner, owner):
                    old.tally.updated = True
                    return
        self.replace(kind, name, owner)
        if value is not None:
            value.escape()

    def replace(self, kind: StepKind, name: object, owner: _Value | None = None) -> None:
        """Something else is stored behind a step, or nothing is there any more."""
        if kind is StepKind.ATTRIBUTE and self._is_self(owner):
            self.replaced_of_self.add(str(name))
        elif kind is not StepKind.LOCAL or name in self.shared:
            self.replaced.add(Step(kind, name))

    # Constants and variables.

    def load_const(self, argument: int) -> None:
        constant = self.consts[argument]
        # 3.13: the keywords of a call name no attribute.
        if isinstance(constant, (str, tuple, frozenset)) and self.raw[self.at + 2] != _CALL_KW:
            for name in _names_in(constant):
                self.attributes.setdefault(name, self.at)
        self.stack.append(_Const(constant))

    def return_const(self, argument: int) -> None:
        for name in _names_in(self.consts[argument]):
            self.attributes.setdefault(name, self.at)
        self.give_up()

    def push_null(self, _: int) -> None:
        self.stack.append(_NULL)

    def load_fast(self, index: int) -> None:
        name = self.variables[index]
        tally = self.tally(StepKind.LOCAL, name)
        if name in self.shared:  # 3.13 loads cells so
            tally.whole = True
            self.stack.append(None)
        else:
            self.stack.append(_Loaded(StepKind.LOCAL, name, tally, None))

    def load_closure(self, index: int) -> None:
        """An inner function gets the cell; what it does with it is told by its own code."""
        self.tally(StepKind.LOCAL, self.variables[index]).whole = True
        self.stack.append(None)

    def store_fast(self, index: int) -> None:
        self.store(self.pop(), StepKind.LOCAL, self.variables[index], None)

    def load_fast_load_fast(self, indices: int) -> None:
        self.load_fast(indices >> 4)
        self.load_fast(indices & 15)

    def store_fast_load_fast(self, indices: int) -> None:
        self.store_fast(indices >> 4)
        self.load_fast(indices & 15)

    def store_fast_store_fast(self, indices: int) -> None:
        self.store_fast(indices >> 4)
        self.store_fast(indices & 15)

    def kind_of_cell(self, name: str) -> StepKind:
        return StepKind.LOCAL if name in self.arguments else StepKind.FREE

    def load_deref(self, index: int) -> None:
        name = self.variables[index]
        kind = self.kind_of_cell(name)
        self.stack.append(_Loaded(kind, name, self.tally(kind, name), None))

    def load_from_dict_or_deref(self, index: int) -> None:
        self.drop(1)
        self.load_deref(index)

    def store_deref(self, index: int) -> None:
        name = self.variables[index]
        self.store(self.pop(), self.kind_of_cell(name), name, None)

    def load_name(self, index: int) -> None:
        name = self.names[index]
        self.globals.setdefault(name, self.at)
        if name in _REFUSED_GLOBALS:
            self.refuse(name, self.at)
        self.stack.append(_Loaded(StepKind.GLOBAL, name, self.tally(StepKind.GLOBAL, name), None))

    def load_global(self, argument: int) -> None:
        if argument & 1 and _NULL_FIRST:  # a call follows
            self.stack.append(_NULL)
        self.load_name(argument >> 1)
        if argument & 1 and not _NULL_FIRST:
            self.stack.append(_NULL)

    def load_from_dict_or_globals(self, index: int) -> None:
        self.drop(1)
        self.load_name(index)

    def store_name(self, index: int) -> None:
        name = self.names[index]
        self.stored_globals.add(name)
        self.store(self.pop(), StepKind.GLOBAL, name, None)

    def delete_name(self, index: int) -> None:
        self.stored_globals.add(self.names[index])
        self.replace(StepKind.GLOBAL, self.names[index])

    # Attributes.

    def load_attr(self, argument: int) -> None:
        if not _HAS_METHOD_BIT:
            name = self.names[argument]
        elif argument & 1:
            self.load_method(argument >> 1)
            return
        else:
            name = self.names[argument >> 1]
        self.stack.append(self.attribute_of(self.pop(), name, called=False))

    def load_method(self, index: int) -> None:
        self.stack.append(self.attribute_of(self.pop(), self.names[index], called=True))
        self.stack.append(None)  # the object, as the method's first argument

    def load_super_attr(self, argument: int) -> None:
        self.drop(3)
        name = self.names[argument >> 2]
        if argument & 1:
            self.stack += self.attribute_of(None, name, called=True), None
        else:
            self.stack.append(self.attribute_of(None, name, called=False))

    def store_attr(self, index: int) -> None:
        owner = self.pop()
        self.store_named(owner, self.names[index])
        self.store(self.pop(), StepKind.ATTRIBUTE, self.names[index], owner)

    def delete_attr(self, index: int) -> None:
        owner = self.pop()
        self.store_named(owner, self.names[index])
        self.load_named(self.names[index])  # it must be there
        self.replace(StepKind.ATTRIBUTE, self.names[index], owner)

    def store_named(self, owner: _Value | None, name: str) -> None:
        """`owner.name` is stored or deleted: the owner was needed for it."""
        self.stored_attributes.add(name)
        if isinstance(owner, _Loaded):
            owner.tally.attributes.add(name)
        elif owner is not None:
            owner.escape()

    def import_name(self, index: int) -> None:
        self.drop(1)
        level = self.pop_const()
        dots = level.value if level is not None and isinstance(level.value, int) else 0
        self.imports.add("." * dots + self.names[index])
        self.stack.append(None)

    def import_from(self, index: int) -> None:
        name = self.names[index]
        self.load_named(name)
        if name in _REFUSED_GLOBALS or name in _REFUSED_ATTRIBUTES:
            self.refuse(name, self.at)
        self.stack.append(None)

    def import_star(self, _: int) -> None:
        self.dynamic = True
        self.give_up()

    def call_intrinsic_1(self, number: int) -> None:
        if number == 2:  # INTRINSIC_IMPORT_STAR
            self.dynamic = True
        self.drop(1)
        self.stack.append(None)

    def match_class(self, positional: int) -> None:
        names = self.pop_const()
        for name in _names_in(names.value) if names is not None else ():
            self.load_named(name)
        if positional or names is None:  # the class's `__match_args__` spells the rest
            self.load_named("__match_args__")
            self.dynamic = True
        self.drop(2)
        self.stack.append(None)

    # Items, tests and sums.

    def binary_subscr(self, _: int) -> None:
        key = self.pop_const()
        if key is not None:
            self.stack.append(self.item_of(self.pop(), key.value))
        else:
            self.drop(1)
            self.stack.append(None)

    def store_subscr(self, _: int) -> None:
        key = self.pop_const()
        owner = self.pop()
        if key is not None and isinstance(owner, _Loaded):
            owner.tally.stored_keys.add(key.value)
        elif owner is not None:
            owner.escape()
        name = key.value if key is not None else _Value()  # equal to no name
        self.store(self.pop(), StepKind.ITEM, name, owner)

    def delete_subscr(self, _: int) -> None:
        key = self.pop_const()
        owner = self.pop()
        if key is not None and isinstance(owner, _Loaded):
            owner.tally.stored_keys.add(key.value)
            self.replace(StepKind.ITEM, key.value)
        elif owner is not None:
            owner.escape()

    def contains_op(self, _: int) -> None:
        owner = self.pop()
        key = self.pop_const()
        # `3 in v` asks a list for a value, `v[3]` for a place: one key can't stand for both.
        if (
            key is not None
            and isinstance(owner, _Loaded)
            and not isinstance(key.value, (int, float, complex))
        ):
            self.item_of(owner, key.value).escape()
        elif type(owner) is _Loaded:  # as `owner.__contains__(...)` is, it hands nothing out
            owner.tally.attributes.add("__contains__")
            owner.tally.whole = True
        elif owner is not None:
            owner.escape()
        self.stack.append(None)

    def is_op(self, _: int) -> None:
        values = [self.pop(), self.pop()]
        self.compares_identity = self.compares_identity or not any(map(_is_singleton, values))
        for value in values:
            if value is not None:
                value.escape()
        self.stack.append(None)

    def binary_op(self, operation: int) -> None:
        right = self.pop_const()
        left = self.pop()
        if (
            operation in _SUMS
            and right is not None
            and isinstance(right.value, (int, float, complex))
            and isinstance(left, _Loaded)
        ):
            self.stack.append(_Sum(left))
            return
        if left is not None:
            left.escape()
        self.stack.append(None)

    # The stack itself.

    def pop_top(self, _: int) -> None:
        value = self.pop()
        if isinstance(value, _Grown):
            value.value.tally.appended = True
        elif value is not None:  # `try: self.cache` asks whether it is there
            value.escape()

    def copy(self, depth: int) -> None:
        self.pad(depth)
        value = self.stack[-depth]
        if value is None:  # its copies must know each other
            value = self.stack[-depth] = _Value()
        self.stack.append(value)

    def swap(self, depth: int) -> None:
        self.pad(depth)
        self.stack[-1], self.stack[-depth] = self.stack[-depth], self.stack[-1]

    # Jumps and calls.

    def jump(self, distance: int) -> None:
        after = self.at + 2
        while self.raw[after] == _CACHE:
            after += 2
        self.targets.add(after + 2 * distance)
        self.give_up()

    def kw_names(self, _: int) -> None:
        self.keywords = True

    def call_kw(self, count: int) -> None:
        self.drop(1)
        self.keywords = True
        self.call(count)

    def call(self, count: int) -> None:
        self.pad(count + 2)
        arguments = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        second, first = self.stack.pop(), self.stack.pop()
        if first is _NULL:
            called = second
        else:
            called = first
            if second is not _NULL and not isinstance(first, _Method):
                arguments.insert(0, second)  # a decorator or a comprehension, without NULL
        keywords, self.keywords = self.keywords, False
        for argument in arguments:
            if isinstance(argument, _Loaded) and argument.kind in _NAMED:
                self.passed.setdefault(str(argument.name), self.at)
        if keywords or not isinstance(called, _Loaded) or not self.call_known(called, arguments):
            _escape(called, *arguments)
            self.stack.append(None)

    def call_known(self, called: _Loaded, arguments: list[_Value | None]) -> bool:
        """Carry out a call that uses its object in a way that its name tells, if it does."""
        name = called.name
        if called.kind is not StepKind.ATTRIBUTE and called.kind is not StepKind.GLOBAL:
            return False
        if name in _TAKES_NAMES:
            return self.call_with_name(called, str(name), arguments)
        if name == "super" and not arguments:  # takes the first argument from the frame
            for first in self.code.co_varnames[:1]:
                self.tally(StepKind.LOCAL, first).whole = True
        if not isinstance(called, _Method):
            return False
        owner = called.owner
        if name == "get" and 1 <= len(arguments) <= 2 and isinstance(arguments[0], _Const):
            result: _Value = self.item_of(owner, arguments[0].value)
        elif name in _GROWING and isinstance(owner, _Loaded):
            result = _Grown(owner)
        else:
            return False
        called.tally.whole = True
        _escape(*arguments)
        self.stack.append(result)
        return True

    def call_with_name(self, called: _Loaded, name: str, arguments: list[_Value | None]) -> bool:
        """Carry out `getattr` and its kin, if the attribute's name is a constant."""
        index = _NAME_ARGUMENT.get(name, 0)
        spelled = arguments if name == "attrgetter" else arguments[index:][:1]
        words = [value.value for value in spelled if isinstance(value, _Const)]
        if not words or len(words) < len(spelled) or not all(isinstance(w, str) for w in words):
            return False
        word = str(words[0])
        result = None
        if name in ("getattr", "hasattr"):
            result = self.attribute_of(arguments[0], word, called=False)
            _escape(*arguments[2:])
        elif name in ("setattr", "delattr"):
            self.store_named(arguments[0], word)
            if name == "delattr":
                self.load_named(word)
            self.replace(StepKind.ATTRIBUTE, word)
            _escape(*arguments[2:])
        else:
            _escape(*arguments)
        if name == "__import__":
            self.imports.add(word)
        elif name in ("__setattr__", "__delattr__"):
            self.stored_attributes.add(word)
            if name == "__delattr__":
                self.load_named(word)
            self.replace(StepKind.ATTRIBUTE, word)
        elif name not in ("getattr", "setattr", "delattr"):
            for each in words:
                self.load_named(each)
        if isinstance(called, _Method):
            called.escape_owner()
        self.stack.append(result if name == "getattr" else None)
        return True


def _escape(*values: _Value | None) -> None:
    for value in values:
        if value is not None:
            value.escape()


# --- instructions --------------------------------------------------------------------------------

_CarryOut = Callable[[_Walk, int], None]


def _plain(pops: int, pushes: int) -> _CarryOut:
    """An instruction that uses as a whole what it takes."""
    pushed = [None] * pushes

    def carry_out(walk: _Walk, _: int) -> None:
        walk.drop(pops)
        walk.stack += pushed

    return carry_out


def _counted(pops: Callable[[int], int]) -> _CarryOut:
    """An instruction whose argument tells how many values it turns into one."""

    def carry_out(walk: _Walk, argument: int) -> None:
        walk.drop(pops(argument))
        walk.stack.append(None)

    return carry_out


def _unpack_sequence(walk: _Walk, count: int) -> None:
    walk.drop(1)
    walk.stack += [None] * count


def _unpack_ex(walk: _Walk, counts: int) -> None:
    walk.drop(1)
    walk.stack += [None] * ((counts & 0xFF) + 1 + (counts >> 8))


# Of Python 3.11 to 3.13. An instruction that isn't here makes the walk give up, which loses
# precision but no name: all that carry a name are here, and a test says so.
_BY_NAME: dict[str, _CarryOut] = {
    "LOAD_CONST": _Walk.load_const,
    "RETURN_CONST": _Walk.return_const,
    "PUSH_NULL": _Walk.push_null,
    "LOAD_FAST": _Walk.load_fast,
    "LOAD_FAST_CHECK": _Walk.load_fast,
    "LOAD_FAST_LOAD_FAST": _Walk.load_fast_load_fast,
    "LOAD_CLOSURE": _Walk.load_closure,
    "STORE_FAST": _Walk.store_fast,
    "STORE_FAST_LOAD_FAST": _Walk.store_fast_load_fast,
    "STORE_FAST_STORE_FAST": _Walk.store_fast_store_fast,
    "LOAD_DEREF": _Walk.load_deref,
    "LOAD_CLASSDEREF": _Walk.load_deref,
    "LOAD_FROM_DICT_OR_DEREF": _Walk.load_from_dict_or_deref,
    "STORE_DEREF": _Walk.store_deref,
    "LOAD_NAME": _Walk.load_name,
    "LOAD_GLOBAL": _Walk.load_global,
    "LOAD_FROM_DICT_OR_GLOBALS": _Walk.load_from_dict_or_globals,
    "STORE_NAME": _Walk.store_name,
    "STORE_GLOBAL": _Walk.store_name,
    "DELETE_NAME": _Walk.delete_name,
    "DELETE_GLOBAL": _Walk.delete_name,
    "LOAD_ATTR": _Walk.load_attr,
    "LOAD_METHOD": _Walk.load_method,
    "LOAD_SUPER_ATTR": _Walk.load_super_attr,
    "STORE_ATTR": _Walk.store_attr,
    "DELETE_ATTR": _Walk.delete_attr,
    "IMPORT_NAME": _Walk.import_name,
    "IMPORT_FROM": _Walk.import_from,
    "IMPORT_STAR": _Walk.import_star,
    "CALL_INTRINSIC_1": _Walk.call_intrinsic_1,
    "MATCH_CLASS": _Walk.match_class,
    "BINARY_SUBSCR": _Walk.binary_subscr,
    "STORE_SUBSCR": _Walk.store_subscr,
    "DELETE_SUBSCR": _Walk.delete_subscr,
    "CONTAINS_OP": _Walk.contains_op,
    "IS_OP": _Walk.is_op,
    "BINARY_OP": _Walk.binary_op,
    "POP_TOP": _Walk.pop_top,
    "COPY": _Walk.copy,
    "SWAP": _Walk.swap,
    "KW_NAMES": _Walk.kw_names,
    "CALL": _Walk.call,
    "CALL_KW": _Walk.call_kw,
    "CALL_FUNCTION_EX": _counted(lambda flags: 3 + (flags & 1)),
    "BUILD_MAP": _counted(lambda count: 2 * count),
    "BUILD_CONST_KEY_MAP": _counted(lambda count: count + 1),
    "FORMAT_VALUE": _counted(lambda flags: 2 if flags & 4 else 1),
    "MAKE_FUNCTION": _counted(lambda flags: 1 + (flags & 15).bit_count()),
    "UNPACK_SEQUENCE": _unpack_sequence,
    "UNPACK_EX": _unpack_ex,
    "BEFORE_WITH": _plain(1, 2),
    "MAP_ADD": _plain(2, 0),
    "BINARY_SLICE": _plain(3, 1),
}
for _names, _carry_out in {
    "COPY_FREE_VARS DELETE_DEREF DELETE_FAST MAKE_CELL NOP PRECALL RESUME "
    "SETUP_ANNOTATIONS": _plain(0, 0),
    # LOAD_FAST_AND_CLEAR keeps a variable aside for an inlined comprehension; it is put back.
    "LOAD_ASSERTION_ERROR LOAD_BUILD_CLASS LOAD_FAST_AND_CLEAR LOAD_LOCALS": _plain(0, 1),
    "CONVERT_VALUE FORMAT_SIMPLE GET_ITER LIST_TO_TUPLE TO_BOOL "
    "UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNARY_POSITIVE": _plain(1, 1),
    "DICT_MERGE DICT_UPDATE LIST_APPEND LIST_EXTEND SET_ADD SET_UPDATE": _plain(1, 0),
    "CALL_INTRINSIC_2 COMPARE_OP FORMAT_WITH_SPEC SET_FUNCTION_ATTRIBUTE": _plain(2, 1),
    "BUILD_LIST BUILD_SET BUILD_SLICE BUILD_STRING BUILD_TUPLE": _counted(lambda count: count),
}.items():
    _BY_NAME.update(dict.fromkeys(_names.split(), _carry_out))


def _find_carry_out(name: str, opcode: int) -> _CarryOut:
    if opcode in dis.hasjrel:
        return _Walk.give_up if "BACKWARD" in name else _Walk.jump
    return _BY_NAME.get(name, _Walk.give_up)


_CARRY_OUT = [_find_carry_out(name, opcode) for opcode, name in enumerate(dis.opname[:256])]
