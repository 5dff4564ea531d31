"""Tensors of a run: which node stands for each, whose memory it has, and what was in it before.

Tensors are held weakly, so a traced run frees its intermediates when the plain run would.
An entry goes with its tensor; an identity never survives the object that had it.

Every storage that the run made itself has a number, which its views share. It tells what an
in-place write can reach. All other memory has one number, OUTSIDE: inputs may overlap in ways that
no storage shows. A number is never used for a second storage: a weak reference keeps a dead
storage's address from being used again.

Records and checks keep memory and random generators as they were. Memory is copied once, just
before the first write to it. The state of a generator is kept before anything can draw from it.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from msgspec import Struct
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tripwire.reading.sources import Attr, Item, Source, has_pytree, iter_pytree
from tripwire.values.classes import (
    find_in_class,
    ids_of,
    is_dataclass_object,
    is_exactly,
    is_namedtuple,
    isinstance,
)
from tripwire.values.contents import attributes_of, children, elements_of, items_of
from tripwire.values.identity import PLAIN, is_library_function
from tripwire.values.numbers import is_open

if TYPE_CHECKING:
    from tripwire.tracing.branches import Branch


class TensorMeta(NamedTuple):  # a tuple: one per node, see SourceRange
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None  # None for layouts without strides
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    sparse: tuple[object, ...] | None = None  # see sparse_form

    def build(self) -> torch.Tensor:
        """A tensor of this form; its values are anything."""
        assert self.stride is not None
        return torch.empty_strided(
            self.shape,
            self.stride,
            dtype=self.dtype,
            device=self.device,
            requires_grad=self.requires_grad,
        )

    @property
    def full(self) -> str:
        """Everything, for messages about differences."""
        grad = ", requires grad" if self.requires_grad else ""
        sparse = "" if self.sparse is None else f", sparse {self.sparse}"
        return f"{self} on {self.device}, strides {self.stride}{sparse}{grad}"

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


def has_own_code(cls: type) -> bool:
    """Whether a tensor's class runs code of the user's for whatever is asked of the tensor."""
    if cls is torch.Tensor or cls is nn.Parameter or not issubclass(cls, torch.Tensor):
        return False
    found = find_in_class(cls, "__torch_function__")
    function = getattr(found, "__func__", found)
    return isinstance(function, FunctionType) and not is_library_function(function)


PLAIN_TENSORS = ids_of(torch.Tensor, nn.Parameter)
_Answer = TypeVar("_Answer")


def quietly(ask: Callable[[torch.Tensor], _Answer]) -> Callable[[torch.Tensor], _Answer]:
    """Ask a tensor for something of its own; a subclass's `__torch_function__` isn't told."""

    @functools.wraps(ask)
    def asked(tensor: torch.Tensor) -> _Answer:
        if id(type(tensor)) in PLAIN_TENSORS:
            return ask(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return ask(tensor)

    return asked


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def sparse_form(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What a sparse tensor is beside its sizes: coalesced or not, and which dimensions are dense.

    How many elements it has isn't part of it: where that is read, it is a value.
    """
    if tensor.layout is torch.sparse_coo:
        return tensor.is_coalesced(), tensor.sparse_dim(), tensor.dense_dim()
    if tensor.layout in _COMPRESSED:
        dense = tensor.dense_dim()
        first = tensor.dim() - 1 - dense
        return dense, *tensor.values().shape[first:]  # the sizes of blocks, and what is dense
    return None


@quietly
def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """The metadata of a tensor as it is now."""
    nested = tensor.is_nested
    return TensorMeta(
        () if nested else tuple(tensor.shape),
        tensor.stride() if tensor.layout is torch.strided and not nested else None,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        None if tensor.layout is torch.strided or nested else sparse_form(tensor),
    )


def describe(value: Any) -> TensorMeta | tuple[TensorMeta | None, ...] | None:
    """Metadata of a result; None in the place of what is no tensor."""
    if isinstance(value, torch.Tensor):
        return meta_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(meta_of(v) if isinstance(v, torch.Tensor) else None for v in value)
    return None


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func wrapped it: it has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside all wrappings."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@quietly
def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory; -1 for layouts without one storage."""
    if tensor.layout is not torch.strided:
        return -1
    storage: int = unwrap(tensor).untyped_storage()._cdata
    return storage


LAZY = -1  # the version of a lazy module's tensor that has no shape yet


def version_of(tensor: torch.Tensor) -> int | None:
    """The count of in-place changes; None for inference tensors, which keep none."""
    if id(type(tensor)) in PLAIN_TENSORS:  # asked several times for each call of a run
        return None if tensor.is_inference() else tensor._version
    return _version_of_subclass(tensor)


@quietly
def _version_of_subclass(tensor: torch.Tensor) -> int | None:
    if is_lazy(tensor):
        return LAZY
    return None if tensor.is_inference() else tensor._version


def has_sizes(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor that lies in memory by sizes and strides."""
    if id(type(tensor)) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
        return False
    return not tensor.is_nested


def iter_given(value: Any) -> Iterator[torch.Tensor]:
    """Tensors among the arguments of a call: in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_given(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_given(item)


class Traits(NamedTuple):
    """What else Python and torch calls can tell of an input."""

    cls: type
    layout: torch.layout
    lazy_bits: tuple[bool, bool, bool]  # conjugated, negated, made in inference mode
    is_leaf: bool
    offset: int | None
    is_view: bool
    wrapped: object = None  # of a subclass that wraps others: what wraps_of gives


def wraps_of(tensor: torch.Tensor) -> object:
    """What a tensor that is made of others says of itself; a DTensor's placements are there."""
    if id(type(tensor)) in PLAIN_TENSORS or not is_traceable_wrapper_subclass(tensor):
        return None
    try:
        names, context = tensor.__tensor_flatten__()
    except Exception:  # the user's code; a half-made tensor can't say, and is like no other
        return object()
    return tuple(names), context, [_describe_part(getattr(tensor, name)) for name in names]


def _describe_part(part: object) -> object:
    return (meta_of(part), wraps_of(part)) if isinstance(part, torch.Tensor) else part


def find_leaf(tensor: torch.Tensor) -> bool | None:
    """Whether it is a leaf; None where autograd refuses to say.

    That is a view that was made under `no_grad` of a tensor that was changed outside of it.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return None


@quietly
def traits_of(tensor: torch.Tensor) -> Traits:
    """The traits of a tensor as it is now."""
    return Traits(
        type(tensor),
        tensor.layout,
        (tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
        bool(find_leaf(tensor)),
        int(tensor.storage_offset()) if tensor.layout is torch.strided else None,
        tensor._is_view(),
        wraps_of(tensor),
    )


class Known(weakref.ref[torch.Tensor]):
    """What is known of one live tensor: its node, or the sources that reach it, or both."""

    __slots__ = ("key", "node", "seen_at", "sized_by", "sources", "version")

    key: int
    node: fx.Node | None
    sources: dict[Source, bool]  # in the order in which they were found; whether anchored
    sized_by: tuple[Branch, ...]  # what decides on its shape by values, see sizes.py
    version: int | None  # its count of in-place changes when it was last looked at,
    seen_at: int  # and the number of calls recorded by then


class ValueTable:
    """Tensor → `Known`, by identity."""

    __slots__ = ("__weakref__", "_drop", "_known")

    def __init__(self) -> None:
        known: dict[int, Known] = {}
        self._known = known

        def drop(ref: weakref.ref[torch.Tensor]) -> None:
            assert isinstance(ref, Known)
            if known.get(ref.key) is ref:
                del known[ref.key]

        self._drop = drop

    def __len__(self) -> int:
        return len(self._known)

    def find(self, tensor: torch.Tensor) -> Known | None:
        """What is known of this very tensor."""
        known = self._known.get(id(tensor))
        return known if known is not None and known() is tensor else None

    def add(self, tensor: torch.Tensor) -> Known:
        """The tensor's entry, made where there is none."""
        known = self.find(tensor)
        if known is None:
            known = Known(tensor, self._drop)
            known.key = id(tensor)
            known.node = None
            known.sources = {}
            known.sized_by = ()
            known.version = version_of(tensor)
            known.seen_at = 0
            self._known[known.key] = known
        return known

    def clear(self) -> None:
        """Forget every tensor."""
        self._known.clear()

    def live(self) -> list[tuple[torch.Tensor, Known]]:
        """Every known tensor that is still alive."""
        pairs = [(known(), known) for known in list(self._known.values())]
        return [(tensor, known) for tensor, known in pairs if tensor is not None]


def holds_tensor(value: object) -> bool:
    """Whether a tensor is anywhere in a value; see `iter_held`."""
    return next(iter_held(value), None) is not None


def iter_held(value: object, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Tensors anywhere in a value, each object looked into once. Classes and modules aren't."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    seen = set() if seen is None else seen
    if id(type(value)) in PLAIN or id(value) in seen or isinstance(value, (type, ModuleType)):
        return
    if is_open(value):
        return
    seen.add(id(value))
    for child in children(value):
        yield from iter_held(child, seen)


# --- whose memory a tensor has ---

OUTSIDE = 0


class MemoryTable:
    """Storage → number, for the length of a run."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._refs: list[Any] = []
        self._hides = False  # a tensor was met whose memory is in other tensors
        weakref.finalize(self, _release, self._refs)

    def add_outside(self, tensor: torch.Tensor) -> None:
        """An input's memory."""
        storage = self._storage_of(tensor)
        if storage is not None:
            self._number(storage, OUTSIDE)

    @property
    def latest(self) -> int:
        """Memory that is met from now on has a greater number, or is OUTSIDE."""
        return len(self._refs)

    def find(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory."""
        storage = self._storage_of(tensor)
        return OUTSIDE if storage is None else self._numbers.get(storage._cdata, OUTSIDE)

    def add_results(self, value: Any, may_be_outside: bool) -> tuple[int, ...]:
        """The numbers of what a call returned.

        Memory that is met here first was made by the call, unless that may have returned
        tensors from elsewhere.
        """
        if isinstance(value, torch.Tensor):
            return (self._add_result(value, may_be_outside),)
        found = [self._add_result(tensor, may_be_outside) for tensor in iter_given(value)]
        return tuple(dict.fromkeys(found))

    def _add_result(self, tensor: torch.Tensor, may_be_outside: bool) -> int:
        storage = self._storage_of(tensor)
        if storage is None:
            return OUTSIDE
        new = OUTSIDE if may_be_outside or self._hides else len(self._refs) + 1
        return self._number(storage, new)

    def _number(self, storage: torch.UntypedStorage, number: int) -> int:
        address = storage._cdata
        found = self._numbers.get(address)
        if found is not None:
            return found
        self._refs.append(storage._weak_ref())
        self._numbers[address] = number
        return number

    def _storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """None for classes that may keep their values in other tensors, and for odd layouts."""
        plain = id(type(tensor)) in PLAIN_TENSORS and tensor.layout is torch.strided
        if plain and torch._C._has_storage(tensor):
            return tensor.untyped_storage()
        if plain and is_wrapped(tensor):
            return self._storage_of(unwrap(tensor))
        self._hides = True
        return None


def _release(refs: list[Any]) -> None:
    for ref in refs:
        torch.UntypedStorage._free_weak_ref(ref)  # type: ignore[no-untyped-call]  # torch's own


# --- memory and generators as they were before ---

Memory = tuple[str, int]  # a device and an address on it


def memory_of(storage: torch.UntypedStorage) -> Memory:
    """What memory a storage uses: two may use the same, those of torch.frombuffer or of DLPack."""
    return str(storage.device), int(storage.data_ptr() or -storage._cdata)


class Copy(Struct, frozen=True):
    """A storage's bytes from before a write. The storage is held, so that its number is its own."""

    storage: torch.UntypedStorage
    copied: torch.UntypedStorage

    @staticmethod
    def of(storage: torch.UntypedStorage) -> Copy:
        return Copy(storage, storage.clone())  # type: ignore[no-untyped-call]


Copies = dict[Memory, Copy]


class GeneratorStates:
    """States of torch's default generators and of given ones, as they were when each was kept."""

    __slots__ = ("_given", "_kept")

    def __init__(self, given: Iterable[torch.Generator] = ()) -> None:
        self._given = tuple(given)
        self._kept = [(_CPU, _CPU.get_state())]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            if not torch.cuda.is_current_stream_capturing():  # else nobody may ask now
                self.keep(torch.cuda.default_generators)
        self.keep(self._given)

    def keep(self, generators: Iterable[torch.Generator]) -> None:
        """Those that aren't kept yet, as they are now."""
        for generator in generators:
            if not any(known is generator for known, _ in self._kept):
                self._kept.append((generator, generator.get_state()))

    def find_moved(self) -> Iterator[tuple[torch.Generator, torch.Tensor]]:
        """Generators that something drew from since, with their states before."""
        for generator, state in self._kept:
            if not torch.equal(generator.get_state(), state):
                yield generator, state

    def have_moved(self) -> bool:
        """Whether something drew from one since."""
        with torch._C.DisableTorchFunction():  # a mode needn't know that somebody asks
            return any(self.find_moved())

    @contextmanager
    def as_before(self, all_of_them: bool = True) -> Iterator[None]:
        """Them as they were, for a while; or the given ones alone: other threads draw, too."""
        given = set(map(id, self._given))
        kept = [one for one in self._kept if all_of_them or id(one[0]) in given]
        now = [(generator, generator.get_state()) for generator, _ in kept]
        try:
            _set(kept)
            yield
        finally:
            _set(now)


_CPU = torch.default_generator


def _set(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


# --- with their paths ---


def iter_tensors(
    value: object, path: Source, above: tuple[int, ...] = ()
) -> Iterator[tuple[torch.Tensor, Source]]:
    """Tensors in containers, dataclasses and pytree nodes, in order, with their paths."""
    if isinstance(value, torch.Tensor):
        yield value, path
    elif id(value) not in above and not _holds_plain(value):  # a container may contain itself
        for child, child_path in parts_with_paths(value, path):
            yield from iter_tensors(child, child_path, (*above, id(value)))


def parts_with_paths(value: object, path: Source) -> Iterator[tuple[object, Source]]:
    """What lies directly below a container, a dataclass or a pytree node."""
    cls = type(value)
    if id(cls) in PLAIN or isinstance(value, torch.nn.Module):
        return
    if is_namedtuple(cls):
        names = cls._fields  # type: ignore[attr-defined]  # a namedtuple has fields
        for name, child in zip(names, elements_of(value), strict=False):
            yield child, Attr(path, name)
    elif isinstance(value, dict):
        for key, child in items_of(value):
            yield child, Item(path, key)
    elif isinstance(value, (list, tuple, deque)):
        for index, child in enumerate(elements_of(value)):
            yield child, Item(path, index)
    elif has_pytree(value):
        yield from iter_pytree(value, path)
    elif is_dataclass_object(value):
        held = attributes_of(value)
        for field in fields(cast("Any", cls)):
            if field.name in held:
                yield held[field.name], Attr(path, field.name)


def _holds_plain(value: object) -> bool:
    """Whether a list or tuple holds plain values alone. One of a million is asked in 50 ms."""
    return is_exactly(value, list, tuple) and PLAIN.issuperset(
        map(id, map(type, elements_of(value)))
    )
