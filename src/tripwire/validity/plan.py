"""Plan: the conditions under which a trace holds: guards on a call, wires on everything else."""

from __future__ import annotations

import builtins
import functools
import gc
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from tripwire.reading.effects import Carried
from tripwire.reading.holders import PLACES, Holder
from tripwire.reading.kinds import (
    ABSENT,
    ARRAY,
    CODE,
    ELEMENTS,
    MEMBERS,
    MEMO,
    ORDER,
    NamesKind,
    plain_key,
)
from tripwire.reading.reader import HOOK_TABLES
from tripwire.reading.sources import Attr, Global, Item, Source
from tripwire.reading.tensors import meta_of, traits_of
from tripwire.rulebook.refusals import FAILS, Refused
from tripwire.telemetry.compiles import ARM, PLAN
from tripwire.tracing.modes import Contexts, contexts_of
from tripwire.tracing.result import Completion, Trace
from tripwire.validity.admission import Admission, are_held
from tripwire.validity.kept import Alike, ArrayPlace, Held, Keeper, Memory, content_of, refer
from tripwire.validity.probes import Probe, build_probe, choose
from tripwire.validity.standing import Rebinding, may_rebind
from tripwire.validity.table import Check, Guards
from tripwire.validity.ways import Ways, find_done, lay_crossings
from tripwire.validity.wires import DictWire, ObjectWire, PulledWire
from tripwire.values.classes import isinstance
from tripwire.values.contents import own_dict
from tripwire.values.identity import is_plain_array
from tripwire.writes.sentry import Sentry

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow
    from tripwire.validity.standing import Standing

# Hooks on all modules, all that they register, and all optimizers; by the package that runs them.
_GLOBAL_HOOKS = {
    "torch.nn": (
        "torch.nn.modules.module",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_parameter_registration_hooks",
        "_global_buffer_registration_hooks",
        "_global_module_registration_hooks",
    ),
    "torch.optim": (
        "torch.optim.optimizer",
        "_global_optimizer_pre_hooks",
        "_global_optimizer_post_hooks",
    ),
}


class Plan(Struct, frozen=True):
    """Guards and wires of one entry."""

    guards: Guards
    dicts: tuple[DictWire, ...]
    objects: tuple[ObjectWire, ...]
    sentry: Sentry
    pulled: tuple[PulledWire, ...]
    probe: Probe | None
    ways: Ways | None
    held: Held  # the graph's inputs that are state
    suspects: tuple[int, ...]  # dicts that the run itself left changed
    fetched: tuple[int, ...]  # positions of the others, which the guard function returns
    contexts: Contexts | None  # as they are for every call that is admitted, where it enters some
    memory: Memory | None  # of state, where the run changes tensors in place
    rebinding: Rebinding | None  # what may take the places of state; None: nothing

    def wires(self) -> list[tuple[Source, str]]:
        """Everything of the world that is compared: sources, and what was seen."""
        wires: list[DictWire | ObjectWire | PulledWire] = [*self.dicts, *self.objects, *self.pulled]
        return [row for wire in wires for row in wire.rows()]

    def rearm(self) -> Plan:
        """The same with a sentry that watches from now on; unless something is gone."""
        objects = [wire.value for wire in self.objects]
        if any(value is None for value in objects):
            return self
        sentry = Sentry([(wire.space, wire.keys) for wire in self.dicts], objects)
        self.guards.ask(sentry.is_quiet)
        return replace(self, sentry=sentry)


OPEN_SIZES = "open sizes"  # what conditions about them are called


def admit_open(plan: Plan, shadow: Shadow, standing: Standing) -> None:
    """Admit what is open under the conditions of the run, and of the compiler that ran since."""
    checks = [
        Check(OPEN_SIZES, condition, told, repr(FAILS))
        for condition, told in shadow.tell_conditions(shadow.find_conditions())
    ]
    standing.begin(replace(plan, guards=plan.guards.and_also(checks)))


def build_plan(
    trace: Trace,
    torch_state: tuple[object, ...],
    standing: Standing,
    *,
    rebinds: bool = False,
    crosses: bool = False,
    whole: bool = False,
) -> Plan:
    """What must hold for a complete trace, under watch from now on. Its entry stands by it.

    rebinds: the compiled code takes other tensors of the same form for state.
    crosses: values may be compared in the middle of a call, which then turns back.
    whole: they may not be, and computing them before it may cost more.
    """
    completion = trace.completion
    assert completion is not None
    collects = gc.isenabled()
    try:
        gc.disable()  # arming makes thousands of objects that stay: it would look at them in vain
        with PLAN:
            planner = _PlanBuilder(trace, completion)
            held, fetched = planner.find_inputs()
            keeper = planner.find_keeper()
            dicts, objects, watched = planner.find_wires(held, keeper, standing.on_death)
        with ARM:
            sentry = Sentry([(wire.space, wire.keys) for wire in dicts], watched)
        with PLAN:
            planner.check_alone()
            pulled = tuple(planner.pulled)
            admission = Admission(
                *(trace, completion, planner.forms, torch_state, pulled, held, planner.alike),
                planner.exchanged,
            )
            guards = admission.write(sentry, standing)
            probe, ways = _decide(trace, crosses, whole)
            plan = Plan(
                guards=guards,
                dicts=tuple(dicts),
                objects=tuple(objects),
                sentry=sentry,
                pulled=pulled,
                probe=probe,
                ways=ways,
                held=held,
                suspects=tuple(i for i, wire in enumerate(dicts) if wire.was_changed),
                fetched=fetched,
                contexts=contexts_of(trace.torch_state) if trace.has_contexts else None,
                memory=admission.memory,
                rebinding=planner.find_rebinding(held, admission) if rebinds else None,
            )
            standing.begin(plan)
            del planner, admission, watched  # in here: they take time to die
            if collects:
                gc.enable()  # a collection may be due
            return plan
    finally:
        if collects:
            gc.enable()


def _decide(trace: Trace, crosses: bool, whole: bool) -> tuple[Probe | None, Ways | None]:
    """What of the values that Python used is computed before a call, and compared on its way."""
    if not trace.branches:
        return None, None
    choice = choose(trace, crosses=crosses, whole=whole)
    if not choice.crossed:
        return build_probe(trace, choice), None
    done = find_done(trace, choice.list_places())
    if isinstance(done, str):
        return build_probe(trace, choose(trace, crosses=False, hindrance=done)), None
    probe = build_probe(trace, choice)  # of the graph as it was recorded
    return probe, lay_crossings(trace, choice.list_places(), done)


class _PlanBuilder:
    def __init__(self, trace: Trace, completion: Completion) -> None:
        self.trace = trace
        self.reads = trace.reads
        self.completion = completion
        self.reach = completion.reach
        self.before: dict[int, dict[Any, object]] = {}  # what the run read, and changed
        for volatile in completion.effects.volatile:
            found = self.before.setdefault(volatile.holder, {})
            if volatile.key is ABSENT:  # a list as a whole
                before: Any = volatile.before
                after: Any = volatile.after
                found |= dict.fromkeys(range(len(after)), ABSENT) | dict(enumerate(before))
            else:
                found[volatile.key] = volatile.before
        self.written: dict[int, set[Any]] = {}
        for holder, key in completion.effects.written:
            if key not in self.before.get(holder, ()):
                self.written.setdefault(holder, set()).add(key)
        for one, key in self.reach.holders.planted:
            if one.anchored and key not in self.before.get(id(one), ()):
                self.written.setdefault(id(one), set()).add(key)
        self.exchanged = self._find_exchanged()
        for one, key, _ in self.exchanged:
            self.written.setdefault(id(one), set()).add(key)
        self.facts = [(wanted.meta, wanted.traits) for wanted in trace.inputs]
        # By tensor: what the run found, whatever it made of it.
        self.forms = dict(zip(map(id, completion.tensors), self.facts, strict=True))
        self.pulled: list[PulledWire] = []
        # Containers in whose place equal ones may come, by place.
        self.alike: dict[int, tuple[Alike, ...]] = {}

    def _find_exchanged(self) -> list[tuple[Holder, Any, object]]:
        """Places of the world that are written from call to call, and what the run found there."""
        found: list[tuple[Holder, Any, object]] = []
        carried = {str(c.source) for c in self.completion.effects.carried}
        for holder, key, value in self.reach.exchanged_met:
            path = str(holder.step(key))
            if path in carried:
                continue
            is_written = (id(holder), key) in self.completion.effects.written
            if is_written and isinstance(value, torch.Tensor):
                raise Refused("volatile-source", f"both this call and other code replace {path}.")
            found.append((holder, key, value))
        return found

    def find_inputs(self) -> tuple[Held, tuple[int, ...]]:
        """Which inputs of the graph are state, and which come with each call."""
        carried = {str(c.source): c for c in self.completion.effects.carried}
        state, fetched = [], []
        pairs = zip(self.completion.tensors, self.completion.sources, strict=True)
        for index, (tensor, sources) in enumerate(pairs):
            by_path = not are_held(sources)
            is_carried = bool(carried) and any(str(source) in carried for source, _ in sources)
            if is_carried and len(sources) > 1 and not _are_one_place(sources, carried):
                raise Refused(
                    "volatile-source",
                    f"the run replaces {sources[0][0]}, which was the same tensor as "
                    f"{sources[1][0]}. Keep two separate tensors.",
                )
            if by_path or is_carried:
                fetched.append(index)
            elif tensor is None:
                raise Refused("volatile-source", f"{sources[0][0]} no longer exists after the run.")
            else:
                if (meta_of(tensor), traits_of(tensor)) != self.facts[index]:
                    raise Refused(
                        "tensor-reshaped",
                        f"the run changes the shape or requires_grad of {sources[0][0]} in "
                        "place, so compiled code would not fit the next call. Do it before the "
                        "first call.",
                    )
                state.append(tensor)
        count = len(self.trace.numbers)
        return Held(tuple(state)), (*range(count), *(count + index for index in fetched))

    def find_rebinding(self, held: Held, admission: Admission) -> Rebinding | None:
        """What may take the places of state."""
        if admission.shares_memory or not may_rebind(self.trace, self.completion, held):
            return None
        pairs = zip(self.completion.tensors, self.completion.sources, strict=True)
        sources = {id(tensor): found for tensor, found in pairs}
        return Rebinding([sources[id(tensor)] for tensor in held.tensors])

    # --- wires ---

    def find_wires(
        self, held: Held, keeper: Keeper, on_death: Callable[[object], None]
    ) -> tuple[list[DictWire], list[ObjectWire], list[object]]:
        """Wires on everything anchored that was read."""
        spaces: dict[int, _Space] = {}
        for holder in self.reads.holders:
            if holder.anchored and holder.kind is not CODE:
                self._watch_holder(spaces, holder, keeper)
        self._watch_tables(spaces)
        self._watch_torch(spaces)
        self._watch_environment(spaces)
        self._watch_orders(spaces)
        objects = self._find_objects()
        self._watch_tensors(spaces, objects)
        labels = self.reads.labels
        wires = [
            ObjectWire(
                value,
                path,
                held,
                None if self._is_idle(value) else on_death,
                () if self._is_idle(value) else self.forms.get(id(value)),
                labels,
            )
            for value, path in objects
        ]
        positions = {id(value): index for index, (value, _) in enumerate(objects)}
        dicts = []
        for found in spaces.values():
            ignored = frozenset(found.ignored)
            wire = DictWire(
                found.space,
                found.wanted,
                found.step,
                ignored,
                held,
                found.before,
                found.order,
                keeper,
            )
            wire.owner = positions.get(found.owner)
            dicts.append(wire)
        return dicts, wires, [value for value, _ in objects]

    def find_keeper(self) -> Keeper:
        """What values are compared with: an equal list will do if its identity isn't read."""
        arrays = self._find_arrays()
        if self.reads.compares_identity:
            return Keeper(tells_numbers=self.reads.asks_which_number, arrays=arrays)
        constants = (constant.value for constant in self.trace.constants)
        itself = (*self.reach.aliases, *constants)
        named = {*self.completion.handed_out, *self.reach.fresh, *map(id, itself)}
        self.alike = self._find_alike(named)
        return Keeper(self.alike, lambda value: id(value) in named, arrays=arrays)

    def _find_arrays(self) -> dict[int, ArrayPlace]:
        """Where the arrays lie that the run read; NumPy's own class alone, by identity."""
        found = {
            id(holder.owner): holder
            for holder in self.reads.holders
            if holder.kind is ARRAY and holder.anchored and is_plain_array(holder.owner)
        }
        places: dict[int, ArrayPlace] = {}
        for holder in self.reads.holders if found else ():
            if holder.anchored and isinstance(holder.kind, PLACES):
                for key, kept in zip(holder.keys, holder.kept, strict=True):
                    array = found.get(id(kept))
                    if array is not None and str(holder.step(key)) == str(array.path):
                        place = ArrayPlace(refer(holder.owner), holder.kind, key, kept)
                        if place() is kept:  # the run hasn't put another one there
                            places[id(kept)] = place
        return places

    def _find_alike(self, named: set[int]) -> dict[int, tuple[Alike, ...]]:
        """Lists and sets of plain values that the run only reads, once for each place."""
        changed = self.written.keys() | self.before.keys()
        holders = [
            h
            for h in self.reads.holders
            if h.anchored and (h.kind is ELEMENTS or h.kind is MEMBERS)
        ]
        found: dict[int, object] = {}
        for holder in holders:
            owner = holder.owner
            is_whole = self.reads.filter_of(holder) is None
            if not (id(holder) in changed or id(owner) in named) and is_whole:
                found[id(owner)] = content_of(owner)
        owners = {id(holder.owner): holder.owner for holder in holders}
        others = frozenset(key for key in owners if found.get(key, ABSENT) is ABSENT)
        return {
            key: tuple(
                Alike(owners[key], content, others) for _ in set(self.reach.paths.get(key, ()))
            )
            for key, content in found.items()
            if content is not ABSENT
        }

    def _watch_holder(self, spaces: dict[int, _Space], holder: Holder, keeper: Keeper) -> None:
        """What was read of something that holds values: as a dict, or compared on each call."""
        wanted = self.reads.filter_of(holder)
        ignored = frozenset(self.written.get(id(holder), ()))
        before = self.before.get(id(holder), {})
        if id(holder.owner) in self.completion.unneeded:
            return
        if holder.kind is MEMBERS and ignored and not before:
            return  # only added to, and every call adds
        if wanted is not None and ignored.issuperset(wanted):
            return
        space = holder.kind.dict_of(holder.owner)
        step = functools.partial(holder.kind.step, holder.path)
        if wanted is None and not ignored and not before:
            wanted = self.reads.find_places(holder.owner)
        if holder.kind is MEMO and not (before or ignored) and MEMO.only_grows(holder.owner):
            wanted = frozenset(holder.keys)  # the answers were there: others may join them
        if space is None:
            self.pulled += [
                PulledWire(way, holder.kind, step, wanted, ignored, before, keeper)
                for way in keeper.find_ways(holder.owner)
            ]
        else:
            _join(spaces, space, wanted, step, frozenset(map(plain_key, ignored)))
            spaces[id(space)].before |= {plain_key(key): value for key, value in before.items()}
            spaces[id(space)].owner = id(holder.owner)
            if wanted is None and ignored and not isinstance(space, OrderedDict):
                spaces[id(space)].order = holder.order()
        if holder.path is None and isinstance(holder.kind, NamesKind):  # globals of a function
            self._watch_builtins(spaces, holder)

    def _find_objects(self) -> list[tuple[object, Source]]:
        """Objects whose class may have been read, functions, and classes whose bases were."""
        objects: list[tuple[object, Source]] = [
            (item, path)
            for item, path, anchored in (*self.reach.modules, *self.reach.objects)
            if anchored
        ]
        return [*objects, *self.reach.functions, *self.reach.classes]

    def _is_idle(self, value: object) -> bool:
        """Whether it is a function of which only texts and attributes may have been read."""
        return isinstance(value, FunctionType) and not self.reads.is_looked_into(value)

    def _watch_tensors(
        self, spaces: dict[int, _Space], objects: list[tuple[object, Source]]
    ) -> None:
        carried = {str(c.source) for c in self.completion.effects.carried}
        for tensor, sources in zip(self.completion.tensors, self.completion.sources, strict=True):
            anchored = [source for source, is_anchored in sources if is_anchored]
            if tensor is not None and anchored and str(anchored[0]) not in carried:
                self._watch_tensor(spaces, objects, tensor, anchored[0])
        for tensor, path in self.completion.asked:
            self._watch_tensor(spaces, objects, tensor, path)

    def _watch_tensor(
        self,
        spaces: dict[int, _Space],
        objects: list[tuple[object, Source]],
        tensor: torch.Tensor,
        path: Source,
    ) -> None:
        """A tensor's form, and what attributes it has."""
        objects.append((tensor, path))
        own = own_dict(tensor)
        if own is not None:
            names = None if self.reads.is_dynamic else self.reads.names
            _join(spaces, own, names, functools.partial(Attr, path), frozenset())

    def _watch_builtins(self, spaces: dict[int, _Space], holder: Holder) -> None:
        """A name that isn't in the module was looked for in builtins."""
        kind = holder.kind
        assert isinstance(kind, NamesKind)
        missing = frozenset(kind.names).difference(holder.keys)
        if missing and kind.module != "sys.modules":
            step = functools.partial(Global, "builtins")
            _join(spaces, vars(builtins), missing, step, frozenset())

    def _watch_tables(self, spaces: dict[int, _Space]) -> None:
        for module, tables, path, anchored in self.reach.empty_tables:
            held: Any = own_dict(module) or {}
            for table in tables if anchored else ():
                space = held.get(table)
                if space is not None:
                    self._watch_table(spaces, module, table, space, path)
        for package, (home, *names) in _GLOBAL_HOOKS.items():
            if any(f"{one}.".startswith(f"{package}.") for one in self.reach.homes):
                for name in names:
                    step = functools.partial(Item, Global(home, name))
                    _join(spaces, getattr(sys.modules[home], name), None, step, frozenset())
        future = functools.partial(Global, "torch.__future__")  # what `module.to` asks
        _join(spaces, vars(torch.__future__), None, future, frozenset())

    def _watch_table(
        self,
        spaces: dict[int, _Space],
        module: torch.nn.Module,
        table: str,
        space: dict[Any, Any],
        path: Source,
    ) -> None:
        step: Callable[[Any], Source]
        if table in HOOK_TABLES:
            if not self.reads.is_table_read(module, table):
                return
            names, step = None, functools.partial(Item, Attr(path, table))
        else:
            names, step = self.reads.filter_of_table(module, table), functools.partial(Attr, path)
        if names is None or names:
            _join(spaces, space, names, step, frozenset())
            spaces[id(space)].owner = id(module)

    def _watch_torch(self, spaces: dict[int, _Space]) -> None:
        """Functions of torch's that somebody may replace, under the names that were used."""
        for module in (torch, torch.nn.functional):
            names = frozenset(vars(module).keys() & self.reads.names)
            step = functools.partial(Global, module.__name__)
            _join(spaces, vars(module), names, step, frozenset())

    def _watch_environment(self, spaces: dict[int, _Space]) -> None:
        keys = self.completion.environment
        if keys != frozenset():
            step = functools.partial(Item, Global("os", "environ"))
            encoded = None if keys is None else frozenset(map(os.environ.encodekey, keys))
            _join(spaces, os.environ._data, encoded, step, frozenset())  # type: ignore[attr-defined]

    def _watch_orders(self, spaces: dict[int, _Space]) -> None:
        """An OrderedDict that was read whole changes its order without a write to any item."""
        for found in spaces.values():
            space = found.space
            if found.wanted is None and isinstance(space, OrderedDict) and len(space) > 1:
                self.pulled.append(
                    PulledWire(refer(space), ORDER, found.step, None, frozenset(), {})
                )

    def check_alone(self) -> None:
        """Refuse where another thread wrote since the run began. From now on the sentry sees it."""
        holders = self.reach.holders
        if holders.is_alone():
            return
        holders.check_unwritten(holders.find_writes())
        filled = self.reach.find_filled()
        if filled is not None:
            raise Refused(
                "another-thread",
                f"something was put into {filled} after the run, perhaps by another thread.",
            )


def _are_one_place(sources: tuple[tuple[Source, bool], ...], carried: dict[str, Carried]) -> bool:
    """Whether all paths to a tensor that the run replaces end in one place: a shared cell."""
    found = [carried.get(str(source)) for source, _ in sources]
    return len({None if one is None else one.spot for one in found}) == 1


class _Space(Struct):
    space: dict[Any, Any]
    wanted: frozenset[Any] | None
    step: Callable[[Any], Source]
    ignored: set[Any]
    before: dict[Any, object]
    order: tuple[Any, ...] | None = None  # of all keys before the run, where it writes some
    owner: int = 0  # identity of the object that has this dict


def _join(
    spaces: dict[int, _Space],
    space: dict[Any, Any],
    wanted: frozenset[Any] | None,
    step: Callable[[Any], Source],
    ignored: frozenset[Any],
) -> None:
    """One wire per dict, for all that was read of it."""
    found = spaces.get(id(space))
    if found is None:
        spaces[id(space)] = _Space(space, wanted, step, set(ignored), {})
        return
    found.ignored |= ignored
    if found.wanted is not None:
        found.wanted = None if wanted is None else found.wanted | wanted
