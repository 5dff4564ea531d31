"""Classes: what a value is, according to its type. No code of a class or a metaclass runs.

`isinstance` here looks at a value's type and not at its `__class__`: a mock or a lazy proxy gives
another class there, or raises. Modules that look at a user's values import this one.
"""

from __future__ import annotations

from types import MappingProxyType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from builtins import isinstance as isinstance
else:

    def isinstance(value, kinds):
        """Whether a value's own class is one of some kinds, whatever it says of itself."""
        cls = type(value)
        return cls is kinds or issubclass(cls, kinds)  # a metaclass is asked half as often


_type_mro = type.__dict__["__mro__"].__get__
_type_dict = type.__dict__["__dict__"].__get__
_type_module = type.__dict__["__module__"].__get__
_type_name = type.__dict__["__qualname__"].__get__
_type_size = type.__dict__["__basicsize__"].__get__
_type_flags = type.__dict__["__flags__"].__get__


_ABSENT = object()

# In classes: what Python, abc, typing and dataclasses keep there for themselves.
_MADE = (
    "__dict__ __weakref__ __annotations__ __annotate__ __annotate_func__ __slots__ __match_args__ "
    "__type_params__ __static_attributes__ __orig_bases__ __parameters__ __abstractmethods__ "
    "_abc_impl __dataclass_fields__ __dataclass_params__"
)
MADE_BY_PYTHON = frozenset(_MADE.split())
# Looked up on classes by the interpreter itself, without a name in any code.
_SPECIAL = (
    "call getattr getattribute setattr delattr get set delete set_name len bool iter "
    "next contains getitem setitem delitem missing eq ne lt le gt ge hash add radd "
    "iadd sub rsub isub mul rmul imul matmul rmatmul imatmul truediv rtruediv "
    "itruediv floordiv rfloordiv ifloordiv mod rmod imod pow rpow ipow and rand iand "
    "or ror ior xor rxor ixor lshift rlshift ilshift rshift rrshift irshift neg pos "
    "abs invert int float complex index round trunc floor ceil enter exit repr str "
    "format bytes instancecheck subclasscheck new init reversed length_hint "
    "class_getitem init_subclass prepare torch_function dict slots match_args del"
)
SPECIAL = frozenset(f"__{name}__" for name in _SPECIAL.split())


def mro(cls: type) -> tuple[type, ...]:
    """A class's bases, itself first; a metaclass with an `__mro__` isn't asked."""
    return cast("tuple[type, ...]", _type_mro(cls))


def class_dict(cls: type) -> MappingProxyType[str, Any]:
    """A class's own attributes; a metaclass with a `__dict__` isn't asked."""
    return cast("MappingProxyType[str, Any]", _type_dict(cls))


def module_of(cls: type) -> str:
    """The module that a class says it is of; a metaclass isn't asked."""
    if id(cls) in _HOMES:
        return _HOMES[id(cls)]
    try:
        module = _type_module(cls)
    except AttributeError:  # made where the globals have no `__name__`
        return ""
    return module if isinstance(module, str) else ""


_HOMES: dict[int, str] = {}  # of classes that stand for others, by identity


def name_after(cls: type, other: type) -> None:
    """Have a class of ours print as another. `module_of` still tells where it is from."""
    _HOMES[id(cls)] = module_of(cls)
    cls.__name__, cls.__qualname__ = other.__name__, other.__qualname__
    cls.__module__ = other.__module__


def name_of(cls: type) -> str:
    """A class's qualified name; a metaclass isn't asked."""
    return cast("str", _type_name(cls))


def short_name_of(cls: type) -> str:
    """A class's name without what it is defined in; a metaclass isn't asked."""
    return name_of(cls).rpartition(".")[2]


def size_of(cls: type) -> int:
    """The bytes that an instance takes in C; a metaclass isn't asked."""
    return cast("int", _type_size(cls))


# Objects/typeobject.c refuses to set attributes of classes that aren't of the first kind or are of
# the second (Py_TPFLAGS_HEAPTYPE and _IMMUTABLETYPE, Include/object.h; stable since 3.10).
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8


def is_heap_type(cls: type) -> bool:
    """Whether a class was made while Python ran: by a `class` statement, for one."""
    return bool(_type_flags(cls) & _HEAP_TYPE)


def can_be_written(cls: type) -> bool:
    """Whether attributes can be put on a class."""
    return bool(_type_flags(cls) & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE)


def is_kind(cls: type, base: type) -> bool:
    """Whether a class is another or inherits from it, whatever their metaclasses say."""
    return any(k is base for k in mro(cls))


def class_name(cls: type) -> str:
    """Module and qualified name, for reports."""
    module = class_dict(cls).get("__module__")
    name = name_of(cls)
    return f"{module}.{name}" if type(module) is str and module != "builtins" else name


def is_iterator(cls: type) -> bool:
    """Whether instances of a class can be iterated and are their own iterators."""
    return all(find_in_class(cls, name) for name in ("__iter__", "__next__"))


def is_exactly(value: object, *kinds: type) -> bool:
    """Whether a value's class is one of some; a metaclass with an `==` isn't asked."""
    cls = type(value)
    for kind in kinds:  # noqa: SIM110  # no generator: asked for each value that is met
        if cls is kind:
            return True
    return False


try:  # torch has imported it, where it is installed
    import numpy
except ImportError:
    NUMPY_FLOAT: type = float
else:
    NUMPY_FLOAT = numpy.float64
FLOATS: tuple[type, ...] = (float, NUMPY_FLOAT)  # a float of NumPy's is one of Python's, too


def ids_of(*values: object) -> frozenset[int]:
    """Classes and functions that live for ever, by identity: others may have an `==` and a hash."""
    return frozenset(map(id, values))


def find_in_class(cls: type, name: str) -> object:
    """What a class or a base has under a name, as it lies there; None where there is nothing.

    Like `inspect.getattr_static`, which keeps every class that it is asked about alive (3.12.0 to
    3.12.3, cpython#118013).
    """
    for base in mro(cls):
        found = class_dict(base).get(name, _ABSENT)  # one look: another thread may delete it
        if found is not _ABSENT:
            return found
    return None


def hides_own(cls: type, name: str) -> bool:
    """Whether a property, or its like, stands before what an object's own dict has there."""
    found = find_in_class(cls, name)
    if found is None or isinstance(found, MemberDescriptorType):
        return False
    methods = "__set__", "__delete__"
    return any(find_in_class(type(found), method) is not None for method in methods)


def is_namedtuple(cls: type) -> bool:
    """Whether a class was made by `namedtuple` or `typing.NamedTuple`."""
    return issubclass(cls, tuple) and all(find_in_class(cls, n) for n in ("_fields", "_make"))


def is_dataclass_object(value: object) -> bool:
    """Whether a value is an instance of a dataclass."""
    return find_in_class(type(value), "__dataclass_fields__") is not None
