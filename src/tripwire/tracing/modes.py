"""Modes: what a graph, or other code, enters and leaves around torch's calls.

A graph may enter grad mode, inference mode, autocast and `sdpa_kernel`. If it raises before it
leaves them, they are restored. Under another library's mode, or a transform, nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from tripwire.reading.torchstate import sample_autocast
from tripwire.rulebook.refusals import Refusal
from tripwire.tracing.attention import Allowed
from tripwire.values.classes import isinstance


def is_transformed() -> bool:
    """Whether a torch.func transform goes on: vmap, grad, ..."""
    return torch._C._functorch.peek_interpreter_stack() is not None


FOREIGN = Refusal(
    "foreign-mode",
    "a torch.func transform, forward-mode AD or another torch mode is active around this call and "
    "must see every torch call. Calls outside of it are compiled as before.",
)


def has_foreign_modes() -> bool:
    """Whether a mode other than a default device is active, or something that works like one."""
    if (
        is_transformed()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return True
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    depth = torch._C._len_torch_function_stack()
    return depth > 0 and any(  # most calls have none, and a generator costs 0.4 µs
        not isinstance(torch._C._get_function_stack_at(i), DeviceContext) for i in range(depth)
    )


class Contexts(NamedTuple):
    """Grad mode and autocast, for a graph that enters others of them."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    def restore(self, error: BaseException, depth: tuple[bool, int]) -> None:
        """Put all back after code that raised between entering and leaving them."""
        _leave_blocks(error.__traceback__)
        self._set()
        cached, nesting = depth
        torch.set_autocast_cache_enabled(cached)
        while torch.autocast_increment_nesting() > nesting:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()

    @contextmanager
    def entered(self, inference: bool) -> Iterator[None]:
        """Inside, they are this thread's, as they were another's; and inference mode."""
        before = sample_contexts()
        with torch.inference_mode(inference):
            self._set()
            try:
                yield
            finally:
                before._set()

    def _set(self) -> None:
        torch._C._set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def sample_contexts() -> Contexts:
    """Grad mode and autocast as they are now."""
    return Contexts(torch.is_grad_enabled(), sample_autocast())


def contexts_of(state: Mapping[str, Any]) -> Contexts:
    """Grad mode and autocast as they were when `sample_torch_state()` gave this."""
    off = zip(("cpu", "cuda"), (False, False), state["autocast's dtypes"], strict=True)
    return Contexts(state["grad mode"], state["autocast"] or tuple(off))


def sample_depth() -> tuple[bool, int]:
    """Whether autocast keeps its casts, and how many blocks of it are open, and one more."""
    nesting = _increment_nesting()
    _decrement_nesting()
    return _is_cache_enabled(), nesting


_increment_nesting = torch.autocast_increment_nesting
_decrement_nesting = torch.autocast_decrement_nesting
_is_cache_enabled = torch.is_autocast_cache_enabled


@contextmanager
def restoring_contexts() -> Iterator[None]:
    """Put grad mode and autocast back if the body raises between entering and leaving them."""
    contexts, depth = sample_contexts(), sample_depth()
    try:
        yield
    except BaseException as error:
        contexts.restore(error, depth)
        raise


def _leave_blocks(trace: TracebackType | None) -> None:
    """Leave what a graph entered; the exception would keep it entered while it lives."""
    frames = []
    while trace is not None:  # a stack that is full has a thousand of them
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        for local in reversed(frame.f_locals.values()):
            held = local.env.values() if isinstance(local, fx.Interpreter) else (local,)
            for value in reversed(held):
                if isinstance(value, torch._C._InferenceMode):
                    value.__exit__(None, None, None)
                elif isinstance(value, Allowed):
                    value.restore()
