"""Code that asks torch for its modes isn't told of the one that observes it."""

from __future__ import annotations

import pytest
import torch
from support import check_same
from torch.overrides import has_torch_function, has_torch_function_unary

import tripwire


class Overriding:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return None


def ask_through_the_module(x):
    asked = torch.overrides
    return (
        asked.has_torch_function((x,)),
        asked.has_torch_function_unary(x),
        asked.has_torch_function_variadic(x, 3),
    )


def decide_by_the_module(x):
    return x * 2 if torch.overrides.has_torch_function_unary(x) else x * 3


def call_torchs_own(x):
    return torch.nn.functional.softmax(x, 0), torch.overrides.has_torch_function_unary(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "call",
    [ask_through_the_module, decide_by_the_module, call_torchs_own],
    ids=lambda f: f.__name__,
)
def test_users_who_ask_for_overrides_through_the_module_arent_told_of_tripwires_mode(
    call, backend
) -> None:
    compiled = tripwire.compile(call, backend=backend, fullgraph=True)
    for x in (torch.ones(2), torch.ones(2), torch.ones(3)):
        check_same(call(x), compiled(x))
    assert compiled.statistics().hits >= 1


def test_overrides_of_an_argument_are_told_as_they_are() -> None:
    compiled = tripwire.compile(ask_through_the_module, backend="eager", fullgraph=True)
    for x in (4, Overriding(), Overriding(), 4):
        assert compiled(x) == ask_through_the_module(x)


def ask_directly(x):
    return x * 2 if torch._C._has_torch_function_unary(x) else x * 3


def count_modes(x):
    return x * (1 + torch._C._len_torch_function_stack())


@pytest.mark.parametrize("options", [{}, {"check": True}], ids=str)
@pytest.mark.parametrize("call", [ask_directly, count_modes])
def test_users_who_ask_torch_for_modes_directly_are_refused_and_told_the_truth(
    call, options
) -> None:
    x = torch.ones(2)
    compiled = tripwire.compile(call, backend="eager", **options)
    for _ in range(3):
        check_same(call(x), compiled(x))
    assert {refusal.slug for refusal in tripwire.explain(compiled).refusals} == {"process-state"}


def ask_by_an_imported_name(x, n):
    return x * n * (100 if has_torch_function_unary(x) else 1)


def ask_in_a_function(x, n):
    return ask_by_an_imported_name(x, n) + torch.full((2,), n * 1.0)


def ask_by_an_alias(x, n, ask=has_torch_function_unary):
    kept = [n, {"a": n}]
    return x * (100 if ask(x) else 1) + torch.full((2,), kept[1]["a"] * 1.0)


def ask_for_a_number_too(x, n):
    return x * n * (100 if has_torch_function((x, n)) else 1)


def ask_the_module_for_a_number_too(x, n):
    return x * n * (100 if torch.overrides.has_torch_function((x, n)) else 1)


def ask_the_module_for_a_number(x, n):
    return x * n * (100 if torch.overrides.has_torch_function_unary(n) else 1)


def ask_in_c(x, n):
    return x * n * (100 if torch._C._is_torch_function_mode_enabled() else 1)


ASKING = [
    ask_by_an_imported_name,
    ask_in_a_function,
    ask_by_an_alias,
    ask_for_a_number_too,
    ask_the_module_for_a_number_too,
    ask_the_module_for_a_number,
    ask_in_c,
]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("call", ASKING, ids=lambda f: f.__name__)
def test_nobody_is_told_of_tripwires_mode_where_numbers_are_open(call, backend) -> None:
    compiled = tripwire.compile(call, backend=backend)
    for n in (2, 3, 4, 5, 0.5, 1.5, 2.5):
        x = torch.ones(2) * n
        check_same(call(x, n), compiled(x, n))
    if "the_module" in call.__name__:
        assert compiled.statistics().hits >= 2
