"""Threads call compiled functions while others write, compile, drop and collect; see storm.py."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SENTRIES = pytest.mark.parametrize("pure", ["0", "1"], ids=["C", "twin"])


def run_storm(seconds: int, pure: str, seed: int) -> dict[str, int]:
    environment = {**os.environ, "TRIPWIRE_PURE": pure, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / "storm.py"
    command = [sys.executable, str(script), f"--seconds={seconds}", f"--seed={seed}"]
    print(*command)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@SENTRIES
def test_every_result_is_one_that_plain_code_could_have_given(pure) -> None:
    figures = run_storm(5, pure, seed=random.randrange(10**6))
    assert figures["calls"] >= 8
    assert figures["writes"] > 0
    assert figures["megabytes"] < 1000


@pytest.mark.slow
@SENTRIES
def test_a_minute_of_it(pure) -> None:
    figures = run_storm(60, pure, seed=random.randrange(10**6))
    assert figures["hits of the last"] > 0
    assert figures["compiles"] > 0
    assert figures["megabytes"] < 1000  # 240 after five seconds
