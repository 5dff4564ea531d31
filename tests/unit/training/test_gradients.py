"""Gradients of inputs and parameters are plain autograd's, whatever a model does in between."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from unit.training.pairs import BACKENDS, WIDTH, Mlp, Pair, gradients, square

import tripwire

backends = pytest.mark.parametrize("backend", BACKENDS)


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@backends
def test_plain_training_is_two_traces(backend) -> None:
    pair = Pair(Mlp, backend)
    pair.play()
    pair.check(traces=2, hits=4)


def test_plain_training_with_inductor() -> None:
    pair = Pair(lambda: nn.Linear(WIDTH, 2), "inductor")  # the one that is not left to slow runs
    pair.step()
    pair.step()
    pair.step(lambda call, x: call(x).square().mean() * 2)
    pair.check(traces=1, hits=2)


@backends
def test_frozen_parameters_get_none_and_can_thaw(backend) -> None:
    def make() -> nn.Module:
        model = Mlp()
        model.up.weight.requires_grad_(False)
        return model

    pair = Pair(make, backend, optimizer=lambda ps: torch.optim.SGD(ps, 0.05))
    pair.play()
    pair.check(traces=2, hits=4)
    for side in pair.sides:
        side.model.up.weight.requires_grad_(True)
        side.model.down.bias.requires_grad_(False)
    pair.step()
    pair.step()
    assert pair.compiled.statistics().traces == 3


@backends
def test_tied_weights_train_as_plain_ones(backend) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, WIDTH, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed((x > 0).long()).mean(1)) + x.sum(1, keepdim=True)

    pair = Pair(Tied, backend)
    pair.play()
    pair.check(traces=2, hits=4)
    for side in pair.sides:  # untied: the code for one weight must not serve two
        side.model.head.weight = nn.Parameter(side.model.embed.weight.detach().clone() * 2)
    pair.step()
    pair.step()
    assert pair.compiled.statistics().retired >= 1


@backends
def test_gradients_accumulate_over_steps(backend) -> None:
    pair = Pair(Mlp, backend)
    pair.step(update=False)
    pair.step(update=False)
    pair.evaluate()
    pair.step()
    pair.step(update=False)
    pair.step()
    pair.check(traces=2, hits=4)


@backends
def test_a_graph_can_be_retained(backend) -> None:
    def twice(call, x):
        y = call(x).square().mean()
        y.backward(retain_graph=True)
        return y

    pair = Pair(stack, backend)
    pair.play(twice)
    pair.check(traces=2, hits=4)


@backends
def test_a_graph_can_be_retained_after_steps_without(backend) -> None:
    def twice(call, x):
        y = call(x).tanh().mean()
        y.backward(retain_graph=True)
        return y

    pair = Pair(stack, backend)
    for _ in range(2):
        pair.step()
        pair.step()
        pair.step(twice)
    pair.check(traces=1, hits=5)


def test_second_derivatives_of_the_eager_back_end() -> None:
    pair = Pair(stack, "eager")

    def penalty(call, x):
        (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        return slope.square().mean()

    pair.play(penalty)
    pair.check(traces=2, hits=4)


def test_a_second_derivative_that_a_back_end_does_not_have_is_refused_in_words() -> None:
    pair = Pair(stack, "aot_eager")
    pair.step()
    pair.step()
    x = pair.batch().requires_grad_()
    (slope,) = torch.autograd.grad(pair.compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        slope.sum().backward()


@backends
def test_derivatives_taken_inside_train_as_plain_code_does(backend) -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = self.inner(x)
                (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + slope

    pair = Pair(Penalised, backend)
    for _ in range(3):
        pair.step(lambda call, x: square(call, x) + 0 * x.sum())
    pair.check(traces=1, hits=2)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, factor, label=None):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        assert label in (None, "named")
        return x * weight * factor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors  # ten times too much, so that it shows
        return grad * weight * ctx.factor * 10, (grad * x).sum(0) * ctx.factor, None, None


@backends
def test_custom_autograd_functions_train_as_plain_code_does(backend) -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scale.apply(self.inner(x), self.weight, 0.5, "named")

    pair = Pair(Custom, backend)
    pair.play()
    pair.check(traces=2, hits=4)


@backends
def test_grad_modes_inside_train_as_plain_code_does(backend) -> None:
    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)
            self.two = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.one(x).sigmoid()
                with torch.enable_grad():
                    shift = self.two(x)
            return self.one(x) * target + shift + self.two(x).detach()

    pair = Pair(Modes, backend)
    for _ in range(4):
        pair.step()
    pair.evaluate()
    pair.step()
    assert pair.compiled.statistics().refusals == 0


@backends
def test_running_statistics_of_batch_norm_move_as_in_plain_code(backend) -> None:
    pair = Pair(lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.ReLU()), backend)
    pair.play()
    pair.evaluate()
    pair.check(traces=2, hits=5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])  # Inductor draws other numbers
def test_seeded_dropout_draws_the_same_numbers(backend) -> None:
    pair = Pair(lambda: Mlp(dropout=0.5), backend)
    pair.play()
    pair.check(traces=2, hits=4)


@backends
def test_autocast_around_the_call(backend) -> None:
    def amp(call, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x)
        return y.float().square().mean()

    # Inductor keeps more digits between fused calls.
    pair = Pair(stack, backend, tolerance=0.05 if backend == "inductor" else None)
    pair.step(amp)
    pair.step(amp)
    pair.step()  # and without: other code
    pair.step(amp)
    pair.step()
    pair.check(traces=2, hits=3)


@backends
def test_autocast_and_grad_scaler_skip_the_same_steps(backend) -> None:
    pair = Pair(stack, backend, optimizer=lambda ps: torch.optim.AdamW(ps, 0.01))
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        pair.steps += 1
        scales = []
        for side, scaler in zip(pair.sides, scalers, strict=True):
            x = pair.batch() * (float("inf") if step == 3 else 1)
            side.optimizer.zero_grad(set_to_none=True)
            scaler.scale(square(side.call, x)).backward()
            scaler.unscale_(side.optimizer)
            nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)
            scaler.step(side.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[0] == scales[1]
        pair.compare_state()
    pair.check(traces=1, hits=5)


@backends
def test_a_loss_inside_and_a_loss_outside(backend) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack()

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None):
            y = self.inner(x)
            return y if labels is None else (y, F.cross_entropy(y, labels))

    labels = torch.tensor([0, 3, 1])
    pair = Pair(WithLoss, backend)
    pair.step(lambda call, x: call(x, labels)[1])
    pair.step(lambda call, x: F.cross_entropy(call(x), labels))
    pair.evaluate()
    pair.step(lambda call, x: call(x, labels=labels)[1])
    pair.step(lambda call, x: call(x, labels)[1])
    pair.step(lambda call, x: F.cross_entropy(call(x), labels))
    assert pair.compiled.statistics().hits == 2


@backends
def test_outputs_that_are_inputs_or_views_of_them(backend) -> None:
    def f(x, w):
        y = x * w
        return x, x.view(-1), y, y[0], w

    compiled = tripwire.compile(f, backend=backend, fullgraph=True)
    for seed in range(4):
        found = []
        for call in (compiled, f):
            torch.manual_seed(seed)
            x, w = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
            outputs = call(x, w)
            assert outputs[0] is x
            assert outputs[4] is w
            assert outputs[1].data_ptr() == x.data_ptr()
            assert outputs[3].data_ptr() == outputs[2].data_ptr()
            sum((i + 1) * o.sum() for i, o in enumerate(outputs)).backward()
            found.append(([o.detach() for o in outputs], x.grad, w.grad))
        torch.testing.assert_close(found[0], found[1])
    assert compiled.statistics().hits == 3


@backends
def test_an_input_that_is_changed_in_place_carries_its_gradient(backend) -> None:
    def f(x, w):
        x.mul_(w)
        return x.sin()

    compiled = tripwire.compile(f, backend=backend)
    for seed in range(4):
        found = []
        for call in (compiled, f):
            torch.manual_seed(seed)
            leaf, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
            x = leaf * 2
            (call(x, w).sum() + x.square().sum()).backward()
            found.append((x.detach(), leaf.grad, w.grad))
        torch.testing.assert_close(found[0], found[1])
    # AOTAutograd's backward would raise: it finds the value written over that it saved.
    assert compiled.statistics().hits == (3 if backend == "eager" else 0)


def test_gradients_of_a_module_are_those_of_the_last_step_only() -> None:
    pair = Pair(Mlp, "eager")  # the helper itself: a difference would show
    pair.step(update=False)
    pair.sides[0].model.up.weight.grad.add_(1)
    with pytest.raises(AssertionError):
        pair.each(lambda side: gradients(side.model))
