"""Failures: a call that raises leaves a record.

Whatever goes wrong with the record is logged; the call's own exception is what is raised.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from tripwire.backends.registry import find_known, name_of
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.dispatch.entry import Entry
from tripwire.errors import BadOption, CannotReplay
from tripwire.recording.beginning import Beginning, log
from tripwire.recording.block import build_block
from tripwire.recording.calls import Writing, replay_command, write_call
from tripwire.recording.format import Compiled, Outcome, Returned, copy_record
from tripwire.recording.outcomes import describe_error, describe_result
from tripwire.recording.recompiled import RECORDED
from tripwire.tracing.state import CURRENT
from tripwire.values.classes import isinstance

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class Failures:
    """Records the failing calls of compiled callables (dispatch.options.Failures)."""

    writing: Writing

    @staticmethod
    def into(place: str | os.PathLike[str] | OnError) -> Failures:
        """Records go into a folder, each under a name of its own."""
        return Failures(place.writing if isinstance(place, OnError) else Writing.to(place))

    def run(self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        beginning = Beginning(dispatcher.target, args, kwargs, self.writing.policy)
        try:
            CURRENT.kept = beginning
            result = dispatcher(*args, **kwargs)
        except Exception as error:
            CURRENT.kept = None
            record_failure(self.writing, beginning, dispatcher.name, error, dispatcher)
            raise
        finally:
            CURRENT.kept = None
        beginning.succeed()
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
        error: Exception, beginning: Beginning, name: str, dispatcher: Dispatcher | None
    ) -> Ended:
        """A call that raised."""
        run = Entry.run.__code__
        hit = any(frame.f_code is run for frame, _ in traceback.walk_tb(error.__traceback__))
        outcome = describe_error(error, None if hit else beginning.target)
        return Ended(beginning, name, outcome, *_describe_compiled(dispatcher, hit))

    def write(self, writing: Writing) -> Path:
        """Write its record."""
        return write_call(
            writing, self.beginning, self.name, self.outcome, self.compiled, self.backend
        )


@dataclass(frozen=True, slots=True)
class Written:
    """A call whose record is in a file: what it was given may be another by now."""

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
    name = name_of(options.backend)
    own = None if find_known(name) is options.backend else options.backend
    return Compiled(name, options.fullgraph, hit, options.check), own


def record_failure(
    writing: Writing,
    beginning: Beginning,
    name: str,
    error: Exception,
    dispatcher: Dispatcher | None = None,
) -> Path | None:
    """Write the record of a call that raised, and say so in a note on the exception."""
    try:
        ended = Ended.by(error, beginning, name, dispatcher)
        note_last(ended, error)
        path = ended.write(writing)
        note_last(Written(path, name, ended.outcome), error)
        with contextlib.suppress(Exception):  # an exception of the user's may take no notes
            error.add_note(f"tripwire recorded this call. See it again: {replay_command(path)}")
    except Exception:
        log.exception("The failing call of %s could not be recorded.", name)
        return None
    return path


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
    except Exception as error:
        CURRENT.kept = None
        record_failure(writing, beginning, name_of_callable(target), error)
        raise
    finally:
        CURRENT.kept = None
    beginning.succeed()
    return result


def name_of_callable(target: Any) -> str:
    """What records call it."""
    return str(getattr(target, "__qualname__", None) or type(target).__qualname__)


@dataclass(frozen=True, slots=True)
class OnError:
    """Records the calls of a function that raise (`tripwire.record_on_error`)."""

    writing: Writing

    def __call__(self, function: _F) -> _F:
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
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

_last: Ended | Written | None = None
_lock = threading.Lock()


def note_last(ended: Ended | Written, error: Exception) -> None:
    """Keep a failed call, in place of the one before, so that it can be recorded later."""
    global _last
    with _lock:
        _last = None if _ran_out_of_memory(error) else ended


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Who ran out of memory needs it back."""
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
    """A compiled call that nobody armed raised (dispatch.options.Witness)."""
    try:
        beginning = Beginning(dispatcher.target, args, kwargs)
        beginning.late = True
        note_last(Ended.by(error, beginning, dispatcher.name, dispatcher), error)
    except Exception:
        log.exception("The failing call of %s could not be kept.", dispatcher.name)


def record_last(path: str | os.PathLike[str]) -> Path:
    """Write the record of the latest call that raised, compiled or decorated; returns where.

    The call is kept until then, or until another one fails. Of a call that wasn't armed the
    values are those that it left behind, and the record says so.
    """
    global _last
    with _lock:
        ended, _last = _last, None
    if ended is None:
        raise CannotReplay(
            "There is no failed call to record: no compiled or decorated function has raised, "
            "or its failure was recorded already.",
            slug="nothing-failed",
        )
    return ended.write(Writing.to(path))


# --- blocks ---


class InBlock:
    """Records the body of a `with` statement, however it ends (`tripwire.record_block`)."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self.path: Path | None = None  # of the record, once it is written

    def __enter__(self) -> InBlock:
        function, variables = build_block(sys._getframe(1))
        self._beginning = Beginning(function, (), variables, self._writing.policy)
        self._beginning.before_run()
        self._outer, CURRENT.kept = CURRENT.kept, self._beginning
        self._mode = self._beginning.keeping()
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        CURRENT.kept = self._outer
        if isinstance(error, Exception):
            self.path = record_failure(self._writing, self._beginning, "block", error)
        elif error is None:
            try:
                ended = Ended(self._beginning, "block", Returned(""))
                self.path = ended.write(self._writing)
            except Exception:
                log.exception("The block could not be recorded.")
