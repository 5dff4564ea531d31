"""Calls that torch computes for one size alone leave sizes open all the same."""

from typing import Any

import pytest
import torch
from support import check_same
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn

import tripwire

SIZES = (5, 9, 12, 7, 16, 3, 8, 11)


def three(turn, n):
    return [torch.randn(size, 2) for size in (n, 3 + turn % 5, 2 + turn % 7)]


def pad_tokens(tokens):
    batch = rnn.pad_sequence([one.long() for one in tokens], batch_first=True, padding_value=-9)
    mask = batch != -9
    return batch, mask.sum(1), batch.shape[1]


def pad_time_first(sequences):
    batch = rnn.pad_sequence(sequences, padding_value=1.5)
    return batch.tanh(), batch.shape, batch.stride()


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "linspace": (lambda x: x * torch.linspace(-1, 2, len(x))[:, None], None),
    "linspace of fewer": (lambda x: torch.linspace(3, 1, steps=x.shape[0] - 1) + x.sum(), None),
    "linspace in 64 bits": (
        lambda x: torch.linspace(0, 1, x.shape[0], dtype=torch.float64) + x.sum(1),
        None,
    ),
    "one_hot": (lambda x: functional.one_hot(torch.arange(3), x.shape[0]) @ x.exp().long(), None),
    "pad_sequence": (lambda s: rnn.pad_sequence(s, batch_first=True) * 2, three),
    "on the left": (lambda s: rnn.pad_sequence(s, True, 2.0, padding_side="left"), three),
    "time first": (pad_time_first, three),
    "tokens": (pad_tokens, three),
    "max over time": (lambda x: functional.max_pool1d(x.t()[None], x.size(0)).squeeze(), None),
    "mean over time": (lambda x: functional.avg_pool1d(x.t()[None], len(x)).flatten(), None),
    "max of an image": (lambda x: functional.max_pool2d(x[None].relu(), x.shape) * 2, None),
    "mean of an image": (lambda x: functional.avg_pool2d(x[None], (len(x), x.size(1))), None),
    "max_pool1d": (lambda x: nn.MaxPool1d(2, padding=1)(x.t()), None),
    "linspace by names": (
        lambda x: torch.linspace(start=0, end=1, steps=len(x), requires_grad=False) + x.sum(),
        None,
    ),
    "logspace": (lambda x: x.sum(1) + torch.logspace(-1, 1, len(x), base=2), None),
    "frequencies": (lambda x: torch.fft.fftfreq(len(x), 0.5) * torch.fft.fft(x[:, 0]).abs(), None),
    "frequencies of a half": (lambda x: torch.fft.rfftfreq(x.shape[0]) + x.sum(), None),
    "window of Hann": (lambda x: x * torch.hann_window(len(x))[:, None], None),
    "window of Hann, symmetric": (lambda x: x[:, 0] * torch.hann_window(len(x), False), None),
    "window of Hamming": (lambda x: x.sum() * torch.hamming_window(len(x), True, 0.6, 0.4), None),
    "window of Blackman": (
        lambda x: x.sum() * torch.blackman_window(len(x), periodic=False, dtype=torch.float64),
        None,
    ),
    "window of Bartlett": (lambda x: x.sum(1) + torch.bartlett_window(x.size(0)), None),
    "window of Kaiser": (lambda x: x.sum(1) + torch.kaiser_window(len(x), True, 8.0), None),
}
OTHERWISE = ("linspace", "mean", "logspace", "frequencies", "window")
ROUNDED = [name for name in PROGRAMS if name.startswith(OTHERWISE)]
# Compilers have no calls to put in the place of these. They run as they are, between two parts.
FORMED: dict[str, Any] = {
    "below the diagonal": lambda x: x[torch.tril_indices(len(x), len(x))[0]].tanh(),
    "above the diagonal": lambda x: x[torch.triu_indices(len(x), len(x), 1)[1]].tanh(),
    "pairs": lambda x: torch.combinations(x[:, 0]).prod(1),
    "powers": lambda x: torch.vander(x[:, 1]).sum(0) + torch.vander(x[:, 0], N=2).sum(),
    "covariance": lambda x: torch.cov(x.t()).exp() + x.t().corrcoef(),
    "linspace between numbers": lambda x: torch.linspace(0, len(x) - 1, len(x)) * x.sum(1),
    "signal.windows": lambda x: x.sum(1) * torch.signal.windows.gaussian(len(x), std=2.0),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_leaves_sizes_open(name, backend) -> None:
    program, make = PROGRAMS[name]
    compiled = tripwire.compile(program, backend=backend, fullgraph=True)
    for turn, size in enumerate(SIZES):
        given = torch.randn(size, 2) if make is None else make(turn, size)
        if backend == "eager" or name not in ROUNDED:
            check_same(program(given), compiled(given))
        torch.testing.assert_close(compiled(given), program(given))
    assert compiled.statistics().traces <= 3
    assert not tripwire.explain(compiled).closed


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", FORMED)
def test_only_its_form_is_told(name, backend) -> None:
    program = FORMED[name]
    compiled = tripwire.compile(program, backend=backend)
    for size in SIZES:
        given = torch.randn(size, 2)
        check_same(program(given), compiled(given))
        check_same(program(given), compiled(given))
    assert compiled.statistics().traces <= 3
    assert not tripwire.explain(compiled).closed


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["pad_sequence", "time first", "max over time", "max_pool1d"])
def test_gradients_go_through_it(name, backend) -> None:
    program, make = PROGRAMS[name]
    compiled = tripwire.compile(program, backend=backend)
    for turn, size in enumerate(SIZES):
        given = [torch.randn(size, 2)] if make is None else make(turn, size)
        for one in given:
            one.requires_grad_()
        call = given[0] if make is None else given
        found = [_first(f(call)).square().sum() for f in (program, compiled)]
        expected, got = (torch.autograd.grad(one, given) for one in found)
        torch.testing.assert_close(got, expected)
    assert compiled.statistics().traces <= 3


def _first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_window_may_be_short_or_empty(backend) -> None:
    def windows(n):
        made = torch.hann_window(n), torch.bartlett_window(n, False), torch.kaiser_window(n)
        return made, torch.fft.fftfreq(n + 1), torch.logspace(0, 1, n)

    compiled = tripwire.compile(windows, backend=backend)
    for n in (5, 7, 1, 2, 0, 9, 1, 0, 12):
        torch.testing.assert_close(compiled(n), windows(n))


def test_a_number_of_steps_may_be_one() -> None:
    compiled = tripwire.compile(lambda x, n: torch.linspace(2, 3, n) + x, backend="aot_eager")
    for n in (4, 5, 1, 2, 7, 8, 9, 10):
        torch.testing.assert_close(compiled(torch.ones(()), n), torch.linspace(2, 3, n) + 1)
    assert compiled.statistics().traces <= 3


def test_it_may_stand_before_a_backward_of_the_same_call() -> None:
    def step(x):
        places, chosen = torch.linspace(0, 1, len(x)), functional.one_hot(torch.arange(len(x)))
        window = torch.hann_window(len(x), requires_grad=False)
        layer.zero_grad()
        layer(x).sum().backward()
        with torch.no_grad():
            layer.weight.sub_(layer.weight.grad)
        return places * window, chosen.sum(0) * layer.weight.sum()

    layer = nn.Linear(2, 1)
    given = [torch.randn(size, 2) for size in (4, 4, 5, 6, 7, 8, 9)]
    begun = {name: value.clone() for name, value in layer.state_dict().items()}
    expected = [step(x) for x in given]
    layer.load_state_dict(begun)
    layer.zero_grad()
    compiled = tripwire.compile(step, backend="aot_eager")
    torch.testing.assert_close([compiled(x) for x in given], expected)
    assert compiled.statistics().traces <= 3


def test_the_back_end_eager_makes_the_call_itself() -> None:
    def space(x):
        return torch.linspace(0.1, 0.7, x.shape[0])

    compiled = tripwire.compile(lambda x: (space(x), x + 1), backend="eager")
    for size in SIZES:
        assert torch.equal(compiled(torch.ones(size))[0], space(torch.ones(size)))


def test_a_compiler_gets_calls_of_torch_alone() -> None:
    seen = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        seen.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    program, _ = PROGRAMS["max over time"]
    compiled = tripwire.compile(program, backend=backend)
    for size in SIZES:
        x = torch.randn(size, 2)
        check_same(program(x), compiled(x))
    assert functional.max_pool1d in seen[0]
    assert functional.max_pool1d not in seen[1]
    assert not any("tripwire" in str(getattr(t, "__module__", "")) for t in seen[1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_pool_over_a_part_needs_its_size(backend) -> None:
    def pool(x):
        return functional.max_pool1d(x[None], x.size(1) - 1)

    compiled = tripwire.compile(pool, backend=backend)
    for size in (5, 9, 7, 5, 9):
        check_same(
            pool(torch.arange(2.0 * size).view(2, size)),
            compiled(torch.arange(2.0 * size).view(2, size)),
        )
    assert any("by max_pool1d" in one for one in tripwire.explain(compiled).closed)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_sequences_that_cannot_be_padded_together_raise_as_in_plain_python(backend) -> None:
    def pad(sequences):
        return rnn.pad_sequence(sequences)

    compiled = tripwire.compile(pad, backend=backend)
    for turn, size in enumerate(SIZES):
        check_same(pad(given := three(turn, size)), compiled(given))
    given = [torch.ones(6, 2), torch.ones(4, 3)]
    errors = []
    for call in (pad, compiled):
        with pytest.raises(RuntimeError) as error:
            call(given)
        errors.append(str(error.value).partition("\n")[0])
    assert errors[0] == errors[1]


DRAWING = {
    "randn": lambda x, g: x + torch.randn(x.shape, generator=g),
    "rand": lambda x, g: x * torch.rand(x.shape[0], 3, generator=g),
    "randint": lambda x, g: x + torch.randint(0, 9, (len(x), 3), generator=g),
    "randperm": lambda x, g: x[torch.randperm(x.size(0), generator=g)],
    "normal": lambda x, g: x + torch.normal(0.0, 1.0, x.shape, generator=g),
    "in place": lambda x, g: x + torch.empty_like(x).uniform_(0, 1, generator=g),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", DRAWING)
def test_a_generator_that_a_call_draws_from_leaves_sizes_open(name, own, backend) -> None:
    lin = torch.nn.Linear(3, 3)

    def run(generator):
        return lambda x: DRAWING[name](lin(x).relu(), generator)

    def make():
        return torch.Generator().manual_seed(5) if own else None

    (plain, expected), (compiled, found) = [
        (function(run(generator)), generator)
        for generator, function in (
            (make(), lambda function: function),
            (make(), lambda function: tripwire.compile(function, backend=backend)),
        )
    ]
    for turn, length in enumerate((5, 9, 12, 7, 3, 8)):
        x = torch.randn(length, 3)
        results = []
        for function in (plain, compiled):
            torch.manual_seed(turn)
            lin.zero_grad()
            result = function(x)
            result.sum().backward()
            results.append((result, lin.weight.grad.clone(), torch.get_rng_state()))
        check_same(*results)
    if own:
        assert torch.equal(expected.get_state(), found.get_state())
    assert compiled.statistics().traces == 2
