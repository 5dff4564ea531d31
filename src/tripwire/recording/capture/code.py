"""Code: functions, and the names that they find in namespaces and modules.

A function is its code, the cells and defaults that it was made with, and its namespace: the
globals of its module, of which only those are kept that recorded code loads. A module of the
user's is kept as a dummy with the attributes that recorded code takes from it. A library's
module or function is named; a function that a library made (a decorator's wrapper, say) is put
into the record like the user's, on top of the library's own namespace.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import msgspec

from tripwire.reading.uses import Use, Uses, merge
from tripwire.recording.capture.classes import (
    ClassDraft,
    SpelledNames,
    deleted_globals,
    find_imports,
    free_use,
    global_use,
    imports_by_name,
    opens_namespace,
)
from tripwire.recording.capture.origin import (
    find_library,
    find_library_namespace,
    is_packaged_file,
    module_dict,
    module_name,
)
from tripwire.recording.capture.shelf import Codes, Space
from tripwire.recording.capture.wrapped import (
    encode_recompiled,
    encode_singledispatch,
    encode_wrapped,
)
from tripwire.recording.format import nodes
from tripwire.recording.format.manifest import Omission
from tripwire.recording.format.nodes import AnyNode, Reference, Slot
from tripwire.values.classes import isinstance
from tripwire.values.contents import all_codes, package_of

if TYPE_CHECKING:
    from tripwire.recording.capture.encode import Draft, Encoder


class Programs:
    """Encodes functions, classes, modules, and what wraps them. Shared by one record's values."""

    def __init__(self) -> None:
        self.codes = Codes()
        self.names = SpelledNames()
        self._spaces: dict[int, _SpaceDraft] = {}
        self._modules: dict[int, _PyModuleDraft] = {}
        self._library_spaces: dict[str, Reference] = {}
        self._reached: list[_PyModuleDraft] = []
        self._settling = False
        self._awaited: list[tuple[_SpaceDraft, str, Use]] = []  # imported, and not loaded yet
        self._before: tuple[_SpaceDraft, frozenset[str]] | None = None  # modules at the beginning

    def encode(self, encoder: Encoder, value: object) -> AnyNode | Draft | None:
        """The node of a value that is code, holds code, or lies in a library; None for others."""
        kind = type(value)
        if kind is types.CellType:
            return _encode_cell(encoder, value)
        compiled = encode_recompiled(encoder, value)
        if compiled is not None:
            return compiled
        library = find_library(value)
        if library is not None:
            self.names.add_library(value)
            return library
        if kind is types.FunctionType:
            assert isinstance(value, types.FunctionType)
            return encode_singledispatch(encoder, value) or _FunctionDraft(self, encoder, value)
        if issubclass(kind, type):
            assert isinstance(value, type)
            return ClassDraft(self.names, encoder, value)
        if issubclass(kind, types.ModuleType):
            assert isinstance(value, types.ModuleType)
            draft = _PyModuleDraft(self, encoder, value)
            draft.reach(Use(whole=True))
            return draft
        return encode_wrapped(encoder, value)

    def add_function(self, encoder: Encoder, function: types.FunctionType) -> tuple[int, Reference]:
        """Take in a function's code; its number, and the function's namespace."""
        code, space = function.__code__, function.__globals__
        number = self.codes.add(code, space)
        library = find_library_namespace(space)
        uses = self.names.add(code, is_packaged_file(code.co_filename))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                self._reach_library(cell.cell_contents, free_use(uses, name))
        if library is not None:
            known = self._library_spaces.get(library.module)
            if known is None:
                known = self._library_spaces[library.module] = encoder.place(library)
            return number, known
        draft = self.space(encoder, space)
        draft.add(code, uses, any(one.level for one in find_imports(code)))
        for name, use in self._find_imports(code, space, uses):
            draft.imports.update(dict.fromkeys(self._reach_import(encoder, name, use)))
            if name not in sys.modules:
                self._awaited.append((draft, name, use))
        if self._before is None and imports_by_name(uses):
            self._before = draft, frozenset(sys.modules)
        return number, draft.reference

    def space(self, encoder: Encoder, space: Space) -> _SpaceDraft:
        """The one node for a namespace."""
        found = self._spaces.get(id(space))
        if found is None:
            found = self._spaces[id(space)] = _SpaceDraft(self, encoder, space)
            found.reference = encoder.place(found)
        return found

    def reach_module(self, encoder: Encoder, module: types.ModuleType, use: Use) -> Reference:
        """The node for a module that code finds by name and uses in this way."""
        found = self._modules.get(id(module))
        if found is None:
            found = self._modules[id(module)] = _PyModuleDraft(self, encoder, module)
            found.reference = encoder.place(found)
        if found.reach(use):
            self._reached.append(found)
        return found.reference

    def settle(self) -> None:
        """Let the modules grow that were reached anew; growing, they may reach others."""
        if self._settling:
            return
        self._settling = True
        while self._reached:
            self._reached.pop().grow()
        self._settling = False

    def slot_of_name(self, encoder: Encoder, value: object, use: Use, step: str) -> Slot:
        """A slot for what code finds behind a name and uses in this way."""
        if is_users_module(value):
            assert isinstance(value, types.ModuleType)
            return self.reach_module(encoder, value, use)
        self._reach_library(value, use)
        return encoder.slot(value, step)

    def _reach_library(self, value: object, use: Use) -> None:
        """What code takes from a library's module may be handed the user's objects."""
        if issubclass(type(value), types.ModuleType):
            held = module_dict(cast("types.ModuleType", value))
            for name in use.attributes & held.keys():
                self.names.add_library(held[name])

    def _find_imports(self, code: types.CodeType, space: Space, uses: Uses) -> Iterator[_Wanted]:
        """Modules that code imports when it runs, by their full names."""
        for one in find_imports(code):
            is_whole = one.names is None or "*" in one.names
            use = Use(whole=True) if is_whole else Use(attributes=frozenset(one.names or ()))
            yield _absolute(one.name, one.level, space), use
        if imports_by_name(uses):
            consts = {c for one in all_codes(code) for c in one.co_consts if isinstance(c, str)}
            for text in sorted(consts):
                dots = len(text) - len(text.lstrip("."))
                name = _absolute(text[dots:], dots, space)
                if name in sys.modules:
                    yield name, Use(whole=True)

    def _reach_import(self, encoder: Encoder, name: str, use: Use) -> Iterator[Reference]:
        """The modules that importing a name finds, as dummies; none if they aren't loaded."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.get(".".join(parts[:end]))
            if is_users_module(module):
                assert isinstance(module, types.ModuleType)
                here = use if end == len(parts) else Use(whole=use.whole)
                asked = frozenset({"__file__", *parts[end : end + 1]})
                yield self.reach_module(encoder, module, merge(here, Use(attributes=asked)))
            elif end == len(parts):
                self._reach_library(module, use)

    def take_loaded(self, encoder: Encoder) -> None:
        """Take in the user's modules that were loaded since the code that imports them was.

        The call imported them, so nobody knows what was in them when it began.
        """
        awaited, self._awaited = self._awaited, []
        if self._before is not None:  # whatever names the code put together
            draft, loaded = self._before
            fresh = [name for name in list(sys.modules) if name not in loaded]
            awaited += [(draft, name, Use(whole=True)) for name in fresh]
        known = set(self._modules)
        for draft, name, use in awaited:
            draft.imports.update(dict.fromkeys(self._reach_import(encoder, name, use)))
        for number in self._modules.keys() - known:
            encoder.left_out.append(Omission(self._modules[number].name, _AS_THE_CALL_LEFT_IT))


_Wanted = tuple[str, Use]  # a module's full name, and what is taken from it
_AS_THE_CALL_LEFT_IT = "the call imported it, so its values are recorded as the call left them"


def is_users_module(value: object) -> bool:
    """Whether a value is a module that isn't a library's."""
    return issubclass(type(value), types.ModuleType) and find_library(value) is None


def _absolute(name: str, level: int, space: Space) -> str:
    """The full name of an import; one that begins with dots counts from the importing module."""
    if not level:
        return name
    parts = package_of(space).split(".")
    parts = parts[: len(parts) - level + 1]
    return ".".join([*parts, name] if name else parts)


def _encode_cell(encoder: Encoder, cell: object) -> AnyNode:
    assert isinstance(cell, types.CellType)
    try:
        content = cell.cell_contents
    except ValueError:
        return nodes.CellNode(None, True)
    return nodes.CellNode(encoder.slot(content, ".cell_contents"), False)


class _FunctionDraft:
    """A function; its annotations are kept if recorded code reads any."""

    def __init__(self, programs: Programs, encoder: Encoder, function: types.FunctionType) -> None:
        self._names = programs.names
        self._encoder = encoder
        self._function = function
        number, space = programs.add_function(encoder, function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        special = _special_of(function)
        code = function.__code__
        encoder.hold_code(function.__name__, function.__qualname__, code.co_qualname)
        encoder.hold_attributes((code.co_filename, *code.co_freevars))
        self._annotated = False
        self._node = nodes.Function(
            function.__name__,
            function.__qualname__,
            number,
            space,
            encoder.slot(function.__defaults__, ".__defaults__"),
            encoder.slot(function.__kwdefaults__, ".__kwdefaults__"),
            tuple(encoder.reference(cell, f"<{name}>") for name, cell in cells),
            encoder.slot(function.__dict__ or None, ".__dict__"),
            encoder.slot(special or None),
        )

    def grow(self) -> None:
        if self._names.annotations and not self._annotated:
            self._annotated = True
            annotations = self._function.__annotations__
            if annotations:
                special = {**_special_of(self._function), "__annotations__": annotations}
                self._node = msgspec.structs.replace(
                    self._node, special=self._encoder.slot(special)
                )

    def node(self) -> AnyNode:
        return self._node


def _special_of(function: types.FunctionType) -> dict[str, object]:
    """What a function says of itself, where that isn't what a new one would say."""
    found: dict[str, object] = {}
    code, space = function.__code__, function.__globals__
    if function.__module__ != dict.get(space, "__name__"):
        found["__module__"] = function.__module__
    first = code.co_consts[0] if code.co_consts else None
    if function.__doc__ != (first if isinstance(first, str) else None):
        found["__doc__"] = function.__doc__
    return found


_ABSENT = object()
# Every module has these, and they say nothing of its own.
_OF_ANY_MODULE = frozenset(
    {"__builtins__", "__cached__", "__doc__", "__loader__", "__name__", "__spec__"}
)


class _SpaceDraft:
    """The globals of one module, as far as recorded code loads them."""

    reference: Reference

    def __init__(self, programs: Programs, encoder: Encoder, space: Space) -> None:
        self._programs = programs
        self._encoder = encoder
        self._space = space
        self._asked: dict[str, Use] = {}
        self._kept: dict[str, Slot] = {}
        self._open = False
        self.imports: dict[Reference, None] = {}
        own = _own_builtins(space)
        if own is not None:
            self._kept["__builtins__"] = encoder.reference(own, ".__builtins__")

    def add(self, code: types.CodeType, uses: Uses, imports_relatively: bool) -> None:
        """Code runs in this namespace."""
        for name in (*uses.globals, *sorted(deleted_globals(code))):
            use = global_use(uses, name)
            before = self._asked.get(name)
            self._asked[name] = use if before is None else merge(before, use)
        if imports_relatively:
            self._kept["__package__"] = self._encoder.slot(package_of(self._space))
        self._open = self._open or opens_namespace(uses)

    def grow(self) -> None:
        if self._open:
            for name in list(self._space):
                if isinstance(name, str) and name not in _OF_ANY_MODULE:
                    self._asked.setdefault(name, Use(whole=True))
        for name, use in list(self._asked.items()):
            value = self._find(name)
            if value is not _ABSENT and (name not in self._kept or is_users_module(value)):
                self._encoder.hold_attributes([name])
                self._kept[name] = self._programs.slot_of_name(
                    self._encoder, value, use, f".{name}"
                )
        self._programs.settle()

    def _find(self, name: str) -> object:
        value = dict.get(self._space, name, _ABSENT)
        if value is _ABSENT and "__builtins__" not in self._kept:
            # Somebody put a name into builtins, or replaced one that was there.
            value = vars(builtins).get(name, _ABSENT)
            if value is not _ABSENT and find_library(value) is not None:
                return _ABSENT
        return value

    def node(self) -> AnyNode:
        name = dict.get(self._space, "__name__")
        return nodes.Namespace(
            name if isinstance(name, str) else "",
            tuple(self._kept),
            tuple(self._kept.values()),
            tuple(self.imports),
        )


def _own_builtins(space: Space) -> Space | None:
    """What a namespace has in place of Python's builtins."""
    own = dict.get(space, "__builtins__", builtins)
    if issubclass(type(own), types.ModuleType):
        assert isinstance(own, types.ModuleType)
        own = module_dict(own)
    return own if type(own) is dict and own is not vars(builtins) else None


class _PyModuleDraft:
    """A module of the user's, as far as recorded code takes attributes from it."""

    reference: Reference

    def __init__(self, programs: Programs, encoder: Encoder, module: types.ModuleType) -> None:
        self._programs = programs
        self._encoder = encoder
        self.name = module_name(module)
        self._module = module
        self._asked: set[str] = set()
        self._whole = False
        self._kept: dict[str, Slot] = {}
        self._space = programs.space(encoder, module_dict(module)).reference

    def reach(self, use: Use) -> bool:
        """Note that code uses the module in this way; whether that is new."""
        before = self._whole, len(self._asked)
        self._asked |= use.attributes
        self._whole = self._whole or use.whole
        return before != (self._whole, len(self._asked))

    def grow(self) -> None:
        space = module_dict(self._module)
        names = self._programs.names
        if self._whole:
            for name in list(space):
                if isinstance(name, str) and name not in _OF_ANY_MODULE and names.spells(name):
                    self._asked.add(name)
        if not self._asked <= space.keys() and "__getattr__" in space:
            self._asked.add("__getattr__")
        for name in sorted(self._asked & space.keys() - {"__name__", "__dict__"}):
            value = space[name]
            if name not in self._kept or is_users_module(value):
                self._kept[name] = self._programs.slot_of_name(
                    self._encoder, value, names.after(name), f".{name}"
                )
        self._programs.settle()

    def node(self) -> AnyNode:
        return nodes.Module(self.name, tuple(self._kept), tuple(self._kept.values()), self._space)
