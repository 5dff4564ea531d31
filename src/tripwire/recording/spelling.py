"""Spelling: a table as the text of objects.json.

The text is JSON in lines. So a reader (recording/spelled.py) checks a file line by line and keeps
none of it before all of it is known to be sound. And it is short: a model has thousands of modules
that differ in a number or two, and a record promises to be hardly larger than its tensors. What
nodes have in common is said once: by modules of one form, functions, things of a library; what is
the same is counted; tensors that are nothing but a blob follow one another.
"""

from __future__ import annotations

import binascii
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar, cast

import msgspec

from tripwire.recording import lines, nodes
from tripwire.recording.blobs import BlobRun
from tripwire.recording.checks import LARGEST_LINE, LIST, estimate_memory, find_slot_fields
from tripwire.recording.lines import join_rows
from tripwire.recording.nodes import AnyNode, Item, Items, Reference, Row, Slot
from tripwire.recording.texts import encode_json
from tripwire.recording.words import Numbers, are_names, join_names

_LONGEST = 500  # items in a line; a container has more lines for the rest
_PIECE = 6_144  # characters of a string or bytes in a line; a multiple of three, for base64
_FEW = 16  # a value that so few parts of the modules differ in makes forms of their own
_T = TypeVar("_T")


class _Form(nodes.ModuleForm, tag="nnform", frozen=True):
    """A form, and the values that all its modules have."""

    columns: tuple[int, ...] = ()
    constants: tuple[Slot, ...] = ()


@dataclass(frozen=True, slots=True)
class Spelling:
    """The text of a table, but for the blobs that share an entry of tensors.safetensors."""

    head: lines.Head
    rest: bytes  # the lines that follow the first

    def text(self, packed: tuple[BlobRun, ...]) -> bytes:
        """The whole."""
        head = encode_json(msgspec.structs.replace(self.head, packed=packed))
        return b"\n".join((head.removesuffix(b"}") + lines.CODES, self.rest))


def spell(table: nodes.Table) -> Spelling:
    """Write a table as lines."""
    found = _share_texts(_share_forms(list(table.nodes)))
    found = [_unname(node, table.codes) for node in found]
    places = _find_places(found)
    order = sorted(range(len(found)), key=places.__getitem__)
    numbers = {old: new for new, old in enumerate(order)}
    renumber = functools.partial(_renumber, numbers=numbers)
    listed = [_map_slots(found[i], renumber) for i in order]
    tensors = [node for node in listed if isinstance(node, nodes.Tensor)]
    count = sum(place.rank <= _Rank.ELSE for place in places)
    files = list(dict.fromkeys(map(_file_of, table.codes)))
    numbered = _find_words(found, table.codes)
    pieces = Numbers(pieces=numbered.pieces)
    head = lines.Head(
        {name: renumber(slot) for name, slot in table.roots.items()},
        count,
        join_names(((piece, False) for piece in numbered.pieces), Numbers()),
        join_names(((word, False) for word in numbered.words), pieces),
        tuple(_find_runs(tensors)),
        files=tuple(files),
    )
    speller = _Speller(listed, numbered)
    codes = b",\n".join(speller.spell_codes(table.codes, files))
    groups = itertools.groupby(range(count), lambda i: places[order[i]].line)
    spelled = (speller.spell([listed[i] for i in same]) for _, same in groups)
    parts = (codes, lines.NODES, b",\n".join(_say_again(spelled)), lines.END)
    return Spelling(head, b"\n".join(part for part in parts if part))


class _Rank(IntEnum):
    """What comes first. Of the first five, those that have the same in common share a line."""

    MODULE = 0
    EXTRAS = 1
    LIBRARY = 2
    FUNCTION = 3
    CELL = 4
    ELSE = 5
    TENSOR = 6
    FORM = 7


class _Place(NamedTuple):
    """Where a node comes."""

    rank: _Rank
    common: str | int
    order: tuple[object, ...]

    @property
    def line(self) -> object:
        """Equal for neighbours that share a line."""
        return self if self.rank == _Rank.ELSE else (self.rank, self.common)


def _find_places(found: Sequence[nodes.Node]) -> list[_Place]:
    firsts: dict[object, int] = {}
    return [_find_place(number, node, firsts) for number, node in enumerate(found)]


def _find_place(number: int, node: nodes.Node, firsts: dict[object, int]) -> _Place:
    """`firsts` are the first of nodes that say the same: those become neighbours."""
    match node:
        case nodes.ModuleObject():
            return _Place(_Rank.MODULE, node.form[0], (number,))
        case nodes.TensorExtras():
            common = node.grad is None, node.cls, node.names, tuple(map(_key, node.values))
            return _Place(_Rank.EXTRAS, repr(common), (number,))
        case nodes.Library():
            return _Place(_Rank.LIBRARY, node.module, (number,))
        case lines.Functions():
            rest = msgspec.structs.replace(node, codes=(), closures=())
            return _Place(_Rank.FUNCTION, repr((len(node.closures), rest)), (node.codes, number))
        case nodes.Cell():
            return _Place(_Rank.CELL, node.empty, (number,))
        case nodes.Tensor():
            return _Place(_Rank.TENSOR, 0, (node.device, node.kind, node.blob, number))
        case _Form():
            return _Place(_Rank.FORM, 0, (number,))
    said = type(node), encode_json(msgspec.structs.astuple(node))
    return _Place(_Rank.ELSE, firsts.setdefault(said, number), (number,))


def _unname(node: nodes.Node, codes: Sequence[nodes.Code]) -> nodes.Node:
    """The line of a function, without the names that its code has, too."""
    if not isinstance(node, nodes.Function):
        return node
    qualname = codes[node.code].name
    return lines.Functions(
        ((node.code,),),
        node.namespace,
        node.closure,
        node.defaults,
        node.kwdefaults,
        node.attributes,
        node.special,
        None if node.name == qualname.rpartition(".")[2] else node.name,
        None if node.qualname == qualname else node.qualname,
    )


def _say_again(spelled: Iterable[bytes]) -> Iterator[bytes]:
    """How often the same text follows, in place of it."""
    for text, same in itertools.groupby(spelled):
        yield text
        times = sum(1 for _ in same) - 1
        if times:
            yield encode_json(_list_fields(lines.Again(times)))


def _find_runs(tensors: Sequence[nodes.Tensor]) -> Iterator[lines.TensorRun]:
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


def _file_of(code: nodes.Code) -> lines.File:
    return code.file, code.source, code.marshalled, code.flags


class _Speller:
    """Lines of nodes, which have their numbers in the file."""

    def __init__(self, listed: Sequence[nodes.Node], numbers: Numbers) -> None:
        self._listed = listed
        self._numbers = numbers
        self._longest = _LONGEST

    def spell_codes(
        self, codes: Sequence[nodes.Code], files: Sequence[lines.File]
    ) -> Iterator[bytes]:
        """Lines of neighbours that come from one file."""
        for file, same in itertools.groupby(codes, _file_of):
            some, number = tuple(same), files.index(file)
            yield from self._fit(lambda: map(_shorten, self._make_codes(number, some)))  # noqa: B023

    def spell(self, group: list[nodes.Node]) -> bytes:
        """The line of a node or of some that share one, and further lines for what is long."""
        return b",\n".join(self._fit(lambda: map(_list_fields, self._make(group))))

    def _fit(self, make: Callable[[], Iterable[list[object]]]) -> list[bytes]:
        """Lines of so many items that a reader takes each."""
        self._longest = _LONGEST
        spelled = [encode_json(line) for line in make()]
        while self._longest > 1 and not all(map(_is_readable, spelled)):
            self._longest //= 2
            spelled = [encode_json(line) for line in make()]
        return spelled

    def _make_codes(self, file: int, codes: tuple[nodes.Code, ...]) -> Iterator[lines.Codes]:
        for some in self._split(codes):
            numbers = tuple(
                number
                for code in some
                for number in (
                    *(code.line, code.place[0] - code.line, code.place[1]),
                    *(code.lines[1], len(code.free)),
                )
            )
            free = self._join(name for code in some for name in code.free)
            yield lines.Codes(file, self._join(code.name for code in some), numbers, free)

    def _make(self, group: list[nodes.Node]) -> Iterator[nodes.Node]:
        match node := group[0]:
            case nodes.ModuleObject():
                yield from self._make_modules(cast("list[nodes.ModuleObject]", group))
            case nodes.TensorExtras():
                yield from self._make_extras(cast("list[nodes.TensorExtras]", group))
            case nodes.Library():
                for some in self._split(tuple(cast("nodes.Library", one).name for one in group)):
                    yield lines.Libraries(self._join([node.module]), self._join(some))
            case lines.Functions():
                yield from self._make_functions(cast("list[lines.Functions]", group))
            case nodes.Cell():
                for cells in self._split(tuple(cast("list[nodes.Cell]", group))):
                    contents = () if node.empty else join_rows(cell.content for cell in cells)
                    yield lines.Cells(contents, len(cells) if node.empty else 0)
            case nodes.Object():
                names, slots = (*node.names, *node.slots), (*node.values, *node.slot_values)
                first, more = self._join_attributes(names, slots)
                yield lines.Object(node.cls, *first, node.content, len(node.slots))
                yield from more
            case nodes.Class():
                first, more = self._join_attributes(node.names, node.values)
                qualname = None if node.qualname == node.name else node.qualname
                named = self._join([node.module]), node.name, node.meta, node.bases
                yield lines.Class(*named, *first, node.form, node.detail, qualname)
                yield from more
            case nodes.Namespace():
                first, more = self._join_attributes(node.names, node.values)
                yield lines.Namespace(self._join([node.module]), *first, node.imports)
                yield from more
            case nodes.Module():
                first, more = self._join_attributes(node.names, node.values)
                yield lines.Module(self._join([node.name]), *first, node.namespace)
                yield from more
            case nodes.Dict():
                keys, values = self._join_items(node.keys), self._join_items(node.values)
                yield lines.Dict(keys[0], values[0], node.form, node.factory)
                yield from itertools.starmap(lines.More, zip(keys[1:], values[1:], strict=True))
            case _ if isinstance(node, _WITH_ITEMS):
                first_items, *rest = self._join_items(node.items)
                yield _make_container(node, first_items)
                yield from map(lines.More, rest)
            case _:
                yield from _split_text(node)

    def _make_modules(self, group: list[nodes.ModuleObject]) -> Iterator[nodes.Node]:
        form = cast("_Form", self._listed[group[0].form[0]])
        names = [self._join(some) for some in self._split(tuple(_names_of(form)))]
        slots = tuple(slot for module in group for slot in module.values)
        values = [join_rows(some) for some in self._split(slots)]
        tables = self._join(form.tables), tuple(map(len, form.keys))
        shared = form.columns, form.constants
        yield lines.Modules(form.cls, names[0], *tables, values[0], len(group), *shared)
        yield from map(lines.More, names[1:])
        yield from map(lines.More, values[1:])

    def _make_extras(self, group: list[nodes.TensorExtras]) -> Iterator[nodes.Node]:
        first, more = self._join_attributes(group[0].names, group[0].values)
        for some in self._split(tuple(group)):
            tensors = cast("tuple[Row, ...]", join_rows(node.tensor for node in some))
            grads = () if some[0].grad is None else join_rows(node.grad for node in some)
            yield lines.Extras(tensors, grads, some[0].cls, *first)
            yield from more

    def _make_functions(self, group: list[lines.Functions]) -> Iterator[nodes.Node]:
        for some in self._split(tuple(group)):
            codes = join_rows(cast("Reference", code) for one in some for code in one.codes)
            cells = join_rows(cast("Reference", cell) for one in some for cell in one.closures)
            rows = cast("tuple[Row, ...]", codes), cast("tuple[Row, ...]", cells)
            yield msgspec.structs.replace(some[0], codes=rows[0], closures=rows[1])

    def _join(self, names: Iterable[str]) -> str:
        return join_names(((name, False) for name in names), self._numbers)

    def _join_attributes(
        self, names: tuple[str, ...], values: tuple[Slot, ...]
    ) -> tuple[tuple[str, tuple[Item, ...]], list[lines.More]]:
        """The names and the values that aren't None of the first line; further lines."""
        first, *rest = [
            (
                join_names(((name, value is None) for name, value in some), self._numbers),
                join_rows(value for _, value in some if value is not None),
            )
            for some in self._split(tuple(zip(names, values, strict=True)))
        ]
        return first, list(itertools.starmap(lines.More, rest))

    def _join_items(self, slots: tuple[Slot, ...]) -> list[Items]:
        """For each line the slots, or a text of them."""
        if are_names(slots):
            return [self._join(some) for some in self._split(tuple(slots))]
        return [join_rows(some) for some in self._split(slots)]

    def _split(self, items: tuple[_T, ...]) -> list[tuple[_T, ...]]:
        """What stands in one line each."""
        longest = self._longest
        return [items[i : i + longest] for i in range(0, len(items), longest)] or [()]


_WITH_ITEMS = (nodes.List, nodes.Tuple, nodes.Set, nodes.Deque, nodes.NamedTuple)


def _make_container(node: nodes.Node, items: Items) -> nodes.Node:
    match node:
        case nodes.List():
            return lines.List(items)
        case nodes.Set():
            return lines.Set(items, node.frozen)
        case nodes.Deque():
            return lines.Deque(items, node.limit)
        case nodes.NamedTuple():
            return lines.NamedTuple(node.cls, items)
    return lines.Tuple(items)


def _split_text(node: nodes.Node) -> Iterator[nodes.Node]:
    """A text or bytes in as many lines as they need, or any other node."""
    match node:
        case nodes.String(text=text):
            yield nodes.String(text[:_PIECE])
            yield from (lines.More(text[i : i + _PIECE]) for i in _further(text))
        case nodes.Bytes(data=data) | nodes.Text(data=data):
            yield msgspec.structs.replace(node, data=data[:_PIECE])
            pieces = (
                binascii.b2a_base64(data[i : i + _PIECE], newline=False) for i in _further(data)
            )
            yield from (lines.More(piece.decode()) for piece in pieces)
        case _:
            yield node


def _further(data: str | bytes) -> range:
    """Where the pieces begin that the first line has no room for."""
    return range(_PIECE, len(data), _PIECE)


def _is_readable(line: bytes) -> bool:
    return len(line) * (LIST + 1) <= LARGEST_LINE or estimate_memory(line) <= LARGEST_LINE


def _list_fields(line: nodes.Node) -> list[object]:
    return [line.__struct_config__.tag, *_shorten(line)]


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


def _map_slots(node: nodes.Node, change: Callable[[Slot], Slot]) -> nodes.Node:
    """A node with other slots; those that a text stands for are as they were."""
    changed: dict[str, object] = {}
    texts = _texts_of(node)
    for name, many in find_slot_fields(type(node)):
        if name not in texts:
            value = getattr(node, name)
            changed[name] = tuple(map(change, value)) if many else change(value)
    return msgspec.structs.replace(node, **changed) if changed else node


def _renumber(slot: Slot, numbers: Mapping[int, int]) -> Slot:
    return (numbers[slot[0]],) if type(slot) is tuple else slot


# --- words ---


_TEXTS: Mapping[type[nodes.Node], tuple[str, ...]] = {
    **dict.fromkeys(_WITH_ITEMS, ("items",)),
    nodes.Dict: ("keys", "values"),
}


def _texts_of(node: nodes.Node) -> Sequence[str]:
    """The fields that a text stands for."""
    return [name for name in _TEXTS.get(type(node), ()) if are_names(getattr(node, name))]


def _share_texts(found: list[nodes.Node]) -> list[nodes.Node]:
    """Texts that stand in many slots become nodes."""
    counts: Counter[str] = Counter()

    def count(slot: Slot) -> Slot:
        if type(slot) is str:
            counts[slot] += 1
        return slot

    for node in found:
        _map_slots(node, count)
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


def _words_of(node: nodes.Node) -> Iterator[str]:
    """Every name that stands in a text, but for the modules of libraries."""
    match node:
        case nodes.Library():
            yield node.name
        case nodes.Object():
            yield from (*node.names, *node.slots)
        case nodes.TensorExtras():
            yield from node.names
        case nodes.Class() | nodes.Namespace():
            yield from (node.module, *node.names)
        case nodes.Module():
            yield from (node.name, *node.names)
        case nodes.ModuleForm():
            yield from (*_names_of(node), *node.tables)
        case _:
            for field in _texts_of(node):
                yield from getattr(node, field)


_MOST_WORDS, _LONGEST_WORD = 1000, 100  # they stand in one line


def _find_words(found: Sequence[nodes.Node], codes: Sequence[nodes.Code]) -> Numbers:
    """Parts of names, and pieces of parts, that are worth a number."""
    modules = dict.fromkeys(node.module for node in found if isinstance(node, nodes.Library))
    named = ((code.name, *code.free) for code in codes)
    names = itertools.chain.from_iterable((modules, *named, *map(_words_of, found)))
    parts = Counter(part for name in names for part in name.split("."))
    words = _number(parts)
    pieces: Counter[str] = Counter()
    for part, n in parts.items():
        if "_" in part:
            for piece in part.split("_"):
                pieces[piece] += 1 if part in words else n
    return Numbers(words, _number(pieces))


def _number(counts: Counter[str]) -> dict[str, int]:
    """Those that a number saves something for, most frequent first."""
    often = [text for text, n in counts.most_common() if (n - 1) * len(text) > 2 * n + 1]
    short = [text for text in often if len(text) <= _LONGEST_WORD]
    return {text: number for number, text in enumerate(short[:_MOST_WORDS])}


# --- modules ---


def _names_of(form: nodes.ModuleForm) -> Iterator[str]:
    """The names of attributes, then the keys of tables."""
    yield from form.names
    yield from itertools.chain.from_iterable(form.keys)


def _share_forms(found: list[AnyNode]) -> list[nodes.Node]:
    """Modules of one form give it the values that they have in common."""
    shared: list[nodes.Node] = [
        _Form(*msgspec.structs.astuple(node)) if isinstance(node, nodes.ModuleForm) else node
        for node in found
    ]
    members: defaultdict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(shared):
        if isinstance(node, nodes.ModuleObject):
            members[node.form[0]].append(number)
    for number, modules in members.items():
        if len(modules) > 1:
            _share_form(shared, number, modules)
    return shared


def _share_form(found: list[nodes.Node], number: int, modules: list[int]) -> None:
    form = cast("_Form", found[number])
    rows = {m: cast("nodes.ModuleObject", found[m]).values for m in modules}
    columns = list(zip(*rows.values(), strict=True))
    distinct = [len(set(map(_key, column))) for column in columns]
    most = len(modules) // _FEW
    constant = [i for i, count in enumerate(distinct) if count == 1 or count <= most][:_LONGEST]
    splits = [i for i in constant if distinct[i] > 1]
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for module, row in rows.items():
        groups[tuple(_key(row[i]) for i in splits)].append(module)
    own = sorted(set(range(len(distinct))) - set(constant))
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
            found[module] = nodes.ModuleObject((at,), tuple(rows[module][i] for i in own))


def _key(slot: Slot) -> object:
    """Equal only for what is the same: 1 is neither True nor 1.0, nor is 0.0 the other zero."""
    return type(slot), repr(slot)
