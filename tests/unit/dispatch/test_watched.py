"""torch.compile's own code, watched."""

from __future__ import annotations

import pytest
import torch
from support import run_python
from torch import nn

import tripwire
from tripwire.errors import BadOption

X = torch.ones(2, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.kind = "double"

    def forward(self, x):
        return self.inner(x) * (2.0 if self.kind == "double" else 3.0)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def watch(target, **options):
    return tripwire.watch_torch_compile(torch.compile(target, backend="eager"), **options)


def test_the_cause_of_a_recompile_is_told_with_its_source() -> None:
    net = Net()
    watched = watch(net)
    for _ in range(3):
        watched(X)
    assert watched.sightings == []
    net.kind = "triple"
    assert torch.equal(watched(X), net(X))
    (sighting,) = watched.sightings
    assert [str(cause.source) for cause in sighting.causes] == ["L['self'].kind"]
    assert sighting.compiles
    assert "torch.compile recompiled" in str(sighting)
    assert "'triple'" in str(sighting)
    assert "Dynamo says: " in str(sighting)
    assert "\n" not in str(sighting)
    assert "   " not in str(sighting)
    for _ in range(3):
        assert torch.equal(watched(X), net(X))
    assert len(watched.sightings) == 1


def test_a_write_to_a_list_is_a_cause() -> None:
    scales = [1.0, 2.0]
    watched = watch(lambda x: x * scales[0])
    for _ in range(3):
        watched(X)
    for value in (3.0, 4.0):
        scales[0] = value
        assert torch.equal(watched(X), X * value)
        watched(X)
        watched(torch.ones(5))
    first, second = watched.sightings[0], watched.sightings[-1]
    assert [str(cause) for cause in first.causes] == ["C['scales'][0]: 1.0 → 3.0 (writer unknown)"]
    assert [str(cause) for cause in second.causes] == ["C['scales'][0]: 3.0 → 4.0 (writer unknown)"]


def test_a_function_that_is_replaced_and_dies_is_a_cause() -> None:
    space = {"scale": lambda: 2.0}
    exec("def scaled(x): return x * scale()", space)
    watched = watch(space["scaled"])
    for _ in range(3):
        watched(X)
    space["scale"] = lambda: 3.0
    assert torch.equal(watched(X), X * 3.0)
    (sighting,) = watched.sightings
    assert [str(cause.source) for cause in sighting.causes] == ["G['scale']"]
    assert sighting.compiles


def test_a_write_before_the_first_compile_is_no_sighting() -> None:
    net = Net()
    watched = watch(net, check=True)
    watched(X)  # observed
    net.kind = "triple"
    for _ in range(3):
        assert torch.equal(watched(X), net(X))
    assert watched.sightings == []


def test_the_first_compile_of_a_process_loses_no_watch() -> None:
    program = """
import torch, tripwire
from torch import nn
net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))
watched = tripwire.watch_torch_compile(torch.compile(net, backend="eager"))
for _ in range(2):  # observed, then compiled: Dynamo patches nn.Module
    watched(torch.ones(2, 3))
net.eval()
watched(torch.ones(2, 3))
for sighting in watched.sightings:
    print([str(cause.source) for cause in sighting.causes], len(sighting.compiles))
"""
    assert run_python(program) == """["L['self'][1].training"] 1"""


def test_a_write_that_torch_compile_does_not_see_is_stale() -> None:
    class Config:
        scale = 2.0

    def scaled(x):
        return x * Config.scale

    watched = watch(scaled, check=True)
    for _ in range(3):
        watched(X)
    # Guards can be left out, as libraries do for speed: code that keeps the old value.
    torch._dynamo.reset()
    watched = tripwire.watch_torch_compile(
        torch.compile(
            scaled,
            backend="eager",
            options={"guard_filter_fn": lambda guards: [False for _ in guards]},
        ),
        check=True,
    )
    for _ in range(3):
        watched(X)
    Config.scale = 5.0
    watched(X)
    (sighting,) = watched.stale
    assert not sighting.compiles
    assert "scale" in str(sighting)
    assert "STALE" in str(sighting)


def test_a_parameter_that_is_read_anew_is_no_staleness() -> None:
    net = Net()
    watched = watch(net, check=True)
    for _ in range(3):
        watched(X)
    net.inner.bias = nn.Parameter(torch.ones(3))
    assert torch.equal(watched(X), net(X))
    assert watched.stale == ()


def test_the_compiled_callables_attributes_are_there() -> None:
    net = Net()
    watched = watch(net)
    assert list(watched.parameters()) == list(net.parameters())
    assert watched.training


def test_a_module_compiled_in_place_is_watched() -> None:
    net = Net()
    net.compile(backend="eager")
    watched = tripwire.watch_torch_compile(net)
    for _ in range(3):
        watched(X)
    net.kind = "triple"
    watched(X)
    assert len(watched.sightings) == 1


@pytest.mark.parametrize("given", [Net(), tripwire.compile(Net()), len])
def test_only_what_torch_compile_made_is_taken(given) -> None:
    with pytest.raises(BadOption):
        tripwire.watch_torch_compile(given)


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_what_cannot_be_observed_is_left_to_torch_compile(caplog) -> None:
    import random

    watched = watch(lambda x: x * random.random())
    for _ in range(3):
        watched(X)
    assert watched.refusal is not None
    assert caplog.text.count("isn't watched") == 1
