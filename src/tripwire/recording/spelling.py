"""Spelling: a table as the text of objects.json, and back.

The text is JSON, one code or node a line. So a reader checks a file line by line and keeps none
of it before all of it is known to be sound. And it is short: a model has thousands of modules
that differ in a number or two, and a record promises to be hardly larger than its tensors. What
modules have in common is said once; tensors that are nothing but a blob follow one another.
docs/record-format.md has the rules.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, cast

import msgspec

from tripwire.errors import BadRecord
from tripwire.recording import nodes
from tripwire.recording.blobs import BlobRun, StoredBlobs
from tripwire.recording.checks import (
    LARGEST_LINE,
    MEMORY_FLOOR,
    NODE_TYPES,
    check_code,
    check_node,
    check_slot,
    check_tensors,
    estimate_memory,
    find_slot_fields,
)
from tripwire.recording.container import damaged
from tripwire.recording.nodes import AnyNode, Index, Reference, Slot

# How many tensors, the number of the first one's blob, their kind, their device.
TensorRun = tuple[Index, Index, str, str]
Word = str | Index  # itself, or its number among the words of the first line

_LONGEST = 1000  # items in a line; a container has more lines for the rest
_FEW = 16  # a value that so few parts of the modules differ in makes forms of their own
_CODES, _NODES = b',"codes":[', b'],"nodes":['
_END = b"]}"
_T = TypeVar("_T")


# --- lines that aren't a node as it is ---


class _Library(nodes.Node, tag="library", frozen=True):
    module: Word
    name: str = ""


class _Object(nodes.Node, tag="object", frozen=True):
    """Attributes that are None have no value: how many names come before them, and their own."""

    cls: Reference
    names: tuple[Word, ...] = ()
    values: tuple[Slot, ...] = ()
    nones: tuple[tuple[Index, str], ...] = ()
    content: Slot = None
    slots: tuple[str, ...] = ()
    slot_values: tuple[Slot, ...] = ()


class _Form(nodes.Node, tag="nnform", frozen=True):
    """Values that all modules of the form have: `columns` says which, in ascending order."""

    cls: Reference
    names: tuple[Word, ...] = ()
    tables: tuple[Word, ...] = ()
    keys: tuple[tuple[Word, ...], ...] = ()
    columns: tuple[Index, ...] = ()
    constants: tuple[Slot, ...] = ()


class _Modules(nodes.Node, tag="nn", frozen=True):
    """So many modules of one form, one after another: the values of each that are its own."""

    form: Reference
    count: Annotated[int, msgspec.Meta(ge=1)]
    values: tuple[Slot, ...] = ()


class _More(nodes.Node, tag="more", frozen=True):
    """What the line before had no room for.

    Items of a container; keys and values of a dict; names and values of an object; names in the
    last table of a form; values of modules.
    """

    items: tuple[Slot, ...] = ()
    values: tuple[Slot, ...] = ()


_OTHERS = (nodes.Library, nodes.Object, nodes.ModuleForm, nodes.ModuleObject, nodes.Tensor)
_LINES: tuple[type[nodes.Node], ...] = (
    *(cls for cls in NODE_TYPES if cls not in _OTHERS), _Library, _Object, _Form, _Modules, _More
)  # fmt: skip
_WITH_ITEMS = (nodes.List, nodes.Tuple, nodes.Set, nodes.Deque, nodes.NamedTuple)


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The first line. Tensors are numbered on from the last node."""

    roots: dict[str, Slot]
    count: Index  # of the nodes in the lines
    words: tuple[str, ...] = ()
    tensors: tuple[TensorRun, ...] = ()
    packed: tuple[BlobRun, ...] = ()  # blobs without an entry of their own in tensors.safetensors


# --- writing ---


def spell(table: nodes.Table, packed: tuple[BlobRun, ...]) -> bytes:
    """The text of a table."""
    found = _share_texts(_share_forms([_make_line(node) for node in table.nodes]))
    order = sorted(range(len(found)), key=lambda i: _place(found[i]))
    numbers = {old: new for new, old in enumerate(order)}
    renumber = functools.partial(_renumber, numbers=numbers)
    words = _find_words(found)
    listed = [found[i] for i in order]
    tensors = [node for node in listed if isinstance(node, nodes.Tensor)]
    encode = msgspec.json.Encoder().encode
    head = Head(
        {name: renumber(slot) for name, slot in table.roots.items()},
        len(listed) - len(tensors),
        tuple(map(str, words)),
        tuple(_find_runs(tensors)),
        packed,
    )
    lines = [
        encode([one.__struct_config__.tag, *_shorten(_map_slots(one, renumber))])
        for node in _join_modules(listed[: head.count])
        for one in _cut(_use_words(node, words))
    ]
    codes = b",\n".join(encode(_shorten(code)) for code in table.codes)
    start = encode(head).removesuffix(b"}") + _CODES
    return b"\n".join(part for part in (start, codes, _NODES, b",\n".join(lines), _END) if part)


def _make_line(node: AnyNode) -> nodes.Node:
    match node:
        case nodes.Library():
            return _Library(node.module, node.name)
        case nodes.ModuleForm():
            return _Form(node.cls, node.names, node.tables, node.keys)
        case nodes.Object():
            return _gather_nones(node)
    return node


def _gather_nones(node: nodes.Object) -> _Object:
    """A configuration has a hundred attributes that are None. Of a thousand, each has a value."""
    short = len(node.names) <= _LONGEST
    names: list[str] = []
    values: list[Slot] = []
    nones: list[tuple[int, list[str]]] = []
    for name, value in zip(node.names, node.values, strict=True):
        if value is not None or not short or not name or " " in name:
            names.append(name)
            values.append(value)
        elif nones and nones[-1][0] == len(names):
            nones[-1][1].append(name)
        else:
            nones.append((len(names), [name]))
    gone = tuple((place, " ".join(run)) for place, run in nones)
    return _Object(
        node.cls, tuple(names), tuple(values), gone, node.content, node.slots, node.slot_values
    )


def _place(node: nodes.Node) -> tuple[object, ...]:
    """Forms come first, then modules by their forms, then all else, then tensors by their blobs."""
    match node:
        case _Form():
            return (0,)
        case nodes.ModuleObject():
            return 1, node.form[0]
        case nodes.Tensor():
            return 3, node.device, node.kind, node.blob
    return (2,)


def _join_modules(found: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
    """Modules of one form share a line."""
    group: list[nodes.ModuleObject] = []
    for node in (*found, None):
        fits = isinstance(node, nodes.ModuleObject) and (not group or group[0].form == node.form)
        if group and not fits:
            values = tuple(slot for module in group for slot in module.values)
            yield _Modules(group[0].form, len(group), values)
            group = []
        if isinstance(node, nodes.ModuleObject):
            group.append(node)
        elif node is not None:
            yield node


def _find_runs(tensors: Sequence[nodes.Tensor]) -> Iterator[TensorRun]:
    """Neighbours whose blobs are neighbours too."""
    start = 0
    for i, tensor in enumerate(tensors, 1):
        if i < len(tensors):
            following = tensors[i]
            same = (following.kind, following.device) == (tensor.kind, tensor.device)
            if same and following.blob == tensor.blob + 1:
                continue
        yield i - start, tensors[start].blob, tensor.kind, tensor.device
        start = i


def _cut(node: nodes.Node) -> Iterator[nodes.Node]:
    """A node, and the further lines of a long one."""
    parts: list[tuple[Slot, ...]] = [()]
    others: list[tuple[Slot, ...]] = [()]
    match node:
        case nodes.Dict():
            parts, others = _split(node.keys), _split(node.values)
            node = msgspec.structs.replace(node, keys=parts[0], values=others[0])
        case _Object():
            parts, others = _split(node.names), _split(node.values)
            node = msgspec.structs.replace(node, names=parts[0], values=others[0])
        case _Form() if node.keys:
            parts = _split(node.keys[-1])
            node = msgspec.structs.replace(node, keys=(*node.keys[:-1], parts[0]))
        case _Modules():
            parts = _split(node.values)
            node = msgspec.structs.replace(node, values=parts[0])
        case _ if isinstance(node, _WITH_ITEMS):
            parts = _split(node.items)
            node = msgspec.structs.replace(node, items=parts[0])
    yield node
    for items, values in itertools.zip_longest(parts[1:], others[1:], fillvalue=()):
        yield _More(items, values)


def _split(items: tuple[Slot, ...]) -> list[tuple[Slot, ...]]:
    return [items[i : i + _LONGEST] for i in range(0, len(items), _LONGEST)] or [()]


def _shorten(node: msgspec.Struct) -> list[object]:
    """A node's fields, without those at the end that have their default."""
    fields = list(msgspec.structs.astuple(node))
    defaults = type(node).__struct_defaults__
    least = len(fields) - len(defaults)
    while len(fields) > least and _is_equal(fields[-1], defaults[len(fields) - 1 - least]):
        fields.pop()
    return fields


def _is_equal(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


_SPELLED: tuple[type[nodes.Node], ...] = (*_LINES, nodes.ModuleObject, nodes.Tensor)
_FIELDS = {cls: find_slot_fields(cls) for cls in _SPELLED}


def _slots_of(node: nodes.Node) -> Iterator[Slot]:
    for name, many in _FIELDS[type(node)]:
        value = getattr(node, name)
        yield from value if many else (value,)


def _map_slots(node: nodes.Node, change: Callable[[Slot], Slot]) -> nodes.Node:
    """A node with other slots."""
    changed: dict[str, object] = {}
    for name, many in _FIELDS[type(node)]:
        value = getattr(node, name)
        changed[name] = tuple(map(change, value)) if many else change(value)
    return msgspec.structs.replace(node, **changed) if changed else node


def _renumber(slot: Slot, numbers: Mapping[int, int]) -> Slot:
    return (numbers[slot[0]],) if type(slot) is tuple else slot


# --- words ---


def _share_texts(found: list[nodes.Node]) -> list[nodes.Node]:
    """Texts that stand in many slots become nodes."""
    counts = Counter(slot for node in found for slot in _slots_of(node) if type(slot) is str)
    often = {
        text: len(found) + i
        for i, text in enumerate(
            t for t, n in counts.items() if (n - 1) * (len(t) + 2) > 6 * n + 12
        )
    }
    if not often:
        return found

    def share(slot: Slot) -> Slot:
        return (often[slot],) if type(slot) is str and slot in often else slot

    return [*(_map_slots(node, share) for node in found), *map(nodes.String, often)]


def _words_of(node: nodes.Node) -> Iterator[Word]:
    match node:
        case _Library():
            yield node.module
        case _Object():
            yield from node.names
        case _Form():
            yield from node.names
            yield from node.tables
            for keys in node.keys:
                yield from keys


def _find_words(found: Iterable[nodes.Node]) -> dict[Word, int]:
    """Names that are worth a number, most frequent first."""
    counts = Counter(word for node in found for word in _words_of(node))
    often = [word for word, count in counts.most_common() if (count - 1) * len(str(word)) > 8]
    return {word: number for number, word in enumerate(often)}


def _use_words(node: nodes.Node, words: Mapping[Word, int]) -> nodes.Node:
    def use(names: Iterable[Word]) -> tuple[Word, ...]:
        return tuple(words.get(name, name) for name in names)

    match node:
        case _Library():
            return _Library(words.get(node.module, node.module), node.name)
        case _Object():
            return msgspec.structs.replace(node, names=use(node.names))
        case _Form():
            keys = tuple(map(use, node.keys))
            return msgspec.structs.replace(
                node, names=use(node.names), tables=use(node.tables), keys=keys
            )
    return node


# --- modules ---


def _share_forms(found: list[nodes.Node]) -> list[nodes.Node]:
    """Modules of one form give it the values that they have in common."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(found):
        if isinstance(node, nodes.ModuleObject):
            members[node.form[0]].append(number)
    for number, modules in members.items():
        if len(modules) > 1:
            _share_form(found, number, modules)
    return found


def _share_form(found: list[nodes.Node], number: int, modules: list[int]) -> None:
    form = cast("_Form", found[number])
    rows = {m: cast("nodes.ModuleObject", found[m]).values for m in modules}
    columns = list(zip(*rows.values(), strict=True))
    distinct = [len(set(map(_key, column))) for column in columns]
    splits = [i for i, count in enumerate(distinct) if 1 < count <= len(modules) // _FEW]
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for module, row in rows.items():
        groups[tuple(_key(row[i]) for i in splits)].append(module)
    constant = [i for i, count in enumerate(distinct) if count == 1 or i in splits]
    for first, group in enumerate(groups.values()):
        values = tuple(rows[group[0]][i] for i in constant)
        shared = msgspec.structs.replace(form, columns=tuple(constant), constants=values)
        at = number
        if first:
            at = len(found)
            found.append(shared)
        else:
            found[number] = shared
        for module in group:
            own = tuple(v for i, v in enumerate(rows[module]) if i not in constant)
            found[module] = nodes.ModuleObject((at,), own)


def _key(slot: Slot) -> object:
    """Equal only for what is the same: 1 is neither True nor 1.0, nor is 0.0 the other zero."""
    return type(slot), repr(slot)


# --- reading ---


@dataclass(frozen=True, slots=True)
class Spelled:
    """The text of a table, its first line read."""

    text: bytes
    head: Head
    code_lines: tuple[int, int]  # where they begin and end
    node_lines: tuple[int, int]

    @staticmethod
    def of(text: bytes, file_size: int) -> Spelled:
        """Read the first line; refuse what would take more memory than a table may."""
        if estimate_memory(text) > max(MEMORY_FLOOR, file_size):
            raise _too_large(len(text))
        first = text.find(b"\n")
        middle = text.find(b"\n" + _NODES + b"\n", first)
        if first < 0 or middle < 0 or not text.endswith(b"\n" + _END):
            raise damaged("objects.json isn't laid out in lines")
        line = text[:first]
        _check_line(line, file_size)
        if not line.endswith(_CODES):
            raise damaged("objects.json isn't laid out in lines")
        head = _decode(line.removesuffix(_CODES) + b"}", _HEAD)
        start = middle + len(_NODES) + 2
        return Spelled(text, head, (first + 1, middle), (start, len(text) - len(_END) - 1))

    def check(self, blobs: StoredBlobs, members: Mapping[str, object], file_size: int) -> None:
        """Raise `BadRecord` for a table that can't be built; keep nothing of it meanwhile."""
        for line in _lines(self.text, *self.code_lines):
            _check_line(line, file_size)
            check_code(_decode(line, _CODE), members)
        check = _LineCheck(self, blobs, file_size)
        for line in _lines(self.text, *self.node_lines):
            _check_line(line, file_size)
            check.take(_decode(line, _NODE))
        check.finish()

    def build(self) -> nodes.Table:
        """The table, of a text that was checked."""
        codes = tuple(_decode(line, _CODE) for line in _lines(self.text, *self.code_lines))
        found: list[nodes.Node] = []
        for line in _lines(self.text, *self.node_lines):
            _join(found, _decode(line, _NODE))
        full: list[AnyNode] = []
        for node in found:
            if isinstance(node, _Modules):  # forms come first: their numbers are those of lines
                full += _part_modules(node, cast("_Form", found[node.form[0]]))
            else:
                full.append(_spread(node, self.head.words))
        for count, blob, kind, device in self.head.tensors:
            full += [nodes.Tensor(blob + i, kind, device) for i in range(count)]
        return nodes.Table(self.head.roots, tuple(full), codes)


def _lines(text: bytes, start: int, end: int) -> Iterator[bytes]:
    """The lines of a part, without the commas between them. No line: `end` is before `start`."""
    while start <= end:
        stop = text.find(b"\n", start, end)
        is_last = stop < 0
        stop = end if is_last else stop
        if (text[stop - 1 : stop] == b",") is is_last:
            raise damaged("a line of objects.json ends as it can't")
        yield text[start : stop if is_last else stop - 1]
        start = stop + 1


def _join(found: list[nodes.Node], node: nodes.Node) -> None:
    """Take the next line: a node, or more of the last one."""
    if not isinstance(node, _More):
        found.append(node)
        return
    last, changed = found[-1], dict[str, object]()
    match last:
        case nodes.Dict():
            changed = {"keys": last.keys + node.items, "values": last.values + node.values}
        case _Object():
            changed = {"names": last.names + node.items, "values": last.values + node.values}
        case _Form():
            changed = {"keys": (*last.keys[:-1], last.keys[-1] + node.items)}
        case _Modules():
            changed = {"values": last.values + node.items}
        case _:
            changed = {"items": cast("nodes.List", last).items + node.items}
    found[-1] = msgspec.structs.replace(last, **changed)


def _part_modules(line: _Modules, form: _Form) -> Iterator[nodes.ModuleObject]:
    """Each module, with the values that the form has for all."""
    width = len(line.values) // line.count
    for i in range(line.count):
        values = list(line.values[i * width : (i + 1) * width])
        for column, constant in zip(form.columns, form.constants, strict=True):
            values.insert(column, constant)
        yield nodes.ModuleObject(line.form, tuple(values))


def _spread(node: nodes.Node, words: Sequence[str]) -> AnyNode:
    """The node of a line, with all that the line leaves out."""

    def spread(names: Iterable[Word]) -> tuple[str, ...]:
        return tuple(words[name] if isinstance(name, int) else name for name in names)

    match node:
        case _Library():
            return nodes.Library(spread((node.module,))[0], node.name)
        case _Form():
            keys = tuple(map(spread, node.keys))
            return nodes.ModuleForm(node.cls, spread(node.names), spread(node.tables), keys)
        case _Object():
            return _spread_nones(node, spread(node.names))
    return cast("AnyNode", node)


def _spread_nones(node: _Object, known: tuple[str, ...]) -> nodes.Object:
    names: list[str] = []
    values: list[Slot] = []
    done = 0
    for place, text in node.nones:
        gone = text.split(" ")
        names += [*known[done:place], *gone]
        values += [*node.values[done:place], *(None for _ in gone)]
        done = place
    names += known[done:]
    values += node.values[done:]
    return nodes.Object(
        node.cls, tuple(names), tuple(values), node.content, node.slots, node.slot_values
    )


class _LineCheck:
    """What a pass over the lines has to remember: a few bytes for each form."""

    def __init__(self, spelled: Spelled, blobs: StoredBlobs, file_size: int) -> None:
        self._blobs = blobs
        self._room = max(MEMORY_FLOOR, file_size) - estimate_memory(spelled.text)
        self._widths: list[int] = []  # how many values the modules of a form give
        self._shared: list[int] = []  # how many the form gives them
        self._words = len(spelled.head.words)
        self._before: nodes.Node = _Form((0,))
        self._owed = 0  # values that modules still need
        self._left = spelled.head.count
        self._count = self._left + sum(run[0] for run in spelled.head.tensors)
        for count, blob, kind, device in spelled.head.tensors:
            self._spend(128 * count)
            check_tensors(count, blob, kind, device, blobs)
        for slot in spelled.head.roots.values():
            check_slot(slot, self._count)

    def take(self, node: nodes.Node) -> None:
        """The next node, or more of the last one."""
        for word in _words_of(node):
            if isinstance(word, int) and word >= self._words:
                raise damaged("objects.json refers to a word that it doesn't have")
        for slot in _slots_of(node):
            check_slot(slot, self._count)
        match node:
            case _More():
                self._take_more(node)
                return
            case _ if self._owed:
                raise _wrong_width()
            case _Form():
                self._take_form(node)
            case _Modules():
                self._check_modules(node)
            case _Object():
                self._check_object(node)
            case _:
                check_node(node, self._blobs)
        self._before = node
        self._left -= node.count if isinstance(node, _Modules) else 1

    def finish(self) -> None:
        """All lines were seen."""
        if self._owed:
            raise _wrong_width()
        if self._left:
            raise damaged("objects.json has another number of nodes than it says")

    def _take_more(self, node: _More) -> None:
        before = self._before
        many = len(node.items)
        if isinstance(before, nodes.Dict | _Object):
            if many != len(node.values):
                raise damaged("there are more names than values, or less")
        elif not isinstance(before, (*_WITH_ITEMS, _Form, _Modules)) or node.values:
            raise damaged("there is more of something that has no items")
        if isinstance(before, _Object | _Form):
            self._check_further_names(node.items)
        if isinstance(before, _Form):
            if not before.keys:
                raise damaged("there are names without a table")
            self._widths[-1] += many
        elif isinstance(before, _Modules):
            self._owed -= many

    def _check_further_names(self, names: tuple[Slot, ...]) -> None:
        for name in names:
            if type(name) is not str and not (type(name) is int and 0 <= name < self._words):
                raise damaged("a name isn't one")

    def _take_form(self, node: _Form) -> None:
        if not isinstance(self._before, _Form):
            raise damaged("a form comes after other nodes")
        self._widths.append(_find_width(node))
        self._shared.append(len(node.columns))

    def _check_modules(self, node: _Modules) -> None:
        number = node.form[0]
        if number >= len(self._widths):
            raise damaged("a module has no form")
        self._owed = node.count * self._widths[number] - len(node.values)
        self._spend(node.count * (128 + 8 * self._shared[number]))

    def _check_object(self, node: _Object) -> None:
        pairs = ((node.names, node.values), (node.slots, node.slot_values))
        if any(len(names) != len(values) for names, values in pairs):
            raise damaged("an object has another number of names than of values")
        places = [place for place, _ in node.nones]
        if places != sorted(places) or (places and places[-1] > len(node.names)):
            raise damaged("an object has attributes where there is no place")
        self._spend(sum(64 * (text.count(" ") + 1) for _, text in node.nones))

    def _spend(self, amount: int) -> None:
        self._room -= amount
        if self._room < 0:
            raise _too_large(0)


def _wrong_width() -> BadRecord:
    return damaged("a module has another number of values than its form has names")


def _find_width(form: _Form) -> int:
    """How many values modules of a form give themselves."""
    whole = len(form.names) + sum(map(len, form.keys))
    columns = form.columns
    if len(form.tables) != len(form.keys) or len(columns) != len(form.constants):
        raise damaged("a form has other names than values")
    if any(a >= b for a, b in itertools.pairwise(columns)) or (columns and columns[-1] >= whole):
        raise damaged("a form has a value where there is no place")
    return whole - len(columns)


def _check_line(line: bytes, file_size: int) -> None:
    """A line is held while it is checked, so it may not take much."""
    if len(line) > LARGEST_LINE // 64 and not line.startswith(_BYTES):
        if estimate_memory(line) > max(LARGEST_LINE, file_size):
            raise _too_large(len(line))


_BYTES = (b'["str",', b'["text",', b'["bytes",')  # as long in memory as they are here


def _too_large(size: int) -> BadRecord:
    what = f"{size} bytes of JSON" if size else "what it stands for"
    return BadRecord(
        f"objects.json would take more memory than a record may: {what}.\n"
        "tripwire writes no such file; it may have been made to do harm.",
        slug="record-too-large",
    )


def _decode(line: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise damaged(f"objects.json: {error}") from None


_HEAD = msgspec.json.Decoder(Head)
_CODE = msgspec.json.Decoder(nodes.Code)
_NODE: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[_LINES])  # noqa: UP007
