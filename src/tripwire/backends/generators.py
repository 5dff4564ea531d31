"""Generators: what other threads draw while a compiler works, they don't draw again.

AOTAutograd and Inductor keep the state of torch's generators from before a compile, and set it
again at its end. A compiler that works on fake tensors draws nothing itself. Where kernels are
tried out, torch keeps the state around each trial on its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from tripwire.writes.patches import Patch, Patches


@contextmanager
def leaving_generators() -> Iterator[None]:
    """Inside, compilers don't set torch's generators back, if there are other threads."""
    if threading.active_count() < 2:
        yield
        return
    user = object()
    _leaving_generators.enter(id(user))
    try:
        yield
    finally:
        _leaving_generators.leave(id(user))


def _find_keepers() -> tuple[Patch, ...]:
    """Where torch keeps the state around a whole compile, if that is loaded."""
    autograd = sys.modules.get("torch._functorch.aot_autograd")
    compiler = sys.modules.get("torch._inductor.compile_fx")
    return (
        *((Patch(autograd, "preserve_rng_state", lambda _: nullcontext),) if autograd else ()),
        *((Patch(compiler, "dynamo_utils", _WithoutKeeping),) if compiler else ()),
    )


class _WithoutKeeping:
    """A module, but for one function of it."""

    preserve_rng_state = nullcontext

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_leaving_generators = Patches(_find_keepers)
