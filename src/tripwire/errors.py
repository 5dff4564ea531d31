"""Errors: each says what, where, why and what to do next, and carries a slug.

A slug is a stable short name. docs/messages.md explains every one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx


class TripwireError(Exception):
    """The base of everything that tripwire raises on its own account."""

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


class CannotTrace(TripwireError):
    """The callable can't become a graph that means the same as the run did."""

    place: tuple[str, int] | None = None  # the user's file and line, where one is to blame


class InputMismatch(TripwireError):
    """A trace was called with inputs that it doesn't hold for."""


class TraceDiffers(TripwireError):
    """A check ran a trace beside its function and they disagreed."""


class StateError(TripwireError):
    """A tracing state was used in a way that it can't follow."""


class TracerWarning(UserWarning):
    """The trace holds only for what this run met: a value, or a write left out."""


class BadOption(TripwireError):
    """An argument of `tripwire.compile` that means nothing."""


class BackendFailed(TripwireError):
    """A back end raised while it compiled a graph."""

    graph_module: fx.GraphModule | None = None  # the graph, to look at or to try elsewhere


class WrongResult(TripwireError):
    """Compiled code does something else than the run that it was made of (`check=True`)."""


class BadRecord(TripwireError):
    """A file is no record that can be read: damaged, made to harm, or of a newer version."""


class CannotReplay(TripwireError):
    """A record can be read, and still can't become live objects here."""


class BadStore(TripwireError):
    """Compiled code on disk isn't used. It is logged, and never raised to users."""


class TelemetryError(TripwireError):
    """Telemetry was used in a way that it can't follow, or a log can't be read."""
