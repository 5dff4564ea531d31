"""Scripts: which scripted functions have results that are sized by shapes alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from tripwire.tracing.bodies import has_plain_sizes

X = torch.tensor([1.0, -2.0, 3.0])


def elementwise(x: Tensor, scale: float):
    return torch.where(x > 0, x * scale, torch.sqrt(x.abs()) + 1)


def expanded(x: Tensor, y: Tensor):
    return x.unsqueeze(0).expand([y.size(0), x.size(-1)])


def made(x: Tensor, n: int):
    if n > 2 and x.dim() == 1:
        return torch.arange(n // 2, device=x.device)
    return torch.zeros([x.size(0), 2])


def looped(x: Tensor, n: int):
    parts = [x]
    for i in range(n):
        parts.append(x * i)
    return torch.stack(parts)


def in_place(x: Tensor):
    y = x.clone()
    y.add_(1)
    return y.to(torch.float64)


def calls(x: Tensor):
    return elementwise(x, 2.0) + 1


def optional(x: Tensor, y: Tensor | None = None):
    return x if y is None else x + y


def masked(x: Tensor):
    return x[x > 0]


def positions(x: Tensor):
    return x.nonzero()


def where_alone(x: Tensor):
    return torch.where(x > 0)[0]


def branching(x: Tensor):
    if bool(x.sum() > 0):
        return x[:2]
    return x


def counted(x: Tensor):
    return torch.zeros([int(x[0])])


def sliced(x: Tensor):
    return x[: int(x[0].item())]


def repeated(x: Tensor):
    return torch.repeat_interleave(x, x.abs().long())


def called_masked(x: Tensor):
    return masked(x) * 2


def printed(x: Tensor):
    print(x)
    return x


def script(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(function)


@pytest.mark.parametrize(
    "function", [elementwise, expanded, made, looped, in_place, calls, optional]
)
def test_shapes_decide(function) -> None:
    assert has_plain_sizes(script(function))


@pytest.mark.parametrize(
    "function",
    [masked, positions, where_alone, branching, counted, sliced, repeated, called_masked, printed],
)
def test_values_may_decide(function) -> None:
    assert not has_plain_sizes(script(function))


def test_a_tensor_in_the_script_is_not_plain() -> None:
    kept = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: x + kept, (X,), check_trace=False)
    assert not has_plain_sizes(traced)
