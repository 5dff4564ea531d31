"""Reader: which attributes of which objects a run reads, reported as they are read.

A reader is given the objects that a run reaches. It reports the first read of each (object, name),
before the lookup returns the value. A lookup that finds nothing is a read, too: of the absence. The
C reader takes part in the lookup itself (`_reader.c`), for the thread that runs. The class here is
its twin: it sees no reads, and assumes that every name in the code that ran was read from every
object. So the twin reports what was read, and often more; the C reader reports exactly what was
read.

Of a class that it is told to watch, a reader knows every name that was looked up where the lookup
may have found something in that class: on objects that the run made itself, too, and on the class
itself.

What neither sees: reads of Python modules and of functions, which are found from the names in the
code; and objects whose class has a `__getattribute__` of its own, which count as read whole.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import CodeType, MemberDescriptorType, WrapperDescriptorType
from typing import TYPE_CHECKING, Any, final

from torch import nn

from tripwire.env import OWN_FOLDER
from tripwire.imports import find_native
from tripwire.values.classes import find_in_class, hides_own, is_heap_type, isinstance, module_of
from tripwire.values.contents import copy_dict, own_dict, read_slots

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

OnRead = Callable[[Any, str, object], None]
OnName = Callable[[str], None]

# These look into `__dict__` for one name, and that name is what is read.
ACCESSORS: tuple[CodeType, ...] = tuple(
    function.__code__
    for function in (
        nn.Module.__getattr__,
        nn.Module.__setattr__,
        nn.Module.__delattr__,
        nn.Module.register_buffer,
        nn.Module.register_parameter,
        functools.cached_property.__get__,
    )
)
# Functions of a class that are asked for attributes: names in them are names at their callers.
LOOKUPS = frozenset({"__getattribute__", "__getattr__", "__setattr__", "__delattr__"})
_CONTAINER_MODULES = (
    *(nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict),
)


def can_be_read(cls: type) -> bool:
    """Whether reads of a class's objects are told; else an object counts as read whole."""
    if not is_heap_type(cls) or answers_itself(cls):
        return False
    return not module_of(cls).startswith("tripwire.")  # what our own code reads isn't noted


def answers_itself(cls: type) -> bool:
    """Whether a class has code of its own that is asked for every attribute."""
    return not isinstance(find_in_class(cls, "__getattribute__"), WrapperDescriptorType)


def is_shadowed(cls: type, name: str, in_table: bool) -> bool:
    """Whether a lookup finds something else than what an object or a module's table holds."""
    of_class = find_in_class(cls, name)
    if in_table:  # which is asked last
        return of_class is not None
    return isinstance(of_class, MemberDescriptorType) or hides_own(cls, name)


def may_be_made(cls: type, name: str) -> bool:
    """Whether a lookup may run code that stores what it then finds, as `cached_property` does."""
    if hasattr(type(find_in_class(cls, name)), "__get__"):
        return True
    fallback = find_in_class(cls, "__getattr__")
    return fallback is not None and fallback is not nn.Module.__getattr__


@final
class Twin:
    """Assumes that every name in the code that ran was read from every object."""

    __slots__ = ("_met", "_names", "_on_read", "_walks_tables")

    def __init__(
        self,
        on_read: OnRead,
        own_folder: str = "",
        go_betweens: tuple[CodeType, ...] = (),
        accessors: tuple[CodeType, ...] = (),
        tables: frozenset[str] = frozenset(),
        on_name: OnName | None = None,
        waiting: dict[str, Any] | None = None,
    ) -> None:
        self._on_read: OnRead | None = on_read
        self._met: list[object] = []
        self._names: set[str] = set()
        self._walks_tables = False

    def start(self) -> None:
        """Begin to look, in this thread."""

    def stop(self) -> None:
        """See nothing more."""

    def meet(self, item: object) -> None:
        """Tell of reads of this object from now on. Whoever calls this keeps it alive."""
        self._met.append(item)
        self._look_at(item, self._names)

    def watch(self, cls: type) -> None:
        """Note the names of lookups that may find something in this class, from now on."""

    @property
    def names_looked_up(self) -> frozenset[str] | None:
        """Names under which watched classes, among others, were looked into; None: untold."""
        return None

    def names_of(self, item: object) -> frozenset[str]:
        """The names under which an object was read; `__dict__` stands for all of them."""
        return frozenset(self._names)

    def first_of(self, item: object, name: str, default: object) -> object:
        """What was first found under a name, if it was a plain value; else the default."""
        return default

    def close(self) -> None:
        """See nothing more, and let go of whoever is told. What was read stays known."""
        self._on_read = None
        self._met.clear()

    @property
    def has_lost_sight(self) -> bool:
        """Whether the run changed how attributes of a class are looked up."""
        return False

    def see_names(self, names: frozenset[str]) -> None:
        """Code begins that loads attributes under these names."""
        new = names - self._names - {"__dict__"}
        self._names |= new
        if new:
            for item in tuple(self._met):
                self._look_at(item, new)

    def open_tables(self) -> None:
        """Code begins that goes through tables of modules."""
        if not self._walks_tables:
            self._walks_tables = True
            for item in tuple(self._met):
                self._look_at(item, frozenset(MODULE_TABLES))

    def _look_at(self, item: object, names: set[str] | frozenset[str]) -> None:
        if self._on_read is None:
            return
        cls, held = type(item), copy_dict(own_dict(item) or {})
        found = {k: v for k, v in held.items() if not is_shadowed(cls, k, False)}
        found |= read_slots(item)
        if isinstance(item, nn.Module):
            for table in MODULE_TABLES:
                space: Any = copy_dict(held.get(table) or {})
                found |= {k: v for k, v in space.items() if not is_shadowed(cls, k, True)}
            if not (self._walks_tables or isinstance(item, _CONTAINER_MODULES)):
                names = names - set(MODULE_TABLES)
        for name, value in found.items():
            if name in names:
                self._on_read(item, name, value)


def _swap(
    get: Callable[[], object], put: Callable[[Any], object], expected: object, value: object
) -> bool:
    try:
        is_there = get() is expected
    except (LookupError, AttributeError, ValueError):  # nothing lies there any more
        return False
    if is_there:
        put(value)
    return is_there


def _choose() -> tuple[Any, Any]:
    module = find_native("reading._reader")
    if module is None:
        return Twin, _swap
    os.register_at_fork(after_in_child=module.after_fork)
    return module.Reader, module.swap


if TYPE_CHECKING:
    Reader = Twin
    swap = _swap
else:
    # swap(get, put, expected, value) puts a value where another one lies, if it does.
    Reader, swap = _choose()
SWAPS_AT_ONCE = swap is not _swap  # no other thread runs in between


def build_reader(on_read: OnRead, on_name: OnName, waiting: dict[str, Any]) -> Reader:
    """A reader that tells of what is no plain value, and of tables only if they hold something.

    A name that waits is told before the first lookup under it in a watched class.
    """
    tables = frozenset({*MODULE_TABLES, *HOOK_TABLES})
    return Reader(on_read, OWN_FOLDER, tuple(_go_betweens), ACCESSORS, tables, on_name, waiting)


_go_betweens: list[CodeType] = []


def add_go_between(code: CodeType) -> None:
    """What this code of tripwire's reads is its caller's doing."""
    _go_betweens.append(code)
