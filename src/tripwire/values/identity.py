"""Identity: what belongs to torch or Python and what to a user; when two values are the same.

Names can be wrong: `functools.wraps` gives a user's function the `__module__` of a function of
torch, and a class that `types.new_class` makes gets `types` as its module. So files and identities
decide.
"""

from __future__ import annotations

import array
import functools
import logging
import os
import sys
import types
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from typing import Any, TypeGuard

import torch
from msgspec import Struct
from torch import nn

from tripwire.env import is_library_file, is_library_module, is_stdlib_module
from tripwire.values.classes import (
    can_be_written,
    ids_of,
    is_heap_type,
    isinstance,
    module_of,
    mro,
    name_of,
    size_of,
)

CONTAINERS = (dict, list, set, deque, tuple, types.SimpleNamespace)
_NUMPY = ("numpy", "numpy.dtypes")
_SHOWN_BASES = ids_of(
    *(object, dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict),
    *(int, float, complex, str, bytes, types.SimpleNamespace, functools.partial),
)


def is_library_class(cls: type) -> bool:
    """Whether torch or the standard library has this very class under its name."""
    module = module_of(cls)
    if not is_library_module(module):
        return False
    found: Any = sys.modules.get(module)
    for part in name_of(cls).split("."):
        found = getattr(found, part, None)
    return found is cls or not can_be_written(cls)


class StandsFor(Struct, frozen=True):
    """Marks tripwire's code that a library's function runs for a while, as its last constant."""

    code: types.CodeType


def code_of(function: types.FunctionType) -> types.CodeType:
    """A function's own code, whatever a hook of ours lets it run now, in any thread."""
    code = function.__code__
    last = code.co_consts[-1] if code.co_consts else None
    return last.code if type(last) is StandsFor else code


def is_library_function(function: types.FunctionType) -> bool:
    """Whether a function is torch's or the standard library's, not one that `wraps` it."""
    module = function.__module__  # None where somebody made it by `exec`
    return (
        isinstance(module, str)
        and is_library_module(module)
        and is_library_file(code_of(function).co_filename)
    )


def is_numpy_constant(value: object) -> bool:
    """Whether a value is a scalar, a dtype or a function of NumPy's: nothing there changes."""
    numpy = sys.modules.get("numpy")
    if numpy is None or module_of(type(value)) not in _NUMPY:
        return False
    kinds = (numpy.generic, numpy.dtype, numpy.ufunc, type(numpy.sum))
    return isinstance(value, kinds) and not isinstance(value, numpy.void)  # which may be a view


def hides_state(cls: type) -> bool:
    """Whether part of an object is in C, where Python can't see it change."""
    return any(
        id(base) not in _SHOWN_BASES and not is_heap_type(base) and size_of(base) > 16
        for base in mro(cls)
    )


def is_librarys(value: object) -> bool:
    """Whether something in a library's module is its code, or state that is watched elsewhere."""
    if value is sys.modules or value is os.environ:
        return True
    if isinstance(value, types.ModuleType):
        return not is_library_module(value.__name__)  # what a library imports for itself
    if isinstance(value, (*CONTAINERS, functools.partial)):
        return False
    if isinstance(value, types.FunctionType):
        return is_library_function(value)
    return is_library_class(value if isinstance(value, type) else type(value))


def is_pythons(value: object) -> bool:
    """Whether something in builtins is Python's own, not what somebody put there."""
    return isinstance(value, (type, types.BuiltinFunctionType)) and value.__module__ == "builtins"


def is_array(value: object) -> bool:
    """Whether a value is a NumPy array, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_plain_array(value: object) -> bool:
    """Whether it is an array of NumPy's own class, not of a subclass."""
    return is_array(value) and type(value) is sys.modules["numpy"].ndarray


def is_looked_into(cls: type) -> bool:
    """Objects of torch's insides, of tripwire and of Python's machinery hold no user's state."""
    module = module_of(cls)
    top = module.partition(".")[0]
    if is_stdlib_module(module):
        return top != "logging" or issubclass(cls, logging.LoggerAdapter)
    return not module.startswith("torch._") and top != "tripwire"


BYTES = (bytearray, array.array)
MEMO_TYPE = type(functools.lru_cache(len))
# What a call must find unchanged itself, not an equal one.
PINNED = (nn.Module, type, types.FunctionType, types.BuiltinFunctionType, Enum, MEMO_TYPE)
_EMPTY: dict[object, object] = {}
VIEWS = type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items())


def is_pinned(value: object) -> bool:
    """Whether a call must find this very object, not an equal one; not so `log.append`."""
    return isinstance(value, PINNED) and not is_builtin_method(value)


def is_builtin_method(value: object) -> TypeGuard[types.BuiltinFunctionType]:
    """`log.append`, `name.upper`, `x.mul`: each look at it makes another one."""
    owner = value.__self__ if isinstance(value, types.BuiltinFunctionType) else None
    return owner is not None and not isinstance(owner, (types.ModuleType, type))


def is_containers_method(value: object) -> TypeGuard[types.BuiltinFunctionType]:
    """`log.append`: a method of something that can change."""
    return is_builtin_method(value) and isinstance(value.__self__, (list, dict, set, deque))


# --- when two values are the same ---


PLAIN = ids_of(
    *(type(None), bool, int, float, complex, str, bytes, type(...), range, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme),
    torch.nn.attention.SDPBackend,
)


def same_plain(left: Any, right: Any) -> bool:
    """Whether two plain values are one to Python: same type, same bits. 0.0 is not -0.0."""
    if left is right:
        return True
    cls = type(left)
    if cls is not type(right):
        return False
    if cls is float or cls is complex:
        return repr(left) == repr(right)  # nan is nan
    if cls is range:  # range(0, 3, 2) equals range(0, 4, 2), and has another stop
        return (left.start, left.stop, left.step) == (right.start, right.stop, right.step)
    if cls is slice:
        return all(map(same_plain, _bounds(left), _bounds(right)))
    if id(cls) in PLAIN:
        return bool(left == right)
    if cls is tuple:
        return len(left) == len(right) and all(map(same_plain, left, right))
    return False


def _bounds(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step
