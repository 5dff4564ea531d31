"""Spelling: a table as the text of objects.json.

The text is JSON, one code or node a line. So a reader (recording/spelled.py) checks a file line by
line and keeps none of it before all of it is known to be sound. And it is short: a model has
thousands of modules that differ in a number or two, and a record promises to be hardly larger
than its tensors. What modules have in common is said once; tensors that are nothing but a blob
follow one another.
"""

from __future__ import annotations

import binascii
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import msgspec

from tripwire.recording import lines, nodes
from tripwire.recording.blobs import BlobRun
from tripwire.recording.checks import find_slot_fields, slots_of
from tripwire.recording.lines import join_names
from tripwire.recording.nodes import AnyNode, Slot
from tripwire.recording.texts import encode_json

_LONGEST = 500  # items in a line; a container has more lines for the rest
_PIECE = 12_288  # characters of a string or bytes in a line; a multiple of three, for base64
_FEW = 16  # a value that so few parts of the modules differ in makes forms of their own
_T = TypeVar("_T")


class _Form(nodes.ModuleForm, tag="nnform", frozen=True):
    """A form, and the values that all its modules have."""

    columns: tuple[int, ...] = ()
    constants: tuple[Slot, ...] = ()


def spell(table: nodes.Table, packed: tuple[BlobRun, ...]) -> bytes:
    """The text of a table."""
    found = _share_texts(_share_forms(list(table.nodes)))
    order = sorted(range(len(found)), key=lambda i: _place(found[i]))
    numbers = {old: new for new, old in enumerate(order)}
    renumber = functools.partial(_renumber, numbers=numbers)
    words = _find_words(found)
    listed = [found[i] for i in order]
    tensors = [node for node in listed if isinstance(node, nodes.Tensor)]
    head = lines.Head(
        {name: renumber(slot) for name, slot in table.roots.items()},
        len(listed) - len(tensors),
        join_names(((word, False) for word in words), {}),
        tuple(_find_runs(tensors)),
        packed,
    )
    spelled = [
        encode_json([line.__struct_config__.tag, *_shorten(line)])
        for group in _group([_map_slots(node, renumber) for node in listed[: head.count]])
        for line in _make_lines(group, words)
    ]
    codes = b",\n".join(encode_json(_shorten(code)) for code in table.codes)
    start = encode_json(head).removesuffix(b"}") + lines.CODES
    parts = (start, codes, lines.NODES, b",\n".join(spelled), lines.END)
    return b"\n".join(part for part in parts if part)


def _place(node: nodes.Node) -> tuple[object, ...]:
    """Forms, modules by their forms, extras that are alike, all else, tensors by their blobs."""
    match node:
        case _Form():
            return (0,)
        case nodes.ModuleObject():
            return 1, node.form[0]
        case nodes.TensorExtras():
            return 2, repr(_alike(node))
        case nodes.Tensor():
            return 4, node.device, node.kind, node.blob
    return (3,)


def _alike(node: nodes.Node) -> object:
    """Equal for nodes that share a line."""
    match node:
        case nodes.ModuleObject():
            return node.form
        case nodes.TensorExtras():
            return node.grad is None, node.cls, node.names, tuple(map(_key, node.values))
    return id(node)


def _group(found: Iterable[nodes.Node]) -> Iterator[list[nodes.Node]]:
    """Neighbours that share a line."""
    for _, same in itertools.groupby(found, _alike):
        yield list(same)


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


def _make_lines(group: list[nodes.Node], words: Mapping[str, int]) -> Iterator[nodes.Node]:
    """The line of a node or of some that share one, and further lines for what is long."""
    replace = msgspec.structs.replace
    match node := group[0]:
        case nodes.ModuleObject():
            modules = cast("list[nodes.ModuleObject]", group)
            parts = _split(tuple(slot for module in modules for slot in module.values))
            yield lines.Modules(node.form, len(modules), parts[0])
            yield from map(lines.More, parts[1:])
        case nodes.TensorExtras():
            yield from _make_extras(cast("list[nodes.TensorExtras]", group), words)
        case nodes.Library():
            yield lines.Library(words.get(node.module, node.module), node.name)
        case nodes.Object():
            yield from _make_object(node, words)
        case _Form():
            yield from _make_form(node, words)
        case nodes.Dict():
            keys, values = _split(node.keys), _split(node.values)
            yield replace(node, keys=keys[0], values=values[0])
            yield from itertools.starmap(lines.More, zip(keys[1:], values[1:], strict=True))
        case _ if isinstance(node, lines.WITH_NAMES):
            names, values = _split(node.names), _split(node.values)
            yield replace(node, names=names[0], values=values[0])
            yield from itertools.starmap(lines.More, zip(names[1:], values[1:], strict=True))
        case _ if isinstance(node, lines.WITH_ITEMS):
            parts = _split(node.items)
            yield replace(node, items=parts[0])
            yield from map(lines.More, parts[1:])
        case nodes.String(text=text):
            yield nodes.String(text[:_PIECE])
            yield from (lines.More((text[i : i + _PIECE],)) for i in _further(text))
        case nodes.Bytes(data=data) | nodes.Text(data=data):
            yield replace(node, data=data[:_PIECE])
            pieces = (
                binascii.b2a_base64(data[i : i + _PIECE], newline=False) for i in _further(data)
            )
            yield from (lines.More((piece.decode(),)) for piece in pieces)
        case _:
            yield node


def _make_object(node: nodes.Object, words: Mapping[str, int]) -> Iterator[nodes.Node]:
    """A configuration has a hundred attributes that are None."""
    parts = _join_attributes(node, words)
    yield lines.Object(node.cls, *parts[0], node.content, node.slots, node.slot_values)
    yield from (lines.More((text,), values) for text, values in parts[1:])


def _make_extras(group: list[nodes.TensorExtras], words: Mapping[str, int]) -> Iterator[nodes.Node]:
    parts = _join_attributes(group[0], words)
    for some in _split(tuple(group)):
        tensors = tuple(node.tensor for node in some)
        grads = () if some[0].grad is None else tuple(node.grad for node in some)
        yield lines.Extras(tensors, grads, some[0].cls, *parts[0])
        yield from (lines.More((text,), values) for text, values in parts[1:])


def _join_attributes(
    node: nodes.Object | nodes.TensorExtras, words: Mapping[str, int]
) -> list[tuple[str, tuple[Slot, ...]]]:
    """For each line the names, and the values that aren't None."""
    return [
        (
            join_names(((name, value is None) for name, value in part), words),
            tuple(value for _, value in part if value is not None),
        )
        for part in _split(tuple(zip(node.names, node.values, strict=True)))
    ]


def _make_form(node: _Form, words: Mapping[str, int]) -> Iterator[nodes.Node]:
    def join(names: Iterable[str]) -> str:
        return join_names(((name, False) for name in names), words)

    *keys, last = node.keys or ((),)
    parts = [join(part) for part in _split(last)]
    texts = (*map(join, keys), parts[0]) if node.keys else ()
    yield lines.Form(
        node.cls, join(node.names), join(node.tables), texts, node.columns, node.constants
    )
    for text in parts[1:]:
        yield lines.More((text,))


def _split(items: tuple[_T, ...]) -> list[tuple[_T, ...]]:
    return [items[i : i + _LONGEST] for i in range(0, len(items), _LONGEST)] or [()]


def _further(data: str | bytes) -> range:
    """Where the pieces begin that the first line has no room for."""
    return range(_PIECE, len(data), _PIECE)


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
    """A node with other slots."""
    changed: dict[str, object] = {}
    for name, many in find_slot_fields(type(node)):
        value = getattr(node, name)
        changed[name] = tuple(map(change, value)) if many else change(value)
    return msgspec.structs.replace(node, **changed) if changed else node


def _renumber(slot: Slot, numbers: Mapping[int, int]) -> Slot:
    return (numbers[slot[0]],) if type(slot) is tuple else slot


# --- words ---


def _share_texts(found: list[nodes.Node]) -> list[nodes.Node]:
    """Texts that stand in many slots become nodes."""
    counts = Counter(slot for node in found for slot in slots_of(node) if type(slot) is str)
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
    match node:
        case nodes.Library():
            yield node.module
        case nodes.Object() | nodes.TensorExtras():
            yield from node.names
        case nodes.ModuleForm():
            yield from node.names
            yield from node.tables
            for keys in node.keys:
                yield from keys


def _find_words(found: Iterable[nodes.Node]) -> dict[str, int]:
    """Names that are worth a number, most frequent first."""
    counts = Counter(word for node in found for word in _words_of(node))
    often = [word for word, n in counts.most_common() if (n - 1) * len(word) > 2 * n + 1]
    return {word: number for number, word in enumerate(often)}


# --- modules ---


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
    own = [i for i in range(len(distinct)) if i not in set(constant)]
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
