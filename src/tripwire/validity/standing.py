"""Standing: whether an entry may be used. It is in use, retired or gone.

When a sentry says that something may have been written, wires compare. An entry whose wire tripped
is *retired*: it isn't used again unless the value that it was traced with comes back. While retired
it keeps no tensor alive, so what was replaced can die. It is *gone* for good once something that it
read has died, or nobody has a use for it.

A tensor that an entry holds may be replaced by one of the same form, because state is an input of
compiled code. So weights that are loaded, merged or swapped need no new trace, if only their values
differ: the run didn't ask which tensor it had, each place that held the old tensor holds the new
one, and tensors that were two are still two.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tripwire.forks import make_lock
from tripwire.reading.effects import Mark, Unmark
from tripwire.reading.kinds import ABSENT, MemoKind
from tripwire.reading.sources import Source
from tripwire.reading.tensors import PLAIN_TENSORS, storage_of
from tripwire.rulebook.refusals import Cause, Mismatch
from tripwire.telemetry.compiles import RETIRE, current_compile_id
from tripwire.tracing.result import Completion, Trace
from tripwire.validity.kept import Held
from tripwire.validity.table import Admits, admit_nothing
from tripwire.validity.wires import NOBODY, DictWire, PulledWire, Writers
from tripwire.values.classes import isinstance
from tripwire.values.contents import own_dict
from tripwire.values.identity import PLAIN
from tripwire.writes.twin import Touch

if TYPE_CHECKING:
    from tripwire.validity.plan import Plan


Retired = Callable[[tuple[Cause, ...], str | None], None]

_ANYTHING = Touch(False, -1, None)
_MEMORY = (False, -1)  # the cause that no wire knows alone: which tensors share memory


class _Doubt:
    """True while an entry is retired, or while somebody finds out whether it is."""

    __slots__ = ("_causes", "_pending")

    def __init__(
        self, causes: dict[tuple[bool, int], tuple[Cause, ...]], pending: list[Touch]
    ) -> None:
        self._causes = causes
        self._pending = pending

    def __bool__(self) -> bool:
        return any(self.parts)

    @property
    def parts(self) -> tuple[dict[tuple[bool, int], tuple[Cause, ...]], list[Touch]]:
        """Both are empty while there is no doubt."""
        return self._causes, self._pending


def _find_written(plan: Plan, touches: list[Touch]) -> tuple[Cause, ...]:
    """What differs in the dicts whose writers are known."""
    owners = {touch.index: touch for touch in touches if not touch.is_dict}
    found: list[Cause] = []
    for touch in touches:
        wire = plan.dicts[touch.index] if touch.is_dict else None
        owner = None if wire is None or wire.owner is None else owners.get(wire.owner)
        if wire is not None and (touch.writers or (owner is not None and owner.writers)):
            found += wire.find_causes(Writers(touch, owner))
    return tuple(found)


class Standing:
    """The standing of one entry. It exists before the plan, whose guard function asks it."""

    def __init__(self, on_retired: Retired, on_rebound: Callable[[], None] | None = None) -> None:
        me = weakref.ref(self)  # the guard function is the plan's, and that is mine: no cycle

        def settle() -> bool:
            standing = me()
            return standing is not None and standing._settle()

        def on_death(ref: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
            standing = me()
            if standing is not None and not is_finalizing():
                standing._note_death(ref)

        self.settle = settle  # looks at what was touched; whether everything is as it was traced
        self.on_death = on_death
        self.is_gone = False
        self.plan: Plan | None = None
        self.held = Held(())
        self.admits: Admits = admit_nothing
        self._on_retired = on_retired
        self._on_rebound = on_rebound
        self.compile_id = current_compile_id()  # that it belongs to
        self._told = ""
        self._lock = make_lock()  # a death may come while settling
        self._causes: dict[tuple[bool, int], tuple[Cause, ...]] = {}  # by wire
        self._pending: list[Touch] = []  # taken from the sentry, and not yet looked at
        self.trouble = _Doubt(self._causes, self._pending)

    def begin(self, plan: Plan) -> None:
        """Stand for this plan, which is armed."""
        self.plan, self.held, self.admits = plan, plan.held, plan.guards.admits
        if self.is_gone:  # something died while the plan was made
            self.close()

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Why the entry is retired; empty while it is in use."""
        return tuple(chain.from_iterable(self._causes.values()))

    @property
    def is_in_use(self) -> bool:
        """Neither retired nor gone."""
        return not (self.is_gone or self._causes)

    def __str__(self) -> str:
        return "gone" if self.is_gone else "retired" if self._causes else "in use"

    def find_failures(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Cause | Mismatch]:
        """Why the entry isn't for a call; empty where it is gone."""
        if self._causes:
            return list(self.causes)
        return [] if self.plan is None else self.plan.guards.find_failures(args, kwargs)

    def check_suspects(self, suspects: tuple[int, ...]) -> None:
        """Look at what the run itself left changed, and at what was written since."""
        if self.plan is None:  # gone already
            return
        for index in suspects:
            causes = self.plan.dicts[index].find_causes(NOBODY)
            if causes:
                self._causes[True, index] = causes
        if self._causes:  # until the value comes back that the run found
            self._release(self.plan)
        self._settle()

    def look_at_pulled(self) -> None:
        """Tell, once, what differs of the things that no sentry watches."""
        if self.plan is None or self._causes:
            return
        found = (wire.find_causes(NOBODY) for wire in self.plan.pulled)
        causes = tuple(dict.fromkeys(chain.from_iterable(found)))
        told = "\n".join(map(str, causes))
        if causes and told != self._told:
            self._on_retired(causes, self.compile_id)
        self._told = told

    def _settle(self) -> bool:
        with self._lock:
            return self._settle_alone()

    def _settle_alone(self) -> bool:
        plan = self.plan
        if plan is not None and plan.rebinding is not None and plan.rebinding.is_torn:
            self.close()
        plan = self.plan
        if plan is None:
            return False
        retired = bool(self._causes)
        self._pending.append(_ANYTHING)  # other threads wait, and an interrupt loses nothing
        self._pending.extend(plan.sentry.take())
        plan = self._rebind(plan)
        if retired and self.held.has_lost():  # what it was traced with can't come back
            self.close()
            return False
        if plan.sentry.is_spent:  # it names everything each time: for the last time now
            self._pending.extend(plan.sentry.take())
            plan = self.plan = plan.rearm()
        touches = [touch for touch in self._pending if touch is not _ANYTHING]
        owners = {touch.index: touch for touch in touches if not touch.is_dict}
        with RETIRE.of(self.compile_id) if touches else nullcontext():
            for touch in touches:
                self._compare(plan, touch, owners)
            self._compare_memory(plan, touches)
        self._pending.clear()
        if self._causes and not retired:
            self._release(plan)
            self._on_retired(self.causes, self.compile_id)
        elif retired and not self._causes:
            if not self.held.restore():
                self.close()
        return not self._causes and not self.is_gone

    def _release(self, plan: Plan) -> None:
        """Let state die while this is retired: where it lay is known, and others may come there."""
        if plan.rebinding is not None:
            plan.rebinding.prepare(plan)
        self.held.release()

    def _rebind(self, plan: Plan) -> Plan:
        """The plan, with tensors that took the places of others."""
        rebinding = plan.rebinding
        if rebinding is None:
            return plan
        alive = []  # a sentry that something died of would name everything
        while True:
            touches = [touch for touch in self._pending if touch is not _ANYTHING]
            alive.append(self.held.tensors)
            with RETIRE.of(self.compile_id) if touches else nullcontext():
                rebound = rebinding.rebind(plan, None if self.held.has_lost() else touches)
            if rebound is None:
                return plan
            self._pending.extend(plan.sentry.take())  # what was written meanwhile
            plan = self.plan = rebound
            rebinding.is_torn = False
            if self._on_rebound is not None:
                self._on_rebound()

    def _compare(self, plan: Plan, touch: Touch, owners: dict[int, Touch]) -> None:
        """Whether what was touched is as it was."""
        if touch.is_dict:
            wire = plan.dicts[touch.index]
            owner = None if wire.owner is None else owners.get(wire.owner)
            causes = wire.find_causes(Writers(touch, owner))
        else:
            cause = plan.objects[touch.index].find_cause(Writers(touch))
            causes = () if cause is None else (cause,)
        key = (touch.is_dict, touch.index)
        if not causes:
            self._causes.pop(key, None)
        elif key not in self._causes:
            self._causes[key] = causes

    def _compare_memory(self, plan: Plan, touches: list[Touch]) -> None:
        """Whether those tensors of state share memory that did, if some were touched."""
        if plan.memory is None:
            return
        objects = ((plan.objects[touch.index], touch) for touch in touches if not touch.is_dict)
        moved = [(o, touch) for o, touch in objects if isinstance(o.value, torch.Tensor)]
        if not moved:
            return
        if plan.memory.is_same():
            self._causes.pop(_MEMORY, None)
        elif _MEMORY not in self._causes:
            wire, touch = moved[0]
            self._causes[_MEMORY] = (wire.moved(Writers(touch)),)

    def retire(self, cause: Cause) -> None:
        """For good, and for a reason that no wire knows."""
        self.close()
        self._on_retired((cause,), self.compile_id)

    def _note_death(self, ref: object) -> None:
        """Something that was read has died, and the entry is gone with it.

        Only dicts that somebody is known to have written are looked at: what else is there may be
        half taken apart.
        """
        plan = self.plan
        retired = bool(self._causes)
        written = () if plan is None or retired else _find_written(plan, plan.sentry.take())
        self.close()
        if plan is None or retired:
            return
        for wire in plan.objects:
            if wire.is_about(ref):
                gone = wire.gone()
                is_told = any(str(cause.source) == str(gone.source) for cause in written)
                causes = written if is_told else (gone, *written)
                self._on_retired(causes, self.compile_id)
                break

    def close(self) -> None:
        """Release everything: this is never used again. It may happen during a call."""
        with self._lock:
            self.is_gone = True
            self.held.drop()
            plan, self.plan = self.plan, None
            self.admits = admit_nothing
            if plan is not None:
                plan.sentry.close()


# --- rebinding: a tensor of the same form takes another's place ---


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


class _TensorForm(NamedTuple):
    """What compiled code may depend on besides what a wire compares; and of which tensor."""

    keys: str
    is_aligned: bool
    identity: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _TensorForm:
        storage = storage_of(tensor)  # a sparse tensor has none, and no address
        is_aligned = storage != -1 and tensor.data_ptr() % _ALIGNMENT == 0
        keys = str(torch._C._dispatch_keys(tensor))
        return _TensorForm(keys, is_aligned, id(tensor))


class Rebinding:
    """Which tensors may replace an entry's state."""

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
        self._forms: list[_TensorForm] = []
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
        self._forms = list(map(_TensorForm.of, tensors))
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
            self._forms[index] = _TensorForm.of(tensor)
        here = self._forms
        plan.guards.swap_state({one.identity for one in gone}, {one.identity for one in here})
        if plan.memory is not None:
            plan.memory.is_same()  # to know where they lie; no state is written in this run
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
            if _TensorForm.of(tensor)[:2] != self._forms[index][:2]:
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
