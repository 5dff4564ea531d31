"""Effects: the writes of a run, as steps that do the same again on a later call.

An effect is the difference between what a holder held before the run and after it. It is
repeated on the holder itself, without the user's `__setattr__`: what that did is an effect
of its own. Values are planned together with the result, so that an object that was stored and
returned is one object again.

A source that the run reads and changes is *volatile*: the next call finds another value than this
one did. Counters that are only counted (`self.step += 1`), lists that only grow, and tensors that
carry state from call to call can be compiled; others can't.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from msgspec import Struct, field

from tripwire.reading.holders import Holder, TensorFacts, Write
from tripwire.reading.kinds import (
    ABSENT,
    ELEMENTS,
    AttributesKind,
    ClassDictKind,
    ElementsKind,
    ItemsKind,
    Kind,
    MembersKind,
    NamesKind,
    SlotsKind,
)
from tripwire.reading.reads import ReadSet
from tripwire.reading.sources import Source
from tripwire.reading.stores import SHARED
from tripwire.reading.structure import Building, PartPlan, Unbuildable
from tripwire.rulebook.refusals import Refused
from tripwire.values.classes import is_exactly, isinstance
from tripwire.values.contents import at_once, elements_of, own_dict
from tripwire.values.identity import PLAIN, same_plain


class WrittenHolder(Struct, frozen=True):
    """A holder, as a later call finds it: itself where it is anchored, else by its path."""

    kind: Kind
    path: Source | None
    owner: Callable[[], object] | None  # None: fetched by path

    def find(self, building: Building) -> Any:
        """The holder of this call."""
        if self.owner is not None:
            return self.owner()
        assert self.path is not None
        return building.fetched[self.path]


def place_of(holder: Holder) -> WrittenHolder:
    """Where a holder is on later calls."""
    return WrittenHolder(
        holder.kind, holder.path, refer_to(holder.owner) if holder.anchored else None
    )


def refer_to(value: object) -> Callable[[], object]:
    """A reference that keeps nothing alive, where Python allows one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


class EffectStep(Struct, frozen=True):
    """One write, to be done again."""

    def apply(self, building: Building) -> None:
        """Write, with this call's values."""
        raise NotImplementedError


class Put(EffectStep, frozen=True):
    """A value under a key."""

    place: WrittenHolder
    key: Any  # or a plan, where it may be another object in each call
    value: PartPlan

    def apply(self, building: Building) -> None:
        key = _find_key(self.key, building)
        self.place.kind.put(self.place.find(building), key, self.value.build(building))


class Drop(EffectStep, frozen=True):
    """A key that is no longer there."""

    place: WrittenHolder
    key: Any  # or a plan

    def apply(self, building: Building) -> None:
        self.place.kind.drop(self.place.find(building), _find_key(self.key, building))


def _find_key(key: Any, building: Building) -> Any:
    return key.build(building) if isinstance(key, PartPlan) else key


def _is_plain_key(key: object) -> bool:
    """Whether a key is the same in each call: it is a value, and no object of the call's."""
    if is_exactly(key, tuple, frozenset):
        return all(map(_is_plain_key, key))  # type: ignore[call-overload]
    return id(type(key)) in PLAIN


class Extend(EffectStep, frozen=True):
    """Elements at the end of a list."""

    place: WrittenHolder
    values: tuple[PartPlan, ...]

    def apply(self, building: Building) -> None:
        built = [value.build(building) for value in self.values]
        ELEMENTS.extend(self.place.find(building), built)


class Replace(EffectStep, frozen=True):
    """All elements of a list."""

    place: WrittenHolder
    values: tuple[PartPlan, ...]

    def apply(self, building: Building) -> None:
        ELEMENTS.replace(
            self.place.find(building), [value.build(building) for value in self.values]
        )


class Rewrite(EffectStep, frozen=True):
    """All items of a dict, in a new order."""

    place: WrittenHolder
    items: tuple[tuple[Any, PartPlan], ...]

    def apply(self, building: Building) -> None:
        owner = self.place.find(building)
        built = [(_find_key(key, building), value.build(building)) for key, value in self.items]
        for key in self.place.kind.read(owner)[0]:
            self.place.kind.drop(owner, key)
        for key, value in built:
            self.place.kind.put(owner, key, value)


class Count(EffectStep, frozen=True):
    """A counter that the run only adds to: its old value doesn't matter."""

    place: WrittenHolder
    key: Any
    amount: Any

    def apply(self, building: Building) -> None:
        owner = self.place.find(building)
        now: Any = self.place.kind.get(owner, self.key)
        self.place.kind.put(owner, self.key, now + self.amount)


class Mark(EffectStep, frozen=True):
    """A Python attribute of a tensor, which the graph returns so that it can be marked."""

    tensor: PartPlan
    name: str
    value: PartPlan

    def apply(self, building: Building) -> None:
        self.tensor.build(building).__dict__[self.name] = self.value.build(building)


class Unmark(EffectStep, frozen=True):
    """An attribute that a tensor no longer has."""

    tensor: PartPlan
    name: str

    def apply(self, building: Building) -> None:
        self.tensor.build(building).__dict__.pop(self.name, None)


class Carried(Struct, frozen=True):
    """A tensor that the run replaces: fetched on every call, and any of its kind will do."""

    place: WrittenHolder
    key: Any
    source: Source
    facts: TensorFacts
    attributes: dict[str, object]  # Python's own, of the tensor that was replaced
    spot: tuple[int, Any]  # where it lies, see Kind.spot


class Counted(Struct, frozen=True):
    """A counter; it must stay a number of its type."""

    place: WrittenHolder
    key: Any
    source: Source
    cls: type


class Volatile(Struct, frozen=True):
    """A source that the run read and changed."""

    source: Source
    before: object
    after: object
    holder: int  # its identity
    key: Any
    repeated: bool = True  # compiled code leaves it changed, too
    spot: tuple[int, Any] | None = None  # of what the run itself writes: see Kind.spot


class Effects(Struct, frozen=True):
    """Everything that a run wrote outside tensors."""

    steps: tuple[EffectStep, ...]
    carried: tuple[Carried, ...]
    counted: tuple[Counted, ...]
    counted_keys: frozenset[tuple[int, Any]]  # of those, and of counters in arguments
    volatile: tuple[Volatile, ...]
    written: frozenset[tuple[int, Any]]  # (holder's identity, key): no longer what was read
    # Tensors of the world in whose place the run left something else, read or not.
    replaced: tuple[tuple[Source, TensorFacts], ...]


def plan_effects(
    writes: Iterable[Write],
    reads: ReadSet,
    plan: Callable[[object], PartPlan],
    facts_of: Callable[[Holder, Any], TensorFacts | None],
    attributes_of: Callable[[object], dict[str, object]],
    inner: Iterable[Write],
    was_open: Callable[[Holder, Any], bool],
    is_open: Callable[[Holder, Any], bool],
) -> Effects:
    """The steps that repeat these writes.

    `facts_of` knows tensors that are gone by now, `attributes_of` what a tensor held before.
    `inner`: what code that runs again on each call writes by itself.
    `was_open`: whether an open number lay there before. `is_open`: of those that are the same on
    every call: whether it was left open, so that it may be another one each time.
    """
    planner = _EffectPlanner(reads, plan, facts_of, attributes_of, was_open, is_open)
    writes = [write for write in writes if not planner.is_nothing(write)]
    for write in inner:
        planner.add_inner(write)
    planner.note_shared(writes)
    for _, group in groupby(writes, key=lambda write: id(write.holder)):
        together = list(group)
        try:
            planner.add(together)
        except Unbuildable as error:
            raise error.of_write(_find_unbuildable(together, plan)) from None
    return Effects(
        tuple(planner.steps),
        tuple(planner.carried),
        tuple(planner.counted),
        frozenset(planner.counted_keys),
        tuple(planner.volatile),
        frozenset(planner.written),
        tuple(planner.replaced),
    )


def _find_unbuildable(writes: list[Write], plan: Callable[[object], PartPlan]) -> Source:
    """Where the run wrote what no plan can build."""
    for write in writes:
        try:
            plan(write.after)
        except Unbuildable:
            return write.source
    return writes[0].source


def plan_marks(
    tensor: torch.Tensor, before: dict[str, object], plan: Callable[[object], PartPlan]
) -> Iterator[EffectStep]:
    """The steps that give a tensor the attributes that it has now."""
    now = own_dict(tensor) or {}
    for name in before.keys() - now.keys():
        yield Unmark(plan(tensor), name)
    for name, value in at_once(now.items):
        if name not in before or before[name] is not value:
            yield Mark(plan(tensor), name, plan(value))


class _EffectPlanner(Struct, eq=False):
    reads: ReadSet
    plan: Callable[[object], PartPlan]
    facts_of: Callable[[Holder, Any], TensorFacts | None]
    attributes_of: Callable[[object], dict[str, object]]
    was_open: Callable[[Holder, Any], bool]
    is_open: Callable[[Holder, Any], bool]
    steps: list[EffectStep] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)
    counted_keys: set[tuple[int, Any]] = field(default_factory=set)
    volatile: list[Volatile] = field(default_factory=list)
    written: set[tuple[int, Any]] = field(default_factory=set)
    replaced: list[tuple[Source, TensorFacts]] = field(default_factory=list)
    writes_at: dict[tuple[int, Any], list[Write]] = field(default_factory=dict)  # by spot

    def is_nothing(self, write: Write) -> bool:
        """Whether a tuple was replaced by its equal, and the run doesn't ask which one it is.

        What the run doesn't read is written, too: other code may read it.
        """
        if write.before is write.after or self.reads.compares_identity:
            return False
        if self.was_open(write.holder, write.key):  # equal by chance
            return False
        return same_plain(write.before, write.after) and self._is_read(write)

    def note_shared(self, writes: list[Write]) -> None:
        """Look which writes are one: a cell of two functions, an object and its `__dict__`."""
        for write in writes:
            self.writes_at.setdefault(write.spot, []).append(write)

    def add(self, writes: list[Write]) -> None:
        """Plan the writes to one holder."""
        holder = writes[0].holder
        place = place_of(holder)
        self.written.update((id(holder), write.key) for write in writes)
        if isinstance(holder.kind, ElementsKind):
            self._add_elements(holder, place, writes)
            return
        if isinstance(holder.kind, ItemsKind) and self._is_reordered(holder):
            if all(write.before is write.after for write in writes):
                raise Refused(
                    "volatile-source",
                    f"the run changes only the order of {holder.path}, so compiled code would not "
                    "fit the next call.",
                )
            self._note_volatile(writes)
            keys, values = holder.kind.read(holder.owner)
            items = [(self._plan_key(holder, k), v) for k, v in zip(keys, values, strict=True)]
            self.steps.append(Rewrite(place, tuple((k, self.plan(v)) for k, v in items)))
            return
        for write in writes:
            self._add(write, place)

    def add_inner(self, write: Write) -> None:
        """Refuse a place that other code reads: it may find something else on each call."""
        holder = write.holder
        self.written.add((id(holder), write.key))
        if isinstance(holder.kind, ElementsKind):
            is_read = self.reads.use_of_container(holder.owner).holds_matter
        else:
            is_read = self._is_read(write)
        if holder.anchored and is_read:
            raise Refused("custom-function-writes", SHARED.format(write.source))

    def _add(self, write: Write, place: WrittenHolder) -> None:
        holder = write.holder
        if not _can_repeat(write):  # it may settle
            self._add_volatile(write, repeated=False)
            return
        if isinstance(holder.kind, (AttributesKind, SlotsKind, ClassDictKind, NamesKind)):
            if not self.reads.may_store(holder, write.key):
                # A torch call with Python inside did it, and will again; or another thread did.
                self._note_volatile([write])
                return
        if write.after is ABSENT:
            if not self._note_carried(write, place):
                self._note_volatile([write])
            self.steps.append(Drop(place, self._plan_key(holder, write.key)))
            return
        together = self.writes_at[write.spot]
        if all(map(self._is_counted, together)):
            amount = write.after - write.before  # type: ignore[operator]
            if write is together[0]:
                self.steps.append(Count(place, write.key, amount))
            self.counted_keys.add((id(holder), write.key))
            if holder.anchored:
                self.counted.append(Counted(place, write.key, write.source, type(write.after)))
            return
        if not self._note_carried(write, place):
            self._note_volatile([write])
        self.steps.append(Put(place, self._plan_key(holder, write.key), self.plan(write.after)))

    def _plan_key(self, holder: Holder, key: Any) -> Any:
        is_planned = isinstance(holder.kind, ItemsKind) and not _is_plain_key(key)
        return self.plan(key) if is_planned else key

    def _add_elements(self, holder: Holder, place: WrittenHolder, writes: list[Write]) -> None:
        now = elements_of(holder.owner)
        before = tuple(holder.before().values())
        is_full = len(now) == getattr(holder.owner, "maxlen", None)  # it may have let go of some
        if len(now) == len(before):
            for write in writes:
                if not self._note_carried(write, place, moved=is_full):
                    self._note_volatile([write], moved=is_full)
                self.steps.append(Put(place, write.key, self.plan(write.after)))
            return
        use = self.reads.use_of_container(holder.owner)
        grown = len(now) >= len(before) and all(a is b for a, b in zip(before, now, strict=False))
        if grown and not (is_full or use.holds_matter):
            self.steps.append(Extend(place, tuple(map(self.plan, now[len(before) :]))))
            return
        if holder.anchored:
            found = Volatile(holder.path, list(before), list(now), id(holder), ABSENT)
            self.volatile.append(found)
        if grown:
            self.steps.append(Extend(place, tuple(map(self.plan, now[len(before) :]))))
        else:
            self.steps.append(Replace(place, tuple(map(self.plan, now))))

    def _is_reordered(self, holder: Holder) -> bool:
        """Whether putting and dropping keys would leave them in another order."""
        # A dict looks for the same object first: a tensor in a key may not be compared.
        now = {key: place for place, key in enumerate(holder.kind.read(holder.owner)[0])}
        kept = dict.fromkeys(key for key in holder.keys if key in now)
        places = (now[key] for key in (*kept, *(key for key in now if key not in kept)))
        return any(place != index for index, place in enumerate(places))

    def _is_counted(self, write: Write) -> bool:
        if not is_exactly(write.before, int, float) or type(write.after) is not type(write.before):
            return False
        if type(write.before) is float:
            return False  # a sum of floats depends on the order; let it be volatile
        if self.reads.is_written_first(write.holder, write.key, write.before):
            return False
        return self.reads.is_only_counted(write.holder, write.key)

    def _note_carried(self, write: Write, place: WrittenHolder, *, moved: bool = False) -> bool:
        if not write.holder.anchored or isinstance(write.holder.kind, MembersKind):
            return False
        facts = self.facts_of(write.holder, write.key)
        if facts is None:
            return False
        self.replaced.append((write.source, facts))
        if moved or self._is_read(write):
            attributes = self.attributes_of(write.before)
            self.carried.append(
                Carried(place, write.key, write.source, facts, attributes, write.spot)
            )
        return True

    def _note_volatile(self, writes: list[Write], *, moved: bool = False) -> None:
        """`moved`: what lies here may come from its neighbour, as in a full deque."""
        for write in writes:
            is_read = moved or self._is_read(write)
            if write.holder.anchored and is_read and not self.is_open(write.holder, write.key):
                self._add_volatile(write)

    def _add_volatile(self, write: Write, *, repeated: bool = True) -> None:
        self.volatile.append(
            Volatile(
                *(write.source, write.before, write.after, id(write.holder), write.key),
                repeated=repeated,
                spot=write.spot,
            )
        )

    def _is_read(self, write: Write) -> bool:
        holder = write.holder
        wanted = self.reads.filter_of(holder)
        if wanted is not None and write.key not in wanted:
            return False
        if self.reads.is_only_stored(holder, write.key):
            return False
        if self.reads.is_written_first(holder, write.key, write.before):
            return False
        if isinstance(holder.kind, (MembersKind, ElementsKind)):
            return self.reads.use_of_container(holder.owner).holds_matter
        return self.reads.use_of_key(holder, write.key).is_any


def _can_repeat(write: Write) -> bool:
    """Whether its kind knows how to do a write again."""
    kind = type(write.holder.kind)
    return kind.drop is not Kind.drop if write.after is ABSENT else kind.put is not Kind.put
