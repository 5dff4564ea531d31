"""Chooses the sentry: the C one where it was built, else its Python twin.

The C sentry sees a write to an object through a hook on the C function that carries it out. Which
functions those are is known here, and only here. The hooks are in place only while some sentry
watches an object. TRIPWIRE_PURE=1 in the environment chooses the twin.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

from tripwire.imports import find_native
from tripwire.values.classes import isinstance
from tripwire.writes import twin
from tripwire.writes.twin import Hidden, Touch

__all__ = [
    "IS_COMPILED",
    "TELLS",
    "UNHOOKED",
    "Hidden",
    "Sentry",
    "Touch",
    "call",
    "count_switches",
    "same_items",
]

# Whatever gives a tensor other storage, geometry or autograd standing without making a new one, as
# an attribute of Tensor, a function of torch or an operator: each name exists in some of the three.
# Taken from all names of torch 2.13 that end in an underscore; `names` and `rename_` are older.
_TENSOR_WRITERS = (
    "_coalesced_",
    "_grad_fn",
    "_mkldnn_transpose_",
    "_resize_output_",
    "as_strided_",
    "data",
    "detach_",
    "names",
    "rename_",
    "requires_grad",
    "requires_grad_",
    "resize_",
    "resize_as_",
    "resize_as_sparse_",
    "set_",
    "set_data",
    "sparse_resize_",
    "sparse_resize_and_clear_",
    "squeeze_",
    "swapaxes_",
    "swapdims_",
    "t_",
    "transpose_",
    "unsqueeze_",
)


class _WithDict:
    """Its instances have a dict, and can be referred to weakly."""


class _WithDictAlone:
    """Its instances can't be referred to weakly."""

    __slots__ = ("__dict__",)


def _find_writers() -> Iterator[tuple[str, object]]:
    """Yield each C function that writes to objects, with a name for it.

    What replaces a `__dict__` is found by `_watch.c` through each object's class. Ordinary classes
    share two tables of CPython's, and the first class to lead there lives for ever: so ours do.
    What a function is made of isn't among the writers: that is compared.
    """
    for cls in (_WithDict, _WithDictAlone):
        yield f"{cls.__name__}.__dict__", vars(cls)["__dict__"]
    yield "object.__class__", vars(object)["__class__"]
    for name in ("__bases__", "__name__", "__qualname__"):
        yield f"type.{name}", vars(type)[name]
    yield "functools.partial.__setstate__", vars(functools.partial)["__setstate__"]
    try:
        import torch
    except ImportError:  # the sentry needs no tensors to be of use, or to be tested
        return
    yield "torch._C._swap_tensor_impl", torch._C._swap_tensor_impl
    for name in _TENSOR_WRITERS:
        method = inspect.getattr_static(torch.Tensor, name, None)
        if method is not None and not isinstance(method, FunctionType):  # which calls another
            yield f"torch.Tensor.{name}", method
        if hasattr(torch, name):
            yield f"torch.{name}", getattr(torch, name)
        if hasattr(torch.ops.aten, name):
            packet = getattr(torch.ops.aten, name)
            yield f"torch.ops.aten.{name}", packet._op
            for overload in packet.overloads():
                yield f"torch.ops.aten.{name}.{overload}", getattr(packet, overload)._op


def _install(hook: Callable[[object], None]) -> tuple[str, ...]:
    """Hook all writers; return the names of those that can't be."""
    unhooked = []
    for name, writer in _find_writers():
        try:
            hook(writer)
        except TypeError:
            unhooked.append(name)
    return tuple(unhooked)


def _sees_attribute_stores(sentry_class: type[twin.Sentry]) -> bool:
    """Whether a watched `__dict__` reports `obj.name = value`, often enough to be specialised.

    Python 3.13.0 writes past the watchers of a dict that shares its values with its instance
    (cpython#125608). cpython#125611 tells them, in the one C function that all such stores reach;
    it came after 3.13.0, so pytorch#138284 trusts 3.13.1 and later. Python itself is asked.
    """

    class Sample:
        value: int

    sample = Sample()
    sample.value = 0
    sentry = sentry_class([(vars(sample), frozenset({"value"}))], [])
    for value in range(1, 100):
        sample.value = value
        if not sentry.take():
            return False
    return True


def _choose() -> tuple[Any, tuple[str, ...]]:
    """Return the module to use, and the writers of objects that its sentry can't see."""
    watch = find_native("writes._watch")
    if watch is None:  # or there was no dict watcher left for us
        return twin, ()
    unhooked = _install(watch.hook)
    # torch.utils.swap_tensors refuses tensors that have weakrefs, a known grief of compiled models
    # (pytorch#186796). It asks this function, and finds none of ours where the hook holds.
    with contextlib.suppress(TypeError):
        watch.hook_weakrefs(weakref.getweakrefs, Hidden)
    with contextlib.suppress(ImportError):
        from torch import nn

        for setter in (nn.Module.__setattr__, nn.Module.__delattr__):
            watch.note_writers_of(setter)
        from tripwire.env import LIBRARY_ROOTS

        for root, is_library in LIBRARY_ROOTS:
            watch.blame_callers_of(root, is_library)
    if not _sees_attribute_stores(watch.Sentry):
        watch.distrust_inline_values()
    return watch, unhooked


if TYPE_CHECKING:
    from tripwire.writes.twin import Sentry as Sentry
    from tripwire.writes.twin import call as call
    from tripwire.writes.twin import count_switches as count_switches
    from tripwire.writes.twin import same_items as same_items

    UNHOOKED: tuple[str, ...] = ()
    IS_COMPILED: bool = False  # whether the sentry is the C one
    TELLS: bool = False  # whether it calls a listener
else:
    # UNHOOKED: where it isn't empty, the sentry counts every object as touched, always.
    _chosen, UNHOOKED = _choose()
    Sentry, call, same_items = _chosen.Sentry, _chosen.call, _chosen.same_items
    count_switches, TELLS = _chosen.count_switches, _chosen.TELLS
    IS_COMPILED = _chosen is not twin
