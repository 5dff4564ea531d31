"""Failures: a call that raises leaves a record.

Whatever goes wrong with the record is logged; the call's own exception is what is raised.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from tripwire.backends.registry import name_of
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.errors import BadOption, CannotReplay
from tripwire.recording.beginning import Beginning, Call
from tripwire.recording.block import build_block
from tripwire.recording.calls import Writing, log, replay_command, write_call
from tripwire.recording.format import Compiled, Outcome
from tripwire.recording.outcomes import describe_error, describe_result
from tripwire.recording.policy import Chooser, Policy
from tripwire.tracing.state import CURRENT

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Failures:
    """Records the failing calls of compiled callables (dispatch.dispatcher.Failures)."""

    writing: Writing

    @staticmethod
    def into(folder: str | os.PathLike[str]) -> Failures:
        """Records go into a folder, each under a name of its own."""
        return Failures(Writing.to(folder))

    def run(self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        beginning = Beginning(Call(dispatcher.target, args, kwargs), self.writing.policy)
        CURRENT.kept = beginning
        try:
            return dispatcher(*args, **kwargs)
        except Exception as error:
            CURRENT.kept = None
            ended = Ended(beginning, dispatcher.name, error, dispatcher)
            note_last(ended)
            record_failure(self.writing, ended)
            raise
        finally:
            CURRENT.kept = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A call that raised."""

    beginning: Beginning
    name: str
    error: BaseException
    dispatcher: Dispatcher | None = None

    def write(self, writing: Writing) -> Path:
        """Write its record."""
        outcome = describe_error(self.error, self.beginning.call.target)
        if self.dispatcher is None:
            return write_call(writing, self.beginning, self.name, outcome)
        options = self.dispatcher.options
        name = name_of(options.backend)
        compiled = Compiled(name, options.fullgraph)
        backend = None if name == "eager" else options.backend
        return write_call(writing, self.beginning, self.name, outcome, compiled, backend)


def record_failure(writing: Writing, ended: Ended) -> Path | None:
    """Write the record of a call that raised, and say so in a note on the exception."""
    try:
        path = ended.write(writing)
        ended.error.add_note(f"tripwire recorded this call. See it again: {replay_command(path)}")
    except Exception:
        log.exception("The failing call of %s could not be recorded.", ended.name)
        return None
    return path


# --- plain callables ---


def run_recorded(
    writing: Writing, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a plain callable; record the call if it raises."""
    if CURRENT.kept is not None or CURRENT.tracing:  # whoever is outside records
        return target(*args, **kwargs)
    beginning = CURRENT.kept = Beginning(Call(target, args, kwargs), writing.policy)
    try:
        return beginning.run_plainly(target, args, kwargs)
    except Exception as error:
        CURRENT.kept = None
        ended = Ended(beginning, name_of_callable(target), error)
        note_last(ended)
        record_failure(writing, ended)
        raise
    finally:
        CURRENT.kept = None


def name_of_callable(target: Any) -> str:
    """What records call it."""
    return str(getattr(target, "__qualname__", None) or type(target).__qualname__)


def record_on_error(
    path: str | os.PathLike[str],
    *,
    tensors: str | Mapping[str, str] | Chooser = "full",
    max_bytes: int | None = None,
    check: bool = True,
) -> Callable[[_F], _F]:
    """A decorator: a call of the function that raises leaves a record at `path`.

    path: a file that ends in .rec, or a folder in which each record gets a name of its own.
    tensors: "full", "statistics", "shape" or "redacted", for all tensors, by patterns of their
    paths (`{"args[[]0]*": "shape"}`), or chosen by a function of path and tensor.
    max_bytes: above this, the largest tensors are kept as statistics.
    check: replay the record in a process of its own, and stamp the verdict into it.
    """
    writing = Writing.to(path, Policy(tensors, max_bytes), check)

    def decorate(function: _F) -> _F:
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise BadOption(
                f"{name_of_callable(function)} is a generator or a coroutine function: its code "
                "runs after the call. Record the function that does the work.",
                slug="not-recordable",
            )

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            return run_recorded(writing, function, args, kwargs)

        return recorded  # type: ignore[return-value]

    return decorate


def save_record(
    path: str | os.PathLike[str], fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Path:
    """Run a call and write its record, however it ends; returns where.

    What the call raises is in the record, and isn't raised here.
    """
    writing = Writing.to(path)
    dispatcher = find_dispatcher(fn)
    target = fn if dispatcher is None else dispatcher.target
    beginning = CURRENT.kept = Beginning(Call(target, args, kwargs), writing.policy)
    outcome: Outcome
    try:
        beginning.before_run()
        outcome = describe_result(beginning.run_plainly(fn, args, kwargs))
    except Exception as error:
        CURRENT.kept = None
        return Ended(beginning, name_of_callable(target), error, dispatcher).write(writing)
    finally:
        CURRENT.kept = None
    return write_call(writing, beginning, name_of_callable(target), outcome)


# --- the latest failure ---

_last: Ended | None = None
_lock = threading.Lock()


def note_last(ended: Ended) -> None:
    """Keep a failed call, in place of the one before, so that it can be recorded later."""
    global _last
    with _lock:
        # Who ran out of memory needs it back.
        _last = None if isinstance(ended.error, MemoryError | torch.OutOfMemoryError) else ended


def record_last(path: str | os.PathLike[str]) -> Path:
    """Write the record of the latest call that raised, compiled or decorated; returns where.

    The call is kept until then, or until another one fails.
    """
    global _last
    with _lock:
        ended, _last = _last, None
    if ended is None:
        raise CannotReplay(
            "No call of a compiled or decorated function has failed yet, or it was recorded.",
            slug="nothing-failed",
        )
    return ended.write(Writing.to(path))


# --- blocks ---


class record:  # noqa: N801  # used as a function: `with tripwire.record(path):`
    """A context manager: the block inside leaves a record at `path`, however it ends.

    Takes the options of `record_on_error`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tensors: str | Mapping[str, str] | Chooser = "full",
        max_bytes: int | None = None,
        check: bool = True,
    ) -> None:
        self._writing = Writing.to(path, Policy(tensors, max_bytes), check)
        self.path: Path | None = None  # of the record, once it is written

    def __enter__(self) -> record:
        function, variables = build_block(sys._getframe(1))
        self._beginning = Beginning(Call(function, (), variables), self._writing.policy)
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
            ended = Ended(self._beginning, "block", error)
            note_last(ended)
            self.path = record_failure(self._writing, ended)
        elif error is None:
            try:
                outcome = describe_result(None)
                self.path = write_call(self._writing, self._beginning, "block", outcome)
            except Exception:
                log.exception("The block could not be recorded.")
