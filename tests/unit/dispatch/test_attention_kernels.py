"""`with sdpa_kernel(...)` inside a call: the kernels that it allows, then those from before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import check_same
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

import tripwire


def allowed() -> tuple[Any, ...]:
    return (*attention._cur_sdpa_kernel_backends(), *torch._C._get_sdp_priority_order())


def x(length: int = 64) -> torch.Tensor:
    return torch.linspace(-1, 1, 128 * length).reshape(2, 4, length, 16).sin()


def by_hand(q):
    with sdpa_kernel(SDPBackend.MATH):
        found = attend(q, q, q)
    return found, attend(q, q, q)


def nested(q):
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        first = attend(q, q, q)
        with sdpa_kernel([SDPBackend.MATH]):
            second = attend(first, q, q)
        return first, second, attend(second, q, q)


def asked(q):
    with sdpa_kernel(SDPBackend.MATH):
        return q * (1 + torch.backends.cuda.flash_sdp_enabled())


def cut(q):
    with sdpa_kernel(SDPBackend.MATH):
        found = attend(q, q, q)
        return found[found > 0], attend(found, q, q)


def test_kernels_round_differently() -> None:
    first, second = by_hand(x())
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fn", [by_hand, nested, asked, cut])
def test_compiled_code_uses_the_kernels_that_the_call_allows(fn, backend) -> None:
    compiled = tripwire.compile(fn, backend=backend)
    before = allowed()
    for length in (64, 64, 32, 48, 40):
        check_same(fn(x(length)), compiled(x(length)))
        assert allowed() == before
    assert compiled.statistics().hits >= 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_those_of_the_allowed_kernel(backend) -> None:
    compiled = tripwire.compile(by_hand, backend=backend, fullgraph=True)
    for _ in range(3):
        plain, ours = x().requires_grad_(), x().requires_grad_()
        for call, given in ((by_hand, plain), (compiled, ours)):
            call(given)[0].sum().backward()
        torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=0)
    assert compiled.statistics().hits == 2


def test_kernels_allowed_around_a_call_are_allowed_again_after_it() -> None:
    compiled = tripwire.compile(by_hand, backend="eager", fullgraph=True)
    compiled(x())
    for outer in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(outer):
            before = allowed()
            for _ in range(2):
                check_same(by_hand(x()), compiled(x()))
                assert allowed() == before


def test_kernels_are_as_before_when_a_call_raises_inside_the_block() -> None:
    def pick(q, places):
        with sdpa_kernel(SDPBackend.MATH), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.gather(q, 0, places)

    compiled = tripwire.compile(pick, backend="eager", fullgraph=True)
    places = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    before = allowed()
    for _ in range(2):
        check_same(pick(x(), places), compiled(x(), places))
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(x(), places + 9)
    assert compiled.statistics().traces == 1
    assert allowed() == before


def test_a_block_that_was_entered_before_the_call_is_not_left_by_compiled_code() -> None:
    def leave(q):
        block.__exit__(None, None, None)
        return attend(q, q, q)

    compiled = tripwire.compile(leave, backend="eager")
    before, expected = allowed(), attend(x(), x(), x())
    for _ in range(2):
        block = sdpa_kernel(SDPBackend.MATH)
        block.__enter__()
        check_same(expected, compiled(x()))
        assert allowed() == before
    (refusal,) = tripwire.explain(compiled).refusals
    assert refusal.slug == "context-across-calls"
