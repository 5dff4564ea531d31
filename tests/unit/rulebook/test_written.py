"""What operators write beside their result, unseen by version counters, is written on each call."""

from __future__ import annotations

import pytest
import torch

import tripwire
from tripwire.rulebook.rules import Call, rule_for

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
INFINITE = float("inf")


def scaled_steps(unscale=False, clip=False):
    """`GradScaler` skips a step if a gradient isn't finite."""

    def make():
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], 0.125)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def step(x):
            optimizer.zero_grad()
            scaler.scale((weight * x).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_([weight], 1.0)
            scaler.step(optimizer)
            scaler.update()
            return weight.detach().clone(), scaler.get_scale()

        return step

    return make


def unscaled():
    found, inverse = torch.zeros(1), torch.full((1,), 0.5)

    def call(x):
        found.zero_()
        gradient = x * 2
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, inverse)
        return gradient * 3 if found.item() else gradient

    return call


def counted_steps():
    scale, tracker = torch.ones(1), torch.zeros(1, dtype=torch.int32)

    def call(x):
        found = (x == INFINITE).any().float().reshape(1)
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2)
        return x * 2 if tracker.item() else x + scale

    return call


def quantized():
    layer = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()

    def call(x):
        y = layer(x.clamp(max=100))
        return y * 2 if layer.activation_post_process.max_val.item() > 20 else y

    return call


def fused_momentum():
    weight, momentum = torch.ones(3), torch.ones(3)
    facts = {"weight_decay": 0.0, "momentum": 0.5, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}

    def call(x):
        torch._fused_sgd_([weight], [x.clamp(max=9)], [momentum], **facts, **flags)
        return x * 2 if momentum.sum().item() > 12 else x

    return call


PROGRAMS = {
    "a scaled step": scaled_steps(),
    "a scaled step that unscales": scaled_steps(unscale=True),
    "a scaled step that clips": scaled_steps(unscale=True, clip=True),
    "a check of gradients": unscaled,
    "a count of steps": counted_steps,
    "a fake quantization": quantized,
    "a fused step": fused_momentum,
}


@BACKENDS
@pytest.mark.parametrize("values", [(1, 1, 1, INFINITE, 1, 1), (INFINITE, INFINITE, 1, 1, 1, 1)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_python_decides_by_what_this_call_wrote(name, values, backend) -> None:
    plain, compiled = PROGRAMS[name](), tripwire.compile(PROGRAMS[name](), backend=backend)
    for value in (*values, 30, 1, 1):
        x = torch.full((3,), float(value))
        torch.testing.assert_close(compiled(x), plain(x), equal_nan=True)


def list_marked():
    """torch's functions whose schema says that they write to more than their first argument."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket) or not hasattr(torch, name):
            continue
        for overload in packet.overloads():
            given = getattr(packet, overload)._schema.arguments
            written = [one.name for one in given if one.is_write and not one.kwarg_only]
            if written and written != [given[0].name]:
                yield (
                    getattr(torch, name),
                    {(given.index(o), o.name) for o in given if o.name in written},
                )


def test_schemas_tell_what_functions_of_torch_write() -> None:
    marked = list(list_marked())
    assert {"_fused_adam_", "fused_moving_avg_obs_fake_quant"} <= {f.__name__ for f, _ in marked}
    for function, written in marked:
        rule = rule_for(function)
        assert isinstance(rule, Call)
        assert rule.writes_also is not None, function
        assert written <= set(rule.writes_also.arguments), function
