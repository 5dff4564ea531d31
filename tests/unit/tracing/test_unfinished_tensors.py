"""Tensors without a shape, or of a class that can't say yet what they wrap: calls still run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

import tripwire


def check(fn, backend, make=lambda n: (torch.full((2, 3), float(n)),), calls=3):
    """Three calls, each on its own arguments, give what plain calls give; the refusals."""
    compiled = tripwire.compile(fn, backend=backend, on_backend_error="eager")
    for n in range(calls):
        plain_args, args = make(n), make(n)
        torch.manual_seed(n)
        plain = fn(*plain_args)
        torch.manual_seed(n)
        got = compiled(*args)
        assert got.tolist() == plain.tolist()
        assert [a.tolist() for a in args] == [a.tolist() for a in plain_args]
    return [refusal.slug for refusal in tripwire.explain(compiled).refusals]


# --- tensors without a shape ---------------------------------------------------------------------


def makes_a_lazy_layer(x):
    nn.LazyLinear(3)
    return x * 2


def calls_a_lazy_layer(x):
    with torch.no_grad():
        layer = nn.LazyLinear(3)
        layer(x)
        layer.weight.fill_(2.0)
        layer.bias.fill_(1.0)
        return layer(x)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.param = UninitializedParameter()

    def forward(self, x):
        return x + 1


def makes_a_module_with_one(x):
    return Holder()(x)


def makes_a_buffer(x):
    UninitializedBuffer()
    return x + 1


def makes_one_and_goes_on(x):
    y = x.relu_()
    UninitializedParameter()
    y.add_(1)
    return y * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "fn",
    [
        makes_a_lazy_layer,
        calls_a_lazy_layer,
        makes_a_module_with_one,
        makes_a_buffer,
        makes_one_and_goes_on,
    ],
)
def test_a_lazy_tensor_that_the_run_makes_is_a_refusal(fn, backend) -> None:
    assert check(fn, backend) == ["lazy-parameter"]


# --- subclasses that can't say yet what they wrap ------------------------------------------------


class Scaled(torch.Tensor):
    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data, scale):
        super().__init__()
        self._data = data
        self._scale = scale

    def __tensor_flatten__(self):
        return ["_data"], {"scale": self._scale}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["_data"], context["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        return func(*(a._data if isinstance(a, Scaled) else a for a in args), **(kwargs or {}))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_half_made_subclass_can_be_finished_by_a_compiled_call(backend) -> None:
    finish = tripwire.compile(Scaled.__init__, backend=backend, on_backend_error="eager")
    for n in range(3):
        data = torch.full((2,), float(n))
        shell = Scaled.__new__(Scaled, data, 2.0 + n)
        finish(shell, data, 2.0 + n)
        assert shell._data is data
        assert shell._scale == 2.0 + n


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_half_made_subclass_can_be_passed_along(backend) -> None:
    def along(shell, x):
        return x * shell.shape[0]

    compiled = tripwire.compile(along, backend=backend)
    for n in range(3):
        x = torch.full((2,), float(n))
        shell = Scaled.__new__(Scaled, torch.ones(2 + n), 1.0)
        assert compiled(shell, x).tolist() == along(shell, x).tolist()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_subclass_that_is_made_and_used_inside(backend) -> None:
    check(lambda x: Scaled(x, 2.0) + 1, backend)
    check(lambda x: x.sin() + Scaled(x, 2.0)._data, backend)
