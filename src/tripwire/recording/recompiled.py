"""Recompiled: what tripwire wraps around a callable is kept as the callable, and how.

Compiled code isn't kept: a replay compiles again. Neither is a record's place: a replay of a
recorded function writes no record.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

from tripwire.recording.nodes import AnyNode, Wrapped
from tripwire.values.classes import isinstance

if TYPE_CHECKING:
    from tripwire.recording.encode import Encoder

RECORDED = "__tripwire_recorded__"  # an attribute of what `record_on_error` makes


def encode_recompiled(encoder: Encoder, value: object) -> AnyNode | None:
    """The node of something compiled or recorded; None if it is nothing of the kind."""
    if type(value) is types.FunctionType:
        inner = value.__dict__.get(RECORDED)
        return None if inner is None else Wrapped("recorded", (encoder.slot(inner, ".function"),))
    compiled = sys.modules.get("tripwire.dispatch.compiled")
    if compiled is None:
        return None
    if type(value) is compiled.Dispatcher:
        form, dispatcher = "dispatcher", value
    else:
        form, dispatcher = "compiled", compiled.find_dispatcher(value)
    if not isinstance(dispatcher, compiled.Dispatcher):
        return None
    from tripwire.backends.registry import find_known, name_of

    options = dispatcher.options
    name = name_of(options.backend)
    known = find_known(name) is options.backend
    parts = (
        dispatcher.target,
        dispatcher.name,
        name if known else options.backend,
        options.fullgraph,
        options.cache_size,
        options.backend_options,
        options.check,
    )
    return Wrapped(form, tuple(encoder.slot(part, f".{form}") for part in parts))


def make_compiled(target: Any, *how: Any) -> object:
    """What `tripwire.compile` would make."""
    from torch import nn

    from tripwire.dispatch.compiled import CompiledFunction, compile_module

    name, options = _options(*how)
    make: Any = compile_module if isinstance(target, nn.Module) else CompiledFunction
    return make(target, name, options)


def make_dispatcher(target: Any, *how: Any) -> object:
    """What stands in a module that was compiled inside another."""
    from tripwire.dispatch.dispatcher import Dispatcher

    return Dispatcher(target, *_options(*how))


def _options(
    name: str, backend: Any, fullgraph: bool, cache_size: int, more: Any, check: bool
) -> tuple[str, Any]:
    from tripwire.backends.registry import find_backend
    from tripwire.dispatch.options import Options

    chosen = find_backend(backend)
    return name, Options(chosen, fullgraph, cache_size, more, check=check)
