"""Torch's own state, sampled: what a run finds set, and must leave as it found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import TracebackType

import torch
from torch.utils._device import DeviceContext


@dataclass(frozen=True, slots=True)
class TorchState:
    """Flags that change what torch calls compute."""

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_dtype: torch.dtype
    default_device: torch.device
    deterministic: bool
    matmul_precision: str
    num_threads: int

    def find_changes(self, other: TorchState) -> list[str]:
        """Names of the flags in which two samples differ."""
        return [
            field.name
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]


def sample_torch_state() -> TorchState:
    """The calling thread's view of torch's flags."""
    return TorchState(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        sample_autocast(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
    )


def sample_quickly() -> tuple[object, ...]:
    """All of the above that can differ between two calls, as fast as it goes: under 1 µs.

    A default device is a mode on the stack of torch-function modes.
    """
    modes = _len_function_stack()
    return (
        _is_grad_enabled(),
        _is_inference_mode_enabled(),
        sample_autocast() if _is_any_autocast_enabled() else None,
        _get_default_dtype(),
        torch.get_default_device() if modes else None,
        modes,
        _len_dispatch_stack(),
        _get_deterministic(),
        _get_matmul_precision(),
        _get_num_threads(),
    )


_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_get_default_dtype = torch.get_default_dtype
_len_function_stack = torch._C._len_torch_function_stack
_len_dispatch_stack = torch._C._len_torch_dispatch_stack
_get_deterministic = torch._C._get_deterministic_algorithms
_get_matmul_precision = torch._C._get_float32_matmul_precision
_get_num_threads = torch.get_num_threads
QUICK_FIELDS = (
    "grad mode",
    "inference mode",
    "autocast",
    "default dtype",
    "default device",
    "number of torch-function modes",
    "number of torch-dispatch modes",
    "deterministic algorithms",
    "float32 matmul precision",
    "number of threads",
)


def has_foreign_modes() -> bool:
    """Whether a mode other than a default device is active."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # vmap, grad, ...
        return True
    return _len_dispatch_stack() > 0 or any(
        not isinstance(torch._C._get_function_stack_at(i), DeviceContext)
        for i in range(_len_function_stack())
    )


def sample_autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Whether autocast is on, and to which dtype, by device."""
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )


@contextmanager
def restoring_contexts() -> Iterator[None]:
    """Put grad mode and autocast back if the body raises between entering and leaving them."""
    grad, autocast = torch.is_grad_enabled(), sample_autocast()
    cached, nesting = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    except BaseException as error:
        _leave_inference_modes(error.__traceback__)
        torch._C._set_grad_enabled(grad)
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
        while torch.autocast_increment_nesting() > nesting:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
        raise


def _leave_inference_modes(trace: TracebackType | None) -> None:
    """Leave what the generated code entered; the exception would keep it entered while it lives."""
    if trace is None:
        return
    _leave_inference_modes(trace.tb_next)
    for value in trace.tb_frame.f_locals.values():
        if isinstance(value, torch._C._InferenceMode):
            value.__exit__(None, None, None)
