"""Values: tests of exact types, any value as JSON, and wrappers that compilers put around a graph.

The tests import neither torch nor NumPy. A boxed function takes one list and empties it, so that
inputs die as early as they can. A name put into a module's globals is removed when its owner dies.
A name that exists already is never overwritten, and one that somebody has reassigned since is left
alone.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeGuard

from tripwire.errors import TelemetryError
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
    return _is_numpys(value, _INT_NAMES)


def is_numpy_float_type(value: object) -> bool:
    """Whether a value is a NumPy float scalar."""
    return _is_numpys(value, _FLOAT_NAMES)


def is_numpy_ndarray(value: object) -> bool:
    """Whether a value is an array of NumPy's own class."""
    return _is_numpys(value, ("ndarray",))


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


def is_lru_cache_wrapped_function(value: object) -> TypeGuard[functools._lru_cache_wrapper[Any]]:
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


def _is_numpys(value: object, names: tuple[str, ...]) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and any(type(value) is getattr(numpy, name) for name in names)


class TypeSafeSerializer(json.JSONEncoder):
    """A JSON encoder for anything: `json.dumps(value, cls=TypeSafeSerializer)`."""

    def iterencode(self, o: object, _one_shot: bool = False) -> Any:
        return super().iterencode(make_plain(o), _one_shot)


# --- graphs ---


def make_boxed_func(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A boxed function for one that takes positional arguments."""

    def boxed(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return function(*taken)

    boxed._boxed_call = True  # type: ignore[attr-defined]  # torch's mark, too
    return boxed


def call_boxed(function: Callable[..., Any], args: list[Any]) -> Any:
    """Call with a list that is empty afterwards, whether the function is boxed or not."""
    if getattr(function, "_boxed_call", False):
        result = function(args)
        args.clear()
        return result
    return make_boxed_func(function)(args)


def flatten_graph_inputs(
    graph: Callable[..., Any],
    inputs: Sequence[Any],
    compile_graph: Callable[[Callable[..., Any], list[Any]], Callable[..., Any]],
    *,
    steal: Sequence[int] = (),
) -> Callable[..., Any]:
    """Compile a graph that takes nested inputs as one that takes flat ones.

    `compile_graph` gets a callable on flat inputs and the flat inputs. The result takes nested
    inputs of the same structure; another structure is a ValueError. Inputs at the positions
    `steal` are lists that are emptied when the call begins.
    """
    from torch.utils import _pytree as pytree

    flat, spec = pytree.tree_flatten(tuple(inputs))

    def flat_graph(*leaves: Any) -> Any:
        return graph(*pytree.tree_unflatten(list(leaves), spec))

    compiled = compile_graph(flat_graph, flat)

    def call(*args: Any) -> Any:
        leaves, found = pytree.tree_flatten(args)
        if found != spec:
            raise ValueError(f"inputs are {found}, and were {spec} when the graph was compiled")
        for position in steal:
            args[position].clear()
        del args
        return call_boxed(compiled, leaves)

    return call


class CleanupHook:
    """Takes one name out of a scope, once."""

    __slots__ = ("_value", "name", "scope")

    def __init__(self, scope: dict[str, object], name: str, value: object) -> None:
        self.scope = scope
        self.name = name
        self._value: list[object] = [value]

    @staticmethod
    def create(scope: dict[str, object], name: str, value: object) -> CleanupHook:
        """Put a value into a scope under a new name."""
        if name in scope:
            where = repr(scope["__name__"]) if "__name__" in scope else "that namespace"
            raise TelemetryError(
                f"{name!r} exists in {where} already, and tripwire never overwrites it.",
                slug="global-name-taken",
            )
        scope[name] = value
        CleanupManager.count += 1
        return CleanupHook(scope, name, value)

    def __call__(self, *_: object) -> None:
        if self._value:
            value = self._value.pop()
            CleanupManager.count -= 1
            if self.scope.get(self.name, _NOTHING) is value:
                del self.scope[self.name]


class CleanupManager:
    """Calls the hooks of an object when it dies."""

    count: ClassVar[int] = 0  # names that are in some scope now
    instance: ClassVar[CleanupManager]

    def add(self, owner: object, hook: CleanupHook) -> None:
        """The hook's name goes with `owner`."""
        weakref.finalize(owner, hook).atexit = False


CleanupManager.instance = CleanupManager()

_NOTHING = object()
