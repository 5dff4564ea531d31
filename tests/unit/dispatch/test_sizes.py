"""Sizes that values decide on are read deep inside, and settled near the inputs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support import check_compiles, check_same, quiet_trace

import tripwire

DEEP = 200  # calls: more than a probe may have


def deeply(x: torch.Tensor) -> torch.Tensor:
    for _ in range(DEEP):
        x = x + 1
    return x


play = functools.partial(check_compiles, backend="eager", dynamic=False)


def mask(*picked: int) -> torch.Tensor:
    found = torch.zeros(6, dtype=torch.bool)
    found[list(picked)] = True
    return found


X = torch.arange(6.0)


def test_a_size_read_deep_inside_is_settled_by_the_count_of_the_mask() -> None:
    def f(x, m):
        y = deeply(x[m])
        return y * y.shape[0]

    calls = [(X, mask(0, 1)), (X, mask(3, 4)), (X + 1, mask(5)), (X, mask(0, 5)), (X, mask(2))]
    play(f, calls, traces=2)


def test_the_mask_settles_it_where_what_is_masked_comes_from_deep_inside() -> None:
    def f(x, m):
        y = deeply(x)[m]
        return y * len(y)

    play(f, [(X, mask(0, 1)), (X, mask(3, 4)), (X, mask(1))], traces=2)


@pytest.mark.parametrize("read", ["shape", "size", "size(0)", "size(dim=0)", "numel", "len"])
def test_every_way_to_ask_for_a_size_can_hit(read: str) -> None:
    def f(x, m):
        y = x[m]
        if read == "shape":
            return y * y.shape[0]
        if read == "size":
            return y * y.size()[0]
        if read == "size(0)":
            return y * y.size(0)
        if read == "size(dim=0)":
            return y * y.size(dim=0)
        return y * (y.numel() if read == "numel" else len(y))

    play(f, [(X, mask(0, 1)), (X, mask(3, 4)), (X, mask(1))], traces=2)


@pytest.mark.parametrize("how", ["nonzero", "where", "argwhere", "nonzero as tuple"])
def test_indices_of_what_is_true_are_settled_by_the_count(how: str) -> None:
    def f(x, m):
        if how == "nonzero":
            found = torch.nonzero(m)
        elif how == "where":
            (found,) = torch.where(m)
        elif how == "argwhere":
            found = torch.argwhere(m)
        else:
            (found,) = m.nonzero(as_tuple=True)
        y = deeply(x[found])
        return y * y.shape[0]

    play(f, [(X, mask(0, 1)), (X, mask(3, 4)), (X, mask(1))], traces=2)


def test_repeats_settle_the_size_of_what_is_repeated() -> None:
    def f(x, repeats):
        y = deeply(x.repeat_interleave(repeats))
        return y * y.shape[0]

    some, others, more = torch.tensor([2, 0]), torch.tensor([1, 1]), torch.tensor([2, 1])
    play(f, [(X[:2], some), (X[:2], others), (X[:2], more), (X[:2], some)], traces=2)


def test_a_call_with_sizes_of_its_own_is_settled_by_its_shape() -> None:
    def f(x):
        y = deeply(x.unique())
        return y * y.shape[0]

    first, same, other = torch.tensor([1.0, 1, 2]), torch.tensor([4.0, 3, 3]), torch.ones(3)
    play(f, [(first,), (same,), (other,)], traces=2)


def test_a_tensor_that_stands_for_a_size_settles_it_however_deep_the_rest_is() -> None:
    def f(x, n):
        y = deeply(x)[:n]
        z = deeply(y.reshape(-1, torch.div(torch.tensor(x.shape[0]), 3, rounding_mode="trunc")))
        return z * z.shape[0]

    four, two = torch.tensor(4), torch.tensor(2)
    play(f, [(X, four), (X + 1, four), (X, two), (X, four)], traces=2)


def test_a_size_that_is_cheap_to_ask_for_may_be_the_same_for_many_masks() -> None:
    def f(x, m):
        mean = x[m].mean(0, keepdim=True)
        return mean * mean.shape[0]

    play(f, [(X, mask(0, 1)), (X, mask(3)), (X, mask(1, 2, 4))], traces=1)


@pytest.mark.parametrize("how", ["masked_scatter", "masked_scatter_", "index_add_", "add_"])
def test_what_is_put_into_a_tensor_decides_on_no_size_of_it(how: str) -> None:
    def f(x, m):
        found = x[m]
        y = x.clone()
        if how == "masked_scatter":
            y = y.masked_scatter(m, found * 2)
        elif how == "masked_scatter_":
            y.masked_scatter_(m, found * 2)
        elif how == "index_add_":
            y.index_add_(0, m.nonzero()[:, 0], found)
        else:
            y.add_(found[:1])
        return y * y.shape[0]

    assert not quiet_trace(f, X, mask(0, 1)).branches
    play(f, [(X, mask(0, 1)), (X, mask(3)), (X, mask(1, 2, 4))], traces=1)


def test_what_follows_from_a_list_that_python_took_needs_no_probe() -> None:
    def f(x, lengths):
        n = lengths.tolist()
        last = deeply(lengths).sum().item()
        return x * len(n) + last

    some, others = torch.tensor([1, 2]), torch.tensor([2, 2])
    compiled = play(f, [(X, some), (X, some.clone()), (X, others), (X, some)], traces=2)
    assert all(len(entry.probe.branches) == 1 for entry in compiled._dispatcher.entries)


def test_a_value_that_was_changed_after_python_took_it_is_asked_for_again() -> None:
    def f(x, y):
        made = x * 2
        before = made.tolist()
        made.add_(y)
        return x + made.sum().item() + sum(before)

    ones, twos = torch.ones(2), torch.full((2,), 2.0)
    play(f, [(ones, ones), (ones, twos), (ones, ones), (twos, ones)], traces=3)


def test_a_value_does_not_tell_what_was_there_before_a_write() -> None:
    def f(x, y):
        made = x * 2
        total = made.sum()
        made[:1].add_(y)
        after = made.tolist()
        return x * len(after) + total.item()

    first = torch.tensor([1.0, 1.0]), torch.tensor([2.0])
    same_after = torch.tensor([2.0, 1.0]), torch.tensor([0.0])
    play(f, [first, same_after, first], traces=2)


def test_a_gradient_does_not_follow_from_a_value() -> None:
    def f(x):
        n = x.detach().sum().item() + sum(x.tolist())
        return x.detach() * n + (0 if x.grad is None else x.grad.sum().item())

    x = torch.ones(2, requires_grad=True)
    compiled = tripwire.compile(f, backend="eager", fullgraph=True)
    check_same(f(x), compiled(x))
    x.grad = torch.ones(2)
    check_same(f(x), compiled(x))
    x.grad = torch.full((2,), 3.0)
    check_same(f(x), compiled(x))


def test_a_size_that_something_random_decides_on_is_open_or_refused() -> None:
    def f(x):
        y = deeply(x[torch.rand(6) > 0.5])
        return y * y.shape[0]

    compiled = tripwire.compile(f, backend="eager", fullgraph=True)
    for seed in range(5):
        torch.manual_seed(seed)
        expected = f(X)
        torch.manual_seed(seed)
        assert torch.equal(compiled(X), expected)
    assert compiled.statistics().hits == 3
    with pytest.raises(tripwire.CannotTrace, match="random"):
        tripwire.compile(f, backend="eager", fullgraph=True, dynamic=False)(X)


@torch.jit.script
def span(x: torch.Tensor, most: int) -> torch.Tensor:
    return torch.tensor(min(x.size(0), most))


def test_a_number_that_a_script_makes_of_shapes_needs_no_probe() -> None:
    def f(x, m):
        y = x
        for _ in range(3):
            y = deeply(y)[: span(y, 4)]
        return y * y.shape[0]

    play(f, [(X, mask(0)), (X + 1, mask(0)), (X[:3], mask(0))], traces=2)


def test_a_number_that_a_script_makes_of_a_shape_that_values_decide_on_is_asked_for() -> None:
    def f(x, m):
        found = x[m] + 1
        return x * span(found, 4).item()

    play(f, [(X, mask(0, 1)), (X, mask(0)), (X, mask(2, 3))], traces=2)


@torch.jit.script
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand([6])


@torch.library.custom_op("tripwire_tests::noisy", mutates_args=())
def noisy_operator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(6)


@pytest.mark.parametrize("draw", [noisy, noisy_operator], ids=["script", "custom operator"])
def test_what_draws_unseen_is_not_drawn_twice_where_python_takes_its_value(draw: Any) -> None:
    def f(x):
        y = draw(x)
        return y * 2 if y.sum() > 0 else y

    compiled = tripwire.compile(f, backend="eager")
    for seed in range(4):
        torch.manual_seed(seed)
        expected = f(X), torch.rand(1)
        torch.manual_seed(seed)
        check_same(expected, (compiled(X), torch.rand(1)))


def test_dropout_of_nothing_draws_nothing() -> None:
    def f(x):
        y = torch.nn.functional.dropout(x, 0.0, True)
        return y * 2 if y.sum() > 0 else y

    play(f, [(X,), (X + 1,), (-X - 1,)], traces=2)


@pytest.mark.parametrize("name", ["real", "T", "mT", "data"])
def test_an_attribute_that_is_always_there_needs_no_probe(name: str) -> None:
    def f(x):
        return getattr(deeply(x), name) * 2

    play(f, [(X.view(2, 3),), (X.view(2, 3) + 1,)], traces=1)
