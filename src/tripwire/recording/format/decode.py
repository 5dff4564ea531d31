"""Decode: nodes become values again, in whatever order they come.

First everything is made: a value that can be filled later as an empty shell, any other after the
values that it needs. Then shells are filled; sets and dicts last, when their keys are complete.
Nothing recurses. Values that can't contain themselves in Python are refused if they do. Plain
values, containers and tensors are always decoded in the same way. For all others a maker decides:
views for a file that nobody trusts, live objects for a replay.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, cast

from tripwire.errors import TripwireError
from tripwire.recording.format import nodes
from tripwire.recording.format.blobs import StoredBlobs
from tripwire.recording.format.checks import slots_of
from tripwire.recording.format.container import damaged
from tripwire.recording.format.nodes import AnyNode, Slot
from tripwire.recording.format.views import AbsentView, Value, Viewer

if TYPE_CHECKING:
    from tripwire.recording.format.torchvalues import TensorBuilder


_MAX_WEIGHT = 10_000_000  # leaves of all keys, counted as often as they are reached
_MAX_DEPTH = 1000  # of tuples in a key: hashing goes as deep in C
_MAX_COMPARED = 2_000_000  # pairs of keys with one hash
_UNMADE = object()
_NAMED_ROOTS = ("locals", "generators")  # a keyword may be of a class of its own


class Maker(Protocol):
    """Makes what isn't plain data."""

    live: bool  # whether hashing what it makes may look at attributes

    def needs(self, node: AnyNode) -> Iterable[Slot]:
        """What must have been made before `make` is called; it may not be filled yet."""

    def make(self, node: AnyNode, value: Value) -> object:
        """The thing, or a shell of it. Raises what it likes where that can't be."""

    def fill(self, node: AnyNode, made: object, value: Value) -> None:
        """Put into a shell what belongs there; everything has been made by now."""

    def take(self, node: nodes.Object, made: object, content: object) -> None:
        """An instance of a list's, dict's, ... subclass takes what it holds, now complete."""

    def explain(self, node: AnyNode, error: Exception) -> TripwireError:
        """What to raise where a node can't be made or filled."""


def view(
    table: nodes.Table, blobs: StoredBlobs, read: Callable[[str], bytes] | None = None
) -> dict[str, object]:
    """The roots of a record, safely: data as itself, everything else as an inert view."""
    return Decoder(table, blobs, Viewer(table.codes, read)).roots()


class Decoder:
    """One decoding of a table that was checked."""

    def __init__(self, table: nodes.Table, blobs: StoredBlobs, maker: Maker) -> None:
        self._nodes = table.nodes
        self._roots = table.roots
        self._blobs = blobs
        self._maker = maker
        self._made: list[Any] = [_UNMADE] * len(table.nodes)
        self._open = bytearray(len(table.nodes))
        self._filled = bytearray(len(table.nodes))
        self._weights: dict[int, int] = {}
        self._depths: dict[int, int] = {}
        self._weighed = 0
        self._tensors: TensorBuilder | None = None

    def roots(self) -> dict[str, object]:
        """Every root, complete."""
        self._fill_all(self._make_all(self._roots.values()))
        found = {name: self.value(slot) for name, slot in self._roots.items()}
        for name in _NAMED_ROOTS:
            root = found.get(name)
            if isinstance(root, dict) and any(type(key) is not str for key in root):
                raise damaged("the name of an argument or of a generator isn't a text")
        return found

    def _take(self, node: nodes.Object, made: object) -> None:
        self._maker.take(node, made, self.value(node.content))

    def value(self, slot: Slot) -> object:
        """What a slot stands for; a reference must have been made."""
        return self._made[slot[0]] if type(slot) is tuple else slot

    # --- making ---

    def _make_all(self, slots: Iterable[Slot]) -> list[int]:
        """Make all that is reached from slots; returns it in the order in which it was met."""
        queue = collections.deque(slot[0] for slot in slots if type(slot) is tuple)
        met = bytearray(len(self._nodes))
        order: list[int] = []
        while queue:
            number = queue.popleft()
            if met[number]:
                continue
            met[number] = 1
            order.append(number)
            self._make(number)
            queue.extend(s[0] for s in slots_of(self._nodes[number]) if type(s) is tuple)
        return order

    def _make(self, number: int) -> None:
        if not self._try_make(number):
            raise damaged("an object that can't contain itself does")

    def _try_make(self, number: int) -> bool:
        """Make a node after all that it needs; False if that includes one that is being made."""
        stack = [number]
        opened: list[int] = []
        while stack:
            top = stack[-1]
            if self._made[top] is not _UNMADE:
                stack.pop()
                continue
            if not self._open[top]:
                self._open[top] = 1
                opened.append(top)
                missing = self._find_missing(self._nodes[top])
                if any(self._open[need] for need in missing):
                    for other in opened:
                        self._open[other] = 0
                    return False
                if missing:
                    stack.extend(missing)
                    continue
            self._made[top] = self._guard(self._build, self._nodes[top], top)
            stack.pop()
        return True

    def _find_missing(self, node: AnyNode) -> list[int]:
        needs = [slot[0] for slot in self._needs(node) if type(slot) is tuple]
        return [need for need in needs if self._made[need] is _UNMADE]

    def _complete(self, items: tuple[Slot, ...]) -> None:
        """Make and fill all that a frozenset's items lead to: hashing them may run their code.

        What contains the frozenset itself has to wait.
        """
        queue = collections.deque(slot[0] for slot in items if type(slot) is tuple)
        met: dict[int, None] = {}
        while queue:
            number = queue.popleft()
            if number in met or (self._open[number] and self._made[number] is _UNMADE):
                continue
            if self._try_make(number):
                met[number] = None
                queue.extend(s[0] for s in slots_of(self._nodes[number]) if type(s) is tuple)
        self._fill_all(list(met))

    def _needs(self, node: AnyNode) -> Iterable[Slot]:
        if type(node) in _ALONE:
            return ()
        match node:
            case nodes.Tuple(items=items):
                return items
            case nodes.Set(items=items, frozen=frozen):
                return items if frozen else ()
            case nodes.Range() | nodes.Slice():
                return slots_of(node)
            case nodes.TensorExtras():
                return (node.tensor, node.cls)
            case nodes.Generator():
                return (node.state,)
            case _:
                return self._maker.needs(node)

    def _guard(self, work: Callable[[Any, Any], Any], node: AnyNode, argument: Any) -> Any:
        """Whatever goes wrong with a node, the maker knows whose fault it is."""
        try:
            return work(node, argument)
        except TripwireError:
            raise
        except Exception as error:
            raise self._maker.explain(node, error) from error

    def _build(self, node: AnyNode, number: int) -> object:
        build = _BUILDERS.get(type(node))
        if build is not None:
            return build(node, self.value)
        match node:
            case nodes.Tuple(items=items):
                self._weigh(number, items)
                return tuple(map(self.value, items))
            case nodes.Set(items=items, frozen=True):
                if self._maker.live:
                    self._complete(items)
                self._weigh(number, items)
                self._check_keys(items)
                return frozenset(map(self.value, items))
            case nodes.Set():
                return set()
            case nodes.NamedTuple(items=items):
                self._weigh(number, items)
                return self._maker.make(node, self.value)
            case nodes.TensorExtras() if isinstance(self.value(node.tensor), AbsentView):
                return self.value(node.tensor)
            case _ if type(node) in _FOREIGN:
                return self._build_foreign(node)
        return self._maker.make(node, self.value)

    # --- keys ---

    def _weigh(self, number: int, items: tuple[Slot, ...]) -> None:
        """Hashing a tuple goes through all of it, shared parts again and again."""
        weight = 1 + sum(map(self._weight, items))
        self._weights[number] = min(weight, _MAX_WEIGHT + 1)
        self._depths[number] = 1 + max(map(self._depth, items), default=0)

    def _weight(self, slot: Slot) -> int:
        if type(slot) is not tuple:
            return 1
        node = self._nodes[slot[0]]
        if isinstance(node, nodes.BigInt):
            return 1 + len(node.digits) // 16
        return self._weights.get(slot[0], 1)

    def _depth(self, slot: Slot) -> int:
        return self._depths.get(slot[0], 0) if type(slot) is tuple else 0

    def _check_keys(self, keys: tuple[Slot, ...]) -> None:
        """Refuse keys that were made to take forever: too deep, or many with one hash."""
        self._weighed += sum(map(self._weight, keys))
        if self._weighed > _MAX_WEIGHT or max(map(self._depth, keys), default=0) > _MAX_DEPTH:
            raise ValueError("keys that take too long to hash")
        if self._maker.live:
            return
        hashes = collections.Counter(hash(self.value(key)) for key in keys if type(key) is tuple)
        if sum(count * count for count in hashes.values() if count > 1) > _MAX_COMPARED:
            raise ValueError("keys that collide")

    # --- tensors ---

    def _build_foreign(self, node: AnyNode) -> object:
        try:
            return self._build_torch(node)
        except ImportError:
            if self._maker.live:
                raise
            return AbsentView(node)

    def _build_torch(self, node: AnyNode) -> object:
        if isinstance(node, nodes.Array):
            return _build_array(node, self._blobs)
        from tripwire.recording.format import torchvalues

        match node:
            case nodes.Tensor() | nodes.TensorView():
                self._tensors = self._tensors or torchvalues.TensorBuilder(self._blobs)
                return self._tensors.build(node)
            case nodes.TensorExtras():
                return torchvalues.dress(self.value(node.tensor), self.value(node.cls))
            case nodes.TorchValue():
                return torchvalues.build_torch_value(node)
            case nodes.Generator():
                return torchvalues.build_generator(node.device, self.value(node.state))
        raise ValueError(type(node).__name__)

    # --- filling ---

    def _fill_all(self, reached: list[int]) -> None:
        """Fill shells; what isn't ready is left for later. Hash-based containers come last."""
        ready = [number for number in reached if self._is_ready(number)]
        hashed: list[int] = []
        for number in ready:
            self._filled[number] = 1
            node = self._nodes[number]
            if isinstance(node, (nodes.Set, nodes.Dict)):
                hashed.append(number)
            elif type(node) not in _COMPLETE:
                self._guard(self._fill, node, self._made[number])
        # Keys were met after what they are keys of: what lies deeper is filled first.
        for number in reversed(hashed):
            self._guard(self._fill_hashed, self._nodes[number], self._made[number])
        for number in reversed(ready):
            node = self._nodes[number]
            if isinstance(node, nodes.Object) and type(node.content) is tuple:
                self._guard(self._take, node, self._made[number])

    def _is_ready(self, number: int) -> bool:
        if self._filled[number]:
            return False
        slots = slots_of(self._nodes[number])
        return all(type(s) is not tuple or self._made[s[0]] is not _UNMADE for s in slots)

    def _fill(self, node: AnyNode, made: Any) -> None:
        match node:
            case nodes.List(items=items) | nodes.Deque(items=items):
                made.extend(map(self.value, items))
            case nodes.TensorExtras() if not isinstance(made, AbsentView):
                self._fill_extras(node, made)
            case _:
                self._maker.fill(node, made, self.value)

    def _fill_extras(self, node: nodes.TensorExtras, made: Any) -> None:
        from tripwire.recording.format.torchvalues import attach

        names = zip(node.names, map(self.value, node.values), strict=True)
        attach(made, self.value(node.grad), dict(names))

    def _fill_hashed(self, node: nodes.Set | nodes.Dict, made: Any) -> None:
        if isinstance(node, nodes.Set):
            if not node.frozen:
                self._check_keys(node.items)
                made.update(map(self.value, node.items))
            return
        self._check_keys(node.keys)
        items = zip(map(self.value, node.keys), map(self.value, node.values), strict=True)
        dict.update(made, items) if node.form != "ordered" else made.update(items)
        if node.form == "default":
            made.default_factory = self.value(node.factory)


def _real(digits: str) -> float:
    return cast("float", struct.unpack(">d", bytes.fromhex(digits))[0])


_LARGEST_RANGE = 1 << 14  # bits: its length is found by dividing


def _build_range(node: nodes.Range, value: Value) -> range:
    start, stop, step = map(value, (node.start, node.stop, node.step))
    for number in (start, stop, step):
        if isinstance(number, int) and number.bit_length() > _LARGEST_RANGE:
            raise ValueError("a range of numbers that are too large")
    return range(cast("int", start), cast("int", stop), cast("int", step))


_DICTS: dict[str, Callable[[], dict[object, object]]] = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "default": collections.defaultdict,
    "counter": cast("Callable[[], dict[object, object]]", collections.Counter),
}

# Plain values, and the shells of containers. By type: a table has thousands of these.
_BUILDERS: dict[type, Callable[[Any, Value], object]] = {
    nodes.BigInt: lambda node, _: int(node.digits, 16),
    nodes.Bits: lambda node, _: _real(node.digits),
    nodes.Complex: lambda node, _: complex(_real(node.real), _real(node.imag)),
    nodes.Text: lambda node, _: node.data.decode("utf-8", "surrogatepass"),
    nodes.String: lambda node, _: node.text,
    nodes.Bytes: lambda node, _: bytearray(node.data) if node.mutable else node.data,
    nodes.ConstantNode: lambda node, _: ... if node.name == "Ellipsis" else NotImplemented,
    nodes.Range: _build_range,
    nodes.Slice: lambda node, value: slice(*map(value, (node.start, node.stop, node.step))),
    nodes.List: lambda _, __: [],
    nodes.Deque: lambda node, _: collections.deque(maxlen=node.limit),
    nodes.Dict: lambda node, _: _DICTS[node.form](),
}
# Those of them that need nothing before, and are complete at once.
_ALONE = frozenset(_BUILDERS) - {nodes.Range, nodes.Slice}
_FOREIGN = frozenset(
    {nodes.Tensor, nodes.TensorView, nodes.TensorExtras}
    | {nodes.Array, nodes.TorchValue, nodes.Generator}
)
_COMPLETE = frozenset(_BUILDERS) - {nodes.List, nodes.Deque, nodes.Dict}


def _build_array(node: nodes.Array, blobs: StoredBlobs) -> Any:
    """The array or scalar of a node that was checked."""
    import numpy as np

    dtype = np.dtype(node.dtype)
    flat = np.frombuffer(bytearray(blobs.read(node.blob)), dtype=dtype)
    shaped = flat.reshape(node.shape, order="F" if node.fortran else "C")
    return shaped[()] if node.scalar else shaped
