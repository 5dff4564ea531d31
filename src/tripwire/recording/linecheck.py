"""Line check: what the lines of objects.json say must be possible before anything is built.

A pass over all lines keeps none of them, only the lengths of words and a few numbers; so a file
that is refused takes little memory, however much it claims to hold.
"""

from __future__ import annotations

import binascii
import itertools

from tripwire.errors import BadRecord
from tripwire.recording import lines, nodes
from tripwire.recording.blobs import StoredBlobs
from tripwire.recording.checks import (
    DICT_FORMS,
    ENTRY,
    NAME,
    NODE,
    PART,
    REFERENCE,
    ROOTS,
    check_node,
    check_root,
    check_slot,
    check_tensors,
)
from tripwire.recording.container import damaged
from tripwire.recording.lines import count_slots, items_of
from tripwire.recording.nodes import Items
from tripwire.recording.words import Lengths, NameCount, count_names, measure_names


class LineCheck:
    """What a pass over the lines has to remember: the lengths of words, a few numbers."""

    def __init__(self, head: lines.Head, blobs: StoredBlobs, room: int) -> None:
        """`room` is the memory that may be taken beyond that of the text."""
        self._blobs = blobs
        self._files = len(head.files)
        self._codes = 0
        self._copied: set[int] = set()  # blobs of arrays
        self._room = room
        self._before: nodes.Node | None = None  # the latest line
        self._stands_for = 0  # so many nodes
        self._memory = 0  # so much it takes, with those that belong to it
        self._names = 0  # so many it has
        self._values = 0  # and so many values for them, if it is one of modules
        self._lengths = Lengths()  # pieces refer to none, words to pieces
        self._count(head.pieces)
        self._lengths = Lengths((), measure_names(head.pieces, self._lengths))
        self._count(head.words)
        words = measure_names(head.words, self._lengths)
        self._lengths = Lengths(words, self._lengths.pieces)
        self._left = self._total = head.count
        self._nodes = self._left + sum(run[0] for run in head.tensors)
        for count, blob, kind, device in head.tensors:
            self._spend(NODE * count)
            check_tensors(count, blob, kind, device, blobs)
        self._roots: dict[int, list[str]] = {}  # those that are still to be seen, by their nodes
        for name, slot in head.roots.items():
            check_slot(slot, self._nodes)
            if name in ROOTS:
                at = slot[0] if type(slot) is tuple else self._nodes
                self._roots.setdefault(at, []).append(name)

    def take_codes(self, line: lines.Codes) -> None:
        """The next line of codes."""
        if line.file >= self._files:
            raise damaged("objects.json refers to a file that it doesn't have")
        count = self._count(line.names)
        free = sum(line.numbers[lines.NUMBERS - 1 :: lines.NUMBERS])
        if len(line.numbers) != lines.NUMBERS * count or self._count(line.free) != free:
            raise damaged("codes have other numbers than names")
        self._spend(NODE * count)
        self._codes += count

    def take(self, line: nodes.Node, memory: int) -> None:
        """The next line, and what its JSON takes."""
        if isinstance(line, lines.Again):
            self._take_again(line)
            return
        if not isinstance(line, lines.More):
            self._end_line()
            self._memory = 0
        self._memory += memory
        for item in items_of(line):
            check_slot(item, self._nodes)
            if type(item) is tuple:
                self._spend(REFERENCE * (item[-1] - item[0]))
        if isinstance(line, lines.More):
            self._take_more(line)
        else:
            self._before = line
            self._count_nodes(line, self._take_node(line))

    def finish(self) -> None:
        """All lines were seen."""
        self._end_line()
        if self._left:
            raise damaged("objects.json has another number of nodes than it says")
        for names in self._roots.values():  # a plain value, a tensor, a module
            check_root(names[0], None)

    def _take_node(self, line: nodes.Node) -> int:
        """Check what isn't a further line of something; returns how many nodes it stands for."""
        match line:
            case lines.Modules():
                return self._take_modules(line)
            case lines.Extras():
                return self._take_extras(line)
            case lines.Libraries():
                self._check_module(line.module)
                return self._count(line.names)
            case lines.Functions():
                return self._take_functions(line)
            case lines.Cells():
                count = count_slots(line.contents) + line.empty
                self._spend(NODE * count)
                return count
            case lines.Object():
                self._names = self._check_attributes(line.names, line.values)
            case lines.Class() | lines.Namespace() | lines.Module():
                self._check_module(line.module)
                self._check_attributes(line.names, line.values)
            case lines.Dict():
                self._check_pairs(line.keys, line.values)
                if line.form not in DICT_FORMS:
                    raise damaged("a dict has a form that isn't known")
            case _ if isinstance(line, _WITH_ITEMS):
                self._count_items(line.items)
            case _:
                check_node(line, self._blobs)
                if isinstance(line, nodes.Array):
                    self._take_array(line)
        return 1

    def _count_nodes(self, line: nodes.Node, count: int) -> None:
        if not count:
            raise damaged("a line of objects.json stands for nothing")
        at = self._total - self._left
        self._left -= count
        self._stands_for = count
        for number in [one for one in self._roots if at <= one < at + count]:
            for name in self._roots.pop(number):
                check_root(name, line)

    def _take_again(self, line: lines.Again) -> None:
        before = self._before
        if before is None or self._stands_for != 1 or isinstance(before, lines.Modules):
            raise damaged("there is nothing that could be there again")
        self._end_line()
        self._spend(line.count * self._memory)
        self._count_nodes(before, line.count)
        self._before = None

    def _end_line(self) -> None:
        """Nothing more of a line follows."""
        match self._before:
            case lines.Modules(count=count, columns=columns, sizes=sizes):
                if count * (self._names - len(columns)) != self._values:
                    raise damaged("modules have other values than names")
                if max(sum(sizes), columns[-1] + 1 if columns else 0) > self._names:
                    raise damaged("modules have a value or a key where there is no name")
                self._spend(count * (NODE * (1 + len(sizes)) + ENTRY * self._names))
            case lines.Object(slots=slots) if slots > self._names:
                raise damaged("an object has more slots than names")

    def _take_more(self, line: lines.More) -> None:
        match self._before:
            case lines.Object() | lines.Class() | lines.Namespace() | lines.Module():
                self._names += self._check_attributes(_only_text(line), line.values)
                return
            case lines.Extras():
                names = self._check_attributes(_only_text(line), line.values)
                self._spend(ENTRY * names * (self._stands_for - 1))
                return
            case lines.Dict():
                self._check_pairs(line.items, line.values)
                return
            case lines.Modules():
                if isinstance(line.items, str):
                    self._names += self._count(line.items)
                else:
                    self._values += count_slots(line.items)
            case nodes.String():
                _only_text(line)
            case nodes.Bytes() | nodes.Text():
                _check_base64(_only_text(line))
            case _ if isinstance(self._before, _WITH_ITEMS):
                self._count_items(line.items)
            case _:
                raise damaged("there is more of something that has no items")
        if line.values:
            raise damaged("there are values for something that has none")

    def _take_modules(self, line: lines.Modules) -> int:
        columns = line.columns
        if self._count(line.tables) != len(line.sizes) or len(columns) != len(line.constants):
            raise damaged("modules have other names than values")
        if any(a >= b for a, b in itertools.pairwise(columns)):
            raise damaged("modules have a value where there is no place")
        self._names, self._values = self._count(line.names), count_slots(line.values)
        return line.count

    def _take_extras(self, line: lines.Extras) -> int:
        tensors = count_slots(line.tensors)
        if line.grads and count_slots(line.grads) != tensors:
            raise damaged("there is another number of gradients than of tensors")
        names = self._check_attributes(line.names, line.values)
        self._spend(tensors * NODE + ENTRY * names * (tensors - 1))
        return tensors

    def _take_array(self, line: nodes.Array) -> None:
        """Each has its own copy of the bytes; the first is as large as the file says."""
        size = self._blobs[line.blob].size
        if line.blob in self._copied:
            self._spend(size)
        else:
            self._copied.add(line.blob)
            self._memory += size

    def _take_functions(self, line: lines.Functions) -> int:
        for row in line.codes:
            if not row[0] <= row[-1] < self._codes:
                raise damaged("objects.json refers to a code that it doesn't have")
        count, cells = count_slots(line.codes), count_slots(line.closures)
        if not count or cells % count:
            raise damaged("functions have another number of cells each")
        self._spend(NODE * count)
        return count

    def _check_module(self, text: str) -> None:
        if self._count(text) != 1:
            raise damaged("the name of a module isn't one name")

    def _check_pairs(self, names: Items, values: Items) -> None:
        if self._count_items(names) != self._count_items(values):
            raise damaged("there are more names or keys than values, or less")

    def _check_attributes(self, text: str, values: Items) -> int:
        """How many names a text has; those that aren't of None have a value each."""
        count = self._count_names(text)
        if isinstance(values, str) or count.given != count_slots(values):
            raise damaged("an object has another number of names than of values")
        return count.names

    def _count_items(self, items: Items) -> int:
        """How many slots there are, or strings."""
        return self._count(items) if isinstance(items, str) else count_slots(items)

    def _count(self, text: str) -> int:
        """How many names a text has, none of them of None."""
        count = self._count_names(text)
        if count.names != count.given:
            raise damaged("a name in objects.json has no value")
        return count.names

    def _count_names(self, text: str) -> NameCount:
        self._spend(PART * sum(map(text.count, (".", "_", "- "))))
        count = count_names(text, self._lengths)
        self._spend(NAME * count.names + count.growth)
        return count

    def _spend(self, amount: int) -> None:
        self._room -= amount
        self._memory += amount
        if self._room < 0:
            raise too_large("what it stands for")


_WITH_ITEMS = (lines.List, lines.Tuple, lines.Set, lines.Deque, lines.NamedTuple)


def _only_text(line: lines.More) -> str:
    if not isinstance(line.items, str):
        raise damaged("there is more of something, but not the text that it needs")
    return line.items


def _check_base64(text: str) -> None:
    try:
        binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise damaged(f"objects.json: {error}") from None


def too_large(what: str, name: str = "objects.json") -> BadRecord:
    """The error for a member that says too much."""
    return BadRecord(
        f"{name} would take more memory than a record may: {what}.\n"
        "tripwire writes no such file; it may have been made to do harm.",
        slug="record-too-large",
    )
