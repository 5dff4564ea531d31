"""Alternatives: for each value, another one that a call would notice.

A function or module is replaced by one that does what the original does and changes the first
number or tensor of its result. tripwire takes its code for the user's: it is compiled from text,
not from a file of tripwire.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tripwire.values.classes import ids_of, isinstance, module_of, name_of

_TEXT = """
import torch
from torch import nn


def alter(value):
    if isinstance(value, torch.Tensor):
        return value * 1.25 + 0.125 if value.is_floating_point() else value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.5
    if type(value) in (tuple, list) and value:
        return type(value)([alter(value[0]), *value[1:]])
    if type(value) is dict and value:
        first = next(iter(value))
        return {**value, first: alter(value[first])}
    return value


def build_changed(original):
    def changed(*args, **kwargs):
        return alter(original(*args, **kwargs))
    return changed


def hook(module, args, result):
    return alter(result)


def pre_hook(module, args):
    return alter(args)


def build_adapter(inner):
    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return alter(self.inner(*args, **kwargs))

    return Adapter(inner).train(inner.training)


def build_subclass(cls):
    class Changed(cls):
        def forward(self, *args, **kwargs):
            return alter(super().forward(*args, **kwargs))

    return Changed


def build_plain_subclass(cls):
    class Changed(cls):
        __slots__ = ()

    return Changed


def last_argument(*args, **kwargs):
    return [1.5, *args, *kwargs.values()][-1]
"""

Other = tuple[str, Callable[[], Any]]  # what is done, and what makes the value to put there


class CannotWrite(Exception):
    """There is no other value to put there."""


@functools.cache
def user_code() -> dict[str, Any]:
    """Functions that stand in for the user's, in a namespace of their own."""
    space: dict[str, Any] = {"__name__": "audited"}
    exec(compile(_TEXT, "<audit>", "exec"), space)
    return space


def iter_others(value: object) -> Iterator[Other]:
    """Other values for a place that holds this one, made when they are asked for."""
    if isinstance(value, torch.Tensor):
        if can_change(value):
            yield "replaced", functools.partial(build_other_tensor, value)
    elif isinstance(value, nn.Module):
        yield "an adapter around it", functools.partial(user_code()["build_adapter"], value)
        if any(p.is_floating_point() for p in value.parameters()):
            yield "another module", functools.partial(_build_other_module, value)
    elif (plain := find_other_plain(value)) is not None:
        yield "another value", lambda: plain[0]
        twin = _find_twin(value)
        if twin is not None:
            yield "an equal of another type", lambda: twin
    elif isinstance(value, type):
        if not issubclass(value, (enum.Enum, BaseException)):
            yield "a subclass", functools.partial(_build_subclass, value)
    elif id(type(value)) in _CODE:
        yield "another function", functools.partial(user_code()["build_changed"], value)
    else:
        yield "None", lambda: None


def _find_twin(value: object) -> int | float | None:
    """What is equal and not the same."""
    if type(value) is bool:
        return int(value)
    if type(value) is int and abs(value) < 1 << 53:
        return float(value)
    if type(value) is float and value.is_integer():
        return int(value)
    return None


def find_other_plain(value: object) -> tuple[Any] | None:
    """Another value of a plain type, in a tuple of one; None for what isn't plain."""
    if isinstance(value, enum.Enum):
        others = [member for member in type(value) if member is not value]
        return (others[0],) if others else None
    if value is None:
        return (1,)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (int(value) + 1,)
    if isinstance(value, float):
        return (float(value) * 1.5 + 0.5,)
    if isinstance(value, complex):
        return (value * 1.5 + 0.5,)
    if isinstance(value, str):
        return (str(value) + "_other",)
    if isinstance(value, bytes):
        return (bytes(value) + b"_",)
    if isinstance(value, torch.dtype):
        return (other_dtype(value),)
    if isinstance(value, (tuple, list, dict, set, frozenset, deque)):
        return _other_container(value)
    return _other_array(value)


def other_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype of floats that isn't this one."""
    return torch.float32 if dtype is torch.float64 else torch.float64


_CONTAINERS = ids_of(tuple, list, dict, set, frozenset, deque, torch.Size)


def _other_container(value: Any) -> tuple[Any] | None:
    """A copy whose first item is another one, where that is plain."""
    if id(type(value)) not in _CONTAINERS:
        return None
    if isinstance(value, (set, frozenset)):
        return (type(value)([*value, "another"]),)
    if not value:
        return ({"another": 1} if isinstance(value, dict) else type(value)([1]),)
    if isinstance(value, dict):
        for key, item in value.items():
            other = find_other_plain(item)
            if other is not None:
                return ({**value, key: other[0]},)
        return None
    for index, item in enumerate(value):
        other = find_other_plain(item)
        if other is not None:
            return (type(value)([*list(value)[:index], other[0], *list(value)[index + 1 :]]),)
    return None


def _other_array(value: object) -> tuple[Any] | None:
    if module_of(type(value)) != "numpy" or not hasattr(value, "dtype"):
        return None
    try:
        return (value + 1,)  # type: ignore[operator]  # NumPy's, which need not be installed
    except TypeError:  # an array of other things than numbers
        return None


def _build_subclass(cls: type) -> Any:
    try:
        return types.new_class(name_of(cls), (cls,), {})
    except TypeError as error:
        raise CannotWrite(str(error)) from None


_CODE = ids_of(
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools._lru_cache_wrapper,
    functools.partial,
)


# --- modules ---


def _build_other_module(module: nn.Module) -> nn.Module:
    """A copy with other weights."""
    try:
        other = copy.deepcopy(module)
    except Exception as error:  # the user's own __deepcopy__, or a tensor that isn't a leaf
        raise CannotWrite(f"it can't be copied: {error}") from None
    with torch.no_grad():
        for weight in other.parameters():
            if weight.is_floating_point():
                weight.mul_(1.25).add_(0.125)
    return other


# --- tensors ---


def can_change(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of the ordinary kind: strided, with memory of its own."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
        and tensor.numel() > 0
        and type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    )


def build_other_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same form with other values."""
    with torch.no_grad():
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(find_other_values(tensor))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def find_other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Other values of the same dtype and shape: integers stay in the range that they were in."""
    values = tensor.detach()
    if values.dtype is torch.bool:
        return ~values
    if values.is_floating_point() or values.is_complex():
        return values * 1.25 + 0.125
    turned = values.flip(0) if values.dim() else values
    if not torch.equal(turned, values):
        return turned
    flat = values.clone().reshape(-1)
    flat[0] = 0 if flat[0] else 1
    return flat.view(values.shape)


def _move(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, behind another one."""
    memory = torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])
    return memory[1:].view(tensor.shape)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, each with a gap after it."""
    return tensor.reshape(-1).repeat_interleave(2)[::2].view(tensor.shape)


Form = tuple[str, Callable[[torch.Tensor], torch.Tensor]]

ANOTHER_SHAPE = "another shape"

# What `module.half()`, `module.to(memory_format=...)` and their like do: another form under the
# same identity.
FORMS: tuple[Form, ...] = (
    ("values changed in place", find_other_values),
    ("another dtype", lambda t: t.to(other_dtype(t.dtype))),
    (ANOTHER_SHAPE, lambda t: t[:1] if t.dim() and t.shape[0] > 1 else t.unsqueeze(0)),
    ("another layout", lambda t: t.mT.contiguous().mT if t.dim() > 1 else _spread(t)),
    ("another offset", _move),
)
