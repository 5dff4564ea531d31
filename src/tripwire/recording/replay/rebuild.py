"""Rebuild: functions, modules and library things of a trusted record, live again.

What is made here can run a record's code sooner or later, so it is used only after the user has
said that the record is trusted. Functions are made from code objects; no user code runs while they
are made: no decorator, no class body, no metaclass, no `__init_subclass__`.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import enum
import functools
import importlib
import importlib.util
import operator
import os
import sys
import types
import typing
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from tripwire.errors import CannotReplay
from tripwire.recording.capture.classes import home_of
from tripwire.recording.capture.origin import is_installed_module, is_packaged_file, resolve
from tripwire.recording.capture.shelf import Shelf
from tripwire.recording.capture.wrapped import make_compiled, make_dispatcher
from tripwire.recording.format import nodes
from tripwire.recording.format.nodes import AnyNode, Slot, read_dict, read_items, read_text
from tripwire.values.classes import class_dict, is_kind, isinstance, mro, name_of
from tripwire.values.contents import all_codes

Value = Callable[[Slot], Any]


class Rebuilder:
    """Makes what isn't data out of a trusted table."""

    def __init__(self, table: nodes.Table, shelf: Shelf) -> None:
        self._table = table
        self._shelf = shelf
        self._classes = ClassMaker(table)
        self._modules: dict[int, types.ModuleType] = {}  # by the id of their namespace
        self._importable: dict[str, types.ModuleType] = {}
        self._defined: list[type | types.FunctionType] = []

    def needs(self, node: AnyNode) -> Iterable[Slot]:
        """What must have been made before `make` is called."""
        match node:
            case nodes.Function():
                return (node.namespace, *node.closure)
            case nodes.Wrapped():
                return node.parts
            case nodes.Class():
                return self._classes.needs(node)
            case nodes.Namespace():
                return (value for name, value in _items(node) if name == "__builtins__")
            case nodes.Module():
                return (node.namespace,)
        return ()

    def make(self, node: AnyNode, value: Value) -> object:
        """The thing, or a shell of it."""
        match node:
            case nodes.Library():
                return find_in_library(node)
            case nodes.CellNode():
                return types.CellType()
            case nodes.Function():
                return self._make_function(node, value)
            case nodes.Wrapped():
                return _make_wrapped(node, value)
            case nodes.Class():
                cls = self._classes.make(node, value)
                self._defined.append(cls)
                return cls
            case nodes.Namespace():
                return self._make_namespace(node, value)
            case nodes.Module():
                return self._make_module(node, value)
        raise ValueError(f"{type(node).__name__} has no place here")

    def fill(self, node: AnyNode, made: Any, value: Value) -> None:
        """Put into a shell what belongs there."""
        match node:
            case nodes.CellNode():
                if not node.empty:
                    made.cell_contents = value(node.content)
            case nodes.Function():
                self._fill_function(node, made, value)
            case nodes.Class():
                self._classes.fill(made, value)
            case nodes.Wrapped(form="lru_cache" | "singledispatch" | "derived"):
                entries = read_dict(self._table, node.parts[-1])
                made.__dict__.update((name, value(slot)) for name, slot in entries)
            case nodes.Namespace():
                made.update((name, value(slot)) for name, slot in _items(node))
            case nodes.Module():
                vars(made).update((name, value(slot)) for name, slot in _items(node))

    # --- functions ---

    def _make_function(self, node: nodes.Function, value: Value) -> types.FunctionType:
        code = self._shelf.code(node.code)
        free = self._table.codes[node.code].free
        cells = dict(zip(free, map(value, node.closure), strict=True))
        made = types.FunctionType(
            code, value(node.namespace), node.name, None, tuple(cells[n] for n in code.co_freevars)
        )
        made.__qualname__ = node.qualname
        self._defined.append(made)
        return made

    def _fill_function(self, node: nodes.Function, made: types.FunctionType, value: Value) -> None:
        made.__defaults__ = value(node.defaults)
        made.__kwdefaults__ = value(node.kwdefaults)
        if node.attributes is not None:
            made.__dict__ = value(node.attributes)
        for name, slot in read_dict(self._table, node.special):
            setattr(made, name, value(slot))

    # --- modules ---

    def _make_namespace(self, node: nodes.Namespace, value: Value) -> dict[str, object]:
        module = types.ModuleType(node.module)
        space = vars(module)
        if not node.module:
            del space["__name__"]
        own = [slot for name, slot in _items(node) if name == "__builtins__"]
        # A function takes its builtins from its namespace when it is made.
        space["__builtins__"] = value(own[0]) if own else vars(builtins)
        self._modules[id(space)] = module
        if node.module:
            self._importable.setdefault(node.module, module)
        return space

    def _make_module(self, node: nodes.Module, value: Value) -> types.ModuleType:
        space = value(node.namespace)
        module = self._modules[id(space)] if space is not None else types.ModuleType(node.name)
        self._importable[node.name] = module
        return module

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        """While this is open, code that imports the user's modules finds the record's."""
        define(self._defined, self._importable)
        ours = {n: m for n, m in self._importable.items() if not is_installed_module(n)}
        for name, module in ours.items():
            if _is_package(module) or any(other.startswith(f"{name}.") for other in ours):
                vars(module).setdefault("__path__", [])
        before: dict[str, types.ModuleType | None] = {n: sys.modules.get(n) for n in ours}
        sys.modules.update(ours)
        try:
            yield
        finally:
            for name, known in before.items():
                if known is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = known


def _is_package(module: types.ModuleType) -> bool:
    """Whether what isn't found below a module is a missing module, and not a missing package."""
    return os.path.basename(str(vars(module).get("__file__"))) == "__init__.py"


def _items(node: nodes.Namespace | nodes.Module) -> Iterable[tuple[str, Slot]]:
    return zip(node.names, node.values, strict=True)


# --- libraries ---


def find_in_library(node: nodes.Library) -> object:
    """Import what a record names."""
    where = f"{node.module}.{node.name}" if node.name else node.module
    try:
        module = importlib.import_module(node.module)
    except ImportError as error:
        raise _not_here(where, f"importing {node.module} failed: {error}") from error
    try:
        return resolve(module, node.name)
    except AttributeError as error:
        raise _not_here(where, str(error)) from error


def _not_here(where: str, why: str) -> CannotReplay:
    return CannotReplay(
        f"The record uses {where}, which isn't here: {why}.\n"
        "Install the package in the version that the record's manifest names.",
        slug="replay-missing-library",
    )


# --- things around functions ---


def _make_wrapped(node: nodes.Wrapped, value: Value) -> object:
    make = _MAKERS.get(node.form)
    if make is None:
        raise ValueError(f"nothing is known of the form {node.form!r}")
    return make(*map(value, node.parts))


def _make_partial(
    function: Any, args: Any, names: Any, values: Any, attributes: Any
) -> functools.partial[Any]:
    made = functools.partial(function, *args, **dict(zip(names, values, strict=True)))
    if attributes is not None:
        made.__dict__ = attributes
    return made


def _make_cached_property(function: Any, name: Any) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _make_singledispatch(function: Any, kinds: Any, functions: Any, _: object) -> object:
    made = functools.singledispatch(function)
    for kind, implementation in zip(kinds, functions, strict=True):
        made.register(kind, implementation)
    return made


def _make_derived(cls: Any, form: Any, parts: Any, _: object) -> object:
    """An instance of a class that is built on one of the others."""
    if form == "partial":
        function, args, names, values, _ = parts
        given = dict(zip(names, values, strict=True))
        return functools.partial.__new__(cls, function, *args, **given)
    base = _BASES[form]
    made = base.__new__(cls)
    if form == "cached_property":
        base.__init__(made, parts[0])
        made.attrname = parts[1]
    else:
        base.__init__(made, *parts)
    return made


_BASES: dict[str, Any] = {
    "property": property,
    "cached_property": functools.cached_property,
    "staticmethod": staticmethod,
    "classmethod": classmethod,
}


class _Dead:
    """Something that has died."""


def _make_generic(origin: Any, args: Any) -> object:
    if origin is typing.Callable and type(args[0]) is tuple:
        args = (list(args[0]), *args[1:])
    if isinstance(origin, type) and not is_installed_module(origin.__module__):
        # A class of the record's has no parameters yet that could be checked.
        return cast("Any", typing)._GenericAlias(origin, args)
    if isinstance(origin, typing._SpecialForm) and len(args) == 1:
        return origin[args[0]]  # ClassVar, Final, Required, ... take a type, and no tuple
    return origin[args]


def _make_typevar(
    name: Any, bound: Any, constraints: Any, co: Any, contra: Any, infer: Any
) -> object:
    given = {"bound": bound, "covariant": co, "contravariant": contra}
    if infer and sys.version_info >= (3, 12):
        given["infer_variance"] = True
    return cast("Any", typing.TypeVar)(name, *constraints, **given)


_MAKERS: dict[str, Callable[..., object]] = {
    "method": types.MethodType,
    "builtin": getattr,
    "member": lambda cls, name: vars(cls)[name],
    "derived": _make_derived,
    "called": lambda function, *args: function(*args),
    "partial": _make_partial,
    "staticmethod": staticmethod,
    "classmethod": classmethod,
    "property": property,
    "cached_property": _make_cached_property,
    "lru_cache": lambda function, maxsize, typed, _: functools.lru_cache(maxsize, typed)(function),
    "compiled": make_compiled,
    "dispatcher": make_dispatcher,
    "recorded": lambda function: function,
    "singledispatch": _make_singledispatch,
    "weakref": lambda target: weakref.ref(_Dead() if target is None else target),
    "proxy": types.MappingProxyType,
    "alias": types.GenericAlias,
    "generic": _make_generic,
    "union": lambda args: functools.reduce(operator.or_, args),
    "typevar": _make_typevar,
    "forward": typing.ForwardRef,
}


# --- classes, made again without running what defined them ---


_set = type.__setattr__


class ClassMaker:
    """The classes of one table."""

    def __init__(self, table: nodes.Table) -> None:
        self._table = table
        self._nodes: dict[int, nodes.Class] = {}  # by the class's id, until it is filled

    def needs(self, node: nodes.Class) -> Iterable[Slot]:
        """What a class is made from: never what it holds."""
        yield node.meta
        yield from node.bases
        if node.form == "enum":
            for member in self._list(node, "members"):
                yield from read_items(self._table, member)

    def make(self, node: nodes.Class, value: Value) -> type:
        """A class without its attributes."""
        try:
            made = self._make(node, value)
        except (TypeError, ValueError, AttributeError) as error:
            raise CannotReplay(
                f"The class {node.qualname} can't be made here: {error}.\n"
                "Replay with the versions of Python and packages that the manifest names.",
                slug="replay-class",
            ) from error
        self._nodes[id(made)] = node
        return made

    def _make(self, node: nodes.Class, value: Value) -> type:
        meta: type = value(node.meta)
        bases: tuple[type, ...] = tuple(map(value, node.bases))
        if node.form == "namedtuple":
            return self._make_namedtuple(node, bases)
        if node.form == "enum":
            return self._make_enum(node, meta, bases, value)
        space: dict[str, object] = {"__module__": node.module, "__qualname__": node.qualname}
        if "__orig_bases__" in node.names:
            space["__orig_bases__"] = ()  # Generic asks whether it is there
        slots = self._entry(node, "slots")
        if slots is not None:
            space["__slots__"] = [
                read_text(self._table, slot) for slot in read_items(self._table, slots)
            ]
        if is_kind(meta, ABCMeta):
            return cast("type", ABCMeta.__new__(cast("Any", meta), node.name, bases, space))
        return cast("type", type.__new__(cast("Any", meta), node.name, bases, space))

    def fill(self, cls: type, value: Value) -> None:
        """Give a class its attributes, and its bases theirs first."""
        for base in reversed(mro(cls)):
            node = self._nodes.pop(id(base), None)
            if node is not None:
                self._fill(node, base, value)

    def _fill(self, node: nodes.Class, cls: type, value: Value) -> None:
        for name, slot in zip(node.names, node.values, strict=True):
            _set(cls, name, value(slot))
        if node.form == "dataclass":
            self._generate_dataclass(node, cls, value)
        elif node.form == "enum":
            self._fill_enum(node, cls, value)
        elif node.form == "namedtuple":
            self._fill_namedtuple(node, cls, value)
        for slot in self._list(node, "registered"):
            ABCMeta.register(cast("ABCMeta", cls), value(slot))
        if class_dict(cls).get("_is_protocol") is True:
            _finish_protocol(cls)

    # --- detail ---

    def _entry(self, node: nodes.Class, name: str) -> Slot:
        return dict(read_dict(self._table, node.detail)).get(name)

    def _list(self, node: nodes.Class, name: str) -> tuple[Slot, ...]:
        return read_items(self._table, self._entry(node, name))

    # --- dataclasses ---

    def _generate_dataclass(self, node: nodes.Class, cls: Any, value: Value) -> None:
        fields = [dict(read_dict(self._table, slot)) for slot in self._list(node, "fields")]
        params = dict(read_dict(self._table, self._entry(node, "params")))
        own = class_dict(cls)
        names = [read_text(self._table, field["name"]) for field in fields]
        members = {name: own[name] for name in names if name in own}
        annotations = own.get("__annotations__")
        _set(cls, "__annotations__", dict(zip(names, map(_stand_in, fields), strict=True)))
        for name, field in zip(names, fields, strict=True):
            _set(cls, name, _make_field(field, value))
        dataclasses.dataclass(**{name: value(slot) for name, slot in params.items()})(cls)
        for name, member in members.items():
            _set(cls, name, member)
        kinds = {name: value(field["type"]) for name, field in zip(names, fields, strict=True)}
        for name, kind in kinds.items():
            cls.__dataclass_fields__[name].type = kind
        _set(cls, "__annotations__", kinds if annotations is None else annotations)

    # --- enums ---

    def _make_enum(
        self, node: nodes.Class, meta: type, bases: tuple[type, ...], value: Value
    ) -> type:
        space: Any = enum.EnumMeta.__prepare__(node.name, bases)
        space["__module__"], space["__qualname__"] = node.module, node.qualname
        numbers: dict[str, int] = {}
        for slot in self._list(node, "members"):
            name, first, content = map(value, read_items(self._table, slot))
            number = numbers.setdefault(first, len(numbers) + 1)
            space[name] = number if content is None else content
        options: dict[str, Any] = {}
        boundary = self._entry(node, "boundary")
        if boundary is not None:
            options["boundary"] = enum.FlagBoundary[read_text(self._table, boundary)]
        made = enum.EnumMeta.__new__(cast("Any", meta), node.name, bases, space, **options)
        return cast("type", made)

    def _fill_enum(self, node: nodes.Class, cls: Any, value: Value) -> None:
        states = dict(read_dict(self._table, self._entry(node, "states")))
        changed = False
        for name, slot in states.items():
            member = cls._member_map_[name]
            state = {key: value(one) for key, one in read_dict(self._table, slot)}
            changed = changed or member._value_ is not state.get("_value_")
            vars(member).update(state)
        if changed:
            _index_members(cls)
        # A data type's own repr is there only now.
        find_repr = getattr(enum.EnumMeta, "_find_data_repr_", None)
        if find_repr is not None:
            _set(cls, "_value_repr_", find_repr(cls.__name__, cls.__bases__))

    # --- namedtuples ---

    def _make_namedtuple(self, node: nodes.Class, bases: tuple[type, ...]) -> type:
        fields = [read_text(self._table, slot) for slot in self._list(node, "fields")]
        made: type = collections.namedtuple(  # type: ignore[misc]  # the fields aren't literal
            node.name, fields, rename=True, module=node.module
        )
        made.__qualname__ = node.qualname
        if bases != (tuple,):
            made.__bases__ = bases
        return made

    def _fill_namedtuple(self, node: nodes.Class, cls: Any, value: Value) -> None:
        defaults = dict(read_dict(self._table, self._entry(node, "defaults")))
        values = {name: value(slot) for name, slot in defaults.items()}
        if values:
            cls.__new__.__defaults__ = tuple(values.values())
            _set(cls, "_field_defaults", values)


def _stand_in(field: dict[str, Slot]) -> object:
    """An annotation that tells `dataclass` the kind of a field, and nothing else."""
    kinds = {"class": typing.ClassVar, "init": dataclasses.InitVar}
    return kinds.get(str(field.get("kind")), object)


_OF_FIELD = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")


def _make_field(field: dict[str, Slot], value: Value) -> Any:
    given = {name: value(field[name]) for name in _OF_FIELD if name in field}
    if field.get("kind") != "class":
        given.setdefault("kw_only", False)
    return dataclasses.field(**given)


def _index_members(cls: Any) -> None:
    """Let an enum find its members by their values, which it was made without."""
    by_value: dict[object, object] = {}
    unhashable: dict[str, list[object]] = {}
    for name, member in cls._member_map_.items():
        try:
            by_value.setdefault(member._value_, member)
        except TypeError:
            unhashable[name] = [member._value_]
    type.__setattr__(cls, "_value2member_map_", by_value)
    for name, found in (
        ("_unhashable_values_", [value for values in unhashable.values() for value in values]),
        ("_unhashable_values_map_", unhashable),
        ("_hashable_values_", list(by_value)),
    ):
        if name in class_dict(cls):
            type.__setattr__(cls, name, found)


def _finish_protocol(cls: Any) -> None:
    """What typing computes from all that a protocol has; Python 3.12 and later."""
    initialise = class_dict(type(cls)).get("__init__")
    if type(cls) is type(typing.Protocol) and initialise is not None:
        initialise(cls, cls.__name__, cls.__bases__, dict(class_dict(cls)))
    if class_dict(cls).get("_is_runtime_protocol") is True:
        typing.runtime_checkable(cls)


# --- where pickle looks for classes and functions ---
#
# A namespace of a record has the names that recorded code loads. Pickle asks a module for a class
# or a function by the name under which it was defined, which no code need have loaded.


def define(made: list[type | types.FunctionType], modules: dict[str, types.ModuleType]) -> None:
    """Put each into its module, under its name, if nothing else has or misses that name."""
    asked: dict[int, set[str]] = {}  # by the id of a namespace: code asks for these, found or not
    for one in made:
        if isinstance(one, types.FunctionType):
            names = asked.setdefault(id(one.__globals__), set())
            names.update(name for code in all_codes(one.__code__) for name in code.co_names)
    for one in made:
        home, name = home_of(one), _qualname_of(one)
        if not home or not name.isidentifier() or _is_librarys(home):
            continue
        module = modules.setdefault(home, types.ModuleType(home))
        if name not in asked.get(id(vars(module)), ()):
            vars(module).setdefault(name, one)


def _qualname_of(one: type | types.FunctionType) -> str:
    """A qualified name; no metaclass is asked for it."""
    return one.__qualname__ if type(one) is types.FunctionType else name_of(one)


def _is_librarys(module: str) -> bool:
    """Whether a module is of an installed package, loaded or not."""
    top = module.partition(".")[0]
    if top in sys.modules:
        return is_installed_module(top)
    spec = importlib.util.find_spec(top)
    return spec is not None and spec.origin is not None and is_packaged_file(spec.origin)
