"""Where a compile's time went: each part of the work is claimed by its phase, the rest is shown.

How much of a compile no phase claims is a figure: benchmarks/bench_telemetry.py prints it.
"""

from __future__ import annotations

import time

import torch
from torch import nn

import tripwire
from tripwire import telemetry
from tripwire.dispatch.pipeline import Pipeline
from tripwire.validity import plan

SLOW = 2_000  # microseconds


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def metrics_of(function, **options):
    """Those of its first compile."""
    telemetry.clear_compilation_metrics()
    tripwire.compile(function, **options)(torch.ones(2, 16))
    (found,) = telemetry.get_compilation_metrics()
    return found


def slowly(plain):
    def run(*args, **kwargs):
        time.sleep(SLOW / 1e6)
        return plain(*args, **kwargs)

    return run


def test_the_run_itself_is_claimed_also_where_it_is_refused(caplog) -> None:
    assert metrics_of(slowly(Block())).observe_us >= SLOW


def test_the_back_end_is_claimed() -> None:
    assert metrics_of(Block(), backend=slowly(lambda module, examples: module)).backend_us >= SLOW


def test_the_plan_is_claimed(monkeypatch) -> None:
    monkeypatch.setattr(plan, "_decide", slowly(plan._decide))
    assert metrics_of(Block()).plan_us >= SLOW


def test_work_outside_of_every_phase_is_shown_as_such(monkeypatch) -> None:
    monkeypatch.setattr(Pipeline, "_build", slowly(Pipeline._build))
    compiled = tripwire.compile(lambda x: x * 2 + 1)
    compiled(torch.ones(3))
    (one,) = tripwire.explain(compiled).compiles
    assert one.phases["unattributed"] >= SLOW
    assert f"unattributed {one.phases['unattributed'] / 1000:.1f}" in str(
        tripwire.explain(compiled)
    )


def test_phases_and_the_rest_are_the_whole_duration() -> None:
    compiled = tripwire.compile(nn.Sequential(*[Block() for _ in range(6)]))
    compiled(torch.ones(2, 16))
    (one,) = tripwire.explain(compiled).compiles
    assert abs(sum(one.phases.values()) - one.duration) <= len(one.phases) * 10
