"""The public functions. Readers start here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from tripwire.backends.registry import Backend, find_backend
from tripwire.callables import isinstance
from tripwire.dispatch.compiled import CompiledFunction, compile_module, statistics
from tripwire.dispatch.dispatcher import Dispatcher, Failures, Options
from tripwire.errors import BadOption
from tripwire.phases import HAS_TELEMETRY
from tripwire.tracing import Trace, Tracer

if TYPE_CHECKING:
    from tripwire.recording.capture.failures import OnError

__all__ = ["compile", "statistics", "trace"]


def trace(fn_or_module: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Trace:
    """Run a callable once, for real, and return what it computed as a graph.

    Arguments go to the callable as they are. `Tracer` takes the options.
    """
    return Tracer().trace_call(fn_or_module, args, kwargs, stacklevel=3)


def compile(
    fn_or_module: Any = None,
    *,
    backend: str | Backend | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
    name: str | None = None,
    cache_size: int = 8,
    record_on_error: str | os.PathLike[str] | OnError | None = None,
    on_backend_error: str | None = None,
    check: bool = False,
) -> Any:
    """Compile a function or a module; without one, a decorator.

    The first call runs for real and is observed; later calls run compiled code for as long as
    everything that the first one read is unchanged. Takes what `torch.compile` takes.

    backend: a name, or a callable `(GraphModule, example_inputs) -> callable`. Inductor where
        neither this nor the environment variable TRIPWIRE_BACKEND names one.
    fullgraph: raise where a call can't be compiled, rather than run it as plain Python.
    dynamic: sizes are part of an entry; True is refused, None and False mean the same.
    mode, options: handed to the back end. Inductor's modes are "default", "reduce-overhead",
        "max-autotune" and "max-autotune-no-cudagraphs".
    disable: return the callable as it is.
    name: what messages call it.
    cache_size: entries kept per callable.
    record_on_error: a folder; a call that raises leaves a record there, which
        `tripwire replay` runs again. The environment variable TRIPWIRE_RECORD_DIR does the same
        for everything that is compiled; "" means no folder, whatever it says. A record is
        replayed in a process of its own to see whether it shows the same, which takes seconds;
        TRIPWIRE_RECORD_CHECK=0 turns that off. `tripwire.record_on_error(folder, ...)` in place
        of a folder says how much of each tensor is kept.
    on_backend_error: "raise" where the back end fails, or "eager": say so, and run the graph as
        it is, one torch call after another. By default a back end that has a name falls back to
        that, unless fullgraph is set; a callable of your own raises.
    check: run new compiled code once, on copies of the inputs, and raise WrongResult if it
        returns or writes something else than the call that it was made of did.
    """
    if fn_or_module is None:
        return lambda fn: compile(
            fn,
            backend=backend,
            fullgraph=fullgraph,
            dynamic=dynamic,
            mode=mode,
            options=options,
            disable=disable,
            name=name,
            cache_size=cache_size,
            record_on_error=record_on_error,
            on_backend_error=on_backend_error,
            check=check,
        )
    if not callable(fn_or_module):
        raise BadOption(
            f"compile takes a function or a module, not {type(fn_or_module).__name__}.",
            slug="not-callable",
        )
    if mode is not None and options is not None:
        raise BadOption("Either mode or options can be given, not both.", slug="bad-option")
    if dynamic:
        raise BadOption(
            "dynamic=True: sizes don't turn symbolic yet; each shape has an entry of its own.",
            slug="bad-option",
        )
    if cache_size < 1:
        raise BadOption(f"cache_size is {cache_size}; it must be at least 1.", slug="bad-option")
    if on_backend_error not in ("raise", "eager", None):
        raise BadOption(
            f'on_backend_error is {on_backend_error!r}; it can be "raise" or "eager".',
            slug="bad-option",
        )
    if disable:
        return fn_or_module
    handed = {"mode": mode, "options": options}
    chosen = Options(
        find_backend(backend or os.environ.get("TRIPWIRE_BACKEND") or "inductor", mode),
        fullgraph,
        cache_size,
        tuple((key, value) for key, value in handed.items() if value is not None),
        _find_failures(
            os.environ.get("TRIPWIRE_RECORD_DIR") if record_on_error is None else record_on_error
        ),
        _note_failed,
        on_backend_error == "eager"
        or (on_backend_error is None and not callable(backend) and not fullgraph),
        check,
    )
    called = name or _name_of(fn_or_module)
    if isinstance(fn_or_module, nn.Module):
        return compile_module(fn_or_module, called, chosen)
    return CompiledFunction(fn_or_module, called, chosen)


def _find_failures(folder: str | os.PathLike[str] | OnError | None) -> Failures | None:
    if not folder:
        return None
    from tripwire.recording.capture.failures import Failures  # only where it is asked for

    return Failures.into(folder)


def _note_failed(
    dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> None:
    """Keep a failed call for `record_last`."""
    if not HAS_TELEMETRY:  # records need the same package
        return
    from tripwire.recording.capture.failures import (
        note_failed,  # no program that runs well needs it
    )

    note_failed(dispatcher, args, kwargs, error)


def _name_of(target: Any) -> str:
    if isinstance(target, nn.Module):
        return type(target).__name__
    return str(getattr(target, "__name__", type(target).__name__))
