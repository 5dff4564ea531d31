"""Guards: checks on a call's own arguments, as one generated function per entry.

Arguments are compared by structure and value, along the paths that the run could read. Guards
expect what the run found before it wrote to its arguments itself. `Guards.source` is the text of
the function, and each check can say what it expected and what it found. If the C module is built, a
table of the same checks runs instead of the text (table.py).
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Set
from contextvars import ContextVar
from keyword import iskeyword
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from tripwire.reading.kinds import (
    ABSENT,
    ARRAY,
    ATTRIBUTES,
    CONTEXT,
    ELEMENTS,
    ITEMS,
    MEMBERS,
    SLOTS,
    THREAD_LOCAL,
    WEAK,
    Kind,
    plain_key,
)
from tripwire.reading.meeting import shows_all
from tripwire.reading.names import fingerprint
from tripwire.reading.reader import answers_itself
from tripwire.reading.reads import ReadSet
from tripwire.reading.tensors import (
    PLAIN_TENSORS,
    TensorMeta,
    Traits,
    find_leaf,
    meta_of,
    sparse_form,
    traits_of,
    wraps_of,
)
from tripwire.rulebook.rules import words
from tripwire.tracing.open.opening import LARGEST_OPEN, OpenNumber
from tripwire.validity import table
from tripwire.validity.kept import Kept
from tripwire.validity.table import (
    Assignment,
    Check,
    Guards,
    Line,
    TableRow,
    build_guards,
    find_row,
)
from tripwire.values.classes import hides_own, is_exactly, is_namedtuple, isinstance, name_of
from tripwire.values.contents import (
    PROXIES,
    behind_proxy,
    dict_behind,
    elements_of,
    held_item,
    own_dict,
    parts_of,
    slots_of,
    spell_key,
)
from tripwire.values.identity import (
    BYTES,
    PLAIN,
    VIEWS,
    is_array,
    is_pinned,
    same_plain,
)
from tripwire.values.numbers import iter_numbers

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow


class GuardWriter:
    """Collects checks and writes the function."""

    def __init__(
        self,
        reads: ReadSet,
        counted: frozenset[tuple[int, Any]],
        forms: dict[int, tuple[TensorMeta, Traits]],
        attributes: dict[int, dict[str, object]],
        *,
        shadow: Shadow | None,
        offsets_matter: bool,
        constants: Set[int],
    ) -> None:
        self._constants = constants  # identities of objects that the graph holds
        self._shadow = shadow  # has what is open
        self._attributes, self._forms = attributes, forms  # of tensors, as the run found them
        self._offsets_matter = offsets_matter
        self._reads = reads
        self._counted = counted  # holders and keys whose value doesn't matter
        fresh = (holder for holder in reads.holders if not holder.anchored)
        self._holders = {(id(holder.owner), holder.kind): holder for holder in fresh}
        self.space: dict[str, Any] = {
            "_same": same_plain,
            "_keys": table.dispatch_keys,
            "_fingerprint": fingerprint,
            "_own_dict": own_dict,
            "_same_array": _same_array,
        }
        self._lines: list[Line] = []
        self._forms_seen: list[_Form] = []  # of tensors that torch compares all at once
        self.variables: dict[int, str] = {}  # fresh objects met so far
        self.tensors: dict[int, str] = {}  # tensors met so far, by identity
        self.members: dict[int, str] = {}  # objects that are keys, or in sets: what compares them
        self.plain: list[tuple[str, object]] = []  # values of which Python can have several
        self.opened: set[str] = set()  # labels of what is open and was met so far
        self._alive: list[object] = []

    # --- building blocks ---

    def constant(self, value: object) -> str:
        """A name for a value in the generated code."""
        name = f"k{len(self.space)}"
        self.space[name] = value
        return name

    def assign(self, expression: str, row: TableRow | None = None) -> str:
        """A variable for what an expression gives."""
        name, row = f"v{len(self._lines)}", row or find_row(expression)
        self._lines.append(Assignment(name, expression, () if row is None else (row,)))
        return name

    def check(self, path: str, condition: str, expected: str, found: str, *rows: TableRow) -> None:
        """Add a condition; rows that ask the same may stand for it."""
        self._lines.append(Check(path, condition, expected, found, rows))

    def name_it(self, label: str, expression: str) -> None:
        """Give what an expression gives its name in conditions."""
        self.opened.add(label)
        self._lines.append(Assignment(label, expression))

    def add_open(self, path: str, name: str, number: OpenNumber) -> None:
        """A number that is open: of its type, and no larger than what a graph computes with.

        One that another place of the same path holds has its name: they are equal.
        """
        kind = number.kind.__name__ if id(number.kind) in PLAIN else self.constant(number.kind)
        if number.label in self.opened:
            condition = f"type({name}) is {kind} and {name} == {number.label}"
            self.check(path, condition, "one number", f"_fingerprint({name})")
            return
        condition, expected = f"type({name}) is {kind}", f"a {number.kind.__name__}"
        if number.kind is int:
            condition = f"{condition} and {-LARGEST_OPEN} <= {name} <= {LARGEST_OPEN}"
            expected = "an int of 32 bits"
        self.check(path, condition, expected, f"_fingerprint({name})")
        self.name_it(number.label, name)

    def has_any(self, kinds: tuple[type, ...]) -> bool:
        """Whether an argument, or something in one, is of these classes."""
        return any(issubclass(type(value), kinds) for value in self._alive)

    @property
    def containers(self) -> list[str]:
        """Variables of the lists and sets among the arguments."""
        return [self.variables[id(one)] for one in self._alive if isinstance(one, (list, set))]

    # --- values ---

    def add(self, path: str, expression: str, value: object, row: TableRow | None = None) -> None:
        """Checks for one value and all that the run could read below it."""
        name = self.assign(expression, row)
        if id(type(value)) in PROXIES:
            self._add_proxy(path, name, value)
        elif isinstance(value, torch.Tensor):
            self._add_tensor(path, name, value)
        elif (opened := self._find_open(path, value)) is not None:
            self.add_open(path, name, opened)
        elif id(type(value)) in PLAIN or type(value) is slice:
            self._add_plain(path, name, value)
        elif id(value) in self.variables:
            self._check_same(path, name, self.variables[id(value)], "an object passed twice")
            if self._holds_open(path, value):  # its numbers are named once for each path
                self._add_object(path, name, value)
        else:
            self._alive.append(value)
            self._add_object(path, name, value)

    def _find_open(self, path: str, value: object) -> OpenNumber | None:
        """The open number that it is."""
        found = None if self._shadow is None else self._shadow.numbers.get(path)
        return found if found is not None and found.was(value) else None

    def _holds_open(self, path: str, value: object) -> bool:
        """Whether it is a tuple of which numbers are open."""
        opened = {} if self._shadow is None else self._shadow.numbers
        return bool(opened) and any(step in opened for step, _ in iter_numbers(value, path))

    def _check_same(self, path: str, name: str, other: str, expected: str) -> None:
        row = TableRow("same", name, all_of=(other,))
        self.check(path, f"{name} is {other}", expected, "'another'", row)

    def _add_proxy(self, path: str, name: str, proxy: object) -> None:
        """A weak proxy: it must be one, and what it stands for must be there."""
        cls = self.constant(type(proxy))
        self.check(path, f"type({name}) is {cls}", "a weak proxy", f"type({name}).__name__")
        behind = self.assign(f"{self.constant(behind_proxy)}({name})")
        self.check(path, f"{behind} is not None", "an object", "'gone'")
        self.add(path, behind, behind_proxy(proxy))

    def _add_plain(self, path: str, name: str, value: object) -> None:
        found = f"_fingerprint({name})"
        cls = type(value)
        if cls in _SEVERAL:
            self.plain.append((name, value))
        if value is None or cls is bool or value is ...:
            condition, row = f"{name} is {value!r}", TableRow("is", name, x=value)
        elif cls is int or cls is str:
            condition = f"type({name}) is {cls.__name__} and {name} == {value!r}"
            row = TableRow("equal", name, x=value)
        elif value != value:  # one nan isn't another to `in`
            condition, row = f"{name} is {self.constant(value)}", TableRow("is", name, x=value)
        else:
            condition = f"_same({name}, {self.constant(value)})"
            row = TableRow("test", name, x=functools.partial(same_plain, value))
        expected = str(fingerprint(value)) if value == value else f"that {value}, not another"
        self.check(path, condition, expected, found, row)

    def _add_tensor(self, path: str, name: str, tensor: torch.Tensor) -> None:
        if id(tensor) in self.tensors:
            self._check_same(path, name, self.tensors[id(tensor)], "one tensor passed twice")
            return
        self.tensors[id(tensor)] = name
        self._alive.append(tensor)
        self.check_tensor(path, name, tensor)

    def check_tensor(self, path: str, name: str, tensor: torch.Tensor) -> None:
        """A tensor's class and metadata."""
        meta, traits = self._forms.get(id(tensor)) or (meta_of(tensor), traits_of(tensor))
        opened = None if self._shadow is None else self._shadow.fakes.find_opened(tensor)
        if opened is not None:
            parts = self._spell_kind(name, tensor, meta, traits)
            parts.append(f"{name}.dim() == {len(meta.shape)}")
            self.name_it(opened.label, name)
        elif id(traits.cls) in PLAIN_TENSORS:
            parts = self._spell_kind(name, tensor, meta, traits)
            parts.append(f"{name}.shape == {self.constant(torch.Size(meta.shape))}")
            if meta.stride is not None:
                parts.append(f"{name}.stride() == {meta.stride!r}")
            if meta.sparse is not None:
                parts.append(f"{self.constant(sparse_form)}({name}) == {meta.sparse!r}")
        else:  # whose `__torch_function__` would be told
            form, keys = self.constant(table.form_of), table.dispatch_keys(tensor)
            seen = self.constant((*table.select_form(meta, traits), keys))
            parts = [f"type({name}) is {self.constant(traits.cls)}", f"{form}({name}) == {seen}"]
        if traits.wrapped is not None:
            wrapped = self.constant(traits.wrapped)
            parts.append(f"{self.constant(wraps_of)}({name}) == {wrapped}")
        for query in sorted(_QUERIES & self._reads.names):
            answer = self.constant(table.ask(tensor, query))
            parts.append(f"{self.constant(table.ask)}({name}, {query!r}) == {answer}")
        attributes = self._attributes.get(id(tensor), {})
        parts.append(self.spell_attributes(path, name, attributes))
        describe, rows = self.constant(table.describe_tensor), []
        if traits.wrapped is None and not _QUERIES & self._reads.names:
            names = self._reads.names - attributes.keys()
            if not self._reads.is_dynamic:
                rows = self._rows_of(name, tensor, meta, traits, names, is_open=opened is not None)
        condition, found = " and ".join(parts), f"{describe}({name})"
        self.check(path, condition, table.describe_tensor(tensor), found, *rows)
        if self._offsets_matter:
            self.check_offset(path, name, tensor)

    def _rows_of(
        self,
        name: str,
        tensor: torch.Tensor,
        meta: TensorMeta,
        traits: Traits,
        names: frozenset[str],
        *,
        is_open: bool,
    ) -> list[TableRow]:
        """What of a tensor is asked by itself; the rest of its form is compared with others'."""
        if table.Table is None or not table.can_compare_forms():
            return []
        now = (meta_of(tensor), traits_of(tensor)[:3])  # the run may have changed it in place
        is_as_found = now == (meta, traits[:3]) and id(traits.cls) in PLAIN_TENSORS
        if not is_as_found or torch.is_inference_mode_enabled():
            return []
        if meta.stride is None or tensor.is_nested:
            return []
        sizes: list[int | None] = [None if is_open else size for size in meta.shape]
        strides: list[int | None] = [None if is_open else stride for stride in meta.stride]
        self._forms_seen.append((tensor, sizes, strides))
        leaf = 1 + traits.is_leaf if meta.requires_grad else 0
        return [TableRow("tensor", name, leaf, x=traits.cls, y=names, z=table.HAS_FORM)]

    def _compare_forms(self) -> None:
        """Compare what torch knows of tensors, all at once, at the last of their checks."""
        for index in reversed(range(len(self._lines)) if self._forms_seen else ()):
            line = self._lines[index]
            if line.rows and line.rows[-1].op == "tensor":
                row = TableRow("forms", x=table.compare_forms(self._forms_seen))
                self._lines[index] = replace(line, rows=(*line.rows, row))
                break

    def check_offset(self, path: str, name: str, tensor: torch.Tensor) -> None:
        """Where a tensor begins in its memory: asked only where the call depends on it."""
        form = self._forms.get(id(tensor))
        seen = traits_of(tensor).offset if form is None else form[1].offset
        if seen is not None:
            found = f"{self.constant(table.ask)}({name}, 'storage_offset')"
            self.check(f"{path}.storage_offset()", f"{found} == {seen}", str(seen), found)

    def _spell_kind(
        self, name: str, tensor: torch.Tensor, meta: TensorMeta, traits: Traits
    ) -> list[str]:
        """All of a tensor's form but its sizes and strides."""
        parts = [
            f"type({name}) is {self.constant(traits.cls)}",
            f"{name}.dtype is {self.constant(meta.dtype)}",
            f"_keys({name}) == {self.constant(table.dispatch_keys(tensor))}",
            f"{name}.requires_grad is {meta.requires_grad}",
        ]
        if meta.requires_grad:
            parts.append(f"bool({self.constant(find_leaf)}({name})) is {traits.is_leaf}")
        if meta.device.type != "cpu":
            parts.append(f"{name}.device == {self.constant(meta.device)}")
        return parts

    def spell_attributes(self, path: str, name: str, attributes: dict[str, object]) -> str:
        """Checks for a tensor's own attributes; a condition that it has no others."""
        names = self._reads.names
        held = {k: v for k, v in attributes.items() if k in names or self._reads.is_dynamic}
        for attribute, value in held.items():
            self.add(f"{path}.{attribute}", f"{name}.__dict__[{attribute!r}]", value)
        if self._reads.is_dynamic:
            return f"list({name}.__dict__) == {list(held)!r}"
        rest = self.constant(names - held.keys())
        return f"(not {name}.__dict__ or {name}.__dict__.keys().isdisjoint({rest}))"

    def _add_object(self, path: str, name: str, value: Any) -> None:
        self.variables[id(value)] = name
        cls = type(value)
        if is_pinned(value) or self._is_opaque(value):
            self._pin(path, name, value)
            if issubclass(cls, ContextVar):
                self._add_context_variable(path, name, value)
            return
        if id(value) in self._constants:
            self._pin(path, name, value)
        condition, found = f"type({name}) is {self.constant(cls)}", self.constant(name_of)
        row = TableRow("type", name, x=cls)
        self.check(path, condition, f"a {name_of(cls)}", f"{found}(type({name}))", row)
        for plain in (make for base, make in _PLAIN_BASES.items() if isinstance(value, base)):
            found, seen = f"{self.constant(plain)}({name})", plain(value)
            self.check(path, f"_same({found}, {self.constant(seen)})", repr(seen), found)
        if issubclass(cls, (MethodType, functools.partial)):
            for part, held in parts_of(value):
                self.add(f"{path}.{part}", f"{name}.{part}", held)
        elif issubclass(cls, weakref.ReferenceType):  # what it leads to, or that it is gone
            found = f"{self.constant(weakref.ref.__call__)}({name})"
            self.add(f"{path}()", found, self._before(value, WEAK).get("()"))
        elif issubclass(cls, BuiltinMethodType):  # C has a subclass of it
            found = f"{name}.__name__"
            self.check(f"{path}.__name__", f"{found} == {value.__name__!r}", value.__name__, found)
            self.add(f"{path}.__self__", f"{name}.__self__", value.__self__)
        elif is_exactly(value, *VIEWS):
            behind = f"{self.constant(dict_behind)}({name}.mapping)"
            self.add(f"{path}.mapping", behind, dict_behind(value.mapping))
        elif issubclass(cls, MappingProxyType):
            self.add(path, f"{self.constant(dict_behind)}({name})", dict_behind(value))
        elif issubclass(cls, tuple):
            self._add_elements(path, name, value, tuple, self._reads.find_places(value))
        elif issubclass(cls, (list, deque)):
            self._add_list(path, name, value)
        elif issubclass(cls, dict):
            self._add_items(path, name, value)
        elif issubclass(cls, (set, frozenset)):
            self._add_members(path, name, value)
        elif is_array(value) or isinstance(value, BYTES):
            seen = self.constant(self._before(value, ARRAY)["values"])
            self.check(path, f"_same_array({name}, {seen})", "equal values", "'other values'")
        self._add_attributes(path, name, value)

    def _add_context_variable(self, path: str, name: str, variable: ContextVar[object]) -> None:
        """What it is set to in the caller's context, or the default that it has there."""
        before = self._before(variable, CONTEXT)
        found = f"{self.constant(CONTEXT.read)}({name})[0]"
        self.check(path, f"{found} == {tuple(before)!r}", "set" if before else "unset", found)
        value = before.get("get()", CONTEXT.default_of(variable))
        if value is not ABSENT:
            self.add(f"{path}()", f"{name}.get()", value)

    def _is_opaque(self, value: object) -> bool:
        return not (isinstance(value, _TAKEN_APART) or is_array(value) or shows_all(value))

    def _before(self, value: object, kind: Kind) -> dict[Any, object]:
        """What a value held before the run, or holds now where the run didn't come to it."""
        holder = self._holders.get((id(value), kind))
        return dict(zip(*kind.read(value), strict=True)) if holder is None else holder.before()

    def _pin(self, path: str, name: str, value: object) -> None:
        kept = self.constant(Kept(value))
        what = str(fingerprint(value))
        found = f"f'another {{_fingerprint({name})}}'"
        row = TableRow("test", name, x=self.space[kept].is_same)
        self.check(path, f"{kept}.is_same({name})", what, found, row)

    def _add_list(self, path: str, name: str, value: Any) -> None:
        if isinstance(value, deque):
            longest, limit = f"{self.constant(_LONGEST)}({name})", repr(value.maxlen)
            self.check(f"{path}.maxlen", f"{longest} == {limit}", limit, longest)
        holder = self._holders.get((id(value), ELEMENTS))
        if holder is None or self._reads.filter_of(holder) is None:
            base, now = deque if isinstance(value, deque) else list, elements_of(value)
            before = now if holder is None else tuple(holder.before().values())
            is_as_before = len(before) == len(now) and all(map(operator.is_, before, now))
            places = self._reads.find_places(value) if is_as_before else None
            self._add_elements(path, name, before, base, places)

    def _add_elements(
        self, path: str, name: str, values: Any, base: type, places: frozenset[int] | None
    ) -> None:
        # A subclass may answer with code of its own, which is none of the guards' business.
        kind: Any = base
        length, item = self.constant(kind.__len__), self.constant(kind.__getitem__)
        is_quick, count = base is not deque, len(values)
        found, rows = f"{length}({name})", [TableRow("length", name, count)] if is_quick else []
        if places is None:
            self.check(path, f"{found} == {count}", f"length {count}", found, *rows)
        fields = type(values)._fields if is_namedtuple(type(values)) else None
        for index, value in enumerate(values):
            if places is not None and index not in places:
                continue
            label = f"{path}[{index}]" if fields is None else f"{path}.{fields[index]}"
            row = TableRow("item", name, index) if is_quick else None
            self.add(label, f"{item}({name}, {index})", value, row)

    def _add_items(self, path: str, name: str, value: dict[Any, Any]) -> None:
        holder = self._holders.get((id(value), ITEMS))
        before = dict(value) if holder is None else holder.before()
        wanted = None if holder is None else self._reads.filter_of(holder)
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        get, has = self.constant(held_item), self.constant(dict.__contains__)
        if wanted is None:
            keys, rows = self.constant(kind.keys), []
            if all(type(key) is str for key in before):
                if kind is dict:  # the order of the other is its own
                    rows = [TableRow("keys", name, x=tuple(before))]
                condition = f"list({keys}({name})) == {self.constant(list(before))}"
            else:
                kept = self.constant([Kept(plain_key(key)) for key in before])
                condition = f"{self.constant(_same_keys)}(list({keys}({name})), {kept})"
            found = f"{self.constant(_spell_keys)}({keys}({name}))"
            expected = f"keys {_spell_keys(map(plain_key, before)):.80}"
            self.check(path, condition, expected, found, *rows)
        self._note_members(map(plain_key, before))
        for key in wanted or ():
            present = key in before
            condition = f"{has}({name}, {self.constant(key)}) is {present}"
            there = "there" if present else "nothing"
            row = TableRow("has", name, int(present), x=key)
            self.check(f"{path}[{spell_key(key)}]", condition, there, "'the contrary'", row)
        at = ""  # where the values are by position
        for index, (key, item) in enumerate(before.items()):
            if wanted is not None and key not in wanted:
                continue
            label = f"{path}[{spell_key(plain_key(key))}]"
            if wanted is None and isinstance(plain_key(key), torch.Tensor):  # guards hold none
                at = at or self.assign(f"list({self.constant(kind.values)}({name}))")
                self.add(label, f"{at}[{index}]", item)
            else:
                spelled = repr(key) if is_exactly(key, str, int) else self.constant(key)
                self.add(label, f"{get}({name}, {spelled})", item, TableRow("get", name, x=key))

    def _note_members(self, members: Iterable[object]) -> None:
        """Objects that are found by which they are: something that is passed may be one of them."""
        found = [*members]
        while found:
            value = found.pop()
            if is_exactly(value, tuple, frozenset):
                found += elements_of(value)
            elif isinstance(value, weakref.ReferenceType):
                found.append(value())
            elif id(type(value)) not in PLAIN:
                self.members[id(value)] = self.constant(Kept(value))

    def _add_members(self, path: str, name: str, value: Any) -> None:
        """Equal sets can be walked through in different orders."""
        held = self._holders.get((id(value), MEMBERS))
        kind: Any = set if isinstance(value, set) else frozenset
        members = tuple(kind.__iter__(value) if held is None else held.before().values())
        self._note_members(members)
        kept, walk = self.constant(list(map(Kept, members))), self.constant(kind.__iter__)
        condition = f"{self.constant(_same_keys)}(list({walk}({name})), {kept})"
        self.check(path, condition, "equal values in one order", "'other values'")

    def _add_attributes(self, path: str, name: str, value: object) -> None:
        held: dict[Any, object] = {}
        counted: set[Any] = set()
        for kind in (ATTRIBUTES, SLOTS):
            holder = self._holders.get((id(value), kind))
            if holder is None and kind is ATTRIBUTES:
                holder = self._holders.get((id(value), THREAD_LOCAL))
            if holder is None:
                if own_dict(value) if kind is ATTRIBUTES else slots_of(type(value)):
                    self._pin(path, name, value)  # nobody knows what was there before the run
                continue
            wanted = self._reads.filter_of(holder)
            before = holder.before()
            held |= before if wanted is None else {k: v for k, v in before.items() if k in wanted}
            counted |= {k for k in before if (id(holder), k) in self._counted}
            if kind is SLOTS:
                self._check_empty_slots(path, name, value, wanted, holder.keys)
            else:
                self._check_absences(path, name, wanted, frozenset(holder.keys))
        for attribute, item in held.items():
            get = f"{name}.{attribute}"
            row: TableRow | None = TableRow("attr", name, x=attribute)
            spelled = attribute.isidentifier() and not iskeyword(attribute)
            if hides_own(type(value), attribute):
                row, get = None, f"_own_dict({name})[{attribute!r}]"
            elif not spelled or answers_itself(type(value)):
                row = None
                get = f"{self.constant(object.__getattribute__)}({name}, {attribute!r})"
            if attribute in counted:
                self._add_counter(f"{path}.{attribute}", self.assign(get, row), type(item))
            else:
                self.add(f"{path}.{attribute}", get, item, row)

    def _add_counter(self, path: str, name: str, cls: type) -> None:
        """A number that the run only counts on: it must be there, and of its type."""
        kind, row = cls.__name__, TableRow("type", name, x=cls)
        self.check(path, f"type({name}) is {kind}", f"a {kind}", f"_fingerprint({name})", row)

    def _check_empty_slots(
        self, path: str, name: str, value: object, wanted: frozenset[Any] | None, filled: Any
    ) -> None:
        for slot, descriptor in slots_of(type(value)).items():
            if slot not in filled and (wanted is None or slot in wanted):
                is_empty = self.constant(functools.partial(_is_empty, descriptor))
                self.check(f"{path}.{slot}", f"{is_empty}({name})", "nothing", "'something'")

    def _check_absences(
        self, path: str, name: str, wanted: frozenset[Any] | None, before: frozenset[Any]
    ) -> None:
        space = f"_own_dict({name})"
        if wanted is None:
            condition = f"{space}.keys() == {self.constant(before)}"
        else:
            condition = f"{space}.keys().isdisjoint({self.constant(wanted - before)})"
        self.check(path, condition, "no other attributes", f"list({space})")

    # --- the function ---

    def build(self, returned: list[str]) -> Guards:
        """Write and compile the function, which returns these where it admits."""
        self._compare_forms()
        return build_guards(tuple(self._lines), tuple(returned), self.space)


_Form = tuple[torch.Tensor, list[int | None], list[int | None]]
_SEVERAL = (int, float, complex, str, bytes, range, slice, torch.Size, torch.device)
# What Python can ask a tensor beside its metadata; asked only where executed code names it.
_QUERIES = words("_is_view is_shared is_pinned qscheme")
_LONGEST = vars(deque)["maxlen"].__get__  # runs no code of a subclass

# Subclasses of these hold a value that no attribute shows.
_PLAIN_BASES: dict[type, Callable[[Any], object]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}
_TAKEN_APART = (
    *(tuple, list, dict, set, frozenset, deque, *BYTES, *_PLAIN_BASES),
    *(MethodType, functools.partial, weakref.ReferenceType, MappingProxyType),
    *(BuiltinMethodType, *VIEWS),
)


def _is_empty(slot: Any, value: object) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return True
    return False


def _same_array(value: Any, seen: object) -> bool:
    return bool(ARRAY.read(value)[1][0] == seen)


def _spell_keys(keys: Iterable[object]) -> str:
    return f"[{', '.join(map(spell_key, keys))}]"


def _same_keys(value: list[Any], keys: list[Kept]) -> bool:
    return len(value) == len(keys) and all(map(Kept.is_same, keys, value))
