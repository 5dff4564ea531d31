"""Compiled callables under transforms of torch.func and forward-mode AD run as plain code."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from unit.training.pairs import BACKENDS

import tripwire

backends = pytest.mark.parametrize("backend", BACKENDS)


def weigh(x):
    return (x.sin() * x).sum(-1)


def warm(fn, backend, grad: bool = True):
    """Compiled, with entries for every mode that a transform could be mistaken for."""
    compiled = tripwire.compile(fn, backend=backend)
    for _ in range(2):
        with torch.no_grad():
            compiled(torch.ones(3))
        compiled(torch.ones(3))
        if grad:
            compiled(torch.ones(3, requires_grad=True))
    return compiled


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f)(torch.arange(6.0).view(2, 3)),
    "grad": lambda f: torch.func.grad(f)(torch.arange(3.0)),
    "jvp": lambda f: torch.func.jvp(f, (torch.arange(3.0),), (torch.ones(3),)),
    "jacrev": lambda f: torch.func.jacrev(f)(torch.arange(3.0)),
    "hessian": lambda f: torch.func.hessian(f)(torch.arange(3.0)),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(f))(torch.arange(6.0).view(2, 3)),
}


@backends
def test_transforms_see_what_they_see_of_the_plain_function(backend, caplog) -> None:
    compiled = warm(weigh, backend)
    before = compiled.statistics().hits
    for transform in TRANSFORMS.values():
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(transform(compiled), transform(weigh))
    assert compiled.statistics().hits == before
    assert caplog.text.count("[foreign-mode]") == 1  # told once


@backends
@pytest.mark.parametrize("grad", [True, False])
def test_tangents_are_carried_on(backend, grad) -> None:
    """Nothing that a guard asks of a tensor shows that it has a tangent."""
    compiled = warm(weigh, backend)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        x = forward_ad.make_dual(torch.arange(3.0), torch.ones(3))
        mine, plain = (forward_ad.unpack_dual(f(x)) for f in (compiled, weigh))
        torch.testing.assert_close(mine.tangent, plain.tangent)
        torch.testing.assert_close(mine.primal, plain.primal)
    with torch.set_grad_enabled(grad):
        before = compiled.statistics().hits
        torch.testing.assert_close(compiled(torch.arange(3.0)), weigh(torch.arange(3.0)))
        assert compiled.statistics().hits == before + 1


@backends
def test_what_draws_draws_for_each_example(backend) -> None:
    ones = torch.ones(3)

    def noisy(x):
        return F.dropout(x, 0.5)

    compiled = warm(noisy, backend, grad=False)

    def map_over(f):
        torch.manual_seed(0)
        return torch.vmap(lambda x: f(ones) + x, randomness="different")(torch.zeros(8))

    with torch.no_grad():
        torch.testing.assert_close(map_over(compiled), map_over(noisy))


def test_a_gradient_through_a_compiled_module_given_its_parameters() -> None:
    model = torch.nn.Linear(3, 2)
    compiled = tripwire.compile(model, backend="aot_eager")
    x = torch.ones(4, 3)
    for _ in range(2):
        compiled(x)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(call, parameters):
        return torch.func.functional_call(call, parameters, (x,)).square().sum()

    for _ in range(3):
        mine, plain = (
            torch.func.grad(lambda p, c=call: loss(c, p))(parameters) for call in (compiled, model)
        )
        torch.testing.assert_close(mine, plain)
        torch.testing.assert_close(compiled(x), model(x))


def test_custom_functions_of_torchs_own_are_calls_inside() -> None:
    """Indices that lack a dimension pick by way of one of these, where torch's mode says so."""
    mode = pytest.importorskip("torch._dynamo._trace_wrapped_higher_order_op")
    table = torch.arange(12).reshape(2, 6) % 3

    def pick(x):
        with mode.TransformGetItemToIndex():
            picked = torch.vmap(lambda row: table[row, row] == 0)(torch.arange(x.shape[0]))
        return x * picked[:, None, None]

    for backend in ("eager", "aot_eager"):
        compiled = tripwire.compile(pick, backend=backend, fullgraph=True)
        for _ in range(3):
            x = torch.randn(2, 3, 4)
            torch.testing.assert_close(compiled(x), pick(x), rtol=0, atol=0)
        assert compiled.statistics().hits == 2
