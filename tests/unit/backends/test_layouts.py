"""Results of compiled code have the plain call's strides, whatever compilers make of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import tripwire


def transposing(module, examples):
    """A back end whose new tensors lie in memory the other way round."""

    def run(*inputs):
        outputs = module(*inputs)
        alone = Counter(each.untyped_storage()._cdata for each in (*inputs, *outputs))
        return tuple(
            out.mT.contiguous().mT
            if out.dim() == 2 and 0 not in out.stride() and alone[out.untyped_storage()._cdata] == 1
            else out
            for out in outputs
        )

    return run


def twice_as_parts(x):
    kept = x[x > 0]  # runs between two parts
    return (x * 2).relu(), (x + kept.sum()).relu()


PROGRAMS = {
    "one": lambda x: x * 2,
    "several": lambda x: (x * 2, x.sum(), [x + 1, {"a": x - 1}]),
    "two parts": twice_as_parts,
    "with a view of it": lambda x: (y := x * 2, y[0]),
    "the argument": lambda x: (x, x + 1),
    "expanded": lambda x: (x[:, :1] * 2).expand(2, 3),
    "transposed": lambda x: (x * 2).mT.relu(),
    "empty": lambda x: x[:0] * 2,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("grad", [False, True])
def test_results_have_the_strides_of_the_plain_calls(name, grad) -> None:
    plain = PROGRAMS[name]
    compiled = tripwire.compile(plain, backend=transposing)
    leaves = torch.utils._pytree.tree_leaves
    for _ in range(4):
        x = torch.randn(2, 3, requires_grad=grad)
        expected, found = leaves(plain(x)), leaves(compiled(x))
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
            assert other.requires_grad == one.requires_grad
            assert other.stride() == one.stride()
            if grad:
                gradients = [
                    torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (one, other)
                ]
                torch.testing.assert_close(*gradients)
        shared = [len({t.untyped_storage()._cdata for t in each}) for each in (expected, found)]
        assert shared[0] == shared[1]
    assert compiled.statistics().hits == 3


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_tensor_joined_with_itself_stays_channels_last_behind_inductor(dim) -> None:
    compiled = tripwire.compile(lambda x: torch.cat([x, x], dim))
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for _ in range(3):
        found, expected = compiled(x), torch.cat([x, x], dim)
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)
    assert compiled.statistics().hits == 2


@pytest.mark.parametrize("turn", [lambda y: y[None], lambda y: y.double(), lambda y: y[:1]])
def test_code_whose_result_has_another_form_gives_nobody_that_result(turn, caplog) -> None:
    compiled = tripwire.compile(
        lambda x: x.sin() * 2, backend=lambda m, _: lambda *given: (turn(m(*given)[0]),)
    )
    x = torch.randn(2, 3)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), x.sin() * 2)
    assert "Compiled code returned a tensor" in caplog.text
