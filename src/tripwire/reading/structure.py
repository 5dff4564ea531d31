"""Structure: nested values taken apart into tensors and a shape, and put together again.

An argument's shape is a skeleton: types, lengths, keys and plain values, with tensors left
blank. A result's shape is a plan that builds it anew from the graph's outputs. Objects that
came in with the call go out as themselves.
"""

from __future__ import annotations

import array
import copy
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sized
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from msgspec import Struct, field
from torch.utils import _pytree as pytree

from tripwire.env import is_library_module
from tripwire.reading.sources import Roots, Source, has_pytree
from tripwire.reading.tensors import holds_tensor, parts_with_paths
from tripwire.values.classes import (
    find_in_class,
    ids_of,
    is_dataclass_object,
    is_exactly,
    is_heap_type,
    is_iterator,
    is_namedtuple,
    isinstance,
    module_of,
    mro,
    name_of,
)
from tripwire.values.contents import at_once, elements_of, filled_slots, items_of, own_dict
from tripwire.values.identity import PLAIN
from tripwire.values.numbers import find_ledger, is_open, plain

# --- arguments ---------------------------------------------------------------------------


_TENSOR = "tensor"


class SameObject(Struct, frozen=True):
    """Equal only for one very object: what it holds can't be compared."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"{self.value!r:.60}"


Skeleton = tuple[object, ...]


def build_skeleton(
    value: object, path: Source, above: tuple[int, ...] = (), *, identity: bool = True
) -> Skeleton:
    """What must be equal for two arguments to have the same shape: see the module's head.

    Objects that can't be compared must be the same, or with identity=False of the same class.
    """
    if isinstance(value, torch.Tensor):
        return (_TENSOR,)
    cls = type(value)
    if id(cls) in PLAIN or cls is slice:
        # repr tells 0.0 from -0.0 and True from 1, and nan equals itself.
        return (cls, repr(value))
    if cls is set or cls is frozenset:
        items = at_once(partial(iter, value))
        if all(id(type(item)) in PLAIN for item in items):
            return (cls, *sorted((type(item).__name__, repr(item)) for item in items))
    if module_of(cls) == "numpy" and hasattr(value, "tobytes"):
        return (cls, f"{value.dtype}{value.shape}", value.tobytes())  # type: ignore[attr-defined]
    if id(value) in above:
        return ("above", above.index(id(value)))
    parts = list(parts_with_paths(value, path))
    if not parts and not _is_container(value):
        return (cls, SameObject(value)) if identity else (cls,)
    inside = (*above, id(value))
    return (
        cls,
        *((str(p), build_skeleton(child, p, inside, identity=identity)) for child, p in parts),
    )


def _is_container(value: object) -> bool:
    return (
        isinstance(value, (dict, list, tuple, deque))
        or has_pytree(value)
        or is_dataclass_object(value)
    )


def find_difference(left: Skeleton, right: Skeleton, path: str) -> tuple[str, str, str] | None:
    """Where two skeletons part: path, and how each side reads there."""
    if left == right:
        return None
    if len(left) == len(right) and left[0] == right[0]:
        for mine, theirs in zip(left[1:], right[1:], strict=True):
            if _is_part(mine) and _is_part(theirs) and mine[0] == theirs[0]:  # type: ignore[index]
                found = find_difference(mine[1], theirs[1], mine[0])  # type: ignore[index]
                if found:
                    return found
    return _find_missing(left, right) or (path, _describe(left), _describe(right))


def _find_missing(left: Skeleton, right: Skeleton) -> tuple[str, str, str] | None:
    """The first part that one side has and the other hasn't."""
    mine, theirs = _parts_of(left), _parts_of(right)
    if left[0] != right[0] or not (mine and theirs):
        return None
    for path, part in mine.items():
        if path not in theirs:
            return path, _describe(part), "missing"
    for path, part in theirs.items():
        if path not in mine:
            return path, "missing", _describe(part)
    return None


def _parts_of(skeleton: Skeleton) -> dict[str, Skeleton]:
    return {item[0]: item[1] for item in skeleton[1:] if _is_part(item)}  # type: ignore[index]


def _is_part(item: object) -> bool:
    """Whether an item of a skeleton is a path with the skeleton there."""
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], tuple)


def _describe(skeleton: Skeleton) -> str:
    head = skeleton[0]
    if not isinstance(head, type):
        return "a tensor" if head == _TENSOR else "itself"
    if len(skeleton) == 2 and isinstance(skeleton[1], (str, SameObject)):
        return str(skeleton[1])
    if any(map(_is_part, skeleton)):
        return f"{head.__name__} with {len(skeleton) - 1} parts"
    return f"another {head.__name__}"


def holds_mutable(value: object) -> bool:
    """Whether a list or a dict is in a nest of tuples."""
    if isinstance(value, tuple):
        return any(map(holds_mutable, value))
    return isinstance(value, (list, dict))


# --- results -----------------------------------------------------------------------------


class PartPlan(Struct, frozen=True):
    """A step that builds one part of a result."""

    def build(self, building: Building) -> object:
        """The part, made from this call's tensors."""
        raise NotImplementedError


class Building(Struct, frozen=True):
    """One call's ingredients: the graph's outputs, the roots, and what was built so far."""

    tensors: tuple[torch.Tensor, ...]
    roots: Roots
    shared: dict[int, object]
    fetched: dict[Source, object] = field(default_factory=dict)  # by path, before any effect
    numbers: tuple[float, ...] = ()  # this call's, of those that were open


class TensorPlan(PartPlan, frozen=True):
    """The graph's nth output."""

    index: int

    def build(self, building: Building) -> object:
        return building.tensors[self.index]


class NumberPlan(PartPlan, frozen=True):
    """A number that was open, or a tuple of some that the world holds: this call's."""

    index: int

    def build(self, building: Building) -> object:
        return building.numbers[self.index]


class TakenPlan(PartPlan, frozen=True):
    """A number out of a tensor that the graph returns for it."""

    tensor: PartPlan

    def build(self, building: Building) -> object:
        return self.tensor.build(building).item()  # type: ignore[attr-defined]


class ComputedPlan(PartPlan, frozen=True):
    """What Python computes of such numbers."""

    function: Callable[..., object]
    operands: tuple[PartPlan, ...]

    def build(self, building: Building) -> object:
        return self.function(*[operand.build(building) for operand in self.operands])


class SamePlan(PartPlan, frozen=True):
    """An object that came in with the call goes out as itself."""

    source: Source
    held: Callable[[], object] | None = None  # leads to it, where it is the same on every call

    def build(self, building: Building) -> object:
        if self.held is not None:
            return self.held()
        if self.source in building.fetched:
            return building.fetched[self.source]
        return self.source.fetch(building.roots)


class ConstantPlan(PartPlan, frozen=True):
    """A value without tensors, handed out as it is."""

    value: object

    def build(self, building: Building) -> object:
        return self.value


class MadePlan(PartPlan, frozen=True):
    """An object made by the run; `key` lets other places of the result be the same object."""

    key: int
    parts: tuple[PartPlan, ...]
    make: Callable[[list[Any]], object]

    def build(self, building: Building) -> object:
        if self.key not in building.shared:
            made = self.make([part.build(building) for part in self.parts])
            building.shared[self.key] = made
        return building.shared[self.key]


class AgainPlan(PartPlan, frozen=True):
    """A second place that holds an object which was built before."""

    key: int

    def build(self, building: Building) -> object:
        return building.shared[self.key]


class Unbuildable(Exception):
    """A result, what the run wrote, or a part of these, that no plan can build."""

    subject = "the result"
    advice = "Return tensors in tuples, lists, dicts, dataclasses or plain objects."

    def __str__(self) -> str:
        return f"{self.subject} {self.args[0]}. {self.advice}"

    def of_write(self, target: Source) -> Unbuildable:
        """The same of what the run wrote there."""
        self.subject = f"what the run writes to {target}"
        self.advice = "Keep tensors, plain values and containers of these there."
        return self


class Planner:
    """Plans a result, and collects its tensors in order."""

    def __init__(
        self,
        find_source: Callable[[object], Source | None],
        was_written: Callable[[object], bool] = lambda _: False,
        hold: Callable[[object], Callable[[], object] | None] = lambda _: None,
        find_owner: Callable[[object], object] = lambda _: None,
    ) -> None:
        # An open number; and what was passed, where the run got another tuple for it.
        self.plan_number: Callable[[Any, Callable[[object], PartPlan]], PartPlan] | None = None
        self.find_original: Callable[[object], object] = _itself
        self.plan_held: Callable[[object], PartPlan | None] = lambda _: None  # such a tuple
        self._find_source = find_source
        self._was_written = was_written
        self._hold = hold
        self._find_owner = find_owner  # of a dict that is part of an object: its `__dict__`
        self._spaces: set[int] = set()  # such dicts of objects that the run made
        self.fetched: list[Source] = []  # what is reached through the call's arguments
        self.handed_out: set[int] = set()  # identities of what goes out as itself
        self._alive: list[object] = []  # pytree makes temporaries, whose identities come again
        self._keys: dict[int, int] = {}
        self._open: set[int] = set()
        self.tensors: list[torch.Tensor] = []
        self._positions: dict[int, int] = {}

    def plan(self, value: object) -> PartPlan:
        """The plan for one value and everything in it."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._positions:
                self._positions[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return TensorPlan(self._positions[id(value)])
        if find_ledger(value) is not None:
            assert self.plan_number is not None
            return self.plan_number(value, self.plan)
        value = self.find_original(plain(value))  # or one that another run left in a C object
        held_tuple = self.plan_held(value)
        if held_tuple is not None:
            return held_tuple
        if type(value) is torch.Size and any(map(is_open, value)):
            parts = tuple(map(self.plan, value))
            return MadePlan(self._new_key(value), parts, torch.Size)
        if id(type(value)) in PLAIN:
            return ConstantPlan(value)
        # `()` is one object everywhere.
        is_empty = (type(value) is tuple or type(value) is frozenset) and not value
        source = None if is_empty else self._find_source(value)
        if source is not None:
            if self._was_written(value):
                raise Unbuildable(f"holds {source}, which the run changed")
            self.handed_out.add(id(value))
            held = self._hold(value)
            if held is None:
                self.fetched.append(source)
            return SamePlan(source, held)
        if id(value) in self._open:
            raise Unbuildable("contains itself")
        if id(value) in self._keys:
            return AgainPlan(self._keys[id(value)])
        taken = _take_apart(value)
        if taken is None:
            if not _is_constant(value):
                raise Unbuildable(f"holds {_a(type(value))} that the run made")
            return ConstantPlan(value)
        self._check_space(value)
        children, make = taken
        key = self._new_key(value)
        self._open.add(id(value))
        parts = tuple(self.plan(child) for child in children)
        self._open.discard(id(value))
        return MadePlan(key, parts, make)

    def _check_space(self, value: object) -> None:
        """Refuse the `__dict__` of an object: another dict would be built for it."""
        space = own_dict(value)
        is_told = space is not None and id(space) in self._keys
        if space is not None:
            self._alive.append(space)
            self._spaces.add(id(space))
        owner = self._find_owner(value) if is_exactly(value, dict, OrderedDict) else None
        if is_told or owner is not None or id(value) in self._spaces:
            raise Unbuildable(f"holds a dict that is part of {owner or 'an object'}")

    def _new_key(self, value: object) -> int:
        self._alive.append(value)
        return self._keys.setdefault(id(value), len(self._keys))


def _itself(value: object) -> object:
    return value


_IMMUTABLE_MODULES = ("decimal", "fractions", "datetime", "uuid", "pathlib", "re", "numpy")


def _is_constant(value: object) -> bool:
    """Whether one object can be handed out by every call: nobody can change it."""
    cls = type(value)
    if isinstance(value, (Enum, ModuleType, slice)) or cls is object or value is NotImplemented:
        return True
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
        for part in getattr(value, "__qualname__", "").split("."):
            found = getattr(found, part, None)
        return found is value or isinstance(value, BuiltinFunctionType)
    if module_of(cls) == "numpy" and not hasattr(value, "flags"):
        return True
    if module_of(cls) == "numpy":
        return not isinstance(value, Sized)  # a scalar
    is_plain = issubclass(cls, (int, float, complex, str, bytes)) and not own_dict(value)
    if is_plain or module_of(cls).partition(".")[0] not in _IMMUTABLE_MODULES:
        return is_plain
    return not any(is_open(held) for _, held in filled_slots(value))


Parts = tuple[list[Any], Callable[[list[Any]], object]]


_COPIED = ids_of(bytearray, array.array)
# Views of a dict, and how another dict gives such a view: no method of a subclass is asked.
_VIEWS: dict[int, Callable[[Any], object]] = {
    id(type({}.keys())): dict.keys,
    id(type({}.values())): dict.values,
    id(type({}.items())): dict.items,
}


def _take_apart(value: Any) -> Parts | None:
    """An object's children, and how to make another from new ones; None for a leaf."""
    cls: Any = type(value)
    if is_iterator(cls) or isinstance(value, torch.nn.Module):
        raise Unbuildable(f"holds {_a(cls)}")
    if isinstance(value, dict) and holds_tensor(list(dict.keys(value))):
        raise Unbuildable("holds a dict with tensors for keys")
    if id(cls) in _VIEWS:
        return gc.get_referents(value), lambda parts: _VIEWS[id(cls)](parts[0])
    if is_namedtuple(cls):  # a `__new__` of its own has run, and must not run on its results
        return _with_attributes(value, list(tuple.__iter__(value)), partial(tuple.__new__, cls))
    if any(cls is kind for kind in (list, tuple, set, frozenset)):
        return list(value), cls
    if id(cls) in _COPIED or (module_of(cls) == "numpy" and hasattr(value, "flags")):
        if getattr(getattr(value, "dtype", None), "hasobject", False):
            raise Unbuildable("holds an array of objects")
        kept = copy.copy(value)
        return [], lambda _: copy.copy(kept)
    if cls is deque:
        return list(value), lambda parts: deque(parts, value.maxlen)
    if cls is slice:
        bounds = [value.start, value.stop, value.step]
        return None if all(id(type(b)) in PLAIN for b in bounds) else (bounds, lambda p: slice(*p))
    if any(cls is kind for kind in (dict, OrderedDict, defaultdict)):
        return _take_dict_apart(value)
    if find_in_class(cls, "__new__") in _CONTAINERS and _holds_no_more(cls):
        return _take_container_apart(value)
    if has_pytree(value) and not _is_simple(value):
        node = pytree.SUPPORTED_NODES[cls]
        children, context = node.flatten_fn(value)
        return list(children), lambda parts: node.unflatten_fn(parts, context)
    return _take_object_apart(value)


def _take_dict_apart(value: dict[Any, Any]) -> Parts:
    cls: Any = type(value)
    count = len(value)
    if cls is defaultdict:
        cls = partial(defaultdict, value.default_factory)  # type: ignore[attr-defined]

    def make(parts: list[Any]) -> object:
        return cls(zip(parts[:count], parts[count:], strict=True))

    # A key may be an object that came with the call.
    return _with_attributes(value, [*value, *value.values()], make)


def _fill_dict(put: Callable[..., None], made: Any, parts: list[Any]) -> None:
    half = len(parts) // 2
    for key, part in zip(parts[:half], parts[half:], strict=True):
        put(made, key, part)


# How subclasses that leave the making to these are filled, past methods of their own.
_CONTAINERS: dict[Any, Callable[[Any, list[Any]], None]] = {
    dict.__new__: partial(_fill_dict, dict.__setitem__),  # OrderedDict's and defaultdict's as well
    list.__new__: list.extend,
    set.__new__: set.update,
}
_fill_ordered = partial(_fill_dict, OrderedDict.__setitem__)


_KNOWN_IN_C = ids_of(object, dict, OrderedDict, defaultdict, list, set)


def _holds_no_more(cls: type) -> bool:
    """Whether what is in C of an object is known: that of the containers."""
    return all(id(base) in _KNOWN_IN_C or is_heap_type(base) for base in mro(cls))


def _take_container_apart(value: Any) -> Parts:
    """A subclass of a container: what it contains, and what was set on it beside that."""
    cls: Any = type(value)
    new: Any = find_in_class(cls, "__new__")
    fill = _fill_ordered if isinstance(value, OrderedDict) else _CONTAINERS[new]
    children = (
        list(elements_of(value))
        if not isinstance(value, dict)
        else [*(key for key, _ in items_of(value)), *(part for _, part in items_of(value))]
    )
    attributes, slots = own_dict(value) or {}, filled_slots(value)
    count, names = len(children), list(attributes)
    has_factory = isinstance(value, defaultdict)
    factory = value.default_factory if has_factory else None

    def make(parts: list[Any]) -> object:
        made = new(cls)
        if has_factory:
            defaultdict.__init__(made, factory)
        fill(made, parts[:count])
        _fill(made, names, slots, parts[count:])
        return made

    return [*children, *attributes.values(), *(part for _, part in slots)], make


def _with_attributes(
    value: object, children: list[Any], make: Callable[[list[Any]], object]
) -> Parts:
    """The same, and what was set on the object beside what it contains."""
    names = list(own_dict(value) or ())
    if not names:
        return children, make
    count = len(children)

    def make_all(parts: list[Any]) -> object:
        made = make(parts[:count])
        _fill(made, names, [], parts[count:])
        return made

    return [*children, *(own_dict(value) or {}).values()], make_all


def _fill(
    made: object,
    names: list[str],
    slots: list[tuple[MemberDescriptorType, object]],
    parts: list[Any],
) -> None:
    """Set attributes, then slots, where they lie: no property and no `__setattr__` is asked."""
    if names:
        space = own_dict(made)
        assert space is not None
        space.update(zip(names, parts, strict=False))
    if slots:
        for (slot, _), part in zip(slots, parts[len(names) :], strict=True):
            slot.__set__(made, part)


def _take_object_apart(value: object) -> Parts | None:
    cls = type(value)
    attributes = own_dict(value) or {}
    slots = filled_slots(value)
    if not holds_tensor(value):
        if not (attributes or slots) or not _is_simple(value):
            return None
        if is_library_module(module_of(cls)):
            return None
    if not (attributes or slots) or not _is_simple(value):
        raise Unbuildable(f"holds {_a(cls)}, which can't be made again from its parts")
    names = list(attributes)

    def make(parts: list[Any]) -> object:
        made = object.__new__(cls)
        _fill(made, names, slots, parts)
        return made

    return [*attributes.values(), *(part for _, part in slots)], make


def _is_simple(value: object) -> bool:
    """Whether an object is all that its attributes show."""
    new = find_in_class(type(value), "__new__")
    return new is object.__new__ and not isinstance(value, (*_OPAQUE, Enum, ModuleType))


# What holds more than its attributes show, or can't be made without its own constructor.
_OPAQUE = (dict, list, tuple, set, frozenset, deque, type, FunctionType, MethodType, partial)


def _a(cls: type) -> str:
    return f"a {name_of(cls)}"
