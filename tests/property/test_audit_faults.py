"""The audit bites, as the law machine does: whatever guard, wire or effect is broken, it notices.

It writes what it finds around two callables that read through every row of the channel table. A few
faults are tried in each test run, all of them by `make mutate`. `BEYOND` says what it can't notice.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
from property.faults import FAULTS
from torch import nn

import tripwire

SCALE = 2.0
settings: Any = types.ModuleType("audited_settings")
settings.RATE = 0.5
sys.modules["audited_settings"] = settings
CONTEXT = contextvars.ContextVar("audited")
CONTEXT.set(1.5)
THREAD = threading.local()
THREAD.level = 2.0


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 3.0


class Box:
    def __init__(self) -> None:
        self.size = 2.0


class State(nn.Module):
    """Reads state of every kind, and writes some."""

    gain = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.slotted = Slotted()
        self.box = Box()
        self.steps = [0.5, 2.0]
        self.table = OrderedDict(a=3.0, b=4.0)
        self.names = {"plus"}
        self.log: list[float] = []
        self.last = 0.0
        self.weight = nn.Parameter(torch.ones(4))

    def helper(self, x: torch.Tensor, offset: float = 0.25) -> torch.Tensor:
        return x * self.gain + offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.helper(self.first(x)) * SCALE * settings.RATE + self.slotted.factor
        x = x * self.steps[0] + len(self.steps)
        for name in self.table:
            x = x * 2 + self.table[name]
        x = x + 1 if "plus" in self.names else x
        x = x + self.weight if self.weight.requires_grad else x - self.weight
        x = x * (2 if type(self.box) is Box else 3) + self.box.size
        x = x + THREAD.level + CONTEXT.get() + len(os.environ.get("AUDITED_VARIABLE", ""))
        self.last = 7.0
        self.log.append(SCALE)
        return x


def build_function() -> Any:
    """Closes over a cell; asks its arguments and torch for all that can be asked."""
    beta = 0.75

    def asks(x, other, flag, options, values, members, box):  # noqa: PLR0917
        y = x * x.shape[0] * (2 if x.dtype is torch.float64 else 1) * beta
        y = y + (1 if x.is_contiguous() else 2) + x.storage_offset()
        y = y * (3 if x.requires_grad else 1) * (2 if type(flag) is int else 3)
        y = y + (5 if x is other else 6) + flag + len(values) + len(members) + len(options)
        y = y * options["scale"] * values[0] + getattr(box, "extra", 0) + box.size
        y = y + (1 if type(box) is Box else 2) + (7 if torch.is_grad_enabled() else 8)
        y = y + (1 if torch.is_autocast_enabled("cpu") else 2)
        y = y + (3 if torch.is_inference_mode_enabled() else 4)
        y = y + (1 if torch.get_default_dtype() is torch.float32 else 2)
        y = y if x.sum() > 0.9 else y * 2
        return y, x[0]

    return asks


def find_faults() -> tuple[tripwire.Finding, ...]:
    """What the audits of both callables find."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    asked: tuple[Any, ...] = (1, {"scale": 2.0}, [0.5], {"m"}, Box())
    found = tripwire.audit(tripwire.compile(State(), backend="eager"), x).faults
    if found:
        return found
    asks = tripwire.compile(build_function(), backend="eager")
    with torch.no_grad():  # inference mode would be seen by its grad mode otherwise
        return tripwire.audit(asks, x.clone(), x.clone(), *asked).faults


# The audit gives no tensor that isn't a leaf, no class other bases, replaces no builtin for
# everybody, and fills no cache.
BEYOND = frozenset(
    {
        "tensor arguments: leaf",
        "class attributes: bases",
        "globals: absences",
        "environment: caches of functions",
    }
)
QUICK = frozenset(
    {
        "instance attributes: tables of modules",
        "instance attributes: hooks",
        "class attributes: wires",
        "globals: wires",
        "L3: no effects",
    }
)


def _marked(fault):
    return pytest.param(fault, id=str(fault), marks=() if str(fault) in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("fault", [_marked(f) for f in FAULTS if str(f) not in BEYOND])
def test_the_audit_notices(fault, monkeypatch) -> None:
    fault.apply(monkeypatch)
    assert find_faults()


def test_the_audit_finds_nothing_where_nothing_is_broken() -> None:
    assert find_faults() == ()


def test_the_names_are_those_of_faults() -> None:
    assert (QUICK | BEYOND).issubset(map(str, FAULTS))
