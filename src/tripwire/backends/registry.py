"""Back ends by name. A back end is `(GraphModule, example_inputs) -> callable`, as torch's are.

Nothing of Inductor or Dynamo is imported before one of torch's own is used.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import fx
from torch._C._dynamo import eval_frame

from tripwire.backends.dynamo import compiling_alone
from tripwire.errors import BadOption
from tripwire.imports import has_other_threads, import_dynamo, importing
from tripwire.tracing.graphs import GraphOnDemand
from tripwire.values.classes import isinstance

logger = logging.getLogger("tripwire.trace")

Runtime = Callable[..., Any]
Backend = Callable[..., Runtime]
Function = TypeVar("Function", bound=Callable[..., Any])
_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # they use CUDA graphs
INDUCTOR_MODES = ("default", "lite", *_GRAPH_MODES, "max-autotune-no-cudagraphs")


def eager(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Runtime:
    """The graph itself, one torch call after another. Has no use for a mode or options."""
    given = {"mode": mode, "options": options or None}
    ignored = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if ignored:
        _warn_once(f'the back end "eager" ignores {" and ".join(ignored)}')
    if isinstance(module, GraphOnDemand):
        module.real_recompile()  # `forward` is then the generated code itself
    return module.forward


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    on_failed_backward: Callable[[Exception], None] | None = None,
    around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Runtime:
    """Inductor. Takes the modes and options that torch.compile takes.

    on_failed_backward: told of a backward that can't be compiled, which then runs as it is. Without
    it such a backward raises. around_backward: entered while a backward is compiled.
    """
    from tripwire.backends.inductor import compile_graph

    with compiling_alone():
        return compile_graph(
            module, example_inputs, mode, options, on_failed_backward, around_backward
        )


_OWN: dict[str, Backend] = {"eager": eager, "inductor": inductor}


# --- torch.compile's ---


def find_registered(name: str) -> Callable[..., Runtime] | None:
    """A back end that is registered for torch.compile, by entry points too."""
    import_dynamo()
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

        with compiling_alone(), handing_over(module, example_inputs) as (copied, examples):
            return self._backend(copied, examples, **options)

    def __reduce__(self) -> Any:
        return find_registered, (self.__name__,)


def list_registered() -> list[str]:
    """Names of the back ends that are registered for torch.compile."""
    import_dynamo()
    return list(torch._dynamo.list_backends(exclude_tags=None))


# --- by name ---


def list_backends() -> list[str]:
    """Names that `backend=` takes: tripwire's own, and all that torch.compile knows."""
    return sorted({*_OWN, *list_registered()})


def find_backend(backend: str | Backend, mode: str | None = None) -> Backend:
    """The back end of a name; callables stand for themselves."""
    if backend == "inductor" and mode not in (None, *INDUCTOR_MODES):
        raise BadOption(
            f"Inductor has no mode {mode!r}. Known: {', '.join(INDUCTOR_MODES)}.", slug="bad-option"
        )
    if isinstance(backend, str):
        found = find_known(backend) or find_registered(backend)
        if found is None:
            known = list_backends()
            near = difflib.get_close_matches(backend, known, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise BadOption(
                f"There is no back end {backend!r}.{meant} Known: {', '.join(known)}. Or "
                "pass a callable (GraphModule, example_inputs) -> callable.",
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


def takes_graphs_as_they_are(backend: Backend) -> bool:
    """Whether a back end is a user's own, which nobody hands over to but the pipeline."""
    return backend is not eager and backend is not inductor and type(backend) is not _HandedOver


def takes_other_state(backend: Backend, options: Mapping[str, Any]) -> bool:
    """Whether code that was compiled takes other tensors of the same form for state.

    Weights that Inductor froze are constants of the code. CUDA graphs use weights where they were.
    """
    if backend is not inductor:
        return True
    config = importlib.import_module("torch._inductor.config")
    chosen: Mapping[str, Any] = options.get("options") or {}
    freezes = chosen.get("freezing", config.freezing)
    has_graphs = chosen.get("triton.cudagraphs", config.triton.cudagraphs)
    return not (freezes or has_graphs or options.get("mode") in _GRAPH_MODES)


def draws_its_own(backend: Backend, options: Mapping[str, Any]) -> bool:
    """Whether compiled code draws other random numbers than plain code does."""
    if backend is not inductor:
        return False
    config = importlib.import_module("torch._inductor.config")
    chosen: Mapping[str, Any] = options.get("options") or {}
    return not chosen.get("fallback_random", config.fallback_random)


def prepare(backend: Backend) -> None:
    """Import what a back end needs. What an import changes, a run that is observed must find.

    Inductor takes seconds to import, and registers classes with abstract ones. What it needs only
    to compile waits until something isn't in the store, see imports.py.
    """
    if backend is inductor:
        with importing():
            import_dynamo()
            import tripwire.backends.inductor

            if has_other_threads():
                tripwire.backends.inductor.import_compiler()


def is_prepared(backend: Backend) -> bool:
    """Whether nothing is left to import."""
    module = sys.modules.get("tripwire.backends.inductor")
    is_loading = module is not None and getattr(module.__spec__, "_initializing", False)
    return backend is not inductor or (module is not None and not is_loading)


def may_run_ahead(backend: Backend) -> bool:
    """Whether new code may be run ahead of the next call: whether a GPU is in use."""
    return backend is inductor and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def count_runs_ahead(backend: Backend, tensors: Sequence[torch.Tensor]) -> int:
    """How often new code is run ahead of the next call.

    On a GPU Inductor's kernels are tuned when they first run, 280 ms for 28 layers. With CUDA
    graphs a second run records. On a CPU nothing is left to do once code is compiled: a second call
    takes 4 ms more than a third (4 layers), and a run may take long.
    """
    if backend is not inductor or not any(tensor.is_cuda for tensor in tensors):
        return 0
    return 2


def backend_name(backend: Backend) -> str:
    """What to call a back end in messages."""
    return getattr(backend, "__name__", type(backend).__name__)


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
