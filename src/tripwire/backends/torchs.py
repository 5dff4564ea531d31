"""Torch's own back ends. Nothing of Inductor or Dynamo is imported before one is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx


def inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Inductor, through AOTAutograd. Takes the modes and options that torch.compile takes."""
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode is not None else {}), **(options or {})}
    compiled = compile_fx(module, list(example_inputs), config_patches=patches or None)
    return cast("Callable[..., Any]", compiled)


def find_registered(name: str) -> Callable[..., Callable[..., Any]] | None:
    """A back end that is registered for torch.compile, by entry points too."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        found: Callable[..., Callable[..., Any]] = lookup_backend(name)
    except InvalidBackend:
        return None
    return found


def list_registered() -> list[str]:
    """Names of the back ends that are registered for torch.compile."""
    import torch._dynamo

    return list(torch._dynamo.list_backends(exclude_tags=None))
