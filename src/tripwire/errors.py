"""Errors: each says what, where, why and what to do next, and carries a slug.

A slug is a stable short name. docs/messages.md explains every one of them.
"""

from __future__ import annotations

import functools
import opcode
import signal
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, MethodType, NoneType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx


class TripwireError(Exception):
    """The base class of all errors that tripwire raises."""

    def __init__(self, message: str, *, slug: str) -> None:
        super().__init__(f"{message} [{slug}]")
        self.slug = slug

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as its text and what can go to another process: a graph stays behind."""
        kept = {name: value for name, value in vars(self).items() if name != "graph_module"}
        return _restore, (type(self), str(self)), kept


def _restore(cls: type[TripwireError], text: str) -> TripwireError:
    error = cls.__new__(cls, text)
    error.args = (text,)
    return error


class CannotTrace(TripwireError, RuntimeError):
    """A graph of this run would not do the same as the run.

    torch.compile's errors of this kind are RuntimeErrors, too.
    """

    place: tuple[str, int] | None = None  # the user's file and line, where one is to blame


class InputMismatch(TripwireError):
    """A trace was called with inputs that it doesn't hold for."""


class FunctionChanged(TripwireError):
    """A custom function isn't what compiled code was made for, and plain Python can't take over."""


class TraceDiffers(TripwireError):
    """A check ran a trace and its function, and they disagreed."""


class StateError(TripwireError):
    """A tracing state was used wrongly by hand."""


class BadOption(TripwireError):
    """One of tripwire's functions got an argument that it can't work with."""


# What an option may be: its types, as isinstance takes them, and how messages call them. Programs
# pass 0, 1 and None for flags.
Kind = tuple[tuple[Any, ...], str]
FLAG: Kind = ((int, NoneType), "True or False")
FLAG_OR_NONE: Kind = ((int, NoneType), "True, False or None")
TEXT_OR_NONE: Kind = ((str, NoneType), "a string or None")
COUNT: Kind = ((int,), "an int")
COUNT_OR_NONE: Kind = ((int, NoneType), "an int or None")


def check_kinds(given: Mapping[str, object], kinds: Mapping[str, Kind]) -> None:
    """Raise BadOption for an option of another type than it may have."""
    for name, (types, words) in kinds.items():
        if not isinstance(given[name], types):
            raise BadOption(f"{name} is {given[name]!r}; it must be {words}.", slug="bad-option")


class BackendFailed(TripwireError, RuntimeError):
    """A back end raised while it compiled a graph. torch.compile's is a RuntimeError, too."""

    graph_module: fx.GraphModule | None = None  # the graph, to look at or to try elsewhere


class WrongResult(TripwireError):
    """Compiled code differs from the observed call (`check=True`)."""


class BadRecord(TripwireError):
    """A file can't be read as a record: damaged, made to do harm, or of another version."""


class CannotReplay(TripwireError):
    """A record can be read, but its call can't be built here."""


class BadStore(TripwireError):
    """Compiled code on disk isn't used. This is logged, and never raised to users."""


class TelemetryError(TripwireError):
    """Telemetry was used wrongly, or a log can't be read."""


# --- interruptions ---


def raise_interruption(error: BaseException) -> None:
    """Raise what a signal's handler or another thread threw in, if that is why a block failed.

    To be called where the block's error is caught and would not be raised. A timeout is often an
    Exception. The code that it ends, such as a compiler, did not fail, and must not swallow it.
    """
    thrown = [each for each in _find_chain(error, sys._getframe(1)) if _is_thrown(each)]
    if thrown:
        raise thrown[-1]  # others wrap it


def _find_chain(error: BaseException | None, frame: FrameType) -> Iterator[BaseException]:
    """An error, what it came of, and so on; not what the caller's callers are handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if error.__traceback__ is None or not _is_inside(error.__traceback__.tb_frame, frame):
            return
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_inside(inner: FrameType | None, outer: FrameType) -> bool:
    while inner is not None and inner is not outer:
        inner = inner.f_back
    return inner is outer


def _is_thrown(error: BaseException) -> bool:
    """Whether a signal's handler raised it, or PyThreadState_SetAsyncExc did.

    The latter makes an exception without arguments, where no instruction raises one.
    """
    handlers = set(_find_handlers())
    last: TracebackType | None = None
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code in handlers:
            return True
        last, step = step, step.tb_next
    if last is None or error.args or isinstance(error, _RAISED_IN_C):
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] not in _RAISING


# What C code raises without arguments.
_RAISED_IN_C = (MemoryError, StopIteration, StopAsyncIteration)
_RAISING = frozenset({opcode.opmap["RAISE_VARARGS"], opcode.opmap["RERAISE"]})


def _find_handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, (functools.partial, MethodType)):
            handler = handler.func if isinstance(handler, functools.partial) else handler.__func__
        if callable(handler):
            code = getattr(handler, "__code__", None)
            code = code or getattr(type(handler).__call__, "__code__", None)
            if isinstance(code, CodeType):
                yield code
