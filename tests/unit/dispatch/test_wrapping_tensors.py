"""A tensor made of others says more of itself than a shape: its context is checked, too."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

import tripwire


class Scaled(torch.Tensor):
    """Stands for `inner` times `factor`; computing with it gives plain tensors."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, factor: float) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, factor: float) -> None:
        self.inner = inner
        self.factor = factor

    def __repr__(self) -> str:
        return f"Scaled({self.factor})"

    def __tensor_flatten__(self):
        return ["inner"], self.factor

    @staticmethod
    def __tensor_unflatten__(parts, factor, size, stride):
        return Scaled(parts["inner"], factor)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map(lambda a: a.inner * a.factor if isinstance(a, Scaled) else a, args)
        return func(*plain, **(kwargs or {}))


def double(x):
    return x * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_context_of_a_wrapping_tensor_is_part_of_an_entry(backend) -> None:
    compiled = tripwire.compile(double, backend=backend)
    for factor in (1.0, 1.0, 3.0, 1.0, 3.0):
        x = Scaled(torch.arange(3.0), factor)
        torch.testing.assert_close(compiled(x), double(x))
    assert compiled.statistics().traces == 2
    assert compiled.statistics().hits == 3


def test_so_is_the_form_of_what_it_wraps() -> None:
    compiled = tripwire.compile(double, backend="aot_eager")
    for stride in ((3, 1), (3, 1), (1, 2), (1, 2)):
        x = Scaled(torch.arange(6.0).as_strided((2, 3), stride), 2.0)
        torch.testing.assert_close(compiled(x), double(x))
    assert compiled.statistics().hits == 2
