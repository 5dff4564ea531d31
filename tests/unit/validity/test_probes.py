"""A value that Python used after inputs were changed in place is computed before the call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire

# What a call does, and how many of its 14 calls hit at least.
CASES = {
    "a step that is counted": ("S['t'] += 1\n    return x * 2 if S['t'].item() > 5 else x", 11),
    "a step in a tensor": ("S['t'].add_(1)\n    return x * 2 if S['t'] > 5 else x", 11),
    "two questions": (
        "S['t'] += 1\n    x = x * 2 if S['t'] > 5 else x\n    S['t'] *= 2\n"
        "    x = x + 1 if S['t'].item() > 40 else x\n    S['t'].clamp_(max=9.0)\n    return x",
        10,
    ),
    "another tensor is changed": ("S['u'].add_(x[0])\n    return x * 2 if S['t'] > 0 else x", 12),
    "a view of it": ("S['u'][1:] += 1\n    return x * 2 if S['u'].sum() > 9 else x", 12),
    "an item": (
        "S['u'][0] = S['t']\n    S['t'] += 1\n    return x * 2 if S['u'][0] > 5 else x",
        12,
    ),
    "by out=": ("torch.add(S['t'], 1, out=S['t'])\n    return x * 2 if S['t'] > 5 else x", 12),
    "several": (
        "torch._foreach_add_([S['t'], S['u']], 1)\n    return x * 2 if S['u'][0] > 5 else x",
        12,
    ),
    "what is passed": ("x.add_(1)\n    return x * 2 if x.sum() > 20 else x", 11),
    "copied, and then changed": (
        "S['u'].copy_(x[0])\n    x.zero_()\n    return x + 2 if S['u'].sum() > 9 else x",
        11,
    ),
    "a large tensor": ("S['big'].add_(1)\n    return x * 2 if S['big'][0] > 5 else x", 0),
    # Two inputs with one memory: a copy of each would not be changed with the other. The value is
    # compared in the middle of the call; AOTAutograd doesn't take such inputs.
    "memory of another": ("S['v'].add_(1)\n    return x * 2 if S['whole'].sum() > 9 else x", 0),
    "a gradient": ("P.grad.mul_(0.5)\n    return x * 2 if P.grad.norm() > 1 else x", 10),
}
TWIN = """
whole = torch.zeros(6)
S = dict(big=torch.zeros(100_000), t=torch.zeros(()), u=torch.zeros(3), whole=whole, v=whole[:3])
P = nn.Parameter(torch.ones(3))

def call(x):
    {body}

def go(f, see):
    for i in range(14):
        P.grad = torch.full((3,), 0.3 * i)
        see(f(torch.full((2, 3), float(i % 6))), P.grad)
        see({{name: one[:6] if one.dim() else one for name, one in S.items()}})
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_asked_after_a_write_is_as_plain_python_finds_it(
    case: str, backend: str, tmp_path: Path
) -> None:
    body, hits = CASES[case]
    check_twins(TWIN.format(body=body), backend, tmp_path, hits=hits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_that_share_memory_or_not_are_told_apart(backend: str, tmp_path: Path) -> None:
    source = """
def call(a, b):
    a.add_(1)
    return b * 2 if b.sum() > 10 else b + 1

def go(f, see):
    for i in range(18):
        t = torch.full((4,), float(i % 4))
        a, b = [(t, t.clone()), (t[:2], t[2:]), (t, t)][i % 3]
        see(f(a, b), t)
"""
    check_twins(source, backend, tmp_path, hits=4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["RAdam", "ASGD", "NAdam", "Rprop", "Adagrad", "Adamax"])
def test_optimizers_that_go_by_their_count_of_steps(name: str, backend: str) -> None:
    def train(steps: int, *, is_compiled: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01)
        step = tripwire.compile(optimizer.step, backend=backend) if is_compiled else optimizer.step
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            step()
        hits = tripwire.statistics(step).hits if is_compiled else 0
        return [parameter.detach() for parameter in net.parameters()], hits

    (expected, _), (found, hits) = (train(12, is_compiled=one) for one in (False, True))
    torch.testing.assert_close(found, expected)
    assert hits >= 9
