"""Holders: what mutable things hold, how to read it, and how to write it again.

Every mutable thing that a run can reach is remembered before the run reads it. What it held
then is the read set; what differs afterwards was written by the run. A holder says which kind
of thing it is; its kind knows how to take it apart. Tensors are held weakly, so that one that
the run lets go dies as it would have; small values are kept, since their identities come again.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import CellType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from tripwire.reading.sources import Attr, Cell, Global, Item, Referent, Source
from tripwire.reading.tensors import TensorMeta, Traits, meta_of, traits_of
from tripwire.rulebook.refusals import Refused
from tripwire.values.belongings import name_of_module
from tripwire.values.classes import class_dict, is_exactly, isinstance, name_of
from tripwire.values.contents import (
    at_once,
    cells_of,
    copy_dict,
    elements_of,
    own_dict,
    read_slots,
    slots_of,
)
from tripwire.values.numbers import is_open
from tripwire.values.sameness import PLAIN, same_plain
from tripwire.writes.patches import unhooked
from tripwire.writes.sentry import count_switches

Held = tuple[tuple[Any, ...], tuple[Any, ...]]  # keys, and the values that they lead to


class _Absent:
    """Stands for a value where there is none. Absences are reads, too."""

    def __repr__(self) -> str:
        return "nothing"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


class Kind:
    """How one kind of thing holds values."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        """What it holds now. Runs no code of the user's."""
        raise NotImplementedError

    def put(self, owner: Any, key: Any, value: object) -> None:
        """Hold a value under a key, as the run did."""
        raise NotImplementedError

    def drop(self, owner: Any, key: Any) -> None:
        """Hold nothing under a key."""
        raise NotImplementedError

    def step(self, path: Source, key: Any) -> Source:
        """The source of what it holds under a key."""
        raise NotImplementedError

    def dict_of(self, owner: Any) -> dict[Any, Any] | None:
        """The dict behind it, where there is one: a write to it can be watched."""
        return None

    def get(self, owner: Any, key: Any) -> object:
        """What it holds under one key, or ABSENT."""
        keys, values = self.read(owner)
        return dict(zip(keys, values, strict=True)).get(key, ABSENT)

    def spot(self, owner: Any, key: Any) -> tuple[int, Any]:
        """Where the value lies, as an identity: two holders may lead to one place."""
        space = self.dict_of(owner)
        return id(owner if space is None else space), key


class _DictKind(Kind):
    """Kinds with a dict behind them."""

    __slots__ = ()

    def dict_of(self, owner: Any) -> dict[Any, Any]:
        raise NotImplementedError

    def read(self, owner: Any) -> Held:
        space = copy_dict(self.dict_of(owner))
        return tuple(space), tuple(space.values())

    def put(self, owner: Any, key: Any, value: object) -> None:
        self.dict_of(owner)[key] = value

    def drop(self, owner: Any, key: Any) -> None:
        self.dict_of(owner).pop(key, None)

    def step(self, path: Source, key: Any) -> Source:
        return Attr(path, key)

    def get(self, owner: Any, key: Any) -> object:
        return dict.get(self.dict_of(owner), key, ABSENT)


class AttributesKind(_DictKind):
    """The instance dict of an object or a module."""

    __slots__ = ()

    def dict_of(self, owner: Any) -> dict[Any, Any]:
        space = own_dict(owner)
        return {} if space is None else space


class TableKind(_DictKind):
    """Parameters, buffers, submodules or hooks of a module."""

    __slots__ = ("indexed", "keyed", "name")

    def __init__(self, name: str, *, indexed: bool = False, keyed: bool = False) -> None:
        self.name = name
        self.indexed = indexed  # reached as module[3], and so are its keys
        self.keyed = keyed  # reached as module['name']

    def dict_of(self, owner: Any) -> dict[Any, Any]:
        space: Any = (own_dict(owner) or {}).get(self.name)
        return {} if space is None else space

    def step(self, path: Source, key: Any) -> Source:
        if self.indexed and isinstance(key, str) and key.isdecimal():
            return Item(path, int(key))
        return Item(path, key) if self.keyed else Attr(path, key)


class ItemsKind(_DictKind):
    """A dict, or a subclass of it; the subclass's own methods are passed by."""

    __slots__ = ()

    def dict_of(self, owner: Any) -> dict[Any, Any]:
        space: dict[Any, Any] = owner
        return space

    def read(self, owner: Any) -> Held:
        space = copy_dict(owner)
        if isinstance(owner, OrderedDict):  # its order is its own
            order = [key for key in at_once(partial(OrderedDict.keys, owner)) if key in space]
            space = {key: space[key] for key in order}
        keys = [_Same(key) if isinstance(key, torch.Tensor) else key for key in space]
        return tuple(keys), tuple(space.values())

    def put(self, owner: Any, key: Any, value: object) -> None:
        write = OrderedDict if isinstance(owner, OrderedDict) else dict
        write.__setitem__(owner, _plain_key(key), value)

    def drop(self, owner: Any, key: Any) -> None:
        write = OrderedDict if isinstance(owner, OrderedDict) else dict
        if dict.__contains__(owner, _plain_key(key)):
            write.__delitem__(owner, _plain_key(key))

    def step(self, path: Source, key: Any) -> Source:
        return Item(path, _plain_key(key))


class _Same:
    """A key that compares by identity: tensors don't compare as keys must."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _plain_key(key: Any) -> Any:
    return key.value if isinstance(key, _Same) else key


class ClassDictKind(_DictKind):
    """What a class itself holds."""

    __slots__ = ()

    def dict_of(self, owner: Any) -> dict[Any, Any]:
        # The proxy's only referent is the dict behind it.
        (space,) = gc.get_referents(class_dict(owner))
        return space  # type: ignore[no-any-return]

    def put(self, owner: Any, key: Any, value: object) -> None:
        type.__setattr__(owner, key, value)

    def drop(self, owner: Any, key: Any) -> None:
        if key in class_dict(owner):
            type.__delattr__(owner, key)


class LibraryClassKind(ClassDictKind):
    """What a class of torch's holds: a write to it counts, and no run is taken to make one."""

    __slots__ = ()


class NamesKind(_DictKind):
    """Some names of a namespace: globals of a module, or attributes of one."""

    __slots__ = ("module", "names")

    def __init__(self, names: frozenset[str], module: str | None = None) -> None:
        self.names = names
        self.module = module  # the name of a G[...] root; None below another path

    def dict_of(self, owner: Any) -> dict[Any, Any]:
        space: dict[Any, Any] = owner
        return space

    def read(self, owner: Any) -> Held:
        found = [(name, dict.get(owner, name, ABSENT)) for name in self.names]
        found = [(name, value) for name, value in found if value is not ABSENT]
        return tuple([name for name, _ in found]), tuple([value for _, value in found])

    def step(self, path: Source, key: Any) -> Source:
        return Attr(path, key) if self.module is None else Global(self.module, key)


class LibraryNamesKind(NamesKind):
    """Attributes of a module of torch's or the standard library's: as with their classes."""

    __slots__ = ()


class ElementsKind(Kind):
    """A list or a deque, by position."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        elements = elements_of(owner)
        return tuple(range(len(elements))), elements

    def step(self, path: Source, key: Any) -> Source:
        return Item(path, key)

    def get(self, owner: Any, key: Any) -> object:
        elements = elements_of(owner)
        return elements[key] if key < len(elements) else ABSENT

    def extend(self, owner: Any, values: list[object]) -> None:
        """Hold these as well, at the end."""
        (deque if isinstance(owner, deque) else list).extend(owner, values)

    def replace(self, owner: Any, values: list[object]) -> None:
        """Hold just these."""
        if isinstance(owner, deque):
            deque.clear(owner)
            deque.extend(owner, values)
        else:
            list.__setitem__(owner, slice(None), values)


class MembersKind(Kind):
    """A set, whose elements are their own keys."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        elements = elements_of(owner)
        return tuple([_Same(e) if isinstance(e, torch.Tensor) else e for e in elements]), elements

    def put(self, owner: Any, key: Any, value: object) -> None:
        set.add(owner, value)

    def drop(self, owner: Any, key: Any) -> None:
        set.discard(owner, _plain_key(key))

    def step(self, path: Source, key: Any) -> Source:
        return Item(path, _plain_key(key))


class SlotsKind(Kind):
    """The filled slots of an object."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        found = read_slots(owner)
        return tuple(found), tuple(found.values())

    def put(self, owner: Any, key: Any, value: object) -> None:
        slots_of(type(owner))[key].__set__(owner, value)

    def drop(self, owner: Any, key: Any) -> None:
        if key in read_slots(owner):
            slots_of(type(owner))[key].__delete__(owner)

    def step(self, path: Source, key: Any) -> Source:
        return Attr(path, key)


class CellsKind(Kind):
    """The closure variables of a function. `path` is None for the traced one."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        cells = cells_of(owner)
        values = {name: _contents(cell) for name, cell in cells.items()}
        bound = {name: value for name, value in values.items() if value is not ABSENT}
        return tuple(bound), tuple(bound.values())

    def put(self, owner: Any, key: Any, value: object) -> None:
        cells_of(owner)[key].cell_contents = value

    def drop(self, owner: Any, key: Any) -> None:
        if _contents(cells_of(owner)[key]) is not ABSENT:
            del cells_of(owner)[key].cell_contents

    def step(self, path: Source | None, key: Any) -> Source:
        return Cell(path, key)

    def spot(self, owner: Any, key: Any) -> tuple[int, Any]:
        return id(cells_of(owner)[key]), None

    def get(self, owner: Any, key: Any) -> object:
        return _contents(cells_of(owner)[key])


def _contents(cell: CellType) -> object:
    try:
        contents: object = cell.cell_contents
        return contents
    except ValueError:
        return ABSENT


class CodeKind(Kind):
    """What a function runs: its code and its defaults."""

    __slots__ = ()
    _KEYS = ("__code__", "__defaults__", "__kwdefaults__")

    def read(self, owner: Any) -> Held:
        return self._KEYS, tuple([getattr(owner, key) for key in self._KEYS])

    def put(self, owner: Any, key: Any, value: object) -> None:
        setattr(owner, key, value)

    def step(self, path: Source, key: Any) -> Source:
        return Attr(path, key)


class WeakKind(Kind):
    """The object behind a weak reference."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        value = owner()
        return ((), ()) if value is None else (("()",), (value,))

    def step(self, path: Source, key: Any) -> Source:
        return Referent(path)


class ContextKind(Kind):
    """The value of a context variable."""

    __slots__ = ()

    def read(self, owner: ContextVar[object]) -> Held:
        value = owner.get(ABSENT)
        return ((), ()) if value is ABSENT else (("get()",), (value,))

    def put(self, owner: ContextVar[object], key: Any, value: object) -> None:
        owner.set(value)  # only the token of this very write could undo it: there is no `drop`

    def step(self, path: Source, key: Any) -> Source:
        return Referent(path)


class OrderKind(Kind):
    """The order of an OrderedDict, which can change without a write to the dict."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        keys = at_once(partial(OrderedDict.keys, owner))
        return keys, keys

    def step(self, path: Source, key: Any) -> Source:
        return path


class FactoryKind(Kind):
    """What a defaultdict makes for a missing key."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        return ("default_factory",), (owner.default_factory,)

    def put(self, owner: Any, key: Any, value: object) -> None:
        owner.default_factory = value

    def step(self, path: Source, key: Any) -> Source:
        return Attr(path, key)


class ThreadLocalKind(Kind):
    """The calling thread's attributes of a threading.local."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        space = copy_dict(owner.__dict__)
        return tuple(space), tuple(space.values())

    def put(self, owner: Any, key: Any, value: object) -> None:
        owner.__dict__[key] = value

    def drop(self, owner: Any, key: Any) -> None:
        owner.__dict__.pop(key, None)

    def step(self, path: Source, key: Any) -> Source:
        return Attr(path, key)


def is_link(value: object) -> bool:
    """Whether this is an entry of an lru_cache with a limit."""
    return name_of(type(value)).endswith("_lru_list_elem")


class MemoKind(Kind):
    """A function behind lru_cache: what it returns hangs on what was cached before.

    It holds the arguments of earlier calls, then what they returned.
    """

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        space = self.space_of(owner)
        held = (*space, *space.values())
        return tuple(range(len(held))), held

    def space_of(self, owner: Any) -> dict[Any, Any]:
        """Where the results are: in a C object, to which the collector knows the way."""
        own = own_dict(owner)
        spaces = [r for r in gc.get_referents(owner) if type(r) is dict and r is not own]
        # With a limit it holds links, and dicts among the results come before it.
        linked = (s for s in spaces if any(map(is_link, s.values())))
        return next(linked, spaces[0] if spaces else {})

    def step(self, path: Source, key: Any) -> Source:
        return Attr(path, "cache")


class ArrayKind(Kind):
    """A NumPy array or a bytearray, by its bytes."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        numpy: Any = sys.modules.get("numpy")
        is_array = numpy is not None and isinstance(owner, numpy.ndarray)
        # A subclass may have a `tobytes` or `__bytes__` of its own.
        raw = numpy.ndarray.tobytes(owner) if is_array else memoryview(owner).tobytes()
        form = f"{getattr(owner, 'dtype', type(owner).__name__)}{getattr(owner, 'shape', '')}"
        return ("values",), (form.encode() + raw,)

    def step(self, path: Source, key: Any) -> Source:
        return path


ATTRIBUTES = AttributesKind()
ITEMS = ItemsKind()
CLASS_DICT = ClassDictKind()
LIBRARY_CLASS = LibraryClassKind()
ELEMENTS = ElementsKind()
MEMBERS = MembersKind()
SLOTS = SlotsKind()
CELLS = CellsKind()
CODE = CodeKind()
WEAK = WeakKind()
CONTEXT = ContextKind()
ORDER = OrderKind()
FACTORY = FactoryKind()
THREAD_LOCAL = ThreadLocalKind()
MEMO = MemoKind()
ARRAY = ArrayKind()


class Holder(NamedTuple):  # a tuple: there are thousands
    """One mutable thing, and what it held before the run."""

    owner: Any
    kind: Kind
    path: Any  # a Source; None for the traced function's own cells
    anchored: bool  # the same thing on every call; else it is reached anew through an argument
    keys: tuple[Any, ...]
    kept: tuple[Any, ...]  # values, tensors by weak references

    def before(self) -> dict[Any, object]:
        """What it held; None for a tensor that died since."""
        return {k: strong(v) for k, v in zip(self.keys, self.kept, strict=True)}

    def order(self) -> tuple[Any, ...]:
        """The keys as they followed one another."""
        return tuple(map(_plain_key, self.keys))

    def step(self, key: Any) -> Source:
        """The source of one key."""
        return self.kind.step(self.path, key)


class _Users(NamedTuple):
    """A weak reference of the user's, which is a value like any other."""

    ref: weakref.ref[Any]


def _is_loaded(old: object, new: object) -> bool:
    """Whether an import put a module into its package."""
    if old is not ABSENT or not isinstance(new, ModuleType):
        return False
    return sys.modules.get(name_of_module(new)) is new


def strong(kept: Any) -> object:
    """The value that was kept; None for a tensor that died since."""
    if type(kept) is _Users:
        return kept.ref
    return kept() if type(kept) is weakref.ref else kept


class Write(NamedTuple):
    """One key that holds something else after the run than before it."""

    holder: Holder
    key: Any
    before: object
    after: object

    @property
    def source(self) -> Source:
        """Where it was written."""
        return self.holder.step(self.key)

    @property
    def spot(self) -> tuple[int, Any]:
        """The place that was written, whichever holder leads to it."""
        return self.holder.kind.spot(self.holder.owner, self.key)


class TensorFacts(NamedTuple):
    """What is known of a tensor that may be gone by now."""

    meta: TensorMeta
    traits: Traits
    ref: weakref.ref[Any]  # one object per tensor


def may_plant(owner: object, kind: Kind) -> bool:
    """Whether a number that varies may be left open in such a place.

    Not in loggers: torch's shape environment, which answers for open numbers, asks those.
    """
    if not isinstance(kind, _PLANTED_IN) or isinstance(kind, _OF_LIBRARIES):
        return False
    return not isinstance(owner, (logging.Logger, logging.Manager))


_PLANTED_IN = (AttributesKind, ItemsKind, NamesKind, CellsKind, SlotsKind, ClassDictKind)
_OF_LIBRARIES = (LibraryClassKind, LibraryNamesKind)


class _Planted(NamedTuple):
    """An open number that is in the place of a plain one, for as long as the run goes on."""

    holder: Holder
    key: Any
    number: object
    plain: object


class Holders:
    """Every holder that one run could reach."""

    def __init__(self) -> None:
        self.all: list[Holder] = []
        # Gives an open number for what a holder has under a key, or None.
        self.open_number: Callable[[Holder, Any, int | float], object] | None = None
        self._planted: dict[tuple[int, Any], _Planted] = {}  # open numbers, by spot
        self.planted: list[tuple[Holder, Any]] = []  # all that lead to one, and by which key
        self._switches = count_switches()
        self._types: set[int] = set()  # met so far, by identity, and no tensors
        self._kinds: list[type] = []  # the same, alive
        self._facts: dict[int, tuple[TensorMeta, Traits]] = {}  # by a tensor's weak reference
        self._users: dict[int, _Users] = {}  # by identity

    def remember(self, owner: Any, kind: Kind, path: Any, anchored: bool) -> Holder:
        """Keep what `owner` holds now."""
        keys, values = self._read(owner, kind)
        holder = Holder(owner, kind, path, anchored, keys, self._keep(values))
        self.all.append(holder)
        if (self.open_number is not None or self._planted) and may_plant(owner, kind):
            self._plant(holder)
        return holder

    def _read(self, owner: Any, kind: Kind) -> Held:
        """What something holds, with plain numbers in the place of those that were planted."""
        keys, values = kind.read(owner)
        if not self._planted or not may_plant(owner, kind):
            return keys, values
        pairs = zip(keys, values, strict=True)
        return keys, tuple([self._unplant(owner, kind, key, value) for key, value in pairs])

    def _unplant(self, owner: Any, kind: Kind, key: Any, value: object) -> object:
        if not is_open(value):
            return value
        planted = self._planted.get(kind.spot(owner, key))
        return value if planted is None or planted.number is not value else planted.plain

    def _plant(self, holder: Holder) -> None:
        """Put open numbers in the place of those that are to be open, until the run is over."""
        owner, kind = holder.owner, holder.kind
        for key, value in zip(holder.keys, holder.kept, strict=True):
            if not is_exactly(value, int, float):
                continue
            spot = kind.spot(owner, key)
            if spot not in self._planted and self.open_number is not None:
                number = self.open_number(holder, key, value)
                if number is not None:
                    self._planted[spot] = _Planted(holder, key, number, value)
                    kind.put(owner, key, number)
            if spot in self._planted:
                self.planted.append((holder, key))

    @contextmanager
    def planting_nothing(self) -> Iterator[None]:
        """What is met in here was read already, as it is."""
        before, self.open_number = self.open_number, None
        try:
            yield
        finally:
            self.open_number = before

    def is_planted(self, holder: Holder, key: Any) -> bool:
        """Whether what a holder has under a key was open in the run."""
        return bool(self._planted) and holder.kind.spot(holder.owner, key) in self._planted

    def uproot(self) -> None:
        """Put plain numbers back where open ones were planted, and still are."""
        self.open_number = None
        for spot, (holder, key, number, plain) in self._planted.items():
            if number is not None and holder.kind.get(holder.owner, key) is number:
                holder.kind.put(holder.owner, key, plain)
            self._planted[spot] = _Planted(holder, key, None, plain)  # the number may die now

    def _keep(self, values: tuple[object, ...]) -> tuple[object, ...]:
        """What to keep so that identities tell values apart.

        A tensor's weak reference is one object as long as the tensor lives.
        """
        # Types are looked at first: most things hold no tensor. 16 → 9 ms for 36 layers.
        types = self._types
        if types.issuperset(map(id, map(type, values))):
            return values
        for cls in map(type, values):
            if not issubclass(cls, torch.Tensor) and cls is not weakref.ref:
                types.add(id(cls))
                self._kinds.append(cls)
        return tuple([v if id(type(v)) in types else self._refer(v) for v in values])

    def _refer(self, tensor: Any) -> weakref.ref[Any] | _Users:
        if type(tensor) is weakref.ref:
            return self._users.setdefault(id(tensor), _Users(tensor))
        ref = weakref.ref(tensor)
        # A run that replaces a tensor lets the old one die, and its shape may have been read.
        # Parameters aren't replaced by runs: their facts would cost a millisecond per layer.
        # One without a shape can't be asked.
        known = isinstance(tensor, torch.nn.Parameter) or id(ref) in self._facts
        if not known and not is_lazy(tensor):
            self._facts[id(ref)] = (meta_of(tensor), traits_of(tensor))
        return ref

    def facts_of(self, holder: Holder, key: Any) -> TensorFacts | None:
        """What is known of the tensor that was held before; None if it was none."""
        for known, kept in zip(holder.keys, holder.kept, strict=True):
            if known == key and type(kept) is weakref.ref:
                facts = self._facts.get(id(kept))
                return None if facts is None else TensorFacts(*facts, kept)
        return None

    def find_library_writes(self, names: frozenset[str]) -> Iterator[tuple[Holder, str]]:
        """Which of these names the run changed in modules and classes of libraries."""
        for holder in self.all:
            if isinstance(holder.kind, _OF_LIBRARIES):
                before = holder.before()
                now = dict(zip(*holder.kind.read(holder.owner), strict=True))
                for name in sorted(names & (before.keys() | now.keys())):
                    old, new = unhooked(before.get(name, ABSENT)), unhooked(now.get(name, ABSENT))
                    if old is not new and not same_plain(old, new) and not _is_loaded(old, new):
                        yield holder, name

    def is_alone(self) -> bool:
        """Whether no other thread ran Python code since: all that was written, the run wrote."""
        return self._switches == count_switches()

    def check_unwritten(self, writes: Iterable[Write]) -> None:
        """Refuse writes that may be another thread's: what the run read can't be told then.

        What comes with the call is left to those who share it between threads.
        """
        if not self.is_alone():
            for write in writes:
                if write.holder.anchored:
                    raise Refused(
                        "another-thread",
                        f"{write.source} was written while another thread ran, perhaps by that "
                        "thread.",
                    )

    def find_writes(self) -> Iterator[Write]:
        """What the run changed. A place that several holders share comes once for each of them."""
        shared: dict[tuple[int, Any], object] | None = None
        # Functions of one module share its globals; the first of them saw those before the run,
        # a later one perhaps what the run had put there.
        met: set[tuple[int, Any]] = set()
        for holder in self.all:
            if isinstance(holder.kind, _OF_LIBRARIES):  # hooks of other threads come and go there
                continue
            names = holder.kind.names if isinstance(holder.kind, NamesKind) else frozenset()
            first = {(id(holder.owner), name) for name in names} - met
            met |= first
            keys, values = self._read(holder.owner, holder.kind)
            kept = self._keep(values)
            replaced = self._find_replaced(holder)
            is_same = tuple(map(id, kept)) == tuple(map(id, holder.kept))
            if is_same and keys == holder.keys and not replaced:
                continue
            before = dict(zip(holder.keys, holder.kept, strict=True))
            after = dict(zip(keys, kept, strict=True))
            # The same values in another order: one write stands for it, of a key that moved.
            if set(before) == set(after) and isinstance(holder.kind, ItemsKind):
                moved = next((a for b, a in zip(before, after, strict=True) if b != a), ABSENT)
                if moved is not ABSENT and all(before[k] is after[k] for k in before):
                    yield Write(holder, moved, strong(before[moved]), strong(after[moved]))
                    continue
            if shared is None:
                shared = self._find_shared()
            for key in dict.fromkeys((*before, *after)):
                if names and (id(holder.owner), key) not in first:
                    continue
                old, new = before.get(key, ABSENT), after.get(key, ABSENT)
                if shared:
                    old = shared.get(holder.kind.spot(holder.owner, key), old)
                is_equal = old is new or (id(type(old)) in PLAIN and same_plain(old, new))
                if key in replaced or not is_equal:
                    yield Write(holder, key, strong(old), strong(new))

    def _find_replaced(self, holder: Holder) -> set[Any]:
        """Keys whose open number is there no more: the same value may be another one next time."""
        return {
            planted.key
            for planted in self._planted.values()
            if planted.holder is holder
            and planted.number is not None
            and holder.kind.get(holder.owner, planted.key) is not planted.number
        }

    def _find_shared(self) -> dict[tuple[int, Any], object]:
        """What was first seen in places that more than one holder leads to.

        One that was reached while the run went on may have seen what the run had put there.
        """
        first: dict[tuple[int, Any], object] = {}
        shared: dict[tuple[int, Any], object] = {}
        dicts = {id(holder.owner) for holder in self.all if isinstance(holder.kind, ItemsKind)}
        for holder in self.all:
            if isinstance(holder.kind, CellsKind) or id(_dict_behind(holder)) in dicts:
                for key, kept in zip(holder.keys, holder.kept, strict=True):
                    spot = holder.kind.spot(holder.owner, key)
                    if spot in first:
                        shared[spot] = first[spot]
                    else:
                        first[spot] = kept
        return shared


def _dict_behind(holder: Holder) -> dict[Any, Any] | None:
    """A dict that code can also come to as such: an object's, or a table of a module."""
    if isinstance(holder.kind, (AttributesKind, TableKind, ItemsKind)):
        return holder.kind.dict_of(holder.owner)
    return None
