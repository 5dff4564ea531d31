"""Kept: a value that an entry read, to compare with later.

It is held weakly where Python allows it, so that it dies when nobody else holds it. An entry's
tensors are held strongly while it is in use, and weakly while it is retired. A container of plain
values may be replaced by an equal one, so its content is kept.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import torch
from msgspec.structs import replace

from tripwire.reading.kinds import ABSENT, Kind
from tripwire.reading.names import fingerprint
from tripwire.reading.tensors import PLAIN_TENSORS, sparse_form, storage_of
from tripwire.validity.table import TableRow
from tripwire.values.classes import ids_of, is_exactly, name_of
from tripwire.values.contents import elements_of
from tripwire.values.identity import PLAIN, same_plain
from tripwire.writes.patches import unhooked
from tripwire.writes.twin import Hidden


class Held:
    """The tensors of one entry: held strongly while it is in use, weakly while it is retired."""

    __slots__ = ("_indices", "_weak", "are_plain", "tensors")

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.tensors = tensors
        self._weak: tuple[weakref.ref[torch.Tensor], ...] = ()
        self._indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        self.are_plain = all(id(type(tensor)) in PLAIN_TENSORS for tensor in tensors)

    def refer_to(self, value: object) -> Callable[[], object] | None:
        """A reference to one of the tensors; None for anything else."""
        index = self._indices.get(id(value))
        return None if index is None else functools.partial(self.find, index)

    def find(self, index: int) -> torch.Tensor | None:
        """The tensor at a position; None where it is gone."""
        if self.tensors:
            return self.tensors[index]
        return self._weak[index]() if self._weak else None

    def wants_grad(self, indices: tuple[int, ...]) -> bool:
        """Whether one of these wants a gradient by now: arithmetic in place can bring that."""
        tensors = self.tensors
        if not self.are_plain:
            with torch._C.DisableTorchFunctionSubclass():
                return any(tensors[i].requires_grad for i in indices) if tensors else False
        return any(tensors[i].requires_grad for i in indices) if tensors else False

    def release(self) -> None:
        """Let them die."""
        if self.tensors:
            self._weak = tuple(map(Hidden, self.tensors))
            self.tensors = ()

    def restore(self) -> bool:
        """Hold them again; whether all were still there."""
        if not self._weak:
            return True
        alive = [ref() for ref in self._weak]
        found = tuple(tensor for tensor in alive if tensor is not None)
        if len(found) < len(alive):
            return False
        self.tensors, self._weak = found, ()
        return True

    def replace(self, others: Mapping[int, torch.Tensor]) -> None:
        """Have others in the places of some, by position: whoever refers to these gets them."""
        if self.tensors:
            now = enumerate(self.tensors)
            self.tensors = tuple(others.get(index, tensor) for index, tensor in now)
        else:
            weak = enumerate(self._weak)
            self._weak = tuple(Hidden(others[i]) if i in others else ref for i, ref in weak)

    def has_lost(self) -> bool:
        """Whether one of them died while the entry was retired."""
        return any(ref() is None for ref in self._weak)

    def drop(self) -> None:
        """Forget them."""
        self.tensors = self._weak = ()


class Sizes:
    """The sizes of tensors of state that `out=` may have changed, which nothing reports.

    The form of sparse ones: `s.add_(other)` may leave it uncoalesced.
    """

    __slots__ = ("_refs", "_seen")

    def __init__(self, tensors: Sequence[torch.Tensor], held: Held) -> None:
        self._refs = [held.refer_to(tensor) or Hidden(tensor) for tensor in tensors]
        self._seen = [(tensor.shape, sparse_form(tensor)) for tensor in tensors]

    def are_same(self) -> bool:
        """Whether each has the size that it had. One that is gone retires its entry anyway."""
        found: list[Any] = [refer() for refer in self._refs]
        pairs = zip(found, self._seen, strict=True)
        return all(t is None or (t.shape, sparse_form(t)) == seen for t, seen in pairs)


class Memory:
    """Which tensors of state share memory, for an entry that writes to tensors in place.

    A tensor can get other memory, and stay the same tensor: `t.data = other`, `t.set_(other)`.
    """

    __slots__ = ("_began", "_places", "_refs", "_seen")

    def __init__(self, tensors: Sequence[torch.Tensor], began: Sequence[int], held: Held) -> None:
        self._refs = [held.refer_to(tensor) or Hidden(tensor) for tensor in tensors]
        self._began = list(began)  # the storage of each when the run reached it
        self._seen = list(map(self._began.index, began))
        self._places: dict[int, int] = {}  # storage → the first tensor that lies there
        self._look()

    def find_first(self, storages: Sequence[int]) -> tuple[int, ...]:
        """What `find` gives for tensors that lay there when the run began."""
        began = self._began
        return tuple(~began.index(s) if s in began else storages.index(s) for s in storages)

    def find(self, *tensors: torch.Tensor) -> tuple[int, ...]:
        """For each, the first of them in the same memory; ~i if that is memory of state's i-th."""
        first: dict[int, int] = {}
        found = []
        for index, tensor in enumerate(tensors):
            storage = storage_of(tensor)
            place = self._places.get(storage)
            found.append(first.setdefault(storage, index) if place is None else ~place)
        return tuple(found)

    def is_same(self) -> bool:
        """Whether those share memory that did. It is known from now on where they lie now."""
        return self._look() == self._seen

    def _look(self) -> list[int]:
        self._places.clear()
        found = []
        for index, refer in enumerate(self._refs):
            tensor: Any = refer()
            if tensor is not None:  # it hasn't died while its entry was retired
                found.append(self._places.setdefault(storage_of(tensor), index))
        return found


class Kept:
    """A value to compare with later, held weakly where it can be."""

    __slots__ = ("_cls", "_ref", "_value")

    def __init__(self, value: object, held: Held | None = None) -> None:
        self._value: object = None
        self._ref: Callable[[], object] | None = None
        if id(type(value)) in PLAIN:
            self._cls, self._value = type(value), value
            return
        value = unhooked(value)
        cls = self._cls = type(value)
        is_tensor = issubclass(cls, torch.Tensor)  # asks no dead proxy
        if is_tensor and held is not None:
            self._ref = held.refer_to(value)
        if self._ref is None:
            try:
                self._ref = (Hidden if is_tensor else weakref.ref)(value)
            except TypeError:
                self._value = value

    def get(self) -> object:
        """The value; None where it is gone."""
        return self._value if self._ref is None else self._ref()

    @property
    def is_gone(self) -> bool:
        """Whether the value has died."""
        return self._ref is not None and self._ref() is None

    def is_same(self, value: object) -> bool:
        """Whether a value is still this one, or an equal plain one."""
        value = unhooked(value)
        if self._ref is not None:
            return value is not None and self._ref() is value  # a dead reference gives None
        kept = self._value
        return kept is value or (id(type(kept)) in PLAIN and same_plain(kept, value))

    def spell(self, found: str, constant: Callable[[object], str]) -> str:
        """A condition: what an expression gives is the value itself."""
        if self._ref is None:
            return f"{found} is {constant(self._value)}"
        return f"{found} is {constant(self._ref)}() is not None"  # a dead reference gives None

    def fill(self, row: TableRow) -> TableRow | None:
        """A row that compares with the value itself; None where C can't."""
        if self._ref is None:
            return replace(row, y=self._value)
        return replace(row, y=self._ref, flag=True) if is_reference(self._ref) else None

    @property
    def item(self) -> object:
        """What `same_items` takes: a weak reference or a plain value; ABSENT for anything else."""
        if self._ref is None:
            return self._value if id(self._cls) in PLAIN else ABSENT
        return self._ref if is_reference(self._ref) else ABSENT

    def __str__(self) -> str:
        return f"{name_of(self._cls)} object" if self.is_gone else str(fingerprint(self.get()))


VALUE_SLOT = vars(Kept)["_value"]


class ThatNumber(Kept):
    """A number that the code may compare with `is`: equal numbers may be different objects."""

    __slots__ = ()

    def is_same(self, value: object) -> bool:
        """Whether it is that very object."""
        return value is self._value

    @property
    def item(self) -> object:
        return ABSENT


class KeptArray(Kept):
    """An array, by its identity: NumPy resizes none that has a weak reference.

    Another one may get the same identity once this one is gone. Then it counts as this one: its
    form and values are compared on every call, by a wire that finds it in its `ArrayPlace`.
    """

    __slots__ = ("_identity",)

    def __init__(self, array: object) -> None:
        super().__init__(None)
        self._cls = type(array)
        self._identity = id(array)

    @property
    def is_gone(self) -> bool:
        return False  # nobody knows

    def is_same(self, value: object) -> bool:
        """Whether a value is this array."""
        return id(value) == self._identity and type(value) is self._cls

    def spell(self, found: str, constant: Callable[[object], str]) -> str:
        return f"{constant(self)}.is_same({found})"

    def fill(self, row: TableRow) -> TableRow | None:
        return None

    @property
    def item(self) -> object:
        return ABSENT

    def __str__(self) -> str:
        return f"{name_of(self._cls)} object"


class ArrayPlace:
    """Where an array lies, on every call; gives None once another one lies there."""

    __slots__ = ("_key", "_kind", "_owner", "_seen")

    def __init__(self, owner: Callable[[], object], kind: Kind, key: Any, array: object) -> None:
        self._owner, self._kind, self._key = owner, kind, key
        self._seen = KeptArray(array)

    def __call__(self) -> object:
        owner = self._owner()
        found = None if owner is None else self._kind.get(owner, self._key)
        return found if self._seen.is_same(found) else None


class Alike(Kept):
    """A container of plain values that may be replaced by an equal one.

    The code didn't ask which object it is. A wire of its own compares the content of the container
    that is there now, and finds that container here.
    """

    __slots__ = ("_content", "_others")

    def __init__(self, value: object, content: object, others: Set[int] = frozenset()) -> None:
        super().__init__(value)
        self._content = content
        self._others = others  # identities of containers that stay: what was two stays two

    def is_same(self, value: object) -> bool:
        """Whether it is the one that was there, or an equal one: that is the one from now on."""
        if value is not self.get():
            if id(value) in self._others or not same_plain(content_of(value), self._content):
                return False
            Kept.__init__(self, value)
        return True

    def spell(self, found: str, constant: Callable[[object], str]) -> str:
        return f"{found} is {constant(self)}.get() is not None"

    def fill(self, row: TableRow) -> TableRow | None:
        return None

    @property
    def item(self) -> object:
        return ABSENT


def is_reference(ref: object) -> bool:
    """Whether C can ask it for its object."""
    return type(ref) is weakref.ref or type(ref) is Hidden


_LARGEST_CONTENT = 1000  # values; what holds more is told by who it is


def content_of(value: object) -> object:
    """What a list, tuple or set of plain values holds, as tuples; ABSENT for anything else.

    A list in a tuple is no content: no wire could follow it to another tuple.
    """
    count = 0

    def take(value: object, allowed: frozenset[int]) -> object:
        nonlocal count
        count += 1
        cls = type(value)
        if id(cls) in PLAIN and value == value:  # one nan isn't another to `in`
            return value
        if id(cls) not in allowed or count > _LARGEST_CONTENT:
            raise _NoContent
        inside = allowed if cls is list else _FROZEN
        return cls, tuple(take(item, inside) for item in elements_of(value))

    try:
        return take(value, _CONTAINERS)
    except _NoContent:
        return ABSENT


class _NoContent(Exception):
    """Something isn't plain, or there is too much of it."""


_FROZEN = ids_of(tuple, frozenset)

_CONTAINERS = ids_of(list, set, tuple, frozenset)


class Keeper:
    """Makes what wires compare with: a value, or any equal one if its identity isn't read."""

    __slots__ = ("_alike", "_arrays", "_is_itself", "_places", "_tells_numbers")

    def __init__(
        self,
        alike: Mapping[int, tuple[Alike, ...]] = MappingProxyType({}),
        is_itself: Callable[[object], bool] = lambda _: True,
        *,
        tells_numbers: bool = False,
        arrays: Mapping[int, ArrayPlace] = MappingProxyType({}),
    ) -> None:
        self._alike = alike  # mutable containers, by identity; one for each place that has it
        self._is_itself = is_itself  # whether it matters which object it is
        self._tells_numbers = tells_numbers  # whether it matters which of equal numbers it is
        self._arrays = arrays  # by identity
        self._places = {key: iter(found) for key, found in alike.items()}

    def is_by_value(self, value: object) -> bool:
        """Whether an equal value is as good."""
        if self._tells_numbers and is_exactly(value, int, float):
            return False
        return id(type(value)) in PLAIN

    def keep(self, value: object, held: Held | None = None) -> Kept:
        """What to compare with, in one more place."""
        if self._tells_numbers and is_exactly(value, int, float):
            return ThatNumber(value)
        if id(value) in self._arrays:
            return KeptArray(value)
        found = next(self._places.get(id(value), iter(())), None)
        if found is None and id(type(value)) in _FROZEN and not self._is_itself(value):
            content = content_of(value)
            found = None if content is ABSENT else Alike(value, content)
        return found or Kept(value, held)

    def find_ways(self, owner: object) -> tuple[Callable[[], object], ...]:
        """Ways to what holds values: itself, or in each place the equal one that is there now."""
        if id(owner) in self._arrays:
            return (self._arrays[id(owner)],)
        found = self._alike.get(id(owner))
        return (refer(owner),) if found is None else tuple(alike.get for alike in found)


ITSELF = Keeper()


def refer(value: object, on_death: Callable[[object], None] | None = None) -> Callable[[], object]:
    """A weak reference where Python has one."""
    weak = Hidden if issubclass(type(value), torch.Tensor) else weakref.ref
    try:
        return weak(value, on_death)
    except TypeError:  # an object with slots alone, kept for as long as the entry
        return lambda: value
