"""Threads call compiled functions while others write, compile, drop, collect. See the scripts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SENTRIES = pytest.mark.parametrize("pure", ["0", "1"], ids=["C", "twin"])


def run(name: str, seconds: int, pure: str) -> dict[str, int]:
    seed = os.environ.get("LAWS_SEED") or random.randrange(10**6)
    environment = {**os.environ, "TRIPWIRE_PURE": pure, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / name
    command = [sys.executable, str(script), f"--seconds={seconds}", f"--seed={seed}"]
    print(*command)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@SENTRIES
def test_every_result_is_one_that_plain_code_could_have_given(pure) -> None:
    figures = run("storm.py", 5, pure)
    assert figures["calls"] >= 8
    assert figures["writes"] > 0
    assert figures["megabytes"] < 1000


@SENTRIES
def test_containers_that_grow_and_shrink_meanwhile_are_no_trouble(pure) -> None:
    figures = run("churn.py", 5, pure)
    assert figures["write"] > 100
    assert figures["call"] > 10
    assert figures["hits"] > 0


@pytest.mark.slow
@SENTRIES
def test_a_minute_of_it(pure) -> None:
    figures = run("storm.py", 60, pure)
    assert figures["hits of the last"] > 0
    assert figures["compiles"] > 0
    assert figures["megabytes"] < 1000  # 240 after five seconds
