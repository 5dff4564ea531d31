"""New code runs once before the next call where that does, once, what takes long: on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tripwire
from tripwire.backends.registry import count_runs_ahead, inductor
from tripwire.dispatch import ahead, pipeline


class Counting:
    """A back end that counts how often its code runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, module, inputs):
        def run(*given):
            self.runs += 1
            return module.forward(*given)

        return run


@pytest.fixture
def backend(monkeypatch) -> Counting:
    monkeypatch.setattr(pipeline, "count_runs_ahead", lambda backend, tensors: 2)
    monkeypatch.setattr(pipeline, "may_run_ahead", lambda backend: True)
    return Counting()


def test_code_runs_ahead_in_the_first_call_and_results_are_the_runs(backend) -> None:
    told = []

    def f(x):
        told.append(len(told))  # the user's effect: once for each call
        return x.sin() * 2

    compiled, x = tripwire.compile(f, backend=backend), torch.ones(3)
    torch.testing.assert_close(compiled(x), x.sin() * 2)
    assert backend.runs == 2
    assert compiled.statistics().hits == 0
    for _ in range(2):
        torch.testing.assert_close(compiled(x), x.sin() * 2)
    assert told == [0, 1, 2]


def test_the_first_run_is_a_phase_of_the_compile(backend) -> None:
    from tripwire import telemetry

    telemetry.clear_compilation_metrics()
    tripwire.compile(lambda x: x.sin() * 2.25, backend=backend)(torch.ones(3))
    (found,) = telemetry.get_compilation_metrics()
    assert 0 < (found.first_run_us or 0) <= found.duration_us


class Writes(nn.Module):
    """Adds to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x * self.seen


class Cache(nn.Module):
    """Writes where a counter says, which ends with its last place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3, 3))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        place = torch.arange(1) + self.at
        self.at.add_(1)
        self.kept.index_copy_(0, place, x[None])
        return self.kept.sum(0)


class CacheByView(Cache):
    def forward(self, x):
        self.kept[self.at] = x
        self.at.view(1)[0] += 1
        return self.kept.sum(0)


class CacheAlmostFull(Cache):
    """Has one place left: what the first call leaves is out of bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.at.fill_(2)


class CountsInFloats(Cache):
    def __init__(self) -> None:
        super().__init__()
        self.at = torch.zeros(())

    def forward(self, x):
        self.kept[self.at.long()] = x
        self.at += 1
        return self.kept.sum(0)


def write_argument(x):
    return x.add_(1) * 2


def draw(x):
    return x + torch.rand(3)


class Twice(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Twice.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("make", [Writes, Cache, CacheByView, CacheAlmostFull, CountsInFloats])
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_written_ahead_is_put_back(backend, make, grad) -> None:
    """On a GPU an index that the call moved on could be out of bounds the second time."""
    net, plain = make(), make()
    compiled = tripwire.compile(net, backend=backend)
    with torch.set_grad_enabled(grad):
        for number in range(1 if make is CacheAlmostFull else 3):
            given = compiled(x := torch.full((3,), 2.0 + number))
            assert number or backend.runs == 2
            torch.testing.assert_close(given, plain(x))
            torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()))
            torch.testing.assert_close(getattr(net, "at", 0), getattr(plain, "at", 0))
            if not number:
                versions = [[one._version for one in both.buffers()] for both in (net, plain)]
                assert versions[0] == versions[1]


def test_an_argument_that_is_written_ahead_is_put_back(backend) -> None:
    compiled = tripwire.compile(write_argument, backend=backend)
    for number in range(3):
        x = torch.full((3,), 2.0)
        torch.testing.assert_close(compiled(x), torch.full((3,), 6.0))
        assert x.tolist() == [3.0] * 3
        assert number or backend.runs == 2


def test_a_large_counter_is_left_alone(backend, monkeypatch) -> None:
    monkeypatch.setattr(ahead, "LARGEST_COUNTER", 0)
    compiled = tripwire.compile(Cache(), backend=backend)
    compiled(torch.ones(3))
    assert backend.runs == 0


@pytest.mark.parametrize("make", [lambda: draw, lambda: Twice.apply])
def test_what_draws_or_calls_isnt_run_ahead(backend, make) -> None:
    compiled, plain = tripwire.compile(make(), backend=backend), make()
    Twice.calls = 0
    for number in range(3):
        torch.manual_seed(number)
        given = compiled(torch.full((3,), 2.0))
        assert number or backend.runs == 0
        torch.manual_seed(number)
        torch.testing.assert_close(given, plain(torch.full((3,), 2.0)))
    assert Twice.calls in (0, 6)


def test_what_a_backward_may_follow_isnt_run_ahead(backend) -> None:
    tripwire.compile(lambda x: x.sin(), backend=backend)(torch.ones(3, requires_grad=True))
    assert backend.runs == 0


def test_code_that_fails_ahead_leaves_the_call_and_fails_where_it_is_hit(monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "count_runs_ahead", lambda backend, tensors: 1)

    def fails(module, inputs):
        def run(*given):
            raise torch.OutOfMemoryError("no room for two")

        return run

    compiled = tripwire.compile(lambda x: x * 2, backend=fails)
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_on_a_cpu_nothing_runs_ahead() -> None:
    assert count_runs_ahead(inductor, [torch.ones(2)]) == 0
