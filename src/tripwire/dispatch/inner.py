"""Inner: modules that a refused call called, each compiled on its own.

`_compiled_call_impl` is torch's own place for a compiled module; copies and pickles leave it out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from tripwire.values.classes import module_of, short_name_of


class Inner:
    """The modules that are compiled inside one callable."""

    def __init__(self) -> None:
        self._compiled: list[tuple[weakref.ref[nn.Module], Callable[..., Any]]] = []

    def __len__(self) -> int:
        return len(self._compiled)

    def compile(
        self,
        modules: Iterable[nn.Module],
        build: Callable[[Callable[..., Any], str], Callable[..., Any]],
    ) -> None:
        """Compile those that have parts, and that nobody compiled: `build` gets call and name."""
        for module in modules:
            if module_of(type(module)) == "torch._dynamo.eval_frame":  # what torch.compile made
                continue
            if module._compiled_call_impl is None and next(module.children(), None) is not None:
                compiled = build(module._call_impl, short_name_of(type(module)))
                module._compiled_call_impl = compiled
                self._compiled.append((weakref.ref(module), compiled))

    def leave(self) -> None:
        """Let the modules be plain again."""
        for ref, compiled in self._compiled:
            module = ref()
            if module is not None and module._compiled_call_impl is compiled:
                module._compiled_call_impl = None
