"""Record: what one execution had: its code, its variables, the modules that it looked into.

`ExecutionRecorder` collects an execution by hand, `ExecutionRecord` is what comes of it, or what
a file holds. A record that comes from a file is inert: code and objects are descriptions. Both
can be written, and what was written can be replayed.
"""

from __future__ import annotations

import inspect
import itertools
import os
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import IO, Any, BinaryIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tripwire.recording.capture.draft import RecordDraft
from tripwire.recording.capture.outcomes import explain, printable, tell_redacted
from tripwire.recording.format.container import Content, write_members, write_new
from tripwire.recording.format.decode import view
from tripwire.recording.format.file import NewRecord, Record
from tripwire.recording.format.manifest import Manifest, Where
from tripwire.recording.format.views import (
    ClassView,
    FunctionView,
    ModuleView,
    ObjectView,
    PartsView,
)
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
    call: object = None  # of a file: what was called, a module for one
    origin: Path | bytes | None = field(default=None, repr=False)  # the file, or what was in it

    def dump(self, file: IO[bytes] | str | os.PathLike[str]) -> None:
        """Write it. A path that exists is left alone: the record gets another name beside it."""
        if self.origin is not None:
            with _open(self.origin) as record:
                _write(record.contents(), file)
        elif isinstance(self.code, CodeType):
            _write(self._build(self.code).members(), file)
        else:
            raise TypeError("This record has no code, so there is nothing to write.")

    def _build(self, code: CodeType) -> NewRecord:
        """The record of a call of the code, with the arguments that are among the locals."""
        draft = RecordDraft()
        cells: Any = self.closure
        space = {name: _as_module(value) for name, value in self.globals.items()}
        draft.add("call", FunctionType(code, space, code.co_name, None, cells or None))
        known = {name: _as_module(value) for name, value in self.locals.items()}
        args, kwargs = (self.args, self.kwargs) if self.args or self.kwargs else _bind(code, known)
        draft.add("args", tuple(args))
        draft.add("kwargs", dict(kwargs))
        draft.add("locals", known)
        draft.add("builtins", dict(self.builtins))
        draft.add("code_options", dict(self.code_options))
        place = Where(code.co_qualname, code.co_filename, code.co_firstlineno)
        return draft.build(Manifest(function=place))

    @classmethod
    def load(cls, file: IO[bytes] | str | os.PathLike[str]) -> ExecutionRecord:
        """Open one. Nothing of it runs and nothing is imported."""
        is_path = isinstance(file, str | os.PathLike)
        origin = Path(cast("str", file)).absolute() if is_path else cast("IO[bytes]", file).read()
        with _open(origin) as record:
            return cls._of(record, origin)

    @classmethod
    def _of(cls, record: Record, origin: Path | bytes) -> ExecutionRecord:
        roots: dict[str, Any] = view(record.table, record.blobs, record.read)
        call = roots.get("call")
        code = _find_function(call)
        details: dict[str, Any] = dict(code.details) if code is not None else {}
        space, args = details.get("globals"), roots.get("args")
        return cls(
            code,
            tuple(details.get("closure") or ()),
            dict(space.attributes) if isinstance(space, ModuleView) else {},
            _as_dict(roots.get("locals")),
            _as_dict(roots.get("builtins")),
            _as_dict(roots.get("code_options")),
            record.manifest,
            args if isinstance(args, tuple) else (),
            _as_dict(roots.get("kwargs")),
            _read_sources(record),
            call,
            origin,
        )


def _open(origin: Path | bytes) -> Record:
    return Record.of(origin) if isinstance(origin, bytes) else Record.open(origin)


def _write(
    members: Mapping[str, tuple[Content, int]], file: IO[bytes] | str | os.PathLike[str]
) -> None:
    if isinstance(file, str | os.PathLike):
        write_new(Path(cast("str", file)), members)
    else:
        write_members(cast("BinaryIO", file), members)


def _bind(code: CodeType, known: Variables) -> tuple[tuple[Any, ...], Variables]:
    """The arguments of a call, by the names of parameters; those that are missing are left out."""
    end = code.co_argcount + code.co_kwonlyargcount
    positional, keywords = (
        code.co_varnames[: code.co_argcount],
        code.co_varnames[code.co_argcount : end],
    )
    first = list(itertools.takewhile(known.__contains__, positional))
    args = [known[name] for name in first]
    kwargs = {name: known[name] for name in (*positional[len(first) :], *keywords) if name in known}
    if code.co_flags & inspect.CO_VARARGS:
        args += known.get(code.co_varnames[end], ())
        end += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= known.get(code.co_varnames[end], {})
    return tuple(args), kwargs


_AROUND = ("method", "partial", "compiled", "dispatcher", "recorded")


def _find_function(call: object) -> FunctionView | None:
    """The function that runs first when something is called; None where a library's does."""
    for _ in range(100):  # things around things
        if isinstance(call, PartsView) and call.form in _AROUND and call.parts:
            call = call.parts[0]
        elif isinstance(call, ObjectView):
            found = _find_method(call.cls)
            return found if isinstance(found, FunctionView) else None
        else:
            break
    return call if isinstance(call, FunctionView) else None


def _find_method(cls: object) -> object:
    """`forward`, or else `__call__`, of a class of the user's or of one that it inherits from."""
    for name in ("forward", "__call__"):
        waiting, met = [cls], set()
        while waiting:
            at = waiting.pop(0)
            if isinstance(at, ClassView) and id(at) not in met:
                met.add(id(at))
                if name in at.attributes:
                    return at.attributes[name]
                waiting += at.bases
    return None


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


# --- for people, in a terminal ---


def print_record(record: ExecutionRecord, source: bool = False) -> None:
    """Print what is in a record."""
    console = Console(soft_wrap=True, highlight=False)
    manifest = record.manifest
    for line in _describe_content(manifest):
        console.print(_text(line))
    where = manifest.function
    console.print(Text(printable(where.name), "bold"), "at", _text(f"{where.file}:{where.line}"))
    console.print(_facts(record))
    for title, names in (("arguments", record.locals), ("globals", record.globals)):
        if names:
            console.print(_variables(title, names))
    for omission in manifest.omissions:
        console.print(_text(f"left out: {omission.what}: {omission.why}"))
    if source:
        for file, text in record.sources.items():
            console.print()
            console.print(_text(f"--- {file}"))
            console.print(Text(printable(text, keep="\n\t")), end="")


def _describe_content(manifest: Manifest) -> list[str]:
    """What somebody who is given the file is given of the user's."""
    held = ", ".join(manifest.holds) or "unknown: an older tripwire wrote it"
    lines = [f"holds of yours: {held}"]
    if manifest.redacted:
        lines.append(tell_redacted(manifest.redacted))
    lines.append("Look at all of it before you share it: docs/security.md.")
    return lines


def _facts(record: ExecutionRecord) -> Table:
    manifest = record.manifest
    table = Table.grid(padding=(0, 2))
    rows = {
        "outcome": explain(manifest.outcome),
        "verdict": f"{manifest.verdict.outcome} {manifest.verdict.text}".strip(),
        "compiled": _compiled(record),
        "written": manifest.created,
        "python": f"{manifest.python.version} ({manifest.platform})",
        "packages": " ".join(
            p for p in manifest.packages.split(" ") if p.partition("==")[0] in _NOTABLE
        ),
        "tensors kept": manifest.policy,
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, _text(value))
    return table


def _text(text: str) -> Text:
    """A record's own text, which is no markup."""
    return Text(printable(text))


_NOTABLE = ("torch", "numpy", "transformers", "tripwire")


def _compiled(record: ExecutionRecord) -> str:
    compiled = record.manifest.compiled
    if compiled is None:
        return ""
    return f"back end {compiled.backend}" + (", fullgraph" if compiled.fullgraph else "")


def _variables(title: str, names: dict[str, object]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for name, value in names.items():
        table.add_row(_text(name), _text(in_short(value)))
    return table


def in_short(value: object) -> str:
    """A value in one line."""
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"{value.dtype} {tuple(shape)}".removeprefix("torch.")
    text = " ".join(_Short().repr(value).split())
    return text if len(text) <= 100 else text[:97] + "..."


class _Short(reprlib.Repr):
    """A few items of a few levels: a whole repr may be too deep, or never end."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 12
        self.maxdeque, self.maxlong = 12, 100
        self.maxstring = self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 4096:  # Python writes no more than 4,300 digits
            return f"<int of {x.bit_length()} bits>"
        return super().repr_int(x, level)

    def repr_slice(self, x: slice, level: int) -> str:
        return f"slice{self.repr_tuple((x.start, x.stop, x.step), level)}"

    def _repr_kind_of_dict(self, x: dict[object, object], level: int) -> str:
        return f"{type(x).__name__}({self.repr_dict(x, level)})"

    repr_OrderedDict = repr_defaultdict = repr_Counter = _repr_kind_of_dict  # noqa: N815
