"""Sources: a source is a path that reaches a value again.

    L['x']                       an argument
    L['self'].blocks[3].weight   an attribute or item below one
    G['SCALE']                   a global of the traced function's module
    G[pkg.rope]['TABLE']         a global of another module
    C['beta']                    a closure cell of the traced function
    T[L['self']].depth           an attribute of a class

A source holds no value. Roots say where the paths begin.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import FunctionType
from typing import Any

from msgspec import Struct, field
from torch.utils import _pytree as pytree

from tripwire.values.classes import find_in_class, hides_own, isinstance
from tripwire.values.contents import PROXIES, behind_proxy, cells_of, held_item, own_dict, spell_key


class Roots(Struct, frozen=True):
    """Where sources begin: the call's arguments, and the traced callable's surroundings."""

    locals: Mapping[str, object]
    function: object  # the callable that was traced; its cells are C[...]
    namespaces: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


class Source(Struct, frozen=True):
    """A path. Prints as the user would write it; `fetch` follows it."""

    def fetch(self, roots: Roots) -> object:
        """The value that the path reaches now. Raises LookupError or AttributeError."""
        raise NotImplementedError

    @property
    def base(self) -> Source | None:
        """The path without its last step; None at a root."""
        return None

    @property
    def label(self) -> str:
        """The last step as a scope's path has it; empty where it adds none."""
        return str(getattr(self, "name", ""))


class Below(Source, frozen=True):
    """A path with one more step than `owner`."""

    owner: Source

    @property
    def base(self) -> Source:
        return self.owner


class Local(Source, frozen=True):
    """An argument of the call, by its parameter's name."""

    name: str

    def __str__(self) -> str:
        return f"L[{self.name!r}]"

    @property
    def label(self) -> str:
        return "" if self.name == "self" else self.name

    def fetch(self, roots: Roots) -> object:
        return roots.locals[self.name]


class Global(Source, frozen=True):
    """A module-level name. `module` is empty for the traced function's own module."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"G[{self.module}][{self.name!r}]" if self.module else f"G[{self.name!r}]"

    def fetch(self, roots: Roots) -> object:
        return roots.namespaces[self.module][self.name]


class Imported(Source, frozen=True):
    """A Python module that the run imports by name."""

    name: str

    def __str__(self) -> str:
        return f"M[{self.name}]"

    def fetch(self, roots: Roots) -> object:
        return sys.modules[self.name]


class Running(Source, frozen=True):
    """A function that ran: the traced one, or one that no path leads to."""

    name: str

    def __str__(self) -> str:
        return f"F[{self.name}]"

    def is_traced(self, roots: Roots) -> bool:
        """Whether it is the traced function."""
        return getattr(roots.function, "__qualname__", None) == self.name

    def fetch(self, roots: Roots) -> object:
        if self.is_traced(roots):
            return roots.function
        raise LookupError(f"no path leads to {self.name}")


class Cell(Source, frozen=True):
    """A closure variable of a function; `function` is None for the traced one."""

    function: Source | None
    name: str

    def __str__(self) -> str:
        prefix = "" if self.function is None else f"{self.function}."
        return f"{prefix}C[{self.name!r}]"

    @property
    def base(self) -> Source | None:
        return self.function

    def fetch(self, roots: Roots) -> object:
        function = roots.function if self.function is None else self.function.fetch(roots)
        return cells_of(function)[self.name].cell_contents


class TypeOf(Below, frozen=True):
    """The class of a value; its attributes are shared by every instance."""

    def __str__(self) -> str:
        return f"T[{self.owner}]"

    def fetch(self, roots: Roots) -> object:
        return type(self.owner.fetch(roots))


class Attr(Below, frozen=True):
    """An attribute, reached as `getattr` reaches it; of a class, what lies there.

    What a property stands before was read in the object's `__dict__`, and is reached there.
    """

    name: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"

    def fetch(self, roots: Roots) -> object:
        owner = self.owner.fetch(roots)
        if isinstance(owner, type):
            held = find_in_class(owner, self.name)
            if type(find_in_class(type(held), "__get__")) is FunctionType:
                return held  # a descriptor of the user's, which has things of its own
        elif self.name in (own := own_dict(owner) or {}) and hides_own(type(owner), self.name):
            return own[self.name]
        return getattr(owner, self.name)


class Item(Below, frozen=True):
    """An element of a sequence or a mapping, or a child of a pytree node."""

    key: object  # may be nan or a tensor: structs compare by identity first

    def __str__(self) -> str:
        return f"{self.owner}[{spell_key(self.key)}]"

    @property
    def label(self) -> str:
        return spell_key(self.key, str)

    def fetch(self, roots: Roots) -> object:
        owner: Any = self.owner.fetch(roots)
        if isinstance(owner, dict) and hasattr(type(owner), "__missing__"):
            return held_item(owner, self.key)
        return owner[self.key]


class KeyOf(Below, frozen=True):
    """A tensor that is a key of a mapping, `d[weight]`; what lies under it is an `Item`."""

    key: object

    def __str__(self) -> str:
        return f"{self.owner}.keys()[{spell_key(self.key)}]"

    @property
    def label(self) -> str:
        return spell_key(self.key, str)

    def fetch(self, roots: Roots) -> object:
        owner: Any = self.owner.fetch(roots)
        if not any(one is self.key for one in dict.keys(owner)):
            raise LookupError(str(self))
        return self.key


class Referent(Below, frozen=True):
    """What a weak reference, a weak proxy or a context variable leads to."""

    def __str__(self) -> str:
        return f"{self.owner}()"

    @property
    def label(self) -> str:
        return "()"

    def fetch(self, roots: Roots) -> object:
        owner = self.owner.fetch(roots)
        if id(type(owner)) in PROXIES:
            return behind_proxy(owner)
        return owner.get() if isinstance(owner, ContextVar) else owner()  # type: ignore[operator]


class Child(Below, frozen=True):
    """The nth child of an object that is registered with pytree and has no nicer path."""

    index: int

    def __str__(self) -> str:
        return f"{self.owner}<{self.index}>"

    @property
    def label(self) -> str:
        return str(self.index)

    def fetch(self, roots: Roots) -> object:
        return pytree_children(self.owner.fetch(roots))[self.index]


def pytree_children(value: object) -> list[object]:
    """The direct children of an object registered with torch's pytree."""
    children, _ = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    return list(children)


class ScopePaths:
    """Scope paths of sources: `L['self'].blocks[3].attn` is `blocks.3.attn`.

    Sources share their prefixes, so each step is spelled once.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, tuple[Source, str]] = {}

    def of(self, source: Source) -> str:
        """The path of a source; empty for `L['self']`."""
        known = self._known.get(id(source))
        if known is None:
            above = "" if source.base is None else self.of(source.base)
            own = source.label
            known = self._known[id(source)] = (
                source,
                f"{above}.{own}" if above and own else above or own,
            )
        return known[1]


def has_pytree(value: object) -> bool:
    """Whether torch's pytree registry knows the exact class of a value.

    The registry is a dict: a metaclass with a hash of its own would be asked for it.
    """
    cls = type(value)
    is_plain_key = type(cls) is type or find_in_class(type(cls), "__hash__") is object.__hash__
    return is_plain_key and cls in pytree.SUPPORTED_NODES


def iter_pytree(value: object, path: Source) -> Iterator[tuple[object, Source]]:
    """Children with their paths: by attribute or key where that reaches the same object."""
    with_keys = pytree.SUPPORTED_NODES[type(value)].flatten_with_keys_fn
    if with_keys is None:
        for index, child in enumerate(pytree_children(value)):
            yield child, Child(path, index)
        return
    for index, (key, child) in enumerate(with_keys(value)[0]):
        match key:
            case pytree.GetAttrKey(name):
                yield child, Attr(path, name)
            case pytree.MappingKey(name) | pytree.SequenceKey(name):
                yield child, Item(path, name)
            case _:
                yield child, Child(path, index)
