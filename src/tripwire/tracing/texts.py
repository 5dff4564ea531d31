"""Texts: where the texts go that a function formats, found in its bytecode.

An f-string, `"%d" % n` and `"{}".format(n)` with constant texts are pieces: what stands in the
code, and fields, each of which asks a value for its text.
"""

from __future__ import annotations

import dis
import functools
import itertools
import math
import re
import string
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from msgspec import Struct

from tripwire.ranges import SourceRange
from tripwire.rulebook.rules import words
from tripwire.values.classes import isinstance
from tripwire.values.numbers import OpenFloat, OpenInt


class Field(Struct, frozen=True):
    """A place in a text where a value is formatted."""

    start: int  # the place of the instruction
    stop: int  # of the next one
    asks: str  # the value's method that is called
    form: str | None = None  # for `format`, or with a `%`; None: the code computes it
    index: int = 0  # of fields that one instruction formats

    def may_hold(self, waiting: Waiting) -> bool:
        """Whether it may be what asked a number."""
        is_form = self.asks != "__format__" or self.form in (None, waiting.form)
        return self.start <= waiting.at < self.stop and self.asks == waiting.asks and is_form

    def notation_for(self, waiting: Waiting) -> Notation:
        """How it writes a number."""
        by_format = self.asks == "__format__"
        return Notation(waiting.form if by_format else self.form or "", by_format)


class Notation(Struct, frozen=True):
    """How a value is written."""

    text: str
    by_format: bool

    def write(self, value: object) -> str:
        """The value's text."""
        return format(value, self.text) if self.by_format else self.text % (value,)


Pieces = tuple[str | Field | None, ...]  # None: anything


class Telling(Struct, frozen=True):
    """A call that may print or log: the texts among its arguments, which go nowhere else."""

    start: int
    stop: int
    texts: tuple[Pieces, ...]

    def is_at(self, place: int) -> bool:
        """Whether a frame that is at a place makes this call: CPython may point behind it."""
        return self.start <= place < self.stop


class Waiting(Struct, frozen=True, eq=False):
    """An open number in a text that goes into a call that hasn't come yet."""

    frame: FrameType
    at: int  # where the number is formatted
    call: Telling
    number: OpenInt | OpenFloat
    asks: str
    form: str
    where: SourceRange


class Template(Struct, frozen=True):
    """A text with open numbers in it, each with its format."""

    pieces: tuple[str | tuple[OpenInt | OpenFloat, Notation], ...]


# --- a text, taken apart ---


def take_apart(
    text: object, pieces: Pieces, waiting: Sequence[Waiting]
) -> tuple[Template, tuple[Waiting, ...]] | None:
    """A text with its numbers, and these; None where it isn't this one, or may be read twice."""
    fields = [piece for piece in pieces if isinstance(piece, Field)]
    here = tuple(one for one in waiting if any(field.may_hold(one) for field in fields))
    if not isinstance(text, str) or not here or math.comb(len(fields), len(here)) > _MOST:
        return None
    readings = [_read(text, pieces, held) for held in _iter_ways(fields, here)]
    found = [one for one in readings if one is not None]
    return (found[0], here) if len(found) == 1 and found[0].pieces else None


_MOST = 100  # ways in which numbers may be in a text


def _iter_ways(fields: list[Field], here: tuple[Waiting, ...]) -> Iterator[dict[Field, Waiting]]:
    """Which fields may hold the numbers, which were asked in order."""
    for chosen in itertools.combinations(fields, len(here)):
        held = dict(zip(chosen, here, strict=True))
        if all(field.may_hold(one) for field, one in held.items()):
            # `str` of some errors asks for `str` of what they hold: here none may be one.
            by_str = [field for field in fields if field.asks == "__str__"]
            asked = {field.start for field in by_str if field in held}
            if all(field in held or field.start not in asked for field in by_str):
                yield held


def _read(text: str, pieces: Pieces, held: dict[Field, Waiting]) -> Template | None:
    """The text with these numbers in it; none in the template: it may be read in two ways."""
    found = []
    for anything in ("(.*?)", "(.*)"):
        pattern = ""
        for piece in pieces:
            if isinstance(piece, str):
                pattern += re.escape(piece)
            elif isinstance(piece, Field) and piece in held:
                one = held[piece]
                pattern += f"({re.escape(piece.notation_for(one).write(one.number.value))})"
            else:
                pattern += anything
        match = re.fullmatch(pattern, text, re.DOTALL)
        if match is None:
            return None
        formatted = (piece for piece in pieces if not isinstance(piece, str))
        spans = zip(formatted, match.regs[1:], strict=True)
        found.append([(p, *span) for p, span in spans if isinstance(p, Field) and p in held])
    if found[0] != found[1]:
        return Template(())
    parts: list[str | tuple[OpenInt | OpenFloat, Notation]] = []
    end = 0
    for field, start, stop in found[0]:
        parts += (text[end:start], (held[field].number, field.notation_for(held[field])))
        end = stop
    return Template((*parts, text[end:]))


# --- where texts go ---

SPEAKERS = words("print debug info warning warn error critical fatal log")
_SAFE = re.compile(
    "LOAD_|BINARY_|COMPARE_OP|CONVERT_VALUE|STORE_FAST|POP_TOP|BUILD_|KW_NAMES|PUSH_NULL|UNARY_"
)
_NOTHING = frozenset({"CACHE", "PRECALL", "EXTENDED_ARG", "NOP", "RESUME", "KW_NAMES"})
_ANYTHING: Pieces = (None,)
_SPEAKER: Pieces = (None, None)  # what is called `print`, or like a method of loggers
_FORMAT: Pieces = (None, None, None)  # a method called `format`


@functools.lru_cache(maxsize=64)
def find_calls(code: CodeType) -> tuple[Telling, ...]:
    """The calls of a code that get formatted texts, and may print or log them.

    Follows what is on the stack. After a jump, or an instruction that may copy, nothing is known.
    """
    calls: list[Telling] = []
    stack: list[Pieces] = []

    def pop(count: int) -> list[Pieces]:
        missing = [_ANYTHING] * (count - len(stack))
        taken = [*missing, *stack[len(stack) - min(count, len(stack)) :]]
        del stack[len(stack) - min(count, len(stack)) :]
        return taken

    steps = list(dis.get_instructions(code))
    ends = [*(step.offset for step in steps[1:]), len(code.co_code)]
    names: Any = ()  # of keywords, if the next call has some
    has_names = False
    begin = 0  # of a call, of which 3.11 may make some one instruction earlier
    for step, end in zip(steps, ends, strict=True):
        name, count = step.opname, step.arg or 0
        if step.is_jump_target:
            stack.clear()
        if name in ("KW_NAMES", "LOAD_CONST"):  # the latter right before CALL_KW
            names, has_names = code.co_consts[count], name == "KW_NAMES"
        if name != "CALL":
            begin = step.offset
        if name in _NOTHING:
            continue
        if name == "LOAD_CONST":
            stack.append((step.argval,) if isinstance(step.argval, str) else _ANYTHING)
        elif name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC"):
            has_form = name == "FORMAT_WITH_SPEC" or (name == "FORMAT_VALUE" and count & 4)
            value = pop(2 if has_form else 1)[0]
            if name == "FORMAT_SIMPLE" and any(isinstance(piece, Field) for piece in value):
                stack.append(value)  # a text already
                continue
            is_text = name == "FORMAT_VALUE" and count == _BY_STR
            asks, form = ("__str__", "%s") if is_text else ("__format__", None)
            stack.append((Field(step.offset, end, asks, form),))
        elif name == "CONVERT_VALUE" and count == _BY_STR:  # from 3.13 on, before the formatting
            pop(1)
            stack.append((Field(step.offset, end, "__str__", "%s"),))
        elif name == "BUILD_STRING":
            stack.append(tuple(piece for text in pop(count) for piece in text))
        elif name == "BINARY_OP" and step.argrepr == "%":
            stack.append(_split(pop(2)[0], _iter_percents, step.offset, end))
        elif name in ("CALL", "CALL_KW"):
            pop(name == "CALL_KW")
            given = pop(count)
            if has_names or name == "CALL_KW":
                given, has_names = given[: -len(names)], False
            texts = tuple(text for text in given if any(isinstance(p, Field) for p in text))
            callee = pop(2)
            if texts and _SPEAKER in callee:
                calls.append(Telling(step.offset, end, texts))
            is_format = callee[1] is _FORMAT
            made = _split(callee[0], _iter_braces, begin, end) if is_format else _ANYTHING
            stack.append(made)
        else:
            if not _SAFE.match(name):
                stack[:] = [_ANYTHING] * len(stack)
            effect = dis.stack_effect(step.opcode, step.arg, jump=False)
            pop(max(-effect, 0))
            found = _ANYTHING
            if name.startswith("LOAD_"):
                found = _FORMAT if step.argval == "format" else found
                found = _SPEAKER if step.argval in SPEAKERS else found
            if effect <= 0 and stack:
                stack[-1] = found
            stack += [found] * max(effect, 0)
    return tuple(calls)


_BY_STR = 1  # f"{n!s}", which is what "%s" % (n,) is compiled to


# --- texts with fields ---

_Parts = Iterator[str | tuple[str, str]]  # a text, or what a field asks for, and its form
_PERCENT = re.compile(r"%(?:\(\w*\))?([-+ #0]*\d*(?:\.\d+)?)([sdiuxXofFeEgG%])|%")
_ASKED = {
    "s": "__str__",
    **dict.fromkeys("diu", "__int__"),
    **dict.fromkeys("xXo", "__index__"),
    **dict.fromkeys("fFeEgG", "__float__"),
}


def _split(text: Pieces, iter_parts: Callable[[str], _Parts], start: int, stop: int) -> Pieces:
    """The pieces of a constant text with fields, which one instruction formats."""
    (constant,) = text if len(text) == 1 else (None,)
    if not isinstance(constant, str):
        return _ANYTHING
    try:
        parts = tuple(iter_parts(constant))
    except ValueError:
        return _ANYTHING
    return tuple(
        part if isinstance(part, str) else Field(start, stop, *part, index)
        for index, part in enumerate(parts)
    )


def _iter_percents(text: str) -> _Parts:
    """As `text % values` has them. Raises ValueError: they may ask for something else, too."""
    end = 0
    for match in _PERCENT.finditer(text):
        yield text[end : match.start()]
        form, kind = match.groups()
        if kind is None or (kind == "%" and match[0] != "%%"):
            raise ValueError
        yield "%" if kind == "%" else (_ASKED[kind], f"%{form}{kind}")
        end = match.end()
    yield text[end:]


def _iter_braces(text: str) -> _Parts:
    """As `text.format(...)` has them. Raises ValueError: they may ask for something else, too."""
    for before, name, form, conversion in string.Formatter().parse(text):
        yield before
        if name is not None:
            assert form is not None
            if conversion is not None or "{" in form:
                raise ValueError
            yield "__format__", form
