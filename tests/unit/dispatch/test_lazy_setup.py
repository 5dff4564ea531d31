"""What torch sets up by itself in the first calls of a process is no effect of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import check_same

import tripwire
from tripwire.backends.inductor import describe_backends
from tripwire.tracing.session import Session

X = torch.arange(24.0).reshape(1, 2, 3, 4)


@pytest.fixture
def first_attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch sets the order of attention's kernels in the next observed run, as on a new GPU."""
    before = torch._C._get_sdp_priority_order()
    execute = Session.execute

    def run(self: Session, fn: Any, args: Any, kwargs: Any) -> Any:
        monkeypatch.setattr(Session, "execute", execute)
        result = execute(self, fn, args, kwargs)
        torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])
        return result

    monkeypatch.setattr(Session, "execute", run)
    yield
    torch._C._set_sdp_priority_order(before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_first_attention_of_a_process_is_compiled(first_attention: Any, backend: str) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    compiled: Any = tripwire.compile(attend, backend=backend, fullgraph=True)
    for _ in range(3):
        check_same(attend(X), compiled(X))
    found = compiled.statistics()
    assert (found.traces, found.hits, found.refusals) == (1, 2, 0)


def test_code_that_names_other_switches_is_compiled_in_the_first_attention(
    first_attention: Any,
) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if torch.backends.cuda.flash_sdp_enabled() else 2.0
        return F.scaled_dot_product_attention(x, x, x) * scale

    compiled: Any = tripwire.compile(attend, backend="eager")
    for _ in range(3):
        check_same(attend(X), compiled(X))
    assert compiled.statistics().hits == 2


def test_an_order_that_the_run_itself_sets_is_a_refusal() -> None:
    before = torch._C._get_sdp_priority_order()

    def attend(x: torch.Tensor) -> torch.Tensor:
        order = [3, 1, 2, 0, 4] if torch._C._get_sdp_priority_order()[0] == 1 else [1, 2, 0, 3, 4]
        torch._C._set_sdp_priority_order(order)
        return F.scaled_dot_product_attention(x, x, x)

    try:
        compiled: Any = tripwire.compile(attend, backend="eager")
        for _ in range(4):
            check_same(F.scaled_dot_product_attention(X, X, X), compiled(X))
        assert compiled.statistics().hits == 0
        assert torch._C._get_sdp_priority_order() == before
    finally:
        torch._C._set_sdp_priority_order(before)


def test_compiled_code_on_disk_is_told_apart_by_the_order() -> None:
    before, key = torch._C._get_sdp_priority_order(), describe_backends()
    try:
        torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])
        assert describe_backends() != key
    finally:
        torch._C._set_sdp_priority_order(before)


_CHECKPOINT = """
import sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import tripwire

net = nn.Linear(4, 4)

def fn(x):
    return checkpoint(net, x, use_reentrant=False).sum()

compiled = tripwire.compile(fn, backend="eager")
x = torch.ones(2, 4, requires_grad=True)
assert "torch._dynamo" not in sys.modules
for _ in range(3):
    assert torch.equal(compiled(x), fn(x))
assert "torch._dynamo" in sys.modules
found = compiled.statistics()
print(found.traces, found.hits, found.refusals)
"""


def test_the_first_checkpoint_of_a_process_is_compiled_and_dynamos_import_goes_unobserved() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHECKPOINT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1 2 0\n", done.stderr
