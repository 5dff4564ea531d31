"""Kinds: how each kind of mutable thing holds values, is read, and is written again.

An object holds attributes, a dict items, a function cells, a memo what it answered before. A kind
knows the keys, the source of each, and the dict behind them where a write to it can be watched.
Reading runs no code of the user's.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Set
from contextvars import Context, ContextVar
from functools import _lru_cache_wrapper, partial
from types import CellType
from typing import Any, cast

import torch

from tripwire.reading.sources import Attr, Cell, Global, Item, Referent, Source
from tripwire.values.classes import class_dict, isinstance, name_of
from tripwire.values.contents import (
    at_once,
    cells_of,
    copy_dict,
    elements_of,
    own_dict,
    read_slots,
    slots_of,
)
from tripwire.writes.patches import unhooked

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
        return Attr(path, key)

    def dict_of(self, owner: Any) -> dict[Any, Any] | None:
        """The dict behind it, where there is one: a write to it can be watched."""
        return None

    def get(self, owner: Any, key: Any) -> object:
        """What it holds under one key, or ABSENT."""
        keys, values = self.read(owner)
        return dict(zip(keys, values, strict=True)).get(key, ABSENT)

    def slot(self, owner: Any, key: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """C functions that get and put what it holds under a key."""
        raise NotImplementedError

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

    def get(self, owner: Any, key: Any) -> object:
        return dict.get(self.dict_of(owner), key, ABSENT)

    def slot(self, owner: Any, key: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        space = self.dict_of(owner)
        return partial(dict.get, space, key), partial(dict.__setitem__, space, key)


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
    """A dict, or a subclass of it; the subclass's own methods aren't called."""

    __slots__ = ()

    def dict_of(self, owner: Any) -> dict[Any, Any]:
        return cast("dict[Any, Any]", owner)

    def get(self, owner: Any, key: Any) -> object:
        return super().get(owner, plain_key(key))

    def slot(self, owner: Any, key: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        return super().slot(owner, plain_key(key))

    def read(self, owner: Any) -> Held:
        space = copy_dict(owner)
        if isinstance(owner, OrderedDict):  # its order is its own
            order = [key for key in at_once(partial(OrderedDict.keys, owner)) if key in space]
            space = {key: space[key] for key in order}
        keys = [_Same(key) if isinstance(key, torch.Tensor) else key for key in space]
        return tuple(keys), tuple(space.values())

    def put(self, owner: Any, key: Any, value: object) -> None:
        write = OrderedDict if isinstance(owner, OrderedDict) else dict
        write.__setitem__(owner, plain_key(key), value)

    def drop(self, owner: Any, key: Any) -> None:
        write = OrderedDict if isinstance(owner, OrderedDict) else dict
        if dict.__contains__(owner, plain_key(key)):
            write.__delitem__(owner, plain_key(key))

    def step(self, path: Source, key: Any) -> Source:
        return Item(path, plain_key(key))


class _Same:
    """A key that compares by identity: tensors don't compare as keys must."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def plain_key(key: Any) -> Any:
    """A key of a dict as the program spelled it."""
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

    def slot(self, owner: Any, key: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        return super().slot(owner, key)[0], partial(type.__setattr__, owner, key)

    def drop(self, owner: Any, key: Any) -> None:
        if key in class_dict(owner):
            type.__delattr__(owner, key)


class LibraryClassKind(ClassDictKind):
    """What a class of torch holds: writes to it are noticed, but never taken for the run's own."""

    __slots__ = ()


class NamesKind(_DictKind):
    """Some names of a namespace: globals of a module, or attributes of one."""

    __slots__ = ("module", "names")

    def __init__(self, names: Set[str], module: str | None = None) -> None:
        self.names = names
        self.module = module  # the name of a G[...] root; None below another path

    def dict_of(self, owner: Any) -> dict[Any, Any]:
        return cast("dict[Any, Any]", owner)

    def read(self, owner: Any) -> Held:
        get = dict.get
        found = {n: v for n in self.names if (v := get(owner, n, ABSENT)) is not ABSENT}
        return tuple(found), tuple(map(unhooked, found.values()))

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

    def put(self, owner: Any, key: Any, value: object) -> None:
        (deque if isinstance(owner, deque) else list).__setitem__(owner, key, value)

    def slot(self, owner: Any, key: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        kind: Any = deque if isinstance(owner, deque) else list
        return partial(kind.__getitem__, owner, key), partial(kind.__setitem__, owner, key)

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
        set.discard(owner, plain_key(key))

    def step(self, path: Source, key: Any) -> Source:
        return Item(path, plain_key(key))


class SlotsKind(Kind):
    """The filled slots of an object."""

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        found = read_slots(owner)
        return tuple(found), tuple(found.values())

    def put(self, owner: Any, key: Any, value: object) -> None:
        slots_of(type(owner))[key].__set__(owner, value)

    def slot(self, owner: Any, key: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        slot = slots_of(type(owner))[key]
        return partial(slot.__get__, owner), partial(slot.__set__, owner)

    def drop(self, owner: Any, key: Any) -> None:
        if key in read_slots(owner):
            slots_of(type(owner))[key].__delete__(owner)


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

    def slot(self, owner: Any, key: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        cell, contents = cells_of(owner)[key], vars(CellType)["cell_contents"]
        return partial(contents.__get__, cell), partial(contents.__set__, cell)

    def drop(self, owner: Any, key: Any) -> None:
        if _contents(cells_of(owner)[key]) is not ABSENT:
            del cells_of(owner)[key].cell_contents

    def step(self, path: Source | None, key: Any) -> Source:
        return Cell(path, key)

    def spot(self, owner: Any, key: Any) -> tuple[int, Any]:
        cell = cells_of(owner).get(key)  # none, once the function has code with other names
        return (id(owner), key) if cell is None else (id(cell), None)

    def get(self, owner: Any, key: Any) -> object:
        cell = cells_of(owner).get(key)
        return ABSENT if cell is None else _contents(cell)


def _contents(cell: CellType) -> object:
    try:
        return cast("object", cell.cell_contents)
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

    def default_of(self, owner: ContextVar[object]) -> object:
        """What it gives where nobody has set it, or ABSENT."""
        try:
            return Context().run(owner.get)
        except LookupError:
            return ABSENT

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

    def slot(self, owner: Any, key: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        space = owner.__dict__
        return partial(dict.get, space, key), partial(dict.__setitem__, space, key)

    def spot(self, owner: Any, key: Any) -> tuple[int, Any]:
        return id(owner.__dict__), key  # `vars(owner)` leads to it, too


def is_link(value: object) -> bool:
    """Whether this is an entry of an lru_cache with a limit."""
    return name_of(type(value)).endswith("_lru_list_elem")


class MemoKind(Kind):
    """A function behind lru_cache: what it returns depends on what was cached before.

    It holds the arguments of earlier calls, each with what they returned, in their order.
    """

    __slots__ = ()

    def read(self, owner: Any) -> Held:
        space = self.space_of(owner)
        held = tuple(part for item in at_once(space.items) for part in item)
        return tuple(range(len(held))), held

    def space_of(self, owner: Any) -> dict[Any, Any]:
        """Where the results are: in a C object, to which the collector knows the way."""
        own = own_dict(owner)
        spaces = [r for r in gc.get_referents(owner) if type(r) is dict and r is not own]
        # With a limit it holds links, and dicts among the results come before it.
        linked = (s for s in spaces if any(map(is_link, s.values())))
        return next(linked, spaces[0] if spaces else {})

    def only_grows(self, owner: Any) -> bool:
        """Whether nothing is ever put out, so that it doesn't matter what was asked for last."""
        memo: Any = _lru_cache_wrapper  # a subclass, or its instance, may have one of its own
        return memo.cache_info(owner).maxsize is None

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
        if is_array:  # a view of the same values may lie otherwise, or be read-only
            array = numpy.ndarray
            form += f"{array.strides.__get__(owner)}{array.flags.__get__(owner).num}"
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
