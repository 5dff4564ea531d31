"""Any graph of objects comes back equal, and shares in the same way."""

from __future__ import annotations

import collections
import gc
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from roundtrip import again, encode
from torch import nn

from tripwire.recording.format.file import Record


@pytest.fixture(autouse=True, scope="module")
def own_callbacks() -> Iterator[None]:
    """Hypothesis leaves a function in gc.callbacks, which later tests would trace."""
    before = list(gc.callbacks)
    yield
    gc.callbacks[:] = before


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=80),
    st.text(alphabet=st.characters(categories=["Cs", "L"]), max_size=5),
    st.binary(max_size=10),
)
HASHABLE = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5))


class Thing:
    """An object with attributes."""


class Slots:
    """An object with slots."""

    __slots__ = ("left", "right")


class Items(list):
    """A list with attributes."""


DTYPES = [torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16]


class Pool:
    """Builds a graph of objects from a list of draws."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.values: list[Any] = []

    def pick(self) -> Any:
        if self.values and self.data.draw(st.booleans()):
            return self.values[self.data.draw(st.integers(0, len(self.values) - 1))]
        return self.data.draw(SCALARS)

    def tensor(self) -> torch.Tensor:
        tensors = [v for v in self.values if isinstance(v, torch.Tensor)]
        if tensors and self.data.draw(st.booleans()):
            return self.view(tensors[self.data.draw(st.integers(0, len(tensors) - 1))])
        shape = self.data.draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = self.data.draw(st.sampled_from(DTYPES))
        made = torch.randint(0, 2, shape).to(dtype)
        if dtype.is_floating_point and self.data.draw(st.booleans()):
            return nn.Parameter(made) if self.data.draw(st.booleans()) else made.requires_grad_()
        return made

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        base = tensor.detach()
        match self.data.draw(st.integers(0, 5)):
            case 0:
                return base.flatten()[::2] if base.numel() else base
            case 1:
                return base.t() if base.dim() == 2 else base.view(base.shape)
            case 2:
                return base[1:] if base.dim() else base
            case 3:
                return base.expand(3, *base.shape)
            case 4:
                return base.conj() if base.is_complex() else base
            case _:
                return nn.Parameter(base, requires_grad=False)

    def make(self) -> Any:
        picks = [self.pick() for _ in range(self.data.draw(st.integers(0, 4)))]
        keys = [self.data.draw(HASHABLE) for _ in picks]
        match self.data.draw(st.integers(0, 12)):
            case 0:
                return picks
            case 1:
                return tuple(picks)
            case 2:
                return dict(zip(keys, picks, strict=True))
            case 3:
                return collections.OrderedDict(zip(keys, picks, strict=True))
            case 4:
                return set(keys)
            case 5:
                return frozenset(keys)
            case 6:
                return collections.deque(picks, maxlen=5)
            case 7:
                thing = Thing()
                vars(thing).update({f"a{i}": pick for i, pick in enumerate(picks)})
                return thing
            case 8:
                slots = Slots()
                for name, pick in zip(("left", "right"), picks, strict=False):
                    setattr(slots, name, pick)
                return slots
            case 9:
                items = Items(picks)
                items.me = items
                return items
            case 10:
                things = [value for value in self.values if type(value) is Thing]
                return {thing: i for i, thing in enumerate(things)}
            case _:
                return self.tensor()

    def link(self) -> None:
        """Put one value into an earlier one, which may close a circle."""
        holders = [v for v in self.values if isinstance(v, (list, dict, Thing))]
        if not holders:
            return
        holder = holders[self.data.draw(st.integers(0, len(holders) - 1))]
        value = self.pick()
        if isinstance(holder, list):
            holder.append(value)
        elif isinstance(holder, dict):
            holder[self.data.draw(HASHABLE)] = value
        else:
            holder.link = value


SMALL = (type(None), bool, int, float, complex, str, bytes)


class Compare:
    """Two graphs, side by side: the same forms, and one-to-one."""

    def __init__(self) -> None:
        self.forward: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.queue: collections.deque[tuple[Any, Any]] = collections.deque()

    def check(self, left: object, right: object) -> None:
        self.queue.append((left, right))
        while self.queue:
            self.pair(*self.queue.popleft())

    def pair(self, left: Any, right: Any) -> None:
        assert type(left) is type(right)
        if isinstance(left, SMALL) and type(left) in SMALL:
            assert repr(left) == repr(right)
            return
        if left == () or left == frozenset():
            assert right == left
            return
        if not self.match(id(left), id(right)):
            return
        if isinstance(left, torch.Tensor):
            self.tensors(left, right)
            return
        self.parts(left, right)

    def match(self, left: int, right: int) -> bool:
        """Whether a pair is new; two of one must be two of the other."""
        known = left in self.forward
        assert self.forward.setdefault(left, right) == right
        assert self.back.setdefault(right, left) == left
        return not known

    def parts(self, left: Any, right: Any) -> None:
        if isinstance(left, (list, tuple, collections.deque)):
            assert len(left) == len(right)
            self.queue.extend(zip(left, right, strict=True))
        elif isinstance(left, dict):
            assert len(left) == len(right)
            self.queue.extend(zip(left.keys(), right.keys(), strict=True))
            self.queue.extend(zip(left.values(), right.values(), strict=True))
        elif isinstance(left, (set, frozenset)):
            assert left == right
        for state in ("__dict__", "__slots__"):
            if hasattr(left, state):
                self.queue.append((attributes(left, state), attributes(right, state)))

    def tensors(self, left: torch.Tensor, right: torch.Tensor) -> None:
        for name in ("dtype", "shape", "requires_grad", "is_leaf"):
            assert getattr(left, name) == getattr(right, name)
        assert left.stride() == right.stride() and left.is_conj() == right.is_conj()
        assert torch.equal(left.detach(), right.detach())
        storages = [t.untyped_storage()._cdata for t in (left, right)]
        self.match(*storages)


def attributes(value: Any, state: str) -> tuple[Any, ...]:
    if state == "__slots__":
        return tuple((name, getattr(value, name, None)) for name in value.__slots__)
    return tuple(vars(value).items())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_graph_comes_back_equal_and_shares_in_the_same_way(data: st.DataObject) -> None:
    pool = Pool(data)
    for _ in range(data.draw(st.integers(1, 10))):
        pool.values.append(pool.make())
    for _ in range(data.draw(st.integers(0, 5))):
        pool.link()
    root = list(pool.values)
    with tempfile.TemporaryDirectory() as folder:
        found = again(Path(folder), root)
    Compare().check(root, found)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(1, 3)), max_size=8))
def test_any_views_of_one_storage_keep_their_places(spans: list[tuple[int, int, int]]) -> None:
    base = torch.arange(64, dtype=torch.int16)
    views = [base[start : start + size * step : step] for start, size, step in spans]
    with tempfile.TemporaryDirectory() as folder:
        found = again(Path(folder), views)
    Compare().check(views, found)
    for i, view in enumerate(found):
        view.add_(100)
        views[i].add_(100)
    for left, right in zip(views, found, strict=True):
        assert torch.equal(left, right)
    offsets = [view.storage_offset() for view in views]
    moved = {a - b.storage_offset() for a, b in zip(offsets, found, strict=True)}
    assert len(moved) <= 1


@settings(max_examples=100, deadline=None)
@given(st.recursive(SCALARS, lambda s: st.lists(s) | st.dictionaries(HASHABLE, s), max_leaves=20))
def test_data_is_the_same_for_those_who_trust_and_those_who_do_not(value: object) -> None:
    from tripwire.recording.format.decode import view

    with tempfile.TemporaryDirectory() as folder:
        path = encode(value)[0].write(Path(folder) / "x.rec")
        with Record.open(path) as record:
            seen = view(record.table, record.blobs)["value"]
        Compare().check(value, seen)
        Compare().check(value, again(Path(folder), value))
    assert not (isinstance(value, float) and math.isnan(value)) or value != seen
