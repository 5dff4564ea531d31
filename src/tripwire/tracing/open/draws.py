"""Draws: numbers out of Python's random generators, and NumPy's, are open: each call draws them.

Nothing that a call computes decides on the next number of such a generator. So the guard function
looks ahead: it draws from a copy of the generator, and the generator itself stays where it is.
Only when the compiled code has run are the same numbers drawn from it (`Advance`), so that it ends
where it would after the plain call. An entry that isn't for the call, and code that raises, have
drawn nothing.

`random.random()` and `getrandbits` are the two that C has; all other functions of the module draw
with these. Some draw until a number suits them: that is one draw here (an int below some bound,
`betavariate`, `gauss`), made by the function itself. So are numbers out of NumPy's own generator.
"""

from __future__ import annotations

import _random
import copy
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from tripwire.imports import find_native
from tripwire.reading.effects import EffectStep, refer_to
from tripwire.reading.structure import Building
from tripwire.rulebook.purity import DRAWS, NUMPY_DRAWS, is_global_generator, refuse_draw
from tripwire.rulebook.refusals import Refused
from tripwire.rulebook.rules import Refuse
from tripwire.values.classes import is_exactly, isinstance
from tripwire.values.numbers import close_values, plain

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow
    from tripwire.tracing.state import TracingState

_casts = find_native("tracing._casts")
CAN_DRAW = _casts is not None
_MOST_WAYS = 8  # through a call, by what is drawn: each is an entry of its own
_MOST_NAMED = 3  # of what is drawn, for people
_BELOW = random.Random._randbelow_with_getrandbits.__code__  # type: ignore[attr-defined]
# Functions that draw until a number suits them, or that decide by what they draw.
AS_A_WHOLE = (
    *("betavariate", "gammavariate", "gauss", "normalvariate", "triangular", "vonmisesvariate"),
)


class Draw(Struct, frozen=True):
    """One number out of a generator."""

    generator: Callable[[], object]  # keeps none alive
    bits: int | None = None  # None: a float, or what a function makes
    least: int = 0
    below: int | None = None  # an int; so many more than the least
    whole: Callable[..., int | float] | None = None  # the function of a generator that makes it
    name: str = "random.random"
    given: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    def make(self, generator: Any) -> int | float:
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
        return 2**self.bits if self.bits is not None and self.below is None else self.below

    @property
    def refuses(self) -> Refuse:
        """Why a call that draws it isn't compiled, if it can't stay open."""
        return NUMPY_DRAWS if self.name.startswith("numpy.") else DRAWS

    def __str__(self) -> str:
        if self.bits is None:
            named = (f"{name}={value!r}" for name, value in self.named.items())
            return f"{self.name}({', '.join((*map(repr, self.given), *named))})"
        return f"random.randrange({self.values})"


class Advance(EffectStep, frozen=True):
    """The draws of a call, made."""

    draws: tuple[Draw, ...]

    def apply(self, building: Building) -> None:
        for draw in self.draws:
            draw.make(draw.generator())  # what read it is watched


_copies: list[random.Random] = []  # that nobody uses now


def look_ahead(draws: Sequence[Draw]) -> tuple[int | float, ...]:
    """What these draws will give; the generators stay where they are."""
    found: dict[int, Any] = {}
    numbers = []
    for draw in draws:
        generator = draw.generator()
        copied = found.get(id(generator))
        if copied is None:
            copied = found[id(generator)] = _copy(generator)
        numbers.append(draw.make(copied))
    _copies.extend(one for one in found.values() if isinstance(one, random.Random))
    return tuple(numbers)


def _copy(generator: Any) -> Any:
    """Another one that goes on as this one."""
    if isinstance(generator, _random.Random):
        copied = _copies.pop() if _copies else random.Random(0)
        _casts.copy_generator(generator, copied)
        copied.gauss_next = getattr(generator, "gauss_next", None)  # type: ignore[attr-defined]
        return copied
    state = generator.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # somebody has exchanged it
        return copy.deepcopy(generator)
    numpys = type(generator)(0)
    numpys.set_state(state)
    return numpys


def draw(state: TracingState, generator: _random.Random, bits: Any, caller: FrameType) -> Any:
    """What the run gets for a call of a generator; NotImplemented: what it always gets."""
    if not is_exactly(bits, int, type(None)):
        return _refuse(state, DRAWS)
    below = plain(caller.f_locals.get("n")) if caller.f_code is _BELOW else None
    return _draw(state, generator, Draw(refer_to(generator), bits, below=below), DRAWS)


def draw_whole(
    state: TracingState,
    generator: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What the run gets for a function that draws; NotImplemented: what it always gets."""
    shadow, is_pythons = state.shadow, isinstance(generator, _random.Random)
    why = DRAWS if is_pythons else NUMPY_DRAWS
    if shadow is None or not shadow.draws or not is_exactly(generator, *_kinds()):
        return _refuse(state, why)
    name = f"{'random' if is_pythons else 'numpy.random'}.{function.__name__}"
    why = refuse_draw(name)
    with state.aside():
        shadow.close_given((args, kwargs), function.__name__)
    given, named = close_values((args, kwargs))
    if not all(is_exactly(one, int, float, type(None)) for one in (*given, *named.values())):
        return _refuse(state, why)
    bounds = _find_bounds(*given, **named) if function.__name__ == "randint" else (0, None)
    one = Draw(refer_to(generator), None, *bounds, function, name, given, named)
    return _draw(state, generator, one, why)


def _find_bounds(
    low: object = None, high: object = None, *others: object, **named: object
) -> tuple[int, int | None]:
    """The least that NumPy's `randint` gives, and how many ints there are from it on."""
    low, high = (0, low) if high is None else (low, high)
    if others or named or not is_exactly(low, int) or not is_exactly(high, int):
        return 0, None
    return low, high - low  # type: ignore[operator,return-value]  # two ints


def _kinds() -> tuple[type, ...]:
    """Generators whose methods are the library's own."""
    numpy = sys.modules.get("numpy.random")
    return (random.Random,) if numpy is None else (random.Random, numpy.RandomState)


def _draw(state: TracingState, generator: Any, one: Draw, why: Refuse) -> Any:
    shadow, observer = state.shadow, state.observer
    assert shadow is not None
    assert observer is not None
    is_state = state.reach.is_anchored(generator)
    # `gauss` leaves a number behind. In an object that is state, that is the object's, too.
    can_repeat = one.name != "random.gauss" if is_state else is_global_generator(generator)
    if not can_repeat or state.regions:
        return _refuse(state, why)
    with state.aside():
        is_unmoved = observer.is_unmoved()
        value = one.make(generator)
        observer.look_again()
    is_number = is_exactly(value, int, float)
    number = shadow.open_drawn(one, value) if is_number and is_unmoved else None
    if number is None:
        _refuse(state, why)
        return value
    return number


def _refuse(state: TracingState, why: Refuse) -> Any:
    if state.observer is not None:
        state.observer.refuse_draw(why)
    return NotImplemented


def check_ways(shadow: Shadow) -> None:
    """Refuse where what is drawn leads through the call in too many ways."""
    closed = [one for path, one in shadow.drawn.items() if shadow.is_fixed(path)]
    for one in closed:
        if one.values is None:
            raise Refused(one.refuses.slug, _FIXED.format(one))
    asked = shadow.list_asked(shadow.drawn)
    ways = math.prod([2] * len(asked) + [one.values or 1 for one in closed])
    if ways > _MOST_WAYS:
        drawn = list(shadow.drawn.values())
        names = ", ".join(f"`{one}`" for one in drawn[:_MOST_NAMED])
        more = ", ..." if len(drawn) > _MOST_NAMED else ""
        raise Refused(drawn[0].refuses.slug, _WAYS.format(names + more, _MOST_WAYS))


DRAWN_BY_BOTH = (
    "the call draws from Python's `random`, and calls a custom function, which may do so as well: "
    "the order of their draws isn't known. Draw with torch, or outside the traced function."
)
_FIXED = (
    "what `{}` gives becomes part of the compiled code here, so that code would fit no other call. "
    "Draw with torch, or outside the traced function."
)
_WAYS = (
    "what it draws ({}) leads through the call in more than {} ways, and each would be compiled on "
    "its own. Draw outside the traced function, or compile what is inside the branches."
)
