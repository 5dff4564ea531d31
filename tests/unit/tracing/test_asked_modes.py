"""Code that asks torch for its modes isn't told of the one that observes it."""

from __future__ import annotations

import pytest
import torch
from support import check_same

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
