"""Admission: what an entry checks before it takes a call, as one guard function.

It compares the arguments and torch's state with what the run found, and asks the entry's standing
whether anything that the run read was written. What no sentry can watch is compared here as well.
"""

from __future__ import annotations

import abc
import functools
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from tripwire.imports import UNCOUNTED, count_registrations
from tripwire.reading.effects import Carried, Counted, WrittenHolder, place_of, refer_to
from tripwire.reading.holders import Holder, strong
from tripwire.reading.kinds import (
    ArrayKind,
    AttributesKind,
    ElementsKind,
    ItemsKind,
    MembersKind,
    SlotsKind,
)
from tripwire.reading.sources import Referent, Source
from tripwire.reading.tensors import (
    PLAIN_TENSORS,
    TensorMeta,
    Traits,
    meta_of,
    storage_of,
    traits_of,
)
from tripwire.reading.torchstate import AUTOCAST_DTYPES, describe_changes, spell_quickly
from tripwire.rulebook.refusals import Refused
from tripwire.tracing.modes import is_transformed
from tripwire.tracing.open.draws import look_ahead
from tripwire.tracing.open.opening import LARGEST_OPEN, NumberInput, Planted
from tripwire.tracing.result import (
    Completion,
    Trace,
    can_repeat,
    has_levels,
    has_python,
    reads_offsets,
)
from tripwire.validity.guards import GuardWriter
from tripwire.validity.kept import Alike, Held, Kept, Memory, Sizes
from tripwire.validity.probes import build_sounders
from tripwire.validity.table import STATE_IDS, Guards, TableRow
from tripwire.validity.wires import NOBODY, PulledWire
from tripwire.values.classes import isinstance
from tripwire.writes.sentry import Sentry
from tripwire.writes.twin import Hidden

if TYPE_CHECKING:
    from tripwire.validity.standing import Standing

# Kinds of things that hold values, beside those with attributes.
_MUTABLE = (ItemsKind, ElementsKind, MembersKind, ArrayKind)
_OF_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad_fn"})


class Admission:
    """Writes the guard function of one entry."""

    def __init__(
        self,
        trace: Trace,
        completion: Completion,
        forms: dict[int, tuple[TensorMeta, Traits]],
        torch_state: tuple[object, ...],
        pulled: Sequence[PulledWire],
        held: Held,
        alike: Mapping[int, tuple[Alike, ...]],
        exchanged: Sequence[tuple[Holder, Any, object]],
    ) -> None:
        self.trace = trace
        self.reads = trace.reads
        self.completion = completion
        self.reach = completion.reach
        self._forms = forms
        self._torch_state = torch_state
        self._pulled = pulled
        self._held = held
        self._alike = alike
        self._exchanged = exchanged
        self._carried_variables: dict[str, str] = {}
        self.memory: Memory | None = None  # that state has, where the run changes tensors in place
        self.shares_memory = False  # what the run changes in place may be memory of state

    def write(self, sentry: Sentry, standing: Standing) -> Guards:
        """The function that admits a call. Cheap questions first, arguments last."""
        writer = GuardWriter(
            self.reads,
            self.completion.effects.counted_keys,
            self._forms,
            self.completion.attributes,
            shadow=self.trace.shadow,
            offsets_matter=reads_offsets(self.trace),
            constants={id(constant.value) for constant in self.trace.constants},
        )
        self._write_call(writer)
        self._write_torch(writer)
        if self._has_abstract_classes():
            token, own = writer.constant(abc.get_cache_token), writer.constant(UNCOUNTED)
            condition = f"{token}() - {own}[0] == {count_registrations()}"
            writer.check("ABC registrations", condition, "as traced", "'others'")
        space = writer.space
        space["_quiet"], space["_settle"] = sentry.is_quiet, standing.settle
        space["_trouble"] = standing.trouble
        row = TableRow("quiet", x=sentry.is_quiet, y=(*standing.trouble.parts, standing.settle))
        writer.check("", "(_quiet() and not _trouble) or _settle()", "", "''", row)
        self._write_gradients(writer)
        self._write_sizes(writer)
        for wire in self._pulled:
            self._write_pulled(writer, wire)
        return self._write_arguments(writer)

    def _write_call(self, writer: GuardWriter) -> None:
        count, keywords, ordered = self.completion.shape
        named = (
            f"list(kwargs) == {list(keywords)!r}"
            if ordered
            else (f"kwargs.keys() == {set(keywords)!r}" if keywords else "not kwargs")
        )
        called = f"{count} arguments, keywords {', '.join(keywords) or 'none'}"
        row = TableRow("call", n=count, flag=ordered, x=tuple(keywords))
        condition, found = f"len(args) == {count} and {named}", "(len(args), *kwargs)"
        writer.check("call", condition, called, found, row)

    def _write_torch(self, writer: GuardWriter) -> None:
        """torch's state, and what else of the process no dict holds."""
        changes = writer.constant(functools.partial(describe_changes, self._torch_state))
        same_state = spell_quickly(self._torch_state, writer.constant)
        writer.check("torch's state", same_state, "as traced", f"{changes}()")
        # vmap has its own way to draw, to write, and to call custom functions; and levels have
        # numbers, which count those that go on.
        if not can_repeat(self.trace) or has_python(self.trace) or has_levels(self.trace):
            asked = writer.constant(is_transformed)
            writer.check("torch.func", f"not {asked}()", "no transform", "'one'")
        answers = self.completion.answers
        if self.trace.has_contexts and not any(a.flag is AUTOCAST_DTYPES for a in answers):
            answers = (AUTOCAST_DTYPES.answer(), *answers)
        for answer in answers:
            condition = answer.flag.spell(answer.seen, writer.constant)
            found = f"{writer.constant(answer.flag.get)}()"
            writer.check(answer.flag.name, condition, "as traced", found)

    def _write_gradients(self, writer: GuardWriter) -> None:
        """Arithmetic in place can bring the need for a gradient to state that had none."""
        held = self._held
        frozen = tuple(i for i in range(len(held.tensors)) if not held.wants_grad((i,)))
        reads_gradients = bool(_OF_GRADIENTS & self.reads.names)
        if frozen and (self._torch_state[0] or reads_gradients):
            wants = writer.constant(held.wants_grad)
            writer.check("state", f"not {wants}({frozen!r})", "requires_grad=False", "'True'")
        if reads_gradients:
            formed = [t for t, _ in self.completion.asked if not meta_of(t).requires_grad]
            for ref in map(Hidden, formed):
                found = f"getattr({writer.constant(ref)}(), 'requires_grad', False)"
                writer.check("state", f"not {found}", "requires_grad=False", found)

    def _write_sizes(self, writer: GuardWriter) -> None:
        """Nobody tells of these: `out=` gives a tensor another size, silently if it is empty;

        arithmetic in place may leave a sparse one uncoalesced.
        """
        given = (node.kwargs["out"] for node in self.trace.graph.nodes if "out" in node.kwargs)
        taking = {node for out in given for node in tree_leaves(out)}
        placeholders = self.trace.graph.find_nodes(op="placeholder")[len(self.trace.numbers) :]
        pairs = zip(placeholders, self.completion.tensors, strict=True)
        taken = {id(tensor) for node, tensor in pairs if node in taking}
        state = [*self._held.tensors, *(tensor for tensor, _ in self.completion.asked)]
        found = [one for one in state if id(one) in taken or _is_empty(one) or _is_sparse(one)]
        if found:
            sizes = writer.constant(Sizes(found, self._held).are_same)
            writer.check("state", f"{sizes}()", "tensors of the same sizes", "'others'")

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
        rows = wire.rows_of_table()
        writer.check("", condition, "", f"{name}.find_causes({nobody})", *rows)

    def _write_arguments(self, writer: GuardWriter) -> Guards:
        completion = self.completion
        for name, expression in completion.expressions.items():
            writer.add(f"L[{name!r}]", expression, completion.bound[name])
        for carried in completion.effects.carried:
            self._write_carried(writer, carried)
        for counted in completion.effects.counted:
            self._write_counted(writer, counted)
        self._write_planted(writer)
        for holder, key, value in self._exchanged:
            fetch = writer.constant(functools.partial(_fetch_from, place_of(holder), key))
            writer.add(str(holder.step(key)), f"{fetch}()", value)
        for item in self.reach.aliases:  # an argument that is state as well
            kept = writer.constant(Kept(item))
            if id(item) in writer.variables:
                variable = writer.variables[id(item)]
                writer.check(
                    "arguments", f"{kept}.is_same({variable})", "the same object", "'another'"
                )
            elif id(item) in self.reach.fresh:  # no guard comes to it: its name there isn't read
                writer.add(str(self.reach.fresh[id(item)]), f"{kept}.get()", item)
        fetched = self._write_inputs(writer)
        for tensor, path in completion.asked:  # no call got it, and yet it is an argument
            if id(tensor) in writer.tensors:
                self._write_itself(writer, tensor, path)
        self._write_untouched(writer)
        self._check_written(writer)
        self._write_stored(writer)
        self._write_distinctness(writer)
        return writer.build(self._add_numbers(writer, fetched))

    def _check_written(self, writer: GuardWriter) -> None:
        """Refuse to write where no guard looks: another call may pass something else there."""
        written = {holder for holder, _ in self.completion.effects.written}
        for holder in self.reads.holders if written else ():
            is_passed = id(holder) in written and not holder.anchored
            if is_passed and id(holder.owner) not in writer.variables:
                raise Refused(
                    "hidden-state",
                    f"the run writes to {holder.path}, and reaches the same object by another "
                    "path, too. Pass it, or keep it in a global, not both.",
                )

    def _write_stored(self, writer: GuardWriter) -> None:
        """What is passed may lie already where the run puts it: that write wasn't seen.

        So it must lie there again, or the call is traced, and its write with it.
        """
        stored, written = self.reads.stored, self.completion.effects.written
        for holder in self.reads.holders if stored else ():
            if not isinstance(holder.kind, (AttributesKind, SlotsKind)):
                continue
            for key in stored.intersection(holder.keys):
                value = strong(holder.kept[holder.keys.index(key)])
                passed = writer.variables.get(id(value)) or writer.tensors.get(id(value))
                if passed is None or value is None or (id(holder), key) in written:
                    continue
                owner = writer.variables.get(id(holder.owner))
                if holder.anchored:
                    owner = f"{writer.constant(refer_to(holder.owner))}()"
                if owner is not None:
                    found = f"{writer.constant(holder.kind.get)}({owner}, {key!r})"
                    where = str(holder.step(key))
                    writer.check(where, f"{found} is {passed}", "what is passed", "'another'")

    def _write_planted(self, writer: GuardWriter) -> None:
        """Numbers of the world that are open: each call's own."""
        shadow = self.trace.shadow
        if shadow is None:
            return
        writer.space["_item"] = tuple.__getitem__
        for one in shadow.planted:
            fetch = writer.constant(functools.partial(_fetch, one))
            writer.name_it(one.label, f"{fetch}()")
            writer.add(one.path, one.label, one.value)

    def _add_numbers(self, writer: GuardWriter, fetched: list[str]) -> list[str]:
        """The graph's inputs that are numbers, before its tensors; and those that results hold."""
        shadow = self.trace.shadow
        if shadow is None:
            return fetched
        if shadow.drawn:
            draws = tuple(shadow.drawn.values())
            found = writer.assign(f"{writer.constant(functools.partial(look_ahead, draws))}()")
            for index, path in enumerate(shadow.drawn):
                writer.name_it(shadow.numbers[path].label, f"{found}[{index}]")
        sounded = {one.label for one in shadow.soundings.made}
        for number in shadow.numbers.values():
            if number.label not in writer.opened | sounded:  # nobody read it
                writer.name_it(number.label, repr(number.symbol.node.hint))
        modules = {"math": math, "numpy": sys.modules.get("numpy"), "torch": torch}
        writer.space |= {**modules, **shadow.symbols.tables}
        writer.space["_as_tensor"] = functools.partial(torch.tensor, dtype=torch.float64)
        self._write_soundings(writer, fetched)
        inputs = map(_spell_input, self.trace.numbers)
        return [*inputs, *fetched, *shadow.formulas.outputs]

    def _write_soundings(self, writer: GuardWriter, fetched: list[str]) -> None:
        """Numbers out of tensors that are known before the graph runs: their tensors' calls."""
        found = build_sounders(self.trace)
        if not found:
            return
        given, held = iter(fetched), writer.constant(self._held)
        carried = {str(one.source) for one in self.completion.effects.carried}
        inputs = [_spell_input(number) for number in self.trace.numbers]
        count = 0
        for sources in self.completion.sources:
            if are_held(sources) and not any(str(source) in carried for source, _ in sources):
                inputs.append(f"{held}.tensors[{count}]")
                count += 1
            else:
                inputs.append(next(given))
        for one in found:
            needed = ", ".join(inputs[index] for index in one.indices)
            values = writer.assign(f"{writer.constant(one.compute)}({needed})")
            for index, label in enumerate(one.labels):
                writer.name_it(label, f"{values}[{index}]")
                largest = f"type({label}) is float or {-LARGEST_OPEN} <= {label} <= {LARGEST_OPEN}"
                writer.check(one.paths[index], largest, "an int of 32 bits", label)

    def _write_inputs(self, writer: GuardWriter) -> list[str]:
        """Variables of the graph's inputs that come with the call."""
        completion = self.completion
        carried = {str(c.source) for c in completion.effects.carried}
        fetched: list[str] = []
        for tensor, sources in zip(completion.tensors, completion.sources, strict=True):
            paths = (str(source) for source, _ in sources) if carried else ()
            by_state = next((path for path in paths if path in carried), None)
            if by_state is not None:
                fetched.append(self._carried_variables[by_state])
            elif id(tensor) not in writer.tensors:
                if not any(is_anchored for _, is_anchored in sources):
                    raise Refused(
                        "hidden-state",
                        f"{sources[0][0]} is a tensor that the class of an argument holds, not "
                        "the argument itself. Pass the tensor, or put it on the object.",
                    )
                if not are_held(sources):
                    fetched.append(self._write_weak(writer, tensor, sources[0][0]))
            else:
                if not are_held(sources):
                    fetched.append(writer.tensors[id(tensor)])
                if any(is_anchored for _, is_anchored in sources):
                    self._write_itself(writer, tensor, sources[0][0])
        return fetched

    def _write_itself(self, writer: GuardWriter, tensor: torch.Tensor | None, path: Source) -> None:
        """A tensor that is state, and comes with the call as well."""
        kept, variable = writer.constant(Kept(tensor)), writer.tensors[id(tensor)]
        writer.check(str(path), f"{kept}.is_same({variable})", "itself", "'another'")

    def _write_carried(self, writer: GuardWriter, carried: Carried) -> None:
        fetch = writer.constant(functools.partial(_fetch, carried))
        name = writer.assign(f"{fetch}()")
        self._carried_variables[str(carried.source)] = name
        unmarked = writer.spell_attributes(str(carried.source), name, carried.attributes)
        has, facts = self._spell_carried(writer, name, carried)
        writer.check(
            str(carried.source),
            f"{has}({name}, {facts}) and {unmarked}",
            carried.facts.meta.full,
            f"_fingerprint({name})",
        )

    def _spell_carried(self, writer: GuardWriter, name: str, carried: Carried) -> tuple[str, str]:
        """What compares the form of a tensor that the run replaces, and with what."""
        meta, traits = carried.facts.meta, carried.facts.traits
        shadow = self.trace.shadow
        opened = None if shadow is None else shadow.fakes.opened.get(str(carried.source))
        if opened is None:
            return writer.constant(_has_facts), writer.constant((meta, traits))
        writer.name_it(opened.label, name)
        return writer.constant(_has_kind), writer.constant((meta, traits))

    def _write_untouched(self, writer: GuardWriter) -> None:
        """State with open sizes, since other runs replace it; here it stays, as it is."""
        opened = {} if self.trace.shadow is None else self.trace.shadow.fakes.opened
        for path, one in opened.items():
            if one.label not in writer.opened:
                tensor = None if one.ref is None else one.ref()
                if tensor is None:
                    raise Refused("volatile-source", f"{path} no longer exists after the run.")
                name = writer.assign(f"{writer.constant(Hidden(tensor))}()")
                writer.check_tensor(path, name, tensor)  # and it gets its label

    def _write_weak(self, writer: GuardWriter, tensor: torch.Tensor | None, path: Source) -> str:
        if tensor is None:
            raise Refused("volatile-source", f"{path} no longer exists after the run.")
        name = writer.assign(f"{writer.constant(Hidden(tensor))}()")
        form = self._forms[id(tensor)]
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
        anchored -= self._alike.keys()
        for key, kept in writer.members.items():
            variable = writer.variables.get(key) or writer.tensors.get(key)
            if variable is None:
                anchored.add(key)
            else:
                writer.check(
                    "arguments", f"{kept}.is_same({variable})", "the same object", "'another'"
                )
        if self.reads.compares_identity and writer.has_any((tuple, frozenset)):
            anchored |= self.reach.find_anchored((tuple, frozenset))
        known = set(writer.tensors) | set(writer.variables)
        fresh += self._find_carried(known | anchored)
        anchored -= known  # those that were the same are checked already
        if len(fresh) > 1:
            ids, row = (
                ", ".join(f"id({name})" for name in fresh),
                TableRow("distinct", all_of=(*fresh,)),
            )
            condition = f"len({{{ids}}}) == {len(fresh)}"
            writer.check("arguments", condition, "different objects", "'one object twice'", row)
        if fresh and anchored:
            writer.space[STATE_IDS] = frozenset(anchored)
            ids = " and ".join(f"id({name}) not in {STATE_IDS}" for name in fresh)
            row = TableRow("others", all_of=(*fresh,), ids=(*anchored,))
            found = "'one that is'"
            writer.check("arguments", ids, "objects that aren't also state", found, row)
        others = writer.containers if self._alike else []
        if others:  # an equal list that took the place of another has another identity
            alike = writer.constant(tuple(chain.from_iterable(self._alike.values())))
            condition = f"{writer.constant(_are_others)}(({', '.join(others)},), {alike})"
            writer.check("arguments", condition, "objects that aren't also state", "'one that is'")
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
                    f"the run replaces {carried.source}, and can still reach the old tensor by "
                    "another path.",
                )
        return [self._carried_variables[str(carried.source)] for carried in by_spot.values()]

    def _write_identities(self, writer: GuardWriter) -> None:
        """Equal numbers and strings, where the code asks whether they are one object."""
        groups: dict[tuple[type, str], list[tuple[str, object]]] = {}
        for name, value in writer.plain:
            groups.setdefault((type(value), repr(value)), []).append((name, value))
        kept = {}  # of state, those that equal an argument
        classes = {id(cls) for cls, _ in groups}
        for holder in self.reads.holders if groups else ():
            for value in holder.kept if holder.anchored else ():
                if id(type(value)) in classes and (type(value), repr(value)) in groups:
                    kept[id(value)] = value
        pattern = writer.constant(_identities)
        for key, group in groups.items():
            others = [v for v in kept.values() if (type(v), repr(v)) == key]
            if len(group) + len(others) > 1:
                seen = _identities(*(value for _, value in group), *others)
                listed = ", ".join([*(name for name, _ in group), *map(writer.constant, others)])
                condition = f"{pattern}({listed}) == {seen!r}"
                writer.check("arguments", condition, "the traced identities", "'others'")

    def _write_overlap(self, writer: GuardWriter) -> None:
        """Where a tensor is changed in place, which others share its memory matters."""
        if not any(wanted.written for wanted in self.trace.inputs):
            return
        by_id = {id(t): t for t in self.completion.tensors if t is not None}
        # What memory each had when the run reached it: `x.data = y` gives it another.
        pairs = zip(self.completion.tensors, self.trace.inputs, strict=True)
        storages = {id(t): wanted.storage for t, wanted in pairs if t is not None}
        passed = [by_id[i] for i in writer.tensors if i in by_id]
        began = [storages[id(tensor)] for tensor in passed]
        listed = ", ".join(n for i, n in writer.tensors.items() if i in by_id)
        state = [tensor for i, tensor in by_id.items() if i not in writer.tensors]
        memory = Memory(state, [storages[id(tensor)] for tensor in state], self._held)
        self.memory = memory if state else None
        shared = memory.find_first(began)
        if passed and state:
            is_held = len(state) == len(self._held.tensors)  # else some is found on each call
            moves = any(storages[id(one)] != storage_of(one) for one in state)
            self.shares_memory = not is_held or moves or any(place < 0 for place in shared)
        if passed and (state or len(passed) > 1):
            condition = f"{writer.constant(memory.find)}({listed}) == {shared!r}"
            writer.check("arguments", condition, "memory shared as when traced", "'otherwise'")
        counts = Counter(storages.values())
        for tensor in passed:  # those that share memory: where each begins says what overlaps
            if counts[storages[id(tensor)]] > 1:
                writer.check_offset("arguments", writer.tensors[id(tensor)], tensor)


def _spell_input(number: NumberInput) -> str:
    """A number as the graph gets it."""
    return f"_as_tensor({number.expression})" if number.is_float else number.expression


def are_held(sources: Sequence[tuple[Source, bool]]) -> bool:
    """Whether an entry holds an input: all paths to it are state's, and keep it alive.

    What comes with the call needs no holding. What a weak reference leads to may be asked whether
    it is still there.
    """
    return all(anchored and not _leads_through_reference(path) for path, anchored in sources)


def _leads_through_reference(path: Source | None) -> bool:
    while path is not None and not isinstance(path, Referent):
        path = path.base
    return path is not None


def _identities(*values: object) -> tuple[int, ...]:
    ids = list(map(id, values))
    return tuple(map(ids.index, ids))


def _are_others(values: tuple[object, ...], alike: tuple[Alike, ...]) -> bool:
    return not any(value is one.get() for value in values for one in alike)


def _fetch(item: Carried | Counted | Planted) -> object:
    return _fetch_from(item.place, item.key)


def _fetch_from(place: WrittenHolder, key: Any) -> object:
    assert place.owner is not None
    return place.kind.get(place.owner(), key)


def _has_facts(value: object, facts: tuple[TensorMeta, Traits]) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    meta, traits = facts
    now = traits_of(value)
    same = now[:3] == traits[:3] and now.is_leaf == traits.is_leaf and now.wrapped == traits.wrapped
    return same and meta_of(value) == meta


def _has_kind(value: object, facts: tuple[TensorMeta, Traits]) -> bool:
    """Whether all of a tensor's form but its sizes and strides is as it was."""
    if not isinstance(value, torch.Tensor) or value.dim() != len(facts[0].shape):
        return False
    meta = meta_of(value)._replace(shape=facts[0].shape, stride=facts[0].stride)
    now, traits = traits_of(value), facts[1]
    same = now[:3] == traits[:3] and now.is_leaf == traits.is_leaf and now.wrapped == traits.wrapped
    return same and meta == facts[0]


def _is_sparse(tensor: torch.Tensor) -> bool:
    return meta_of(tensor).sparse is not None


def _is_empty(tensor: torch.Tensor) -> bool:
    is_plain = id(type(tensor)) in PLAIN_TENSORS  # others may answer with code of their own
    return is_plain and tensor.layout is torch.strided and not (tensor.is_nested or tensor.numel())
