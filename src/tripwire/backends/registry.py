"""Back ends by name. A back end is `(GraphModule, example_inputs) -> callable`, as torch's are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tripwire.backends.torchs import (
    INDUCTOR_MODES,
    find_registered,
    inductor,
    list_registered,
    prepare_inductor,
)
from tripwire.errors import BadOption
from tripwire.values.classes import isinstance

logger = logging.getLogger("tripwire.trace")

Runtime = Callable[..., Any]
Backend = Callable[..., Runtime]


def eager(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Runtime:
    """The graph itself, one torch call after another. Has no use for a mode or options."""
    if mode is not None or options:
        logger.warning("the back end eager has no use for mode=%r, options=%r", mode, options)
    return module.forward


_OWN: dict[str, Backend] = {"eager": eager, "inductor": inductor}


def list_backends() -> list[str]:
    """Names that `backend=` takes: tripwire's own, and all that torch.compile knows."""
    return sorted({*_OWN, *list_registered()})


def find_backend(backend: str | Backend, mode: str | None = None) -> Backend:
    """The back end of a name; callables stand for themselves."""
    if backend == "inductor" and mode not in (None, *INDUCTOR_MODES):
        raise BadOption(
            f"Inductor has no mode {mode!r}. Known: {', '.join(INDUCTOR_MODES)}.",
            slug="bad-option",
        )
    if isinstance(backend, str):
        found = find_known(backend) or find_registered(backend)
        if found is None:
            raise BadOption(
                f"There is no back end {backend!r}. Known: {', '.join(list_backends())}. "
                "A callable (GraphModule, example_inputs) -> callable will do as well.",
                slug="unknown-backend",
            )
        return found
    if not callable(backend):
        raise BadOption(
            f"backend= takes a name or a callable, not {type(backend).__name__}.",
            slug="unknown-backend",
        )
    return backend


def find_known(name: str) -> Backend | None:
    """One of tripwire's own back ends; None for other names."""
    return _OWN.get(name)


def prepare(backend: Backend) -> None:
    """Import what a back end needs. What an import changes, a run that is observed must find."""
    if backend is inductor:
        prepare_inductor()


def name_of(backend: Backend) -> str:
    """What to call a back end in messages."""
    return getattr(backend, "__name__", type(backend).__name__)
