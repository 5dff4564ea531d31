"""Opening: which sizes and numbers of a call are left open, and what the graph gets for them.

No open number outlives its run: whatever holds one when the run is over holds its plain value from
then on (`Sweep`).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field

from tripwire.env import (
    LOCALS_ARE_COPIES,
    is_installed_file,
    is_library_file,
    is_numpys_file,
    is_own_code,
)
from tripwire.ranges import SourceRange
from tripwire.reading.bytecode import find_uses
from tripwire.reading.effects import WrittenHolder
from tripwire.reading.kinds import MEMO, is_link
from tripwire.reading.names import (
    asks_for_modes,
    asks_for_symbols,
    needs_plain_numbers,
    returns_plain_number,
)
from tripwire.rulebook.rules import words
from tripwire.values.classes import class_dict, is_namedtuple, isinstance
from tripwire.values.contents import elements_of, filled_slots, own_dict

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


LARGEST_OPEN = 2**31 - 1  # int, of either sign: a product of two is one that torch takes
# In the meta of a graph's nodes:
OPEN_INPUT = "tripwire_open_input"  # of an input: its OpenTensor
FAKE = "tripwire_fake"  # of a call: its result in the shadow, where it has open sizes
FORMED = "tripwire_formed"  # of a call: only a formula tells its form, so it runs as it is
NUMBER = "tripwire_number"  # of a number that is open: its NumberInput, or None


# Calls that compute with a number, and don't take it for a size.
ARITHMETIC = words(
    "add add_ sub sub_ mul mul_ div div_ true_divide rsub __radd__ __rsub__ __rmul__ __rtruediv__ "
    "__add__ __sub__ __mul__ __truediv__ __iadd__ __isub__ __imul__ __itruediv__ "
    "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
)

# Those that take a float of NumPy's for one of Python's.
OF_NUMPYS = ARITHMETIC | words(
    "pow pow_ __pow__ __ipow__ lerp lerp_ clamp clamp_ addcmul addcmul_ addcdiv addcdiv_ "
    "_foreach_add _foreach_add_ _foreach_sub _foreach_sub_ _foreach_mul _foreach_mul_ "
    "_foreach_div _foreach_div_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_lerp_"
)

Range = tuple[int | None, int | None]  # from, to; None: without an end
Place = tuple[str, int | None]  # a path, and which of the sizes there


def spell_taken(line: str) -> str:
    """What a number out of a tensor is called in place of a path, by the line that took it."""
    return f"a number out of a tensor ({line})"


def spell_place(path: str, dim: int | None) -> str:
    """A place as users write it: `x.shape[0]`."""
    return path if dim is None else f"{path}.shape[{dim}]"


class Opening(Struct, frozen=True):
    """What of a call is left open, by the paths that lead there."""

    dims: Mapping[str, frozenset[int]] = field(default_factory=dict)  # of tensors
    numbers: frozenset[str] = frozenset()
    # Of the world, which is the same on every call: what lies where, before the call.
    spots: Mapping[tuple[int, Any], object] = field(default_factory=dict)
    takes: bool = False  # numbers out of tensors
    # Of these, by the line that takes them, what a trace found there; None: they vary. Where others
    # are found, they are left open also where they are used as sizes.
    taken: Mapping[str, tuple[int | float, ...] | None] = field(default_factory=dict)
    draws: bool = False  # numbers out of Python's random generator
    ranges: Mapping[tuple[str, int | None], Range] = field(default_factory=dict)  # of sizes
    whole: bool = False  # the graph is compiled as a whole: no call may run as it is
    has_numpys: bool = False  # a float among them may be NumPy's
    tuples: bool = True  # the run may get another tuple, with open numbers, for one of numbers

    # Of what no trace has found before, and is passed in an object, or was stored by an earlier
    # run: whether all of it is open; else which sizes, since others that were equal to these
    # differ from call to call.
    known: frozenset[str] = frozenset()  # paths that traces have found
    stored: frozenset[str] = frozenset()
    everything: bool = False
    sizes: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        known = self.dims or self.numbers or self.spots or self.takes or self.draws
        return bool(known or self.everything or self.sizes)

    def is_told_by(self, code: CodeType) -> bool:
        """Whether a function may tell an open number: by `type`, or by `is` of two variables.

        Or it asks which of its arguments override torch's functions, and open numbers do.
        Installed packages ask no size for its type, and compare objects. By its name, too, the type
        of a float of NumPy's isn't that of an open number.
        """
        file = code.co_filename
        if is_own_code(code):
            return False
        has_numbers = bool(self.numbers or self.spots or self.takes or self.draws)
        if is_library_file(file):
            return has_numbers and returns_plain_number(code)
        if asks_for_modes(code):
            return True
        if self.has_numpys and "type" in code.co_names and not is_numpys_file(file):
            return True
        if is_installed_file(file):
            return has_numbers and needs_plain_numbers(code)
        if asks_for_symbols(code):
            return True
        return needs_plain_numbers(code) or () in find_uses(code).identities

    def wants_number(self, path: str) -> bool:
        """Whether a number that is passed is left open."""
        return path in self.numbers or (self.everything and path not in self.known)

    def takes_another(self, line: str, place: int, value: int | float) -> bool:
        """Whether a number out of a tensor, the first at its line or a later one, varies."""
        known = self.taken.get(line, ())
        return known is None or (place < len(known) and known[place] != value)

    def choose_dims(self, path: str, shape: Sequence[int], *, is_passed: bool) -> frozenset[int]:
        """Which sizes of a tensor are left open."""
        if path in self.dims or path in self.known or not (is_passed or path in self.stored):
            return self.dims.get(path, frozenset())
        found = enumerate(shape)
        everything = self.everything and is_passed
        return frozenset(dim for dim, size in found if everything or size in self.sizes)


class Decision(Struct, frozen=True):
    """A question that the run asked about open numbers, or one that it closed."""

    text: str  # s0 < 512
    where: SourceRange
    closed_by: str = ""  # what needed the value, where the number was closed

    def __str__(self) -> str:
        if self.closed_by:
            place = f" at {self.where.short}" if self.where.place is not None else ""
            return f"closed{place} by {self.closed_by}: {self.text}"
        return f"decided at {self.where.short}: {self.text}"


class OpenTensor(Struct):
    """A tensor of the call whose sizes are open."""

    label: str  # its name in conditions
    fake: FakeTensor
    ref: weakref.ref[torch.Tensor] | None  # until the entry is made


class OpenNumber(Struct, frozen=True):
    """An int or a float of the call that is open."""

    label: str
    symbol: torch.SymInt | torch.SymFloat
    kind: type

    def was(self, value: object) -> bool:
        """Whether it was this in the run: a path may lead to two places."""
        return type(value) is self.kind and value == self.symbol.node.hint


class Planted(Struct, frozen=True):
    """A number that the world holds and that is open, or a tuple with some; where calls find it."""

    place: WrittenHolder
    key: Any
    path: str
    spot: tuple[int, Any]
    value: Any  # as the run found it
    label: str  # its name in guards


class NumberInput(Struct, frozen=True):
    """An input of the graph that is a number."""

    name: str
    expression: str  # of the guard function's variables
    symbol: torch.SymInt | torch.SymFloat

    @property
    def is_float(self) -> bool:
        """A float goes into a graph as a tensor, as torch's compilers want it."""
        return isinstance(self.symbol, torch.SymFloat)

    @property
    def value(self) -> Any:
        """What the graph got for it in the run."""
        value = self.symbol.node.hint
        return torch.tensor(value, dtype=torch.float64) if self.is_float else value

    def build_example(self, mode: FakeTensorMode, *, is_known: bool) -> Any:
        """What a compiler gets for it; it may fix a float that is known as this one."""
        if not self.is_float:
            return self.symbol
        example = mode.from_tensor(torch.tensor(0.0, dtype=torch.float64), static_shapes=True)
        if is_known:
            with mode:
                example.item_memo = self.symbol
        return example


# --- open numbers leave the world ---


_TupleIterator = type(iter(()))
_SetIterator: type = type(iter(frozenset()))
_OF_ERRORS = ("args", "value", "code")  # of StopIteration, of SystemExit
_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
_WORD = ctypes.sizeof(ctypes.c_void_p)
_HERE = sys.modules[__name__]  # `sys.modules` refers to it
_BOUND = (MethodWrapperType, BuiltinMethodType)


def _rebind(method: Any, find: Callable[[object], Any]) -> object:
    """A method of what comes in its owner's place; which has its own where its class is another."""
    owner, name = find(method.__self__), ""
    if isinstance(method, _BOUND):
        name = method.__name__
    elif type(owner) is not type(method.__self__):
        spaces = (class_dict(cls) for cls in type(method.__self__).__mro__)
        items = (item for space in spaces for item in space.items())
        name = next((name for name, value in items if value is method.__func__), "")
    return getattr(owner, name) if name else MethodType(method.__func__, owner)


# What can't be changed is made again.
_REBUILT: dict[type, Callable[[Any, Callable[[object], Any]], object]] = {
    frozenset: lambda held, find: frozenset(map(find, held)),
    slice: lambda held, find: slice(find(held.start), find(held.stop), find(held.step)),
    **dict.fromkeys((MethodType, *_BOUND), _rebind),
}


# Iterators, itemgetters and their like.
_OF_PYTHON = frozenset(
    {"builtins", "itertools", "operator", "_operator", "functools", "_functools", "types"}
)
_LEFT_ALONE = (FrameType, CodeType, GeneratorType, FunctionType, ModuleType, type)


def _words_of(holder: object) -> Any:
    """An object's memory, without what it has allocated elsewhere."""
    return (ctypes.c_void_p * (type(holder).__basicsize__ // _WORD)).from_address(id(holder))


def _items_of(unfinished: tuple[Any, ...]) -> Any:
    """A tuple's items in memory: Python crashes where it looks at one that isn't there yet."""
    start = id(unfinished) + tuple.__basicsize__
    return (ctypes.c_void_p * len(unfinished)).from_address(start)


class Sweep:
    """Replaces open numbers by plain ones, wherever they are held."""

    def __init__(
        self, numbers: list[Any], tuples: dict[int, object], known: Sequence[object] = ()
    ) -> None:
        self._numbers = numbers
        self._known = known  # what may hold some, and isn't found after `gc.freeze`
        self._tuples = tuples  # with open numbers, by identity: what to put in their place
        self._replaced = {id(number): number.value for number in numbers}
        self._old: list[object] = list(numbers)  # alive, so that identities stay theirs

    def run(self, result: object) -> object:
        """Everywhere, and in a result; which may be another object then."""
        fresh: list[object] = list(self._numbers)
        while fresh:
            # A tuple of our own: 3.13 counts what a list is unpacked into.
            asked = (*fresh, _HERE)
            mine = {id(fresh), id(asked), id(self._old), id(self._numbers), id(self.__dict__)}
            holders = [h for h in gc.get_referrers(*asked) if id(h) not in mine]
            # The collector doesn't know who holds what once a program called `gc.freeze`. It would
            # count all that is frozen to say so: 37 ms for 365,000 objects.
            if not any(holder is sys.modules for holder in holders):
                holders += self._known
            fresh = []
            for holder in holders:
                self._replace_in(holder, fresh)
            holders.clear()
        for variable, value in copy_context().items():
            if id(value) in self._replaced:
                variable.set(self._find(value))
        return self._replaced.get(id(result), result)

    def run_in(self, frame: FrameType | None, end: CodeType) -> None:
        """Everywhere, and in variables of functions that run; up to one with a code."""
        self.run(None)
        while frame is not None and frame.f_code is not end:
            if not is_own_code(frame.f_code):
                self._replace_variables(frame)
            frame = frame.f_back

    def _replace_variables(self, frame: FrameType) -> None:
        variables: Any = frame.f_locals
        found = {name: self._find(value) for name, value in variables.items()}
        changed = [name for name, value in found.items() if value is not variables[name]]
        for name in changed:
            variables[name] = found[name]
        if changed and LOCALS_ARE_COPIES:
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), 0)

    def _find(self, value: object) -> Any:
        return self._replaced.get(id(value), value)

    @staticmethod
    def _put(space: dict[Any, Any], key: Any, value: object) -> None:
        """Into a dict; past it where it is a class's, which remembers what it held."""
        classes = gc.get_referrers(space) if "__module__" in space else ()
        for cls in classes:
            if isinstance(cls, type) and gc.get_referents(class_dict(cls))[0] is space:
                type.__setattr__(cls, key, value)
                return
        dict.__setitem__(space, key, value)

    def _replace_parts(self, holder: Any) -> None:
        """What an object holds besides attributes and slots."""
        if isinstance(holder, BaseException):
            for name in _OF_ERRORS:
                part: Any = getattr(type(holder), name, None)
                value = part.__get__(holder) if type(part) in _DESCRIPTORS else None
                if id(value) in self._replaced:
                    part.__set__(holder, self._find(value))
        elif isinstance(holder, FunctionType):
            if id(holder.__defaults__) in self._replaced:
                holder.__defaults__ = self._find(holder.__defaults__)
        elif isinstance(holder, GeneratorType) and holder.gi_frame is not None:
            self._replace_variables(holder.gi_frame)

    def _replace_in_link(self, link: Any) -> None:
        """In an entry of an lru_cache: its key and its result are the last that it has."""
        words = type(link).__basicsize__ // _WORD
        self._replace_words(_words_of(link), (words - 2, words - 1))

    def _replace_in_part(self, holder: object) -> None:
        """In an object of Python's own that has no other way in: an itemgetter, a count."""
        if type(holder).__module__ not in _OF_PYTHON or isinstance(holder, _LEFT_ALONE):
            return
        held = [id(one) for one in gc.get_referents(holder) if id(one) in self._replaced]
        memory = _words_of(holder)
        places = [place for place in range(2, len(memory)) if memory[place] in held]
        if len(places) == len(held):  # each word is one of its references
            self._replace_words(memory, places)

    def _replace_words(self, memory: Any, places: Iterable[int]) -> None:
        for place in places:
            old = memory[place]
            if old in self._replaced:
                new = ctypes.py_object(self._replaced[old])
                ctypes.pythonapi.Py_IncRef(new)
                memory[place] = id(new.value)
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._alive(old)))

    def _alive(self, identity: int) -> object:
        return next(old for old in self._old if id(old) == identity)

    def _stand_in(self, made: object, holder: object, fresh: list[object]) -> None:
        """Put another object in the place of a holder that can't be changed, wherever it is."""
        self._replaced[id(holder)] = made
        self._old.append(holder)
        fresh.append(holder)

    def _replace_in(self, holder: Any, fresh: list[object]) -> None:
        if type(holder) is tuple and len(gc.get_referents(holder)) < len(holder):
            self._replace_words(_items_of(holder), range(len(holder)))  # it is being filled
        elif isinstance(holder, tuple):
            if id(holder) not in self._replaced and any(id(i) in self._replaced for i in holder):
                items = [self._find(item) for item in tuple.__iter__(holder)]
                cls = type(holder)
                made = tuple.__new__(cls, items) if is_namedtuple(cls) else cls(items)
                known = self._tuples.get(id(holder), holder)
                self._stand_in(made if known is holder else known, holder, fresh)
        elif type(holder) in _BOUND and type(self._find(holder.__self__)) is type(holder.__self__):
            self._replace_in_part(holder)
        elif type(holder) in _REBUILT:
            if id(holder) not in self._replaced:
                self._stand_in(_REBUILT[type(holder)](holder, self._find), holder, fresh)
        elif isinstance(holder, functools.partial):
            state = holder.func, self._find(holder.args), holder.keywords, own_dict(holder)
            holder.__setstate__(state)  # type: ignore[attr-defined]
        elif isinstance(holder, functools._lru_cache_wrapper):
            for link in filter(is_link, MEMO.space_of(holder).values()):
                self._replace_in_link(link)
        elif type(holder) is _TupleIterator:
            parts: Any = holder.__reduce__()
            _, (held,), at = parts
            iterator = iter(self._find(held))
            iterator.__setstate__(at)
            self._stand_in(iterator, holder, fresh)
        elif type(holder) is _SetIterator:
            told: Any = holder.__reduce__()
            _, (left,) = told  # another set has another order
            self._stand_in(iter([self._find(item) for item in left]), holder, fresh)
        elif isinstance(holder, dict):
            if any(id(key) in self._replaced for key in dict.keys(holder)):
                items = [(self._find(k), self._find(v)) for k, v in dict.items(holder)]
                dict.clear(holder)
                dict.update(holder, items)
            for key, value in list(dict.items(holder)):
                if id(value) in self._replaced:
                    self._put(holder, key, self._find(value))
        elif isinstance(holder, (list, deque)):
            kind: Any = list if isinstance(holder, list) else deque
            for index, value in enumerate(elements_of(holder)):
                if id(value) in self._replaced:
                    kind.__setitem__(holder, index, self._find(value))
        elif isinstance(holder, set):
            for value in elements_of(holder):
                if id(value) in self._replaced:
                    set.discard(holder, value)
                    set.add(holder, self._find(value))
        elif isinstance(holder, CellType):
            holder.cell_contents = self._find(holder.cell_contents)
        else:
            self._replace_parts(holder)
            space = own_dict(holder)
            if space is not None:
                self._replace_in(space, fresh)
            for slot, value in filled_slots(holder):
                if id(value) in self._replaced:
                    slot.__set__(holder, self._find(value))
            self._replace_in_part(holder)
