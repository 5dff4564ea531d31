"""Draws: numbers out of Python's random generators are open, and drawn again on each call.

Nothing that a call computes decides on the next number of such a generator. So the guard function
looks ahead: it draws from a copy of the generator, and the generator itself stays where it is.
Only when the compiled code has run are the same numbers drawn from it (`Advance`), so that it ends
where it would after the plain call. An entry that isn't for the call, and code that raises, have
drawn nothing.

`random.random()` and `getrandbits` are the two that C has; all other functions of the module draw
with these. Some draw until a number suits them: that is one draw here (an int below some bound,
`betavariate`, `gauss`), made by the function itself.
"""

from __future__ import annotations

import _random
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from tripwire.imports import find_native
from tripwire.reading.effects import EffectStep, refer_to
from tripwire.reading.structure import Building
from tripwire.rulebook.purity import DRAWS
from tripwire.rulebook.refusals import Refused
from tripwire.values.classes import is_exactly
from tripwire.values.numbers import close_values, plain

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow
    from tripwire.tracing.state import TracingState

_casts = find_native("tracing._casts")
CAN_DRAW = _casts is not None
_MOST_WAYS = 8  # through a call, by what is drawn: each is an entry of its own
_BELOW = random.Random._randbelow_with_getrandbits.__code__  # type: ignore[attr-defined]
# Functions that draw until a number suits them, or that decide by what they draw.
AS_A_WHOLE = (
    *("betavariate", "gammavariate", "gauss", "normalvariate", "triangular", "vonmisesvariate"),
)


@dataclass(frozen=True, slots=True)
class Draw:
    """One number out of a generator."""

    generator: Callable[[], object]  # keeps none alive
    bits: int | None = None  # None: a float
    below: int | None = None
    whole: Callable[..., float] | None = None  # the function of a generator that makes it
    name: str = "random"
    given: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    def make(self, generator: _random.Random) -> int | float:
        """Draw it from this one."""
        if self.whole is not None:
            return self.whole(generator, *self.given, **self.named)
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
        if self.bits is None:
            named = (f"{name}={value!r}" for name, value in self.named.items())
            return f"random.{self.name}({', '.join((*map(repr, self.given), *named))})"
        return f"random.randrange({self.values})"


@dataclass(frozen=True, slots=True)
class Advance(EffectStep):
    """The draws of a call, made."""

    draws: tuple[Draw, ...]

    def apply(self, building: Building) -> None:
        for draw in self.draws:
            draw.make(draw.generator())  # type: ignore[arg-type]  # what read it is watched


_copies: list[random.Random] = []  # that nobody uses now


def look_ahead(draws: Sequence[Draw]) -> tuple[int | float, ...]:
    """What these draws will give; the generators stay where they are."""
    found: dict[int, random.Random] = {}
    numbers = []
    for draw in draws:
        generator: Any = draw.generator()
        copy = found.get(id(generator))
        if copy is None:
            copy = found[id(generator)] = _copies.pop() if _copies else random.Random(0)
            _casts.copy_generator(generator, copy)
            if draw.whole is not None:
                copy.gauss_next = generator.gauss_next  # type: ignore[attr-defined]
        numbers.append(draw.make(copy))
    _copies.extend(found.values())
    return tuple(numbers)


def draw(state: TracingState, generator: _random.Random, bits: Any, caller: FrameType) -> Any:
    """What the run gets for a call of a generator; NotImplemented: what it always gets."""
    if not is_exactly(bits, int, type(None)):
        return _refuse(state)
    below = plain(caller.f_locals.get("n")) if caller.f_code is _BELOW else None
    return _draw(state, generator, Draw(refer_to(generator), bits, below))


def draw_whole(
    state: TracingState,
    generator: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What the run gets for a function that draws; NotImplemented: what it always gets."""
    shadow = state.shadow
    if shadow is None or not shadow.draws or not is_exactly(generator, random.Random):
        return _refuse(state)
    with state.aside():
        shadow.close_given((args, kwargs), function.__name__)
    given, named = close_values((args, kwargs))
    if not all(is_exactly(one, int, float, type(None)) for one in (*given, *named.values())):
        return _refuse(state)
    one = Draw(refer_to(generator), None, None, function, function.__name__, given, named)
    return _draw(state, generator, one)


def _draw(state: TracingState, generator: _random.Random, one: Draw) -> Any:
    shadow, observer = state.shadow, state.observer
    assert shadow is not None
    assert observer is not None
    is_state = state.reach.is_anchored(generator)
    # `gauss` leaves a number behind. In an object that is state, that is the object's, too.
    can_repeat = one.name != "gauss" if is_state else generator is random._inst
    if not can_repeat or state.regions:
        return _refuse(state)
    with state.aside():
        is_unmoved = observer.is_unmoved()
        value = one.make(generator)
        observer.look_again()
    number = shadow.open_drawn(one, value) if is_unmoved else None
    if number is None:
        _refuse(state)
        return value
    return number


def _refuse(state: TracingState) -> Any:
    if state.observer is not None:
        state.observer.refuse_draw()
    return NotImplemented


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
