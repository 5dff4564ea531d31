"""Names: of an object, a record keeps only what recorded code can ask for.

Code asks by the names in its instructions and by string constants; library code asks for what
its own classes have. Which code is recorded depends on what is kept, and the other way round;
so the nodes that keep a part of something grow, again and again, until no new name turns up.
"""

from __future__ import annotations

import dis
import io
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, GeneratorType
from typing import NamedTuple, cast

from tripwire.reading.bytecode import find_uses
from tripwire.reading.uses import Step, StepKind, Use, Uses, join, merge
from tripwire.recording.capture.origin import find_library, is_installed_module, module_dict
from tripwire.values.classes import class_dict, isinstance, mro
from tripwire.values.contents import all_codes, functions_behind

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


class SpelledNames:
    """Every name that recorded code spells."""

    def __init__(self) -> None:
        self.attributes: set[str] = set()  # loaded or deleted
        self.stored: set[str] = set()
        self.everything = False  # recorded code looks at objects as wholes
        self.annotations = False  # recorded code reads annotations
        self._after: dict[str, Use] = {}
        self._seen: dict[int, tuple[CodeType, Uses]] = {}
        self._installed: set[str] = set()
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

    def add_library(self, value: object) -> None:
        """Recorded code hands objects to this function or class of an installed package."""
        name = module_of(value)
        if name is None or name in self._installed or not is_installed_module(name):
            return
        self._installed.add(name)
        for held in list(module_dict(sys.modules[name]).values()):
            if module_of(held) == name:
                self.attributes.update(_names_of_code(held))

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
                    names.update(_names_of_code(base))
                fields = class_dict(base).get("__dataclass_fields__")
                if type(fields) is dict:  # generated methods read every field
                    names.update(fields)
            known = self._of_libraries[id(cls)] = cls, frozenset(names)
        return known[1]


def module_of(value: object) -> str | None:
    """The name of the module that defines a function or class."""
    if issubclass(type(value), type):
        found = class_dict(cast("type", value)).get("__module__")
    else:
        found = value.__module__ if type(value) is FunctionType else None
    return found if isinstance(found, str) else None


def _names_of_code(value: object) -> Iterator[str]:
    """Names in a function's code, or in that of a class's methods."""
    members = [value]
    if issubclass(type(value), type):
        members = list(class_dict(cast("type", value)).values())
    for function in functions_behind(*members, through_cells=True):
        for code in all_codes(function.__code__):
            yield from code.co_names


def global_use(uses: Uses, name: str) -> Use:
    """How code uses what it finds behind a global name."""
    return uses.steps.get(Step(StepKind.GLOBAL, name), Use(whole=True))


def free_use(uses: Uses, name: str) -> Use:
    """How code uses what it finds in a closure's cell."""
    return uses.steps.get(Step(StepKind.FREE, name), Use())


def opens_namespace(uses: Uses) -> bool:
    """Whether code takes hold of its globals as a whole."""
    return not _OPENS_NAMESPACE.isdisjoint(uses.globals.keys() | uses.attributes.keys())


def imports_by_name(uses: Uses) -> bool:
    """Whether code imports modules whose names it computes."""
    return not {"import_module", "__import__"}.isdisjoint(uses.attributes.keys() | uses.globals)


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
