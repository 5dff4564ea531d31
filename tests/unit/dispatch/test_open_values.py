"""Numbers that Python takes out of tensors stay open: scales, histories, means, optimizers."""

import pytest
import torch
from torch import nn

import tripwire
from tripwire.values.numbers import is_open

BACKENDS = ["eager", "aot_eager"]
CALLS = 12


def scale(x):
    return x * x.mean().item()


def several(x):
    return x * 2, x.sum().item(), x.max().item() * 2 + 1


def spread(x):
    low, high = x[:2].tolist()
    return x * low + high


def branch(x):
    mean = x.mean().item()
    if mean > 0:
        return x * mean
    return x - mean


def write_later(x):
    x = x.clone()
    total = x.sum().item()
    x.mul_(2)
    return x * total


def take_from_rows(x):
    return x * x.mean(0, keepdim=True).item() + x[None, :1].item()


def clip(x):
    norm = x.norm().item()
    return x / max(norm, 1.0)


def count(x):
    positive = (x > 0).sum().item()
    return x * positive / (positive + 1)


def size(x):
    """A size is fixed by each value of it."""
    positive = (x > 0).sum().item()
    return x[:positive].sum() + positive


def power(x):
    exponent = x.abs().mean().item()
    return x * (1 - 0.9**exponent) ** 0.5


class Best(nn.Module):
    def __init__(self):
        super().__init__()
        self.best = -5.0

    def forward(self, x):
        mean = x.mean().item()
        if mean > self.best:
            self.best = mean
        return x * self.best


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = 0.5

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        return x - self.mean


MAKERS = {
    "a scale": lambda: scale,
    "several results": lambda: several,
    "a list": lambda: spread,
    "a branch": lambda: branch,
    "a tensor that is written later": lambda: write_later,
    "of one element, with dimensions": lambda: take_from_rows,
    "a clip": lambda: clip,
    "an int": lambda: count,
    "a power": lambda: power,
    "the best so far": Best,
    "a running mean": Mean,
}


def check_close(expected, found):
    if isinstance(expected, tuple):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            check_close(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert type(found) is type(expected)
        assert found == pytest.approx(expected, rel=1e-6)


def play(make, backend="eager", calls=CALLS):
    torch.manual_seed(0)
    plain, target = make(), make()
    compiled = tripwire.compile(target, backend=backend)
    for _ in range(calls):
        x = torch.randn(6)
        check_close(plain(x), compiled(x))
    return compiled.statistics()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MAKERS)
def test_numbers_out_of_tensors_run_compiled_code(name, backend) -> None:
    statistics = play(MAKERS[name], backend)
    assert statistics.traces <= 4
    assert statistics.hits == CALLS - statistics.traces


@pytest.mark.parametrize("name", ["a scale", "a list", "a branch", "a power"])
def test_inductor_compiles_numbers_out_of_tensors(name) -> None:
    statistics = play(MAKERS[name], "inductor", calls=6)
    assert statistics.hits >= 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_size_out_of_a_tensor_is_closed(backend) -> None:
    play(lambda: size, backend)


def test_a_history_gets_this_calls_number() -> None:
    history, expected = [], []

    def call(x, history):
        loss = (x**2).mean()
        history.append(loss.item())
        return loss * 2

    compiled = tripwire.compile(call, backend="eager")
    for _ in range(CALLS):
        x = torch.randn(6)
        assert torch.equal(call(x, expected), compiled(x, history))
    assert history == expected
    assert not any(map(is_open, history))
    assert compiled.statistics().traces == 2


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, for each": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_step_runs_compiled_code_while_its_rate_falls(name) -> None:
    sides = []
    for _ in range(2):
        model = build()
        optimizer = OPTIMIZERS[name](model.parameters())
        sides.append((model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)))
    (plain, own, _), (model, optimizer, _) = sides
    compiled = tripwire.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(CALLS):
        x = torch.randn(5, 4)
        for net, step in ((plain, own.step), (model, compiled)):
            net.zero_grad()
            (net(x) ** 2).mean().backward()
            step()
        for _, _, schedule in sides:
            schedule.step()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)
    assert compiled.statistics().traces <= 3
    assert compiled.statistics().hits >= CALLS - 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_dividing_by_a_number_out_of_a_tensor_that_is_zero_raises(backend) -> None:
    def call(x):
        return x * (1.0 / x.sum().item())

    compiled = tripwire.compile(call, backend=backend)
    for x in (torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)):
        torch.testing.assert_close(compiled(x), call(x))
    with pytest.raises(ZeroDivisionError):
        compiled(torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(compiled(torch.full((2,), 5.0)), call(torch.full((2,), 5.0)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_pass_by_a_number_as_in_plain_code(backend) -> None:
    def call(x):
        return (x * x.mean().item()).sum()

    compiled = tripwire.compile(call, backend=backend)
    for _ in range(6):
        x = torch.randn(4)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        call(one).backward()
        compiled(other).backward()
        torch.testing.assert_close(other.grad, one.grad)
    assert compiled.statistics().hits >= 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.0])
def test_numbers_that_are_not_finite_or_zero_are_this_calls(value) -> None:
    def call(x):
        number = x.sum().item()
        return x * number, number, number > 1

    compiled = tripwire.compile(call, backend="eager")
    for x in (torch.ones(1), torch.full((1,), 2.0), torch.full((1,), value), torch.full((1,), 3.0)):
        assert repr(compiled(x)) == repr(call(x))


def test_what_python_needs_as_a_plain_number_is_asked_again() -> None:
    table = {1: "one", 2: "two", 3: "three"}

    def call(x):
        return x + 1, table[x.sum().int().item()], f"{x.sum().item():.1f}"

    compiled = tripwire.compile(call, backend="eager")
    for value in (1.0, 2.0, 3.0, 2.0, 1.0, 3.0):
        x = torch.full((1,), value)
        assert repr(compiled(x)) == repr(call(x))
    assert compiled.statistics().hits >= 2


def test_a_back_end_that_takes_no_such_numbers_still_gets_open_sizes() -> None:
    def backend(module, examples):
        if any(node.target == "item" for node in module.graph.nodes):
            raise RuntimeError("no numbers out of tensors")
        return module.forward

    def call(x, flag):
        return x * flag.item() + x.shape[0]

    compiled = tripwire.compile(call, backend=backend)
    for size in range(2, 12):
        x, flag = torch.randn(size), torch.tensor(float(size % 2))
        assert torch.equal(call(x, flag), compiled(x, flag))
    assert compiled.statistics().traces <= 5
    assert compiled.statistics().hits >= 5
