"""Draft: a record that is being made, from the values that it starts from.

Objects are captured when they are added. The bytes of tensors are read when the file is written, so
that a call can run in between, and only what it changes needs to be copied. What looks like a
secret is removed from all of it.
"""

from __future__ import annotations

import contextlib
import io
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tripwire.reading.names import find_steps
from tripwire.recording.capture.code import Programs
from tripwire.recording.capture.encode import Encoder
from tripwire.recording.capture.origin import KEEP_ALL, Blobs, Policy
from tripwire.recording.capture.shelf import find_moved
from tripwire.recording.format import nodes
from tripwire.recording.format.checks import find_slot_fields, slots_of
from tripwire.recording.format.file import NewRecord
from tripwire.recording.format.manifest import Manifest, Omission, Raised, encode_json
from tripwire.recording.format.nodes import AnyNode, Slot, Table
from tripwire.redaction import Redactor, find_name, is_paired, is_secret_name
from tripwire.values.contents import all_codes

if TYPE_CHECKING:
    from torch import Tensor

    from tripwire.recording.capture.habits import Habits


class RecordDraft:
    """Roots by name, and everything that they lead to."""

    def __init__(self, policy: Policy = KEEP_ALL) -> None:
        self.policy = policy
        self.blobs = Blobs(policy)
        self._programs = Programs()
        self._roots: dict[str, nodes.Slot] = {}
        self._encoder = Encoder(self.blobs, policy, self._programs.encode, self._programs.names)

    def add(self, name: str, value: object) -> None:
        """Take a value down, as it is now."""
        self._roots[name] = self._encoder.slot(value, name)
        self._encoder.advance()

    @property
    def met(self) -> list[object]:
        """Every object that was met."""
        return self._encoder.values

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that was met."""
        import torch

        met = self._encoder.values
        return (cast("Tensor", v) for v in met if issubclass(type(v), torch.Tensor))

    def habits(self) -> Habits:
        """What the code that was taken down may do."""
        from tripwire.recording.capture.habits import find_habits  # needs torch

        return find_habits(self._programs.codes.all, self._encoder.values)

    def find_names(self) -> frozenset[str]:
        """Names of globals and attributes in the code that was taken down."""
        codes = (one for code in self._programs.codes.all for one in all_codes(code))
        return frozenset(name for code in codes for name in code.co_names)

    def is_like(self, other: RecordDraft) -> bool:
        """Whether two drafts hold the same, but for the bytes of tensors. Finishes both."""
        return self._describe() == other._describe()

    def _describe(self) -> tuple[bytes, list[bytes]]:
        arrays = [b"".join(kept.chunks()) for kept in self.blobs.arrays()]
        return encode_json(self.finish()), arrays

    def finish(self) -> nodes.Table:
        """The table; nothing can be added any more."""
        table = self._encoder.finish(self._roots)
        return msgspec.structs.replace(table, codes=self._programs.codes.table())

    def build(self, manifest: Manifest) -> NewRecord:
        """The record, to be written."""
        self._programs.take_loaded(self._encoder)
        table = self.finish()
        manifest = msgspec.structs.replace(
            manifest,
            omissions=(*manifest.omissions, *self._encoder.left_out),
            policy=self.policy.describe(),
        )
        codes, redactor = self._programs.codes, Redactor()
        cleaner = Cleaner(table, codes.all, redactor)
        cleaner.learn()
        sources = codes.sources()
        cleaned = cleaner.clean_sources(sources)
        files = cleaned | codes.marshalled(cleaner.clean_code)
        table = _relocate(cleaner.clean_table(), sources, cleaned)
        manifest = clean_manifest(manifest, redactor)
        manifest = msgspec.structs.replace(manifest, holds=find_kinds(table, files, manifest))
        return NewRecord(manifest, table, self.blobs.settled, files)


# --- secrets ---
#
# Names tell first, wherever they are: of attributes, keys, globals, cells, defaults, and in source.
# Then every text is gone through, so that a password is nowhere, in no argument without a name and
# in no constant of code either. A mark stands in its place: a replay runs, and says so.


_HELD = (nodes.Tuple, nodes.List, nodes.Set, nodes.Deque, nodes.NamedTuple)
_Named = Iterator[tuple[str, Slot]]


class Cleaner:
    """Removes the secrets of one record. It finds all of them before it replaces any."""

    def __init__(self, table: Table, codes: Sequence[types.CodeType], redactor: Redactor) -> None:
        self._table = table
        self._codes = codes
        self._redactor = redactor

    def learn(self) -> None:
        """Find what stands under names that secrets have."""
        named = [pair for node in self._table.nodes for pair in self._named(node)]
        for name, slot in (*self._table.roots.items(), *named):
            self._learn_slot(name, slot, set())
        for code, kept in zip(self._codes, self._table.codes, strict=True):
            for one in all_codes(code) if kept.source is None else ():
                for name, value in _find_named_constants(one):
                    self._learn_slot(name, value, set())

    def _named(self, node: AnyNode) -> _Named:
        """Slots of a node with the names that code has for them."""
        match node:
            case nodes.Dict():
                texts = map(self._text_of, node.keys)
                held = {t: v for t, v in zip(texts, node.values, strict=True) if t is not None}
                yield from held.items()
                # {"name": "DB_PASSWORD", "value": "x"}; so are the fields of dataclasses written
                name = self._text_of(held.get("name")) or self._text_of(held.get("key"))
                if name is not None:
                    yield from ((name, held[key]) for key in ("value", "default") if key in held)
            case nodes.NamedTuple():
                cls = self._table.nodes[node.cls[0]]
                detail = cls.detail if isinstance(cls, nodes.Class) else None
                fields = dict(nodes.read_dict(self._table, detail)).get("fields")
                yield from self._pair(self._items_of(fields), node.items)
            case nodes.Tuple(items=(name, value)) | nodes.List(items=(name, value)):
                name, text = self._text_of(name), self._text_of(value)
                if name is not None and text is not None and is_paired(text):
                    yield name, value
            case nodes.Wrapped(form="partial"):
                yield from self._pair(*map(self._items_of, node.parts[2:4]))
            case nodes.EnumMember():
                yield node.name or "", node.value
            case nodes.Object():
                yield from zip(node.names, node.values, strict=True)
                yield from zip(node.slots, node.slot_values, strict=True)
            case nodes.ModuleObject():
                form = self._table.nodes[node.form[0]]
                assert isinstance(form, nodes.ModuleForm)
                yield from zip((*form.names, *form.keys), node.values, strict=True)
            case nodes.Class() | nodes.Namespace() | nodes.Module() | nodes.TensorExtras():
                yield from zip(node.names, node.values, strict=True)
            case nodes.Function():
                code = self._codes[node.code]
                for name, cell in zip(code.co_freevars, node.closure, strict=False):
                    found = self._table.nodes[cell[0]]
                    yield name, found.content if isinstance(found, nodes.CellNode) else None
                defaults = self._items_of(node.defaults)
                yield from zip(_names_of_defaults(code, len(defaults)), defaults, strict=False)

    def _pair(self, names: tuple[Slot, ...], values: tuple[Slot, ...]) -> _Named:
        return ((self._text_of(name) or "", v) for name, v in zip(names, values, strict=False))

    def _items_of(self, slot: Slot) -> tuple[Slot, ...]:
        found = self._node_of(slot)
        return found.items if isinstance(found, nodes.Tuple) else ()

    def _learn_slot(self, name: str, slot: Slot, seen: set[int]) -> None:
        text = self._text_of(slot)
        if text is not None:
            self._redactor.learn(text, name)
            return
        node = self._node_of(slot)
        if node is None or id(node) in seen or not is_secret_name(name):
            return
        # What a secret holds is secret: a list of keys, a path, a str's subclass.
        seen.add(id(node))
        inside: tuple[Slot, ...] = ()
        if isinstance(node, _HELD):
            inside = node.items
        elif isinstance(node, nodes.Dict):
            names = (find_name(self._text_of(key) or "", name) for key in node.keys)
            inside = tuple(v for n, v in zip(names, node.values, strict=True) if n is not None)
        elif isinstance(node, nodes.CallNode):
            inside = node.args
        elif isinstance(node, nodes.Object):
            inside = (node.content,)
        for item in inside:
            self._learn_slot(name, item, seen)

    def _node_of(self, slot: Slot) -> AnyNode | None:
        return self._table.nodes[slot[0]] if isinstance(slot, tuple) else None

    def _text_of(self, slot: Slot) -> str | None:
        if isinstance(slot, str):
            return slot
        node = self._node_of(slot)
        if isinstance(node, nodes.String):
            return node.text
        if isinstance(node, (nodes.Bytes, nodes.Text)):
            with contextlib.suppress(UnicodeDecodeError):
                return node.data.decode("utf-8", "surrogatepass")
        return None

    # --- replacing ---

    def clean_sources(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Source without secrets; those are known from then on."""
        return {name: self._clean_source(data) for name, data in files.items()}

    def _clean_source(self, data: bytes) -> bytes:
        text = data.decode("utf-8", "surrogatepass")
        return self._redactor.clean_source(text).encode("utf-8", "surrogatepass")

    def clean_code(self, code: types.CodeType) -> types.CodeType:
        """A code object whose constants are without them."""
        consts = tuple(map(self._clean_constant, code.co_consts))
        same = all(a is b for a, b in zip(consts, code.co_consts, strict=True))
        return code if same else code.replace(co_consts=consts)

    def _clean_constant(self, value: object) -> object:
        if type(value) is str:
            cleaned = self._redactor.clean(value)
            return value if cleaned == value else cleaned
        if type(value) is bytes:
            return self._redactor.clean_bytes(value)
        if type(value) is types.CodeType:
            return self.clean_code(value)
        if type(value) is tuple or type(value) is frozenset:
            parts = tuple(map(self._clean_constant, value))
            if type(value) is tuple and len(value) == 2 and all(type(v) is str for v in value):
                if is_paired(value[1]):  # ("password", "x")
                    parts = value[0], self._redactor.clean(value[1], value[0])
            same = all(a is b for a, b in zip(parts, value, strict=True))
            return value if same else type(value)(parts)
        return value

    def clean_table(self) -> Table:
        """The table without secrets."""
        roots = {name: self._clean_slot(slot, name) for name, slot in self._table.roots.items()}
        cleaned = tuple(map(self._clean_node, self._table.nodes))
        return msgspec.structs.replace(self._table, roots=roots, nodes=cleaned)

    def _clean_node(self, node: AnyNode) -> AnyNode:
        if isinstance(node, nodes.String):
            return nodes.String(self._redactor.clean(node.text))
        if isinstance(node, nodes.Bytes):
            return nodes.Bytes(self._redactor.clean_bytes(node.data), node.mutable)
        names = {id(slot): name for name, slot in self._named(node) if isinstance(slot, str)}
        changed: dict[str, Any] = {}
        for field, is_many in find_slot_fields(type(node)):
            before = getattr(node, field)
            slots = before if is_many else (before,)
            cleaned = tuple(self._clean_slot(slot, names.get(id(slot))) for slot in slots)
            after = cleaned if is_many else cleaned[0]
            if after != before:
                changed[field] = after
        return cast("AnyNode", msgspec.structs.replace(node, **changed)) if changed else node

    def _clean_slot(self, slot: Slot, name: str | None) -> Slot:
        return self._redactor.clean(slot, name) if isinstance(slot, str) else slot


def _find_named_constants(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Texts in code with their names: `password = "x"`, `password == "x"`, `f(password="x")`."""
    steps = [*find_steps(code)]
    for number, step in enumerate(steps):
        after = steps[number + 1].opname if number + 1 < len(steps) else ""
        if step.opname == "LOAD_CONST" and isinstance(step.argval, str):
            if after.startswith("STORE_"):
                yield str(steps[number + 1].argval), step.argval
            elif after == "COMPARE_OP" and number:
                yield str(steps[number - 1].argval), step.argval
        elif step.opname == "KW_NAMES" or (
            step.opname == "LOAD_CONST" and after in ("BUILD_CONST_KEY_MAP", "CALL_KW")
        ):
            found = code.co_consts[step.arg or 0]  # dis doesn't look it up on Python 3.11
            names = found if isinstance(found, tuple) else ()
            for name, given in zip(reversed(names), reversed(steps[:number]), strict=False):
                if given.opname != "LOAD_CONST":
                    break  # what comes before it isn't known to be one step each
                if isinstance(given.argval, str):
                    yield name, given.argval


def _relocate(table: Table, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Table:
    """The table with the columns that functions have now: marks moved what stands behind them."""
    lines = {name: (_lines_of(before[name]), _lines_of(after[name])) for name in before}
    codes = tuple(
        code if code.source is None else _relocate_code(code, *lines[code.source])
        for code in table.codes
    )
    return msgspec.structs.replace(table, codes=codes)


def _relocate_code(code: nodes.Code, before: list[str], after: list[str]) -> nodes.Code:
    first, count = code.lines
    old, new = before[first : first + count], after[first : first + count]
    if old == new:
        return code
    moved = find_moved(old, new, code.line, code.place)
    if moved is None:  # it has its marshalled form
        return msgspec.structs.replace(code, source=None, further=(0, 0), lines=(0, 0))
    return msgspec.structs.replace(code, further=(moved[0] - code.line, moved[1]))


def _lines_of(source: bytes) -> list[str]:
    return io.StringIO(source.decode("utf-8", "surrogatepass")).readlines()


def _names_of_defaults(code: types.CodeType, count: int) -> tuple[str, ...]:
    return code.co_varnames[code.co_argcount - count : code.co_argcount]


def clean_manifest(manifest: Manifest, redactor: Redactor) -> Manifest:
    """What a record says of itself without secrets, and how many there were."""
    outcome = manifest.outcome
    if isinstance(outcome, Raised):
        outcome = msgspec.structs.replace(outcome, message=redactor.clean(outcome.message))
    omissions = tuple(
        Omission(redactor.clean(one.what), redactor.clean(one.why)) for one in manifest.omissions
    )
    return msgspec.structs.replace(
        manifest, outcome=outcome, omissions=omissions, redacted=tuple(redactor.found)
    )


def find_kinds(table: Table, files: Mapping[str, bytes], manifest: Manifest) -> tuple[str, ...]:
    """What of the user's is in a record, in words."""
    met = {type(node) for node in table.nodes}
    slots = [slot for node in table.nodes for slot in slots_of(node)]
    found = {
        "source code": any(name.startswith("src/") for name in files),
        "compiled code": any(name.startswith("code/") for name in files),
        "texts": nodes.String in met or any(isinstance(slot, str) for slot in slots),
        "numbers": any(type(slot) in (int, float) for slot in slots),
        "bytes": nodes.Bytes in met,
        "values of tensors": bool(met & {nodes.Tensor, nodes.TensorView}),
        "values of arrays": nodes.Array in met,
        "paths of files": bool(manifest.function.file or table.codes),
        "the message of an error": isinstance(manifest.outcome, Raised),
        "names of installed packages": bool(manifest.packages),
    }
    return tuple(kind for kind, is_there in found.items() if is_there)
