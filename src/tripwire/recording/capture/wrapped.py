"""Wrapped: methods, partials, typing's objects and generators, by their constructors' arguments.

Each is an object of a C type that shows what it was made from and can be made from it again.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import types
import typing
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tripwire.recording.format import nodes
from tripwire.recording.format.manifest import Omission
from tripwire.recording.format.nodes import AnyNode, CallNode, Library, Wrapped
from tripwire.values.classes import class_name, ids_of, is_kind, isinstance
from tripwire.values.contents import own_dict

if TYPE_CHECKING:
    from tripwire.recording.capture.encode import Encoder


def encode_wrapped(encoder: Encoder, value: object) -> AnyNode | None:
    """The node of something that is made of other things; None if it is nothing of the kind."""
    if id(type(value)) in _GETTERS:
        return _encode_getter(encoder, value)
    parts = _PARTS.get(id(type(value)))
    if parts is None:
        return _encode_derived(encoder, value)
    form, found = parts(value)
    if form == "lru_cache":
        _tell_of_cache(encoder, value)
    return Wrapped(form, tuple(encoder.slot(part, f".{form}") for part in found)) if form else None


def _tell_of_cache(encoder: Encoder, value: object) -> None:
    """What a cache holds has no name that code could ask for; it begins empty again."""
    size = cast("Any", functools._lru_cache_wrapper).cache_info(value).currsize
    if size:
        count = f"{size} cached {'result' if size == 1 else 'results'}"
        what = f"{count} left out: at replay the function runs again"
        encoder.left_out.append(Omission(encoder.path() or class_name(type(value)), what))


_DERIVED: tuple[type, ...] = (
    property,
    functools.cached_property,
    staticmethod,
    classmethod,
    functools.partial,
)
_OF_CACHED_PROPERTY = ("func", "attrname", "lock", "__doc__")


def _encode_derived(encoder: Encoder, value: object) -> AnyNode | None:
    """The node of an instance of a class that the user built on one of these."""
    base = next((kind for kind in _DERIVED if is_kind(type(value), kind)), None)
    if base is None:
        return None
    form, parts = _PARTS[id(base)](value)
    more = dict(own_dict(value) or {})
    if base is functools.cached_property:
        more = {name: held for name, held in more.items() if name not in _OF_CACHED_PROPERTY}
    told = type(value), form, parts, more or None
    return Wrapped("derived", tuple(encoder.slot(part, f".{form}") for part in told))


_GETTERS = ids_of(operator.itemgetter, operator.attrgetter, operator.methodcaller)


def _encode_getter(encoder: Encoder, value: object) -> AnyNode | None:
    kind, args = cast("tuple[type, tuple[object, ...]]", value.__reduce__()[:2])
    if kind is not type(value):  # a methodcaller with keywords: a partial of it
        return Wrapped("called", (encoder.slot(kind), *map(encoder.slot, args)))
    function = encoder.place(Library("operator", kind.__name__))
    return CallNode(function, tuple(map(encoder.slot, args)))


def encode_singledispatch(encoder: Encoder, function: types.FunctionType) -> AnyNode | None:
    """The node of a function made by `functools.singledispatch`, which keeps a weak cache."""
    code = function.__code__
    if code.co_qualname != _DISPATCHER.co_qualname or code.co_filename != _DISPATCHER.co_filename:
        return None
    registry: dict[type, object] = _cells(_cells(function)["dispatch"])["registry"]
    own = {"register", "dispatch", "registry", "_clear_cache", "__wrapped__"}
    more = {name: value for name, value in function.__dict__.items() if name not in own}
    kinds = tuple(kind for kind in registry if kind is not object)
    made = tuple(registry[kind] for kind in kinds)
    parts = registry[object], kinds, made, more or None
    return Wrapped("singledispatch", tuple(encoder.slot(part) for part in parts))


def _cells(function: types.FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


_DISPATCHER = functools.singledispatch(lambda _: None).__code__  # type: ignore[attr-defined]

_Parts = tuple[str, tuple[object, ...]]
_NOT_OURS: _Parts = ("", ())


def _builtin(value: Any) -> _Parts:
    return "builtin", (value.__self__, value.__name__)


def _partial(value: Any) -> _Parts:
    names, values = tuple(value.keywords), tuple(value.keywords.values())
    return "partial", (value.func, value.args, names, values, own_dict(value) or None)


def _property(value: Any) -> _Parts:
    # A subclass may have a `__getattribute__` of its own.
    look = property.__getattribute__
    get, put, delete = look(value, "fget"), look(value, "fset"), look(value, "fdel")
    doc = look(value, "__doc__") if type(value) is property else None
    own = get.__doc__ if type(get) is types.FunctionType else None
    return "property", (get, put, delete, None if doc == own else doc)


def _lru_cache(value: Any) -> _Parts:
    attributes = own_dict(value) or {}
    function = attributes.get("__wrapped__")
    told = attributes.get("cache_parameters")  # functools' own lambda over both parameters
    if function is None or type(told) is not types.FunctionType:
        return _NOT_OURS
    given = _cells(told)
    if given.keys() != {"maxsize", "typed"}:
        return _NOT_OURS
    more = {k: v for k, v in attributes.items() if k not in ("__wrapped__", "cache_parameters")}
    return "lru_cache", (function, given["maxsize"], given["typed"], more or None)


def _proxy(value: Any) -> _Parts:
    behind = gc.get_referents(value)  # to iterate might run the mapping's own code
    return ("proxy", tuple(behind)) if len(behind) == 1 else _NOT_OURS


def _alias(value: Any) -> _Parts:
    if value.__unpacked__:
        return _NOT_OURS
    return "alias", (value.__origin__, value.__args__)


def _typevar(value: Any) -> _Parts:
    return "typevar", (
        value.__name__,
        value.__bound__,
        value.__constraints__,
        value.__covariant__,
        value.__contravariant__,
        getattr(value, "__infer_variance__", False),  # Python 3.12 and later
    )


def _generic(value: Any) -> _Parts:
    """`List[int]`, `Optional[X]`, `Callable[[int], str]`, `Stack[T]` as what was subscribed."""
    origin, args = value.__origin__, value.__args__
    name = own_dict(value) or {}
    if type(value) is typing._AnnotatedAlias:  # type: ignore[attr-defined]
        return "generic", (typing.Annotated, (origin, *value.__metadata__))
    if origin in (typing.Union, typing.Literal):
        return "generic", (origin, args)
    special = getattr(typing, str(name.get("_name")), None)
    if special is None:
        return "generic", (origin, args)
    if special is typing.Callable and args[0] is not ...:
        args = (args[:-1], args[-1])
    return "generic", (special, args)


_KINDS: dict[type, Callable[[Any], _Parts]] = {
    types.MethodType: lambda value: ("method", (value.__func__, value.__self__)),
    types.BuiltinMethodType: _builtin,
    types.MethodWrapperType: _builtin,
    types.MemberDescriptorType: lambda value: ("member", (value.__objclass__, value.__name__)),
    functools.partial: _partial,
    staticmethod: lambda value: ("staticmethod", (value.__func__,)),
    classmethod: lambda value: ("classmethod", (value.__func__,)),
    property: _property,
    functools.cached_property: lambda value: ("cached_property", (value.func, value.attrname)),
    functools._lru_cache_wrapper: _lru_cache,
    weakref.ref: lambda value: ("weakref", (value(),)),
    types.MappingProxyType: _proxy,
    types.GenericAlias: _alias,
    type(typing.Union[int, str]): _generic,  # noqa: UP007 - from 3.14 on, the same as int | str
    types.UnionType: lambda value: ("union", (value.__args__,)),
    typing.TypeVar: _typevar,
    typing.ForwardRef: lambda value: ("forward", (value.__forward_arg__,)),
    typing._GenericAlias: _generic,  # type: ignore[attr-defined]
    typing._LiteralGenericAlias: _generic,  # type: ignore[attr-defined]
    typing._CallableGenericAlias: _generic,  # type: ignore[attr-defined]
    typing._AnnotatedAlias: _generic,  # type: ignore[attr-defined]
}
# By identity: a metaclass may have a hash of its own.
_PARTS = {id(kind): parts for kind, parts in _KINDS.items()}


# --- what is compiled is kept as what was compiled, and how ---


RECORDED = "__tripwire_recorded__"  # an attribute of what `record_on_error` makes


def encode_recompiled(encoder: Encoder, value: object) -> AnyNode | None:
    """The node of something compiled or recorded; None if it is nothing of the kind."""
    if type(value) is types.FunctionType:
        inner = value.__dict__.get(RECORDED)
        return None if inner is None else Wrapped("recorded", (encoder.slot(inner, ".function"),))
    compiled = sys.modules.get("tripwire.dispatch.compiled")
    if compiled is None:
        return None
    if type(value) is compiled.Dispatcher:
        form, dispatcher = "dispatcher", value
    else:
        form, dispatcher = "compiled", compiled.find_dispatcher(value)
    if not isinstance(dispatcher, compiled.Dispatcher):
        return None
    from tripwire.backends.registry import backend_name, find_known

    options = dispatcher.options
    name = backend_name(options.backend)
    known = find_known(name) is options.backend
    parts = (
        dispatcher.target,
        dispatcher.name,
        name if known else options.backend,
        options.fullgraph,
        options.cache_size,
        options.backend_options,
        options.check,
    )
    return Wrapped(form, tuple(encoder.slot(part, f".{form}") for part in parts))


def make_compiled(target: Any, *how: Any) -> object:
    """What `tripwire.compile` would make."""
    from tripwire.dispatch.compiled import compile_callable

    return compile_callable(target, *_options(*how))


def make_dispatcher(target: Any, *how: Any) -> object:
    """What stands in a module that was compiled inside another."""
    from tripwire.dispatch.dispatcher import Dispatcher

    return Dispatcher(target, *_options(*how))


def _options(
    name: str, backend: Any, fullgraph: bool, cache_size: int, more: Any, check: bool
) -> tuple[str, Any]:
    from tripwire.backends.registry import find_backend
    from tripwire.dispatch.pipeline import Options

    chosen = find_backend(backend)
    return name, Options(chosen, fullgraph, cache_size, more, check=check)


# --- NumPy's generators ---
#
# A bit generator of NumPy's shows its state and its seed as plain data. A Generator or RandomState
# draws from one, which others may draw from, too. None of them can be made empty: each is built
# with what it draws from, and told its state when that is complete.


_SOURCES = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")

_NAMES = ("SeedSequence", "Generator", "RandomState", *_SOURCES)


def is_generator(cls: type) -> bool:
    """Whether a class is one of NumPy's; not what inherits from it."""
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and any(cls is vars(numpy).get(name) for name in _NAMES)


def encode_generator(encoder: Encoder, value: Any, cls: type) -> AnyNode:
    """A generator as it stands now."""
    content = encoder.slot(_find_content(encoder, value, cls))
    return nodes.Object(encoder.reference(cls, ".__class__"), (), (), content=content)


def _find_content(encoder: Encoder, value: Any, cls: type) -> tuple[object, ...]:
    match cls.__name__:
        case "SeedSequence":
            entropy, key = _freeze(value.entropy), tuple(value.spawn_key)
            return entropy, key, value.pool_size, value.n_children_spawned
        case "Generator":
            return (value.bit_generator,)
        case "RandomState":
            state = value.get_state(legacy=False)
            return value._bit_generator, state["has_gauss"], state["gauss"]
    seed = value.seed_seq
    if seed is not None and not is_generator(type(seed)):
        why = "its seed sequence isn't kept: at replay it spawns other generators"
        encoder.left_out.append(Omission(encoder.path(), why))
        seed = None
    return seed, value.state


def _freeze(entropy: object) -> object:
    """What a seed is made of: numbers, in something that is complete once it is made."""
    return tuple(map(_freeze, entropy)) if isinstance(entropy, list | tuple) else entropy


def build_generator(cls: Any, content: Any) -> object:
    """A generator that draws from the right thing, wherever that stands."""
    if cls.__name__ == "SeedSequence":
        entropy, key, size, spawned = content
        return cls(entropy, spawn_key=key, pool_size=size, n_children_spawned=spawned)
    return cls(content[0])


def restore_generator(made: Any, content: Any) -> None:
    """Go on from the recorded state."""
    name = type(made).__name__
    if name in _SOURCES:
        made.state = content[1]
    elif name == "RandomState":
        kept = dict(zip(("has_gauss", "gauss"), content[1:], strict=True))
        made.set_state({**made.get_state(legacy=False), **kept})
