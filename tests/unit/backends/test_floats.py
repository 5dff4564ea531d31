"""Floats that vary stay open behind compilers, wherever they go."""

import pytest
import torch
from torch.nn import functional

import tripwire

USES = {
    "clamp": lambda x, s: x.clamp(min=-s, max=s),
    "clamp by place": lambda x, s: torch.clamp(x, 1 - s, 1 + s),
    "full": lambda x, s: x + torch.full((x.shape[0], 1), s),
    "full_like": lambda x, s: x * torch.full_like(x, s),
    "new_full": lambda x, s: x * x.new_full((x.shape[0], 1), s),
    "fill_": lambda x, s: x.clone().fill_(s) + x,
    "setitem": lambda x, s: _set(x.clone(), s),
    "masked_fill": lambda x, s: x.masked_fill(x > 0, s),
    "where": lambda x, s: torch.where(x > 0, x, s),
    "where of two numbers": lambda x, s: torch.where(x > 0, s, 0.0) + x,
    "leaky_relu": lambda x, s: functional.leaky_relu(x, s),
    "softplus": lambda x, s: functional.softplus(x, s),
    "normalize": lambda x, s: functional.normalize(x, dim=-1, eps=s),
    "alpha": lambda x, s: x.add(x * x, alpha=s) - torch.sub(x, x, alpha=s),
    "alpha in place": lambda x, s: x.clone().add_(x, alpha=-s),
    "value": lambda x, s: torch.addcmul(x, x, x, value=s),
    "lerp": lambda x, s: torch.lerp(x, x * x, s) + x.lerp(x + 1, weight=s),
    "lerp in place": lambda x, s: x.clone().lerp_(x * x, s),
    "pow": lambda x, s: x.abs() ** s,
    "rpow": lambda x, s: s**x,
    "focal": lambda x, s: (1 - x.sigmoid()) ** s * x,
    "remainder": lambda x, s: x % s,
    "linspace": lambda x, s: x * torch.linspace(0.0, s, 4),
    "tensor": lambda x, s: x * torch.tensor(s),
    "tensor of a list": lambda x, s: x * torch.tensor([s, 1.0, 2.0, s * 2]),
    "tensor of one number": lambda x, s: x * torch.tensor([[s] * 4]),
    "tensor of a dtype": lambda x, s: x * torch.tensor([s * 10] * 4, dtype=torch.int64),
    "as_tensor": lambda x, s: torch.maximum(x, torch.as_tensor(s)),
    "no dimensions": lambda x, s: x.sum().abs() ** s + torch.lerp(x.sum(), x.mean(), s),
    "ints": lambda x, s: x.long().clamp(max=s) + x.long().abs() ** s + x,
    "two places": lambda x, s: (x * s).clamp(max=s) ** s * torch.tensor(s),
}


def _set(x, s):
    x[:, 0] = s
    return x


def check(use, backend):
    compiled = tripwire.compile(use, backend=backend)
    torch.manual_seed(0)
    for index, rows in enumerate((3, 3, 3, 4, 5, 6, 3)):
        x = torch.randn(rows, 4).abs().add(0.1).requires_grad_()
        number = 0.3 + 0.1 * index
        expected, found = use(x, number), compiled(x, number)
        torch.testing.assert_close(found, expected)
        wanted = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), wanted)
    assert tripwire.statistics(compiled).traces <= 3


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_float_stays_open(name, backend) -> None:
    check(USES[name], backend)


@pytest.mark.parametrize("name", ["clamp", "full", "two places", "alpha", "tensor of a list"])
def test_a_float_stays_open_behind_inductor(name) -> None:
    check(USES[name], "inductor")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_takes_two_steps_isnt_rounded_twice(dtype) -> None:
    def call(x, s):
        return x.add(x, alpha=s), torch.lerp(x, x * x, s)

    compiled = tripwire.compile(call, backend="aot_eager")
    x = torch.linspace(-3, 3, 101, dtype=dtype)
    for index in range(5):
        number = 0.3 + 0.1 * index
        for found, expected in zip(compiled(x, number), call(x, number), strict=True):
            assert torch.equal(found, expected)


def test_a_float_that_a_compiler_must_know_is_fixed_and_sizes_stay_open() -> None:
    def call(x, s):
        return functional.celu(x, s) + x.clamp(max=s)

    compiled = tripwire.compile(call, backend="aot_eager")
    for rows, number in [(3, 0.5), (3, 0.6), (4, 0.6), (5, 0.6), (6, 0.6), (7, 0.6), (8, 0.6)]:
        x = torch.randn(rows, 4, requires_grad=True)
        torch.testing.assert_close(compiled(x, number), call(x, number))
    assert tripwire.statistics(compiled).traces <= 4
