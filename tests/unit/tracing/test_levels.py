"""Transforms of torch.func inside a compiled call: results, gradients, state as in plain code."""

from __future__ import annotations

import copy

import pytest
import torch
from support import check_same
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from unit.training.pairs import BACKENDS, TOLERANCES

import tripwire

backends = pytest.mark.parametrize("backend", BACKENDS)
quick = pytest.mark.parametrize("backend", BACKENDS[:2])
X = torch.linspace(-1.0, 2.0, 12).view(3, 4)


def data(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """What transforms may read, and write, besides their arguments."""

    def __init__(self, body=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(3))
        self.scale = 2.0
        self.calls = 0
        self.seen: list[object] = []
        self.body = body

    def forward(self, x):
        return self.body(self, x)

    def energy(self, x):
        return self.layer(x).tanh().square().sum() * self.scale


# --- each transform ------------------------------------------------------------------------------


def per_example(net, x):
    def loss(parameters, row):
        return functional_call(net.layer, parameters, (row,)).square().sum()

    return vmap(grad(loss), in_dims=(None, 0))(dict(net.layer.named_parameters()), x)


def ensemble(net, x):
    parameters, buffers = stack_module_state([net.layer, net.layer])

    def call(parameters, buffers, x):
        return functional_call(net.layer, (parameters, buffers), (x,))

    return vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)


def adapt(net, x):
    """A gradient of what one step of descent leads to."""
    parameters = dict(net.layer.named_parameters())

    def inner(parameters):
        slope = grad(lambda p: functional_call(net.layer, p, (x,)).square().mean())(parameters)
        moved = {name: p - 0.1 * slope[name] for name, p in parameters.items()}
        return functional_call(net.layer, moved, (x,)).square().mean()

    return grad(inner)(parameters)


def pull_back(net, x):
    result, pull = vjp(net.layer, x)
    return pull(result * result.sum())[0]


def pull_back_without_gradients(net, x):
    result, pull = vjp(net.layer, x)
    with torch.no_grad():
        pulled = pull(result)[0]
    return pulled + net.layer(x).sum()


def dims(net, x):
    return vmap(lambda a, b: (a * b, a.sum()), in_dims=(1, None), out_dims=(1, 0))(x, x[:, 0])


def with_aux(net, x):
    return grad_and_value(lambda t: (net.energy(t), {"rows": t.cos()}), has_aux=True)(x)


def of_keywords(net, x):
    return vmap(lambda a, *, b, n: a * b * n)(x, b=x.cos(), n=3)


def by_hand(net, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(net.layer(dual)).tangent


def in_bfloat16(net, x):
    def call(row):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net.layer(row).float()

    return vmap(call)(x)


def with_a_constant(net, x):
    def call(row):
        with torch.no_grad():
            weight = row * 3
        return (row * weight).sum()

    return grad(call)(x)


def in_place(net, x):
    def call(row):
        made = torch.zeros_like(row)
        made += row
        made[0] = 1
        return made.mul_(2)

    return vmap(call)(x)


def used_after(net, x):
    kept = []
    slope = grad(lambda t: (kept.append(t * 2), net.energy(t))[1])(x)
    return slope + kept[0]


PROGRAMS = {
    "vmap": lambda net, x: vmap(net.layer)(x) * net.scale,
    "vmap in vmap": lambda net, x: vmap(vmap(lambda t: t.sin() * net.scale))(x),
    "vmap in chunks": lambda net, x: vmap(lambda row: row.sin(), chunk_size=2)(x),
    "grad": lambda net, x: grad(net.energy)(x),
    "grad of grad": lambda net, x: grad(lambda t: grad(net.energy)(t).square().sum())(x),
    "vmap of grad": lambda net, x: vmap(grad(net.energy))(x),
    "jacrev": lambda net, x: jacrev(net.layer)(x[0]),
    "jacfwd": lambda net, x: jacfwd(net.layer)(x[0]),
    "vmap of jacrev": lambda net, x: vmap(jacrev(net.layer))(x),
    "hessian": lambda net, x: hessian(net.energy)(x[0]),
    "jvp": lambda net, x: jvp(net.layer, (x,), (x.cos(),)),
    "checkpoint around": lambda net, x: checkpoint(
        lambda t: vmap(net.layer)(t), x, use_reentrant=False
    ),
    "jacobian of autograd": lambda net, x: torch.autograd.functional.jacobian(
        lambda t: net.layer(t).sum(0), x
    ),
    **{
        one.__name__: one
        for one in (
            *(per_example, ensemble, adapt, pull_back, pull_back_without_gradients, dims),
            *(with_aux, of_keywords, by_hand, in_bfloat16, with_a_constant, in_place, used_after),
        )
    },
}


def play(call, net, backend, changes=()):
    """Some calls with gradients and without, and what each leaves behind."""
    found = []
    for step in range(8):
        if step - 4 in range(len(changes)):
            changes[step - 4](net)
        torch.manual_seed(step)
        x = data((3, 3, 3, 5)[step % 4], step).requires_grad_(step % 2 == 0)
        result = call(x)
        tensors = [t for t in torch.utils._pytree.tree_leaves(result) if t.requires_grad]
        if tensors:
            sum(t.sum() for t in tensors).backward()
        gradients = [p.grad for p in net.parameters()]
        for parameter in net.parameters():
            parameter.grad = None
        found.append((result, x.grad, gradients, net.calls, list(net.seen), torch.rand(1)))
    return found


def check_program(body, backend, changes=(), *, refused=0):
    plain = Net(body)
    mine = copy.deepcopy(plain)
    compiled = tripwire.compile(mine, backend=backend)
    wanted, got = play(plain, plain, backend, changes), play(compiled, mine, backend, changes)
    limit = TOLERANCES[backend]
    torch.testing.assert_close(got, wanted, rtol=limit, atol=limit)
    numbers = compiled.statistics()
    assert numbers.refusals == refused, str(tripwire.explain(compiled))
    return numbers


@backends
@pytest.mark.parametrize("name", PROGRAMS)
def test_transforms_run_compiled_with_the_results_and_gradients_of_plain_code(
    name, backend
) -> None:
    assert check_program(PROGRAMS[name], backend).hits > 0


@quick
@pytest.mark.parametrize("name", ["vmap", "vmap of grad", "per_example", "pull_back", "with_aux"])
def test_what_a_transformed_function_reads_is_watched(name, backend) -> None:
    def scale(net):
        net.scale = 5.0

    def update(net):
        with torch.no_grad():
            net.layer.weight.mul_(1.5)

    def exchange(net):
        torch.manual_seed(7)
        net.layer = nn.Linear(4, 3)

    def hook(net):
        net.layer.register_forward_hook(lambda module, given, result: result * 2)

    check_program(PROGRAMS[name], backend, (scale, update, exchange, hook))


@quick
def test_what_a_transformed_function_writes_is_written_on_each_call(backend) -> None:
    def count(net, x):
        def call(row):
            net.calls += 1
            net.seen.append(row.shape[0])
            return net.layer(row)

        return vmap(call)(x) * net.calls

    assert check_program(count, backend).hits > 0


@quick
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_what_is_drawn_inside_vmap_is_drawn_as_plain_code_draws(randomness, backend) -> None:
    def draw(net, x):
        return vmap(lambda r: net.drop(r) + torch.rand(4) + torch.randn_like(r), 0, 0, randomness)(
            x
        )

    assert check_program(draw, backend).hits > 0


def test_vmap_that_may_not_draw_raises_as_plain_code_does() -> None:
    compiled = tripwire.compile(lambda x: vmap(lambda row: row + torch.rand(4))(x))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="randomness"):
            compiled(X)


@quick
def test_values_that_come_out_of_transforms_decide(backend) -> None:
    def decide(net, x):
        slope, value = grad_and_value(net.energy)(x)
        return slope * 2 if value > 15 else slope

    def decide_between(net, x):
        result, pull = vjp(net.layer, x)
        return pull(result)[0] * 2 if result.sum() > 0 else pull(result)[0]

    for body in (decide, decide_between):
        assert check_program(body, backend).hits > 0


@quick
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_transform_has_gradients_of_its_own_where_the_call_has_none(mode, backend) -> None:
    def body(net, x):
        with mode():
            return vmap(grad(net.energy))(x)

    assert check_program(body, backend).hits > 0


# --- sizes ---------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    "name",
    ["vmap", "vmap in vmap", "grad", "grad of grad", "vmap of grad", "vmap of jacrev"]
    + ["per_example", "ensemble", "adapt", "pull_back", "dims", "with_aux"],
)
def test_the_number_of_examples_stays_open(name, backend) -> None:
    net = Net(PROGRAMS[name])
    net.requires_grad_(False)
    compiled = tripwire.compile(net, backend=backend)
    for rows in (3, 5, 7, 8, 9, 6):
        torch.manual_seed(0)
        mine = compiled(data(rows))
        torch.manual_seed(0)
        torch.testing.assert_close(mine, net(data(rows)))
    assert compiled.statistics().traces <= 2, str(tripwire.explain(compiled))


@quick
def test_examples_that_draw_stay_open(backend) -> None:
    def drop(x):
        return vmap(lambda row: F.dropout(row, 0.5), randomness="different")(x)

    compiled = tripwire.compile(drop, backend=backend)
    for rows in (3, 5, 7, 8, 9):
        torch.manual_seed(rows)
        mine = compiled(data(rows))
        torch.manual_seed(rows)
        check_same(drop(data(rows)), mine)
    assert compiled.statistics().traces <= 2


@quick
def test_a_number_that_varies_stays_open_inside_a_transform(backend) -> None:
    compiled = tripwire.compile(
        lambda x, n: vmap(grad(lambda row: (row * row * n).sum()))(x), backend=backend
    )
    for n in range(2, 9):
        torch.testing.assert_close(compiled(X, n), X * 2 * n)
    assert compiled.statistics().traces <= 2


# --- levels --------------------------------------------------------------------------------------


def depth() -> int:
    found = torch._C._functorch.get_dynamic_layer_stack_depth()
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x, i: vmap(lambda row: f(row, i))(x),
        lambda f: lambda x, i: grad(lambda t: f(t, i).sum())(x),
        lambda f: lambda x, i: jvp(lambda t: f(t, i), (x,), (x,)),
        lambda f: lambda x, i: vmap(grad(lambda row: f(row, i).sum()))(x),
        lambda f: lambda x, i: hessian(lambda t: f(t, i).sum())(x[0]),
    ],
    ids=["vmap", "grad", "jvp", "vmap of grad", "hessian"],
)
def test_code_that_raises_inside_a_transform_leaves_no_level_open(transform) -> None:
    def pick(x, i):
        return x.sin().index_select(-1, i)

    compiled = tripwire.compile(transform(pick), backend="eager")
    inside, beyond = torch.tensor([1]), torch.tensor([9])
    for _ in range(2):
        compiled(X, inside)
    assert compiled.statistics().hits == 1
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError)):
            compiled(X, beyond)
        assert depth() == 0
        assert not torch._C._functorch.get_inplace_requires_grad_allowed()
        with forward_ad.dual_level():
            pass
        check_same(transform(pick)(X, inside), compiled(X, inside))


@quick
def test_levels_inside_a_transform_around_the_call_are_counted_from_there(backend) -> None:
    inner = tripwire.compile(lambda x: vmap(grad(lambda row: row.sin().sum()))(x), backend=backend)
    for _ in range(3):
        torch.testing.assert_close(inner(X), X.cos())
    outer = vmap(lambda y: inner(X) * y)(torch.arange(2.0))
    torch.testing.assert_close(outer, torch.stack([X.cos() * 0, X.cos()]))
    torch.testing.assert_close(vmap(inner)(torch.stack([X, X])), torch.stack([X.cos()] * 2))


# --- what stays refused --------------------------------------------------------------------------


class Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, given, result):
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx, slope):
        return slope * ctx.saved_tensors[0].cos()


def leak(net, x):
    kept = []
    slope = grad(lambda t: (kept.append(t * 2), net.energy(t))[1])(x)
    return slope, kept[0]


def store(net, x):
    def call(row):
        net.seen[:] = [row * 2]
        return net.energy(row)

    return grad(call)(x)


REFUSED = {
    "a wrapped tensor is returned": leak,
    "a wrapped tensor is stored": store,
    "a wrapped tensor decides": lambda net, x: grad(lambda t: t.sum() if t.max() > 0 else t.prod())(
        x
    ),
    "a wrapped tensor gives a number": lambda net, x: grad(lambda t: t.sum() * t.max().item())(x),
    "a custom function": lambda net, x: vmap(grad(lambda row: Sine.apply(row).sum()))(x),
    "functionalize": lambda net, x: torch.func.functionalize(torch.sin)(x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_runs_plainly_and_says_so(name) -> None:
    net = Net(REFUSED[name])
    compiled = tripwire.compile(net)
    for _ in range(3):
        wanted, got = net(X), compiled(X)
        for mine, plain in zip(*map(torch.utils._pytree.tree_leaves, (got, wanted)), strict=True):
            assert torch.equal(mine, plain)
    assert "[function-transform]" in str(tripwire.explain(compiled))


def test_a_change_of_an_argument_inside_a_transform_is_for_the_back_end_eager() -> None:
    def double(x):
        return vmap(lambda row: row.mul_(2) + 1)(x)

    for backend in ("eager", "aot_eager"):
        compiled = tripwire.compile(double, backend=backend)
        for _ in range(3):
            mine, plain = X.clone(), X.clone()
            check_same(double(plain), compiled(mine))
            check_same(plain, mine)
        is_refused = "[not-functional]" in str(tripwire.explain(compiled))
        assert is_refused is (backend == "aot_eager")
