"""Threads call compiled functions while others write, compile, drop, collect. See the scripts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SENTRIES = pytest.mark.parametrize("pure", ["0", "1"], ids=["C", "twin"])


def run(name: str, seconds: int, pure: str, *options: str) -> dict[str, Any]:
    seed = os.environ.get("LAWS_SEED") or random.randrange(10**6)
    environment = {**os.environ, "TRIPWIRE_PURE": pure, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / name
    command = [sys.executable, str(script), f"--seconds={seconds}", f"--seed={seed}", *options]
    print(*command)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    print(done.stdout)
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


@SENTRIES
def test_a_server_whose_weights_and_adapters_are_swapped_answers_right(pure) -> None:
    figures = run("server.py", 10, pure)
    assert figures["calls"]["compiled"] > 10
    assert figures["weights"] > 0


@pytest.mark.slow
def test_ten_minutes_of_a_server_leave_its_memory_flat() -> None:
    figures = run("server.py", 600, "0", "--backend=inductor", "--pause=3")
    print({side: figures[f"{side} ms"] for side in ("compiled", "plain")})
    assert figures["hits"] > 0
    before, after = figures["megabytes"]
    assert after < before + 50


@pytest.mark.slow
@SENTRIES
def test_a_minute_of_threads_gives_no_wrong_result(pure) -> None:
    figures = run("storm.py", 60, pure)
    assert figures["hits of the last"] > 0
    assert figures["compiles"] > 0
    assert figures["megabytes"] < 1000  # 240 after five seconds
