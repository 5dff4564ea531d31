"""Record: what one execution had: its code, its variables, the modules that it looked into.

There is one model of it, `ExecutionRecord`. An `ExecutionRecorder` fills it, from a call or from
what a user adds by hand; opening a file fills it, too. A record from a file is inert: code and
objects are descriptions. Every record can be written, and what was written can be replayed.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import IO, Any, BinaryIO, TypeGuard, cast

import msgspec

from tripwire.errors import check_kinds
from tripwire.reading.bytecode import find_uses
from tripwire.reading.uses import Step, StepKind, Uses, join
from tripwire.recording.capture.draft import RecordDraft
from tripwire.recording.capture.origin import (
    KEEP_ALL,
    Patch,
    Policy,
    find_library,
    is_packaged_file,
)
from tripwire.recording.capture.wrapped import RECORDED
from tripwire.recording.format.container import Content, write_members, write_new
from tripwire.recording.format.decode import view
from tripwire.recording.format.file import NewRecord, Record
from tripwire.recording.format.manifest import Manifest, Where
from tripwire.recording.format.views import (
    ClassView,
    FunctionView,
    LibraryView,
    ModuleView,
    ObjectView,
    PartsView,
)
from tripwire.values.classes import isinstance
from tripwire.values.contents import all_codes, find_function, name_of_module, own_dict


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
_ABSENT = object()
# For whoever looks: no replay needs them.
SHOWN = ("locals", "builtins", "accessed", "code_options")
# Makes a call that its first argument is, and then the backward of it.
_BACKWARD = ("tripwire.recording.capture.failures", "differentiate")


@dataclass
class ExecutionRecord:
    """One execution. If it comes from a file, code, functions and objects are descriptions."""

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
    call: object = None  # what was called: a module, for one. None: the code, with the locals
    generators: Variables = field(default_factory=dict)  # states of those that it drew from
    backend: object = None  # that it was compiled with, if it is no known one
    patches: list[Patch] = field(default_factory=list)  # of libraries, while it ran
    # What the code takes from Python modules, by their names in it: {"torch": ("nn.functional",)}
    accessed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    origin: Path | bytes | None = field(default=None, repr=False)  # the file, or what was in it

    def dump(self, file: IO[bytes] | str | os.PathLike[str]) -> None:
        """Write it. A path that exists is left alone: the record gets another name beside it."""
        if self.origin is not None:
            with _open(self.origin) as record:
                _write(record.contents(), file)
        else:
            whole = self if self.call is not None else self._with_call()
            draft = take_down(whole.call, whole.args, whole.kwargs)
            _write(whole.build(draft).members(), file)

    def build(self, draft: RecordDraft) -> NewRecord:
        """The file of it: what was taken down, and the rest as it is now."""
        for name in (*SHOWN, "generators"):
            if getattr(self, name):
                draft.add(name, dict(getattr(self, name)))
        if self.patches:
            draft.add("patches", list(self.patches))
        if self.backend is not None:
            draft.add("backend", self.backend)
        return draft.build(self.manifest)

    def _with_call(self) -> ExecutionRecord:
        """The same with a call of its code, with the arguments that are among the locals."""
        code, cells = self.code, cast("Any", self.closure)
        if not isinstance(code, CodeType):
            raise TypeError("This record has no code, so there is nothing to write.")
        # A builtin that isn't Python's own is found like a global.
        own = {n: v for n, v in self.builtins.items() if vars(builtins).get(n) is not v}
        space = {name: _as_module(value) for name, value in {**own, **self.globals}.items()}
        known = {name: _as_module(value) for name, value in self.locals.items()}
        args, kwargs = (self.args, self.kwargs) if self.args or self.kwargs else _bind(code, known)
        place = Where(code.co_qualname, code.co_filename, code.co_firstlineno)
        return replace(
            self,
            call=FunctionType(code, space, code.co_name, None, cells or None),
            args=tuple(args),
            kwargs=dict(kwargs),
            locals=known,
            manifest=msgspec.structs.replace(self.manifest, function=place),
        )

    @classmethod
    def load(cls, file: IO[bytes] | str | os.PathLike[str]) -> ExecutionRecord:
        """Open one. Nothing of it runs and nothing is imported."""
        is_file = hasattr(file, "read")
        origin = cast("IO[bytes]", file).read() if is_file else Path(cast("str", file)).absolute()
        with _open(origin) as record:
            return cls._of(record, origin)

    @classmethod
    def _of(cls, record: Record, origin: Path | bytes) -> ExecutionRecord:
        roots: dict[str, Any] = view(record.table, record.blobs, record.read)
        call, args = roots.get("call"), roots.get("args")
        is_backward = isinstance(call, LibraryView) and (call.module, call.name) == _BACKWARD
        code = _find_function(args[0] if is_backward and isinstance(args, tuple) else call)
        details: dict[str, Any] = dict(code.details) if code is not None else {}
        space, patches = details.get("globals"), roots.get("patches")
        named = ("locals", "builtins", "code_options", "kwargs", "generators", "accessed")
        return cls(
            code,
            tuple(details.get("closure") or ()),
            globals=dict(space.attributes) if isinstance(space, ModuleView) else {},
            manifest=record.manifest,
            args=args if isinstance(args, tuple) else (),
            sources=_read_sources(record),
            call=call,
            backend=roots.get("backend"),
            patches=patches if isinstance(patches, list) else [],
            origin=origin,
            **{name: _as_dict(roots.get(name)) for name in named},
        )


def take_down(
    call: object, args: tuple[Any, ...], kwargs: Variables, policy: Policy = KEEP_ALL
) -> RecordDraft:
    """A call and what it is given, as they are now. Bytes of tensors are read when it is built."""
    draft = RecordDraft(policy)
    draft.add("call", call)
    draft.add("args", args)
    draft.add("kwargs", kwargs)
    return draft


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
    positional = code.co_varnames[: code.co_argcount]
    keywords = code.co_varnames[code.co_argcount : end]
    first = list(itertools.takewhile(known.__contains__, positional))
    args = [known[name] for name in first]
    rest = (*positional[len(first) :], *keywords)
    kwargs = {name: known[name] for name in rest if name in known}
    if code.co_flags & inspect.CO_VARARGS:
        args += known.get(code.co_varnames[end], ())
        end += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= known.get(code.co_varnames[end], {})
    return tuple(args), kwargs


_AROUND = ("method", "partial", "lru_cache", "compiled", "dispatcher", "recorded")


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
    """Collects what an execution has: what is added by hand, or everything of a call."""

    code: CodeType | None
    closure: tuple[CellType, ...] = ()
    globals: Variables = field(default_factory=dict)
    locals: Variables = field(default_factory=dict)
    builtins: Variables = field(default_factory=dict)
    code_options: Variables = field(default_factory=dict)
    name_to_modrec: dict[str, ModuleRecord] = field(default_factory=dict)
    call: object = None
    args: tuple[Any, ...] = ()
    kwargs: Variables = field(default_factory=dict)

    @classmethod
    def of_call(
        cls,
        call: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Variables | None = None,
        user: Callable[..., Any] | None = None,
    ) -> ExecutionRecorder:
        """That of one call: its code, its arguments, and the globals that the code names.

        Of a Python module, the attributes that the code names were accessed. What is behind all of
        these is found again when the record is written. user: whose code it is, if not the call's.
        """
        target = call if user is None else user
        function = find_function((own_dict(target) or {}).get(RECORDED, target))
        kwargs = kwargs or {}
        recorder = cls(
            None if function is None else function.__code__,
            () if function is None else function.__closure__ or (),
            locals=_find_locals(call, args, kwargs),
            builtins=_find_builtins(function),
            call=call,
            args=args,
            kwargs=kwargs,
        )
        if function is not None and not is_packaged_file(function.__code__.co_filename):
            recorder._add_globals(function)
        return recorder

    def _add_globals(self, function: FunctionType) -> None:
        uses = join(map(find_uses, all_codes(function.__code__)))
        for name in sorted(uses.globals.keys() & function.__globals__.keys()):
            value = function.__globals__[name]
            if _has_name(value):
                self.add_global_var(name, value)
                self._add_attributes(value, uses, Step(StepKind.GLOBAL, name))
            else:
                self.globals[name] = value
        for name, module in _free_modules(function.__code__, function.__closure__ or ()):
            self._add_attributes(module, uses, Step(StepKind.FREE, name))

    def _add_attributes(self, module: ModuleType, uses: Uses, step: Step) -> None:
        """What the code takes from a module, and from the modules in it: `torch.nn.functional`."""
        use = uses.steps.get(step)
        known = self._record_of(module).accessed_attrs
        for name in sorted(use.attributes - known.keys()) if use is not None else ():
            value = (own_dict(module) or {}).get(name, _ABSENT)
            if _has_name(value):
                self.record_module_access(module, name, value)
                self._add_attributes(value, uses, Step(StepKind.ATTRIBUTE, name))
            elif value is not _ABSENT:
                known[name] = value

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
        free = _free_modules(self.code, self.closure)
        known = {name: self.name_to_modrec.get(module.__name__) for name, module in free}
        return ExecutionRecord(
            self.code,
            self.closure,
            {name: _resolve(value, dummies) for name, value in self.globals.items()},
            {name: _resolve(value, dummies) for name, value in self.locals.items()},
            dict(self.builtins),
            dict(self.code_options),
            args=self.args,
            kwargs=self.kwargs,
            call=self.call,
            accessed={
                name: tuple(_list_accessed(value, frozenset()))
                for name, value in (known | self.globals).items()
                if isinstance(value, ModuleRecord) and value.accessed_attrs
            },
        )

    def _recorded(self, value: Any) -> Any:
        return self._record_of(value) if isinstance(value, ModuleType) else value

    def _record_of(self, module: ModuleType) -> ModuleRecord:
        return self.name_to_modrec.setdefault(module.__name__, ModuleRecord(module))


def _has_name(value: object) -> TypeGuard[ModuleType]:
    """Whether it is a module that can be told by its name; somebody may have taken that away."""
    return isinstance(value, ModuleType) and bool(name_of_module(value))


def _free_modules(
    code: CodeType | None, closure: tuple[CellType, ...]
) -> Iterator[tuple[str, ModuleType]]:
    """The modules in a function's closure, by the names of its free variables."""
    for name, cell in zip(() if code is None else code.co_freevars, closure, strict=False):
        if cell != CellType() and _has_name(cell.cell_contents):  # an empty cell has no contents
            yield name, cell.cell_contents


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


def _list_accessed(record: ModuleRecord, around: frozenset[int]) -> Iterator[str]:
    """The attributes that were taken from a module, and from the modules in it: `path.sep`."""
    around |= {id(record)}
    for name, value in record.accessed_attrs.items():
        nests = isinstance(value, ModuleRecord) and id(value) not in around
        inner = list(_list_accessed(value, around)) if nests else []
        yield from (f"{name}.{each}" for each in inner) if inner else (name,)


def _find_locals(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Variables) -> Variables:
    """Arguments by the names that the function has for them."""
    torch = sys.modules.get("torch")
    is_module = torch is not None and isinstance(call, torch.nn.Module)
    try:
        signature = inspect.signature(cast("Any", call).forward if is_module else call)
        return dict(signature.bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {}


def _find_builtins(function: FunctionType | None) -> Variables:
    """The builtins that a function's code names; a library's code isn't in a record.

    What somebody put into builtins is among the globals.
    """
    if function is None or is_packaged_file(function.__code__.co_filename):
        return {}
    names = {name for code in all_codes(function.__code__) for name in find_uses(code).globals}
    found = {
        name: vars(builtins)[name]
        for name in sorted(names & vars(builtins).keys() - function.__globals__.keys())
    }
    return {name: value for name, value in found.items() if find_library(value) is not None}


def check_path(path: object) -> None:
    """Raise BadOption for what can't be a record's path."""
    check_kinds({"path": path}, {"path": ((str, os.PathLike), "the path of a record")})


def load_record(path: str | os.PathLike[str]) -> ExecutionRecord:
    """Open a record to look at it. This runs none of its code, and imports nothing."""
    check_path(path)
    return ExecutionRecord.load(path)
