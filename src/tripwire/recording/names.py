"""Names: of an object, a record keeps only what recorded code can ask for.

Code asks by the names in its instructions and by string constants; library code asks for what
its own classes have. Which code is recorded depends on what is kept, and the other way round;
so the nodes that keep a part of something grow, again and again, until no new name turns up.
"""

from __future__ import annotations

import dis
import io
from collections.abc import Iterator
from types import CodeType, FunctionType, GeneratorType
from typing import NamedTuple

from tripwire.recording.looks import class_dict, mro
from tripwire.recording.origin import find_library
from tripwire.tracing.uses import Step, StepKind, Use, Uses, find_uses, join, merge

# Each of these hands out all that an object has, under names that no code spells.
_REFLECTING = frozenset(
    {"vars", "dir", "__dict__", "__dir__", "getmembers", "getattr_static", "asdict", "astuple"}
    | {"__getstate__", "__reduce__", "__reduce_ex__", "pickle", "inspect"}
)
# Each of these reads annotations.
_ANNOTATIONS = frozenset(
    {"__annotations__", "get_type_hints", "get_annotations", "signature", "getfullargspec"}
)
# Each of these hands out a namespace.
_OPENS_NAMESPACE = frozenset(
    {"globals", "eval", "exec", "__globals__", "f_globals", "_getframe", "currentframe"}
)
# C code asks any object for these, with no base class that would tell.
_DUCK_NAMES = frozenset(
    name
    for kind in (dict, list, set, io.TextIOBase, io.RawIOBase, GeneratorType)
    for name in dir(kind)
)


def all_codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those nested in it."""
    waiting = [code]
    while waiting:
        current = waiting.pop()
        yield current
        waiting += [const for const in current.co_consts if isinstance(const, CodeType)]


class Names:
    """Every name that recorded code spells."""

    def __init__(self) -> None:
        self.attributes: set[str] = set()  # loaded or deleted
        self.stored: set[str] = set()
        self.everything = False  # recorded code looks at objects as wholes
        self.annotations = False  # recorded code reads annotations
        self._after: dict[str, Use] = {}
        self._seen: dict[int, tuple[CodeType, Uses]] = {}
        self._of_libraries: dict[int, tuple[type, frozenset[str]]] = {}

    def add(self, code: CodeType, is_library: bool = False) -> Uses:
        """Take in a code object and those nested in it; what they use.

        A library's code looks only at what is its own as a whole.
        """
        known = self._seen.get(id(code))
        if known is not None:
            return known[1]
        uses = join(find_uses(one) for one in all_codes(code))
        self._seen[id(code)] = code, uses
        asked = uses.attributes.keys() | uses.globals.keys()
        self.attributes |= uses.attributes.keys() | _deleted(code, _DELETES_ATTRIBUTE)
        self.stored |= uses.stored_attributes
        if is_library:
            return uses
        self.everything = (
            self.everything
            or uses.has_dynamic_names
            or uses.opens_self
            or uses.computes_names
            or not _REFLECTING.isdisjoint(asked)
        )
        self.annotations = self.annotations or not _ANNOTATIONS.isdisjoint(asked)
        for step, use in uses.steps.items():
            if step.kind is StepKind.ATTRIBUTE:
                before = self._after.get(str(step.name))
                self._after[str(step.name)] = use if before is None else merge(before, use)
        return uses

    def spells(self, name: str) -> bool:
        """Whether recorded code may ask something for this attribute."""
        return self.everything or name in self.attributes

    def wants(self, cls: type, name: str) -> bool:
        """Whether recorded or library code may ask instances of a class for this attribute."""
        return self.spells(name) or name in _DUCK_NAMES or name in self._names_of_libraries(cls)

    def wants_of_class(self, cls: type, name: str) -> bool:
        """Whether they may ask the class itself: for what sets an attribute, too."""
        return name in self.stored or self.wants(cls, name)

    def after(self, name: str) -> Use:
        """How recorded code uses what it finds behind an attribute's name."""
        return self._after.get(name, Use(whole=True))

    def _names_of_libraries(self, cls: type) -> frozenset[str]:
        """Names that libraries' code may ask of a class that inherits from theirs."""
        known = self._of_libraries.get(id(cls))
        if known is None:
            names: set[str] = set()
            for base in mro(cls):
                if base is not object and find_library(base) is not None:
                    names.update(class_dict(base))
                    names.update(_names_in_methods(base))
                fields = class_dict(base).get("__dataclass_fields__")
                if type(fields) is dict:  # generated methods read every field
                    names.update(fields)
            known = self._of_libraries[id(cls)] = cls, frozenset(names)
        return known[1]


def _names_in_methods(cls: type) -> Iterator[str]:
    """Attributes that a library class's methods may ask its instances for."""
    for value in class_dict(cls).values():
        if type(value) in (staticmethod, classmethod):
            value = value.__func__
        elif type(value) is property:
            value = value.fget
        if type(value) is FunctionType:
            for code in all_codes(value.__code__):
                yield from code.co_names


def global_use(uses: Uses, name: str) -> Use:
    """How code uses what it finds behind a global name."""
    return uses.steps.get(Step(StepKind.GLOBAL, name), Use(whole=True))


def opens_namespace(uses: Uses) -> bool:
    """Whether code takes hold of its globals as a whole."""
    return not _OPENS_NAMESPACE.isdisjoint(uses.globals.keys() | uses.attributes.keys())


class Import(NamedTuple):
    """An import statement inside of a function."""

    name: str
    level: int  # dots before it
    names: tuple[str, ...] | None  # after `from ... import`; None for `import ...`


_IMPORT_NAME = dis.opmap["IMPORT_NAME"]


def find_imports(code: CodeType) -> Iterator[Import]:
    """What code imports when it runs, nested code included."""
    for one in all_codes(code):
        if _IMPORT_NAME not in one.co_code[::2]:
            continue
        before: list[object] = [0, None]
        for step in dis.get_instructions(one):
            if step.opcode == _IMPORT_NAME:
                level, names = before[-2:]
                known = tuple(map(str, names)) if isinstance(names, tuple) else None
                yield Import(str(step.argval), level if isinstance(level, int) else 0, known)
            elif step.opname != "EXTENDED_ARG":
                before = [before[-1], step.argval]


_DELETES_GLOBAL = frozenset({dis.opmap["DELETE_GLOBAL"], dis.opmap["DELETE_NAME"]})
_DELETES_ATTRIBUTE = frozenset({dis.opmap["DELETE_ATTR"]})


def deleted_globals(code: CodeType) -> set[str]:
    """Globals that code deletes: they must be there, though nothing reads them."""
    return _deleted(code, _DELETES_GLOBAL)


def _deleted(code: CodeType, opcodes: frozenset[int]) -> set[str]:
    found = set()
    for one in all_codes(code):
        if not opcodes.isdisjoint(one.co_code[::2]):
            steps = dis.get_instructions(one)
            found |= {str(step.argval) for step in steps if step.opcode in opcodes}
    return found
