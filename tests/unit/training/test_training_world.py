"""Optimizers, hooks, schedulers and averages work on a model whose code is compiled.

None of them retires it: what they write is the values of tensors, and those are inputs.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from unit.training.pairs import BACKENDS, WIDTH, Mlp, Pair, square

import tripwire

backends = pytest.mark.parametrize("backend", BACKENDS)
quick = pytest.mark.parametrize("backend", ["eager", "aot_eager"])

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "adamw foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adamw amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
}


@quick
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_step_retires_code(backend, name) -> None:
    pair = Pair(Mlp, backend, optimizer=OPTIMIZERS[name])
    for _ in range(3):
        pair.play()
    pair.check(traces=2, hits=16)
    # The switches of `training` are all that ever was written: one entry for each side of it.
    assert all("training" in str(cause) for cause in pair.compiled.statistics().causes)


@backends
@pytest.mark.parametrize("to_none", [True, False])
def test_cleared_gradients_retire_nothing(backend, to_none) -> None:
    pair = Pair(Mlp, backend)
    for _ in range(4):
        pair.step(update=False)
        for side in pair.sides:
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=to_none)
            assert (side.model.up.weight.grad is None) is to_none
    pair.check(traces=1, hits=3)


@quick
def test_clipped_gradients_and_a_learning_rate_schedule(backend) -> None:
    pair = Pair(Mlp, backend, optimizer=OPTIMIZERS["adamw"])
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(side.optimizer, 0.1, total_steps=8)
        for side in pair.sides
    ]
    for step in range(8):
        pair.step(update=False)
        norms = [nn.utils.clip_grad_norm_(side.model.parameters(), 0.01) for side in pair.sides]
        pair.same(norms)
        for side, schedule in zip(pair.sides, schedules, strict=True):
            side.optimizer.step()
            side.optimizer.zero_grad()
            schedule.step()
        if step % 3 == 2:
            pair.evaluate()
    pair.check(traces=2, hits=8)


@backends
def test_an_average_in_place_and_weights_swapped_for_it(backend) -> None:
    pair = Pair(Mlp, backend)
    averages = [[p.detach().clone() for p in side.model.parameters()] for side in pair.sides]

    def swap() -> None:
        for side, average in zip(pair.sides, averages, strict=True):
            for p, kept in zip(side.model.parameters(), average, strict=True):
                p.data, kept.data = kept.data, p.data

    for _ in range(3):
        pair.step()
        for side, average in zip(pair.sides, averages, strict=True):
            with torch.no_grad():
                for kept, p in zip(average, side.model.parameters(), strict=True):
                    kept.lerp_(p, 0.3)
        swap()
        pair.evaluate()
        swap()
        pair.compare_state()
    pair.step()
    pair.check(traces=2, hits=5)


@quick
def test_an_averaged_model_beside_a_compiled_one(backend) -> None:
    pair = Pair(Mlp, backend)
    averages = [
        AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for side in pair.sides
    ]
    for _ in range(3):
        pair.step()
        for side, average in zip(pair.sides, averages, strict=True):
            average.update_parameters(side.model)
        pair.same([average(pair.batch()) for average in averages])
    pair.check(traces=1, hits=2)


@quick
def test_weights_loaded_back_in_place_and_by_replacement(backend) -> None:
    pair = Pair(Mlp, backend)
    pair.step()
    saved = copy.deepcopy(pair.sides[1].model.state_dict())
    for assign in (False, True, False):
        pair.step()
        pair.step()
        pair.evaluate()
        for side in pair.sides:
            side.model.load_state_dict(copy.deepcopy(saved), assign=assign)
            if assign:
                side.optimizer = torch.optim.SGD(side.model.parameters(), 0.05)
        pair.compare_state()
    pair.step()
    assert pair.compiled.statistics().refusals == 0


@backends
def test_hooks_of_parameters_run_and_come_and_go(backend) -> None:
    pair = Pair(Mlp, backend)
    seen: list[list[torch.Tensor]] = [[], []]

    def note(index: int, parameter: torch.Tensor) -> None:
        seen[index].append(parameter.grad.clone())

    pair.step()
    handles = []
    for index, side in enumerate(pair.sides):
        handles.append(side.model.up.weight.register_hook(lambda grad: grad * 3))
        handles.append(
            side.model.down.bias.register_post_accumulate_grad_hook(functools.partial(note, index))
        )
    pair.step()
    pair.evaluate()
    pair.step()
    for handle in handles:
        handle.remove()
    pair.step()
    assert len(seen[0]) == 2
    pair.same(seen)
    pair.check(traces=2, hits=3)


@quick
def test_an_optimizer_that_steps_in_the_backward(backend) -> None:
    pair = Pair(Mlp, backend)
    for side in pair.sides:
        for parameter in side.model.parameters():
            stepper = torch.optim.SGD([parameter], 0.05)

            def step(p: torch.Tensor, stepper=stepper) -> None:
                stepper.step()
                stepper.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        pair.step(update=False)
    pair.check(traces=1, hits=3)


@quick
def test_backward_hooks_of_modules_are_refused_and_run(backend, caplog) -> None:
    pair = Pair(lambda: nn.Sequential(Mlp(), Mlp()), backend)
    pair.step()
    pair.step()
    seen: list[list[torch.Tensor]] = [[], []]

    def note(index: int, module: nn.Module, given: object, taken: tuple[torch.Tensor]) -> None:
        seen[index].append(taken[0].clone())

    handles = [
        side.model[0].register_full_backward_hook(functools.partial(note, index))
        for index, side in enumerate(pair.sides)
    ]
    for _ in range(3):
        pair.step()
    for handle in handles:
        handle.remove()
    pair.step()
    assert len(seen[0]) == 3
    pair.same(seen)
    assert "[backward-hook]" in caplog.text


@quick
@pytest.mark.parametrize("way", ["_call_impl", "compiled class", "inside a refused call"])
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_run_however_a_module_is_called(backend, way, kind) -> None:
    class Own(nn.Sequential):
        pass

    model, seen = Own(Mlp()), []
    if way == "compiled class":
        tripwire.compile(Own, backend=backend)
    call = model if way == "compiled class" else model._call_impl
    if way == "inside a refused call":
        call = lambda x: model(x)  # noqa: E731
    if way != "compiled class":
        call = tripwire.compile(call, backend=backend)
    for register in (None, getattr(model, kind)):
        if register is not None:
            register(lambda *_: seen.append(1))
        for _ in range(8):
            call(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    assert len(seen) == 8


@quick
def test_a_hook_on_an_intermediate_is_refused_and_runs(backend, caplog) -> None:
    class Hooked(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 2)
            return self.down(y)

    pair = Pair(Hooked, backend)
    pair.play()
    assert "[callable-argument]" in caplog.text


@quick
def test_parameters_given_to_functional_call(backend) -> None:
    pair = Pair(Mlp, backend)
    for scale in (1.0, 0.5, 0.5):

        def loss(call, x, scale=scale):
            given = {k: v * scale for k, v in call.named_parameters()}
            return torch.func.functional_call(call, given, (x,)).square().mean()

        pair.step(loss)
        pair.step()
    pair.evaluate()
    pair.step()
    found = pair.compiled.statistics()
    assert found.refusals == 0
    assert found.hits >= 3


@quick
def test_training_goes_on_while_another_copy_of_the_model_trains(backend) -> None:
    pair = Pair(Mlp, backend)
    pair.step()
    pair.step()
    other = copy.deepcopy(pair.compiled)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(3):
        square(other, pair.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        pair.step()
    pair.check(traces=1, hits=4)
    assert other.statistics().hits == 2


@quick
def test_every_shape_of_a_batch_has_its_own_gradients(backend) -> None:
    pair = Pair(Mlp, backend)
    for rows in (3, 1, 3, 4, 1, 3):
        pair.shape = (rows, WIDTH)
        pair.step()
    pair.check(traces=3, hits=3)


def test_under_inference_mode_nothing_of_training_is_used() -> None:
    pair = Pair(Mlp, "aot_eager")
    pair.step()
    pair.step()
    with torch.inference_mode():
        results = [side.call(pair.batch()) for side in pair.sides]
        assert all(result.is_inference() for result in results)
    pair.same([result.clone() for result in results])
    pair.step()
    assert pair.compiled.statistics().hits == 2


@quick
def test_a_function_over_two_models_trains_as_plain_code_does(backend) -> None:
    """A generator and a critic, of which one step trains only one."""

    def build():
        torch.manual_seed(0)
        return nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)

    def score(maker, critic, noise):
        made = maker(noise)
        return critic(made).mean(), critic(made.detach()).mean()

    compiled = tripwire.compile(score, backend=backend)
    found = []
    for call, models in ((compiled, build()), (score, build())):
        optimizers = [torch.optim.AdamW(m.parameters(), 0.05) for m in models]
        losses = []
        for step in range(6):
            noise = torch.randn(4, 2, generator=torch.Generator().manual_seed(step))
            loss = call(*models, noise)[step % 2]
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.detach())
        found.append((losses, [p.detach() for m in models for p in m.parameters()]))
    torch.testing.assert_close(found[0], found[1])
    assert compiled.statistics().hits == 5


def _hook(x: torch.Tensor, k: int) -> torch.Tensor:
    y = x * 2
    y.register_hook(functools.partial(torch.mul, k))
    return y * 3


def _ask_for_memory(x: torch.Tensor, k: int) -> torch.Tensor:
    y = (x * k).sum()
    y.register_hook(lambda grad: (grad.untyped_storage(), grad * k)[1])
    return y


BACKWARDS = {
    "a hook": _hook,
    "a part": lambda x, k: x[1 : k + 1].repeat(2),
    "a reshaped one": lambda x, k: x.view(2, -1).cumsum(1),
    "a number": lambda x, k: x.select(0, k).unsqueeze(0).repeat(k),
    "padding": lambda x, k: torch.nn.functional.pad(x, (k, k)),
    "a hook that asks for memory": _ask_for_memory,
}


@quick
@pytest.mark.parametrize("name", BACKWARDS)
def test_compiled_autograd_gets_plain_sizes(backend, name) -> None:
    from torch._dynamo import compiled_autograd

    compiler = functools.partial(tripwire.compile, backend=backend)
    for size, k in ((4, 1), (6, 2), (8, 3), (10, 2)):
        x, twin = (torch.arange(float(size), requires_grad=True) for _ in range(2))
        with compiled_autograd._enable(compiler):
            BACKWARDS[name](x, k).sum().backward()
        BACKWARDS[name](twin, k).sum().backward()
        assert torch.equal(x.grad, twin.grad)


def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@quick
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_whole_step_that_is_given_its_model_and_optimizer_is_compiled(backend, name) -> None:
    compiled = tripwire.compile(train_step, backend=backend)
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Mlp()
        sides.append((model, OPTIMIZERS[name](model.parameters())))
    for step in range(12):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        found = [call(*side, x) for call, side in zip((compiled, train_step), sides, strict=True)]
        torch.testing.assert_close(*found)
        if step == 5:  # the same keys, with other tensors under them
            for _, optimizer in sides:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if step == 8:
            torch.manual_seed(1)
            sides = [(model, OPTIMIZERS[name](model.parameters())) for model, _ in sides]
    torch.testing.assert_close(*(dict(model.named_parameters()) for model, _ in sides))
    assert compiled.statistics().hits >= 7


@quick
@pytest.mark.parametrize("kind", [dict, OrderedDict, functools.partial(defaultdict, dict)])
def test_a_dict_whose_keys_are_tensors_is_compared_by_which_they_are(backend, kind) -> None:
    def total(table, parts, x):
        return sum(table[part]["scale"] * part for part in parts) * x * len(table)

    compiled = tripwire.compile(total, backend=backend)
    parts = [torch.ones(3), torch.full((3,), 2.0)]
    table = kind()
    for part in parts:
        table[part] = {"scale": part.sum()}
    x = torch.randn(3)

    def check(hits: int) -> None:
        torch.testing.assert_close(compiled(table, parts, x), total(table, parts, x))
        assert compiled.statistics().hits == hits

    check(0)
    check(1)
    parts[0].add_(1)
    check(2)
    table[parts[1]]["scale"] = torch.tensor(5.0)
    check(3)
    table[parts[0]] = table.pop(parts[0])  # another order
    check(3)
    check(4)
    table[torch.ones(3)] = {}
    check(4)
    del table[parts[1]]
    parts.pop()
    check(4)
    check(5)


class Sharp:
    """What sharpness-aware optimizers do: step away, look at the gradient there, and step back."""

    def __init__(self, net: nn.Module) -> None:
        self.base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self.parameters = list(net.parameters())
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {p: {} for p in self.parameters}

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.parameters:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)
        self.base.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.parameters:
            p.data = self.state[p]["old_p"]
        self.base.step()


@pytest.mark.parametrize("alone", [(), (6,), (5, 7, 8)])
def test_steps_that_give_parameters_their_old_data_again(alone) -> None:
    """`alone`: steps without the first half, so that parameter and old data share memory."""
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    its = copy.deepcopy(mine)
    plain, other = Sharp(mine), Sharp(its)
    second = tripwire.compile(other.second_step, backend="eager", fullgraph=True)
    sides = (mine, plain, plain.second_step), (its, other, second)
    for step in range(11):
        x = torch.randn(3, 4)
        for net, sharp, run in sides:
            net(x).pow(2).mean().backward()
            if step not in alone:
                sharp.first_step()
                net(x).pow(2).mean().backward()
            run()
            sharp.base.zero_grad()
        torch.testing.assert_close(list(its.parameters()), list(mine.parameters()), rtol=0, atol=0)
        held = [[sharp.state[p]["old_p"] for p in sharp.parameters] for _, sharp, _ in sides]
        torch.testing.assert_close(*held, rtol=0, atol=0)
    assert second.statistics().traces <= 3 + 2 * len(alone)
