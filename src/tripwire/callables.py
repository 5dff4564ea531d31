"""Callables: the code that runs when something is called, found without running any."""

from __future__ import annotations

import functools
from types import CodeType, FunctionType, GetSetDescriptorType, MappingProxyType, MethodType
from typing import Any, TypeGuard, TypeVar, cast

_Kind = TypeVar("_Kind")

_type_mro = type.__dict__["__mro__"].__get__
_type_dict = type.__dict__["__dict__"].__get__
_type_name = type.__dict__["__name__"].__get__
_type_qualname = type.__dict__["__qualname__"].__get__
_type_module = type.__dict__["__module__"].__get__


def mro(cls: type) -> tuple[type, ...]:
    """A class's bases, itself first; a metaclass with an `__mro__` isn't asked."""
    return cast("tuple[type, ...]", _type_mro(cls))


def class_dict(cls: type) -> MappingProxyType[str, Any]:
    """A class's own attributes; a metaclass with a `__dict__` isn't asked."""
    return cast("MappingProxyType[str, Any]", _type_dict(cls))


def name_of(cls: type) -> str:
    """What a class is called; a metaclass with a `__name__` isn't asked."""
    return cast(str, _type_name(cls))


def qualname_of(cls: type) -> str:
    """What a class is called in its module; a metaclass with a `__qualname__` isn't asked."""
    return cast(str, _type_qualname(cls))


def module_of(cls: type) -> str:
    """The module that a class says it is of; a metaclass with a `__module__` isn't asked."""
    try:
        module = _type_module(cls)
    except AttributeError:  # it was deleted
        return ""
    return module if type(module) is str else ""


def is_a(value: object, kinds: type[_Kind] | tuple[type[_Kind], ...]) -> TypeGuard[_Kind]:
    """Whether a value's class is one of these, or derived from one.

    `isinstance` would ask the value for its `__class__`, which may be a user's code: a property,
    a `__getattribute__` that counts, a stand-in that names the class of another object.
    """
    return issubclass(type(value), kinds)


def find_code(target: Any) -> CodeType | None:
    """A callable's own code, as far as that is Python: what a decorator wrapped, not the wrapper.

    Of an object it is that of `forward`, or of `__call__`.
    """
    while isinstance(target, (functools.partial, MethodType)):
        target = target.func if isinstance(target, functools.partial) else target.__func__
    if not isinstance(target, FunctionType):
        found_in = [find_in_class(type(target), name) for name in _CALLED]
        for found in (_find_wrapped(target), *found_in):
            if isinstance(found, FunctionType):
                target = found
                break
    if not isinstance(target, FunctionType):
        return None
    inner = target.__dict__.get("__wrapped__")
    return inner.__code__ if isinstance(inner, FunctionType) else target.__code__


_CALLED = ("forward", "__call__")


def _find_wrapped(target: object) -> object:
    descriptor: Any = find_in_class(type(target), "__dict__")
    space = descriptor.__get__(target) if type(descriptor) is GetSetDescriptorType else {}
    if "__wrapped__" in space:
        return space["__wrapped__"]
    return find_in_class(type(target), "__wrapped__")


def find_in_class(cls: type, name: str) -> object:
    """What a class or a base has under a name, as it lies there; None where there is nothing.

    Like `inspect.getattr_static`, which keeps every class that it is asked about alive (3.12.0 to
    3.12.3, cpython#118013).
    """
    return next((class_dict(base)[name] for base in mro(cls) if name in class_dict(base)), None)
