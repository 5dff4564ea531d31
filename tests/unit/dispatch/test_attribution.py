"""Where a compile's time went: phases claim nearly all of it, and the rest is shown.

What no phase claims is glue: it is there in every compile, while other programs' work comes and
goes. So the least of several compiles is compared with the least duration.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import tripwire
from tripwire import telemetry
from tripwire.dispatch.pipeline import Pipeline


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_function():
    return lambda x: x * 2 + 1


def make_module():
    return nn.Sequential(*[Block() for _ in range(6)])


def make_refused():
    block = Block()
    return lambda x: (time.monotonic(), block(x))[1]


def unclaimed_share(make, compiles=12):
    """Of the time of a compile, the part that no phase claims."""
    x = torch.ones(2, 16)
    telemetry.clear_compilation_metrics()
    for _ in range(compiles):
        tripwire.compile(make())(x)
    found = telemetry.get_compilation_metrics()
    assert len(found) == compiles
    return min(m.unattributed_us for m in found) / min(m.duration_us for m in found)


@pytest.mark.parametrize("make", [make_function, make_module, make_refused])
def test_phases_claim_95_percent_of_a_compile(make, caplog) -> None:
    assert unclaimed_share(make) < 0.05


def test_work_outside_of_every_phase_is_shown_as_such(monkeypatch) -> None:
    plain = Pipeline._build

    def slowly(self, *given):
        time.sleep(0.002)
        return plain(self, *given)

    monkeypatch.setattr(Pipeline, "_build", slowly)
    assert unclaimed_share(make_function) > 0.02
    compiled = tripwire.compile(make_function())
    compiled(torch.ones(3))
    (one,) = tripwire.explain(compiled).compiles
    assert one.phases["unattributed"] >= 2_000
    assert f"unattributed {one.phases['unattributed'] / 1000:.1f}" in str(
        tripwire.explain(compiled)
    )


def test_phases_and_the_rest_are_the_whole_duration() -> None:
    compiled = tripwire.compile(make_module())
    compiled(torch.ones(2, 16))
    (one,) = tripwire.explain(compiled).compiles
    assert abs(sum(one.phases.values()) - one.duration) <= len(one.phases) * 10
