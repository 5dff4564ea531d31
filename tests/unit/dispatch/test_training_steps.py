"""A whole training step in one function: zero_grad, forward, backward, step."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tripwire

BACKENDS = ["eager", "aot_eager"]
CALLS = 9
OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
}


def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch_of(index, rows=6):
    return torch.linspace(-1, 1, rows * 4).reshape(rows, 4) + 0.1 * index


def zero_before(model, opt, x):
    opt.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    opt.step()
    return loss


def zero_after(model, opt, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def zero_in_place(model, opt, x):
    opt.zero_grad(set_to_none=False)
    loss = model(x).pow(2).mean()
    loss.backward()
    opt.step()
    return loss.item()


def clipped(model, opt, x):
    opt.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    return loss.detach()


def two_losses(model, opt, x):
    opt.zero_grad()
    y = model(x)
    first, second = y.pow(2).mean(), y.abs().mean()
    first.backward(retain_graph=True)
    second.backward()
    opt.step()
    return first + second


def finite_only(model, opt, x):
    opt.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    if torch.isfinite(loss):
        opt.step()
    return loss


def by_hand(model, opt, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss


def by_hand_in_place(model, opt, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad.zero_()
    return loss


def zero_between(model, opt, x):
    loss = model(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.detach()


def by_gradients(model, opt, x):
    loss = model(x).pow(2).mean()
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter -= 0.1 * gradient
    return loss.detach()


def by_gradients_twice(model, opt, x):
    parameters = list(model.parameters())
    for _ in range(2):
        loss = model(x).pow(2).mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
    return loss.detach()


STEPS = [
    zero_before,
    zero_between,
    zero_after,
    zero_in_place,
    clipped,
    two_losses,
    finite_only,
    by_hand,
    by_hand_in_place,
    by_gradients,
    by_gradients_twice,
]


def train(step, optimizer, compile, before=lambda index, model, opt: None, calls=CALLS):
    """All that a training shows: results, parameters and gradients after each call."""
    torch.manual_seed(0)
    model = build_model()
    opt = optimizer(model.parameters())
    compiled = compile(functools.partial(step, model, opt))
    seen = []
    for index in range(calls):
        before(index, model, opt)
        result = compiled(batch_of(index, 5 if index % 3 == 2 else 6))
        seen.append(result.detach() if isinstance(result, torch.Tensor) else result)
        for parameter in model.parameters():
            gradient = parameter.grad
            seen += [parameter.detach().clone(), None if gradient is None else gradient.clone()]
    return compiled, seen


def check(step, optimizer, backend, traces=3, **options):
    _, expected = train(step, optimizer, lambda fn: fn, **options)
    compile = functools.partial(tripwire.compile, backend=backend)
    compiled, found = train(step, optimizer, compile, **options)
    torch.testing.assert_close(found, expected)
    statistics = tripwire.statistics(compiled)
    assert statistics.refusals == 0
    assert statistics.traces <= traces


def _combine(step, optimizer, backend):
    """Behind AOTAutograd each step and each optimizer once; all of the others are slow."""
    is_slow = backend == "aot_eager" and step is not zero_before and optimizer != "AdamW"
    marks = pytest.mark.slow if is_slow else ()
    return pytest.param(step, optimizer, backend, marks=marks)


@pytest.mark.parametrize(
    ("step", "optimizer", "backend"),
    [_combine(*one) for one in itertools.product(STEPS, OPTIMIZERS, BACKENDS)],
)
def test_a_training_step_runs_compiled(step, optimizer, backend) -> None:
    check(step, OPTIMIZERS[optimizer], backend)


@pytest.mark.parametrize("optimizer", [pytest.param("momentum", marks=pytest.mark.slow), "AdamW"])
def test_a_training_step_runs_compiled_behind_inductor(optimizer) -> None:
    check(clipped, OPTIMIZERS[optimizer], "inductor")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scheduler_may_set_the_rate(backend) -> None:
    def anneal(index, model, opt):
        opt.param_groups[0]["lr"] = 0.1 * 0.9**index

    check(zero_before, OPTIMIZERS["AdamW"], backend, before=anneal)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_are_there_before_a_call_are_added_to(backend) -> None:
    def step(model, opt, x):
        loss = model(x).pow(2).mean()
        loss.backward()
        opt.step()
        return loss

    def reset_at_times(index, model, opt):
        if index % 4 != 3:
            opt.zero_grad(set_to_none=index % 2 == 0)

    check(step, OPTIMIZERS["SGD"], backend, traces=4, before=reset_at_times, calls=14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_parameters_that_a_loss_leaves_out_are_as_before(backend) -> None:
    def step(model, opt, x):
        loss = model[:2](x).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    def give(index, model, opt):
        if index in (4, 5, 8):
            model[2].bias.grad = torch.ones(2) * index

    check(step, OPTIMIZERS["SGD"], backend, before=give, calls=14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_freezing_a_layer_changes_what_is_trained(backend) -> None:
    def freeze(index, model, opt):
        model[0].requires_grad_(not 4 <= index < 9)

    check(zero_before, OPTIMIZERS["SGD"], backend, traces=7, before=freeze, calls=14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_gathered_over_calls(backend) -> None:
    state = {"calls": 0}

    def step(model, opt, x):
        loss = model(x).pow(2).mean() / 3
        loss.backward()
        state["calls"] += 1
        if state["calls"] % 3 == 0:
            opt.step()
            opt.zero_grad()
        return loss

    def begin(index, model, opt):
        if index == 0:
            state["calls"] = 0

    check(step, OPTIMIZERS["SGD"], backend, traces=5, before=begin, calls=14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_models_train_each_other(backend) -> None:
    def play(compile):
        torch.manual_seed(0)
        maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
        makers = torch.optim.SGD(maker.parameters(), lr=0.1)
        judges = torch.optim.SGD(judge.parameters(), lr=0.1)

        def step(x):
            judges.zero_grad()
            judged = judge(x).mean() - judge(maker(x).detach()).mean()
            judged.backward()
            judges.step()
            makers.zero_grad()
            made = judge(maker(x)).mean()
            made.backward()
            makers.step()
            return judged.detach() + made.detach()

        compiled = compile(step)
        results = [compiled(batch_of(index)) for index in range(CALLS)]
        return compiled, [*results, *maker.parameters(), *judge.parameters()]

    _, expected = play(lambda step: step)
    compiled, found = play(functools.partial(tripwire.compile, backend=backend))
    torch.testing.assert_close(found, expected)
    assert tripwire.statistics(compiled).hits >= CALLS - 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_an_argument_is_seen_to_change(backend) -> None:
    def step(model, opt, x):
        loss = model(batch_of(0)).pow(2).mean()
        loss.backward()
        return loss + x.sum()

    def run(compile):
        torch.manual_seed(0)
        model = build_model()
        model(batch_of(1)).sum().backward()
        compiled = compile(functools.partial(step, model, None))
        return [compiled(model[0].weight.grad).detach() for _ in range(5)]

    expected = run(lambda fn: fn)
    torch.testing.assert_close(run(functools.partial(tripwire.compile, backend=backend)), expected)


def clear(parameter):
    parameter.grad = None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "add_hook",
    [
        lambda p: p.register_post_accumulate_grad_hook(clear),
        lambda p: p.register_hook(lambda gradient: gradient * 2),
    ],
)
@pytest.mark.parametrize("first", [0, 3])
def test_hooks_of_parameters_run_as_in_plain_python(first, add_hook, backend) -> None:
    def add(index, model, opt):
        if index == first:
            add_hook(model[0].weight)

    optimizer = OPTIMIZERS["SGD"]
    _, expected = train(zero_before, optimizer, lambda fn: fn, before=add)
    compile = functools.partial(tripwire.compile, backend=backend)
    _, found = train(zero_before, optimizer, compile, before=add)
    torch.testing.assert_close(found, expected)


AVERAGES = {
    "equal": {},
    "exponential": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "one by one": {"avg_fn": lambda average, one, count: 0.8 * average + 0.2 * one},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", AVERAGES)
def test_a_step_may_move_an_average_of_the_weights_at_its_end(name, backend) -> None:
    """The average counts its moves in a tensor, and asks after the backward whether there were any.

    Its own weights want gradients, but no backward of the step gives them one.
    """

    def run(compile):
        torch.manual_seed(0)
        model = build_model()
        average = AveragedModel(model, **AVERAGES[name])
        opt = OPTIMIZERS["AdamW"](model.parameters())

        def step(x):
            loss = zero_before(model, opt, x)
            average.update_parameters(model)
            return loss.detach()

        compiled = compile(step)
        losses = [compiled(batch_of(index)) for index in range(CALLS)]
        return compiled, (losses, average.state_dict())

    _, expected = run(lambda fn: fn)
    compiled, found = run(functools.partial(tripwire.compile, backend=backend))
    torch.testing.assert_close(found, expected)
    assert compiled.statistics().hits >= CALLS - 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [True, False])
def test_a_number_that_a_hook_moves_in_a_backward_is_asked_for_behind_it(counts, backend) -> None:
    """Not counts: a number with a point, which could be some gradient's memory."""

    def run(compile):
        torch.manual_seed(0)
        model = build_model()
        moved = torch.zeros((), dtype=torch.long if counts else torch.float)
        model.register_buffer("moved", moved)
        opt = OPTIMIZERS["SGD"](model.parameters())

        def step(x):
            loss = zero_before(model, opt, x)
            return -loss if model.moved > 1 else loss

        compiled = compile(step)
        seen = []
        for index in range(12):
            if index == 4:
                hook = model[0].bias.register_hook(lambda _: model.moved.add_(1) and None)
            if index == 7:
                hook.remove()
            if index == 9:
                model.moved.zero_()
            seen.append((compiled(batch_of(index)).detach(), model.moved.clone()))
        return seen

    compile = functools.partial(tripwire.compile, backend=backend)
    torch.testing.assert_close(run(compile), run(lambda fn: fn))


# --- gradients of leaves that the call makes: adversarial steps ---


def signed(net, x):
    moved = x.clone().requires_grad_()
    net(moved).sum().backward()
    return (x + 0.1 * moved.grad.sign()).detach()


def signed_again(net, x):
    moved = x.clone().detach().requires_grad_(True)
    for _ in range(3):
        net(moved).pow(2).sum().backward()
        moved = (moved + 0.1 * moved.grad.sign()).clamp(-1, 1).detach().requires_grad_(True)
    return moved.detach()


def signed_in_place(net, x):
    x = x.clone()
    x.requires_grad = True
    for _ in range(2):
        net.zero_grad()
        net(x).pow(2).sum().backward()
        with torch.no_grad():
            x += 0.1 * x.grad.sign()
        x.grad = None
    return x.detach()


def gathered(net, x):
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        net(x + delta).pow(2).sum().backward()
        found = delta.grad.clone()
        delta.grad.zero_()
    return found


def moved_in_place(net, x):
    delta = torch.zeros(3, requires_grad=True)
    for _ in range(3):
        net(x * (delta + 1)).sum().backward()
        with torch.no_grad():
            delta += 0.1 * delta.grad.sign()
            delta.grad.zero_()
    return delta.detach()


def asked_first(net, x):
    delta = torch.full_like(x, 0.5).requires_grad_()
    before = delta.grad is None
    net(x + delta).pow(2).sum().backward()
    return delta.grad * (2 if before and delta.grad is not None else 3)


ADVERSARIES = (signed, signed_again, signed_in_place, gathered, moved_in_place, asked_first)


def check_adversary(make_step, backend):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    nets = copy.deepcopy(net), net
    step = tripwire.compile(functools.partial(make_step, nets[1]), backend=backend)
    for n in range(6):
        x = torch.linspace(-n, n + 1, 3)
        torch.testing.assert_close(step(x), make_step(nets[0], x))
        for left, right in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
            torch.testing.assert_close(left.grad, right.grad)
        if n == 3:
            for one in nets:
                one.weight.requires_grad_(False)
    assert step.statistics().hits >= 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make_step", ADVERSARIES)
def test_gradients_of_leaves_made_by_the_call_are_followed(make_step, backend) -> None:
    check_adversary(make_step, backend)


@pytest.mark.slow
@pytest.mark.parametrize("make_step", ADVERSARIES)
def test_gradients_of_leaves_made_by_the_call_are_followed_behind_inductor(make_step) -> None:
    check_adversary(make_step, "inductor")
