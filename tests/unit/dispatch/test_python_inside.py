"""Python code that torch runs inside a call: hooks, backwards, operators, checkpoints.

Each compiled call runs such code again. It gets plain numbers where the run has open ones, and
never sees what a compiled call writes only afterwards.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support import check_same
from torch.utils.checkpoint import checkpoint

import tripwire
from tripwire.tracing import branches
from tripwire.tracing.observe import Observer

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]

# g: a tensor of three; k: a float, and n: an int, that vary
USES = {
    "multiplied": lambda g, k, n: g * k * n,
    "divided": lambda g, k, n: k / (g.abs() + n),
    "a power": lambda g, k, n: g.abs() ** k,
    "the base of a power": lambda g, k, n: k ** g.abs(),
    "a bound": lambda g, k, n: torch.clamp(g, -k, k),
    "a factor by name": lambda g, k, n: torch.add(g, g, alpha=k),
    "written": lambda g, k, n: g.clone().sub_(k).add_(n),
    "a tensor's value": lambda g, k, n: g * torch.full((3,), k) * torch.tensor(k),
    "sizes": lambda g, k, n: (
        g.expand(n, 3).sum(0) + torch.zeros(n, 3).sum(0) * torch.arange(n).sum()
    ),
    "shifted": lambda g, k, n: g.roll(n),
    "compared": lambda g, k, n: torch.where(g > k, g, k) + (g if k > 3 else g * 3),
    "formatted": lambda g, k, n: g * len(f"{k:.3f}") + sum(g for _ in range(n)),
    "made an int": lambda g, k, n: g * int(k),
}


def in_a_hook(cfg, w, use):
    w.register_hook(lambda g: use(g, cfg.k, cfg.n))
    return lambda x: (w * x).sum()


def in_an_accumulating_hook(cfg, w, use):
    def step(parameter):
        with torch.no_grad():
            parameter.sub_(0.01 * use(parameter.grad, cfg.k, cfg.n))

    w.register_post_accumulate_grad_hook(step)
    return lambda x: (w * x).sum()


def in_a_custom_function(cfg, w, use):
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.k = cfg.k * 2
            return use(x, cfg.k, cfg.n)

        @staticmethod
        def backward(ctx, g):
            return use(g.clone(), ctx.k, cfg.n)

    return lambda x: Custom.apply(w * x).sum()


def in_a_checkpoint(cfg, w, use):
    def part(x, k):
        return use((x * w).sin(), k, cfg.n)

    return lambda x: checkpoint(part, x, cfg.k, use_reentrant=False).sum()


def in_an_operator(cfg, w, use):
    name = f"tripwire_tests::inside{id(cfg)}"

    @torch.library.custom_op(name, mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return use(x.clone(), cfg.k, cfg.n)

    operator.register_fake(torch.empty_like)
    return lambda x: operator(x.detach()).sum() + (w * x).sum()


PLACES = [
    in_a_hook,
    in_an_accumulating_hook,
    in_a_custom_function,
    in_a_checkpoint,
    in_an_operator,
]


def play(make, change, show, backend):
    """What six calls of a step return, each with what is to be shown after it."""
    torch.manual_seed(0)
    cfg, w = SimpleNamespace(k=1.5, n=2, total=1.0), torch.ones(3, requires_grad=True)
    step = make(cfg, w)
    call = step if backend is None else tripwire.compile(step, backend=backend)
    found = []
    for number in range(6):
        change(cfg, number)
        found.append((call(torch.randn(3)), *show(cfg, w)))
    return found, call


def run(place, use, backend):
    """Losses and gradients of training steps, in which both numbers vary."""

    def make(cfg, w):
        lose = place(cfg, w, use)

        def step(x):
            w.grad = None
            loss = lose(x)
            loss.backward()
            return loss.detach() * cfg.k * cfg.n

        return step

    def change(cfg, number):
        if number > 1:
            cfg.k, cfg.n = cfg.k + 0.5, cfg.n + 1

    return play(make, change, lambda cfg, w: (w.grad.clone(), w.detach().clone()), backend)


def _combine(place, use, backend):
    """Behind AOTAutograd each place and each use once; all of the others are slow."""
    is_slow = backend == "aot_eager" and place is not in_a_hook and use != "divided"
    return pytest.param(place, use, backend, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(
    ("place", "use", "backend"),
    [_combine(*one) for one in itertools.product(PLACES, USES, BACKENDS[:2])],
)
def test_code_inside_a_call_gets_plain_numbers(place, use, backend) -> None:
    expected, _ = run(place, USES[use], None)
    got, call = run(place, USES[use], backend)
    torch.testing.assert_close(got, expected)  # AOTAutograd spells powers in another way
    assert call.statistics().hits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES[:4])
def test_numbers_that_only_such_code_takes_apart_stay_open(place, backend) -> None:
    got, call = run(place, USES["divided"], backend)
    torch.testing.assert_close(run(place, USES["divided"], None)[0], got)
    assert call.statistics().traces <= 3


# --- what such code reads and the run writes, and the other way round ---


def reads_a_number(cfg, w):
    w.register_hook(lambda g: g * cfg.current)

    def prepare(x):
        cfg.current = cfg.k * 3

    return prepare, lambda x: (w * x).sum()


def reads_a_tensor(cfg, w):
    w.register_hook(lambda g: g * cfg.current)

    def prepare(x):
        cfg.current = x * 2

    return prepare, lambda x: (w * x).sum()


def reads_a_counter(cfg, w):
    cfg.calls = 0
    w.register_hook(lambda g: g * cfg.calls)

    def prepare(x):
        cfg.calls += 1

    return prepare, lambda x: (w * x).sum()


def reads_a_length(cfg, w):
    cfg.seen = []

    def scale(parameter):
        parameter.grad.mul_(len(cfg.seen))

    w.register_post_accumulate_grad_hook(scale)

    def prepare(x):
        cfg.seen.append(1)

    return prepare, lambda x: (w * x).sum()


def reads_in_a_backward(cfg, w):
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * cfg.current

    def prepare(x):
        cfg.current = cfg.k * 3

    return prepare, lambda x: Custom.apply(w * x).sum()


def reads_in_an_operator(cfg, w):
    @torch.library.custom_op(f"tripwire_tests::reads{id(cfg)}", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return x * cfg.current

    operator.register_fake(torch.empty_like)

    def prepare(x):
        cfg.current = cfg.k * 3

    return prepare, lambda x: operator(x).sum() + w.sum()


def writes_in_a_hook(cfg, w):
    cfg.total = 0.0

    def add(g):
        cfg.total = cfg.total + 1

    w.register_hook(add)
    return lambda x: None, lambda x: (w * x).sum()


def writes_in_an_operator(cfg, w):
    cfg.total = 0.0

    @torch.library.custom_op(f"tripwire_tests::writes{id(cfg)}", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        cfg.total += 1
        return x * cfg.total

    operator.register_fake(torch.empty_like)
    return lambda x: None, lambda x: operator(x).sum() + w.sum()


SHARING = [
    reads_a_number,
    reads_a_tensor,
    reads_a_counter,
    reads_a_length,
    reads_in_a_backward,
    reads_in_an_operator,
    writes_in_a_hook,
    writes_in_an_operator,
]


def run_sharing(share, take_gradients, backend):
    """Gradients, and what the step and the code inside it count."""

    def make(cfg, w):
        prepare, lose = share(cfg, w)

        def step(x):
            w.grad = None
            prepare(x)
            gradient = take_gradients(lose(x), w)
            return gradient * cfg.total

        return step

    def change(cfg, number):
        cfg.k += number % 2

    return play(make, change, lambda cfg, w: (cfg.total, getattr(cfg, "calls", None)), backend)[0]


def by_backward(loss, w):
    loss.backward()
    return w.grad.clone()


def by_grad(loss, w):
    return torch.autograd.grad(loss, w)[0]


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("take_gradients", [by_backward, by_grad])
@pytest.mark.parametrize("share", SHARING)
def test_what_code_inside_a_call_shares_with_the_run_is_never_stale(
    share, take_gradients, backend
) -> None:
    expected = run_sharing(share, take_gradients, None)
    check_same(expected, run_sharing(share, take_gradients, backend))


def test_a_check_doesnt_run_an_operator_in_python_twice() -> None:
    seen = []

    @torch.library.custom_op("tripwire_tests::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x + 1

    call = tripwire.compile(lambda x: noted(x) * 2, backend="eager", check=True)
    for _ in range(3):
        call(torch.ones(2))
    assert len(seen) == 3


def test_a_backward_without_hooks_may_follow_writes() -> None:
    cfg, w = SimpleNamespace(calls=0), torch.ones(3, requires_grad=True)

    def step(x):
        w.grad = None
        cfg.calls += 1
        (w * x).sum().backward()
        return x + 1

    call = tripwire.compile(step, backend="eager")
    for _ in range(5):
        call(torch.ones(3))
    assert call.statistics().hits >= 3
    assert cfg.calls == 5


def test_on_other_devices_hooks_run_in_threads_of_torchs_own(monkeypatch) -> None:
    cfg, w = SimpleNamespace(calls=0), torch.ones(3, requires_grad=True)
    w.register_hook(lambda g: g * cfg.calls)
    # As on a GPU: the hook's code isn't seen, and its tensor is elsewhere.
    monkeypatch.setattr(Observer, "noting", lambda self: nullcontext([]))
    monkeypatch.setattr(branches, "_is_on_cpu", lambda tensor: False)

    def step(x):
        w.grad = None
        cfg.calls += 1
        (w * x).sum().backward()
        return x + 1

    call = tripwire.compile(step, backend="eager")
    for number in range(1, 6):
        call(torch.ones(3))
        assert w.grad.tolist() == [number] * 3
