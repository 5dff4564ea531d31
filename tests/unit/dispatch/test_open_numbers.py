"""What varies stays open: sizes and numbers that differ from call to call are traced twice."""

import enum
import gc
import json
import math
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import check_compiles, check_same
from torch import nn
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor

import tripwire
from tripwire.values.numbers import is_open

BACKENDS = ["eager", "aot_eager"]
PAIRS = [(2, 5), (3, 6), (4, 7), (2, 9), (5, 8)]


def attend(x):
    batch, length, width = x.shape
    heads = x.view(batch, length, 2, width // 2).transpose(1, 2)
    scores = heads @ heads.transpose(-1, -2)
    mask = torch.arange(length)[:, None] >= torch.arange(length)
    scores = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (scores @ heads).transpose(1, 2).reshape(batch, length, width)


def pad_to_four(x):
    x = F.pad(x, (0, (4 - x.shape[-1] % 4) % 4))
    return x.view(x.shape[0], -1, 4).mean(-1)


def pass_messages(x, source, target):
    messages = x[source].tanh()
    count = torch.zeros(x.size(0)).index_add(0, target, torch.ones(target.shape[0]))
    return torch.zeros_like(x).index_add(0, target, messages) / count.clamp(min=1)[:, None]


def mean_of_masked(x, lengths):
    mask = torch.arange(x.shape[1], device=x.device)[None, :] < lengths[:, None]
    return (x * mask.unsqueeze(-1)).sum(1) / lengths[:, None].clamp(min=1)


def rotate(x):
    angles = torch.outer(torch.arange(x.shape[1]).float(), torch.tensor([1.0, 0.1]))
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack([even * angles.cos() - odd * angles.sin(), even + odd], -1)
    return turned.flatten(-2)


SIZED = {
    "attention": (attend, [(torch.randn(b, t, 8),) for b, t in PAIRS]),
    "padding": (pad_to_four, [(torch.randn(b, t),) for b, t in [*PAIRS, (3, 13), (4, 17)]]),
    "graphs": (
        pass_messages,
        [
            (torch.randn(n, 4), torch.randint(0, n, (e,)), torch.randint(0, n, (e,)))
            for n, e in ((5, 8), (6, 9), (7, 14), (12, 30), (4, 6))
        ],
    ),
    "masks": (
        mean_of_masked,
        [(torch.randn(b, t, 3), torch.randint(1, t, (b,))) for b, t in PAIRS],
    ),
    "positions": (rotate, [(torch.randn(b, t, 4),) for b, t in PAIRS]),
    "loss": (
        lambda logits, y: F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1)),
        [(torch.randn(b, t, 5), torch.randint(0, 5, (b, t))) for b, t in PAIRS],
    ),
    "products": (
        lambda q, k: torch.einsum("btd,bsd->bts", q, k).softmax(-1),
        [(torch.randn(b, t, 4), torch.randn(b, t + 3, 4)) for b, t in PAIRS],
    ),
    "attention of torch's": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True).flatten(2),
        [(torch.randn(b, 2, t, 8),) for b, t in PAIRS],
    ),
    "scaled pictures": (
        lambda x: F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] * 2), mode="nearest"),
        [(torch.randn(1, 2, s, s + 1),) for s in (4, 5, 6, 7, 8)],
    ),
    "in a dict": (
        lambda given: {"out": given["x"] * given["y"].sum()},
        [({"x": torch.randn(b), "y": torch.randn(t)},) for b, t in PAIRS],
    ),
}


def check_open(fn, calls, *, traces=2, **options):
    compiled = check_compiles(fn, calls, traces=traces, **options)
    assert compiled.statistics().hits == len(calls) - traces
    return compiled


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZED)
def test_other_sizes_run_compiled_code_after_two_traces(name, backend) -> None:
    fn, calls = SIZED[name]
    check_open(fn, calls, backend=backend)


TABLE = torch.arange(120.0).view(10, 4, 3)


def write_into(x, n):
    y = x * TABLE.clone()
    row = y[n]
    row.add_(1)
    y[n - 1] = 2
    return y, row


PICKED = {
    "a row": lambda x, n: x * TABLE[n],
    "a column": lambda x, n: x * TABLE[:, n - 3, None],
    "a place and the rest": lambda x, n: x * TABLE[n, :, 1:],
    "the last dimension": lambda x, n: x * TABLE[..., n - 4],
    "a new dimension before": lambda x, n: x * TABLE[None, n],
    "two places, one fixed": lambda x, n: x * TABLE[n, 2] + TABLE[2, n - 3],
    "two open places": lambda x, n: x * TABLE[n, n - 3].sum() + TABLE[n, ..., n - 4],
    "from behind": lambda x, n: x * TABLE[-n] * TABLE[-2, :, n - 4][:, None],
    "one of a slice": lambda x, n: x * TABLE[n - 2 : n + 2][1, n - 3],
    "written in place": write_into,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PICKED)
def test_a_place_in_a_tensor_stays_open(name, backend) -> None:
    x = torch.randn(1, requires_grad=True)
    check_open(PICKED[name], [(x, n) for n in (4, 5, 6, 4, 5, 6)], backend=backend)


def test_a_place_that_is_not_there_raises_as_in_plain_python() -> None:
    compiled = tripwire.compile(lambda x, n: x * TABLE[n], backend="eager")
    for n in (4, 5, 6, 10, 7, -11, 99, 8):
        try:
            wanted = TABLE[n]
        except IndexError as error:
            with pytest.raises(IndexError) as caught:
                compiled(torch.ones(1), n)
            assert str(caught.value) == str(error)
        else:
            assert torch.equal(compiled(torch.ones(1), n), wanted)


def test_a_place_is_told_with_the_user_s_line() -> None:
    def pick(x, n):
        return x * TABLE[n]

    compiled = tripwire.compile(pick, backend="eager")
    for n in (4, 5):
        compiled(torch.ones(1), n)
    told = [line.strip() for line in str(tripwire.explain(compiled)).splitlines()]
    line = pick.__code__.co_firstlineno + 1
    decided = [one for one in told if one.startswith("decided at")]
    assert decided
    assert all(one.startswith(f"decided at test_open_numbers.py:{line}: s") for one in decided)


@pytest.mark.parametrize("name", [pytest.param("attention", marks=pytest.mark.slow), "graphs"])
def test_inductor_compiles_open_sizes(name) -> None:
    fn, calls = SIZED[name]
    compiled = tripwire.compile(fn, fullgraph=True, backend="inductor")
    for args in calls:
        torch.testing.assert_close(compiled(*args), fn(*args))
    assert compiled.statistics().traces == 2


NUMBERS = {
    "scale": (lambda x, s: x * s + 1, [0.5, 0.25, 0.7, 0.9, 3.0]),
    "step": (lambda x, n: x / n + n * 2, [5, 6, 7, 8, 100]),
    "size": (lambda x, n: torch.cat([x[:n], torch.zeros(n)]), [3, 4, 5, 6, 2]),
    "count": (lambda x, k: x.topk(k).values.sum(-1), [2, 3, 4, 5, 6]),
    "schedule": (lambda x, n: x * (n / (n + 10)), [5, 6, 7, 8, 100]),
    "order of additions": (lambda x, s: x * ((s + 0.1) + 0.2), [0.3, 0.7, 1e-3, 5.5, 2.25]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NUMBERS)
def test_other_numbers_run_compiled_code_after_two_traces(name, backend) -> None:
    fn, values = NUMBERS[name]
    check_open(fn, [(torch.randn(8), value) for value in values], backend=backend)


DIVISIONS = {
    "quotient": (lambda x, n: x * (1 / n), [5, 6, 7, 0, 8]),
    "quotient of floats": (lambda x, s: x * (1 / s), [0.5, 0.25, 0.7, 0.0, 0.3]),
    "floor": (lambda x, n: x * (7 // n), [5, 6, 7, 0, 8]),
    "remainder": (lambda x, n: x * (7 % n), [5, 6, 7, 0, 8]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DIVISIONS)
def test_a_division_by_an_open_number_raises_where_that_is_zero(name, backend) -> None:
    fn, values = DIVISIONS[name]
    compiled = tripwire.compile(fn, fullgraph=True, backend=backend)
    x = torch.randn(3)
    for value in values:
        if value:
            check_same(fn(x, value), compiled(x, value))
        else:
            with pytest.raises(ZeroDivisionError):
                compiled(x, value)
    assert compiled.statistics().hits == 2


BEYOND = {  # a condition of the entry for larger numbers can't be computed for the smaller ones
    "half": lambda x: x.split(max(1, x.shape[0] // 2))[0] * 2,
    "a third": lambda x: x.chunk(x.shape[0] // max(1, x.shape[0] // 3))[0] + 1,
    "rows": lambda x: x[: x.shape[0] // 2 * 2].view(-1, max(1, x.shape[0] // 2)) * 3,
    "remainder": lambda x: x * (7 % (x.shape[0] - 1) if x.shape[0] > 1 else 0),
    "quotient": lambda x: x / (10 / (x.shape[0] - 1) if x.shape[0] > 1 else 1),
    "power": lambda x: x * (10.0 ** (x.shape[0] * 100) if x.shape[0] < 4 else 3),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BEYOND)
def test_a_condition_that_this_calls_sizes_cannot_be_put_into_admits_nothing(name, backend) -> None:
    fn = BEYOND[name]
    compiled = tripwire.compile(fn, backend=backend)
    for size in (3, 3, 2, 6, 5, 1, 4, 1, 2, 6, 5):
        check_same(fn(torch.ones(size)), compiled(torch.ones(size)))
    assert compiled.statistics().hits


def test_a_float_that_a_compiler_has_no_code_for_is_closed_and_others_stay_open() -> None:
    def fn(x, most, scale):
        return torch.nn.functional.huber_loss(x, x * 2, delta=most) * (scale + 0.1)

    compiled = tripwire.compile(fn, fullgraph=True, backend="aot_eager")
    x = torch.randn(8)
    for most, scale in ((0.5, 1.0), (0.3, 2.0), (0.3, 3.0), (0.7, 4.0), (0.7, 5.0), (0.3, 6.0)):
        check_same(fn(x, most, scale), compiled(x, most, scale))
    assert compiled.statistics().traces == 3
    assert "by the back end" in str(tripwire.explain(compiled))


def test_a_float_that_only_decides_stays_open() -> None:
    fn = lambda x, s: x * 2 if s < 5.0 else x + 1  # noqa: E731
    calls = [(torch.randn(3), s) for s in (0.5, 0.6, 0.7, 0.8)]
    check_open(fn, calls, backend="aot_eager")


def test_inductor_compiles_open_numbers() -> None:
    for name in ("scale", "step"):
        fn, values = NUMBERS[name]
        compiled = tripwire.compile(fn, fullgraph=True, backend="inductor")
        for value in values:
            x = torch.randn(8)
            torch.testing.assert_close(compiled(x, value), fn(x, value))
        assert compiled.statistics().traces == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_batches_of_all_sizes_are_right(backend) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    compiled = tripwire.compile(net, backend=backend, fullgraph=True)
    for batch in (4, 6, 8, 3, 5):
        x = torch.randn(batch, 4)
        found = []
        for call in (net.forward, compiled):
            net.zero_grad()
            call(x).square().mean().backward()
            found.append([p.grad.clone() for p in net.parameters()])
        check_same(found[0], found[1])
    assert tripwire.explain(compiled).traces == 2


class Cache:
    """Grows by a row with each call."""

    def __init__(self):
        self.rows = torch.zeros(2, 3)

    def count(self):
        return self.rows.shape[0]

    def add(self, row):
        self.rows = torch.cat([self.rows, row])
        return self.rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_size_of_a_tensor_in_an_object_may_be_asked_before_it_is_used(backend) -> None:
    def extend(x, cache):
        place = torch.arange(1) + cache.count()
        return cache.add(x * place).sum(0)

    compiled = tripwire.compile(extend, backend=backend, fullgraph=True)
    plain, traced = Cache(), Cache()
    for _ in range(7):
        x = torch.randn(1, 3)
        check_same(extend(x, plain), compiled(x, traced))
        check_same(plain.rows, traced.rows)
    assert compiled.statistics().traces == 2


def test_a_cache_of_the_modules_own_grows_in_compiled_code() -> None:
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = torch.zeros(2, 3)

        def forward(self, x):
            place = self.rows.shape[0]
            self.rows = torch.cat([self.rows, x * place])
            return self.rows.mean(0) + place

    plain, net = Decoder(), Decoder()
    compiled = tripwire.compile(net, fullgraph=True)
    for _ in range(7):
        x = torch.randn(1, 3)
        check_same(plain(x), compiled(x))
    assert tripwire.explain(compiled).traces <= 3


# --- decisions ---


def by_size(x):
    if x.shape[0] > 6:
        return x * 2
    return x + 1 if x.shape[0] % 2 == 0 else x - 1


def test_each_way_of_a_decision_is_traced_once() -> None:
    calls = [torch.randn(n) for n in (2, 3, 4, 5, 8, 9, 13, 7, 4, 20, 5, 6)]
    check_compiles(by_size, calls, traces=4)


def test_a_decision_about_a_number_is_a_condition() -> None:
    def warm_up(x, step):
        return x * (step / 10 if step < 10 else 1.0)

    calls = [(torch.ones(3), step) for step in (2, 3, 4, 5, 20, 30, 40, 6)]
    check_compiles(warm_up, calls, traces=3)


ROUNDED = {  # what torch's symbols would take for another number
    "a sum that loses digits": lambda x, s: x * 3 if (s + 1e16) - 1e16 > 3.5 else x + 1,
    "a difference that isn't what was added": lambda x, s: x * ((s + 1e16) - s),
    "an order of sums": lambda x, s: x + 1 if (s + 0.1) + 0.2 == s + (0.1 + 0.2) else x - 1,
    "a quotient": lambda x, s: x * 2 if (s / 3) * 3 == s else x * 4,
    "closed": lambda x, s: x + float(f"{(s + 1e16) - 1e16}"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROUNDED)
def test_floats_are_computed_and_compared_as_python_does_it(name, backend) -> None:
    shifts = (5.5, 3.3, 2.7, 3.1, 2.9, 3.3, 0.7, 0.1, 1.1, 7.3)
    compiled = tripwire.compile(ROUNDED[name], backend=backend, fullgraph=True)
    for shift in shifts:
        x = torch.tensor([1.5], dtype=torch.float64)
        check_same(ROUNDED[name](x, shift), compiled(x, shift))
    assert compiled.statistics().hits or name == "closed"


COMPUTED = {  # with the step of a schedule, and at most this many traces
    "cosine": (lambda x, n: x * (0.5 * (1 + math.cos(math.pi * n / 100))), 2),
    "decay": (lambda x, n: x * 0.9**n, 2),
    "root": (lambda x, n: x * (n + 0.5) ** 0.5 + (n + 0.5) ** -1.5, 2),
    "square of a difference": (lambda x, n: x * (n - 4.5) ** 2, 2),
    "rest": (lambda x, n: x * ((n / 3) % 1.0 + 1), 3),  # and one where it is zero
    "floor": (lambda x, n: x * ((n / 3) // 0.25), 2),
    "logarithm": (lambda x, n: x * math.log(n) + math.sqrt(n), 2),
    "warm-up": (lambda x, n: x * min(1.0, n / 7) * max(0.1, math.pow(0.9, n)), 3),
    "a part of a length": (lambda x, n: x[: int(n * 0.5)], 3),
    "rounded": (lambda x, n: (torch.zeros(round(n * 0.7) + 1), round(n / 3, 2)), 2),
    "by a cosine": (lambda x, n: x * 2 if math.cos(n) > 0 else x * 3, 3),
    "what overflows": (lambda x, n: x * (math.exp(n * 90.0) if n < 8 else n), 3),
    "results": (lambda x, n: (x * 1, int(n * 0.7), math.cos(n)), 2),
    "other functions": (lambda x, n: x * math.lgamma(n) + math.fmod(n, 0.7) + math.cbrt(n), 2),
    "signs": (lambda x, n: x * math.copysign(1.0, n - 6.5), 2),
    "bits": (lambda x, n: (x * (n & 6) + (n | 1), n ^ 5, n >> 1, ~n, 1 << n, 12 & n), 2),
    "powers of two": (lambda x, n: (x * 2**n, 2 ** (n // 3), 10**-n), 2),
    "a sign that alternates": (lambda x, n: (x * (-1) ** n, (-2) ** n), 2),
    "a power with a modulus": (lambda x, n: (x + 1, pow(3, n, 7), pow(n, 3, 7)), 9),
    "a common divisor": (lambda x, n: (x * math.gcd(n, 6), math.isqrt(n), math.lcm(n, 2)), 2),
    "a bit": (lambda x, n: x * 2 if n & 1 else x * 3, 3),
    "whether it is whole": (lambda x, n: x * 2 if (n / 2).is_integer() else x * 3, 3),
    "whether it is a number": (lambda x, n: x if math.isnan(n * 0.5) else x * (n * 0.5), 2),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", COMPUTED)
def test_what_python_computes_of_open_numbers_is_open(name, backend) -> None:
    function, traces = COMPUTED[name]
    compiled = tripwire.compile(function, backend=backend, fullgraph=True)
    for n in (4, 5, 6, 7, 8, 9, 10, 11, 5):
        check_same(function(torch.arange(8.0) + n, n), compiled(torch.arange(8.0) + n, n))
    assert compiled.statistics().traces <= traces


def contiguous(x, n):
    return x.new_zeros(n, 4).as_strided((n, 4), make_contiguous_strides_for((n, 4))) + n


OF_TORCH = {  # torch's functions of numbers, and how many traces they take
    "max": (lambda x, n: (x * torch.sym_max(n, 3), torch.sym_max(3, n)), 2),
    "max of a float": (lambda x, n: (x * torch.sym_max(n, 3.5), torch.sym_max(2.5, n)), 2),
    "min": (lambda x, n: (x * torch.sym_min(n, x.shape[0]), torch.sym_min(20, n)), 3),
    "sum": (lambda x, n: (x * torch.sym_sum([n, 2, n]), torch.sym_sum(n, 1)), 2),
    "sum of floats": (lambda x, n: x * torch.sym_sum([n, 0.5]), 2),
    "choice": (lambda x, n: x * torch.sym_ite(n > 7, n, 3), 3),
    "negation": (lambda x, n: (x * n, torch.sym_not(n > 7), torch.sym_not(n)), 3),
    "float": (lambda x, n: (x * torch.sym_float(n), torch.sym_float(n)), 2),
    "int": (lambda x, n: (x * torch.sym_int(n), torch.sym_int(n * 0.5)), 2),
    "root": (lambda x, n: (x * torch.sym_sqrt(n), torch._sym_log2(n)), 2),
    "a size": (lambda x, n: x.new_zeros(torch.sym_max(n, x.shape[0])), 3),
    "strides": (contiguous, 2),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OF_TORCH)
def test_what_torch_computes_of_open_numbers_is_open(name, backend) -> None:
    function, traces = OF_TORCH[name]
    compiled = tripwire.compile(function, backend=backend, fullgraph=True)
    for n in (4, 5, 6, 7, 8, 9, 10, 11, 5):
        x = torch.arange(8.0) + n
        want, got = function(x, n), compiled(x, n)
        check_same(want, got)
        if isinstance(want, tuple):
            assert list(map(repr, want[1:])) == list(map(repr, got[1:]))
    assert compiled.statistics().traces <= traces


def test_torch_s_functions_of_numbers_raise_as_they_do_for_plain_ones() -> None:
    def choose(x, n):
        return x * torch.sym_ite(n > 5, n, 0.5)

    compiled = tripwire.compile(choose, backend="eager")
    for n in (4, 5, 6):
        with pytest.raises(AssertionError, match="type mismatch"):
            compiled(torch.ones(2), n)


@pytest.mark.parametrize("name", ["log", "exp", "sqrt"])
def test_a_function_that_raises_for_another_number_raises(name) -> None:
    def use(x, n):
        return x * getattr(math, name)((6 - n) * 200.0)

    compiled = tripwire.compile(use, backend="eager")
    for n in (5, 4, 5.5, 7, 5, 1, 6):
        try:
            expected = use(torch.ones(2), n)
        except (ValueError, OverflowError) as error:
            with pytest.raises(type(error), match=str(error)):
                compiled(torch.ones(2), n)
        else:
            check_same(expected, compiled(torch.ones(2), n))


@pytest.mark.parametrize("power", [lambda n: 2**n, lambda n: 1 << n])
def test_a_large_power_is_not_computed_to_find_that_code_is_not_for_it(power) -> None:
    def call(x, n):
        return x * 2 if n > 100 else x * (power(n) % 7)

    compiled = tripwire.compile(call, backend="eager")
    for n in (4, 5, 6, 70, 10**15, 7):
        check_same(call(torch.ones(2), n), compiled(torch.ones(2), n))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e308])
def test_what_is_no_number_takes_another_way(odd) -> None:
    def call(x, s):
        s = s * 10
        return x if math.isnan(s) else x * 2 if math.isinf(s) else x * s

    compiled = tripwire.compile(call, backend="eager")
    for s in (0.5, 0.7, 0.9, odd, -odd, 0.3):
        check_same(call(torch.ones(2), s), compiled(torch.ones(2), s))


def test_sizes_zero_and_one_have_traces_of_their_own() -> None:
    calls = [torch.randn(n, 3) for n in (4, 5, 6, 1, 0, 1, 0, 7)]
    check_compiles(lambda x: x.sum(0, keepdim=True) + x, calls, traces=4)


def test_a_loop_over_a_length_is_unrolled_for_each() -> None:
    def scan(x):
        state = torch.zeros(x.shape[0], 2)
        for t in range(x.shape[1]):
            state = torch.tanh(state + x[:, t])
        return state

    calls = [torch.randn(b, t, 2) for b, t in ((2, 3), (4, 4), (5, 4), (6, 3), (7, 4), (8, 3))]
    compiled = tripwire.compile(scan, fullgraph=True)
    for x in calls:
        check_same(scan(x), compiled(x))
    assert "closed at" in str(tripwire.explain(compiled))
    assert "by index()" in str(tripwire.explain(compiled))


def test_explain_tells_which_call_closed_a_size() -> None:
    compiled = tripwire.compile(lambda x: torch.gradient(x)[0], backend="eager")
    for size in (3, 4):
        compiled(torch.ones(size))
    told = str(tripwire.explain(compiled))
    assert "by gradient: " in told


def test_explain_tells_what_is_open_and_what_was_decided() -> None:
    compiled = tripwire.compile(by_size, fullgraph=True)
    for n in (9, 8, 12):
        compiled(torch.randn(n))
    told = str(tripwire.explain(compiled))
    assert "open: L['x'].shape[0] = s" in told
    assert "decided at test_open_numbers.py:" in told


# --- what an open number is to a program ---


class Color(enum.IntEnum):
    RED = 2


def close_by(use):
    return lambda x, n: (x * 2, use(n))


USES = {
    "isinstance": lambda n: (isinstance(n, int), isinstance(n, (str, float))),
    "arithmetic": lambda n: (n + 1, 2 * n - 3, n // 2, n % 3, -n, abs(-n), n**2, n / 4),
    "division": lambda n: divmod(n, 4),
    "others on the left": lambda n: (7 - n, 7 // n, 7 % n, 2**n, 7 / n),
    "bits": lambda n: (n << 1, n & 3, n | 8, n ^ 1, ~n, n.bit_length()),
    "range": lambda n: list(range(n)),
    "index": lambda n: [10, 20, 30, 40, 50, 60, 70, 80, 90, 99][n],
    "slice": lambda n: "abcdefghij"[:n],
    "repeat": lambda n: [0] * n,
    "format": lambda n: (f"{n}", f"{n:>4}", str(n), repr(n), format(n, "d")),
    "math": lambda n: (math.sqrt(n), math.ceil(n / 2), math.gcd(n, 4), math.log2(n)),
    "numpy": lambda n: (float(np.sqrt(n)), int(np.prod([n, 2])), np.zeros(n).shape),
    "numpy of a float": lambda n: (float(np.exp(-0.1 * n)), float(np.tanh(n / 7) + 1)),
    "json": lambda n: json.dumps({"n": n, "half": n / 2}),
    "min and max": lambda n: (min(n, 4), max(n, 4), sum([n, n])),
    "keys": lambda n: ({n: "a"}, n in {1, 2, 5}, {5: 1}.get(n)),
    "enums": lambda n: (n * Color.RED, Color.RED + n, n == Color.RED),
    "complex": lambda n: n * 1j,
    "comparisons": lambda n: (n == 5, n != 5, n < 7.5, n >= float("-inf"), bool(n), n is None),
    "pow": lambda n: pow(n, 2, 5),
    "conversions": lambda n: (int(n), float(n), bool(n), complex(n)),
    "rounding": lambda n: (round(n), round(n / 3, 1), math.floor(n / 3)),
    "sorting": lambda n: sorted([n, 3, 8]),
}


@pytest.mark.parametrize("name", USES)
def test_an_open_int_is_an_int_to_a_program(name) -> None:
    fn = close_by(USES[name])
    compiled = tripwire.compile(fn, fullgraph=True)
    for n in (5, 6, 7, 5, 6, 8):
        x = torch.randn(3)
        want, got = fn(x, n), compiled(x, n)
        check_same(want, got)
        assert repr(want[1]) == repr(got[1])
        assert not _holds_open(got)


@pytest.mark.parametrize("name", ["isinstance", "arithmetic", "others on the left", "math"])
def test_a_size_is_an_int_to_a_program(name) -> None:
    fn = lambda x: (x * 2, USES[name](x.shape[0]))  # noqa: E731
    compiled = tripwire.compile(fn, fullgraph=True)
    for n in (5, 6, 7, 5, 6, 8):
        x = torch.randn(n)
        want, got = fn(x), compiled(x)
        check_same(want, got)
        assert repr(want[1]) == repr(got[1])


FLOAT_USES = {
    "arithmetic": lambda s: (s + 1, 2 * s, s / 3, 1 - s, -s, abs(s), s**2, s // 0.1, s % 0.2),
    "math": lambda s: (math.exp(s), math.cos(math.pi * s), math.isnan(s)),
    "format": lambda s: (f"{s:.3f}", str(s), repr(s)),
    "comparisons": lambda s: (s < 0.6, s == 0.5, s > float("-inf"), isinstance(s, float)),
    "conversions": lambda s: (int(s), float(s), round(s, 1), s.is_integer()),
    "order of sums": lambda s: ((s + 0.1) + 0.2, s + (0.1 + 0.2)),
}


@pytest.mark.parametrize("name", FLOAT_USES)
def test_an_open_float_is_a_float_to_a_program(name) -> None:
    fn = close_by(FLOAT_USES[name])
    compiled = tripwire.compile(fn, fullgraph=True)
    for s in (0.5, 0.3, 0.7, 0.25, 0.5):
        x = torch.randn(3)
        want, got = fn(x, s), compiled(x, s)
        check_same(want, got)
        assert repr(want[1]) == repr(got[1])


# --- where numbers go ---


def _holds_open(value) -> bool:
    if isinstance(value, (tuple, list, set)):
        return any(map(_holds_open, value))
    if type(value) is dict:
        return any(map(_holds_open, [*value, *value.values()]))
    return is_open(value)


@dataclass
class Report:
    size: object
    parts: list


def test_results_hold_numbers_of_their_own_call() -> None:
    def measure(x):
        rows, columns = x.shape
        kept = Report(rows, [columns, (rows, columns)])
        return x.sum(0), kept, {"rows": rows, "half": rows / 2}, x.shape

    compiled = tripwire.compile(measure, fullgraph=True)
    for b, t in PAIRS:
        x = torch.randn(b, t)
        want, got = measure(x), compiled(x)
        assert want[1:] == got[1:]
        assert type(got[3]) is torch.Size
        assert type(got[1].size) is int
        assert [type(item) for item in got[3]] == [int, int]
    assert compiled.statistics().traces == 2


class Meter:
    pass


def store_everywhere(meter):
    seen = []

    def record(x):
        meter.rows = x.shape[0]
        meter.nested = {"in": [(x.shape[0], x.shape[1] * 2)]}
        seen.append(x.shape[0])
        return x * 2

    return record, lambda: (meter.rows, meter.nested, seen)


def test_what_a_run_stores_is_this_calls_number() -> None:
    plain, look = store_everywhere(Meter())
    traced, look_too = store_everywhere(Meter())
    compiled = tripwire.compile(traced, fullgraph=True)
    for b, t in PAIRS:
        x = torch.randn(b, t)
        check_same(plain(x), compiled(x))
        assert look() == look_too()
        assert repr(look()) == repr(look_too())
    assert compiled.statistics().traces == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_decides_beside_an_open_size(backend) -> None:
    def sign(x):
        if x.sum() > 0:
            return x * x.shape[0]
        return x - torch.arange(x.shape[0]).sum()

    calls = [torch.ones(n) * s for n, s in ((4, 1), (5, 1), (6, -1), (7, -1), (8, 1), (9, -1))]
    check_compiles(sign, calls, traces=3, backend=backend)


def test_a_value_made_of_an_open_size_is_asked_on_each_call() -> None:
    def count(x):
        if torch.ones_like(x).sum() > 6:
            return x * 2
        if torch.arange(x.shape[0]).max() > 3:
            return x * 3
        return x

    calls = [torch.randn(n) for n in (2, 3, 4, 5, 6, 7, 8, 9, 2, 6, 9)]
    compiled = tripwire.compile(count, fullgraph=True)
    for x in calls:
        check_same(count(x), compiled(x))


def test_a_size_that_values_decide_on_closes_what_leads_to_it() -> None:
    def pick(x):
        kept = x[x > 0]
        return kept.sum() + kept.shape[0], x.shape[0]

    compiled = tripwire.compile(pick, fullgraph=True)
    for n in (4, 5, 6, 5, 4):
        x = torch.randn(n)
        check_same(pick(x), compiled(x))


def test_no_open_number_is_left_in_any_object() -> None:
    meter = Meter()
    record, _ = store_everywhere(meter)
    compiled = tripwire.compile(record, fullgraph=True)
    for b, t in PAIRS[:3]:
        compiled(torch.randn(b, t))
    gc.collect()
    assert not [o for o in gc.get_objects() if is_open(o)]


def test_an_argument_with_a_past_and_a_gradient_of_another_dtype_is_only_looked_at() -> None:
    compiled = tripwire.compile(lambda x: x * x.shape[0], fullgraph=True)
    for n in (3, 4, 5):
        x = torch.ones(n, requires_grad=True)
        x.sum().backward()
        check_same((x * 2) * n, compiled(x * 2))
        with torch.no_grad():
            x.data = x.data.double()
        check_same(x * n, compiled(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_were_passed_can_be_swapped(backend) -> None:
    compiled = tripwire.compile(lambda x: x * x.shape[0], backend=backend, fullgraph=True)
    passed = [torch.randn(n) for n in (3, 4, 5)]
    for x in passed:
        compiled(x)
        torch.utils.swap_tensors(x, torch.zeros(2))


def test_numbers_that_are_not_finite_stay_closed() -> None:
    values = [1.0, 2.0, float("nan"), float("inf"), 3.0, float("nan")]
    calls = [(torch.ones(2), value) for value in values]
    compiled = tripwire.compile(lambda x, s: x * s, fullgraph=True)
    for x, value in calls:
        check_same(x * value, compiled(x, value))
    assert "that nan, not another → nan" in str(tripwire.explain(compiled))


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_of_open_sizes_bear_no_marks(backend) -> None:
    compiled = tripwire.compile(lambda x: x * 2, backend=backend, fullgraph=True)
    for n in (3, 4, 5):
        assert not vars(compiled(torch.ones(n)))


def test_a_run_that_raises_leaves_no_open_number() -> None:
    meter = Meter()

    def fail(x):
        meter.rows = x.shape[0]
        if x.shape[0] > 4:
            raise ValueError("too many")
        return x + 1

    compiled = tripwire.compile(fail)
    compiled(torch.randn(2))
    compiled(torch.randn(3))
    with pytest.raises(ValueError, match="too many"):
        compiled(torch.randn(5))
    assert type(meter.rows) is int


def test_another_thread_gets_plain_numbers() -> None:
    found = []

    def call(x):
        rows = x.shape[0]
        thread = threading.Thread(target=lambda: found.append((rows + 1, rows == 7, f"{rows}")))
        thread.start()
        thread.join()
        return x * 2

    compiled = tripwire.compile(call)
    for n in (4, 5, 6):
        compiled(torch.randn(n))
    assert found == [(5, False, "4"), (6, False, "5"), (7, False, "6")]
    assert all(type(one) is int for one, _, _ in found)


def test_a_program_that_asks_for_the_type_of_a_number_gets_plain_ones() -> None:
    def strict(x, n):
        return x * n if type(n) is int else x - n

    check_compiles(strict, [(torch.ones(2), n) for n in (2, 3, 4)], traces=3)


def test_a_value_that_open_sizes_alone_decide_is_computed_once_for_each() -> None:
    def fn(x):
        return x * 2 if (torch.arange(x.shape[0]).cumsum(0) < 20).all() else x + 1

    compiled = tripwire.compile(fn, dynamic=True, backend="aot_eager")  # drops what has no use
    sizes = (3, 4, 3, 9, 4, 3, 9)
    for n in sizes:
        x = torch.randn(n)
        check_same(fn(x), compiled(x))
    assert compiled.statistics().traces == 2
    with torch.profiler.profile(acc_events=True) as seen:
        for n in sizes:
            compiled(torch.ones(n))
    assert "aten::cumsum" not in {event.key for event in seen.key_averages()}


# --- options and marks ---


def test_dynamic_true_is_open_from_the_start() -> None:
    check_open(attend, SIZED["attention"][1], traces=1, dynamic=True)


def test_dynamic_true_opens_what_is_in_containers_and_keywords() -> None:
    def fn(pair, **named):
        return pair[0] * pair[1]["scale"] + named["bias"]

    compiled = tripwire.compile(fn, fullgraph=True, dynamic=True)
    for n in (3, 4, 5):
        pair, bias = [torch.randn(n), {"scale": torch.randn(n)}], torch.randn(n)
        pair.append(pair)
        check_same(fn(pair, bias=bias), compiled(pair, bias=bias))
    assert compiled.statistics().traces == 1


def test_marked_sizes_are_open_from_the_start() -> None:
    calls = [torch.randn(n, 3) for n in (4, 5, 6)]
    torch._dynamo.mark_dynamic(calls[0], 0)
    check_open(lambda x: x * x.shape[0], calls, traces=1)


def test_sizes_marked_static_are_never_open() -> None:
    calls = [torch.randn(n, 3) for n in (4, 5, 6)]
    for x in calls:
        torch._dynamo.mark_static(x, 0)
    check_compiles(lambda x: x * x.shape[0], calls, traces=3)


# --- back ends ---


def test_a_back_end_of_ones_own_gets_symbols_as_torch_compile_gives_them() -> None:
    given = []

    def backend(module, examples):
        given.append([type(example) for example in examples])
        return module.forward

    compiled = tripwire.compile(lambda x: x.view(-1, x.shape[0]), backend=backend)
    for n in (2, 3, 4):
        compiled(torch.randn(n, n))
    assert given == [[torch.Tensor], [torch.SymInt, FakeTensor]]


def test_a_compiler_of_ones_own_through_aot_autograd_bakes_no_size() -> None:
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda module, examples: module.forward)
    check_open(attend, SIZED["attention"][1], backend=backend)


def test_what_the_compiler_assumes_is_a_condition() -> None:
    def backend(module, examples):
        symbol = next(one for one in examples if isinstance(one, torch.SymInt))
        if bool(symbol < 10):
            return lambda *inputs: module(*inputs)
        return module.forward

    calls = [torch.randn(n, 2) for n in (3, 4, 5, 12, 13, 6)]
    fn = lambda x: x * x.shape[0]  # noqa: E731
    compiled = tripwire.compile(fn, backend=lambda m, e: backend(m, e) if len(e) > 1 else m.forward)
    for x in calls:
        check_same(fn(x), compiled(x))
    assert compiled.statistics().traces == 3


# --- marks that AOTAutograd leaves for Dynamo ---------------------------------------------------

HANDED_BACK = {
    "an argument": lambda x, y: x,
    "an argument beside a result": lambda x, y: (x * 2, x),
    "the other argument": lambda x, y: [x * 2, y],
    "in a dict": lambda x, y: {"t": x + 1, "x": x},
    "changed in place": lambda x, y: x.add_(1),
    "a view": lambda x, y: (x.view(-1), x * 2),
}


@pytest.mark.parametrize("name", HANDED_BACK)
def test_an_argument_that_is_handed_back_bears_no_marks_of_a_compiler(name) -> None:
    compiled = tripwire.compile(HANDED_BACK[name], backend="aot_eager")
    for size in (2, 3, 4, 5):
        x, y = torch.ones(size, 4), torch.ones(size)
        result = compiled(x, y)
        parts = result.values() if isinstance(result, dict) else result
        tensors = [result] if isinstance(result, torch.Tensor) else list(parts)
        assert [vars(tensor) for tensor in (x, y, *tensors)] == [{}] * (2 + len(tensors))
    assert compiled.statistics().hits >= 2


KEPT = {
    "for the backward": (lambda x, w: (x * w).sum(), False),
    "as a matrix": (lambda x, w: x.t() @ w, False),
    "a view first": (lambda x, w: (x * w).sum(), True),
    "with a result that is it": (lambda x, w: ((x * w).sum(), x), False),
    "in the second of two parts": (lambda x, w: (x[x > 0].sum() * x * w).exp(), False),
}


@pytest.mark.parametrize("name", KEPT)
def test_an_argument_that_the_backward_needs_bears_no_marks_of_a_compiler(name) -> None:
    fn, is_view = KEPT[name]
    compiled = tripwire.compile(fn, backend="aot_eager")
    for index, size in enumerate((3, 4, 5, 6, 7)):
        x = torch.ones(1, size, 4)[0] if is_view and index < 3 else torch.ones(size, 4)
        compiled(x, torch.ones(size, 4, requires_grad=True))
        assert vars(x) == {}
    assert compiled.statistics().hits >= 2


@pytest.mark.parametrize(
    "mark", ["_dynamo_weak_dynamic_indices", "_dynamo_propagated_dynamic_indices"]
)
def test_an_argument_keeps_the_marks_that_it_came_with(mark) -> None:
    compiled = tripwire.compile(lambda x: (x * 2, x), backend="aot_eager")
    for size in (2, 3, 4, 5):
        x, dims = torch.ones(size, 4), {1}
        setattr(x, mark, dims)
        compiled(x)
        assert vars(x) == {mark: {1}}
        assert getattr(x, mark) is dims


def choose(x):
    return x.sum(0) if x.shape[0] <= 8 else x.mean(0)


def check_marked(fn, sizes, traces, *, backend="eager", **marks):
    fast = tripwire.compile(fn, backend=backend)
    for size in sizes:
        x = torch.randn(size, 3)
        torch._dynamo.mark_dynamic(x, 0, **marks)
        torch.testing.assert_close(fast(x), fn(x))
    assert fast.statistics().traces == traces
    return fast


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_range_is_traced_once_and_what_is_beyond_once_more(backend) -> None:
    check_marked(choose, [3, 4, 8, 2, 5], 1, backend=backend, min=2, max=8)
    check_marked(choose, [3, 9, 4, 20, 5, 12], 2, backend=backend, min=2, max=8)
    check_marked(choose, [3, 2, 5, 6, 3], 2, backend=backend, min=4)


def test_code_for_a_range_takes_no_other_sizes() -> None:
    fast = check_marked(lambda x: x * 2, [3, 8], 1, min=2, max=8)
    fast(torch.ones(9, 3))
    assert fast.statistics().traces == 2


def test_a_mark_that_the_code_cant_meet_is_told(caplog) -> None:
    def count(x):
        return x * len(range(x.shape[0]))

    check_marked(count, [3, 4], 2)
    assert "L['x'].shape[0] is marked as dynamic" in caplog.text
    assert "[mark-unmet]" in caplog.text
    x = torch.ones(3)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(tripwire.CannotTrace, match="marked as dynamic"):
        tripwire.compile(count, backend="eager", fullgraph=True)(x)


def test_who_marks_a_size_as_static_and_as_dynamic_gets_it_open() -> None:
    fast = tripwire.compile(lambda x: x * 2, backend="eager")
    for size in (3, 4, 5):
        x = torch.ones(size)
        torch._dynamo.mark_static(x)
        torch._dynamo.mark_dynamic(x, 0)
        fast(x)
    assert fast.statistics().traces == 1


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True), (0.0, False)])
def test_dropout_that_hands_back_a_view_leaves_sizes_open(p, training, inplace) -> None:
    def first(x):
        y = torch.nn.functional.dropout(x[:, 0], p, training, inplace)
        return y * 2 if y.is_contiguous() else y.t() * 3

    check_compiles(first, [(torch.ones(n, 3, 4),) for n in (2, 3, 4, 5)], traces=2)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no groups")
@pytest.mark.parametrize("width", [16, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_of_groups_that_are_multiplied_stay_open(dtype, width) -> None:
    weight = torch.randn(4, 32, width, dtype=dtype)

    def call(x):
        rows = x.flatten(0, 1)
        ends = torch.arange(1, 5) * rows.shape[0] // 4
        found = torch._grouped_mm(rows, weight, offs=ends.to(torch.int32))
        return found.view(*x.shape[:2], -1) * 2

    try:
        call(torch.ones(2, 6, 32, dtype=dtype))
    except RuntimeError:
        pytest.skip("torch's kernel doesn't take these")
    compiled = tripwire.compile(call, backend="eager")
    for batch, length in ((2, 6), (3, 6), (2, 9), (3, 7), (4, 5), (2, 8), (5, 11)):
        x = torch.randn(batch, length, 32, dtype=dtype)
        check_same(call(x), compiled(x))
    if width % 8 == 0:  # else rows are padded, and how far depends on the dtype
        assert compiled.statistics().traces <= 3
