"""What a call keeps of its run has the gradient that it has in plain code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tripwire


class Net(nn.Module):
    def __init__(self, keep):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)
        self.keep = keep
        self.kept = []
        self.last = None

    def forward(self, x, room=None):
        h = self.one(x)
        if self.keep == "an attribute":
            self.last = h
        elif self.keep == "a list":
            self.kept.clear()
            self.kept.append(h)
        elif self.keep == "an argument":
            room.append(h)
        elif self.keep == "a part":
            self.last = h[:, :2]
            return self.two(torch.cat([self.last, h[:, 2:]], 1).relu())
        elif self.keep == "twice":
            self.last = h
            h = h.relu()
            self.kept[:] = [h]
        elif self.keep == "changed in place":
            self.last = h
            h.mul_(2)
        return self.two(h.relu())


class Hooked(Net):
    def __init__(self, keep):
        super().__init__(keep)
        self.one.register_forward_hook(self.note)

    def note(self, module, args, output):
        self.last = output


KEEPS = ["an attribute", "a list", "an argument", "a part", "twice", "changed in place"]
ASK = {
    "retain_grad": lambda kept, out: [one.retain_grad() for one in kept],
    "a hook": lambda kept, out: [one.register_hook(lambda g: g * 3) for one in kept],
    "grad": lambda kept, out: torch.autograd.grad(out, kept, retain_graph=True),
    "nothing": lambda kept, out: None,
}


def step(call, net, ask, n):
    torch.manual_seed(n)
    net.zero_grad()
    room = []
    out = call(torch.randn(2, 3), room).square().sum()
    kept = [one for one in (net.last, *net.kept, *room) if one is not None]
    found = ASK[ask](kept, out)
    out.backward()
    shown = found if ask == "grad" else [one.grad for one in kept if one.retains_grad]
    return out.detach(), list(shown), [p.grad for p in net.parameters()]


def check(make, ask, backend, hits):
    plain, mine = make(), make()
    compiled = tripwire.compile(mine, backend=backend)
    for n in range(5):
        expected = step(plain, plain, ask, n)
        torch.testing.assert_close(step(compiled, mine, ask, n), expected)
    assert tripwire.statistics(compiled).hits >= hits


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("keep", KEEPS)
def test_what_a_call_keeps_has_its_gradient(keep, ask, backend) -> None:
    check(lambda: Net(keep), ask, backend, hits=2)


@pytest.mark.parametrize("ask", ["retain_grad", "a hook"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_a_forward_hook_keeps_has_its_gradient(backend, ask) -> None:
    check(lambda: Hooked("nothing"), ask, backend, hits=3)


def test_what_is_kept_without_its_gradient_cuts_nothing() -> None:
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    class Detached(Net):
        def forward(self, x):
            h = self.one(x)
            self.last = h.detach()
            return F.relu(h).sum()

    net = Detached("nothing")
    compiled = tripwire.compile(net, backend=backend)
    for _ in range(3):
        compiled(torch.ones(2, 3)).backward()
    assert len(graphs) == 1
