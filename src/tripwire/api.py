"""The public functions. Readers start here."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import torch
from torch import nn

from tripwire.backends.dynamo import find_default_backend
from tripwire.backends.registry import Backend, find_backend
from tripwire.dispatch.compiled import CompiledFunction, compile_callable
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.dispatch.pipeline import Failures, Options
from tripwire.env import is_own_code, torch_path
from tripwire.errors import (
    COUNT,
    COUNT_OR_NONE,
    FLAG,
    FLAG_OR_NONE,
    TEXT_OR_NONE,
    BadOption,
    Kind,
    check_kinds,
)
from tripwire.imports import HAS_GIL
from tripwire.tracing import Trace, Tracer
from tripwire.tracing.tracer import NEEDS_GIL
from tripwire.values.classes import isinstance
from tripwire.values.contents import name_callable
from tripwire.writes.patches import Patch, Patches

if TYPE_CHECKING:
    from tripwire.dispatch.compiled import WatchedCompile
    from tripwire.recording.capture.blocks import InBlock
    from tripwire.recording.capture.calls import Writing
    from tripwire.recording.capture.failures import OnError, OnRequest
    from tripwire.recording.capture.origin import Chooser

logger = logging.getLogger("tripwire.trace")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_M = TypeVar("_M", bound=nn.Module)


def trace(fn_or_module: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Trace:
    """Run a callable once, for real, and return what it computed as a graph.

    Arguments go to the callable as they are. `Tracer` takes the options.
    """
    return Tracer().trace_call(fn_or_module, args, kwargs, stacklevel=3)


# --- compile ---


class CompileOptions(TypedDict, total=False):
    """Options of `compile`, for type checkers; without `disable`, which decides the return type."""

    backend: str | Backend | None
    fullgraph: bool
    dynamic: bool | None
    mode: str | None
    options: dict[str, Any] | None
    name: str | None
    recompile_limit: int | None
    isolate_recompiles: bool
    shapes_spec: Any
    cache_size: int
    record_on_error: str | os.PathLike[str] | OnError | None
    on_backend_error: str | None
    check: bool
    wait: bool
    background: bool


# A module is a callable, too: of two overloads that fit, a type checker takes the first.
class Compiler(Protocol):
    """What `compile` returns without a callable: a decorator with the options in it."""

    @overload
    def __call__(self, module: _M, /) -> _M: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[_P, _R], /) -> CompiledFunction[_P, _R]: ...


class MaybeCompiler(Protocol):
    """The same if `disable` is only known at run time."""

    @overload
    def __call__(self, module: _M, /) -> _M: ...
    @overload
    def __call__(self, function: Callable[_P, _R], /) -> Callable[_P, _R]: ...


@overload
def compile(  # type: ignore[overload-overlap]  # as above
    model: _M, *, disable: bool = ..., **options: Unpack[CompileOptions]
) -> _M: ...
@overload
def compile(
    model: Callable[_P, _R], *, disable: Literal[False] = ..., **options: Unpack[CompileOptions]
) -> CompiledFunction[_P, _R]: ...
@overload
def compile(
    model: Callable[_P, _R], *, disable: bool, **options: Unpack[CompileOptions]
) -> Callable[_P, _R]: ...
@overload
def compile(
    model: None = ..., *, disable: Literal[False] = ..., **options: Unpack[CompileOptions]
) -> Compiler: ...
@overload
def compile(
    model: None = ..., *, disable: bool, **options: Unpack[CompileOptions]
) -> MaybeCompiler: ...
def compile(
    model: Any = None,
    *,
    backend: str | Backend | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
    name: str | None = None,
    recompile_limit: int | None = None,
    isolate_recompiles: bool = False,
    shapes_spec: Any = None,
    cache_size: int = 32,
    record_on_error: str | os.PathLike[str] | OnError | None = None,
    on_backend_error: str | None = None,
    check: bool = False,
    wait: bool = False,
    background: bool = False,
) -> Any:
    """Compile a function or a module. Without one, return a decorator that does.

    The first call runs as plain Python and is observed. Later calls run compiled code for as
    long as everything that the first one read is unchanged. Takes what `torch.compile` takes.

    A compiled module behaves like the module; a compiled function keeps its signature. A class is
    returned as it is, with calls of its instances compiled.

    backend: a name, or a callable `(GraphModule, example_inputs) -> callable`. Without it, the
        environment variable TRIPWIRE_BACKEND names the back end; without both, it is what
        `torch.compiler.set_default_backend` says, which is Inductor unless it was called.
    fullgraph: raise CannotTrace if a call can't be compiled, instead of running it as plain
        Python.
    dynamic: which sizes and numbers compiled code leaves open. None: those that vary, from the
        second trace on. True: all that are passed, from the start. False: none.
    mode, options: passed to the back end. Inductor's modes are "default", "lite",
        "reduce-overhead", "max-autotune" and "max-autotune-no-cudagraphs".
    disable: return the callable as it is.
    name: what messages call the callable.
    recompile_limit: how many entries (pieces of compiled code) are made at most. After that, calls
        that fit none of them run as plain Python; with fullgraph they raise CannotTrace.
    isolate_recompiles: accepted for torch.compile's sake. Every callable has its own entries.
    shapes_spec: accepted for torch.compile's sake, and ignored. See `dynamic`.
    cache_size: how many entries are kept; beyond that the least recently used one is dropped.
    record_on_error: a folder; a call that raises leaves a record there, which `tripwire replay`
        runs again. Pass `tripwire.record_on_error(folder, ...)` instead to say how much of each
        tensor is kept. By default, the environment variable TRIPWIRE_RECORD_DIR names the
        folder; "" means that nothing is recorded. Each record is replayed once, in a process of
        its own, to see whether the replay ends in the same way. This takes seconds;
        TRIPWIRE_RECORD_CHECK=0 turns it off.
    on_backend_error: what to do if the back end fails. "raise": raise BackendFailed. "eager":
        warn, and run the graph uncompiled, one torch call after another. The default is "eager"
        for a back end that is given by name, unless fullgraph is set, and "raise" for a callable
        of your own.
    check: run new compiled code once, on copies of the inputs. Raise WrongResult if it returns
        or writes something else than the observed call did.
    wait: one thread at a time traces and compiles. With `wait` or `fullgraph`, other calls that no
        entry fits wait for it, and then run its entry. Otherwise they run as plain Python.
    background: compile in another thread; calls run as plain Python until the entry is there. An
        error there is logged, and the next call that no entry fits raises it.
    """
    given = {name: value for name, value in locals().items() if name != "model"}
    if not HAS_GIL:
        raise BadOption(NEEDS_GIL, slug="free-threaded")
    if model is None:
        return lambda model: compile(model, **given)
    if not callable(model):
        raise BadOption(
            f"tripwire.compile takes a function or a module, not {type(model).__name__}."
            f"{_find_advice(model)}",
            slug="not-callable",
        )
    _check_options(given)
    given |= {option: bool(given[option]) for option in _FLAGS}
    if disable:
        return model
    if shapes_spec is not None:
        logger.warning("shapes_spec is ignored: tripwire leaves open what varies; see `dynamic`")
    return compile_callable(model, name or name_callable(model), _build_options(given))


def _build_options(given: dict[str, Any]) -> Options:
    """What `compile` was asked for, with what the environment says of the rest."""
    backend = given["backend"] or os.environ.get("TRIPWIRE_BACKEND") or find_default_backend()
    handed = {"mode": given["mode"], "options": _leave_out_filter(given["options"])}
    on_error, folder = given["on_backend_error"], given["record_on_error"]
    if folder is None:
        folder = os.environ.get("TRIPWIRE_RECORD_DIR")
    fullgraph, background = given["fullgraph"], given["background"]
    by_name = not callable(backend)
    return Options(
        find_backend(backend, given["mode"]),
        fullgraph=fullgraph,
        cache_size=given["cache_size"],
        backend_options=tuple((key, value) for key, value in handed.items() if value is not None),
        failures=_find_failures(folder),
        witness=_note_failed,
        eager_on_backend_error=on_error == "eager"
        or (on_error is None and by_name and not fullgraph),
        dynamic=given["dynamic"],
        check=given["check"],
        background=background,
        waits=given["wait"] or (fullgraph and not background),
        recompile_limit=given["recompile_limit"],
    )


def _find_advice(model: object) -> str:
    if isinstance(model, (classmethod, property)):
        return f" Put @{type(model).__name__} above @tripwire.compile."
    return ""


_FLAGS = ("fullgraph", "disable", "check", "wait", "background")
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(_FLAGS, FLAG),
    "dynamic": FLAG_OR_NONE,
    "mode": TEXT_OR_NONE,
    "options": ((Mapping, NoneType), "a dict or None"),
    "name": TEXT_OR_NONE,
    "recompile_limit": COUNT_OR_NONE,
    "cache_size": COUNT,
    "record_on_error": (
        (str, os.PathLike, Callable, NoneType),
        "a folder, or what tripwire.record_on_error returns",
    ),
}


def _check_options(given: dict[str, Any]) -> None:
    """Raise BadOption for what can't be asked of `compile`."""
    check_kinds(given, _KINDS)
    if given["mode"] is not None and given["options"] is not None:
        raise BadOption(
            "mode and options were both given. Inductor takes one of them.", slug="bad-option"
        )
    for name in ("cache_size", "recompile_limit"):
        if given[name] is not None and given[name] < 1:
            raise BadOption(f"{name} is {given[name]}; it must be at least 1.", slug="bad-option")
    if given["on_backend_error"] not in ("raise", "eager", None):
        raise BadOption(
            f'on_backend_error is {given["on_backend_error"]!r}; it must be "raise" or "eager".',
            slug="bad-option",
        )
    if given["background"] and (given["wait"] or given["check"]):
        raise BadOption(
            f"background=True and {'wait' if given['wait'] else 'check'}=True were both given: "
            "in the background nobody waits for compiled code.",
            slug="bad-option",
        )


def _leave_out_filter(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Without what chooses among Dynamo's guards: tripwire needs all of its own."""
    if not options or "guard_filter_fn" not in options:
        return options
    logger.warning(
        "guard_filter_fn is ignored: it filters Dynamo's guards, and tripwire has its own"
    )
    return {key: value for key, value in options.items() if key != "guard_filter_fn"} or None


# --- torch.compile's calls ---


@contextmanager
def replacing_torch_compile(**options: Unpack[CompileOptions]) -> Iterator[None]:
    """Inside this block `torch.compile` is `tripwire.compile`, in libraries and all threads, too.

        with tripwire.replacing_torch_compile():
            trainer.train()

    So are `torch.compiler.compile` and `nn.Module.compile`, and names that were imported before.
    What torch compiles for itself stays torch's. What was compiled inside stays tripwire's
    afterwards. `options` are passed to `tripwire.compile`; they override those of the calls.
    """
    checked: dict[str, Any] = {**options, "disable": True}
    compile(len, **checked)  # raises for what it can't take
    user = next(_users)
    _replacements.append(options)
    _REPLACING.enter(user)
    try:
        yield
    finally:
        _REPLACING.leave(user)
        _replacements.remove(options)


def watch_torch_compile(compiled: Callable[..., Any], *, check: bool = False) -> WatchedCompile:
    """Watch what torch.compile compiled: which writes made it recompile, and which didn't.

        model = tripwire.watch_torch_compile(torch.compile(model))
        ...
        for sighting in model.sightings: print(sighting)

    Each sighting says what was written, by whom (where Python can tell), and whether torch.compile
    recompiled or kept its code. The first call of a kind, and the second after a change, run as
    plain Python and are observed; all others run torch.compile's code.

    check: if torch.compile kept its code, compare its result with that of a plain call, which gets
        copies of the callable and its arguments. What that call writes elsewhere is written twice.
    """
    from tripwire.dispatch.compiled import WatchedCompile  # only where it is asked for

    return WatchedCompile(compiled, check)


def _replace_compile(plain: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(compile).parameters.keys()

    def compile_instead(model: Any = None, **options: Any) -> Any:
        if _is_torchs_own_call() or not _replacements:
            return plain(model, **options)
        options |= _replacements[-1]
        for name in options.keys() - known:
            logger.warning("torch.compile(%s=...): tripwire ignores this option", name)
        return compile(model, **{name: options[name] for name in options.keys() & known})

    return compile_instead


def _is_torchs_own_call() -> bool:
    """Whether torch calls torch.compile for itself, as flex_attention does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = torch_path(frame.f_code.co_filename)
        if path not in _PASSING_ON and not is_own_code(frame.f_code):
            return path is not None
        frame = frame.f_back
    return False


# Files of torch in which a call of torch.compile is handed on for a caller.
_PASSING_ON = ("compiler/__init__.py", "nn/modules/module.py")
_REPLACING = Patches(lambda: (Patch(torch, "compile", _replace_compile),))
_replacements: list[CompileOptions] = []  # options of the blocks that go on, innermost last
_users = itertools.count()


def _find_failures(folder: str | os.PathLike[str] | OnError | None) -> Failures | None:
    if not folder:
        return None
    from tripwire.recording.capture.failures import FailureRecorder  # only where it is asked for

    return FailureRecorder.into(folder)


def _note_failed(
    dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> None:
    """Keep a failed call for `record_last`."""
    from tripwire.recording.capture.failures import (
        note_failed,  # no program that runs well needs it
    )

    note_failed(dispatcher, args, kwargs, error)


# --- records ---


def record_on_error(
    path: str | os.PathLike[str],
    *,
    tensors: str | Mapping[str, str] | Chooser = "full",
    max_bytes: int | None = None,
    check: bool = True,
) -> OnError:
    """Record the calls of a function that raise: a decorator, and an option of `compile`.

        @tripwire.record_on_error("records")
        def step(batch): ...

    path: a file that ends in .rec. Any other path, such as "x.txt", is that of a folder; it is made
        if it isn't there, and each record in it gets a name of its own.
    tensors: how much of each tensor is kept: "full", "statistics", "shape" or "redacted"; or a
        mapping from patterns of paths to these (`{"args[0]*": "shape"}`); or a function of path
        and tensor that returns one of them.
    max_bytes: above this many bytes in all, the largest tensors are kept as statistics.
    check: replay the record once, in a process of its own, and write the verdict into it.
    """
    from tripwire.recording.capture.failures import OnError

    return OnError(_describe_writing(path, tensors, max_bytes, check))


def record_call(
    path: str | os.PathLike[str],
    *,
    tensors: str | Mapping[str, str] | Chooser = "full",
    max_bytes: int | None = None,
    check: bool = True,
) -> OnRequest:
    """Record one call, whether it returns or raises. Takes the options of `record_on_error`.

        written = tripwire.record_call("records")(model, batch, mask=mask)

    The returned object takes the callable and its arguments, runs the call, and returns the
    record's path. An exception of the call goes into the record, and isn't raised.
    """
    from tripwire.recording.capture.failures import OnRequest

    return OnRequest(_describe_writing(path, tensors, max_bytes, check))


def record_block(
    path: str | os.PathLike[str],
    *,
    tensors: str | Mapping[str, str] | Chooser = "full",
    max_bytes: int | None = None,
    check: bool = True,
) -> InBlock:
    """Record a `with` block, whether it ends or raises. Takes the options of `record_on_error`.

        with tripwire.record_block("records") as recording:
            ...
        recording.path

    An exception of the block is raised as usual.
    """
    from tripwire.recording.capture.blocks import InBlock

    return InBlock(_describe_writing(path, tensors, max_bytes, check))


def _describe_writing(
    path: str | os.PathLike[str],
    tensors: str | Mapping[str, str] | Chooser,
    max_bytes: int | None,
    check: bool,
) -> Writing:
    from tripwire.recording.capture.calls import Writing
    from tripwire.recording.capture.origin import Policy

    check_kinds({"check": check}, {"check": FLAG})
    return Writing.to(path, Policy(tensors, max_bytes), check)
