"""Draws: numbers out of Python's random generators are open, and drawn again on each call.

Nothing that a call computes decides on the next number of such a generator. So the guard function
looks ahead: it draws from a copy of the generator, and the generator itself stays where it is.
Only when the compiled code has run are the same numbers drawn from it (`Advance`), so that it ends
where it would after the plain call. An entry that isn't for the call, and code that raises, have
drawn nothing.

`random.random()` and `getrandbits` are the two that C has; all other functions of the module draw
with these. An int below some bound is drawn until it is below it: that is one draw here.
"""

from __future__ import annotations

import _random
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from tripwire.imports import find_native
from tripwire.reading.effects import EffectStep, refer_to
from tripwire.reading.structure import Building
from tripwire.rulebook.purity import DRAWS
from tripwire.rulebook.refusals import Refused
from tripwire.values.classes import is_exactly
from tripwire.values.numbers import plain

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow
    from tripwire.tracing.state import TracingState

_casts = find_native("tracing._casts")
CAN_DRAW = _casts is not None
_MOST_WAYS = 8  # through a call, by what is drawn: each is an entry of its own
_BELOW = random.Random._randbelow_with_getrandbits.__code__  # type: ignore[attr-defined]
_WITH_MEMORY = random.Random.gauss.__code__  # every second call gives what the last one left


@dataclass(frozen=True, slots=True)
class Draw:
    """One number out of a generator."""

    generator: Callable[[], object]  # keeps none alive
    bits: int | None  # None: a float
    below: int | None = None

    def make(self, generator: _random.Random) -> int | float:
        """Draw it from this one."""
        if self.bits is None:
            return _random.Random.random(generator)
        number = _random.Random.getrandbits(generator, self.bits)
        while self.below is not None and number >= self.below:
            number = _random.Random.getrandbits(generator, self.bits)
        return number

    @property
    def values(self) -> int | None:
        """How many different ones there may be; None: more than anybody counts."""
        return self.below if self.bits is None or self.below is not None else 2**self.bits

    def __str__(self) -> str:
        return "random.random()" if self.bits is None else f"random.randrange({self.values})"


@dataclass(frozen=True, slots=True)
class Advance(EffectStep):
    """The draws of a call, made."""

    draws: tuple[Draw, ...]

    def apply(self, building: Building) -> None:
        for draw in self.draws:
            draw.make(draw.generator())  # type: ignore[arg-type]  # what read it is watched


_copies: list[_random.Random] = []  # that nobody uses now


def look_ahead(draws: Sequence[Draw]) -> tuple[int | float, ...]:
    """What these draws will give; the generators stay where they are."""
    found: dict[int, _random.Random] = {}
    numbers = []
    for draw in draws:
        generator = draw.generator()
        copy = found.get(id(generator))
        if copy is None:
            copy = found[id(generator)] = _copies.pop() if _copies else _random.Random(0)
            _casts.copy_generator(generator, copy)
        numbers.append(draw.make(copy))
    _copies.extend(found.values())
    return tuple(numbers)


def draw(state: TracingState, generator: _random.Random, bits: Any, caller: FrameType) -> Any:
    """What the run gets for a call of a generator; NotImplemented: what it always gets."""
    shadow, observer = state.shadow, state.observer
    assert shadow is not None
    assert observer is not None
    is_pythons = generator is random._inst
    is_known = is_pythons or state.reach.is_anchored(generator)
    can_repeat = is_known and caller.f_code is not _WITH_MEMORY
    if not can_repeat or state.regions or not is_exactly(bits, int, type(None)):
        observer.refuse_draw()
        return NotImplemented
    below = plain(caller.f_locals.get("n")) if caller.f_code is _BELOW else None
    one = Draw(refer_to(generator), bits, below)
    with state.aside():
        is_unmoved = observer.is_unmoved()
        value = one.make(generator)
        observer.look_again()
    number = shadow.open_drawn(one, value) if is_unmoved else None
    if number is None:
        observer.refuse_draw()
        return value
    return number


def check_ways(shadow: Shadow) -> None:
    """Refuse where what is drawn leads through the call in too many ways."""
    closed = [one.values for path, one in shadow.drawn.items() if shadow.is_fixed(path)]
    if None in closed:
        raise Refused(DRAWS.slug, _FIXED)
    asked = shadow.list_asked(shadow.drawn)
    ways = math.prod([2] * len(asked) + [count for count in closed if count is not None])
    if ways > _MOST_WAYS:
        raise Refused(DRAWS.slug, _WAYS.format(_MOST_WAYS))


DRAWN_BY_BOTH = (
    "the call draws from Python's `random`, and calls a custom function, which may do so as well: "
    "the order of their draws isn't known. Draw with torch, or outside the traced function."
)
_FIXED = (
    "a float that Python's `random` gives becomes part of the compiled code here, so that code "
    "would fit no other call. Draw with torch, or outside the traced function."
)
_WAYS = (
    "what Python's `random` gives leads through the call in more than {} ways, and each would be "
    "compiled on its own. Draw outside the traced function, or compile what is inside the branches."
)
