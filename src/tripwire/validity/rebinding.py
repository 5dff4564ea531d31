"""Rebinding: a tensor of the same form takes the place of one that an entry holds.

Compiled code is given state as its inputs. So weights that are loaded, merged or swapped need no
new trace, as long as nobody can tell the new tensors from the old ones but by their values: the run
didn't ask which tensor it had, each place that held the old one holds the new one, and tensors that
were two are two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tripwire.reading.effects import Mark, Unmark
from tripwire.reading.kinds import ABSENT, MemoKind
from tripwire.reading.sources import Source
from tripwire.reading.tensors import PLAIN_TENSORS, storage_of
from tripwire.tracing.result import Completion, Trace
from tripwire.validity.kept import Held
from tripwire.validity.wires import DictWire, PulledWire
from tripwire.values.classes import isinstance
from tripwire.values.contents import own_dict
from tripwire.values.sameness import PLAIN
from tripwire.writes.twin import Touch

if TYPE_CHECKING:
    from tripwire.validity.plan import Plan

_ALIGNMENT = 16  # bytes: code for a GPU may trust that a weight begins at a multiple of these
_Places = list[tuple[int, Any]]  # wires on dicts, by position, and the keys there


def may_rebind(trace: Trace, completion: Completion, held: Held) -> bool:
    """Whether a run couldn't tell tensors of its state from others of the same form."""
    effects = completion.effects
    state = set(map(id, held.tensors))
    pairs = zip(completion.tensors, trace.inputs, strict=True)
    return held.are_plain and not (
        trace.reads.tells_tensors_apart
        or any(wanted.written and id(tensor) in state for tensor, wanted in pairs)
        or any(isinstance(holder.kind, MemoKind) for holder in trace.reads.holders)
        or any(isinstance(step, (Mark, Unmark)) for step in effects.steps)
        or any(id(type(key)) not in PLAIN for _, key in effects.written)
    )


class _Form(NamedTuple):
    """What compiled code may go by, beside what a wire compares; and which tensor it is of."""

    keys: str
    is_aligned: bool
    storage: int
    identity: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Form:
        is_aligned = tensor.data_ptr() % _ALIGNMENT == 0
        keys = str(torch._C._dispatch_keys(tensor))
        return _Form(keys, is_aligned, storage_of(tensor), id(tensor))


class Rebinding:
    """Which tensors may take the places of an entry's state."""

    __slots__ = (
        "_forms",
        "_objects",
        "_outside",
        "_owned",
        "_places",
        "_sources",
        "_wires",
        "is_torn",
    )

    def __init__(self, sources: Sequence[Sequence[tuple[Source, bool]]]) -> None:
        self.is_torn = False  # half of it is done; for good, where an exception came in between
        self._sources = sources  # by position in the state: every way to it
        # The rest is found when something is first written: few entries come to that.
        self._places: list[_Places] = []
        self._wires: set[int] = set()  # of all places
        self._objects: list[int] = []  # wires on their forms
        self._owned: list[int | None] = []  # wires on their own attributes
        self._forms: list[_Form] = []
        self._outside: list[Callable[[], object]] = []  # tensors that are watched and not held

    def prepare(self, plan: Plan) -> None:
        """Note where each tensor lies, while all of them are alive."""
        tensors = plan.held.tensors
        if self._places or not tensors:
            return
        positions = {id(tensor): index for index, tensor in enumerate(tensors)}
        objects = {id(wire.value): number for number, wire in enumerate(plan.objects)}
        spaces = {id(wire.space): number for number, wire in enumerate(plan.dicts)}
        self._objects = [objects[id(tensor)] for tensor in tensors]
        self._owned = [spaces.get(id(own_dict(tensor))) for tensor in tensors]
        self._forms = list(map(_Form.of, tensors))
        self._outside = [
            wire.refer
            for wire in plan.objects
            if isinstance(wire.value, torch.Tensor) and id(wire.value) not in positions
        ]
        self._places = self._find_places(plan, positions)
        self._wires = {number for places in self._places for number, _ in places}

    def _find_places(self, plan: Plan, positions: dict[int, int]) -> list[_Places]:
        """Of each tensor; none where there is a way to it that no dict holds."""
        found: list[_Places] = [[] for _ in positions]
        wires: list[DictWire | PulledWire] = [*plan.dicts, *plan.pulled]
        if not all(wire.has_plain_keys for wire in wires):
            return found  # a tensor may be a key, or in one
        for number, wire in enumerate(plan.dicts):
            for key, tensor in wire.list_tensors():
                if id(tensor) in positions:
                    found[positions[id(tensor)]].append((number, key))
        for index, places in enumerate(found):
            spelled = {str(plan.dicts[number].spell(key)) for number, key in places}
            if not spelled.issuperset(str(source) for source, _ in self._sources[index]):
                places.clear()
        for pulled in plan.pulled:
            for tensor in pulled.list_tensors():
                if id(tensor) in positions:
                    found[positions[id(tensor)]].clear()
        return found

    def rebind(self, plan: Plan, touches: Sequence[Touch] | None = None) -> Plan | None:
        """The plan with the tensors that lie in the places of its state now.

        None where it can't have them, or where nothing was replaced. Touches: what was written, if
        that is known. Whoever takes the plan says so: it isn't torn then.
        """
        self.prepare(plan)
        if touches is not None:
            if not any(touch.is_dict and touch.index in self._wires for touch in touches):
                return None
        replaced = self._find_replaced(plan)
        if not replaced or not self._are_alike(plan, replaced):
            return None
        self.is_torn = True
        plan.held.replace(replaced)
        gone = [self._forms[index] for index in replaced]
        for index, tensor in replaced.items():
            plan.objects[self._objects[index]].follow(tensor)
            owned, space = self._owned[index], own_dict(tensor)
            if owned is not None and space is not None:
                plan.dicts[owned].space = space
            self._forms[index] = _Form.of(tensor)
        here = self._forms
        plan.guards.swap_state({one.identity for one in gone}, {one.identity for one in here})
        plan.storages.update((form.storage, 0) for form in here if plan.storages)
        for storage in {form.storage for form in gone} - {form.storage for form in here}:
            plan.storages.pop(storage, None)
        return plan.rearm()

    def _find_replaced(self, plan: Plan) -> dict[int, torch.Tensor] | None:
        """By position; None where one place of a tensor holds another than the next."""
        replaced: dict[int, torch.Tensor] = {}
        for index, places in enumerate(self._places):
            values: list[Any] = [
                dict.get(plan.dicts[number].space, key, ABSENT) for number, key in places
            ]
            if not values or values[0] is plan.held.find(index):
                continue  # what other places hold is compared as ever
            if any(value is not values[0] for value in values):
                return None
            if id(type(values[0])) not in PLAIN_TENSORS:
                return None
            replaced[index] = values[0]
        return replaced

    def _are_alike(self, plan: Plan, replaced: dict[int, torch.Tensor]) -> bool:
        """Whether these are of the old ones' forms, and as different from each other."""
        for index, tensor in replaced.items():
            space, owned = own_dict(tensor), self._owned[index]
            if (space is None) is not (owned is None):
                return False
            if owned is not None and not plan.dicts[owned].fits(space or {}):
                return False
            if _Form.of(tensor)[:2] != self._forms[index][:2]:
                return False
            if not plan.objects[self._objects[index]].fits(tensor):
                return False
        stay = [plan.held.find(i) for i in range(len(self._places)) if i not in replaced]
        if any(tensor is None for tensor in stay):  # one that wasn't replaced has died
            return False
        outside = [refer() for refer in self._outside]
        new = {id(tensor) for tensor in replaced.values()}
        are_two = len(new) == len(replaced) and new.isdisjoint(map(id, stay))
        return are_two and new.isdisjoint(map(id, outside))
