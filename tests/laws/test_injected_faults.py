"""A fault anywhere in tripwire leaves the process as it was; see faultpoints.py."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# By name: more visits than this, and the options of faultpoints.py. A start takes longer than most
# plans do: all are followed by one process.
PLANS = {
    "anywhere": (40, "--share=0.01"),
    "in the observer": (10, "--only=tracing/observe.py", "--share=0.1"),
    "around a call that may be recorded": (
        5,
        "--scene=records",
        "--only=recording/capture/failures.py",
        "--share=0.3",
    ),
    "while a failing call is recorded": (5, "--scene=records", "--share=0.002"),
    "while an object is watched": (15, "--scene=watch", "--share=0.06"),
    "in guards": (20, "--only=<tripwire guards>", "--both"),
    "in a back end": (7, "--scene=backend", "--only=back end: ", "--both"),
    "around a back end": (5, "--scene=backend", "--only=backends/", "--share=0.03"),
    "while events are logged": (10, "--scene=log", "--only=telemetry/log.py", "--share=0.2"),
}
Figures = dict[str, Any]


def visit(*plans: list[str]) -> list[Figures]:
    """What became of each plan, all in one process."""
    script = Path(__file__).parent / "faultpoints.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    seed = os.environ.get("LAWS_SEED") or random.randrange(10**6)
    first, *others = ((f"--seed={seed}", *plan) for plan in plans)
    words = [*first, *(word for other in others for word in ("+", *other))]
    print(*(command := [sys.executable, str(script), *words]))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(figures) == len(plans), f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return figures


def check(figures: Figures) -> None:
    assert not figures["wrong"], figures["first"]
    assert not figures["left alive"], figures
    # Most points are passed again, and most interrupts come in time.
    assert figures["missed"] < figures["visited"] // 2


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    found = visit(*(options for _, *options in PLANS.values()))
    return dict(zip(PLANS, found, strict=True))


@pytest.mark.parametrize("where", PLANS)
def test_faults_at_statements_leave_the_process_as_it_was(where, figures) -> None:
    check(figures[where])
    assert figures[where]["visited"] > PLANS[where][0]


@pytest.mark.slow  # no seed makes a moment come again
def test_interrupts_at_random_moments_leave_nothing_half_done() -> None:
    (figures,) = visit(["--interrupts=100"])
    check(figures)
    assert figures["raised"] > 40


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["calls", "backend", "log", "watch", "records"])
def test_both_kinds_of_fault_at_every_statement(scene) -> None:
    (figures,) = visit(["--both", f"--scene={scene}"])
    check(figures)


@pytest.mark.slow
def test_thousands_of_interrupts_leave_nothing_half_done() -> None:
    (figures,) = visit(["--interrupts=5000"])
    check(figures)
