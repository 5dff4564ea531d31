"""Names: what the user's code calls a value, and the lines that name it.

The instruction after a call tells who takes its result: `h = f(x)` stores it into `h`,
`a, b = f(x)` unpacks it, `return f(x)` returns it to the caller, whose next instruction is
looked at in turn. Any other result has no name in the user's code.
"""

from __future__ import annotations

import builtins
import dis
import linecache
import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from msgspec import Struct

from tripwire.env import is_dispatch_file, is_library_file, is_numpys_file
from tripwire.ranges import PerCode, SourceRange
from tripwire.reading.bytecode import find_uses
from tripwire.reading.kinds import ABSENT
from tripwire.reading.sources import Attr, Cell, Global, Item, Source
from tripwire.reading.tensors import meta_of
from tripwire.values.classes import isinstance, name_of
from tripwire.values.contents import PROXIES, all_codes
from tripwire.values.identity import PLAIN


class _Taker(Enum):
    CALLER = "the frame returns it"
    NOBODY = "no variable holds it"


def find_names(
    where: SourceRange, callers: SourceRange | None = None
) -> str | tuple[str, ...] | None:
    """The variable, or the unpacked variables, that will hold the innermost call's result.

    The callers of a traced function get a trace, and no result.
    """
    part: SourceRange | None = where
    while part is not None and part is not callers:  # no generator: asked for each node
        raw: Any = part.raw
        for at in range(0, len(raw), 2):
            taker = _taker(raw[at], raw[at + 1])
            if taker is _Taker.NOBODY:
                return None
            if taker is not _Taker.CALLER:
                return taker
        part = part.outer
    return None


def _find_taker(code: CodeType, offset: int) -> str | tuple[str, ...] | _Taker:
    if is_dispatch_file(code.co_filename):  # keeps the result in a local of its own for a moment
        return _Taker.CALLER
    following = _instructions_after(code, offset)
    opname, argument = next(following, ("", 0))
    while opname in ("COPY", "SWAP"):  # `a = b = f(x)`, `(a := f(x))`
        opname, argument = next(following, ("", 0))
    if opname == "RETURN_VALUE":
        return _Taker.CALLER
    if is_library_file(code.co_filename):
        return _Taker.NOBODY
    if opname == "UNPACK_SEQUENCE":
        names: list[str] = []
        for opname, argument in following:
            stored = _stored_names(code, opname, argument)
            if not stored or len(names) >= 32:
                break
            names += stored
        return tuple(names) or _Taker.NOBODY
    while opname.startswith("LOAD_"):  # `self.cache = f(x)` loads `self` before it stores
        opname, argument = next(following, ("", 0))
        if opname != "STORE_ATTR" and not opname.startswith("LOAD_"):
            return _Taker.NOBODY
    stored = _stored_names(code, opname, argument)
    return stored[0] if stored else _Taker.NOBODY


_taker = PerCode(_find_taker)


def find_global_names(code: CodeType) -> frozenset[str]:
    """Names that a function's code looks up, stores or deletes as globals."""
    return _global_names(code, 0)


def _find_global_names(code: CodeType, _: int) -> frozenset[str]:
    found = set()
    for opname, argument in _instructions_after(code, -2):
        if opname == "LOAD_GLOBAL":
            found.add(code.co_names[argument >> 1])  # the low bit asks for a NULL, from 3.11 on
        elif opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME"):
            found.add(code.co_names[argument])
    return frozenset(found)


_global_names = PerCode(_find_global_names)


# `"%*d" % (width, n)`: C asks for a width that is an int.
_STAR = re.compile(r"%[-+ #0]*(\*|\d*\.\*)")


def needs_plain_numbers(code: CodeType) -> bool:
    """Whether a function may tell an open number by its type, or calls C code that takes none.

    `type(self).count` doesn't tell, nor do `type(x).__name__`, `type(x) is list`, `str(type(x))`
    and `f"{type(x)}"`; nor does `type(x)(y)`, since the classes of open numbers make plain ones.
    NumPy asks an open number for functions of its own, and gets no other (values/functions.py).
    """
    if is_numpys_file(code.co_filename):
        return False
    if not _TAKE_PLAIN_NUMBERS.isdisjoint(code.co_names) or returns_plain_number(code):
        return True
    if code.co_name == "__hash__" and not {"hash", "id"} & {*code.co_names}:
        return True
    if any(type(text) is str and _STAR.search(text) for text in code.co_consts):
        return True
    return "type" in code.co_names and _tells_types(code, 0)


def differentiates_again(code: CodeType) -> bool:
    """Whether a code, or a function in it, says `create_graph=`."""
    return any(
        isinstance(names, tuple) and "create_graph" in names
        for each in all_codes(code)
        for names in each.co_consts
    )


def returns_plain_number(code: CodeType) -> bool:
    """Whether a function is a method from which Python takes nothing but a real int or float.

    The standard library has some: that of a Fraction.
    """
    return code.co_name in _RETURN_PLAIN_NUMBERS


def asks_for_modes(code: CodeType) -> bool:
    """Whether a function has one of torch's C functions by its name that ask for overrides."""
    return not _ASK_FOR_MODES.isdisjoint(find_global_names(code))


def asks_for_symbols(code: CodeType) -> bool:
    """Whether a function names torch's classes of symbols, of which open numbers are.

    Or it asks how much memory a number takes.
    """
    return not _OF_SYMBOLS.isdisjoint(code.co_names)


_OF_SYMBOLS = frozenset({"SymInt", "SymFloat", "getsizeof"})
_ASK_FOR_MODES = frozenset(
    {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
)
_RETURN_PLAIN_NUMBERS = frozenset({"__float__", "__int__", "__index__"})
# What these name raises for anything but a real int or float, or makes something else of it.
_TAKE_PLAIN_NUMBERS = frozenset(
    {
        *("datetime", "timedelta", "fromtimestamp", "gmtime", "localtime", "strftime"),
        *("datetime64", "timedelta64"),
        *("decimal", "Decimal", "statistics", "ldexp", "deque", "manual_seed", "pickle"),
    }
)


_Steps = list[tuple[str, Any]]  # names and arguments of instructions


def _find_types_told(code: CodeType, _: int) -> bool:
    kept = [step for step in find_steps(code) if step.opname not in _BESIDE_CALLS]
    steps = [(step.opname, step.argval) for step in kept]
    attributes = () if "builtins" in code.co_names else _ATTRIBUTES
    has_self = _has_self(code, steps)
    return any(
        name == "type" and opname not in attributes and _tells_type(steps, index, has_self)
        for index, (opname, name) in enumerate(steps)
        if not _constructs(kept[index:])
    )


_BESIDE_CALLS = ("PRECALL", "CACHE", "COPY", "PUSH_NULL", "KW_NAMES")


def _constructs(steps: list[dis.Instruction]) -> bool:
    """Whether code that begins with the name `type` is `type(x)(y)`: two calls from there on."""
    start = _start_of(steps[0])
    calls = [step.opname for step in steps[1:] if _start_of(step) == start][:2]
    return start != (None, None) and len(calls) == 2 and {*calls} <= _CALLS


def _start_of(step: dis.Instruction) -> tuple[int | None, int | None]:
    where = step.positions
    return (None, None) if where is None else (where.lineno, where.col_offset)


_CALLS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX"}


def _has_self(code: CodeType, steps: _Steps) -> bool:
    """Whether `self` is the object of a method: that of a user's class is no plain number."""
    *_, place, name = ("", *code.co_qualname.split("."))
    is_method = place not in ("", "<locals>") and name == code.co_name
    is_kept = {("STORE_FAST", "self"), ("STORE_DEREF", "self")}.isdisjoint(steps)
    return is_method and code.co_varnames[:1] == ("self",) and is_kept


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_FORMATS = ("FORMAT_VALUE", "CONVERT_VALUE", "FORMAT_SIMPLE")  # into an f-string
_TEXTS = (("LOAD_GLOBAL", "str"), ("LOAD_GLOBAL", "repr"))
_SAME = ("__name__", "__qualname__")  # the classes of open numbers have these of int and float


def makes_texts(code: CodeType) -> bool:
    """Whether a function may show what an object is: `repr(x)`, an f-string, `"%s" % x`."""
    if not _SHOW.isdisjoint(code.co_names) or not _FORMAT_CODES.isdisjoint(code.co_code[::2]):
        return True
    return any(type(text) is str and "%" in text for text in code.co_consts)


_SHOW = frozenset({"repr", "str", "format", "print", "ascii", "__repr__", "__str__", "__format__"})
_FORMAT_CODES = {dis.opmap.get(name) for name in (*_FORMATS, "FORMAT_WITH_SPEC")}


def _tells_type(steps: _Steps, index: int, has_self: bool) -> bool:
    """Whether what follows the name `type` may tell an int or a float from an open one."""
    is_text = steps[max(index - 1, 0)] in _TEXTS
    operand, steps = _split_operand(steps[index + 1 :])
    if steps[:1] != [("CALL", 1)] or len(steps) < 3:
        return True
    if has_self and operand in ([("LOAD_FAST", "self")], [("LOAD_DEREF", "self")]):
        return False
    opname, name = steps[1]
    if opname in _FORMATS or (is_text and steps[1] == ("CALL", 1)):
        return False  # <class 'int'>
    if opname in (*_ATTRIBUTES, "STORE_ATTR"):
        return name not in _SAME and (hasattr(int, name) or hasattr(float, name))
    path, steps = _split_path(steps[1:])
    is_asked = bool(steps) and steps[0][0] in ("IS_OP", "COMPARE_OP")
    is_other = len(path) > 1 or (bool(path) and type(getattr(builtins, path[0], 0)) is type)
    return not is_asked or not is_other or path[-1] in ("int", "float")


def _split_operand(steps: _Steps) -> tuple[_Steps, _Steps]:
    """The instructions that load `a.b[i].c`, and those after them; none where it is another."""
    depth = 0
    for end, (opname, _) in enumerate(steps):
        if opname == "BINARY_SUBSCR":
            depth -= 1
        elif opname.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CONST")):
            depth += 1
        elif opname not in _ATTRIBUTES:
            return (steps[:end], steps[end:]) if depth == 1 else ([], steps)
    return [], steps


def _split_path(steps: _Steps) -> tuple[list[Any], _Steps]:
    """The names of `a.b.c` that instructions load, and the instructions after them."""
    if not steps or not steps[0][0].startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF")):
        return [], steps
    end = 1
    while end < len(steps) and steps[end][0] in _ATTRIBUTES:
        end += 1
    return [name for _, name in steps[:end]], steps[end:]


_tells_types = PerCode(_find_types_told)


def _instructions_after(code: CodeType, offset: int) -> Iterator[tuple[str, int]]:
    """Instructions behind the one at `offset`, inline caches skipped, arguments extended."""
    raw = code.co_code
    argument = 0
    for at in range(offset + 2, len(raw), 2):
        opname = dis.opname[raw[at]]
        if opname == "CACHE":
            continue
        argument = argument << 8 | raw[at + 1]
        if opname == "EXTENDED_ARG":
            continue
        yield opname, argument
        argument = 0


def _stored_names(code: CodeType, opname: str, argument: int) -> list[str]:
    variables = code.co_varnames
    match opname:
        case "STORE_FAST":
            return [variables[argument]]
        case "STORE_FAST_STORE_FAST":  # 3.13 joins two stores into one instruction
            return [variables[argument >> 4], variables[argument & 15]]
        case "STORE_FAST_LOAD_FAST":
            return [variables[argument >> 4]]
        case "STORE_DEREF":
            cells = (*variables, *(c for c in code.co_cellvars if c not in variables))
            return [(*cells, *code.co_freevars)[argument]]
        case "STORE_NAME" | "STORE_GLOBAL" | "STORE_ATTR":
            return [code.co_names[argument]]
    return []


def find_steps(code: CodeType) -> Iterator[dis.Instruction]:
    """Instructions, each of one variable at most: from 3.13 on some load or store two."""
    for step in dis.get_instructions(code):
        verbs = [word for word in step.opname.split("_") if word in ("LOAD", "STORE")]
        if len(verbs) < 2:
            yield step
        else:  # STORE_FAST_LOAD_FAST
            for verb, name in zip(verbs, step.argval, strict=True):
                yield step._replace(opname=f"{verb}_FAST", argval=name)


# --- the lines that name a source ---


class ReadLine(NamedTuple):
    """A line of the user's that names a value."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"

    @property
    def text(self) -> str:
        """What stands there, as far as the file is still there."""
        return linecache.getline(self.file, self.line).strip()


class Lines:
    """Where names are first loaded in the code that ran; the user's lines before torch's."""

    def __init__(self, codes: list[CodeType]) -> None:
        self._codes = codes

    def find_name(self, name: object) -> ReadLine | None:
        """The line that names something."""
        return self._places.get(name) if isinstance(name, str) else None

    def find(self, source: Source) -> ReadLine | None:
        """The user's line that names a source, or else what leads to it; else torch's line."""
        found, step = None, cast("Source | None", source)
        while step is not None:
            place = self.find_name(step.key if isinstance(step, Item) else _name_of(step))
            if place is not None:
                if not is_library_file(place.file):
                    return place
                found = found or place
            step = step.base
        return found

    @cached_property
    def _places(self) -> dict[str, ReadLine]:
        places: dict[str, ReadLine] = {}
        for code in sorted(self._codes, key=lambda code: is_library_file(code.co_filename)):
            uses = find_uses(code)
            for name, line in (*uses.attributes.items(), *uses.globals.items()):
                places.setdefault(name, ReadLine(code.co_filename, line))
            for step in dis.get_instructions(code) if code.co_freevars else ():
                line_of = step.positions.lineno if step.positions is not None else None
                if step.argval in code.co_freevars and line_of is not None:
                    places.setdefault(step.argval, ReadLine(code.co_filename, line_of))
        return places


def _name_of(step: Source) -> str | None:
    return step.name if isinstance(step, (Attr, Global, Cell)) else None


class Fingerprint(Struct, frozen=True):
    """What a value was, in short: type and text."""

    cls: type
    text: str

    def __str__(self) -> str:
        return self.text


_COUNTED = (list, tuple, dict, set, frozenset)


def fingerprint(value: object) -> Fingerprint:
    """A value in short."""
    cls = type(value)
    if value is ABSENT or id(cls) in PLAIN:
        text = repr(value)
    elif id(cls) in PROXIES:  # what is asked of one that outlived its object raises
        text = f"{name_of(cls)} object"
    elif isinstance(value, torch.Tensor):
        text = f"tensor {meta_of(value)}"
    elif issubclass(cls, _COUNTED):
        base: Any = next(kind for kind in _COUNTED if issubclass(cls, kind))
        text = f"{name_of(cls)} of {base.__len__(value)}"  # a subclass may have code of its own
    elif isinstance(value, type):
        text = f"class {name_of(value)}"
    elif isinstance(value, FunctionType):
        text = f"function {value.__qualname__}"
    elif isinstance(value, CodeType):
        text = f"code of {value.co_qualname}"
    else:
        text = f"{name_of(cls)} object"
    return Fingerprint(cls, text if len(text) <= 60 else text[:57] + "...")


class Read(Struct, frozen=True):
    """One observation that compiled code depends on."""

    source: Source  # how to reach the value again
    seen: Fingerprint  # what it was
    where: ReadLine | None  # the user's line; None where no line names it
