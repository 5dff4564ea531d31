"""Values: what one is, asked exactly; and any of them as JSON. Nothing imports torch or NumPy."""

from __future__ import annotations

import functools
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeGuard

from tripwire.telemetry.schema import make_plain

_TYPING_BUILTINS: tuple[type, ...] = tuple(
    kind
    for name in ("TypeVar", "ParamSpec", "ParamSpecArgs", "ParamSpecKwargs", "TypeVarTuple")
    if isinstance(kind := getattr(typing, name), type)
) + tuple(
    kind
    for name in ("TypeAliasType", "Union")
    if isinstance(kind := getattr(typing, name, None), type)
)
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
)
_INT_NAMES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOAT_NAMES = ("float16", "float32", "float64")


def istype(value: object, allowed: type | Iterable[type]) -> bool:
    """Whether a value's class is one of these; subclasses don't count."""
    if isinstance(allowed, type):
        return type(value) is allowed
    return type(value) in tuple(allowed)


def is_typing(value: object) -> bool:
    """Whether a value is something of `typing`, such as `Any`, `list[int]` aside."""
    final: Any = vars(typing)["_Final"]  # the base of most of them
    return (
        isinstance(value, (types.UnionType, final, *_TYPING_BUILTINS))
        or value is typing.Any
        or value is typing.Generic
        or value is typing.Union
    )


def is_numpy_int_type(value: object) -> bool:
    """Whether a value is a NumPy integer scalar."""
    return _is_of("numpy", value, _INT_NAMES)


def is_numpy_float_type(value: object) -> bool:
    """Whether a value is a NumPy float scalar."""
    return _is_of("numpy", value, _FLOAT_NAMES)


def is_numpy_ndarray(value: object) -> bool:
    """Whether a value is an array of NumPy's own class."""
    return _is_of("numpy", value, ("ndarray",))


def is_function(value: object) -> bool:
    """Whether a value is a Python function, a builtin one, or a method of a builtin class."""
    return isinstance(value, _FUNCTIONS)


def is_function_or_wrapper(value: object) -> bool:
    """The same, or one of torch's operators."""
    ops = sys.modules.get("torch._ops")
    kinds = () if ops is None else (ops.OpOverloadPacket, ops.OpOverload)
    return is_function(value) or isinstance(value, kinds)


def is_wrapper_or_member_descriptor(value: object) -> bool:
    """Whether a value is what a C class has for a method, slot, member or property."""
    return isinstance(value, _DESCRIPTORS)


def is_lru_cache_wrapped_function(
    value: object,
) -> TypeGuard[functools._lru_cache_wrapper[Any]]:
    """Whether a value is a function under `functools.lru_cache`."""
    return isinstance(value, functools._lru_cache_wrapper) and is_function(
        inspect.getattr_static(value, "__wrapped__", None)
    )


def istensor(value: object) -> bool:
    """Whether a value is a tensor, a parameter or a fake tensor; other subclasses don't count."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    kinds = (torch.Tensor, torch.nn.Parameter, *((fake.FakeTensor,) if fake else ()))
    return type(value) in kinds


def is_tensor(value: object) -> bool:
    """Whether a value is a tensor of any class."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_lazy_module(value: object) -> bool:
    """Whether a value is a module that gets its shapes with its first call."""
    lazy = sys.modules.get("torch.nn.modules.lazy")
    return lazy is not None and isinstance(value, lazy.LazyModuleMixin)


def is_namedtuple(value: object) -> bool:
    """Whether a value is a named tuple."""
    return isinstance(value, tuple) and isinstance(getattr(type(value), "_fields", None), tuple)


def make_cell(*value: object) -> types.CellType:
    """A closure cell, empty without a value."""
    return types.CellType(*value)


def _is_of(package: str, value: object, names: tuple[str, ...]) -> bool:
    module = sys.modules.get(package)
    return module is not None and any(type(value) is getattr(module, name) for name in names)


class TypeSafeSerializer(json.JSONEncoder):
    """A JSON encoder for anything: `json.dumps(value, cls=TypeSafeSerializer)`."""

    def iterencode(self, o: object, _one_shot: bool = False) -> Any:
        return super().iterencode(make_plain(o), _one_shot)
