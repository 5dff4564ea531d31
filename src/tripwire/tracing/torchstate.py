"""Torch's own state, sampled: what a run finds set, and must leave as it found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import TracebackType

import torch


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
        _sample_autocast(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
    )


def _sample_autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )


@contextmanager
def restoring_contexts() -> Iterator[None]:
    """Put grad mode and autocast back if the body raises between entering and leaving them."""
    grad, autocast = torch.is_grad_enabled(), _sample_autocast()
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
