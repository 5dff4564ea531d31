"""Errors: each says what, where, why and what to do next, and carries a slug.

A slug is a stable short name. docs/messages.md explains every one of them.
"""

from __future__ import annotations

from types import NoneType
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
