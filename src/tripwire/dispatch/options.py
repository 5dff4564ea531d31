"""Options: how a callable is compiled, and who is told of its calls that fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tripwire.backends.registry import Backend

if TYPE_CHECKING:
    from tripwire.dispatch.dispatcher import Dispatcher


class Failures(Protocol):
    """Who records calls that fail."""

    def run(self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call through the dispatcher with `CURRENT.kept` set; record it if it raises."""


class Witness(Protocol):
    """Who is told of calls that failed, and weren't recorded."""

    def __call__(
        self,
        dispatcher: Dispatcher,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> None:
        """A call raised."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to compile."""

    backend: Backend
    fullgraph: bool = False
    cache_size: int = 32
    backend_options: tuple[tuple[str, Any], ...] = ()
    failures: Failures | None = None
    witness: Witness | None = None
    eager_on_backend_error: bool = False
    dynamic: bool | None = None  # None: what proves to vary is left open
    check: bool = False  # new code runs once beside the run that it was made of
    background: bool = False  # compilers work in a thread of their own
    waits: bool = False  # while another thread compiles; else calls run as plain Python
    recompile_limit: int | None = None  # entries that are made at most
