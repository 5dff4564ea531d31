"""Plan: what one trace needs to be right again, as guards on a call and wires on the world."""

from __future__ import annotations

import abc
import builtins
import functools
import gc
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules import module as module_globals

from tripwire.callables import isinstance
from tripwire.phases import ARM, PLAN
from tripwire.tracing.effects import Carried, Counted
from tripwire.tracing.holders import (
    ABSENT,
    ORDER,
    Array,
    Code,
    Elements,
    Holder,
    Items,
    Members,
    Names,
)
from tripwire.tracing.reader import HOOK_TABLES
from tripwire.tracing.refusals import Refused
from tripwire.tracing.result import Completion, Trace
from tripwire.tracing.sources import Attr, Global, Item, Referent, Source
from tripwire.tracing.structure import own_dict
from tripwire.tracing.torchstate import (
    QUICK_FIELDS,
    Contexts,
    is_transformed,
    sample_autocast,
    sample_contexts,
    sample_quickly,
    spell_quickly,
)
from tripwire.tracing.values import TensorMeta, Traits, meta_of, storage_of, traits_of
from tripwire.validity.guards import Guards, GuardWriter
from tripwire.validity.probes import Probe, build_probe, can_repeat
from tripwire.validity.sentry import Hidden, Sentry
from tripwire.validity.wires import NOBODY, DictWire, Held, Kept, ObjectWire, PulledWire

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


# Kinds of things that hold values, beside those with attributes.
_MUTABLE = (Items, Elements, Members, Array)
_OF_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad_fn"})


@dataclass(frozen=True, slots=True)
class Plan:
    """Guards and wires of one entry."""

    guards: Guards
    dicts: tuple[DictWire, ...]
    objects: tuple[ObjectWire, ...]
    sentry: Sentry
    pulled: tuple[PulledWire, ...]
    probe: Probe | None
    held: Held  # the graph's inputs that are state
    suspects: tuple[int, ...]  # dicts that the run itself left changed
    fetched: tuple[int, ...]  # positions of the others, which the guard function returns
    contexts: Contexts | None  # as they are for every call that is admitted, where it enters some

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


def build_plan(
    trace: Trace,
    torch_state: tuple[object, ...],
    settle: Callable[[], bool],
    causes: object,
    on_death: Callable[[object], None],
) -> Plan:
    """What must hold for a complete trace. See Entry for `settle`, `causes` and `on_death`."""
    completion = trace.completion
    assert completion is not None
    collects = gc.isenabled()
    try:
        gc.disable()  # arming makes thousands of objects that stay: it would look at them in vain
        with PLAN:
            planner = _Planner(trace, completion)
            held, fetched = planner.find_inputs()
            dicts, objects, watched = planner.find_wires(held, on_death)
        with ARM:
            sentry = Sentry([(wire.space, wire.keys) for wire in dicts], watched)
        with PLAN:
            planner.check_alone()
            guards = planner.write_guards(sentry, settle, causes, torch_state, held)
            suspects = tuple(i for i, wire in enumerate(dicts) if wire.was_changed)
            pulled = tuple(planner.pulled)
            probe = build_probe(trace)
            contexts = sample_contexts() if trace.has_contexts else None
            del planner, watched  # in here: both take time to die, and a collection may be due
            if collects:
                gc.enable()
            return Plan(
                guards,
                tuple(dicts),
                tuple(objects),
                sentry,
                pulled,
                probe,
                held,
                suspects,
                fetched,
                contexts,
            )
    finally:
        if collects:
            gc.enable()


class _Planner:
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
        self.facts = [(wanted.meta, wanted.traits) for wanted in trace.inputs]
        # By tensor: what the run found, whatever it made of it.
        self.forms = dict(zip(map(id, completion.tensors), self.facts, strict=True))
        self.pulled: list[PulledWire] = []
        self._carried_variables: dict[str, str] = {}

    def find_inputs(self) -> tuple[Held, tuple[int, ...]]:
        """Which inputs of the graph are state, and which come with each call."""
        carried = {str(c.source): c for c in self.completion.effects.carried}
        state, fetched = [], []
        pairs = zip(self.completion.tensors, self.completion.sources, strict=True)
        for index, (tensor, sources) in enumerate(pairs):
            by_path = not _are_held(sources)
            is_carried = bool(carried) and any(str(source) in carried for source, _ in sources)
            if is_carried and len(sources) > 1 and not _are_one_place(sources, carried):
                raise Refused(
                    "volatile-source",
                    f"{sources[0][0]} is replaced by the run, and {sources[1][0]} was the same "
                    "tensor.",
                )
            if by_path or is_carried:
                fetched.append(index)
            elif tensor is None:
                raise Refused("volatile-source", f"{sources[0][0]} is gone after the run.")
            else:
                if (meta_of(tensor), traits_of(tensor)) != self.facts[index]:
                    raise Refused(
                        "tensor-reshaped",
                        f"the run changes the form of {sources[0][0]} in place: its shape, or "
                        "whether it wants a gradient. The next call finds another tensor.",
                    )
                state.append(tensor)
        return Held(tuple(state)), tuple(fetched)

    # --- wires ---

    def find_wires(
        self, held: Held, on_death: Callable[[object], None]
    ) -> tuple[list[DictWire], list[ObjectWire], list[object]]:
        """Wires on everything anchored that was read."""
        spaces: dict[int, _Space] = {}
        for holder in self.reads.holders:
            if not holder.anchored or isinstance(holder.kind, Code):
                continue
            wanted = self.reads.filter_of(holder)
            if isinstance(holder.kind, Members) and id(holder) in self.written:
                if not self.before.get(id(holder)):
                    continue  # only added to, and every call adds
            ignored = frozenset(self.written.get(id(holder), ()))
            before = self.before.get(id(holder), {})
            if wanted is not None and not (wanted - ignored):
                continue
            space = holder.kind.dict_of(holder.owner)
            step = functools.partial(holder.kind.step, holder.path)
            if space is None:
                self.pulled.append(
                    PulledWire(holder.owner, holder.kind, step, wanted, ignored, before)
                )
            else:
                _join(spaces, space, wanted, step, ignored)
                spaces[id(space)].before |= before
                spaces[id(space)].owner = id(holder.owner)
                if wanted is None and ignored and not isinstance(space, OrderedDict):
                    spaces[id(space)].order = holder.order()
            if isinstance(holder.kind, Names) and holder.kind.module is not None:
                self._watch_builtins(spaces, holder)
        self._watch_tables(spaces)
        self._watch_torch(spaces)
        self._watch_environment(spaces)
        self._watch_orders(spaces)
        objects: list[tuple[object, Source]] = [
            (item, path)
            for item, path, anchored in (*self.reach.modules, *self.reach.objects)
            if anchored
        ]
        labels = self.reads.labels
        objects += [
            (f, path) for f, path in self.reach.functions if labels or self.reads.is_executed(f)
        ]
        objects += self.reach.classes
        carried = {str(c.source) for c in self.completion.effects.carried}
        for tensor, sources in zip(self.completion.tensors, self.completion.sources, strict=True):
            anchored = [source for source, is_anchored in sources if is_anchored]
            if tensor is not None and anchored and str(anchored[0]) not in carried:
                self._watch_tensor(spaces, objects, tensor, anchored[0])
        for tensor, path in self.completion.asked:
            self._watch_tensor(spaces, objects, tensor, path)
        forms = self.forms
        wires = [
            ObjectWire(value, path, held, on_death, forms.get(id(value)), labels)
            for value, path in objects
        ]
        dicts = [
            DictWire(
                found.space,
                found.wanted,
                found.step,
                frozenset(found.ignored),
                held,
                found.before,
                found.order,
            )
            for found in spaces.values()
        ]
        positions = {id(value): index for index, (value, _) in enumerate(objects)}
        for wire, found in zip(dicts, spaces.values(), strict=True):
            wire.owner = positions.get(found.owner)
        return dicts, wires, [value for value, _ in objects]

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
        assert isinstance(kind, Names)
        missing = kind.names - frozenset(holder.keys)
        if missing and kind.module != "sys.modules":
            step = functools.partial(Global, "builtins")
            _join(spaces, vars(builtins), missing, step, frozenset())

    def _watch_tables(self, spaces: dict[int, _Space]) -> None:
        for module, table, path, anchored in self.reach.empty_tables:
            space: Any = (own_dict(module) or {}).get(table)
            if not anchored or space is None:
                continue
            names: frozenset[str] | None
            step: Callable[[Any], Source]
            if table in HOOK_TABLES:
                names = None if self.reads.is_table_read(module, table) else frozenset()
                step = functools.partial(Item, Attr(path, table))
            else:
                names = self.reads.filter_of_table(module, table)
                step = functools.partial(Attr, path)
            if names is None or names:
                _join(spaces, space, names, step, frozenset())
                spaces[id(space)].owner = id(module)
        if self.reach.modules:
            for name in _GLOBAL_HOOKS:
                step = functools.partial(Item, Global("torch.nn.modules.module", name))
                _join(spaces, getattr(module_globals, name), None, step, frozenset())

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
                self.pulled.append(PulledWire(space, ORDER, found.step, None, frozenset(), {}))

    def check_alone(self) -> None:
        """Refuse where another thread wrote since the run began. From now on the sentry sees it."""
        holders = self.reach.holders
        if holders.is_alone():
            return
        holders.check_unwritten(holders.find_writes())
        for module, table, path, _ in self.reach.empty_tables:
            if (own_dict(module) or {}).get(table):
                raise Refused("another-thread", f"{path}.{table} was filled after the run.")

    # --- guards ---

    def write_guards(
        self,
        sentry: Sentry,
        settle: Callable[[], bool],
        causes: object,
        torch_state: tuple[object, ...],
        held: Held,
    ) -> Guards:
        """The function that admits a call."""
        writer = GuardWriter(
            self.reads,
            self.completion.effects.counted_keys,
            self.forms,
            self.completion.attributes,
        )
        space = writer.space
        count, keywords, ordered = self.completion.shape
        named = (
            f"list(kwargs) == {list(keywords)!r}"
            if ordered
            else (f"kwargs.keys() == {set(keywords)!r}" if keywords else "not kwargs")
        )
        called = f"{count} arguments, keywords {', '.join(keywords) or 'none'}"
        writer.check("call", f"len(args) == {count} and {named}", called, "(len(args), *kwargs)")
        changes = writer.constant(functools.partial(_describe_changes, torch_state))
        same_state = spell_quickly(torch_state, writer.constant)
        writer.check("torch's state", same_state, "as traced", f"{changes}()")
        if not can_repeat(self.trace):  # vmap has its own way to draw, and to write
            asked = writer.constant(is_transformed)
            writer.check("torch.func", f"not {asked}()", "no transform", "'one'")
        if self.trace.has_contexts:
            dtype = writer.constant(torch.get_autocast_dtype)
            for device, _, wanted in sample_autocast():
                found = f"{dtype}({device!r})"
                condition = f"{found} is {writer.constant(wanted)}"
                writer.check(f"autocast's dtype on {device}", condition, str(wanted), found)
        for answer in self.completion.answers:
            ask, seen = writer.constant(answer.question.ask), writer.constant(answer.seen)
            writer.check(answer.question.about, f"{ask}() == {seen}", "as traced", f"{ask}()")
        if self._has_abstract_classes():
            token = writer.constant(abc.get_cache_token)
            now = abc.get_cache_token()
            writer.check("ABC registrations", f"{token}() == {now}", "as traced", "'others'")
        space["_quiet"], space["_settle"], space["_trouble"] = sentry.is_quiet, settle, causes
        writer.check("", "(_quiet() and not _trouble) or _settle()", "", "''")
        frozen = tuple(i for i in range(len(held.tensors)) if not held.wants_grad((i,)))
        reads_gradients = bool(_OF_GRADIENTS & self.reads.names)
        if frozen and (torch_state[0] or reads_gradients):
            wants = writer.constant(held.wants_grad)
            writer.check("state", f"not {wants}({frozen!r})", "no gradients wanted", "'some are'")
        if reads_gradients:
            formed = [t for t, _ in self.completion.asked if not meta_of(t).requires_grad]
            for ref in map(Hidden, formed):  # arithmetic in place can bring the need for one
                found = f"getattr({writer.constant(ref)}(), 'requires_grad', False)"
                writer.check("state", f"not {found}", "no gradient wanted", found)
        for wire in self.pulled:
            self._write_pulled(writer, wire)
        return self._write_arguments(writer)

    def _has_abstract_classes(self) -> bool:
        return any(isinstance(cls, abc.ABCMeta) for cls, _ in self.reach.classes) or (
            self.reads.asks_for_classes
        )

    def _write_pulled(self, writer: GuardWriter, wire: PulledWire) -> None:
        name, nobody = writer.constant(wire), writer.constant(NOBODY)
        condition = f"{name}.is_same()"
        quick = wire.spell(writer.constant)
        if quick is not None:
            condition = f"({quick}) or {condition}"
        writer.check("", condition, "", f"{name}.find_cause({nobody})")

    def _write_arguments(self, writer: GuardWriter) -> Guards:
        completion = self.completion
        bound = completion.bound
        for name, expression in completion.expressions.items():
            writer.add(f"L[{name!r}]", expression, bound[name])
        for carried in completion.effects.carried:
            self._write_carried(writer, carried)
        for counted in completion.effects.counted:
            self._write_counted(writer, counted)
        fetched: list[str] = []
        carried_names = {str(c.source): c for c in completion.effects.carried}
        for item in self.reach.aliases:  # an argument that is state as well
            kept = writer.constant(Kept(item))
            if id(item) in writer.variables:
                variable = writer.variables[id(item)]
                writer.check("arguments", f"{kept}.is_same({variable})", "the same", "'another'")
            elif id(item) in self.reach.fresh:  # no guard comes to it: its name there isn't read
                writer.add(str(self.reach.fresh[id(item)]), f"{kept}.get()", item)
        for tensor, sources in zip(completion.tensors, completion.sources, strict=True):
            by_state = None
            if carried_names:
                by_state = next((c for s, _ in sources if (c := carried_names.get(str(s)))), None)
            if by_state is not None:
                fetched.append(self._carried_variables[str(by_state.source)])
            elif id(tensor) not in writer.tensors:
                if not any(is_anchored for _, is_anchored in sources):
                    raise Refused(
                        "hidden-state",
                        f"{sources[0][0]} is a tensor that an argument doesn't hold itself: its "
                        "class does. Pass the tensor, or put it on the object.",
                    )
                if not _are_held(sources):
                    fetched.append(self._write_weak(writer, tensor, sources[0][0]))
            else:
                variable = writer.tensors[id(tensor)]
                if not _are_held(sources):
                    fetched.append(variable)
                if any(is_anchored for _, is_anchored in sources):
                    kept = writer.constant(Kept(tensor))
                    writer.check(
                        str(sources[0][0]), f"{kept}.is_same({variable})", "itself", "'another'"
                    )
        for tensor, path in completion.asked:  # no call got it, and yet it is an argument
            if id(tensor) in writer.tensors:
                kept, variable = writer.constant(Kept(tensor)), writer.tensors[id(tensor)]
                writer.check(str(path), f"{kept}.is_same({variable})", "itself", "'another'")
        self._write_distinctness(writer)
        return writer.build(fetched)

    def _write_carried(self, writer: GuardWriter, carried: Carried) -> None:
        fetch = writer.constant(functools.partial(_fetch, carried))
        name = writer.assign(f"{fetch}()")
        self._carried_variables[str(carried.source)] = name
        facts = writer.constant((carried.facts.meta, carried.facts.traits))
        has = writer.constant(_has_facts)
        unmarked = writer.spell_attributes(str(carried.source), name, carried.attributes)
        writer.check(
            str(carried.source),
            f"{has}({name}, {facts}) and {unmarked}",
            carried.facts.meta.full,
            f"_fingerprint({name})",
        )

    def _write_weak(self, writer: GuardWriter, tensor: torch.Tensor | None, path: Source) -> str:
        if tensor is None:
            raise Refused("volatile-source", f"{path} is gone after the run.")
        name = writer.assign(f"{writer.constant(Hidden(tensor))}()")
        form = self.forms[id(tensor)]
        has, facts = writer.constant(_has_facts), writer.constant(form)
        found = f"_fingerprint({name})"
        writer.check(str(path), f"{has}({name}, {facts})", form[0].full, found)
        return name

    def _write_counted(self, writer: GuardWriter, counted: Counted) -> None:
        fetch = writer.constant(functools.partial(_fetch, counted))
        cls = writer.constant(counted.cls)
        writer.check(
            str(counted.source),
            f"type({fetch}()) is {cls}",
            f"a {counted.cls.__name__}",
            f"{fetch}()",
        )

    def _write_distinctness(self, writer: GuardWriter) -> None:
        """Objects that were two must be two."""
        fresh = [*writer.tensors.values(), *writer.variables.values()]
        carried = {str(one.source) for one in self.completion.effects.carried}
        anchored = {
            id(tensor)
            for tensor, sources in zip(
                self.completion.tensors, self.completion.sources, strict=True
            )
            if any(is_anchored and str(path) not in carried for path, is_anchored in sources)
        }
        anchored |= {id(tensor) for tensor, _ in self.completion.asked}
        anchored |= {id(value) for value, _, is_anchored in self.reach.objects if is_anchored}
        anchored |= {
            id(holder.owner)
            for holder in self.reads.holders
            if holder.anchored and isinstance(holder.kind, _MUTABLE)
        }
        if self.reads.compares_identity and writer.has_any((tuple, frozenset)):
            anchored |= self.reach.find_anchored((tuple, frozenset))
        known = set(writer.tensors) | set(writer.variables)
        fresh += self._find_carried(known | anchored)
        anchored -= known  # those that were the same are checked already
        if len(fresh) > 1:
            ids = ", ".join(f"id({name})" for name in fresh)
            writer.check(
                "arguments", f"len({{{ids}}}) == {len(fresh)}", "different objects", "'one twice'"
            )
        if fresh and anchored:
            names = writer.constant(frozenset(anchored))
            ids = " and ".join(f"id({name}) not in {names}" for name in fresh)
            writer.check("arguments", ids, "objects of their own", "'one that is state as well'")
        self._write_overlap(writer)
        if self.reads.compares_identity:
            self._write_identities(writer)

    def _find_carried(self, others: set[int]) -> list[str]:
        """Variables of the tensors that the run replaces, each of which was nothing else."""
        by_spot = {carried.spot: carried for carried in self.completion.effects.carried}
        refs = [carried.facts.ref for carried in by_spot.values()]
        for ref, carried in zip(refs, by_spot.values(), strict=True):
            if id(ref()) in others or sum(other is ref for other in refs) > 1:
                raise Refused(
                    "volatile-source",
                    f"{carried.source} is replaced by the run, and was a tensor that the run can "
                    "reach another way.",
                )
        return [self._carried_variables[str(carried.source)] for carried in by_spot.values()]

    def _write_identities(self, writer: GuardWriter) -> None:
        """Equal numbers and strings, where the code asks whether they are one object."""
        groups: dict[tuple[type, str], list[tuple[str, object]]] = {}
        for name, value in writer.plain:
            groups.setdefault((type(value), repr(value)), []).append((name, value))
        kept = {}  # of state, those that equal an argument
        classes = {cls for cls, _ in groups}
        for holder in self.reads.holders if groups else ():
            for value in holder.kept if holder.anchored else ():
                if type(value) in classes and (type(value), repr(value)) in groups:
                    kept[id(value)] = value
        pattern = writer.constant(_identities)
        for key, group in groups.items():
            others = [v for v in kept.values() if (type(v), repr(v)) == key]
            if len(group) + len(others) > 1:
                seen = _identities(*(value for _, value in group), *others)
                listed = ", ".join([*(name for name, _ in group), *map(writer.constant, others)])
                condition = f"{pattern}({listed}) == {seen!r}"
                writer.check("arguments", condition, "one object where one was", "'not'")

    def _write_overlap(self, writer: GuardWriter) -> None:
        """Where a tensor is changed in place, which others share its memory matters."""
        if not any(wanted.written for wanted in self.trace.inputs):
            return
        by_id = {id(t): t for t in self.completion.tensors if t is not None}
        passed = [by_id[i] for i in writer.tensors if i in by_id]
        listed = ", ".join(n for i, n in writer.tensors.items() if i in by_id)
        state = [storage_of(tensor) for i, tensor in by_id.items() if i not in writer.tensors]
        if len(passed) > 1:
            pattern, seen = writer.constant(_storage_pattern), _storage_pattern(*passed)
            condition = f"{pattern}({listed}) == {seen!r}"
            writer.check("arguments", condition, "memory shared as traced", "'not'")
        if passed and state:
            find = functools.partial(_find_storages, {s: i for i, s in enumerate(state)})
            condition = f"{writer.constant(find)}({listed}) == {find(*passed)!r}"
            writer.check("arguments", condition, "memory shared with state as traced", "'not'")


def _are_one_place(sources: tuple[tuple[Source, bool], ...], carried: dict[str, Carried]) -> bool:
    """Whether all paths to a tensor that the run replaces end in one place: a shared cell."""
    found = [carried.get(str(source)) for source, _ in sources]
    return len({None if one is None else one.spot for one in found}) == 1


def _identities(*values: object) -> tuple[int, ...]:
    ids = list(map(id, values))
    return tuple(map(ids.index, ids))


def _storage_pattern(*tensors: torch.Tensor) -> tuple[int, ...]:
    storages = list(map(storage_of, tensors))
    return tuple(map(storages.index, storages))


def _find_storages(state: dict[int, int], *tensors: torch.Tensor) -> tuple[int | None, ...]:
    return tuple(state.get(storage_of(tensor)) for tensor in tensors)


def _are_held(sources: Sequence[tuple[Source, bool]]) -> bool:
    """Whether a path leads to something that is the same on every call, and keeps it alive."""
    return any(anchored and not _leads_through_reference(path) for path, anchored in sources)


def _leads_through_reference(path: Source | None) -> bool:
    while path is not None and not isinstance(path, Referent):
        path = path.base
    return path is not None


def _fetch(item: Carried | Counted) -> object:
    owner = item.place.owner
    assert owner is not None
    return item.place.kind.get(owner(), item.key)


def _has_facts(value: object, facts: tuple[TensorMeta, Traits]) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    meta, traits = facts
    now = traits_of(value)
    same = now[:3] == traits[:3] and now.is_leaf == traits.is_leaf and now.wrapped == traits.wrapped
    return same and meta_of(value) == meta


def _describe_changes(before: tuple[object, ...]) -> str:
    pairs = zip(QUICK_FIELDS, before, sample_quickly(), strict=True)
    return ", ".join(f"{name} {a} → {b}" for name, a, b in pairs if a != b)


@dataclass(slots=True)
class _Space:
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
