"""The sieve in C keeps from a profile function what it has nothing to do for, and nothing else."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import tripwire
from tripwire.env import HAS_MONITORING
from tripwire.tracing import observe, recorder

_sieve = pytest.importorskip("tripwire.tracing._sieve")
pytestmark = pytest.mark.skipif(HAS_MONITORING, reason="sys.monitoring serves from 3.12 on")

SIDES = {
    "sieve": (_sieve.Sieve, _sieve.set_profile),
    "twin": (observe._sift_nothing, sys.setprofile),
}


@pytest.fixture(params=SIDES)
def side(request, monkeypatch) -> Iterator[None]:
    build, install = SIDES[request.param]
    monkeypatch.setattr(observe, "_build_sieve", build)
    monkeypatch.setattr(observe, "set_profile", install)
    monkeypatch.setattr(recorder, "set_profile", install)
    yield
    assert sys.getprofile() is None


def helper(x: int) -> int:
    return len(str(x))


class Events:
    """A profile function that keeps what it is told, behind a sieve."""

    def __init__(self, judges: bool = True) -> None:
        self.told: list[tuple[str, object]] = []
        self.seen: dict[int, object] = {}
        self.own: set[int] = set()
        self.near_numpy: set[int] = set()
        self.pure: set[object] = set()
        self.pure_methods: set[tuple[type, str]] = set()
        self.sieve = _sieve.Sieve(
            self.note, self.seen, self.own, self.near_numpy, self.pure, self.pure_methods, judges
        )

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        self.told.append((event, arg if event.startswith("c_") else frame.f_code.co_name))

    def run(self, call: Callable[[], object]) -> list[tuple[str, object]]:
        self.told.clear()
        _sieve.set_profile(self.sieve)
        try:
            call()
        finally:
            sys.setprofile(None)
        return [told for told in self.told if told != ("c_call", sys.setprofile)]


def test_the_start_of_new_code_is_told_and_its_return_is_not() -> None:
    events = Events(judges=False)
    assert events.run(lambda: helper(1)) == [("call", "<lambda>"), ("call", "helper")]


def test_code_that_was_seen_goes_untold() -> None:
    events = Events(judges=False)
    events.seen[id(helper.__code__)] = helper.__code__
    assert events.run(lambda: helper(1)) == [("call", "<lambda>")]


def test_calls_of_c_functions_are_told_unless_they_are_pure_or_made_by_own_code() -> None:
    events = Events()
    events.seen[id(helper.__code__)] = helper.__code__
    assert ("c_call", len) in events.run(lambda: helper(1))
    events.pure.add(len)
    assert ("c_call", len) not in events.run(lambda: helper(1))
    events.pure.clear()
    events.own.add(id(helper.__code__))
    assert ("c_call", len) not in events.run(lambda: helper(1))


def test_a_pure_method_is_one_of_its_class_alone() -> None:
    events, items, others = Events(), [1], bytearray(b"1")
    events.pure_methods.add((list, "append"))
    told = [arg for event, arg in events.run(lambda: (items.append(2), others.append(2)))]
    assert others.append in told and items.append not in told


def test_near_numpy_everything_is_told() -> None:
    events = Events(judges=False)
    events.seen[id(helper.__code__)] = helper.__code__
    events.near_numpy.add(1)
    told = [event for event, _ in events.run(lambda: helper(1))]
    assert told.count("call") == 2 and "c_call" in told and "return" in told


def test_a_profile_function_that_raises_goes_as_python_has_it_go() -> None:
    def fail(frame: FrameType, event: str, arg: Any) -> None:
        raise ValueError("mine")

    sieve = _sieve.Sieve(fail, {}, set(), set(), set(), set(), True)
    with pytest.raises(ValueError, match="mine"):
        _sieve.set_profile(sieve)
        helper(1)
    assert sys.getprofile() is None


def test_a_sieve_that_is_taken_out_and_put_back_by_others_works_on() -> None:
    events = Events(judges=False)

    def call() -> None:
        kept = sys.getprofile()
        assert kept is events.sieve
        sys.setprofile(None)
        sys.setprofile(kept)
        helper(1)

    assert ("call", "helper") in events.run(call)


def test_only_sieves_are_taken() -> None:
    with pytest.raises(TypeError, match="sieve"):
        _sieve.set_profile(helper)


def test_a_sieve_in_a_cycle_is_collected() -> None:
    events = Events()
    ref = weakref.ref(events)
    del events
    gc.collect()
    assert ref() is None


@pytest.mark.usefixtures("side")
def test_helpers_and_impure_calls_are_seen_by_both_sides() -> None:
    scale = {"by": 2.0}

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * scale["by"]

    def f(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + inner(x)

    compiled, x = tripwire.compile(f, backend="eager", fullgraph=True), torch.ones(2)
    assert torch.equal(compiled(x), x * 4)
    scale["by"] = 3.0
    assert torch.equal(compiled(x), x * 6)
    assert compiled.statistics().traces == 2

    def timed(x: torch.Tensor) -> torch.Tensor:
        import time

        return x * time.time()

    with pytest.raises(tripwire.CannotTrace):
        tripwire.compile(timed, backend="eager", fullgraph=True)(x)
