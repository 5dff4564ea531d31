"""Two processes over gloo: compiled code trains as plain code does, and no rank waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from unit.training import processes

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed")

Seen = list[dict[str, Any]]  # by rank


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Seen:
    """What each rank saw. A rank that waits for the other runs into a time limit."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    source = Path(processes.__file__).parents[3] / "src"
    done = subprocess.run(
        [*launcher, processes.__file__, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def find(seen: Seen, case: Any) -> list[list[dict[str, Any]]]:
    """Statistics of what was compiled, by rank."""
    return [rank[case.__name__]["statistics"] for rank in seen]


@pytest.mark.parametrize("case", processes.CASES, ids=lambda case: case.__name__)
def test_losses_are_those_of_plain_code(seen, case) -> None:
    for rank in seen:
        plain, compiled = rank[case.__name__]["plain"], rank[case.__name__]["compiled"]
        assert len(plain) == processes.STEPS
        assert len(set(plain)) == processes.STEPS
        assert compiled == pytest.approx(plain, rel=1e-5)
    ranks = [rank[case.__name__]["plain"] for rank in seen]
    # Each rank has data of its own, except where the tensors are the group's.
    shared = case in (processes.sharded_weights, processes.a_collective_inside)
    assert (ranks[0] == pytest.approx(ranks[1], rel=1e-5)) is shared


def test_a_module_inside_ddp_is_compiled_once(seen) -> None:
    for (found,) in find(seen, processes.ddp_of_a_compiled_module):
        assert (found["traces"], found["hits"]) == (1, processes.STEPS - 1)


def test_ddp_itself_is_refused_and_the_module_inside_compiled(seen) -> None:
    """Its forward tells the reducer what to do: a graph of it would train each rank on its own."""
    for outer, inner in find(seen, processes.ddp_compiled):
        assert outer["hits"] == 0
        assert outer["slugs"] == ["communicates"]
        assert inner["hits"] >= 2


def test_a_write_on_one_rank_retires_code_there_only(seen) -> None:
    zero, one = find(seen, processes.ddp_with_a_write_on_one_rank)
    assert (zero[0]["retired"], one[0]["retired"]) == (0, 1)
    assert (zero[0]["traces"], one[0]["traces"]) == (1, 2)
    zero, one = find(seen, processes.fsdp_with_a_write_on_one_rank)
    assert ([c["retired"] for c in zero], [c["retired"] for c in one]) == ([1, 0], [0, 0])


def test_forwards_inside_fsdp_are_compiled_once(seen) -> None:
    for blocks in find(seen, processes.fsdp_of_compiled_forwards):
        assert [(c["traces"], c["hits"]) for c in blocks] == [(1, processes.STEPS - 1)] * 2


@pytest.mark.parametrize(
    "case", [processes.fsdp_compiled_whole, processes.fsdp_of_compiled_modules]
)
def test_hooks_of_fsdp_are_refused(seen, case) -> None:
    for compiled in find(seen, case):
        for found in compiled:
            assert found["hits"] == 0
            assert found["slugs"] == ["communicates"]


def test_code_over_dtensors_holds_for_one_placement(seen) -> None:
    for (found,) in find(seen, processes.sharded_weights):
        assert found["traces"] == 2
        assert found["hits"] == processes.STEPS - 2


def test_a_collective_inside_is_refused(seen) -> None:
    for (found,) in find(seen, processes.a_collective_inside):
        assert found["hits"] == 0
        assert found["slugs"]
