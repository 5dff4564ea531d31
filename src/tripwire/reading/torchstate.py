"""Torch's own state, sampled: what a run finds set, and must leave as it found it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from tripwire.values.classes import isinstance


@dataclass(frozen=True, slots=True)
class TorchState:
    """Flags that change what torch calls compute."""

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_dtype: torch.dtype
    default_device: torch.device
    deterministic: bool
    matmul_precision: object
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
        find_matmul_precision(),
        torch.get_num_threads(),
    )


def sample_quickly() -> tuple[object, ...]:
    """All of the above that can differ between two calls, in the order of QUICK_FIELDS."""
    return tuple(sample() for _, sample in _QUICK)


def spell_quickly(state: tuple[object, ...], constant: Callable[[object], str]) -> str:
    """A condition that holds where `sample_quickly()` gives this: 0.66 → 0.42 µs beside that."""
    parts = []
    for (_, sample), seen in zip(_QUICK, state, strict=True):
        if sample is find_matmul_precision and isinstance(seen, str):
            parts.append(f"{constant(_ask_matmul_precision)}() == {constant(seen)}")
        elif seen is not None:
            parts.append(f"{constant(sample)}() == {constant(seen)}")
        elif sample is find_autocast:
            parts.append(f"not {constant(torch._C._is_any_autocast_enabled)}()")
        elif sample is _find_dual_level:
            parts.append(f"{constant(forward_ad)}._current_level < 0")
        elif sample is _find_jit_trace:
            parts.append(f"{constant(_find_jit_trace)}() is None")
        else:  # no default device: there is no mode, which is asked for itself
            assert sample is _find_default_device
    return " and ".join(parts)


def find_autocast() -> object:
    """What autocast does; None where it is off."""
    return sample_autocast() if torch._C._is_any_autocast_enabled() else None


def _find_default_device() -> object:
    """A default device is a mode on the stack of torch-function modes."""
    return torch.get_default_device() if _len_function_stack() else None


def _find_dual_level() -> object:
    """Inside a level of forward-mode AD tensors may have tangents, which no metadata shows."""
    return forward_ad._current_level if forward_ad._current_level >= 0 else None


def find_matmul_precision() -> object:
    """One word for all back ends; or, once they were told apart, what each was told."""
    try:
        return _ask_matmul_precision()
    except RuntimeError:  # torch refuses to answer for all of them
        return find_precisions()


def find_precisions() -> object:
    """Of float32, in each back end."""
    ask = torch._C._get_fp32_precision_getter
    return tuple(ask(backend, op) for backend, op in _PRECISIONS)


_ask_matmul_precision = torch._C._get_float32_matmul_precision
_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)
_find_jit_trace = torch._C._get_tracing_state
_len_function_stack = torch._C._len_torch_function_stack
_len_dispatch_stack = torch._C._len_torch_dispatch_stack
_QUICK: tuple[tuple[str, Callable[[], object]], ...] = (
    ("grad mode", torch.is_grad_enabled),
    ("inference mode", torch.is_inference_mode_enabled),
    ("autocast", find_autocast),
    ("default dtype", torch.get_default_dtype),
    ("default device", _find_default_device),
    ("number of torch-function modes", _len_function_stack),
    ("number of torch-dispatch modes", _len_dispatch_stack),
    ("level of forward-mode AD", _find_dual_level),
    ("torch.jit.trace", _find_jit_trace),
    ("deterministic algorithms", torch._C._get_deterministic_algorithms),
    ("float32 matmul precision", find_matmul_precision),
    ("number of threads", torch.get_num_threads),
)
QUICK_FIELDS = tuple(name for name, _ in _QUICK)


def is_transformed() -> bool:
    """Whether a torch.func transform goes on: vmap, grad, ..."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_foreign_modes() -> bool:
    """Whether a mode other than a default device is active, or something that works like one."""
    if is_transformed() or _find_dual_level() is not None or _find_jit_trace() is not None:
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


class Contexts(NamedTuple):
    """Grad mode and autocast, for a graph that enters others of them."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    def restore(self, error: BaseException, depth: tuple[bool, int]) -> None:
        """Put all back after code that raised between entering and leaving them."""
        _leave_inference_modes(error.__traceback__)
        torch._C._set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        cached, nesting = depth
        torch.set_autocast_cache_enabled(cached)
        while torch.autocast_increment_nesting() > nesting:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()


def sample_contexts() -> Contexts:
    """As they are now."""
    return Contexts(torch.is_grad_enabled(), sample_autocast())


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


def _leave_inference_modes(trace: TracebackType | None) -> None:
    """Leave what the generated code entered; the exception would keep it entered while it lives."""
    frames = []
    while trace is not None:  # a stack that is full has a thousand of them
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, torch._C._InferenceMode):
                value.__exit__(None, None, None)
