"""Record: what one execution had: its code, its variables, the modules that it looked into.

`ExecutionRecorder` collects an execution by hand, `ExecutionRecord` is what comes of it, or what
a file holds. A record that comes from a file is inert: code and objects are descriptions.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import IO, Any

from tripwire.recording.container import write_members
from tripwire.recording.decode import view
from tripwire.recording.draft import RecordDraft
from tripwire.recording.format import Manifest, Record, Where
from tripwire.recording.views import FunctionView, ModuleView
from tripwire.values.classes import isinstance


@dataclass
class ModuleRecord:
    """A Python module, and the attributes of it that were accessed."""

    module: ModuleType
    accessed_attrs: dict[str, Any] = field(default_factory=dict)


@dataclass
class DummyModule:
    """Stands for a module: its name, and just the attributes that were accessed."""

    name: str
    is_torch: bool = False
    value: object = None

    def __post_init__(self) -> None:
        self._own_name = self.name  # the module may have an attribute called so
        self._accessed: dict[str, Any] = {}

    @property
    def __name__(self) -> str:
        return self._own_name

    def take(self, name: str, value: Any) -> None:
        """An attribute of the module was accessed, and gave this."""
        self._accessed[name] = value
        setattr(self, name, value)


Variables = dict[str, Any]


@dataclass
class ExecutionRecord:
    """One execution. Of a file, `code` is a description and so are functions and objects."""

    code: CodeType | FunctionView | None
    closure: tuple[CellType, ...] | tuple[object, ...] = ()
    globals: Variables = field(default_factory=dict)
    locals: Variables = field(default_factory=dict)
    builtins: Variables = field(default_factory=dict)
    code_options: Variables = field(default_factory=dict)
    manifest: Manifest = field(default_factory=Manifest)
    args: tuple[Any, ...] = ()
    kwargs: Variables = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # by the files they are from

    def dump(self, file: IO[bytes] | str | os.PathLike[str]) -> None:
        """Write it. A path that exists is left alone: the record gets another name beside it."""
        if not isinstance(self.code, CodeType):
            raise TypeError("This record came from a file; copy the file.")
        draft = RecordDraft()
        cells: Any = self.closure
        space = {name: _as_module(value) for name, value in self.globals.items()}
        draft.add("call", FunctionType(self.code, space, self.code.co_name, None, cells or None))
        draft.add("locals", {name: _as_module(value) for name, value in self.locals.items()})
        draft.add("builtins", dict(self.builtins))
        draft.add("code_options", dict(self.code_options))
        place = Where(self.code.co_qualname, self.code.co_filename, self.code.co_firstlineno)
        manifest = Manifest(function=place)
        if isinstance(file, str | os.PathLike):
            draft.write(Path(file), manifest)
        else:
            write_members(file, draft.build(manifest).members())  # type: ignore[arg-type]

    @classmethod
    def load(cls, file: IO[bytes] | str | os.PathLike[str]) -> ExecutionRecord:
        """Open one. Nothing of it runs and nothing is imported."""
        if isinstance(file, str | os.PathLike):
            opened = Record.open(file)
        else:
            opened = Record.of(file.read())
        with opened as record:
            return cls._of(record)

    @classmethod
    def _of(cls, record: Record) -> ExecutionRecord:
        roots: dict[str, Any] = view(record.table, record.blobs, record.read)
        call = roots.get("call")
        code = call if isinstance(call, FunctionView) else None
        details: dict[str, Any] = dict(code.details) if code is not None else {}
        space, args = details.get("globals"), roots.get("args")
        return cls(
            code if code is not None else call,
            tuple(details.get("closure") or ()),
            dict(space.attributes) if isinstance(space, ModuleView) else {},
            _as_dict(roots.get("locals")),
            _as_dict(roots.get("builtins")),
            _as_dict(roots.get("code_options")),
            record.manifest,
            args if isinstance(args, tuple) else (),
            _as_dict(roots.get("kwargs")),
            _read_sources(record),
        )


def _read_sources(record: Record) -> dict[str, str]:
    """The recorded source of each file; a member that several name is read once."""
    named = {code.file: code.source for code in record.table.codes if code.source is not None}
    texts = {name: record.read(name).decode("utf-8", "replace") for name in set(named.values())}
    return {file: texts[name] for file, name in named.items()}


def _as_dict(root: object) -> Variables:
    """What a root holds: nothing if it isn't there, or if there was no room for it."""
    return dict(root) if isinstance(root, dict) else {}


def _as_module(value: object) -> object:
    """A dummy as a module that records can hold; torch's own is itself."""
    if not isinstance(value, DummyModule):
        return value
    known = {"name", "is_torch", "value", "_own_name", "_accessed"}
    given = {name: held for name, held in vars(value).items() if name not in known}
    if value.is_torch is True and value.__name__ in sys.modules:
        return sys.modules[value.__name__]
    module = ModuleType(value.__name__)
    for name, attribute in (given | value._accessed).items():
        setattr(module, name, _as_module(attribute))
    return module


@dataclass
class ExecutionRecorder:
    """Collects what an execution reads."""

    code: CodeType
    closure: tuple[CellType, ...] = ()
    globals: Variables = field(default_factory=dict)
    locals: Variables = field(default_factory=dict)
    builtins: Variables = field(default_factory=dict)
    code_options: Variables = field(default_factory=dict)
    name_to_modrec: dict[str, ModuleRecord] = field(default_factory=dict)

    def add_local_var(self, name: str, var: Any) -> None:
        """A local variable; a module becomes the one record of that module."""
        self.locals[name] = self._recorded(var)

    def add_global_var(self, name: str, var: Any) -> None:
        """A global variable; a module becomes the one record of that module."""
        self.globals[name] = self._recorded(var)

    def add_local_mod(self, name: str, mod: ModuleType) -> None:
        """A module that a local variable holds: it is found among the globals at replay."""
        if not isinstance(mod, ModuleType):
            raise TypeError(f"{name} is a {type(mod).__name__}, not a module")
        self.add_global_var(name, mod)

    def record_module_access(self, mod: ModuleType, name: str, val: Any) -> None:
        """An attribute of a module was taken. A module nests; a value counts in known ones."""
        if isinstance(val, ModuleType):
            self._record_of(mod).accessed_attrs[name] = self._record_of(val)
        elif mod.__name__ in self.name_to_modrec:
            self.name_to_modrec[mod.__name__].accessed_attrs[name] = val

    def get_record(self) -> ExecutionRecord:
        """What was collected, with modules as dummies."""
        dummies: dict[int, DummyModule] = {}
        return ExecutionRecord(
            self.code,
            self.closure,
            {name: _resolve(value, dummies) for name, value in self.globals.items()},
            {name: _resolve(value, dummies) for name, value in self.locals.items()},
            dict(self.builtins),
            dict(self.code_options),
        )

    def _recorded(self, value: Any) -> Any:
        return self._record_of(value) if isinstance(value, ModuleType) else value

    def _record_of(self, module: ModuleType) -> ModuleRecord:
        return self.name_to_modrec.setdefault(module.__name__, ModuleRecord(module))


def _resolve(value: Any, dummies: dict[int, DummyModule]) -> Any:
    """A module's record as a dummy; one dummy per record, also where modules lead in circles."""
    if not isinstance(value, ModuleRecord):
        return value
    found = dummies.get(id(value))
    if found is None:
        name = value.module.__name__
        is_torch = name.partition(".")[0] == "torch"
        found = dummies[id(value)] = DummyModule(name, is_torch)
        if is_torch:
            found.value = value.module
        for attribute, held in value.accessed_attrs.items():
            found.take(attribute, _resolve(held, dummies))
    return found


def load_record(path: str | os.PathLike[str]) -> ExecutionRecord:
    """Open a record to look at it. Nothing of it runs, and nothing is imported."""
    return ExecutionRecord.load(path)
