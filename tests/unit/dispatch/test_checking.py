"""`check=True`: new code runs once beside the run that it was made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tripwire
from tripwire.errors import WrongResult

RAN: list[str] = []


def right(graph, inputs, **options):
    """A back end that counts its runs."""

    def run(*args):
        RAN.append("code")
        return graph(*args)

    return run


def changed(change):
    """A back end whose results are changed afterwards."""

    def backend(graph, inputs, **options):
        def run(*args):
            return change(graph(*args), args)

        return run

    return backend


def half_off(results, args):
    return (results[0] * 1.01, *results[1:])


def second_off(results, args):
    return (results[0], results[1] + 1)


def other_dtype(results, args):
    return (results[0].double(), *results[1:])


def too_few(results, args):
    return results[:-1]


def detached(results, args):
    return tuple(r.detach() for r in results)


def writes_to_input(results, args):
    with torch.no_grad():
        args[0].add_(1)
    return results


def copied(results, args):
    return tuple(r.clone() for r in results)


def raises(results, args):
    raise ValueError("not today")


def test_right_code_passes_and_is_used(caplog) -> None:
    RAN.clear()
    compiled = tripwire.compile(lambda x: (x + 1, x.sum()), backend=right, check=True)
    x = torch.randn(4)
    results = [compiled(x) for _ in range(3)]
    for result in results:
        assert torch.equal(result[0], x + 1)
    assert RAN == ["code"] * 3  # once beside the first call, and twice as calls
    assert tripwire.statistics(compiled).hits == 2


def test_nothing_is_checked_unless_it_is_asked_for() -> None:
    RAN.clear()
    compiled = tripwire.compile(lambda x: x + 1, backend=right)
    compiled(torch.randn(4))
    assert RAN == []


def pair(x):
    first = x * 2
    second = x - 1
    return {"a": first, "b": second}


def returns_a_view(x):
    return x[1:], x * 2


CASES = {
    "slightly off": (pair, half_off, r"result\['a'\].*node first.*test_checking.py:\d+.*not close"),
    "the second": (pair, second_off, r"result\['b'\].*node second"),
    "dtype": (pair, other_dtype, r"raised BackendFailed.*a tensor torch.float64"),
    "number": (pair, too_few, "returns 1 tensors, where the graph has 2"),
    "history": (pair, detached, "requires_grad is False, not True"),
    "a write to an input": (pair, writes_to_input, r"L\['x'\], changed in place"),
    "memory": (returns_a_view, copied, "shares memory with other inputs"),
    "raises": (pair, raises, "raised ValueError: not today"),
}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_wrong_code_is_told_and_dropped(case, fullgraph) -> None:
    fn, change, message = CASES[case]
    x = torch.randn(4, requires_grad=True)
    before = x.detach().clone()
    compiled = tripwire.compile(fn, backend=changed(change), check=True, fullgraph=fullgraph)
    for _ in range(2):  # never silently plain
        with pytest.raises(WrongResult, match=f"(?s){message}") as raised:
            compiled(x)
        assert raised.value.slug == "wrong-result"
    assert torch.equal(x, before)
    assert tripwire.statistics(compiled).entries == 0


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.seen.add_(x.sum(0))
        return self.norm(x) + self.seen


def test_what_is_written_in_place_is_written_once() -> None:
    model, twin = Counts(), Counts()
    twin.load_state_dict(model.state_dict())
    compiled = tripwire.compile(model, check=True)
    for seed in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(compiled(x), twin(x))
    assert model.calls == twin.calls == 3
    for name, value in twin.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value), name


def forgets_a_write(graph, inputs, **options):
    def run(*args):
        return graph(*[arg.clone() for arg in args])

    return run


def test_a_write_that_is_missing_is_told() -> None:
    compiled = tripwire.compile(Counts(), backend=forgets_a_write, check=True)
    with pytest.raises(WrongResult, match=r"seen.*changed in place"):
        compiled(torch.randn(4, 3))


def draws(x, generator=None):
    y = nn.functional.dropout(x, 0.5)
    return y + torch.rand(3, generator=generator)


@pytest.mark.parametrize("own", [False, True])
def test_random_numbers_are_those_of_the_plain_calls(own) -> None:
    found = []
    for compiled in (draws, tripwire.compile(draws, check=True, fullgraph=not own)):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(6) if own else None
        x = torch.ones(3)
        found.append([compiled(x, generator) for _ in range(4)] + [torch.rand(2)])
    for left, right_ in zip(*found, strict=True):
        assert torch.equal(left, right_)


def test_user_code_runs_once() -> None:
    ran = []

    def counted(x):
        ran.append(1)
        return x + 1

    compiled = tripwire.compile(counted, backend=right, check=True)
    compiled(torch.ones(2))
    assert len(ran) == 1


def test_inputs_that_share_memory_share_it_in_the_check() -> None:
    def writes(x, y):
        x.mul_(2)
        return y + 1

    base = torch.arange(6.0)
    compiled = tripwire.compile(writes, check=True)
    assert torch.equal(compiled(base[:4], base[2:]), torch.tensor([5.0, 7, 5, 6]))
    assert torch.equal(base, torch.tensor([0.0, 2, 4, 6, 4, 5]))


def test_a_model_that_trains() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(3, 1))
    compiled = tripwire.compile(model, check=True)
    for _ in range(3):
        compiled(torch.randn(5, 3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def draws_more(graph, inputs, **options):
    def run(*args):
        torch.rand(7)
        return graph(*args)

    return run


def draws_first(graph, inputs, **options):
    def run(*args):
        torch.rand(1)
        return graph(*args)

    return run


def test_code_that_draws_in_its_own_way_is_told_with_a_hint() -> None:
    compiled = tripwire.compile(lambda x: x + torch.rand(8), backend=draws_first, check=True)
    with pytest.raises(WrongResult, match="drew random numbers.*fallback_random"):
        compiled(torch.ones(8))


def test_the_check_itself_draws_nothing() -> None:
    compiled = tripwire.compile(lambda x: x + 1, backend=draws_more, check=True)
    torch.manual_seed(5)
    compiled(torch.ones(2))
    found = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(3))


# --- inputs whose form the run changes ----------------------------------------------------------


def add_dimension(x):
    x.unsqueeze_(1)
    return x * 2


def transpose(x):
    x.t_()
    return x + 1


def add_dimension_alone(x):
    x.unsqueeze_(0)


def take_dimension(x):
    x.unsqueeze_(0).add_(1)
    x.squeeze_(0).mul_(2)
    return x


def grow(x):
    x.resize_(9).fill_(1.0)
    return x * 2


def other_memory(x):
    x.data = torch.ones(3)
    return x * 2


def other_memory_changed(x):
    before = x * 1
    x.data = torch.full((4,), 2.0)
    x.add_(1)
    return x * 2, before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "fn",
    [
        add_dimension,
        transpose,
        add_dimension_alone,
        take_dimension,
        grow,
        other_memory,
        other_memory_changed,
    ],
    ids=lambda fn: fn.__name__,
)
def test_an_input_whose_form_changes_is_no_false_alarm(fn, backend) -> None:
    compiled = tripwire.compile(fn, backend=backend, check=True)
    for n in range(3):
        sides = []
        for call in (compiled, fn):
            x = torch.arange(6.0).reshape(2, 3) + n
            sides.append((call(x), x))
        torch.testing.assert_close(*sides)


class Counting(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx, x):
        Counting.runs += 1
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_code_of_the_users_inside_the_graph_runs_once_and_that_is_told(backend, caplog) -> None:
    Counting.runs = 0
    compiled = tripwire.compile(lambda x: Counting.apply(x) + 1, backend=backend, check=True)
    for n in range(1, 4):
        assert compiled(torch.ones(1)).item() == 3
        assert Counting.runs == n
    assert caplog.text.count("isn't checked") == 1
