"""Variation: what of a callable's calls varies, and so is left open when it is traced again.

The first trace is plain. If a call misses because a size, an int or a float differs from what
earlier traces found, that one is open in the next trace. With dynamic=True all of them are open
from the start, with dynamic=False none ever is. `torch._dynamo.mark_dynamic` and its kin are
heeded. What a run or its compiler had to close stays closed for the next few traces, then it is
tried again: another way through the program may leave it open.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextvars import ContextVar
from types import CodeType, FrameType, FunctionType, MemberDescriptorType
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from torch import nn

from tripwire.env import is_installed_file
from tripwire.errors import CannotTrace
from tripwire.ranges import SourceRange
from tripwire.reading.binding import build_binding
from tripwire.reading.effects import Volatile, refer_to
from tripwire.reading.holders import Holder, may_plant
from tripwire.reading.kinds import ABSENT, ElementsKind, ItemsKind, Kind
from tripwire.reading.reader import SWAPS_AT_ONCE
from tripwire.reading.sources import (
    Attr,
    Cell,
    Global,
    Item,
    Local,
    Referent,
    Roots,
    Running,
    Source,
    TypeOf,
)
from tripwire.reading.tensors import PLAIN_TENSORS, has_sizes
from tripwire.rulebook.refusals import GONE, Cause
from tripwire.tracing import Trace
from tripwire.tracing.casts import TAKING
from tripwire.tracing.open.draws import CAN_DRAW
from tripwire.tracing.open.opening import Opening, Place, Range, spell_place, spell_taken
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.values.classes import (
    FLOATS,
    NUMPY_FLOAT,
    find_in_class,
    ids_of,
    is_exactly,
    is_namedtuple,
    isinstance,
)
from tripwire.values.contents import (
    PROXIES,
    at_once,
    behind_proxy,
    bound_cells,
    dict_behind,
    elements_of,
    own_dict,
)
from tripwire.values.identity import PLAIN, VIEWS, is_builtin_method
from tripwire.values.numbers import are_variants, holds_numbers, iter_leaves, iter_numbers

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow

_MARKED_OPEN = ("dynamic", "weak_dynamic", "unbacked")  # as `_dynamo_dynamic_indices`
_FEW = 8  # places that are written at once, and may all be exchanged again
_LONG = 1000  # a list of which the numbers aren't looked at one by one
_REST = 3  # traces for which what was closed isn't opened again; each time so many times as many
Spot = tuple[int, Any]  # where a value lies: see Kind.spot
# Classes of most values that a run comes to: of numbers, they hold none that could be open.
_HOLD_NONE = ids_of(
    *(type(None), bool, str, dict, list, type, FunctionType, CodeType, weakref.ref),
    *(property, classmethod, staticmethod),
)


class Variation:
    """What of one callable's calls varies, as far as its traces and misses have shown."""

    def __init__(self, dynamic: bool | None, *, whole: bool = False) -> None:
        self._dynamic = dynamic
        self._whole = whole  # graphs are compiled as a whole
        self._shapes: dict[str, tuple[int, ...]] = {}  # of tensors, by path, as first found
        self._sources: dict[str, Source] = {}
        self._numbers: dict[str, object] = {}
        self._held: dict[str, Source] = {}  # where arguments hold numbers
        self._dims: dict[str, set[int]] = defaultdict(set)  # that vary
        self._ranges: dict[Place, Range] = {}  # of dims that are marked
        self._sizes: set[int] = set()  # of dims that vary
        self._varying: set[str] = set()  # numbers
        self._world: dict[Spot, _HeldNumber] = {}  # numbers that it holds
        self._moving: set[Spot] = set()  # those of them that vary
        self._fixed: dict[Spot, _Closing] = {}  # those that a run had to close
        self.fixing: set[str] = set()  # calls of these names fix a float behind a compiler
        self._static: set[Place] = set()  # as marked
        self._closed: dict[Place, _Closing] = {}  # what a run, or its compiler, had to close
        self._namespaces: dict[str, dict[str, Any]] = {}
        self._replaced: Counter[str] = Counter()  # how often something was put there
        self._exchanged: set[str] = set()  # paths of what is exchanged from call to call
        self._may_exchange = True
        self._stored: set[str] = set()  # paths of tensors that runs stored, and later ones find
        self._left: dict[str, tuple[Source, int]] = {}  # what runs left changed, by path: its spot
        self._gave_up = False
        self._failures: set[str] = set()  # of the back end
        self._takes = False  # numbers out of tensors were asked for, and differ, perhaps
        self._counts = False  # values decide on sizes
        self._may_take = True
        # Numbers out of tensors, by line: those of the first trace; None: they vary.
        self._taken: dict[str, tuple[int | float, ...] | None] = {}
        self._unsound: set[str] = set()  # lines of numbers that no call knows beforehand
        self._draws = False  # numbers out of Python's random generator were asked for
        self._may_draw = CAN_DRAW
        self._asks_for_types = self._compares_identity = self._compares_numbers = False
        self._has_numpys = False  # floats among what varies, perhaps

    def look(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Opening | None:
        """What to leave open in a trace of this call."""
        if self._dynamic is False or self._gave_up or self._compares_numbers:
            return None
        try:
            binding = build_binding(target)
            bound = binding.bind(args, kwargs)
        except (CannotTrace, TypeError):  # the call itself says why
            return None
        passed = set(binding.expressions(args, kwargs))
        roots = binding.roots(bound, self._namespaces)
        known = frozenset((*at_once(self._shapes.copy), *at_once(self._numbers.copy)))
        for path, tensor in self._find_tensors(roots):
            self._look_at_marks(path, tensor)
            self._compare(path, tensor)
        for source in at_once(self._held.values):  # other threads trace, too
            self._look_at_numbers(source, _find(source, roots))
        for value, source in binding.sources(bound):
            if isinstance(source, Local) and source.name not in passed:
                continue
            for step, item in _iter_items(value, source):
                self._look_at_numbers(step, item)
                if isinstance(item, torch.Tensor) and str(step) not in self._sources:
                    self._look_at_marks(str(step), item)
                    self._compare(str(step), item)
        for closing in (*at_once(self._closed.values), *at_once(self._fixed.values)):
            closing.rest -= 1
        dims = {
            path: frozenset(d for d in found if self._may_vary((path, d)))
            for path, found in at_once(self._dims.items)
        }
        are_told = self._asks_for_types
        varying = (path for path in self._varying if self._may_vary((path, None)))
        numbers = frozenset(() if are_told else varying)
        self._look_at_left(roots)
        found = self._look_at_world(roots)
        moving = set() if are_told or not _is_alone() else self._find_moving(traces=0)
        spots = {spot: found[spot] for spot in moving if self._may_open(found[spot])}
        takes = self._takes or (self._counts and bool(numbers or spots or any(dims.values())))
        opening = Opening(
            {path: found for path, found in dims.items() if found},
            numbers,
            spots,
            takes=takes and self._may_take and not are_told,
            taken=self._find_taken(),
            draws=self._draws and self._may_draw and not are_told,
            whole=self._whole,
            tuples=not self._compares_identity,
            known=known,
            stored=frozenset(at_once(self._stored.copy)),
            everything=bool(self._dynamic) and not are_told,
            sizes=frozenset(self._sizes),
            ranges=dict(at_once(self._ranges.items)),
            has_numpys=self._has_numpys,
        )
        return opening or None

    def _find_taken(self) -> dict[str, tuple[int | float, ...] | None]:
        """The numbers out of tensors, by line, that may be open where they are used as sizes."""
        resting = {path.rstrip("'") for path, _ in self._closed if not self._may_vary((path, None))}
        return {
            line: found
            for line, found in at_once(self._taken.items)
            if line not in self._unsound and spell_taken(line) not in resting
        }

    def _may_vary(self, place: Place) -> bool:
        closing = self._closed.get(place)
        return place not in self._static and (closing is None or closing.rest < 0)

    def _find_moving(self, *, traces: int) -> set[Spot]:
        """Numbers of the world that vary, and don't stay closed for so many traces more."""
        fixed = at_once(self._fixed.items)
        return self._moving - {spot for spot, closing in fixed if closing.rest >= traces}

    def _find_tensors(self, roots: Roots) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of this call that are where earlier traces found some."""
        for path, source in at_once(self._sources.items):
            found = _find(source, roots)
            if isinstance(found, torch.Tensor):
                yield path, found

    def _compare(self, path: str, tensor: torch.Tensor) -> None:
        if not has_sizes(tensor):
            return
        shape = tuple(tensor.shape)
        before = self._shapes.setdefault(path, shape)
        if self._dynamic:
            self._dims[path].update(range(len(shape)))
        elif len(before) == len(shape):
            for dim, (old, new) in enumerate(zip(before, shape, strict=True)):
                if old != new:
                    self._dims[path].add(dim)
                    self._sizes |= {old, new} - {0, 1}

    def _look_at_world(self, roots: Roots) -> dict[Spot, object]:
        """See which numbers that the world holds differ from what traces found; all as they are."""
        found: dict[Spot, object] = {}
        for spot, held in at_once(self._world.items):
            owner = held.find_owner(roots)
            if owner is None or held.kind.spot(owner, held.key) != spot:
                self._world.pop(spot, None)  # an identity may come again
                self._moving.discard(spot)
                self._fixed.pop(spot, None)
                self._note_exchanged(held.path)
                continue
            now = found[spot] = held.kind.get(owner, held.key)
            self._has_numpys |= any(is_exactly(one, NUMPY_FLOAT) for one in (now, held.value))
            if are_variants(now, held.value) and now != held.value and self._may_open(now):
                self._moving.add(spot)
        return found

    def _look_at_left(self, roots: Roots) -> None:
        """See whether others put something else in the place of what a run left changed."""
        for path, (source, spot) in at_once(self._left.items):
            owner = _find(source, roots)
            space = own_dict(owner)
            if owner is not None and spot != id(owner if space is None else space):
                self._left.pop(path, None)
                self._note_exchanged(source)

    def _may_open(self, value: object) -> bool:
        """Whether a run may get another object for it: a tuple's identity may matter."""
        return not self._compares_identity or is_exactly(value, int, *FLOATS)

    def _look_at_numbers(self, source: Source, value: object) -> None:
        """See which numbers that are passed differ from what traces found."""
        for path, number in iter_numbers(value, str(source)):
            before = self._numbers.setdefault(path, number)
            self._has_numpys |= is_exactly(number, NUMPY_FLOAT)
            if self._dynamic or (type(before) is type(number) and before != number):
                self._varying.add(path)

    def _look_at_marks(self, path: str, tensor: torch.Tensor) -> None:
        """What users said of a tensor with torch's own functions."""
        marks: Any = own_dict(tensor) or {}
        wanted = marks.get("_dynamo_dynamic_indices", ())
        for name in _MARKED_OPEN:
            self._dims[path].update(marks.get(f"_dynamo_{name}_indices", ()))
        for one in marks.get("_dynamo_dynamic_range", ()):
            self._ranges[path, one.dim] = one.min, one.max
        for dim in marks.get("_dynamo_static_indices", ()):
            if dim not in wanted:
                self._static.add((path, dim))

    def note(self, trace: Trace) -> None:
        """Remember what a trace found."""
        completion = trace.completion
        assert completion is not None
        self._namespaces = trace.namespaces
        carried = {str(one.source) for one in completion.effects.carried}
        for source, replaced in completion.effects.replaced:
            self._sources.setdefault(str(source), source)  # the run may have asked for its size
            self._shapes.setdefault(str(source), replaced.meta.shape)
            if str(source) not in carried:
                self._exchanged.add(str(source))  # for runs that read it and leave it there
        for wanted, sources in zip(trace.inputs, completion.sources, strict=True):
            is_state = any(anchored for _, anchored in sources)
            if is_state and not carried:
                continue  # paths of parameters are long, and there are many
            path = str(wanted.source)
            if path in carried or not is_state:
                self._sources.setdefault(path, wanted.source)
                self._shapes.setdefault(path, wanted.meta.shape)
        # `type(n) is int` tells an open number from a plain one.
        self._asks_for_types |= completion.asks_for_types
        self._compares_identity |= trace.reads.compares_identity
        # An open number is an object of its own each time, and of another type.
        self._compares_numbers = self._compares_numbers or trace.reads.compares_numbers
        self._note_numbers(trace)
        self._takes |= any(branch.op in TAKING or branch.instead for branch in trace.branches)
        self._note_taken(trace)
        facts: Iterable[NodeFacts | None] = (node.meta.get(FACTS) for node in trace.graph.nodes)
        self._counts |= any(one is not None and one.makes_size for one in facts)
        for volatile in completion.effects.volatile:  # the run itself leaves it changed
            if id(type(volatile.after)) in PLAIN_TENSORS:
                self._stored.add(str(volatile.source))
            spot, base = volatile.spot, volatile.source.base
            if spot is not None and base is not None:
                self._left[str(base)] = base, spot[0]
            if volatile.key is not ABSENT and _carries(volatile.before, volatile.after):
                self._exchanged.add(str(volatile.source))
            may_open = self._may_open(volatile.before)
            if spot in self._world and may_open and are_variants(volatile.before, volatile.after):
                self._moving.add(spot)

    def _note_taken(self, trace: Trace) -> None:
        """Remember the numbers that a run took out of tensors."""
        seen: dict[str, list[Any]] = {}
        if trace.shadow is not None:
            seen |= trace.shadow.soundings.seen
        else:
            for branch in trace.branches:
                if branch.op in TAKING:
                    seen.setdefault(branch.where.short, []).extend(iter_leaves(branch.value))
        for line, numbers in seen.items():
            if self._taken.setdefault(line, tuple(numbers)) != tuple(numbers):
                self._taken[line] = None

    def will_close(self, trace: Trace, where: SourceRange) -> bool:
        """Whether a number that can't be computed before a call will be closed next."""
        made = () if trace.shadow is None else trace.shadow.soundings.made
        lines = {one.branch.where.short for one in made}
        is_news = where.short in lines and where.short not in self._unsound
        self._unsound.add(where.short)
        return is_news

    def note_causes(self, causes: tuple[Cause, ...]) -> None:
        """Somebody put something else where entries read: it may be exchanged again and again.

        A model that is moved or loaded gets all its buffers at once, and then perhaps never again.
        """
        for cause in causes:
            path = str(cause.source)
            self._replaced[path] += 1
            if len(causes) <= _FEW or self._replaced[path] > 1:
                self._exchanged.add(path)
                if cause.new == GONE and isinstance(cause.source, Source):
                    self._note_exchanged(cause.source)

    def _note_exchanged(self, source: Source | None) -> None:
        """Another one is there now: its own place was written, or one above it."""
        while source is not None:
            self._exchanged.add(str(source))
            source = source.base

    def find_exchanged(self) -> frozenset[str]:
        """Paths of what others put in its place from call to call."""
        return frozenset(at_once(self._exchanged.copy)) if self._may_exchange else frozenset()

    def note_told(self, where: SourceRange) -> None:
        """Open numbers came near a function that could tell them: none are, from now on."""
        self._asks_for_types = True
        place = where.place
        self._compares_numbers |= place is None or not is_installed_file(place.file)

    def has_changed(self, trace: Trace) -> bool:
        """Whether a run got other objects than plain Python, and asked which they are."""
        shadow, reads = trace.shadow, trace.reads
        asks = reads.compares_numbers or (shadow and shadow.has_tuples and reads.compares_identity)
        return shadow is not None and bool(asks)

    def find_unmet(self, shadow: Shadow) -> list[Place]:
        """Sizes that are marked as dynamic, and that a run, or its compiler, had to close."""
        return [place for place in shadow.symbols.find_fixed() if place in self._ranges]

    def note_closed(self, shadow: Shadow, fixing: Set[str]) -> bool:
        """Remember what a run had to close; and its compiler, in calls of these names.

        Those run uncompiled in the next trace, which has their numbers open. Whether some are new.
        """
        closed, has_learned = shadow.symbols.closed, not self.fixing.issuperset(fixing)
        if has_learned:
            self.fixing |= fixing
            closed = {place: why for place, why in closed.items() if place not in shadow.fixed}
        before = {place: self._closed.pop(place, None) for place in shadow.symbols.find_open()}
        for place, why in closed.items():
            last = self._closed.get(place) or before.get(place)
            self._closed[place] = _close_for_longer(last, why)
        fixed = shadow.find_closed(closed.keys())
        for spot in {one.spot for one in shadow.planted} - fixed:
            self._fixed.pop(spot, None)
        for spot in fixed:
            self._fixed[spot] = _close_for_longer(self._fixed.get(spot))
        return has_learned

    def list_closed(self) -> list[str]:
        """What varies and isn't left open, with the line that needed its value."""
        closed = at_once(self._closed.items)
        return [f"{spell_place(*place)}: {closing.why}" for place, closing in closed]

    def _note_numbers(self, trace: Trace) -> None:
        """Remember the numbers that a run read out of what was there."""
        for holder in trace.reads.holders:
            if _HOLD_NONE.issuperset(map(id, map(type, holder.kept))):
                continue
            if not may_plant(holder.owner, holder.kind):
                continue
            numbers = [i for i, v in enumerate(holder.kept) if holds_numbers(v)]
            wanted = trace.reads.filter_of(holder) if numbers else None
            for index in numbers:
                key, value = holder.keys[index], holder.kept[index]
                if wanted is not None and key not in wanted:
                    continue
                if holder.anchored:
                    spot = holder.kind.spot(holder.owner, key)
                    self._world.setdefault(spot, _hold(holder, key, value))
                else:
                    source = holder.step(key)
                    self._held.setdefault(str(source), source)
                    for path, number in iter_numbers(value, str(source)):
                        self._numbers.setdefault(path, number)

    @property
    def _may_open_numbers(self) -> bool:
        """Whether any number may be open in the next trace."""
        is_told = self._asks_for_types or self._compares_numbers
        return self._dynamic is not False and not (self._gave_up or is_told)

    def will_open(self, trace: Trace, volatile: Iterable[Volatile]) -> bool:
        """Whether all that a run read and left changed are numbers, which will be open next."""
        if not (self._may_open_numbers and _is_alone()):
            return False
        opening, shadow = self._find_moving(traces=1), trace.shadow
        if shadow is not None:  # it needed their values, and so will the next
            opening -= shadow.find_closed(shadow.symbols.closed.keys())
        return all(one.spot in opening and holds_numbers(one.before) for one in volatile)

    def will_take(self) -> bool:
        """Whether numbers out of tensors will be open next."""
        return self._may_open_numbers and self._takes and self._may_take

    def will_draw(self) -> bool:
        """A run drew from Python's random generator. Whether what it draws will be open next."""
        has_drawn, self._draws = self._draws, True
        return self._may_open_numbers and self._may_draw and not has_drawn

    def give_up(self) -> None:
        """Leave less open: what is drawn, what is exchanged, what is in tensors, then nothing."""
        if self._draws and self._may_draw:
            self._may_draw = False
            return
        if self._exchanged and self._may_exchange:
            self._may_exchange = False
            return
        takes, self._may_take = (self._takes or self._counts) and self._may_take, False
        self._gave_up |= not takes

    def note_failure(self, reason: str) -> None:
        """The back end failed on a graph in which nothing is open: so what is open isn't why."""
        if reason not in self._failures:
            self._failures.add(reason)
            self._gave_up, self._may_take = False, True

    def fails_anyway(self, reason: str) -> bool:
        """Whether the back end failed for this reason where nothing was open."""
        return reason in self._failures


def _is_alone() -> bool:
    """Whether no other thread runs the user's code, which could read a number that is open.

    Libraries have threads that wait: Inductor, data loaders, notebooks. Should one wake up and call
    the user's code after all, then nothing that it writes is lost.
    """
    if not SWAPS_AT_ONCE:
        return threading.active_count() == 1
    others = sys._current_frames()
    others.pop(threading.get_ident(), None)
    return all(is_installed_file(file) for one in others.values() for file in _iter_files(one))


def _iter_files(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


class _Closing(Struct):
    """A size or a number that isn't left open for a while."""

    why: str
    length: int  # of the while, in traces
    rest: int  # of those, how many are left


def _close_for_longer(last: _Closing | None, why: str = "") -> _Closing:
    rest = _REST if last is None else last.length * _REST
    return _Closing(why, rest, rest)


class _HeldNumber(Struct, frozen=True):
    """A number that something of the world holds."""

    path: Source | None  # of what holds it
    find_owner: Callable[[Roots], object]
    kind: Kind
    key: Any
    value: object  # as a trace found it


def _hold(holder: Holder, key: Any, value: object) -> _HeldNumber:
    find, refer = functools.partial(_find, holder.path), refer_to(holder.owner)
    is_container = isinstance(holder.kind, (ItemsKind, ElementsKind))  # nothing refers to it weakly
    find_owner = find if is_container else lambda roots: refer()
    return _HeldNumber(holder.path, find_owner, holder.kind, key, value)


def _iter_items(value: Any, source: Source) -> Iterator[tuple[Source, Any]]:
    """What was passed, and what is in it where it is a container."""
    found, seen = [(value, source)], set()
    while found:
        value, source = found.pop()
        if is_exactly(value, dict, list, tuple) and id(value) not in seen:
            seen.add(id(value))
            items: Iterable[tuple[Any, Any]] = (
                at_once(value.items) if is_exactly(value, dict) else enumerate(tuple(value))
            )
            if len(value) > _LONG:
                items = ((key, item) for key, item in items if id(type(item)) not in PLAIN)
            found += [(item, Item(source, key)) for key, item in items if is_exactly(key, str, int)]
        yield source, value


def _find(source: Source | None, roots: Roots) -> object:
    """What a path leads to, found without running any code of the user's; None if that fails."""
    if isinstance(source, Local):
        return roots.locals.get(source.name)
    if isinstance(source, Global):
        return roots.namespaces.get(source.module, {}).get(source.name)
    if isinstance(source, Cell):
        function = roots.function if source.function is None else _find(source.function, roots)
        return bound_cells(function).get(source.name)
    if isinstance(source, Running):
        return roots.function if source.is_traced(roots) else None
    if isinstance(source, TypeOf):
        return type(_find(source.owner, roots))
    if isinstance(source, Referent):
        reference: Any = _find(source.owner, roots)
        if id(type(reference)) in PROXIES:
            return behind_proxy(reference)
        if is_exactly(reference, ContextVar):
            return reference.get(None)
        return reference() if is_exactly(reference, weakref.ref) else None
    if isinstance(source, Attr):
        return _find_attribute(_find(source.owner, roots), source.name)
    if isinstance(source, Item):
        owner = _find(source.owner, roots)
        if isinstance(owner, dict):
            return dict.get(owner, source.key)
        base: Any = next((one for one in (list, tuple, deque) if isinstance(owner, one)), None)
        if base is not None and is_exactly(source.key, int):
            return base.__getitem__(owner, source.key) if source.key < base.__len__(owner) else None
        if isinstance(owner, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return owner._modules.get(str(source.key))
    return None


def _find_attribute(owner: Any, name: str) -> object:
    if is_namedtuple(type(owner)) and name in type(owner)._fields:
        return tuple.__getitem__(owner, type(owner)._fields.index(name))
    if is_exactly(owner, *VIEWS):
        return dict_behind(owner.mapping) if name == "mapping" else None
    if is_builtin_method(owner):
        return owner.__self__ if name == "__self__" else None
    spaces: list[Any] = [own_dict(owner) or {}]
    if isinstance(owner, nn.Module):
        spaces += [spaces[0].get(table, {}) for table in ("_buffers", "_modules")]
    for space in spaces:
        if name in space:
            return space[name]
    found = find_in_class(owner if isinstance(owner, type) else type(owner), name)
    if not is_exactly(found, MemberDescriptorType):
        return found
    try:
        return found.__get__(owner)  # type: ignore[attr-defined]
    except AttributeError:  # an empty slot
        return None


def _carries(before: object, after: object) -> bool:
    """Whether a run left a container of tensors where it found one of the same structure."""
    if type(before) is not type(after) or not is_exactly(before, tuple, list, dict):
        return False
    if isinstance(before, dict):
        assert isinstance(after, dict)
        if not all(type(key) is str for key in before) or list(before) != list(after):
            return False
        before, after = tuple(before.values()), tuple(after.values())
    old, new = elements_of(before), elements_of(after)
    return bool(old) and len(old) == len(new) and all(map(_is_tensor_or_carries, old, new))


def _is_tensor_or_carries(before: object, after: object) -> bool:
    types = id(type(before)), id(type(after))
    return all(one in PLAIN_TENSORS for one in types) or _carries(before, after)
