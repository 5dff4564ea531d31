"""Transcripts: what the outside can see of a world, as plain data that compares.

Tensors are written out to the last bit, with their layout. What is one object, or one stretch
of memory, is numbered alike: so identity and aliasing are compared as well.
"""

from __future__ import annotations

import functools
import math
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Set
from contextvars import ContextVar
from enum import Enum
from typing import Any
from unittest.mock import NonCallableMock

import torch

from tripwire.dispatch.compiled import find_dispatcher
from tripwire.values.numbers import is_open

_PLAIN = (type(None), int, float, complex, str, bytes, range, slice, torch.dtype, type(...))
TOOLS = frozenset({"new", "tagged", "take", "modes", "outs"})  # what players put into a world
_HOOKS = (  # keys: a global counter
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
)
# What a mock keeps of the calls that it got.
_ASKED = frozenset(
    [
        "_mock_called",
        "_mock_call_args",
        "_mock_call_args_list",
        "_mock_call_count",
        "_mock_mock_calls",
    ]
)
_DULL = frozenset(
    [
        "__module__",
        "__qualname__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__annotations__",
        "__slots__",
        "__static_attributes__",
        "__firstlineno__",
        "_abc_impl",
        "__abstractmethods__",
        "__parameters__",
        "_compiled_call_impl",
        "__match_args__",
        "__dataclass_fields__",
        "__dataclass_params__",
    ]
)


def _strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those that matter: where a size is 1, AOTAutograd may give another than eager code."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride for size, stride in pairs if size != 1)


class Numbers(str):
    """A tensor's values, written to the last bit. `is_close` looks at the numbers."""

    values: tuple[complex, ...]
    slack: float

    @staticmethod
    def of(tensor: torch.Tensor) -> Numbers:
        """What a tensor holds."""
        written = Numbers(tensor.tolist())
        written.values = tuple(tensor.reshape(-1).tolist())
        written.slack = torch.finfo(tensor.dtype).eps * 16 if tensor.is_floating_point() else 0.0
        return written

    def is_near(self, other: Numbers, share: float = 0.0) -> bool:
        """Whether no number differs by more than the order of additions explains.

        share: of the largest number, which every number may differ by as well.
        """
        if len(self.values) != len(other.values) or self.slack != other.slack:
            return False
        largest = max((abs(value) for value in self.values), default=0.0) if share else 0.0
        slack = max(self.slack, share * largest)
        near = functools.partial(math.isclose, rel_tol=self.slack, abs_tol=slack)
        return all(
            str(a) == str(b) or (isinstance(a, float) and near(a, b))
            for a, b in zip(self.values, other.values, strict=True)
        )


class Writer:
    """Writes values out, each object once."""

    def __init__(self, world: str) -> None:
        self._world = world  # the module whose classes and functions are looked into
        self._met: dict[int, tuple[int, object]] = {}  # by id; the object is kept, so is its id
        self._memory: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def write(self, value: Any) -> Any:
        """Nested tuples and strings that are equal for equal values only."""
        dispatcher = find_dispatcher(value)
        if dispatcher is not None:
            value = dispatcher.target
        kind = type(value).__name__
        if is_open(value):  # nothing else may tell: it looks like a number
            return f"open {kind} {value!r}"
        if _lies(type(value)):
            return self._once(value, kind, lambda: self._dict(_own(value)))
        if isinstance(value, Enum):
            return f"{kind}.{value.name}"
        if isinstance(value, _PLAIN):
            return f"{kind} {value!r}"
        if isinstance(value, tuple | frozenset | torch.Size):
            return (kind, *self._parts(value))
        return self._once(value, kind, lambda: self._parts(value))

    def _once(self, value: Any, kind: str, write: Callable[[], tuple[Any, ...]]) -> Any:
        if id(value) in self._met:
            return f"{kind} #{self._met[id(value)][0]} again"
        self._met[id(value)] = len(self._met), value
        return (f"{kind} #{self._met[id(value)][0]}", *write())

    def _parts(self, value: Any) -> tuple[Any, ...]:
        match value:
            case torch.Tensor():
                self.tensors.append(value)
                return (*self._tensor(value), *self._dict(dict(value.__dict__)))
            case Mapping():
                items = [(self.write(k), self.write(v)) for k, v in value.items()]
                return (*items, *self._dict(getattr(value, "__dict__", {})))
            case list() | tuple() | deque():
                items = [self.write(item) for item in value]
                return (*items, *self._dict(getattr(value, "__dict__", {})))
            case set() | frozenset():
                return self._members(value)
            case weakref.ref():
                return ("dead",) if value() is None else ("alive", self.write(value()))
            case bytearray() | array():
                return (repr(value),)
            case ContextVar():
                return (self.write(value.get(None)),)
            case types.FunctionType():
                return self._function(value)
            case types.MethodType():
                return self.write(value.__func__), self.write(value.__self__)
            case functools.partial():
                return self.write(value.func), self.write(value.args), self.write(value.keywords)
            case property():
                return (self.write(value.fget),)
            case staticmethod() | classmethod():
                return (self.write(value.__func__),)
            case type():
                if value.__module__ != self._world:
                    return (value.__qualname__,)
                names = [base.__qualname__ for base in value.__mro__[1:]]
                return (value.__qualname__, *names, *self._dict(dict(vars(value))))
            case types.ModuleType():
                return self._module(value) if hasattr(value, "of_the_world") else ()
            case torch.Generator():
                return (value.get_state().sum().item(),)
            case torch.utils.hooks.RemovableHandle():
                return ()
            case _:
                return (*self._dict(getattr(value, "__dict__", {})), *self._slots(value))

    def _members(self, value: Set[Any]) -> tuple[Any, ...]:
        """In an order that their addresses don't decide: objects by when they were met."""
        plain = [repr(one) for one in value if isinstance(one, _PLAIN)]
        others = [one for one in value if not isinstance(one, _PLAIN)]
        met = sorted(self._met[id(one)][0] for one in others if id(one) in self._met)
        return (*sorted(plain), *met, len(others))

    def _tensor(self, value: torch.Tensor) -> tuple[str, ...]:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            memory = value.untyped_storage()._cdata
            number = self._memory.setdefault(memory, len(self._memory))
            grad = "" if value.grad is None else Numbers.of(value.grad)
            return (
                f"{value.dtype} {tuple(value.shape)} strides {_strides_of(value)} "
                f"memory {number}+{value.storage_offset()} requires_grad={value.requires_grad} "
                f"leaf={value.is_leaf} inference={value.is_inference()}",
                Numbers.of(value.detach()),
                grad,
            )

    def _function(self, value: types.FunctionType) -> tuple[Any, ...]:
        if value.__module__ != self._world:
            return (value.__qualname__,)
        cells = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                cells.append((name, self.write(cell.cell_contents)))
            except ValueError:
                cells.append((name, "empty"))
        defaults = self.write(value.__defaults__), self.write(value.__kwdefaults__)
        return (value.__code__.co_name, *defaults, *cells, *self._dict(value.__dict__))

    def _module(self, value: types.ModuleType) -> tuple[Any, ...]:
        space = vars(value)
        mine = {k: v for k, v in space.items() if k not in TOOLS and not k.startswith("__")}
        return self._dict(mine)

    def _dict(self, space: Mapping[str, Any]) -> tuple[Any, ...]:
        parts = []
        for name, value in space.items():
            if name in _HOOKS:
                parts.append((name, *[self.write(hook) for hook in value.values()]))
            elif name not in _DULL:
                parts.append((name, self.write(value)))
        return tuple(parts)

    def _slots(self, value: object) -> tuple[Any, ...]:
        found = [n for c in type(value).__mro__ for n in c.__dict__.get("__slots__", ())]
        names = [n for n in found if n not in _DULL]
        return tuple((n, self.write(getattr(value, n))) for n in names if hasattr(value, n))


def _lies(cls: type) -> bool:
    """Whether objects of a class say with code of their own what they are."""
    return any("__class__" in vars(base) for base in cls.__mro__ if base is not object)


def _own(value: object) -> dict[str, Any]:
    """What an object that lies holds, without what is known to differ.

    The hash that a mock gives by default is an address. How often it is asked for is a known gap:
    guards look keys up, too.
    """
    own: dict[str, Any] = object.__getattribute__(value, "__dict__")
    if not issubclass(type(value), NonCallableMock):
        return own
    calls = own["_mock_mock_calls"]
    told = [call for call in calls if not call[0].endswith("__hash__")]
    if own["_mock_name"] != "__hash__":
        return {**own, "_mock_mock_calls": told}
    given = own["_mock_return_value"]
    by_default = type(given) is int and given == object.__hash__(own["_mock_new_parent"])
    kept = {name: held for name, held in own.items() if name not in _ASKED}
    return {**kept, "_mock_return_value": "by its address" if by_default else given}


def is_close(left: Any, right: Any, share: float = 0.0) -> bool:
    """Whether two transcripts are equal but for the last bits of tensors. See `is_near`."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(is_close(a, b, share) for a, b in pairs)
    if isinstance(left, Numbers) and isinstance(right, Numbers):
        return left.is_near(right, share)
    return bool(left == right)


def find_difference(left: Any, right: Any, same: Callable[[Any, Any], bool], path: str = "") -> str:
    """Where two transcripts part, in words."""
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            if not same(a, b):
                name = a[0] if isinstance(a, tuple) and a and isinstance(a[0], str) else index
                return find_difference(a, b, same, f"{path}/{name}")
    return f"{path}:\n  plain:    {left}\n  compiled: {right}"
