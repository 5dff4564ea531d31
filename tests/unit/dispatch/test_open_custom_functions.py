"""Sizes and numbers stay open through custom autograd functions whose code is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.autograd import Function

import tripwire

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
SCALE = 2.0


class Swish(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s * (1 + x * (1 - s)))


class Reverse(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g * ctx.factor, None


class Apart(Function):
    @staticmethod
    def forward(x, n):
        return x[:, :n].clone(), x[:, n:] * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g, h):
        return torch.cat([g, h * 2], 1), None


class Gated(Function):
    """Its form depends on a number."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.double() * factor if factor > 0.5 else x * factor

    @staticmethod
    def backward(ctx, g):
        return g.to(torch.float32) * ctx.factor, None


class Scaled(Function):
    """Its backward reads a global, so it isn't compiled."""

    @staticmethod
    def forward(ctx, x):
        return x * SCALE

    @staticmethod
    def backward(ctx, g):
        return g * SCALE


class Mean(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        return x.sum(0) / x.shape[0]

    @staticmethod
    def backward(ctx, g):
        return g.expand(ctx.rows, -1) / ctx.rows


def check(program, calls, *, traces, backend, hits=None):
    """Results and gradients are plain autograd's; most calls are hits."""
    compiled = tripwire.compile(program, backend=backend)
    for number, args in enumerate(calls):
        found = []
        for call in (compiled, program):
            x = torch.randn(args[0], 6, generator=torch.Generator().manual_seed(number))
            x.requires_grad_()
            results = call(x, *args[1:])
            results = results if isinstance(results, tuple) else (results,)
            sum(result.pow(2).sum() for result in results).backward()
            found.append((*results, x.grad))
        torch.testing.assert_close(*found)
    told = compiled.statistics()
    assert told.traces <= traces, tripwire.explain(compiled)
    assert told.hits >= (len(calls) - traces if hits is None else hits)


SIZES = [(4,), (5,), (6,), (7,), (9,), (12,), (5,), (4,)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [Swish, Scaled, Mean])
def test_sizes_stay_open(function, backend) -> None:
    check(lambda x: function.apply(x.sin()) * 2, SIZES, traces=2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_with_an_activation_of_its_own_takes_any_batch(backend) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8))

    def run(x):
        return Swish.apply(net[1](Swish.apply(net[0](x))))

    check(run, SIZES, traces=2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float_stays_open(backend) -> None:
    calls = [(4, 2 / (1 + math.exp(-n / 5)) - 1) for n in range(10)]
    check(lambda x, f: Reverse.apply(x.sin(), f) * 2, calls, traces=3, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float_and_sizes_stay_open(backend) -> None:
    calls = [(4 + n % 5, n / 7) for n in range(12)]
    check(lambda x, f: Reverse.apply(x.sin(), f) * 2, calls, traces=4, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_int_that_is_a_size_stays_open(backend) -> None:
    calls = [(4, 2), (4, 3), (4, 4), (5, 2), (6, 3), (7, 4), (8, 2)]
    check(lambda x, n: Apart.apply(x.sin(), n), calls, traces=4, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_that_decides_on_the_form_is_followed(backend) -> None:
    calls = [(4, 0.1), (4, 0.2), (4, 0.9), (4, 0.8), (5, 0.3), (6, 0.7), (4, 0.6), (5, 0.4)]
    check(lambda x, f: Gated.apply(x.sin(), f), calls, traces=8, hits=0, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of", ["float", "int"])
def test_numbers_out_of_tensors_are_right(of, backend) -> None:
    def run(x, number):
        if of == "int":
            return Apart.apply(x.sin(), number.item())
        return Reverse.apply(x.sin(), number.item())

    numbers = [torch.tensor(n if of == "int" else n / 4) for n in (2, 3, 4, 5, 2, 3)]
    check(run, [(4, n) for n in numbers], traces=6, hits=0, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_annealed_attribute_stays_open(backend) -> None:
    class Head(nn.Module):
        factor = 0.0

        def forward(self, x):
            return Reverse.apply(x.sin(), self.factor) * 2

    head = Head()
    compiled = tripwire.compile(head, backend=backend)
    for step in range(10):
        head.factor = step / 10
        found = []
        for call in (compiled, head.forward):
            x = torch.arange(6.0).requires_grad_()
            call(x).sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(*found)
    assert compiled.statistics().traces <= 3


class Quantized(Function):
    """It rounds tensors; numbers are only computed with."""

    @staticmethod
    def forward(ctx, x, scale, low, high):
        steps = torch.round(x / scale)
        ctx.save_for_backward((steps >= low) & (steps <= high))
        return steps.trunc().clamp(low, high).type(x.dtype) * scale

    @staticmethod
    def backward(ctx, g):
        (inside,) = ctx.saved_tensors
        return g * inside.int(), None, None, None


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_rounds_tensors_gets_open_numbers(backend) -> None:
    def run(x, high):
        return Quantized.apply(x, x.detach().abs().max() / high, -high - 1, high)

    check(run, [(4, high) for high in (127, 63, 31, 15, 7, 3, 127)], traces=2, backend=backend)


def rounded(n):
    return round(n, -1)


class Rounded(Function):
    """Torch's symbols round otherwise than ints do."""

    @staticmethod
    def forward(ctx, x, n):
        return x * rounded(n)

    @staticmethod
    def backward(ctx, g):
        return g, None


class RoundedLater(Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        return x * n

    @staticmethod
    def backward(ctx, g):
        return g * rounded(ctx.n), None


class Halved(Function):
    """Torch takes `int(-n / 2)` for `-n // 2`."""

    @staticmethod
    def forward(ctx, x, n):
        return x * int(-n / 2)

    @staticmethod
    def backward(ctx, g):
        return g, None


class Truncated(Function):
    @staticmethod
    def forward(ctx, x, n):
        return x * math.trunc(-n / 2)

    @staticmethod
    def backward(ctx, g):
        return g, None


class OfNumbers(Function):
    @staticmethod
    def forward(ctx, x, n):
        return x * (n if isinstance(n, int) else 1)

    @staticmethod
    def backward(ctx, g):
        return g, None


class OfTexts(Function):
    @staticmethod
    def forward(ctx, x, n):
        return x * {"12": 3.0, "17": 4.0}.get(f"{n}", 1.0)

    @staticmethod
    def backward(ctx, g):
        return g, None


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("function", [Rounded, RoundedLater, Halved, Truncated, OfNumbers, OfTexts])
def test_code_that_torchs_symbols_answer_otherwise_gets_numbers(function, backend) -> None:
    calls = [(4, n) for n in (3, 2, 12, 1, 17, 7, -1)]
    check(lambda x, n: function.apply(x.sin(), n), calls, traces=7, hits=0, backend=backend)


class Edge(Function):
    """Torch adds 0.2 and 0.1 first, which gives another float."""

    @staticmethod
    def forward(ctx, x, f):
        return x * 2 if f + 0.2 + 0.1 >= 1.0 else x * 3

    @staticmethod
    def backward(ctx, g):
        return g, None


class EdgeLater(Function):
    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return (g if ctx.f + 0.2 + 0.1 >= 1.0 else g * 3), None


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("function", [Edge, EdgeLater])
@pytest.mark.parametrize("floats", [(0.9, 0.8, 0.7, 0.6, 0.7), (0.9, 0.7, 0.6, 0.75, 0.7)])
def test_a_float_decides_as_in_python(floats, function, backend) -> None:
    calls = [(4, f) for f in floats]
    check(lambda x, f: function.apply(x.sin(), f), calls, traces=6, hits=0, backend=backend)


class Maybe(Function):
    @staticmethod
    def forward(ctx, x, n):
        return None if n > 4 else x * n

    @staticmethod
    def backward(ctx, g):
        return g, None


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_number_that_decides_whether_there_is_a_result_is_followed(backend) -> None:
    def run(x, n):
        found = Maybe.apply(x.sin(), n)
        return x * 7 if found is None else found

    calls = [(4, n) for n in (5, 6, 3, 7, 2, 8, 4)]
    check(run, calls, traces=7, hits=0, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("name", ["deepcopy", "as_tensor", "dropout", "tensor", "relu"])
def test_a_function_may_have_a_name_of_torchs(name, backend) -> None:
    custom = type(Reverse)(name, (Reverse,), {})
    calls = [(4 + n % 3, n / 7) for n in range(8)]
    check(lambda x, f: custom.apply(x.sin(), f) * 2, calls, traces=4, backend=backend)


@torch.library.custom_op("tripwire_names::deepcopy", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@scaled.register_fake
def _(x, by):
    return torch.empty_like(x)


def test_an_operator_may_have_a_name_of_torchs() -> None:
    compiled = tripwire.compile(lambda x, f: (scaled(x, f), scaled(x, f).shape), backend="eager")
    for number in range(1, 8):
        x = torch.ones(4 + number % 3)
        torch.testing.assert_close(compiled(x, number / 7), (x * (number / 7), x.shape))
