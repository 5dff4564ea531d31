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


def visit(*options: str) -> dict[str, Any]:
    script = Path(__file__).parent / "faultpoints.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    seed = os.environ.get("LAWS_SEED") or random.randrange(10**6)
    command = [sys.executable, str(script), f"--seed={seed}", *options]
    print(*command)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    figures = json.loads(done.stdout.splitlines()[-1])
    # Most points are passed again, and most interrupts come in time.
    assert figures["missed"] < figures["visited"] // 2
    return figures


def test_faults_where_functions_begin() -> None:
    assert visit("--entries-only", "--share=0.3")["visited"] > 60


def test_faults_at_statements() -> None:
    assert visit("--share=0.03")["visited"] > 60


def test_faults_in_the_observer() -> None:
    assert visit("--only=tracing/observe.py", "--share=0.2")["visited"] > 20


def test_faults_around_a_call_that_may_be_recorded() -> None:
    only = "--only=recording/capture/failures.py"
    assert visit("--scene=records", only, "--share=0.3")["visited"] > 5


def test_faults_while_an_object_is_watched() -> None:
    assert visit("--scene=watch", "--share=0.15")["visited"] > 40


def test_faults_while_a_failing_call_is_recorded() -> None:
    assert visit("--scene=records", "--entries-only", "--share=0.05")["visited"] > 10


def test_faults_in_guards() -> None:
    assert visit("--only=<tripwire guards>", "--both")["visited"] > 20


def test_faults_in_a_back_end_and_around_it() -> None:
    assert visit("--scene=backend", "--only=back end: ", "--both")["visited"] == 8
    assert visit("--scene=backend", "--only=backends/", "--share=0.1")["visited"] > 5


def test_faults_while_events_are_logged() -> None:
    assert visit("--scene=log", "--only=telemetry/log.py", "--share=0.2")["visited"] > 10


@pytest.mark.slow  # no seed makes a moment come again
def test_interrupts_at_random_moments() -> None:
    assert visit("--interrupts=100")["raised"] > 40


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["calls", "backend", "log", "watch", "records"])
def test_both_kinds_of_fault_at_every_statement(scene) -> None:
    visit("--both", f"--scene={scene}")


@pytest.mark.slow
def test_thousands_of_interrupts() -> None:
    visit("--interrupts=5000")
