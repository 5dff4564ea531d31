"""Floats of NumPy's that vary stay open, and are of NumPy's type wherever a call shows them."""

import copy
import warnings

import numpy as np
import pytest
import torch
from support import check_same

import tripwire
from tripwire.tracing import casts

BACKENDS = ["eager", "aot_eager"]
needs_c = pytest.mark.skipif(casts._casts is None, reason="the C module answers the calls")
SCHEDULE = np.linspace(0.05, 1.0, 40)
RATES = [np.float64(0.5) / (i + 1) for i in range(40)]


class Reversed(torch.autograd.Function):
    """A gradient reversal."""

    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg() * ctx.alpha, None


class Scaled(torch.autograd.Function):
    """No float of Python's has `item`."""

    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha.item()
        return x * alpha.item()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.alpha, None


# With a float of NumPy's. Numbers that are returned show their types.
OPEN = {
    "a factor": lambda x, f: x * f,
    "on the left": lambda x, f: f * x - f,
    "arithmetic": lambda x, f: (x + (2 * f - 0.25) / 3, 2 * f, f * f - 1, f // 0.1, f % 0.07, -f),
    "with constants of NumPy's": lambda x, f: (x * (np.float64(0.5) * f), np.float64(3) - f),
    "powers": lambda x, f: (x * f**2, f**0.5, 2**f, pow(f, 3)),
    "in place": lambda x, f: x.clone().mul_(f).add_(x, alpha=2).sub_(f),
    "decided": lambda x, f: (x * f if f > 0.01 else x, f > 0.01, f == 7.0, bool(f)),
    "functions": lambda x, f: (x * (2 / (1 + np.exp(-10 * f)) - 1), np.sqrt(f), np.maximum(f, 0.2)),
    "of two": lambda x, f: (x * np.hypot(f, f + 1), np.power(f, 1.5)),
    "interpolated": lambda x, f: x * np.interp(f, [0, 0.2, 1.0], [0.0, 1.0, 0.1]),
    "as floats": lambda x, f: (x * float(f), float(f) * 2, f.item() + 1, float(f * 3)),
    "compared in min": lambda x, f: (x * min(f, np.float64(0.3)), max(f, f / 2)),
    "rounded": lambda x, f: (x + round(f * 10), round(f, 2)),
    "clamped": lambda x, f: x.clamp(-f, f),
    "numbers out of tensors": lambda x, f: (x * (x.max().item() * f), f - x.min().item()),
    "reversal": lambda x, f: Reversed.apply(x, f) * 2,
    "isinstance": lambda x, f: (x * f, isinstance(f, float), isinstance(f, np.floating)),
}
# These ask for what only the number itself has.
CLOSED = {
    "shown": lambda x, f: (x * 2, repr(f), f"{f:.3f}"),
    "attributes": lambda x, f: (x * 2, f.dtype, f.nbytes, f.real, f.round(1), f.shape),
    "in arrays": lambda x, f: (x * 2, np.array([f, 1.0]).tolist(), np.float64(f), np.full(2, f)[0]),
    "with arrays": lambda x, f: (x * 2, list(f * np.ones(2)), list(np.ones(2) - f)),
    "a tensor": lambda x, f: (x * 2, torch.tensor(f), torch.full((2,), f)),
    "a function that asks for more": lambda x, f: Scaled.apply(x, f) * 2,
    "of integers": lambda x, f: (x * 2, np.floor(f).astype(int), int(f * 10)),
    "reduced": lambda x, f: (x * 2, np.add.reduce([f, f]), np.mean([f, 1.0]), np.clip(f, 0, 0.2)),
    "divided by zero": lambda x, f: (x * 2, f / (f - f)),
}


def check_calls(function, calls, *, traces, **options) -> None:
    compiled = tripwire.compile(function, **options)
    for args in calls:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of a division by zero
            want, got = function(*args), compiled(*args)
        check_same(want, got)
        if isinstance(want, tuple):
            assert [repr(one) for one in want[1:]] == [repr(one) for one in got[1:]]
    assert compiled.statistics().traces <= traces


def floats():
    return [(torch.randn(3, requires_grad=False), np.float64(0.1 + i / 13)) for i in range(6)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPEN)
@needs_c
def test_a_float_of_numpys_stays_open(name, backend) -> None:
    check_calls(OPEN[name], floats(), traces=2, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", BACKENDS)
@needs_c
def test_the_gradient_of_a_reversal_is_that_of_its_call(backend) -> None:
    compiled = tripwire.compile(lambda x, f: Reversed.apply(x * 2, f) * 3, backend=backend)
    for _, factor in floats():
        x = torch.ones(3, requires_grad=True)
        compiled(x, factor).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3,), -6 * factor, dtype=torch.float32))
    assert compiled.statistics().traces == 2


@pytest.mark.parametrize("name", CLOSED)
def test_what_asks_for_more_gets_the_float_itself(name) -> None:
    check_calls(CLOSED[name], floats(), traces=6, backend="eager")


def test_another_type_of_float_is_another_call() -> None:
    calls = [(torch.ones(2), kind(0.1 + i / 7)) for i in range(6) for kind in (float, np.float64)]
    check_calls(lambda x, f: (x * f, f * 2, f + 1), calls, traces=4, backend="eager")


PLACES = {
    "an array": (lambda x, i: x * SCHEDULE[i], 2),
    "an array, as a float": (lambda x, i: (x * float(SCHEDULE[i]), 1 - SCHEDULE[i]), 2),
    "from the end": (lambda x, i: x * SCHEDULE[i - 20], 2),
    "a list": (lambda x, i: (x * RATES[i], RATES[i]), 2),
    "made in the call": (lambda x, i: x * np.linspace(0, 1, 20)[i], 2),
    "interpolated": (lambda x, i: x * np.interp(i, [0, 5, 20], [0, 1.0, 0]), 2),
    "a cosine": (lambda x, i: x * (0.5 * (1 + np.cos(np.pi * i / 20))), 2),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PLACES)
@needs_c
def test_what_a_schedule_has_at_an_open_index_is_open(name, backend) -> None:
    function, traces = PLACES[name]
    calls = [(torch.ones(2), i) for i in (2, 3, 4, 7, 11)]
    check_calls(function, calls, traces=traces, backend=backend, fullgraph=True)


def test_a_schedule_that_is_written_to_is_noticed() -> None:
    schedule = np.linspace(0.1, 1, 10)
    compiled = tripwire.compile(lambda x, i: x * schedule[i], backend="eager")
    for i in (2, 3, 4, 5):
        torch.testing.assert_close(compiled(torch.ones(1), i).item(), float(schedule[i]))
        schedule[i + 1] = i


class Annealed(torch.nn.Module):
    """A module with a rate of NumPy's, which each call lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = np.float64(0.5)
        self.seen: list[object] = []

    def forward(self, x):
        self.rate = self.rate * 0.9
        return x * self.rate


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rate_that_calls_write_keeps_its_type(backend) -> None:
    plain, other = Annealed(), Annealed()
    compiled = tripwire.compile(other, backend=backend)
    for step in range(7):
        x = torch.full((2,), 1.0 + step)
        check_same(plain(x), compiled(x))
        assert repr(plain.rate) == repr(other.rate)
        if step == 4:
            plain.rate = other.rate = np.float64(0.8)
    assert tripwire.statistics(compiled).traces <= 3


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_takes_rates_of_numpys(name) -> None:
    torch.manual_seed(0)
    mine = torch.nn.Linear(3, 2)
    its = copy.deepcopy(mine)
    optimizers = [OPTIMIZERS[name](net.parameters()) for net in (mine, its)]
    step = tripwire.compile(optimizers[1].step, backend="eager")
    for index in range(7):
        x = torch.randn(4, 3)
        runs = optimizers[0].step, step
        for net, optimizer, run in zip((mine, its), optimizers, runs, strict=True):
            optimizer.zero_grad()
            net(x).pow(2).mean().backward()
            optimizer.param_groups[0]["lr"] = np.interp(index, [0, 4, 10], [0.01, 0.1, 0.02])
            run()
        check_same(list(mine.parameters()), list(its.parameters()))
    assert step.statistics().traces <= 3


@pytest.mark.slow
def test_a_float_of_numpys_stays_open_behind_inductor() -> None:
    check_calls(OPEN["functions"], floats(), traces=2, fullgraph=True)
