"""A set of classes that is only asked for members is watched; its members once they are met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tripwire


class Plain:
    scale = 2.0


class Other:
    scale = 5.0


class Kind(type):
    """Classes that are equal to all of the same kind."""

    wide = True

    def __eq__(cls, other: object) -> bool:
        return cls is other or Kind.wide

    def __hash__(cls) -> int:
        return 1


class Odd(metaclass=Kind):
    pass


class Even(metaclass=Kind):
    pass


KNOWN: set[type] = {Plain}
KINDS: set[type] = {Odd}
SCALES: set[type] = {Plain}


def ask(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if Other in KNOWN else x * 3


def ask_then_add(x: torch.Tensor) -> torch.Tensor:
    if Other not in KNOWN:
        KNOWN.add(Other)
        return x * 2
    return x * 3


def ask_kinds(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if Even in KINDS else x * 3


def ask_and_walk(x: torch.Tensor) -> torch.Tensor:
    if Other in SCALES:
        x = x + 1
    return walk(x)


def walk(x: torch.Tensor) -> torch.Tensor:
    for cls in SCALES:
        x = x * cls.scale
    return x


def hand_on(x: torch.Tensor, known: set[type] = SCALES) -> torch.Tensor:
    if Other in SCALES:
        x = x + 1
    for cls in known:
        x = x * cls.scale
    return x


class Likeness:
    """Equal to a class, by what that class holds."""

    def __hash__(self) -> int:
        return NUMBER

    def __eq__(self, other: Any) -> bool:
        return bool(other.scale == 2.0)


NUMBER = hash(Plain)
LIKENESS = Likeness()


def ask_by_likeness(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if LIKENESS in SCALES else x * 3


def ask_by_new_likeness(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if Likeness() in SCALES else x * 3


def ask_for_argument(x: torch.Tensor, wanted: object = LIKENESS) -> torch.Tensor:
    return x * 2 if wanted in SCALES else x * 3


class Registry:
    known = SCALES


def reach_otherwise(x: torch.Tensor) -> torch.Tensor:
    if Other in SCALES:
        x = x + 1
    for cls in Registry.known:
        x = x * cls.scale
    return x


@pytest.fixture(autouse=True)
def restored():
    before = set(KNOWN), set(KINDS), set(SCALES), Plain.scale, Kind.wide
    yield
    for found, wanted in zip((KNOWN, KINDS, SCALES), before, strict=False):
        found.clear()
        found.update(wanted)
    Plain.scale, Kind.wide = before[3:]


def check(f: Callable[..., Any], change: Callable[[], object]) -> None:
    compiled, x = tripwire.compile(f, backend="eager", fullgraph=True), torch.ones(2)
    for _ in range(2):
        assert torch.equal(compiled(x), f(x))
    change()
    for _ in range(2):
        assert torch.equal(compiled(x), f(x))


def test_a_member_that_is_added_or_removed_is_noticed() -> None:
    check(ask, lambda: KNOWN.add(Other))
    check(ask, lambda: KNOWN.discard(Other))


def test_a_registry_that_the_run_fills_holds_what_plain_code_puts_there() -> None:
    compiled, x = tripwire.compile(ask_then_add, backend="eager"), torch.ones(2)
    assert torch.equal(compiled(x), x * 2)
    assert Other in KNOWN
    assert torch.equal(compiled(x), x * 3)
    KNOWN.discard(Other)
    assert torch.equal(compiled(x), x * 2)
    assert Other in KNOWN


def test_classes_that_are_compared_by_code_are_met() -> None:
    check(ask_kinds, lambda: setattr(Kind, "wide", False))


@pytest.mark.parametrize(
    "f",
    [
        *(ask_and_walk, hand_on, reach_otherwise),
        *(ask_by_likeness, ask_by_new_likeness, ask_for_argument),
    ],
)
def test_members_that_are_handed_out_elsewhere_are_met(f: Callable[..., Any]) -> None:
    check(f, lambda: setattr(Plain, "scale", 7.0))


def test_members_that_are_not_handed_out_are_not_met() -> None:
    compiled, x = tripwire.compile(ask, backend="eager", fullgraph=True), torch.ones(2)
    compiled(x)
    Plain.scale = 9.0
    compiled(x)
    assert compiled.statistics().traces == 1
    assert "Plain'>]." not in str(tripwire.explain(compiled))
