"""Encode: values become nodes, each object once, by identity.

What a value refers to is queued, not followed at once, so no structure is too deep. Encoding looks
at values only through the package `values`, so no user code runs. What can't be looked at becomes
an Opaque node that says why.
"""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from tripwire.files import ITEM, estimate_memory, estimate_wide
from tripwire.recording.capture.data import (
    PLAIN,
    encode_array,
    encode_instance,
    encode_member,
    encode_text,
    is_member,
    is_utf8,
)
from tripwire.recording.capture.origin import Policy, Treatment
from tripwire.recording.format import nodes
from tripwire.recording.format.manifest import Omission, encode_json
from tripwire.recording.format.nodes import AnyNode, Reference, Slot
from tripwire.recording.format.rows import MOST_MEMORY
from tripwire.values.classes import class_name, is_kind, isinstance, short_name_of

if TYPE_CHECKING:
    from tripwire.recording.capture.classes import SpelledNames
    from tripwire.recording.capture.origin import Blobs


_LONG_TEXT = 64
_INT64 = 1 << 63
# What a reader counts (see files.py), with some to spare: a reference, a node of some fields or
# one that was left out, a module, what a function with its code or a class has beyond a node.
_REFERENCE, _NODE, _MODULE, _CODE = 120, 640, 400, 1200
_LONGEST_INT = 400_000  # in hexadecimal digits


class Draft(Protocol):
    """A node that isn't final until everything has been seen."""

    def grow(self) -> None:
        """Reserve slots for what has become wanted since."""

    def node(self) -> AnyNode:
        """The node, when nothing grows any more."""


CodeEncoder = Callable[["Encoder", object], "AnyNode | Draft | None"]


class Encoder:
    """Turns values into nodes.

    `encode_code` is called first with everything that isn't plain data. It encodes functions,
    classes, modules and what belongs to a library; None means that the value is an instance.
    `names` says which attributes of instances recorded code may take.
    """

    def __init__(
        self, blobs: Blobs, policy: Policy, encode_code: CodeEncoder, names: SpelledNames
    ) -> None:
        self.blobs = blobs
        self.policy = policy
        self.names = names
        self.left_out: list[Omission] = []
        self._encode_code = encode_code
        self._nodes: list[AnyNode | Draft | None] = []
        self._values: list[object] = []  # kept alive: an id must not be used twice
        self._came_from: list[tuple[int, str | int]] = []
        self._numbers: dict[int, int] = {}
        self._queue: collections.deque[int] = collections.deque()
        self._drafts: dict[int, Draft] = {}
        self._texts: dict[str, int] = {}
        self._shared: dict[AnyNode, int] = {}
        self._strictness: dict[int, Treatment] = {}
        self._kept: list[object] = []
        self._at = -1
        self._budget = MOST_MEMORY * 15 // 16

    # --- slots ---

    def slot(self, value: object, step: str | int = "", is_paid: bool = False) -> Slot:
        """A small plain value as itself, anything else as a reference.

        `step` says how the value is reached from the one that is being encoded; `is_paid` that the
        room of the slot was taken by `can_hold`.
        """
        if not is_paid:
            self._budget -= _measure(value)
        return cast("Slot", value) if _is_small(value) else self.reference(value, step, is_paid)

    def slots(self, values: Iterable[object], is_paid: bool = False) -> tuple[Slot, ...]:
        """A slot for each."""
        return tuple(self.slot(value, i, is_paid) for i, value in enumerate(values))

    def reference(self, value: object, step: str | int = "", is_paid: bool = False) -> Reference:
        """The node of a value, reserved if it is new."""
        if type(value) is str:
            return self._text(value, step, is_paid)
        number = self._numbers.get(id(value))
        if number is None:
            number = self._reserve(step, is_paid)
            self._values[number] = value
            self._numbers[id(value)] = number
            self._queue.append(number)
        return (number,)

    def place(self, node: AnyNode | Draft, step: str | int = "") -> Reference:
        """A node that stands for no object of its own."""
        number = self._reserve(step)
        self._put(number, node)
        return (number,)

    def share(self, node: AnyNode) -> Reference:
        """A node that may be used again wherever an equal one is needed."""
        number = self._shared.get(node)
        if number is None:
            number = self._shared[node] = self.place(node)[0]
        return (number,)

    def knows(self, value: object) -> bool:
        """Whether a value has a node of its own."""
        return id(value) in self._numbers

    def _text(self, text: str, step: str | int, is_paid: bool) -> Reference:
        number = self._texts.get(text)
        if number is None:
            number = self._reserve(step, is_paid)
            if self._can_hold_text(text):
                self._put(number, encode_text(text))
            else:
                reason = f"it has {len(text)} characters: more than the record has room for"
                self._put(number, self.leave_out(str, reason, number))
            self._texts[text] = number
        return (number,)

    def _reserve(self, step: str | int, is_paid: bool = False) -> int:
        self._budget -= 0 if is_paid else _NODE
        self._nodes.append(None)
        self._values.append(None)
        self._came_from.append((self._at, step))
        return len(self._nodes) - 1

    def _put(self, number: int, node: AnyNode | Draft) -> None:
        self._nodes[number] = node
        if not isinstance(node, nodes.Node):
            self._drafts[number] = node

    # --- paths and reports ---

    def path(self, number: int | None = None) -> str:
        """How a node was reached first; of the one being encoded if none is given."""
        at = self._at if number is None else number
        steps: list[str] = []
        while at >= 0:
            at, step = self._came_from[at]
            steps.append(f"[{step}]" if isinstance(step, int) else step)
        return "".join(reversed(steps))

    def leave_out(self, cls: type, reason: str, number: int | None = None) -> nodes.Opaque:
        """A placeholder for the value being encoded, and a line in the report."""
        self.left_out.append(Omission(self.path(number) or class_name(cls), reason))
        return nodes.Opaque(class_name(cls), reason)

    def strictness(self, value: object) -> Treatment:
        """How strictly a tensor must be treated at least."""
        return self._strictness.get(id(value), Treatment.FULL)

    def treat_alike(self, value: object, treatment: Treatment) -> None:
        """Treat a tensor at least like that, whatever its own path says."""
        self._strictness[id(value)] = treatment
        self._kept.append(value)

    # --- the work ---

    @property
    def values(self) -> list[object]:
        """Every object that was met so far."""
        return [value for value in self._values if value is not None]

    def advance(self) -> None:
        """Encode everything that is queued, and all that leads to, as it is now."""
        self._drain()
        while True:
            for number, draft in list(self._drafts.items()):
                self._at = number
                draft.grow()
            self._at = -1
            if not self._queue:
                return
            self._drain()

    def finish(self, roots: dict[str, Slot]) -> nodes.Table:
        """The table of everything that was asked for."""
        self.advance()
        self.blobs.settle()
        self.left_out += self.blobs.left_out
        for number, draft in self._drafts.items():
            self._nodes[number] = draft.node()
        return nodes.Table(roots, tuple(cast("list[AnyNode]", self._nodes)))

    def _drain(self) -> None:
        while self._queue:
            number = self._queue.popleft()
            self._at = number
            self._put(number, self._encode(self._values[number]))
        self._at = -1

    def _encode(self, value: object) -> AnyNode | Draft:
        cls = type(value)
        if self._budget < 0:
            return self.leave_out(cls, "the record has no room left")
        try:
            plain = PLAIN.get(id(cls))
            if plain is not None:
                return plain(self, value)
            return self._encode_other(value, cls)
        except Exception as error:
            # Whatever a foreign object does when it is looked at, the record is written.
            return self.leave_out(cls, f"looking at it raised {short_name_of(type(error))}")

    def _encode_other(self, value: object, cls: type) -> AnyNode | Draft:
        torch = sys.modules.get("torch")
        if torch is not None:
            from tripwire.recording.capture.tensors import encode_torch

            found = encode_torch(self, value, cls)
            if found is not None:
                return found
        numpy = sys.modules.get("numpy")
        if numpy is not None and (is_kind(cls, numpy.ndarray) or is_kind(cls, numpy.generic)):
            return encode_array(self, value, cls)
        if is_member(cls):
            return encode_member(self, value, cls)
        code = self._encode_code(self, value)
        return code if code is not None else encode_instance(self, value, cls)

    def can_hold(self, *columns: Sequence[object]) -> bool:
        """Whether a container with these items still fits; if so, their room is taken.

        A dict has keys and values.
        """
        fresh = {
            text_or_id
            for column in columns
            for text_or_id in map(_identify, column)
            if text_or_id is not None
            and text_or_id not in self._numbers
            and text_or_id not in self._texts
        }
        amount = sum(_measure(item) for column in columns for item in column)
        return self._spend(amount + _NODE * len(fresh))

    def can_hold_attributes(self, state: Mapping[str, object]) -> bool:
        """The same for an object with these attributes. The values take theirs with their slots."""
        names = sum(map(_measure_text, state))
        values = sum(_measure(v) if _is_small(v) else _NODE for v in state.values())
        return names + values <= self._budget and self._spend(names)

    def hold_module(self) -> None:
        """Give back what the module that is being encoded doesn't take: it has two fields."""
        self._budget += _NODE - _MODULE

    def hold_attributes(self, names: Iterable[str]) -> None:
        """Take the room of attributes with these names, whatever is left."""
        self._budget -= sum(map(_measure_text, names))

    def hold_code(self, *texts: str) -> None:
        """The same for a function or class with such names and files."""
        self.hold_attributes(texts)
        self._budget -= _CODE

    def can_hold_bytes(self, count: int) -> bool:
        """Whether there is room for so many bytes (base64, twice). If so, it is taken."""
        return self._spend(3 * count)

    def can_hold_int(self, number: int) -> bool:
        """Whether there is room for a large int. If so, it is taken."""
        size = number.bit_length() // 4
        return size < _LONGEST_INT and self._spend(2 * size)

    def _can_hold_text(self, text: str) -> bool:
        """Whether there is room for a long string. If so, it is taken."""
        if len(text) > self._budget:
            return False
        return self._spend(_measure_text(text) if is_utf8(text) else 9 * len(text))

    def _spend(self, amount: int) -> bool:
        """Take so many bytes of a reader's memory, if there are as many left."""
        if amount > self._budget:
            return False
        self._budget -= amount
        return True


def _is_small(value: object) -> bool:
    """Whether a value is written in its slot."""
    kind = type(value)
    if kind is str:
        text = cast("str", value)
        return len(text) <= _LONG_TEXT and is_utf8(text)
    if kind is int:
        return -_INT64 <= cast("int", value) < _INT64
    if kind is float:
        return math.isfinite(cast("float", value))
    return value is None or kind is bool


def _identify(value: object) -> str | int | None:
    """What a node is known by; None for a value that needs none."""
    if _is_small(value):
        return None
    return value if type(value) is str else id(value)


def _measure(value: object) -> int:
    """What a reader takes for a slot."""
    if not _is_small(value):
        return _REFERENCE
    if type(value) is str:
        return _measure_text(value)
    return ITEM + 2 * len(repr(value))


def _measure_text(text: str) -> int:
    """What a reader takes for a string among others."""
    written = encode_json(text)
    return ITEM + estimate_memory(written) + estimate_wide(written)
