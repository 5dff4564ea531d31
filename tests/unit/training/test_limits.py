"""What a functional graph can't do is refused for back ends that need one, and never lost."""

from __future__ import annotations

import copy
import functools

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


GRADIENTS = [
    read_grad,
    clear_grad,
    set_grad,
    delete_grad,
    add_to_grad,
    backward_method,
    backward_function,
]
UNFIT = [
    leave_grad_mode,
    set_data_inside,
    want_grad,
    set_wants_grad,
    reshape_input,
    resize_input,
    detach_input,
    retain,
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


@pytest.mark.parametrize("fn", [*UNFIT, *GRADIENTS], ids=lambda fn: fn.__name__)
def test_the_graph_as_it_is_can_do_it(fn) -> None:
    compiled = tripwire.compile(fn, backend="eager", fullgraph=True)
    check_like_plain(compiled, fn)
    assert compiled.statistics().hits == 3


@pytest.mark.parametrize("fn", GRADIENTS, ids=lambda fn: fn.__name__)
def test_other_back_ends_compile_what_is_around_gradients_that_tensors_keep(fn) -> None:
    compiled = tripwire.compile(fn, backend="aot_eager")
    check_like_plain(compiled, fn)
    assert compiled.statistics().hits == 3
    whole = tripwire.compile(fn, backend="aot_eager", fullgraph=True)
    if "backward" in fn.__name__:
        with pytest.raises(tripwire.CannotTrace, match="no `backward` inside") as caught:
            outcome(whole, 0)
        assert caught.value.slug == "graph-cut"
    else:
        check_like_plain(whole, fn)


def test_a_gradient_that_shares_memory_with_another_is_changed_as_in_plain_code() -> None:
    def step(w, v):
        one, other = w.grad, v.grad
        one.mul_(2)
        other.add_(1)
        return one + other

    compiled = tripwire.compile(step, backend="aot_eager")
    for shares in (False, False, True, False, True):
        shown = []
        for call in (compiled, step):
            w, v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
            w.grad = torch.arange(3.0)
            v.grad = w.grad if shares else torch.arange(3.0)
            shown.append((call(w, v), w.grad, v.grad))
        torch.testing.assert_close(*shown)
    assert compiled.statistics().hits >= 3


def test_a_gradient_of_another_form_is_used_as_it_is() -> None:
    def step(w):
        with torch.no_grad():
            w.add_(w.grad, alpha=-0.1)
        return w * 2

    compiled = tripwire.compile(step, backend="aot_eager")
    forms = (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t(), torch.ones(2, 3))
    for grad in (*forms, *forms):
        shown = []
        for call in (compiled, step):
            w = nn.Parameter(torch.ones(2, 3))
            w.grad = grad.clone()
            shown.append((call(w).detach(), w.detach()))
        torch.testing.assert_close(*shown)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_gradients_run_as_they_are() -> None:
    def penalty(x, w):
        ((x * w) ** 3).sum().backward(create_graph=True)
        return x * 2

    compiled = tripwire.compile(penalty, backend="aot_eager")
    for _ in range(4):
        shown = []
        x = torch.randn(3)
        for call in (compiled, penalty):
            w = torch.ones(3, requires_grad=True)
            call(x, w)
            (second,) = torch.autograd.grad(w.grad.sum(), w)
            shown.append((w.grad.detach(), second))
            w.grad = None
        torch.testing.assert_close(*shown)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, for each": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}


def play_optimizer(name, backend, calls):
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = OPTIMIZERS[name](model.parameters())
        sides.append((model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)))
    compiled = tripwire.compile(lambda: sides[1][1].step(), backend=backend, fullgraph=True)
    for _ in range(calls):
        x = torch.randn(5, 4)
        for (net, _, _), step in zip(sides, (sides[0][1].step, compiled), strict=True):
            net.zero_grad()
            (net(x) ** 2).mean().backward()
            step()
        for _, _, schedule in sides:
            schedule.step()
        torch.testing.assert_close(*(list(net.parameters()) for net, _, _ in sides))
    return compiled.statistics()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_step_is_compiled_while_its_rate_falls(name) -> None:
    statistics = play_optimizer(name, "aot_eager", 20)
    assert statistics.traces <= 3
    assert statistics.hits >= 17


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_inductor_compiles_an_optimizers_step(name) -> None:
    statistics = play_optimizer(name, "inductor", 6)
    assert statistics.traces <= 3
    assert statistics.hits >= 3


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
def test_a_whole_training_step_with_a_hook_runs_right_and_its_model_is_compiled(
    backend, caplog
) -> None:
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model[0].weight.register_hook(lambda grad: grad * 0.5)
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
    assert compiled.statistics().hits >= 6


CLEARS = {
    "optimizer to None": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "module": lambda model, optimizer: model.zero_grad(),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "in place": lambda model, optimizer: [
        p.grad.zero_() for p in model.parameters() if p.grad is not None
    ],
}


@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
@pytest.mark.parametrize("form", ["SGD", "AdamW"])
def test_a_step_that_clears_gradients_between_forward_and_backward_is_compiled(clear, form) -> None:
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = getattr(torch.optim, form)(model.parameters(), 0.05)

        def train_step(x):
            loss = model(x).square().mean()
            clear(model, optimizer)
            loss.backward()
            optimizer.step()
            return loss.item(), loss.detach()

        return model, train_step

    (model, step), (plain, plain_step) = build(), build()
    compiled = tripwire.compile(step, backend="aot_eager")
    for seed in range(8):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(compiled(x), plain_step(x))
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
    assert compiled.statistics().hits >= 5


def use_and_clear(x, w):
    y = w * (w.grad.exp() + 1).sin()
    w.grad.zero_()
    return y


def use_and_clear_several(x, w):
    y = w * (w.grad.exp() + 1).sin()
    torch._foreach_zero_([w.grad])
    return y


def use_and_add(x, w):
    y = w * (w.grad.exp() + 1).sin()
    (x * w).sum().backward()
    return y


@pytest.mark.parametrize("fn", [use_and_clear, use_and_clear_several, use_and_add])
def test_a_gradient_that_a_backward_needs_may_be_changed_before(fn) -> None:
    compiled = tripwire.compile(fn, backend="aot_eager")
    check_like_plain(compiled, fn)
    assert compiled.statistics().hits


class Powered(nn.Module):
    """As in spectral normalisation: a direction is looked at, moved, and used with a gradient."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.register_buffer("u", torch.randn(4, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("n", torch.zeros(()))


class MovedBefore(Powered):
    def forward(self, x):
        old, weight = self.u * 2, self.layer.weight
        self.u.mul_(0.9)
        return self.layer(x) + nn.functional.linear(x * old, weight)


class MovedAfter(Powered):
    def forward(self, x):
        y = self.layer(x) * self.u.clone()
        with torch.no_grad():
            self.u.mul_(0.9)
        return y


class MovedTwice(Powered):
    def forward(self, x):
        count = self.n * 3
        old = self.u * 2
        self.u.mul_(0.9)
        y = self.layer(x) * old
        older = self.u * 3
        self.u.add_(0.1)
        self.n += 1
        return y * older, y * count


class MovedByPart(Powered):
    def forward(self, x):
        old = self.u[1:] * 2
        self.u[1:] += old * 0.1
        return self.layer(x)[:, 1:] * old


class Spectral(Powered):
    def __init__(self, layer):
        super().__init__(nn.utils.spectral_norm(layer))

    def forward(self, x):
        return self.layer(x)


class NewSpectral(Powered):
    def __init__(self, layer):
        super().__init__(nn.utils.parametrizations.spectral_norm(layer))

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [MovedBefore, MovedAfter, MovedTwice, MovedByPart, Spectral, NewSpectral]
)
def test_state_that_moves_beside_what_a_backward_needs_is_compiled(kind, backend) -> None:
    torch.manual_seed(0)
    plain = kind(nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    compiled = tripwire.compile(model, backend=backend, fullgraph=True)
    for call in range(6):
        found = []
        for net, run in ((plain, plain), (model, compiled)):
            x = torch.ones(3, 4, requires_grad=True)
            results = run(x * (call + 1))
            results = results if isinstance(results, tuple) else (results,)
            sum(result.pow(2).sum() for result in results).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-3)
            found.append([*results, x.grad, *net.state_dict().values()])
        torch.testing.assert_close(*found)
    assert tripwire.statistics(compiled).hits >= 4


class MovedAndCut(Powered):
    """A running mean; what follows is another part."""

    def forward(self, x):
        with torch.no_grad():
            self.u.lerp_(x.mean(0), 0.1)
        x = self.layer(x)
        x = self.cut(x)
        return x * self.use(self.u)

    def cut(self, x):
        return x if torch.isfinite(x).all() else x * 0

    def use(self, u):
        return u.exp()


class MovedAndPicked(MovedAndCut):
    def cut(self, x):
        return x * x[x > -9].numel()


class MovedAndViewed(MovedAndCut):
    def forward(self, x):
        with torch.no_grad():
            self.u.lerp_(x.mean(0), 0.1)
        part = self.u.view(2, 2)
        return self.cut(self.layer(x)) * part.exp().view(4)


class MovedAndReturned(MovedAndCut):
    def use(self, u):
        return u.exp() * u.clone()

    def forward(self, x):
        return super().forward(x), self.u[1:]


class MovedTogether(MovedAndCut):
    def forward(self, x):
        y = super().forward(x)
        return y * self.n.cos() + self.n.add_(1)


class MovedParameter(MovedAndCut):
    def forward(self, x):
        with torch.no_grad():
            self.layer.bias.mul_(0.9)
        y = self.cut(x * 2)
        return y * self.layer.bias.exp()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [
        *(Spectral, NewSpectral, MovedAndCut, MovedAndPicked, MovedAndViewed),
        *(MovedAndReturned, MovedTogether, MovedParameter),
    ],
)
def test_state_that_moves_in_each_of_two_calls_before_a_backward(kind, backend) -> None:
    torch.manual_seed(0)
    plain = kind(nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    compiled = tripwire.compile(model, backend=backend)
    for call in range(5):
        found = []
        for net, run in ((plain, plain), (model, compiled)):
            net.zero_grad()
            results = [run(torch.full((3, 4), scale * (call + 1.0))) for scale in (0.1, 0.2)]
            results = [one if isinstance(one, tuple) else (one,) for one in results]
            (results[0][0].pow(2).sum() - results[1][0].sum()).backward()
            grads = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
            found.append([*results[1], *grads, *net.state_dict().values()])
        torch.testing.assert_close(*found)
    assert tripwire.statistics(compiled).hits >= 8


def averaged(q, k, x):
    y = q(x)
    with torch.no_grad():
        for mine, its in zip(q.parameters(), k.parameters(), strict=True):
            its.data = its.data * 0.9 + mine.data * 0.1
        other = k(x)
    return y * other


def averaged_first(q, k, x):
    for mine, its in zip(q.parameters(), k.parameters(), strict=True):
        its.data = its.data * 0.9 + mine.data * 0.1
    return q(x) + k(x)


def changed_by_its_data(q, k, x):
    for mine, its in zip(q.parameters(), k.parameters(), strict=True):
        its.data -= 0.1 * mine.data
    return q(x) * k(x)


def clamped(q, k, x):
    q.weight.data = q.weight.data.clamp(-0.3, 0.3)
    return q(x)


def exchanged(q, k, x):
    mine, its = q.weight.data.clone(), k.weight.data.clone()
    q.weight.data, k.weight.data = its, mine
    return q(x) + k(x)


def stepped(q, k, x):
    q.zero_grad()
    q(x).pow(2).mean().backward()
    for mine in q.parameters():
        mine.data = mine.data - 0.1 * mine.grad.data
    return q(x)


def needed_later(q, k, x):
    y = k(x)
    k.weight.data = k.weight.data * 0.9
    return y


def shared(q, k, x):
    k.weight.data = q.weight.data
    return q(x) + k(x)


def changed_later(q, k, x):
    new = k.weight.data * 2
    k.weight.data = new
    new.mul_(0.5)
    return q(x) + k(x)


def handed_out(q, k, x):
    new = k.weight.data * 0.5
    k.weight.data = new
    return q(x) + k(x), new


def of_another_form(q, k, x):
    k.weight.data = k.weight.data.double()
    k.weight.data = k.weight.data.float()
    return q(x) + k(x)


GIVES_DATA = [averaged, averaged_first, changed_by_its_data, clamped, exchanged, stepped]
GIVES_OTHER_DATA = [needed_later, shared, changed_later, handed_out, of_another_form]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fn", GIVES_DATA + GIVES_OTHER_DATA)
def test_a_parameter_gets_other_data(fn, backend) -> None:
    torch.manual_seed(0)
    mine = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    sides = mine, copy.deepcopy(mine)
    held = [[p.data for net in side for p in net.parameters()] for side in sides]
    compiled = tripwire.compile(functools.partial(fn, *sides[1]), backend=backend)
    for call in range(6):
        found = []
        for side, run, old in zip(
            sides, (functools.partial(fn, *mine), compiled), held, strict=True
        ):
            x = torch.full((3, 4), 1.0 + call, requires_grad=True)
            results = run(x)
            first = results[0] if isinstance(results, tuple) else results
            side[0].zero_grad()
            first.pow(2).sum().backward()
            weights = [p.detach() for net in side for p in net.parameters()]
            found.append([first, x.grad, side[0].weight.grad, *weights, *old])
        torch.testing.assert_close(*found)
    assert (tripwire.statistics(compiled).hits >= 3) == (fn in GIVES_DATA)
