"""Forwards: which custom autograd functions are simple enough to trust their sizes."""

import math
import time
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import softplus

from tripwire.tracing.bodies import find_functions

X = torch.ones(3)
FACTOR = 2.0
LOG: list[int] = []
push = LOG.append
now = time.time


def helper(x, factor=0.5):
    return x * factor


def counting(x, seen=[]):  # noqa: B006
    return x


def custom(forward, **more):
    space = {"forward": staticmethod(forward), **more}
    return type(torch.autograd.Function)("Custom", (torch.autograd.Function,), space)


def keeps(ctx, x, n=1):
    ctx.save_for_backward(x)
    ctx.n = n
    return helper(x) * FACTOR + n


def torchs(ctx, x):
    y = F.gelu(x) + torch.nn.functional.relu(x) + softplus(x) + torch.tanh(x)
    return y.to(torch.float32) * math.pi * sqrt(4) + sum(i for i in range(3))


def stores_global(ctx, x):
    global FACTOR
    FACTOR = 3.0
    return x


def stores_elsewhere(ctx, x):
    helper.seen = 1
    return x


def renames_context(ctx, x):
    ctx = helper
    ctx.seen = 1
    return x


def may_store_elsewhere(ctx, x, n=1):
    other = helper
    (other if n else ctx).seen = 1
    return x


def appends(ctx, x):
    LOG.append(1)
    return x


def appends_bound(ctx, x):
    push(1)
    return x


def reads_clock(ctx, x):
    return x[: int(time.time())]


def reads_clock_bound(ctx, x):
    return x[: int(now())]


def imports(ctx, x):
    import os

    return x[: len(os.environ)]


def has_state(ctx, x):
    return counting(x)


def asks_for_gradients(ctx, x):
    return x if ctx.needs_input_grad[0] else x[:1]


def by_name(ctx, x):
    return getattr(x, "sum")()  # noqa: B009


def test_simple_ones_are_found_with_the_functions_that_they_name() -> None:
    assert find_functions(custom(keeps), (X, 2)) == (keeps, helper)
    assert find_functions(custom(torchs), (X,)) == (torchs,)


@pytest.mark.parametrize(
    "forward",
    [
        stores_global,
        stores_elsewhere,
        renames_context,
        may_store_elsewhere,
        appends,
        appends_bound,
        reads_clock,
        reads_clock_bound,
        imports,
        has_state,
        asks_for_gradients,
        by_name,
        torch.no_grad()(keeps),
        len,
    ],
    ids=lambda forward: forward.__name__,
)
def test_others_are_none(forward) -> None:
    assert find_functions(custom(forward), (X,)) is None


def test_arguments_must_be_plain() -> None:
    assert find_functions(custom(keeps), (X, [1])) is None
    assert find_functions(custom(keeps), (X, (1, None, "a"))) is not None


def test_a_context_that_is_set_up_apart_is_looked_at_too() -> None:
    def setup(ctx, inputs, output):
        ctx.n = 1

    def bad_setup(ctx, inputs, output):
        LOG.append(1)

    def forward(x):
        return x * 2

    assert find_functions(custom(forward, setup_context=staticmethod(setup)), (X,))
    assert find_functions(custom(forward, setup_context=staticmethod(bad_setup)), (X,)) is None
