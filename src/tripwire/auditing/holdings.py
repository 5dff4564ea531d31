"""Holdings: what one live object holds, by key, and how to write it.

Nothing of the user's runs when a holding is looked at. `rewrite` writes only what differs.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any

from tripwire.auditing.findings import PlaceKind
from tripwire.rulebook.rules import words
from tripwire.values.classes import class_dict, find_in_class, isinstance

Contents = dict[Any, Any]

# Of a module: walked as tables, the compiler's own, or read by no call.
_MODULE_OWN = words(
    "_parameters _buffers _modules _compiled_call_impl _is_full_backward_hook "
    "_non_persistent_buffers_set"
)
_CLASS_OWN = words(
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __annotate_func__ "
    "__annotations_cache__ __abstractmethods__ _abc_impl __slots__ __parameters__ __orig_bases__ "
    "__static_attributes__ __firstlineno__ __match_args__"
)


class Holding:
    """What an object holds."""

    kind = PlaceKind.ITEM
    is_ordered = True  # whether the order of its keys can be told

    def __init__(self, path: str, owner: Any) -> None:
        self.path = path
        self.owner = owner

    def contents(self) -> Contents:
        """What is held now."""
        raise NotImplementedError

    def put(self, key: Any, value: Any) -> None:
        """Write one place."""
        raise NotImplementedError

    def drop(self, key: Any) -> None:
        """Empty one place."""
        raise NotImplementedError

    def spell(self, key: Any) -> str:
        """The path of one place."""
        return f"{self.path}.{key}"

    def rewrite(self, wanted: Contents) -> None:
        """Hold this and nothing else, in this order."""
        found = self.contents()
        for key in found.keys() - wanted.keys():
            self.drop(key)
        kept = [key for key in found if key in wanted]
        if self.is_ordered and kept != list(wanted)[: len(kept)]:
            for key in kept:
                self.drop(key)
            found = {}
        for key, value in wanted.items():
            if key not in found or found[key] is not value:
                self.put(key, value)


class HeldAttributes(Holding):
    """The instance's own attributes."""

    kind = PlaceKind.ATTRIBUTE

    def contents(self) -> Contents:
        held = _dict_of(self.owner)
        if "_parameters" not in held:
            return dict(held)
        return {key: held[key] for key in held if key not in _MODULE_OWN}

    def put(self, key: Any, value: Any) -> None:
        if _has(find_in_class(type(self.owner), key), "__set__"):
            _dict_of(self.owner)[key] = value
        else:
            object.__setattr__(self.owner, key, value)

    def drop(self, key: Any) -> None:
        if _has(find_in_class(type(self.owner), key), "__delete__"):
            del _dict_of(self.owner)[key]
        else:
            object.__delattr__(self.owner, key)


def own_dict(value: object) -> dict[str, Any] | None:
    """An object's attributes; a `__dict__` that is a property isn't asked."""
    descriptor: Any = find_in_class(type(value), "__dict__")
    if not isinstance(descriptor, (types.GetSetDescriptorType, types.MemberDescriptorType)):
        return None
    found = descriptor.__get__(value)
    return found if isinstance(found, dict) else None


def spell(value: object) -> str:
    """A value as a text; by its class and address where its own `__repr__` raises."""
    try:
        return repr(value)
    except Exception:  # the user's
        return object.__repr__(value)


def _has(found: object, method: str) -> bool:
    return find_in_class(type(found), method) is not None


def _dict_of(owner: Any) -> dict[str, Any]:
    held = own_dict(owner)
    assert held is not None  # the walk found it
    return held


class HeldThreadLocal(Holding):
    """A thread's own attributes; the object finds them by its own means."""

    kind = PlaceKind.ATTRIBUTE

    def contents(self) -> Contents:
        return dict(self.owner.__dict__)

    def put(self, key: Any, value: Any) -> None:
        setattr(self.owner, key, value)

    def drop(self, key: Any) -> None:
        delattr(self.owner, key)


class HeldSlots(Holding):
    """Attributes that have a slot each."""

    kind = PlaceKind.ATTRIBUTE
    is_ordered = False

    def __init__(self, path: str, owner: Any, slots: dict[str, Any]) -> None:
        super().__init__(path, owner)
        self._slots = slots

    def contents(self) -> Contents:
        found: Contents = {}
        for name, slot in self._slots.items():
            try:
                found[name] = slot.__get__(self.owner)
            except AttributeError:  # empty
                continue
        return found

    def put(self, key: Any, value: Any) -> None:
        self._slots[key].__set__(self.owner, value)

    def drop(self, key: Any) -> None:
        self._slots[key].__delete__(self.owner)


class _Subscripted(Holding):
    """What is held as `owner[key]`."""

    def put(self, key: Any, value: Any) -> None:
        self.owner[key] = value

    def drop(self, key: Any) -> None:
        del self.owner[key]


class HeldItems(_Subscripted):
    """A dict's items."""

    def contents(self) -> Contents:
        return dict(dict.items(self.owner))

    def spell(self, key: Any) -> str:
        return f"{self.path}[{spell(key)}]"


class HeldTable(HeldItems):
    """A module's parameters, buffers or submodules."""

    def __init__(self, path: str, owner: dict[str, Any], kind: PlaceKind) -> None:
        super().__init__(path, owner)
        self.kind = kind

    def spell(self, key: Any) -> str:
        return f"{self.path}.{key}"


class HeldElements(_Subscripted):
    """What a list or a deque holds."""

    def contents(self) -> Contents:
        return dict(enumerate(self.owner))

    def spell(self, key: Any) -> str:
        return f"{self.path}[{key}]"

    def rewrite(self, wanted: Contents) -> None:
        found, values = list(self.owner), list(wanted.values())
        if len(found) == len(values) and all(a is b for a, b in zip(found, values, strict=True)):
            return
        if isinstance(self.owner, deque):
            self.owner.clear()
            self.owner.extend(values)
        else:
            list.__setitem__(self.owner, slice(None), values)


class HeldMembers(Holding):
    """What a set holds."""

    def contents(self) -> Contents:
        return {member: member for member in self.owner}

    def put(self, key: Any, value: Any) -> None:
        self.owner.add(key)

    def drop(self, key: Any) -> None:
        self.owner.discard(key)

    def spell(self, key: Any) -> str:
        return self.path


class HeldCells(Holding):
    """What a function closes over."""

    kind = PlaceKind.CELL
    is_ordered = False

    def _cells(self) -> Iterable[tuple[str, types.CellType]]:
        cells: tuple[types.CellType, ...] = self.owner.__closure__ or ()
        return zip(self.owner.__code__.co_freevars, cells, strict=True)

    def contents(self) -> Contents:
        found: Contents = {}
        for name, cell in self._cells():
            try:
                found[name] = cell.cell_contents
            except ValueError:  # empty
                continue
        return found

    def put(self, key: Any, value: Any) -> None:
        dict(self._cells())[key].cell_contents = value

    def drop(self, key: Any) -> None:
        del dict(self._cells())[key].cell_contents

    def spell(self, key: Any) -> str:
        return f"{self.path}, closure's {key}"


class HeldDefaults(Holding):
    """Values that a function's parameters have where a call gives none."""

    kind = PlaceKind.DEFAULT

    def contents(self) -> Contents:
        values = self.owner.__defaults__ or ()
        names = self.owner.__code__.co_varnames[: self.owner.__code__.co_argcount]
        by_position = dict(zip(names[len(names) - len(values) :], values, strict=False))
        return by_position | (self.owner.__kwdefaults__ or {})

    def put(self, key: Any, value: Any) -> None:
        if key in (self.owner.__kwdefaults__ or {}):
            self.owner.__kwdefaults__ = {**self.owner.__kwdefaults__, key: value}
            return
        values = list(self.owner.__defaults__)
        names = self.owner.__code__.co_varnames[: self.owner.__code__.co_argcount]
        values[list(names).index(key) - len(names)] = value
        self.owner.__defaults__ = tuple(values)

    def spell(self, key: Any) -> str:
        return f"{self.path}, default of {key}"

    def rewrite(self, wanted: Contents) -> None:
        for key, value in self.contents().items():
            if key in wanted and wanted[key] is not value:
                self.put(key, wanted[key])


class HeldCode(Holding):
    """A function's code."""

    kind = PlaceKind.CODE

    def contents(self) -> Contents:
        return {"__code__": self.owner.__code__}

    def put(self, key: Any, value: Any) -> None:
        self.owner.__code__ = value


class HeldGlobals(_Subscripted):
    """Names of a module's namespace that the code which ran can ask for."""

    kind = PlaceKind.GLOBAL
    is_ordered = False

    def __init__(self, path: str, owner: dict[str, Any], names: frozenset[str]) -> None:
        super().__init__(path, owner)
        self.names = names

    def contents(self) -> Contents:
        return {key: self.owner[key] for key in self.names if key in self.owner}


class HeldClassBody(Holding):
    """What a class defines; of a library's class, only the names that are given."""

    kind = PlaceKind.CLASS_ATTRIBUTE
    is_ordered = False  # nobody can write it again

    def __init__(self, path: str, owner: type, names: frozenset[str] | None = None) -> None:
        super().__init__(path, owner)
        self._names = names

    def contents(self) -> Contents:
        body = class_dict(self.owner)
        return {
            key: value
            for key, value in body.items()
            if (key not in _CLASS_OWN if self._names is None else key in self._names)
            and not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
        }

    def put(self, key: Any, value: Any) -> None:
        type.__setattr__(self.owner, key, value)

    def drop(self, key: Any) -> None:
        type.__delattr__(self.owner, key)


class HeldContext(Holding):
    """The value of a context variable."""

    kind = PlaceKind.ENVIRONMENT

    def contents(self) -> Contents:
        try:
            return {"get()": self.owner.get()}
        except LookupError:
            return {}

    def put(self, key: Any, value: Any) -> None:
        self.owner.set(value)

    # A variable can't be emptied but by the token of its own writing.
    rewrite = HeldDefaults.rewrite


class HeldEnvironment(HeldGlobals):
    """Environment variables by the names that stand in the code which ran."""

    kind = PlaceKind.ENVIRONMENT


class HeldArguments(Holding):
    """What the call is given."""

    kind = PlaceKind.ARGUMENT

    def __init__(self, names: tuple[str, ...], args: list[Any], kwargs: dict[str, Any]) -> None:
        super().__init__("", (args, kwargs))
        self._names = names  # of the positional ones
        self._args = args
        self._kwargs = kwargs

    def contents(self) -> Contents:
        return {**dict(enumerate(self._args)), **self._kwargs}

    def put(self, key: Any, value: Any) -> None:
        if isinstance(key, int):
            self._args[key] = value
        else:
            self._kwargs[key] = value

    def spell(self, key: Any) -> str:
        return self._names[key] if isinstance(key, int) else str(key)
