"""Flags of torch that a run sets by C functions and puts back: each call sets them."""

from __future__ import annotations

import pytest
import torch

import tripwire


def _autocast(x):
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    y = x @ x
    torch.clear_autocast_cache()
    torch.set_autocast_enabled("cpu", False)
    return y


def _autocast_by_name(x):
    from torch import set_autocast_enabled as switch

    switch("cpu", True)
    y = x @ x
    switch("cpu", False)
    return y


def _autocast_in_a_helper(x):
    return _autocast(x) * 2


def _dtype(x):
    torch._C._set_default_dtype(torch.float64)
    y = torch.ones(2, 2)
    torch._C._set_default_dtype(torch.float32)
    return x + y


def _determinism(x):
    torch._C._set_deterministic_algorithms(True)
    y = torch.empty(3) if torch.are_deterministic_algorithms_enabled() else x
    torch._C._set_deterministic_algorithms(False)
    return x * y.numel()


def _cached(x):
    torch.set_autocast_cache_enabled(False)
    y = x * (2 if torch.is_autocast_cache_enabled() else 3)
    torch.set_autocast_cache_enabled(True)
    return y


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "fn", [_autocast, _autocast_by_name, _autocast_in_a_helper, _dtype, _determinism, _cached]
)
def test_a_flag_that_is_set_and_put_back_is_set_by_each_call(fn, backend) -> None:
    compiled = tripwire.compile(fn, backend=backend)
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    for n in range(3):
        x = torch.full((2, 2), float(n))
        plain, got = fn(x), compiled(x)
        assert got.dtype is plain.dtype
        assert got.tolist() == plain.tolist()
        assert before == (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    assert [r.slug for r in tripwire.explain(compiled).refusals] == ["torch-state-changed"]


def test_fullgraph_says_which_flag_is_set() -> None:
    compiled = tripwire.compile(_autocast, backend="eager", fullgraph=True)
    with pytest.raises(tripwire.CannotTrace, match="set_autocast_enabled"):
        compiled(torch.ones(2, 2))
