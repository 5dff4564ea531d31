"""What a functional graph can't do is refused for back ends that need one, and never lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tripwire


@pytest.fixture(autouse=True)
def with_gradients():
    """Some leave the grad mode changed."""
    with torch.enable_grad():
        yield


def read_grad(x, w):
    return x * w.grad + w


def clear_grad(x, w):
    w.grad = None
    return x * w


def set_grad(x, w):
    w.grad = x.clone()
    return x * w


def delete_grad(x, w):
    del w.grad
    return x * w


def add_to_grad(x, w):
    w.grad.add_(x)
    return x * w


def set_data_inside(x, w):
    y = x * w
    y.data = x
    return y * w


def want_grad(x, w):
    x.requires_grad_()
    return x * w


def set_wants_grad(x, w):
    x.requires_grad = True
    return x * w


def reshape_input(x, w):
    x.unsqueeze_(0)
    return x * w


def resize_input(x, w):
    x.resize_(5).fill_(1.0)
    return x * 2 + w.sum()


def detach_input(x, w):
    y = x.mul(1)
    return y.detach_() * w + x.detach_()


def retain(x, w):
    y = x * w
    y.retain_grad()
    return y, y * 2


def backward_method(x, w):
    ((x * w) ** 2).sum().backward()
    return x * 2


def backward_function(x, w):
    torch.autograd.backward((x * w).sum())
    return x * 2


def leave_grad_mode(x, w):
    y = x * w
    torch.set_grad_enabled(False)
    return y


UNFIT = [
    leave_grad_mode,
    read_grad,
    clear_grad,
    set_grad,
    delete_grad,
    add_to_grad,
    set_data_inside,
    want_grad,
    set_wants_grad,
    reshape_input,
    resize_input,
    detach_input,
    retain,
    backward_method,
    backward_function,
]


def outcome(call, seed: int) -> tuple[object, ...]:
    """Everything that the outside can see of a call and its backward."""
    generator = torch.Generator().manual_seed(seed)
    x, values, grad = torch.randn(3, 3, generator=generator)
    x, w = x.clone(), values.clone().requires_grad_()
    w.grad = grad.clone()
    result = call(x, w)
    grad_mode = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    outputs = result if isinstance(result, tuple) else (result,)
    wanting = [output.sum() for output in outputs if output.requires_grad]
    if wanting:
        sum(wanting).backward()
    grads = [output.grad for output in outputs if output.is_leaf or output.retains_grad]
    shown = (x, w, x.requires_grad, x.is_leaf, w.grad, x.grad, grads, grad_mode)
    return ([output.detach() for output in outputs], *shown)


def check_like_plain(compiled, plain) -> None:
    for seed in range(4):
        for mine, other in zip(outcome(compiled, seed), outcome(plain, seed), strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("fn", UNFIT, ids=lambda fn: fn.__name__)
def test_the_graph_as_it_is_can_do_it(fn) -> None:
    compiled = tripwire.compile(fn, backend="eager", fullgraph=True)
    check_like_plain(compiled, fn)
    assert compiled.statistics().hits == 3


@pytest.mark.parametrize("fn", UNFIT, ids=lambda fn: fn.__name__)
def test_other_back_ends_refuse_it_with_a_reason_and_it_runs_plainly(fn, caplog) -> None:
    compiled = tripwire.compile(fn, backend="aot_eager")
    check_like_plain(compiled, fn)
    assert compiled.statistics().hits == 0
    assert "[not-functional]" in caplog.text
    with pytest.raises(tripwire.CannotTrace, match='backend="eager"') as caught:
        outcome(tripwire.compile(fn, backend="aot_eager", fullgraph=True), 0)
    assert caught.value.slug == "not-functional"


def test_what_is_like_it_and_fits_is_compiled() -> None:
    def fits(x, w):
        with torch.no_grad():
            w.mul_(0.5)
        y = (x * w.data).requires_grad_()
        (slope,) = torch.autograd.grad((y**2).sum(), y)
        torch.set_grad_enabled(False)
        torch.set_grad_enabled(True)
        return slope * w, y.detach_()

    compiled = tripwire.compile(fits, backend="aot_eager", fullgraph=True)
    check_like_plain(compiled, fits)
    assert compiled.statistics().hits == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_embedding_with_sparse_gradients_keeps_them(backend) -> None:
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        embed = nn.Embedding(10, 4, sparse=True)
        sides.append((embed, torch.optim.SparseAdam(embed.parameters(), 0.1)))
    compiled = tripwire.compile(sides[0][0], backend=backend)
    for step in range(4):
        for call, (_, optimizer) in zip((compiled, sides[1][0]), sides, strict=True):
            call(torch.tensor([step, 3])).square().sum().backward()
            optimizer.step()  # which takes nothing but sparse gradients
            optimizer.zero_grad()
        torch.testing.assert_close(sides[0][0].weight, sides[1][0].weight)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_training_step_runs_right_and_its_model_is_compiled(backend, caplog) -> None:
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        return model, torch.optim.AdamW(model.parameters(), 0.05)

    def train_step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = tripwire.compile(train_step, backend=backend)
    mine, plain = build(), build()
    for seed in range(8):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(compiled(*mine, x), train_step(*plain, x))
    torch.testing.assert_close(list(mine[0].parameters()), list(plain[0].parameters()))
    assert "train_step runs as plain Python" in caplog.text
    inner = mine[0]._compiled_call_impl
    assert inner.statistics().hits >= 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_with_backward_inside_and_the_rest_outside(backend) -> None:
    def forward_backward(model, x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    compiled = tripwire.compile(forward_backward, backend=backend)
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        optimizers.append(torch.optim.SGD(models[-1].parameters(), 0.1, momentum=0.9))
    for seed in range(8):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        losses = [f(m, x) for f, m in zip((compiled, forward_backward), models, strict=True)]
        torch.testing.assert_close(*losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=seed % 2 == 0)
        torch.testing.assert_close(*[list(m.parameters()) for m in models])
    if backend == "eager":
        assert compiled.statistics().hits >= 6
    else:
        assert models[0]._compiled_call_impl.statistics().hits >= 3
