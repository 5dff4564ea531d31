"""What hooks on saved tensors get is what plain autograd saves, also where compiled code trains."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import tripwire

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
SEEN: list[str] = []


def pack(tensor):
    SEEN.append("pack")
    return tensor


def unpack(tensor):
    SEEN.append("unpack")
    return tensor * 2


class Compress:
    def __call__(self, tensor):
        SEEN.append("pack")
        return tensor.half()


HOOKS = {
    "functions": (pack, unpack),
    "lambdas": (lambda t: t, lambda t: t * 3),
    "objects": (Compress(), lambda t: t.float() * 2),
    "partials": (functools.partial(torch.mul, other=1), functools.partial(torch.mul, other=5)),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.arange(4.0))

    def forward(self, x):
        return (self.norm(self.linear(x)) * self.scale).sin().exp()


def train(call, net, x, context):
    net.zero_grad()
    SEEN.clear()
    with context:
        loss = call(x).sum()
    loss.backward()
    return [p.grad for p in net.parameters()], list(SEEN)


@pytest.mark.parametrize("order", ["with first", "without first"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_users_get_what_plain_autograd_saves(name, backend, order) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend=backend)
    without = [torch.enable_grad] * 3
    hooked = [functools.partial(saved_tensors_hooks, *HOOKS[name])] * 3
    contexts = hooked + without if order == "with first" else without + hooked
    for number, enter in enumerate(contexts + hooked):
        x = torch.arange(8.0).reshape(2, 4) / 7 + number
        expected, told = train(net.forward, net, x, enter())
        found, said = train(compiled, net, x, enter())
        torch.testing.assert_close(found, expected)
        assert said == told
    assert compiled.statistics().hits >= 7


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_torchs_own_hooks_keep_compiled_code(backend) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend=backend)
    for number in range(4):
        x = torch.arange(8.0).reshape(2, 4) / 7 + number
        expected, _ = train(net.forward, net, x, save_on_cpu())
        found, _ = train(compiled, net, x, save_on_cpu())
        torch.testing.assert_close(found, expected)
        with save_on_cpu():
            grad_fn = compiled(x).grad_fn
    assert type(grad_fn).__name__ == "CompiledFunctionBackward"


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_may_vary_under_hooks(backend) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend=backend)
    for rows in (2, 3, 4, 5, 6, 3):
        for context in (saved_tensors_hooks(pack, unpack), torch.enable_grad()):
            x = torch.arange(4.0 * rows).reshape(rows, 4) / 7
            expected = train(net.forward, net, x, context)
            torch.testing.assert_close(train(compiled, net, x, context)[0], expected[0])
    assert compiled.statistics().traces <= 3


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_modules_of_a_refused_call_heed_hooks_too(backend) -> None:
    net = Net()

    def step(x):
        with saved_tensors_hooks(pack, unpack):  # refused
            return net(x)

    compiled = tripwire.compile(step, backend=backend)
    for number in range(6):
        x = torch.arange(8.0).reshape(2, 4) / 7 + number
        expected = train(step, net, x, torch.enable_grad())
        found = train(compiled, net, x, torch.enable_grad())
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] == expected[1]
