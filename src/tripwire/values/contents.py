"""Contents: what a value holds, and the code behind a callable. None of that code runs.

Properties, `__getattr__`, `__iter__` and `items` of a user's class never run: only what Python
itself put into classes is used. Every walk over values asks here what lies below each value.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
)
from typing import Any

from tripwire.values.classes import (
    class_dict,
    find_in_class,
    ids_of,
    isinstance,
    mro,
    name_of,
    short_name_of,
    size_of,
)

# --- containers ---


def at_once(iterate: Callable[[], Iterable[Any]]) -> tuple[Any, ...]:
    """All that a container holds, though another thread may write to it meanwhile.

    A collection can begin anywhere in an iteration, run a finaliser and let that thread go on.
    """
    for _ in range(_TRIES):
        try:
            return tuple(iterate())
        except RuntimeError as error:
            if "during iteration" not in str(error):  # not a write: an error of the container's own
                raise
    return tuple(iterate())


_TRIES = 100


def copy_dict(space: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict holds, in one go. Runs no code of a subclass."""
    # `dict.copy` asks an OrderedDict, and whatever has an `__iter__` of its own, for each value.
    return dict.copy(space) if type(space) is dict else dict(at_once(partial(dict.items, space)))


def held_item(space: dict[Any, Any], key: object) -> Any:
    """An item of a dict. One that isn't there is a KeyError: no `__missing__` runs and makes it."""
    found = dict.get(space, key, _NOTHING)  # `dict.__getitem__` asks a subclass's `__missing__`
    if found is _NOTHING:
        raise KeyError(key)
    return found


_NOTHING = object()


def elements_of(value: Any) -> tuple[Any, ...]:
    """What a list, tuple, deque or set holds. Runs no `__iter__` of a subclass."""
    base = next((kind for kind in _SEQUENCES if issubclass(type(value), kind)), None)
    if base is None:  # the container is gone
        raise TypeError(f"{name_of(type(value))} isn't a container")
    return at_once(partial(base.__iter__, value))


_SEQUENCES: tuple[Any, ...] = (list, tuple, deque, set, frozenset)


def items_of(value: dict[Any, Any]) -> tuple[tuple[Any, Any], ...]:
    """What a dict holds, in its order. Runs no `items` of a subclass."""
    base = OrderedDict if issubclass(type(value), OrderedDict) else dict
    return at_once(partial(base.items, value))


def spell_key(key: object, spell: Callable[[object], str] = repr) -> str:
    """A key as a text; by its class and address where its own `__repr__` or `__str__` raises.

    So is a tensor, the key of an optimizer's state: its own text has values, which change.
    """
    torch = sys.modules.get("torch")  # records are read without it
    if torch is not None and isinstance(key, torch.Tensor):
        return f"<{type(key).__name__} at {id(key):#x}>"
    try:
        return spell(key)
    except Exception:  # the user's
        return object.__repr__(key)


# --- attributes ---


def slots_of(cls: type) -> dict[str, MemberDescriptorType]:
    """A class's slots by name, those of its bases included."""
    return dict(_all_slots(cls))


def _all_slots(cls: type) -> list[tuple[str, MemberDescriptorType]]:
    """A class's slots, bases first; of one name there may be several."""
    found: list[tuple[str, MemberDescriptorType]] = []
    for base in mro(cls)[::-1]:
        space = class_dict(base)
        if "__slots__" in space:  # in few: asked for each object that a run comes to
            pairs = at_once(space.items)
            found += [pair for pair in pairs if type(pair[1]) is MemberDescriptorType]
    return found


def slot_count(cls: type) -> int:
    """How many slots instances have."""
    return len(_all_slots(cls))


_POINTER = object.__basicsize__ // 2
_item_size = type.__dict__["__itemsize__"].__get__
_dict_offset = type.__dict__["__dictoffset__"].__get__
_weak_offset = type.__dict__["__weakrefoffset__"].__get__


def has_hidden_state(cls: type, base: type) -> bool:
    """Whether instances hold more than their dict, their slots and what `base` holds.

    C types keep state in their own struct: the size of an instance tells.
    """
    size = size_of(base) + _POINTER * slot_count(cls)
    # -1 is a dict that lies before the object
    size += _POINTER * (_dict_offset(cls) not in (0, -1) and _dict_offset(base) == 0)
    size += _POINTER * (_weak_offset(cls) > 0 and _weak_offset(base) == 0)
    return bool(size_of(cls) > size or _item_size(cls) != _item_size(base))


def read_slots(value: object) -> dict[str, object]:
    """The filled slots of an object."""
    filled: dict[str, object] = {}
    for name, slot in slots_of(type(value)).items():
        try:
            filled[name] = slot.__get__(value)
        except AttributeError:  # an empty slot
            continue
    return filled


def filled_slots(value: object) -> list[tuple[MemberDescriptorType, object]]:
    """All slots that hold something, those that a subclass hides as well."""
    filled = []
    for _, slot in _all_slots(type(value)):
        try:
            filled.append((slot, slot.__get__(value)))
        except AttributeError:
            continue
    return filled


def attributes_of(value: object) -> dict[str, object]:
    """An object's own attributes, in its dict and in its slots."""
    return {**(own_dict(value) or {}), **read_slots(value)}


def own_dict(value: object) -> dict[str, object] | None:
    """An object's dict, without asking any code of its class: `__dict__` may be a property."""
    cls = type(value)
    way = _ways.get(id(cls)) or _find_way(cls)
    try:
        # The descriptor itself would be faster, and keep the class alive for as long as we know it.
        found = _ask(value, "__dict__") if way is _ask else way(value)
    except AttributeError:
        return None
    return found if type(found) is dict else None


_ask = object.__getattribute__
# How to come to the dict of a class's instances, by the class's identity: found once.
_ways: dict[int, Callable[..., object]] = {}
_known: dict[int, weakref.ref[type]] = {}
_generic_dict = ctypes.pythonapi.PyObject_GenericGetDict
_generic_dict.restype = ctypes.py_object
_generic_dict.argtypes = (ctypes.c_void_p, ctypes.c_void_p)  # a py_object is asked what it is


def _find_way(cls: type) -> Callable[..., object]:
    descriptor: Any = find_in_class(cls, "__dict__")
    way: Callable[..., object] = _look_past_property
    if issubclass(cls, threading.local):  # its dict isn't where those of other objects are
        way = _ask_thread
    elif isinstance(descriptor, (GetSetDescriptorType, MemberDescriptorType)):
        way = _ask
    elif descriptor is None:
        way = _has_none
    _ways[id(cls)] = way
    _known[id(cls)] = weakref.ref(cls, partial(_forget, _ways, _known, id(cls)))
    return way


def _forget(ways: dict[int, Any], known: dict[int, Any], key: int, _: object) -> None:
    ways.pop(key, None)
    known.pop(key, None)


def _ask_thread(value: object) -> object:
    return threading.local.__getattribute__(value, "__dict__")  # type: ignore[arg-type]


def _has_none(value: object) -> None:
    """An object without a dict."""


def _look_past_property(value: object) -> object:
    return _generic_dict(id(value), None)


# --- functions ---


def cells_of(function: object) -> dict[str, CellType]:
    """The closure cells of a function by name; empty for anything else."""
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    return dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))


def bound_cells(function: object) -> dict[str, object]:
    """What the closure cells of a function hold, by name; empty cells are left out."""
    bound = {}
    for name, cell in cells_of(function).items():
        try:
            bound[name] = cell.cell_contents
        except ValueError:
            continue
    return bound


# --- proxies ---

PROXIES = ids_of(weakref.ProxyType, weakref.CallableProxyType)


def dict_behind(proxy: types.MappingProxyType[Any, Any]) -> object:
    """The mapping that a proxy shows."""
    return gc.get_referents(proxy)[0]


def behind_proxy(proxy: Any) -> object:
    """What a weak proxy stands for; None once that is gone."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


# --- parts ---

# What holds others under names that are always the same.
_PARTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (slice, ("start", "stop", "step")),
    (types.MethodType, ("__self__", "__func__")),
    (partial, ("func", "args", "keywords")),
    (property, ("fget", "fset", "fdel")),
    (functools.cached_property, ("func",)),
    (staticmethod, ("__func__",)),
    (classmethod, ("__func__",)),
    (types.GenericAlias, ("__origin__", "__args__")),
    (types.UnionType, ("__args__",)),
)
PARTED = tuple(kind for kind, _ in _PARTS)


def parts_of(value: object) -> Iterator[tuple[str, object]]:
    """What a value is put together from, by attribute: a method's object and function, for one."""
    for kind, names in _PARTS:
        if isinstance(value, kind):
            for name in names:
                member = class_dict(kind).get(name)  # None for a class that is written in Python
                yield name, member.__get__(value) if member else (own_dict(value) or {}).get(name)
            return


def children(value: object) -> list[object]:
    """All that a value holds directly: attributes, items and keys, cells, defaults, parts."""
    held = [part for item in (own_dict(value) or {}).items() for part in item]
    held += [part for _, part in filled_slots(value)]
    if isinstance(value, dict):
        held += [part for item in items_of(value) for part in item]
    elif isinstance(value, types.MappingProxyType):
        held += value.values()
    elif isinstance(value, _SEQUENCES):
        held += elements_of(value)
    elif isinstance(value, FunctionType):
        held += bound_cells(value).values()
        held += [value.__defaults__, value.__kwdefaults__]
    else:
        held += [part for _, part in parts_of(value)]
    return held


# --- the code behind what can be called ---


def answers_for_itself(value: object) -> bool:
    """Whether Python code of a value's class runs where one of its attributes is asked for."""
    names = "__getattr__", "__getattribute__"
    return any(isinstance(find_in_class(type(value), name), FunctionType) for name in names)


def name_callable(target: Any, attribute: str = "__name__") -> str:
    """What messages call a callable; its class's name where it has none of its own."""
    own = own_dict(target) or {}
    found = own if answers_for_itself(target) else {attribute: getattr(target, attribute, None)}
    name = found.get(attribute)
    if isinstance(name, str):
        return name
    return name_of(type(target)) if attribute == "__qualname__" else short_name_of(type(target))


def find_function(target: Any) -> FunctionType | None:
    """The function that runs when something is called, as far as that is Python.

    Of an object it is what it says that it wraps, or its `forward`, or its `__call__`.
    """
    while isinstance(target, (functools.partial, MethodType)):
        target = target.func if isinstance(target, functools.partial) else target.__func__
    if not isinstance(target, FunctionType):
        found_in = [find_in_class(type(target), name) for name in _CALLED]
        for found in (_find_wrapped(target), *found_in):
            if isinstance(found, FunctionType):
                target = found
                break
    return target if isinstance(target, FunctionType) else None


def find_code(target: Any) -> CodeType | None:
    """A callable's own code: of what a decorator wrapped, not of the wrapper."""
    function = find_function(target)
    if function is None:
        return None
    inner = function.__dict__.get("__wrapped__")
    return inner.__code__ if isinstance(inner, FunctionType) else function.__code__


_CALLED = ("forward", "__call__")


def _find_wrapped(target: object) -> object:
    descriptor: Any = find_in_class(type(target), "__dict__")
    space = descriptor.__get__(target) if type(descriptor) is GetSetDescriptorType else {}
    if "__wrapped__" in space:
        return space["__wrapped__"]
    return find_in_class(type(target), "__wrapped__")


_DESCRIPTORS = (property, functools.cached_property, staticmethod, classmethod)


def functions_behind(*values: object, through_cells: bool = False) -> Iterator[FunctionType]:
    """Functions among attributes of a class: themselves, or behind descriptors and decorators.

    A decorator is followed to what it says that it wraps; `through_cells`: to all that it keeps.
    """
    waiting = [*values]
    met: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, _DESCRIPTORS):
            waiting += [part for _, part in parts_of(value)]
        elif isinstance(value, FunctionType) and id(value) not in met:
            met.add(id(value))
            waiting.append(value.__dict__.get("__wrapped__"))
            if through_cells:
                waiting += bound_cells(value).values()
            yield value


def all_codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those nested in it."""
    waiting = [code]
    while waiting:
        current = waiting.pop()
        yield current
        waiting += [const for const in current.co_consts if type(const) is CodeType]


def package_of(space: dict[str, Any]) -> str:
    """The package that relative imports of a module start from."""
    package = dict.get(space, "__package__")
    if isinstance(package, str):
        return package
    name = dict.get(space, "__name__")
    if not isinstance(name, str):
        return ""
    return name if "__path__" in space else name.rpartition(".")[0]


def resolve_import(name: str, namespace: dict[str, Any]) -> str:
    """The whole name of a module that code imports; one with dots is relative to its package."""
    if not name.startswith("."):
        return name
    try:
        return importlib.util.resolve_name(name, package_of(namespace))
    except ImportError:  # beyond the top: the statement itself raises
        return name.lstrip(".")


def name_of_module(module: types.ModuleType) -> str:
    """What a Python module is called."""
    name = (own_dict(module) or {}).get("__name__")
    return name if isinstance(name, str) else ""
