"""Sizes: which results have a shape that depends on values.

`x[x > 0]` does, and so does everything computed from it, save numbers. Python that reads such a
shape takes a value out of a tensor: a branch.
"""

from __future__ import annotations

from typing import Any

import torch

from tripwire.tracing.rules import Call, words
from tripwire.tracing.state import TracingState
from tripwire.tracing.values import iter_given


def is_sized_by_data(
    state: TracingState, rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the shape of this call\'s result depends on the values of a tensor."""
    if rule.sized_by_data:
        if rule.name == "__getitem__":
            if _has_mask(args[1]):
                return True
        elif rule.name == "where":
            if len(args) + len(kwargs) == 1:
                return True
        elif rule.name == "repeat_interleave":
            alone = len(args) == 1 and "repeats" not in kwargs
            if kwargs.get("output_size") is None and (alone or _has_tensor((args[1:], kwargs))):
                return True
        elif rule.name == "tensor_split":
            if _has_tensor((args[1:], kwargs)):
                return True
        elif rule.name == "one_hot":
            if (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1:
                return True
        else:
            return True
    if rule.takes_sizes:
        sizes = args if rule.name in _MAKERS else args[1:]
        if rule.name == "__getitem__":
            sizes = tuple(bound for bound in _slice_bounds(args[1]))
        if _has_size_tensor(sizes, kwargs):
            return True
    if not state.met_data_sizes:
        return False
    return any(
        known is not None and known.sized_by_data
        for known in map(state.values.find, iter_given((args, kwargs)))
    )


# Functions whose first argument is a size; that of the others is the tensor to work on.
_MAKERS = words(
    "arange range linspace logspace zeros ones full empty eye rand randn randint randperm "
    "tril_indices triu_indices hann_window hamming_window blackman_window bartlett_window "
    "kaiser_window"
)


def _slice_bounds(index: Any) -> list[Any]:
    parts = index if isinstance(index, tuple) else (index,)
    return [b for part in parts if isinstance(part, slice) for b in _bounds(part)]


def _has_tensor(value: Any) -> bool:
    return next(iter_given(value), None) is not None


def _has_size_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an integer in a tensor stands where sizes and slice bounds stand."""
    return any(
        tensor.numel() == 1 and not tensor.is_floating_point()
        for value in (*args, *kwargs.values())
        for part in (_bounds(value) if isinstance(value, (slice, tuple)) else [value])
        for tensor in iter_given(part)
    )


def _bounds(value: Any) -> list[Any]:
    """The bounds of slices in an index; an integer in one picks, and changes no size."""
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if any(isinstance(item, slice) for item in value):
        return [bound for item in value if isinstance(item, slice) for bound in _bounds(item)]
    return list(value)


def _has_mask(index: Any) -> bool:
    return any(t.dtype in (torch.bool, torch.uint8) for t in iter_given(index))
