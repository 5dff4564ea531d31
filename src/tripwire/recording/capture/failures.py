"""Failures: a call that raises leaves a record.

Whatever goes wrong with the record is logged; the call's own exception is what is raised.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shlex
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from tripwire.backends.registry import (
    backend_name,
    eager,
    find_backend,
    find_known,
    takes_graphs_as_they_are,
)
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.dispatch.entry import Entry
from tripwire.dispatch.pipeline import Options
from tripwire.errors import BadOption, CannotReplay
from tripwire.recording.capture.calls import Beginning, Writing, log, name_of_error
from tripwire.recording.capture.outcomes import check_record, describe_error, describe_result
from tripwire.recording.capture.wrapped import RECORDED
from tripwire.recording.format.file import Record, copy_record
from tripwire.recording.format.manifest import Compiled, Outcome
from tripwire.telemetry.compiles import RECORD
from tripwire.telemetry.log import emit
from tripwire.telemetry.schema import RecordWritten
from tripwire.tracing.state import CURRENT
from tripwire.values.classes import isinstance
from tripwire.values.contents import name_callable
from tripwire.writes.patches import Patch, Patches

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
FAILED = (Exception, KeyboardInterrupt)  # an interrupt tells where a call was stuck


@dataclass(frozen=True, slots=True)
class FailureRecorder:
    """Records the failing calls of compiled callables (dispatch.pipeline.Failures)."""

    writing: Writing

    @staticmethod
    def into(place: str | os.PathLike[str] | OnError) -> FailureRecorder:
        """Records go into a folder, each under a name of its own."""
        return FailureRecorder(place.writing if isinstance(place, OnError) else Writing.to(place))

    def run(self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        beginning = Beginning(dispatcher.target, args, kwargs, self.writing.policy)
        try:
            CURRENT.kept = beginning
            result = dispatcher(*args, **kwargs)
        except FAILED as error:
            CURRENT.kept = None
            record_failure(self.writing, beginning, dispatcher.name, error, dispatcher)
            raise
        finally:
            CURRENT.kept = None
        alone = beginning.code_error
        if alone is not None:
            record_failure(self.writing, beginning, dispatcher.name, alone, dispatcher, hit=True)
        else:
            beginning.succeed()
        _watch_backward(self.writing, beginning, dispatcher.name, result, dispatcher)
        return result


@dataclass(frozen=True, slots=True)
class Ended:
    """A call that is over, and all that a record of it needs."""

    beginning: Beginning
    name: str
    outcome: Outcome
    compiled: Compiled | None = None
    backend: object = None

    @staticmethod
    def by(
        error: BaseException,
        beginning: Beginning,
        name: str,
        dispatcher: Dispatcher | None,
        hit: bool = False,
    ) -> Ended:
        """A call that raised. hit: compiled code raised, though its traceback may not show it."""
        run = Entry.run.__code__
        frames = traceback.walk_tb(error.__traceback__)
        hit = hit or any(frame.f_code is run for frame, _ in frames)
        outcome = describe_error(error, None if hit else beginning.target)
        return Ended(beginning, name, outcome, *_describe_compiled(dispatcher, hit))

    def write(self, writing: Writing) -> Path:
        """Write its record. Raises what the file system raises."""
        with RECORD:
            built = self.beginning.build(self.name, self.outcome, self.compiled, self.backend)
            path = built.write(writing.find_path(self.name, self.outcome))
            if writing.check:
                try:
                    check_record(path)
                except OSError as error:  # a full disk, say: the record is whole without it
                    log.warning("The record %s has no verdict: %s", path, error)
        raised = name_of_error(self.outcome)
        emit(RecordWritten, path=str(path), function=self.name, exception=raised)
        return path


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call whose record is in a file: its arguments may have changed since."""

    path: Path
    name: str
    outcome: Outcome

    def write(self, writing: Writing) -> Path:
        """Write its record again."""
        return copy_record(self.path, writing.find_path(self.name, self.outcome))


def _describe_compiled(
    dispatcher: Dispatcher | None, hit: bool = False
) -> tuple[Compiled | None, object]:
    if dispatcher is None:
        return None, None
    options = dispatcher.options
    name = backend_name(options.backend)
    own = None if find_known(name) is options.backend else options.backend
    return Compiled(name, options.fullgraph, hit, options.check), own


def record_failure(
    writing: Writing,
    beginning: Beginning,
    name: str,
    error: BaseException,
    dispatcher: Dispatcher | None = None,
    hit: bool = False,
) -> Path | None:
    """Write the record of a call that raised, and say so in a note on the exception.

    Nobody waits for the replay of a call that was interrupted: it may take as long again.
    """
    if not isinstance(error, Exception):
        writing = replace(writing, check=False)
    try:
        ended = Ended.by(error, beginning, name, dispatcher, hit)
        note_last(ended, error)
        path = ended.write(writing)
        note_last(WrittenCall(path, name, ended.outcome), error)
        with contextlib.suppress(Exception):  # an exception of the user's may take no notes
            error.add_note(_tell_where(path))
    except OSError as trouble:
        log.error("The failing call of %s could not be recorded: %s", name, trouble)
        return None
    except Exception:
        log.exception("The failing call of %s could not be recorded.", name)
        return None
    return path


def _tell_where(path: Path) -> str:
    """Where a record is, and what can be done with it."""
    with Record.open(path) as record:
        verdict = record.manifest.verdict
    shown = shlex.quote(str(path))
    if verdict.outcome == "differs":
        return f"tripwire recorded this call, but {verdict.text}. Look at it: tripwire show {shown}"
    return f"tripwire recorded this call. See it again: tripwire replay {shown} --trust"


# --- plain callables ---


def run_recorded(
    writing: Writing, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a plain callable; record the call if it raises."""
    if CURRENT.kept is not None or CURRENT.tracing:  # whoever is outside records
        return target(*args, **kwargs)
    beginning = CURRENT.kept = Beginning(target, args, kwargs, writing.policy)
    try:
        result = beginning.run_plainly(target, args, kwargs)
    except FAILED as error:
        CURRENT.kept = None
        record_failure(writing, beginning, name_of_callable(target), error)
        raise
    finally:
        CURRENT.kept = None
    beginning.succeed()
    _watch_backward(writing, beginning, name_of_callable(target), result)
    return result


def _watch_backward(
    writing: Writing,
    called: Beginning,
    name: str,
    result: object,
    dispatcher: Dispatcher | None = None,
) -> None:
    """Record the call if a backward from its results raises. The record makes both again."""
    if not torch.is_grad_enabled():
        return
    chosen = eager if dispatcher is None else dispatcher.options.backend
    # The backward of the graph's own calls is the plain one. A user's own back end has no name.
    is_plain = chosen is eager or takes_graphs_as_they_are(chosen)
    backend = None if is_plain else backend_name(chosen)

    try:
        find_call = hold((called.target, called.args, called.kwargs), result)
    except TypeError:  # something that can't be referred to weakly
        return
    copies, policy = called.copies, writing.policy

    def failed(error: BaseException, gradients: Gradients) -> None:
        try:
            target, args, kwargs = find_call()
        except Gone:
            log.info("A backward of %s failed, and what it was called with is gone.", name)
            return
        parts = target, args, kwargs, gradients, backend
        beginning = Beginning(differentiate, parts, {}, policy)
        beginning.copies, beginning.shown, beginning.late = copies, target, True
        record_failure(writing, beginning, name, error)

    _watch_results(result, (called.args, called.kwargs), failed)


def name_of_callable(target: Any) -> str:
    """What records call it."""
    return name_callable(target, "__qualname__")


def _check_callable(target: object) -> None:
    if not callable(target):
        raise BadOption(
            f"Calls are recorded of functions, modules and callable objects, not of "
            f"{type(target).__name__}.",
            slug="not-callable",
        )


_RUN_LATER = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)


@dataclass(frozen=True, slots=True)
class OnError:
    """Records the calls of a function that raise (`tripwire.record_on_error`)."""

    writing: Writing

    def __call__(self, function: _F) -> _F:
        _check_callable(function)
        if isinstance(function, type):
            raise BadOption(
                f"{name_of_callable(function)} is a class. Record one of its methods, such as "
                "__call__ or forward.",
                slug="not-recordable",
            )
        if any(asks(function) for asks in _RUN_LATER):
            raise BadOption(
                f"{name_of_callable(function)} is a generator or a coroutine function: its code "
                "runs after the call. Record the function that does the work.",
                slug="not-recordable",
            )
        writing = self.writing

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            return run_recorded(writing, function, args, kwargs)

        setattr(recorded, RECORDED, function)
        return recorded  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class OnRequest:
    """Runs one call and writes its record, however the call ends (`tripwire.record_call`)."""

    writing: Writing

    def __call__(self, fn: Callable[_P, Any], /, *args: _P.args, **kwargs: _P.kwargs) -> Path:
        """Where the record is. What the call raises is in the record, and isn't raised here."""
        _check_callable(fn)
        dispatcher = find_dispatcher(fn)
        target = fn if dispatcher is None else dispatcher.target
        name = name_of_callable(target) if dispatcher is None else dispatcher.name
        beginning = Beginning(target, args, kwargs, self.writing.policy)
        outer, CURRENT.kept = CURRENT.kept, beginning
        try:
            beginning.before_run()
            if dispatcher is None:
                result = beginning.run_plainly(fn, args, kwargs)
            else:
                result = dispatcher(*args, **kwargs)
        except Exception as error:
            ended = Ended.by(error, beginning, name, dispatcher)
        else:  # trouble with describing it isn't the call's
            ended = Ended(beginning, name, describe_result(result), *_describe_compiled(dispatcher))
        finally:
            CURRENT.kept = outer
        return ended.write(self.writing)


# --- the latest failure ---

_last: Ended | WrittenCall | None = None
_lock = threading.Lock()


def note_last(ended: Ended | WrittenCall, error: BaseException) -> None:
    """Keep a failed call, in place of the one before, so that it can be recorded later."""
    global _last
    with _lock:
        _last = None if _ran_out_of_memory(error) else ended


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out: keeping the call would keep its tensors alive."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # on the CPU
            return True
        error = error.__cause__
    return False


def note_failed(
    dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> None:
    """A compiled call that nobody armed raised (dispatch.pipeline.Witness)."""
    try:
        beginning = Beginning(dispatcher.target, args, kwargs)
        beginning.late = True
        note_last(Ended.by(error, beginning, dispatcher.name, dispatcher), error)
    except Exception:
        log.exception("The failing call of %s could not be kept.", dispatcher.name)


def record_last(path: str | os.PathLike[str]) -> Path:
    """Write a record of the latest call of a compiled or decorated function that raised.

    Returns the record's path. The call is kept until then, or until another one fails. If the call
    wasn't set up to be recorded, the values are those that it left behind, and the record says so.
    """
    global _last
    writing = Writing.to(path)
    with _lock:
        ended, _last = _last, None
    if ended is None:
        raise CannotReplay(
            "There is no failed call to record: no compiled or decorated function has raised, "
            "or its failure was recorded already.",
            slug="nothing-failed",
        )
    return ended.write(writing)


# --- backwards ---
#
# A backward that fails is a failure of the call whose results it came from. The call has returned
# by then. Its results' nodes report when a backward reaches them, and with which gradients; torch's
# engine reports that a backward raised. The record makes the call again, and then the backward.


Gradients = list[torch.Tensor | None]  # of a call's results that have a node, in order
Failed = Callable[[BaseException, Gradients], None]


def differentiate(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    gradients: Gradients,
    backend: str | None,
) -> None:
    """Make a call, and the backward from its results.

    backend: compile it first; the first call makes the code, which the second runs.
    """
    if backend is not None:
        call = Dispatcher(call, "call", Options(find_backend(backend)))
        call(*args, **kwargs)
    tensors = _find_results(call(*args, **kwargs))
    known = [(t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None]
    torch.autograd.backward([t for t, _ in known], [g for _, g in known])


def _find_results(result: object) -> list[torch.Tensor]:
    leaves = tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


class Gone(Exception):
    """Something that a call was given has died since."""


def hold(value: Any, result: object) -> Callable[[], Any]:
    """What gives a value back later, or raises `Gone`: tensors are kept alive, objects aren't.

    Nodes of autograd will hold it, where no collector finds circles: an object may lead to the
    call's own result, as may a tensor that the call changed in place.
    """
    nodes = [tensor.grad_fn for tensor in _find_results(result)]

    def hold_one(value: Any) -> Callable[[], Any]:
        cls = type(value)
        if cls is list or cls is tuple:
            parts = [hold_one(part) for part in value]
            return lambda: cls(part() for part in parts)
        if cls is dict:
            items = [(key, hold_one(part)) for key, part in value.items()]
            return lambda: {key: part() for key, part in items}
        is_own = isinstance(value, torch.Tensor) and any(value.grad_fn is node for node in nodes)
        if cls in _PLAIN or (isinstance(value, torch.Tensor) and not is_own):
            return lambda: value
        if cls is MethodType:
            return _find_alive(weakref.WeakMethod(value))
        return _find_alive(weakref.ref(value))

    return hold_one(value)


_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def _find_alive(ref: Callable[[], Any]) -> Callable[[], Any]:
    def find() -> Any:
        value = ref()
        if value is None:
            raise Gone
        return value

    return find


class _Watched:
    """A call whose results have gradients to come. Their nodes hold it."""

    def __init__(self, count: int, failed: Failed) -> None:
        self.gradients: Gradients = [None] * count
        self.failed = failed

    def watch(self, tensor: torch.Tensor, at: int) -> None:
        number = tensor.output_nr

        def begin(grads: tuple[torch.Tensor | None, ...]) -> None:
            self.gradients[at] = grads[number]
            if _begun.latest is not None:
                _begun.latest.append(self)
            elif _running:  # in a thread of the engine's: the latest backward that began is likely
                _running[-1].append(self)

        assert tensor.grad_fn is not None
        tensor.grad_fn.register_prehook(begin)


class _Begun(threading.local):
    latest: list[_Watched] | None = None  # the calls that this thread's backward came to


_begun = _Begun()
_running: list[list[_Watched]] = []


def _watch_results(result: object, given: object, failed: Failed) -> None:
    """Have `failed` told of a backward that comes to these results of a call, and raises there.

    given: what the call was given. A backward that has come so far has left the call.
    """
    tensors = _find_results(result)
    if not tensors:
        return
    watched = _Watched(len(tensors), failed)
    nodes = [tensor.grad_fn for tensor in tensors]
    for tensor in _find_results(given):
        assert tensor.grad_fn is not None
        if not any(tensor.grad_fn is node for node in nodes):
            tensor.grad_fn.register_prehook(_leave(weakref.ref(watched)))
    _PATCHES.enter(id(watched))
    weakref.finalize(watched, _let_go, id(watched)).atexit = False
    for at, tensor in enumerate(tensors):
        watched.watch(tensor, at)
    while _dead:
        _PATCHES.leave(_dead.popleft())


def _leave(find: Callable[[], _Watched | None]) -> Callable[..., None]:
    def leave(grads: object) -> None:
        watched = find()
        for begun in _running:
            if watched in begun:
                begun.remove(watched)

    return leave


_dead: deque[int] = deque()


def _let_go(user: int) -> None:
    """May come at any time, also while the patches are being put in place."""
    if not _PATCHES.try_leave(user):
        _dead.append(user)


def _wrap_engine(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        begun: list[_Watched] = []
        before, _begun.latest = _begun.latest, begun
        _running.append(begun)
        try:
            return run(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if begun:  # the latest is where the engine was
                begun[-1].failed(error, begun[-1].gradients)
            raise
        finally:
            _begun.latest = before
            _running[:] = [one for one in _running if one is not begun]

    return run_backward


_PATCHES = Patches(lambda: (Patch(torch.autograd.graph, "_engine_run_backward", _wrap_engine),))
