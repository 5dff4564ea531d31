"""Functions that C has, of open numbers: by whatever name they are called, results stay open."""

import builtins
import math
import operator
import re
import threading
from math import cos, exp, pow, sqrt

import numpy as np
import pytest
import torch
from support import check_same

import tripwire
from tripwire.tracing import casts

BACKENDS = ["eager", "aot_eager"]
needs_c = pytest.mark.skipif(casts._casts is None, reason="the C module answers the calls")
root = sqrt
FUNCTIONS = {"decay": exp}


def by_default(x, n, function=cos):
    return x * function(n / 10)


OPEN = {  # with at most this many traces
    "by name": (lambda x, n: x * exp(-0.05 * n) + cos(n), 2),
    "under another name": (lambda x, n: x * root(n), 2),
    "out of a dict": (lambda x, n: x * FUNCTIONS["decay"](-n / 3), 2),
    "as a default": (by_default, 2),
    "two numbers": (lambda x, n: x * pow(n / 10, 0.5), 2),
    "mapped": (lambda x, n: x * sum(map(sqrt, (n, n + 1))), 2),
    "unpacked": (lambda x, n: x * math.atan2(*(n, 2)), 2),
    "divmod": (lambda x, n: (x + divmod(n, 4)[1], divmod(n, 4)[0], divmod(n / 2, 0.3)), 3),
    "divmod on the right": (lambda x, n: (x * 2, divmod(97, n), divmod(9.5, n)), 2),
    "warm-up": (lambda x, n: x * min(1.0, n / 7), 2),
    "between": (lambda x, n: x * max(0.2, min(n / 7, 1.0)), 2),
    "of a list": (lambda x, n: x * max([0.5, n / 9, n / 11]), 2),
    "of three": (lambda x, n: x * min(n / 3, 2.5, n * 0.3), 2),
    "results": (lambda x, n: (x * 1, min(1.0, n / 7), max((0.1, n / 70))), 2),
    "warm-up and every fourth": (
        lambda x, n: (x * 2 if n % 4 == 0 else x) * min(1.0, n / 7),
        3,
    ),
}


def check_calls(function, calls, *, traces, **options) -> None:
    compiled = tripwire.compile(function, fullgraph=True, **options)
    for args in calls:
        want, got = function(*args), compiled(*args)
        check_same(want, got)
        assert [type(one) for one in want] == [type(one) for one in got]
    assert compiled.statistics().traces <= traces


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPEN)
def test_what_a_function_gives_for_an_open_number_is_open(name, backend) -> None:
    function, traces = OPEN[name]
    calls = [(torch.arange(3.0) + n, n) for n in (5, 6, 7, 8, 9, 10, 11, 13, 5, 22)]
    check_calls(function, calls, traces=traces, backend=backend)


def mean(x):
    return x.sum(0) / len(x)


def chunks(x):
    half = len(x) // 2
    return x[:half].sum(0) - x[half:].sum(0), len(x)


def by_length(x):
    return x * 2 if len(x) > 6 else x + len(x)


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [mean, chunks, by_length])
def test_the_length_of_a_tensor_stays_open(function, backend) -> None:
    calls = [(torch.randn(size, 4),) for size in (3, 5, 4, 8, 9, 3, 12, 7)]
    check_calls(function, calls, traces=4, backend=backend)


def test_a_loop_over_a_length_is_unrolled() -> None:
    def scan(x):
        total = torch.zeros(4)
        for i in range(len(x)):
            total = total * 0.5 + x[i]
        return total

    check_calls(scan, [(torch.randn(s, 4),) for s in (3, 5, 3, 5, 3)], traces=3, backend="eager")


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [exp, sqrt, cos])
def test_a_function_of_a_tensor_takes_its_number_out(function, backend) -> None:
    def use(x):
        return x * function(x.square().mean())

    calls = [(torch.randn(3),) for _ in range(6)]
    check_calls(use, calls, traces=2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x * min(1, n / 7),  # an int or a float comes of it
        lambda x, n: x * max(0.5, n),
        lambda x, n: x * min(n / 7, 1.0, key=lambda v: -v),
        lambda x, n: x * min([], default=n / 7),
        lambda x, n: x * min(float("inf"), n / 7),
        lambda x, n: x * max(float("nan"), n / 7),
        lambda x, n: x * min(n / 7, torch.tensor(1.5)),
        lambda x, n: (x, min("b", "a"), max({n: 1, 3: 2})),
        lambda x, n: (x * 1, min(n - 9, 0), min((n - 9) / 2, -0.0), max(0.0, (n - 9) * 0.0)),
    ],
)
def test_what_is_least_is_as_in_plain_python(function, backend) -> None:
    compiled = tripwire.compile(function, backend=backend)
    for n in (5, 6, 7, 8, 9, 10, 11, 5, 9):
        x = torch.arange(3.0)
        want, got = function(x, n), compiled(x, n)
        assert repr(want) == repr(got)


@pytest.mark.parametrize("right", [0, 0.0])
def test_divmod_by_zero_raises_what_python_raises(right) -> None:
    def use(x, n):
        return x * divmod(7, n)[1]

    compiled = tripwire.compile(use, backend="eager")
    for n in (2, 3, 4, 5, right, 3):
        try:
            want = use(torch.ones(2), n)
        except ZeroDivisionError as error:
            with pytest.raises(ZeroDivisionError, match=re.escape(str(error))):
                compiled(torch.ones(2), n)
        else:
            check_same(want, compiled(torch.ones(2), n))


def test_functions_are_themselves_in_a_run_and_afterwards() -> None:
    before = min, max, len, exp, math.isnan
    seen = []

    def use(x, n):
        seen.append((exp is math.exp, min is builtins.min, exp.__name__, operator.index(len([1]))))
        return x * exp(n)

    compiled = tripwire.compile(use, backend="eager")
    for n in (0.5, 0.7, 0.9, 0.5):
        compiled(torch.ones(1), n)
        assert (min, max, len, exp, math.isnan) == before
        assert type(exp(1)) is type(min(1.0, 2)) is float
        assert len([1, 2]) == len(torch.ones(2, 3)) == max(1, 2)
    assert set(seen) == {(True, True, "exp", 1)}


@needs_c
def test_another_threads_functions_are_plain_while_a_run_has_numbers_open() -> None:
    seen, turns = [], threading.Barrier(2)

    def look():
        turns.wait()
        seen.extend((type(exp(torch.ones(1))), type(len(torch.ones(4, 2))), min(2.0, 3.0)))
        turns.wait()

    def use(x, n, wait):
        scale = exp(n)
        if wait is not None:
            wait()
        return x * scale * len(x)

    def wait():
        turns.wait()
        turns.wait()

    compiled = tripwire.compile(use, backend="eager")
    for size in (2, 3):
        compiled(torch.randn(size), 0.1 * size, None)
    thread = threading.Thread(target=look)
    thread.start()
    compiled(torch.randn(4), 0.7, wait)
    thread.join()
    assert seen == [float, int, 2.0]


def attempt(compute, n):
    try:
        return compute(n)
    except Exception as error:
        return type(error).__name__, str(error)


UNSUITABLE = {
    "shifted to the left": lambda n: n << 1,
    "shifted to the right": lambda n: n >> 1,
    "a shift by it": lambda n: 2 << n,
    "a shift of a product": lambda n: (n * 2) << 1,
    "a shift by itself": lambda n: n << n,
    "shifted in place": lambda n: operator.ilshift(n, 1),
    "a shift of a text": lambda n: "a" >> n,
    "bits": lambda n: n & 1.0,
    "inverted": lambda n: ~n,
    "a product of matrices": lambda n: n @ 2,
    "divmod of a text": lambda n: divmod(n, "a"),
    "a power of three": lambda n: pow(n, 2, 3),
    "an item": lambda n: n[0],
    "called": lambda n: n(),
    "a length": lambda n: len(n),
    "unpacked": lambda n: [*n],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [float, np.float64])
@pytest.mark.parametrize("name", UNSUITABLE)
def test_what_floats_have_not_raises_as_in_plain_python(name, kind, backend) -> None:
    def call(x, n):
        return x * n, attempt(UNSUITABLE[name], n), attempt(lambda n: x.shape[0] << n, n)

    compiled = tripwire.compile(call, backend=backend)
    for n in (2.5, 3.5, 4.0, 0.5, 7.25):
        x = torch.arange(2 * n + 1)
        check_same(call(x, kind(n)), compiled(x, kind(n)))


ROUNDED = {
    "floor": lambda x, n: x * math.floor(n),
    "ceil": lambda x, n: x * math.ceil(n),
    "trunc": lambda x, n: x * math.trunc(n),
    "round": lambda x, n: x * round(n),
    "round to none": lambda x, n: x * round(n, None),
    "a result": lambda x, n: (x * 1, math.floor(n), round(n + 1)),
    "a size": lambda x, n: x[: math.floor(x.shape[0]) - 1] * round(x.shape[0]),
    "out of a tensor": lambda x, n: x * math.floor(int(x.sum())) + round(int(x.sum())),
    "of a float": lambda x, n: x * math.floor(n / 3) + math.ceil(n / 3) + round(n / 3),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROUNDED)
def test_an_open_int_that_is_rounded_stays_open(name, backend) -> None:
    calls = [(torch.arange(n * 1.0), n) for n in (4, 5, 6, 7, 9, 14)]
    check_calls(ROUNDED[name], calls, traces=2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_int_that_is_rounded_to_digits_is_closed(backend) -> None:
    def call(x, n):
        return x * round(n, -1), round(n, 2), attempt(lambda n: round(n, 1.5), n)

    check_calls(call, [(torch.ones(2), n) for n in (14, 15, 16, 25)], traces=4, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_schedule_that_rounds_its_epochs_needs_a_few_traces(backend) -> None:
    def train(is_compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 8)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            return loss

        run = tripwire.compile(step, backend=backend) if is_compiled else step
        return run, [(run(torch.ones(4, 3)), schedule.get_last_lr()) for _ in range(20)]

    (_, want), (compiled, got) = train(False), train(True)
    check_same(want, got)
    assert compiled.statistics().traces <= 4
