"""Account: how a code object uses each value that it loads.

While instructions are carried out (bytecode.py), a value on the stack is known by its origin only:
a constant, a variable, an attribute of something. Whatever is done with the value is entered here,
under the step that it was loaded by. A value that goes where it isn't followed *escapes*: it counts
as used as a whole.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from inspect import CO_VARARGS, CO_VARKEYWORDS
from itertools import product
from types import CodeType

from tripwire.reading.uses import GROWING, Computed, Operands, Step, StepKind, Use, Uses
from tripwire.values.classes import is_exactly, isinstance

# --- names with a meaning ------------------------------------------------------------------------

# Which argument is the attribute's name, counted from the end where negative.
NAME_ARGUMENT = {
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
TAKES_NAMES = frozenset({*NAME_ARGUMENT, "attrgetter", "__import__"})

# Each of these reads all that an object has.
_WHOLE_OBJECT_GLOBALS = frozenset({"vars", "dir", "getmembers", "getattr_static"})
_WHOLE_OBJECT_ATTRIBUTES = frozenset(
    {"__dir__", "__getstate__", "__reduce__", "__reduce_ex__", "getattr_static", "getmembers"}
)

REFUSED_GLOBALS = frozenset(
    {"globals", "eval", "exec", "compile", "_getframe", "currentframe", "get_referrers"}
)
REFUSED_ATTRIBUTES = frozenset(
    {"_getframe", "_current_frames", "currentframe", "f_globals", "f_locals", "__globals__"}
)
_REFUSED_OF_MODULES = {  # too common as names to be refused wherever they occur
    "inspect": frozenset({"stack", "trace", "getinnerframes", "getouterframes"}),
    "gc": frozenset({"get_objects", "get_referrers", "get_referents"}),
    "builtins": frozenset({"globals", "eval", "exec", "compile"}),
}

_IDENTITY_FUNCTIONS = frozenset({"is_", "is_not"})  # of the module operator
# Taken without being called, such a method carries the whole container with it.
_CONTAINER_METHODS = frozenset(
    name
    for container in (dict, list, set, tuple, deque, OrderedDict, defaultdict, Counter)
    for name in dir(container)
) | {"__dict__"}

_FORMAT_ATTRIBUTE = re.compile(r"\.([^\W\d]\w*)")


def names_in(constant: object) -> Iterator[str]:
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
            yield from names_in(part)


# --- values on the stack -------------------------------------------------------------------------


class _UseDraft:
    """A `Use` while it is being counted."""

    __slots__ = (
        *("appended", "attributes", "escapes", "grown"),
        *("keys", "stored_keys", "tested", "updated", "whole"),
    )

    def __init__(self) -> None:
        self.keys: set[object] = set()
        self.stored_keys: set[object] = set()
        self.attributes: set[str] = set()
        self.appended = self.updated = self.tested = self.whole = self.escapes = False
        self.grown = False  # what `append` returned is used

    def freeze(self) -> Use:
        only_grown = self.grown and not self.whole
        if not (self.keys or self.stored_keys or self.attributes or only_grown):
            return _PLAIN_USES[self.appended, self.updated, self.tested, self.whole, self.escapes]
        return Use(
            frozenset(self.keys),
            frozenset(self.stored_keys),
            frozenset(self.attributes),
            self.appended,
            self.updated,
            self.tested,
            self.whole or only_grown,
            self.escapes,
            only_grown,
        )


# Most values are used as a whole and no other way: to share these saves a fifth of the time.
_PLAIN_USES = {
    flags: Use(frozenset(), frozenset(), frozenset(), *flags)
    for flags in product((False, True), repeat=5)
}


class StackValue:
    """A value on the stack; where nothing at all is known of it, None stands there instead."""

    __slots__ = ()

    def escape(self) -> None:
        """It goes where its further use isn't followed."""


NULL = StackValue()  # the empty slot beside a callable that isn't a method


class Literal(StackValue):
    """A value that the code object itself holds."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def is_singleton(value: StackValue | None) -> bool:
    """Whether a value is one that Python has once."""
    return isinstance(value, Literal) and (
        value.value is None or value.value is ... or isinstance(value.value, bool)
    )


class Loaded(StackValue):
    """A value that one step led to, from `owner` where the step has one."""

    __slots__ = ("kind", "name", "owner", "tally")

    def __init__(
        self, kind: StepKind, name: object, tally: _UseDraft, owner: StackValue | None
    ) -> None:
        self.kind = kind
        self.name = name
        self.tally = tally
        self.owner = owner

    def escape(self) -> None:
        self.tally.whole = self.tally.escapes = True


# Where `dataclasses` makes a class's methods. From 3.13 on its `__eq__` asks `self is other`.
_OF_DATACLASSES = "__create_fn__.<locals>"


def is_no_number(value: StackValue | None) -> bool:
    """Whether a value is surely neither an int nor a float: `other.__class__` is a class."""
    if isinstance(value, Loaded) and value.kind is StepKind.ATTRIBUTE:
        return value.name == "__class__"
    return isinstance(value, Literal) and not is_exactly(value.value, int, float)


class LoadedMethod(Loaded):
    """An attribute that was loaded in order to be called."""

    __slots__ = ()

    def escape(self) -> None:
        super().escape()
        self.escape_owner()

    def escape_owner(self) -> None:
        if isinstance(self.owner, Loaded):
            self.owner.tally.attributes.add(str(self.name))
            self.owner.tally.whole = True
        elif self.owner is not None:
            self.owner.escape()


class Increment(StackValue):
    """`value + 1`: an update, if it is stored where `value` came from."""

    __slots__ = ("value",)

    def __init__(self, value: Loaded) -> None:
        self.value = value

    def escape(self) -> None:
        self.value.escape()


class Grown(StackValue):
    """What `value.append(...)` returned: None, if `value` is a list.

    `hook = lambda *_: log.append(1)` returns it, and needs nothing of what the list holds.
    """

    __slots__ = ("value",)

    def __init__(self, value: Loaded) -> None:
        self.value = value

    def escape(self) -> None:
        tally = self.value.tally
        tally.appended = tally.grown = tally.escapes = True


class Picked(StackValue):
    """`owner[name]`: nothing is known of it, unless all that happens is that it grows."""

    __slots__ = ("owner",)

    def __init__(self, owner: Loaded) -> None:
        self.owner = owner

    def escape(self) -> None:
        self.owner.escape()


def is_same(a: StackValue | None, b: StackValue | None) -> bool:
    """Whether both are one object: a copy on the stack, or one variable loaded twice."""
    if a is b:
        return a is not None
    return (
        isinstance(a, Loaded)
        and isinstance(b, Loaded)
        and a.kind is b.kind
        and a.kind not in (StepKind.ATTRIBUTE, StepKind.ITEM)
        and a.name == b.name
    )


# --- the account ---------------------------------------------------------------------------------


class Account:
    """What was found so far of one code object, up to the instruction at `at`."""

    def __init__(self, code: CodeType) -> None:
        arguments = code.co_argcount + code.co_kwonlyargcount
        arguments += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
        self.code = code
        self.arguments = frozenset(code.co_varnames[:arguments])
        self.shared = frozenset((*code.co_cellvars, *code.co_freevars))
        self.at = 0  # offset of the instruction
        self.stack: list[StackValue | None] = []
        self.tallies: dict[StepKind, dict[object, _UseDraft]] = {kind: {} for kind in StepKind}
        self.attributes: dict[str, int] = {}  # name → offset
        self.globals: dict[str, int] = {}
        self.stored_attributes: set[str] = set()
        self.stored_globals: set[str] = set()
        self.imports: set[str] = set()
        self.dynamic = False
        self.opens_self = False
        self.computes_names = False
        asks = not _IDENTITY_FUNCTIONS.isdisjoint(code.co_names)
        self.asked: set[tuple[Step, ...]] = {()} if asks else set()
        self.identities: set[Operands] = {()} if asks else set()
        self.foreign_dict = False  # `__dict__` is taken of something that isn't `self`
        self.refused: tuple[str, int] | None = None
        self.passed: dict[str, int] = {}
        self.replaced: set[Step] = set()
        self.replaced_of_self: set[str] = set()

    def spell_operand(self, value: StackValue | None) -> tuple[str, ...]:
        """`("Mode", "TRAIN")`, or `("", "head")` for `self.head`; nothing where it isn't known."""
        if not isinstance(value, Loaded) or not isinstance(value.name, str):
            return ()
        if value.kind is StepKind.GLOBAL:
            return (value.name,)
        if value.kind is StepKind.LOCAL:
            owner = self.code.co_qualname.rpartition(".")[0]
            is_method = bool(owner) and not owner.endswith("<locals>")
            is_method = is_method or owner == _OF_DATACLASSES
            is_self = value.name == "self" and self.code.co_varnames[0] == "self"
            return ("",) if is_method and is_self else ()
        owner_of = self.spell_operand(value.owner) if value.kind is StepKind.ATTRIBUTE else ()
        return owner_of and (*owner_of, value.name)

    def pop(self) -> StackValue | None:
        return self.stack.pop() if self.stack else None

    def pop_const(self) -> Literal | None:
        """The constant on top; anything else there is used as a whole."""
        value = self.pop()
        if isinstance(value, Literal):
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

    def tally(self, kind: StepKind, name: object) -> _UseDraft:
        tallies = self.tallies[kind]
        found = tallies.get(name)
        if found is None:
            found = tallies[name] = _UseDraft()
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

    def attribute_of(self, owner: StackValue | None, name: str, called: bool) -> Loaded:
        """The value of `owner.name`."""
        self.attributes.setdefault(name, self.at)
        if name in REFUSED_ATTRIBUTES:
            self.refuse(name, self.at)
        if name == "__dict__" and not self._is_self(owner):
            self.foreign_dict = True
        if isinstance(owner, Loaded):
            if name in _REFUSED_OF_MODULES.get(str(owner.name), ()):
                self.refuse(name, self.at)
            if not called:
                owner.tally.attributes.add(name)
                if name in _CONTAINER_METHODS:
                    owner.escape()
        elif owner is not None and not (called and name in GROWING and isinstance(owner, Picked)):
            owner.escape()
        if name in ("format", "format_map"):  # "{0.scale}".format(x) loads `scale`
            if isinstance(owner, Literal) and isinstance(owner.value, str):
                for part in _FORMAT_ATTRIBUTE.findall(owner.value):
                    self.load_named(part)
            else:
                self.dynamic = True
        form = LoadedMethod if called else Loaded
        return form(StepKind.ATTRIBUTE, name, self.tally(StepKind.ATTRIBUTE, name), owner)

    def _is_self(self, owner: StackValue | None) -> bool:
        return (
            isinstance(owner, Loaded)
            and owner.kind in (StepKind.LOCAL, StepKind.FREE)
            and owner.name == "self"
        )

    def item_of(self, owner: StackValue | None, key: object) -> Loaded:
        """The value of `owner[key]`."""
        if isinstance(owner, Loaded):
            owner.tally.keys.add(key)
        elif owner is not None:
            owner.escape()
        return Loaded(StepKind.ITEM, key, self.tally(StepKind.ITEM, key), owner)

    def store(
        self, value: StackValue | None, kind: StepKind, name: object, owner: StackValue | None
    ) -> None:
        """Store `value` behind a step: an update where it was computed from what was there."""
        for other in self.stack:
            if isinstance(other, Increment):  # `v, v.n = w, v.n + 1`: `v` is another object by then
                other.escape()
        if isinstance(value, Increment):
            old = value.value
            if old.kind is kind and old.name == name:
                if kind not in (StepKind.ATTRIBUTE, StepKind.ITEM) or is_same(old.owner, owner):
                    old.tally.updated = True
                    return
        self.replace(kind, name, owner)
        if value is not None:
            value.escape()

    def replace(self, kind: StepKind, name: object, owner: StackValue | None = None) -> None:
        """Something else is stored behind a step, or nothing is there any more."""
        if kind is StepKind.ATTRIBUTE and self._is_self(owner):
            self.replaced_of_self.add(str(name))
        elif kind is not StepKind.LOCAL or name in self.shared:
            self.replaced.add(Step(kind, name))

    def close(self) -> None:
        """Draw the conclusions that need every occurrence."""
        attributes = self.tallies[StepKind.ATTRIBUTE]
        for kind in (StepKind.GLOBAL, StepKind.ATTRIBUTE):
            tallies = self.tallies[kind]
            for name in TAKES_NAMES & tallies.keys():
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
            if namespace.whole or namespace.appended or Computed.KEY in namespace.stored_keys:
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
        return Uses(
            self.lines(self.attributes),
            self.lines(self.globals),
            frozenset(self.stored_attributes),
            frozenset(self.stored_globals),
            frozenset(self.imports),
            self.dynamic,
            self.opens_self,
            self.refused,
            self.lines(self.passed),
            steps,
            self.computes_names,
            frozenset(self.asked),
            frozenset(self.identities),
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
