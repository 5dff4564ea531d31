"""Classes: what a class statement made, as far as recorded code can ask for it.

Kept are special methods, what recorded code names, and what a library's base class has under the
same name, since the library calls it. What `dataclass`, `Enum` and `namedtuple` generated is left
out: the interpreter that replays generates it again from `detail`.

Recorded code reaches an attribute by a name in its instructions or in a string constant; library
code reaches what its own classes have. Which code is recorded depends on what is kept, and the
other way round. So classes, modules and namespaces grow until no new name turns up.
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import enum
import io
import sys
import types
import typing
from abc import ABCMeta
from collections.abc import Iterator
from types import CodeType, FunctionType, GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tripwire.reading.bytecode import find_uses
from tripwire.reading.uses import Step, StepKind, Use, Uses, join, merge
from tripwire.recording.capture.origin import (
    find_library,
    is_packaged_file,
    is_third_party_module,
    module_dict,
)
from tripwire.recording.format import nodes
from tripwire.recording.format.nodes import AnyNode, Slot
from tripwire.values.classes import class_dict, is_exactly, is_kind, isinstance, mro, name_of
from tripwire.values.contents import all_codes, functions_behind, own_dict

if TYPE_CHECKING:
    from tripwire.recording.capture.encode import Encoder


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
    """Every name that occurs in recorded code."""

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
        name = home_of(value)
        if name is None or name in self._installed or not is_third_party_module(name):
            return
        self._installed.add(name)
        for held in list(module_dict(sys.modules[name]).values()):
            if home_of(held) == name:
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


def home_of(value: object) -> str | None:
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


_bases_of = type.__dict__["__bases__"].__get__
_name_of = type.__dict__["__name__"].__get__

# A class gets these when it is made, or has them as fields of the node.
_MADE_ANEW = frozenset(
    {"__dict__", "__weakref__", "__module__", "__qualname__", "_abc_impl", "__firstlineno__"}
    | {"__static_attributes__", "__protocol_attrs__", "__callable_proto_members_only__"}
    | {"__non_callable_proto_members__"}
)
# Special, but only of use to code that asks for them.
_SELDOM = frozenset({"__doc__", "__annotations__", "__annotate__", "__type_params__"})


class ClassDraft:
    """A class of the user's; its attributes turn up as recorded code names them."""

    def __init__(self, names: SpelledNames, encoder: Encoder, cls: type) -> None:
        self._names = names
        self._encoder = encoder
        self._cls = cls
        self._meta = encoder.reference(type(cls), ".__class__")
        self._bases = tuple(encoder.reference(base, ".__base__") for base in _bases_of(cls))
        self._form, detail, made = _find_form(cls)
        self._detail: Slot = encoder.slot(detail)
        self._rest = {
            name: value
            for name, value in class_dict(cls).items()
            if type(name) is str and name not in made and not _is_made_anew(cls, name, value)
        }
        self._all = _is_protocol(cls)
        if self._all:  # typing looks for all of its names in other classes
            names.attributes.update(self._rest, class_dict(cls).get("__annotations__") or ())
        self._kept: dict[str, Slot] = {}
        encoder.hold_code(_name_of(cls), name_of(cls))

    def grow(self) -> None:
        wanted = [name for name in self._rest if self._wants(name)]
        self._encoder.hold_attributes(wanted)
        for name in wanted:
            self._kept[name] = self._encoder.slot(self._rest.pop(name), f".{name}")

    def _wants(self, name: str) -> bool:
        if name == "__annotations__":
            return self._names.annotations or self._all
        if name in _SELDOM:
            return self._names.spells(name)
        return self._all or _is_special(name) or self._names.wants_of_class(self._cls, name)

    def node(self) -> AnyNode:
        module = class_dict(self._cls).get("__module__")
        return nodes.Class(
            _name_of(self._cls),
            name_of(self._cls),
            module if isinstance(module, str) else "",
            self._meta,
            self._bases,
            tuple(self._kept),
            tuple(self._kept.values()),
            self._form,
            self._detail,
        )


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_protocol(cls: type) -> bool:
    """Whether instances of other classes are compared with all that the class has."""
    return class_dict(cls).get("_is_protocol") is True


def _is_made_anew(cls: type, name: str, value: object) -> bool:
    if name in _MADE_ANEW:
        return True
    if type(value) is types.MemberDescriptorType:
        return value.__objclass__ is cls
    function = value.__func__ if type(value) is classmethod else value
    return type(function) is types.FunctionType and function.__code__.co_filename == typing.__file__


# --- forms ---------------------------------------------------------------------------------------


def _find_form(cls: type) -> tuple[str, dict[str, object] | None, frozenset[str]]:
    """What kind of class it is, what to make it from, and which attributes that will give."""
    own = class_dict(cls)
    if is_kind(type(cls), enum.EnumMeta):
        return "enum", _enum_detail(cls), _enum_made(cls)
    if _is_namedtuple(cls):
        return "namedtuple", _namedtuple_detail(cls), _namedtuple_made(cls)
    detail = _slots_detail(cls)
    if type(own.get("__dataclass_fields__")) is dict and "__dataclass_params__" in own:
        detail = {**(detail or {}), **_dataclass_detail(cls)}
        return "dataclass", detail, _dataclass_made(cls)
    return "plain", detail, frozenset()


def _slots_detail(cls: type) -> dict[str, object] | None:
    """Slots of a class: they lay out its instances, and can't be added later."""
    own = class_dict(cls)
    detail: dict[str, object] = {}
    if "__slots__" in own:
        members = [
            name
            for name, value in own.items()
            if type(value) is types.MemberDescriptorType and value.__objclass__ is cls
        ]
        members += [name for name in ("__dict__", "__weakref__") if name in own]
        detail["slots"] = members
    if is_kind(type(cls), ABCMeta):
        registered = _registered(cls)
        if registered:
            detail["registered"] = registered
    return detail or None


def _registered(cls: type) -> list[type]:
    """Classes that were registered with an abstract class of the user's."""
    from _abc import _get_dump  # type: ignore[import-not-found]

    try:
        found = [reference() for reference in _get_dump(cls)[0]]
    except TypeError:  # a metaclass that never called ABCMeta's
        return []
    return [one for one in found if one is not None]


# --- dataclasses ---

_PARAMS = ("init", "repr", "eq", "order", "unsafe_hash", "frozen", "match_args")
_FLAGS = {"init": True, "repr": True, "hash": None, "compare": True, "kw_only": False}


def _dataclass_detail(cls: type) -> dict[str, object]:
    own = class_dict(cls)
    params = own["__dataclass_params__"]
    given = {name: getattr(params, name) for name in _PARAMS if hasattr(params, name)}
    given.setdefault("match_args", "__match_args__" in own)
    inherited = {
        id(field)
        for base in mro(cls)[1:]
        for field in (class_dict(base).get("__dataclass_fields__") or {}).values()
    }
    fields = [
        _field_detail(name, field)
        for name, field in own["__dataclass_fields__"].items()
        if id(field) not in inherited
    ]
    return {"params": given, "fields": fields}


def _field_detail(name: str, field: Any) -> dict[str, object]:
    detail: dict[str, object] = {"name": name, "type": field.type}
    kind = field._field_type
    if kind is not dataclasses._FIELD:  # type: ignore[attr-defined]
        detail["kind"] = "class" if kind is dataclasses._FIELD_CLASSVAR else "init"  # type: ignore[attr-defined]
    if field.default is not dataclasses.MISSING:
        detail["default"] = field.default
    if field.default_factory is not dataclasses.MISSING:
        detail["default_factory"] = field.default_factory
    for flag, usual in _FLAGS.items():
        value = getattr(field, flag)
        if value is not dataclasses.MISSING and value is not usual:
            detail[flag] = value
    if field.metadata:
        detail["metadata"] = field.metadata
    return detail


def _dataclass_made(cls: type) -> frozenset[str]:
    own = class_dict(cls)
    made = {"__dataclass_fields__", "__dataclass_params__", "__match_args__", "__replace__"}
    if own.get("__hash__", 0) is None:
        made.add("__hash__")
    fields = own["__dataclass_fields__"]
    for name, value in own.items():
        if _is_special(name) and type(value) is types.FunctionType and _is_generated(value):
            if name not in ("__getstate__", "__setstate__"):  # plain functions of the library
                made.add(name)
        field = fields.get(name)
        if field is not None and value is field.default:
            made.add(name)
    return frozenset(made)


def _is_generated(function: types.FunctionType) -> bool:
    """Whether `dataclass` made a method, from text or as a wrapper around that."""
    code = function.__code__
    inner = getattr(function, "__wrapped__", None)
    if type(inner) is types.FunctionType:
        return _is_generated(inner)
    return code.co_filename == "<string>" or code.co_filename == dataclasses.__file__


# --- enums ---

_ENUM_OWN = frozenset(
    {"_missing_", "_generate_next_value_", "_ignore_", "_order_", "_numeric_repr_"}
)
_ENUM_PRINTING = ("__repr__", "__str__", "__format__")
_ENUM_SPECIAL = frozenset({"__new__", "__members__", "__new_member__", "__reduce_ex__"})


def _enum_detail(cls: type) -> dict[str, object]:
    own = class_dict(cls)
    members = [
        [name, member_name(member), member_content(cls, member)]
        for name, member in own["_member_map_"].items()
    ]
    states = {
        name: {
            key: value
            for key, value in (own_dict(member) or {}).items()
            if key not in ("__objclass__", "_sort_order_", "_inverted_", "_name_")
        }
        for name, member in own["_member_map_"].items()
        if member_name(member) == name
    }
    detail: dict[str, object] = {"members": members, "states": states}
    boundary = own.get("_boundary_")
    if boundary is not None:
        detail["boundary"] = member_name(boundary)
    return detail


def member_name(member: object) -> str:
    """The name under which an enum's member was defined."""
    return str((own_dict(member) or {})["_name_"])


def member_content(cls: type, member: Any) -> object:
    """What a member is as a number or text, for enums that are those too; else None."""
    value = (own_dict(member) or {})["_value_"]
    if is_kind(cls, enum.Flag):
        return value
    for kind in (int, float, str, bytes, complex, tuple):
        if is_kind(cls, kind):
            plain: Any = kind
            return plain(*plain.__getnewargs__(member))
    member_type = class_dict(cls).get("_member_type_", object)
    return None if member_type is object else value


def _enum_made(cls: type) -> frozenset[str]:
    own = class_dict(cls)
    made = set(own["_member_map_"]) | _ENUM_SPECIAL
    for name, value in own.items():
        if name.startswith("_") and name.endswith("_") and not _is_special(name):
            if name not in _ENUM_OWN:
                made.add(name)
        if name in _ENUM_PRINTING:
            continue  # those of the enum or of its data type, whichever EnumType chose
        if _is_special(name) or name in _ENUM_OWN:
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if type(function) is types.FunctionType:
                if is_packaged_file(function.__code__.co_filename):
                    made.add(name)  # EnumType puts its own there, by what the bases are
            elif is_exactly(function, types.WrapperDescriptorType, types.MethodDescriptorType):
                made.add(name)
    return frozenset(made - {"__doc__", "__annotations__"})


# --- namedtuples ---

_NAMEDTUPLE_SAMPLE = collections.namedtuple("_NAMEDTUPLE_SAMPLE", "field")
_NAMEDTUPLE_MADE = frozenset(vars(_NAMEDTUPLE_SAMPLE)) - {"field", "__doc__"} | {"__replace__"}


def _is_namedtuple(cls: type) -> bool:
    """Whether `namedtuple` made this very class, rather than one of its bases."""
    own = class_dict(cls)
    return (
        _bases_of(cls)[:1] == (tuple,)
        and type(own.get("_fields")) is tuple
        and type(own.get("_make")) is classmethod
    )


def _namedtuple_detail(cls: type) -> dict[str, object]:
    own = class_dict(cls)
    return {"fields": own["_fields"], "defaults": dict(own.get("_field_defaults") or {})}


def _namedtuple_made(cls: type) -> frozenset[str]:
    own = class_dict(cls)
    made = set(own["_fields"])
    for name in _NAMEDTUPLE_MADE & own.keys():
        value = own[name]
        if type(value) is classmethod:
            value = value.__func__
        if type(value) is not types.FunctionType or _is_of_namedtuple(value):
            made.add(name)
    return frozenset(made)


def _is_of_namedtuple(function: types.FunctionType) -> bool:
    file = function.__code__.co_filename
    return file == collections.__file__ or file.startswith("<")
