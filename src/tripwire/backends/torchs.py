"""Torch's own back ends. Nothing of Inductor or Dynamo is imported before one is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch._C._dynamo import eval_frame

Runtime = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])
INDUCTOR_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def out_of_dynamo(function: Function) -> Function:
    """Mark a function that torch.compile leaves alone, with all that it calls.

    What is traced around it breaks there; fullgraph=True says why.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "tripwire compiles it"
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)  # for its frame, and for those below
    eval_frame.set_code_exec_strategy(marked.__code__, strategy)
    return function


def inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Runtime:
    """Inductor. Takes the modes and options that torch.compile takes."""
    from tripwire.backends.inductor import compile_graph

    return compile_graph(module, example_inputs, mode, options)


def prepare_inductor() -> None:
    """Import Inductor: it takes seconds, and registers classes with abstract ones."""
    import tripwire.backends.inductor  # noqa: F401


def find_registered(name: str) -> Callable[..., Runtime] | None:
    """A back end that is registered for torch.compile, by entry points too."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        found: Callable[..., Runtime] = lookup_backend(name)
    except InvalidBackend:
        return None
    return _HandedOver(found, name)


class _HandedOver:
    """A back end of torch.compile's, given what Dynamo gives. Pickled as its name."""

    def __init__(self, backend: Callable[..., Runtime], name: str) -> None:
        self._backend = backend
        self.__name__ = self.__qualname__ = name

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[torch.Tensor], **options: Any
    ) -> Runtime:
        from tripwire.backends.handover import handing_over

        with handing_over(module) as copied:
            return self._backend(copied, list(example_inputs), **options)

    def __reduce__(self) -> Any:
        return find_registered, (self.__name__,)


def list_registered() -> list[str]:
    """Names of the back ends that are registered for torch.compile."""
    import torch._dynamo

    return list(torch._dynamo.list_backends(exclude_tags=None))
