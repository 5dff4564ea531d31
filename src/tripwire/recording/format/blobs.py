"""Blobs: the bytes of storages, laid out as safetensors lays out tensors.

A blob is one storage, trimmed to the bytes that something uses. The first ones have an entry of
their own, named by their number. The entry of one tensor is longer than 64 bytes, which is all
that a record may take for it, so the blobs beyond share one entry, "rest", one after another, and
objects.json says what they are (docs/design/0008-records.md has the sum).
"""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from tripwire.recording.format.container import OBJECTS, ByteSource, Content, Member, damaged

MOST_ENTRIES = 64
_MOST_BLOBS = 1 << 31
REST = "rest"
MAX_HEADER = 1 << 16

# torch's name of a dtype: the name in safetensors, and bytes per element.
_NAMED = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
# Those that safetensors can't name, or can't load into torch: their blobs are plain bytes.
_UNNAMED = {
    "float8_e8m0fnu": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex128": 16,
}
ITEM_SIZES = {**{name: size for name, (_, size) in _NAMED.items()}, **_UNNAMED}
STORED_NAMES = {name: stored for name, (stored, _) in _NAMED.items()}
TORCH_NAMES = {stored: name for name, stored in STORED_NAMES.items()}


# The dtype and shape of blobs that follow one another, and how many they are.
BlobRun = tuple[
    str,
    tuple[Annotated[int, msgspec.Meta(ge=0)], ...],
    Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)],
]


class BlobEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Chunked(Protocol):
    """Bytes to be written."""

    def chunks(self) -> Iterator[memoryview | bytes]:
        """Them, piece by piece; the same each time."""


@dataclass(frozen=True, slots=True)
class NewBlob:
    """A blob to write."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    size: int
    data: Chunked


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob of a file, by where it lies."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


# --- writing ---


@dataclass(frozen=True, slots=True)
class _Pieces:
    head: bytes
    blobs: Sequence[NewBlob]

    def __iter__(self) -> Iterator[memoryview | bytes]:
        yield self.head
        for blob in self.blobs:
            yield from blob.data.chunks()


def build_content(blobs: Sequence[NewBlob], own: int) -> Content:
    """The whole member tensors.safetensors, with an entry for each of the first `own` blobs."""
    head = build_header(blobs, own)
    return Content(len(head) + sum(blob.size for blob in blobs), _Pieces(head, blobs))


def build_header(blobs: Sequence[NewBlob], own: int) -> bytes:
    """What tensors.safetensors begins with."""
    entries: dict[str, BlobEntry] = {}
    position = 0
    for number, blob in enumerate(blobs[:own]):
        entries[str(number)] = BlobEntry(blob.dtype, blob.shape, (position, position + blob.size))
        position += blob.size
    if len(blobs) > own:
        rest = sum(blob.size for blob in blobs[own:])
        entries[REST] = BlobEntry("U8", (rest,), (position, position + rest))
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def pack_blobs(blobs: Sequence[NewBlob], own: int) -> tuple[BlobRun, ...]:
    """What objects.json has to say of the blobs without an entry."""
    forms = itertools.groupby((blob.dtype, blob.shape) for blob in blobs[own:])
    return tuple((dtype, shape, len(list(run))) for (dtype, shape), run in forms)


# --- reading ---


class BlobRuns:
    """Runs of blobs that lie one after another in a file, kept as the text that says what they are.

    So a run takes 16 bytes beside that text, where objects would take 300.
    """

    def __init__(self, start: int) -> None:
        self.end = start  # where the next one begins in the file
        self._text = bytearray()
        self._lines = array("I", [0])
        self._counts = array("I", [0])  # of blobs, before each run
        self._starts = array("Q")

    def __len__(self) -> int:
        return self._counts[-1]

    def add(self, line: bytes, most: int) -> None:
        """One more run, as a line of the table; it must end where the file does, or before."""
        dtype, shape, count = _decode_run(line)
        size = _place(dtype, shape, 0).size
        if self.end + count * size > most or len(self) + count >= _MOST_BLOBS:
            raise damaged("tensors.safetensors is shorter than its blobs")
        self._starts.append(self.end)
        self._counts.append(len(self) + count)
        self._text += line
        self._lines.append(len(self._text))
        self.end += count * size

    def __getitem__(self, number: int) -> Blob:
        at = bisect.bisect_right(self._counts, number) - 1
        dtype, shape, _ = _decode_run(bytes(self._text[self._lines[at] : self._lines[at + 1]]))
        size = _place(dtype, shape, 0).size
        return Blob(dtype, shape, self._starts[at] + (number - self._counts[at]) * size, size)


class StoredBlobs:
    """The blobs of a file. Nothing of them is in memory until it is asked for."""

    def __init__(self, source: ByteSource, own: Sequence[Blob], packed: BlobRuns) -> None:
        self._source = source
        self._own = own
        self._packed = packed

    def __len__(self) -> int:
        return len(self._own) + len(self._packed)

    def __getitem__(self, number: int) -> Blob:
        """Where a blob lies, and what it is."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        own = len(self._own)
        return self._own[number] if number < own else self._packed[number - own]

    def read_into(self, number: int, buffer: memoryview) -> None:
        """Copy a blob's bytes into a buffer of its size."""
        self._source.read_into(self[number].start, buffer)

    def read(self, number: int) -> bytes:
        """A blob's bytes."""
        blob = self[number]
        return self._source.read(blob.start, blob.size)


def read_header(source: ByteSource, member: Member) -> tuple[dict[str, BlobEntry], int]:
    """The entries of a safetensors member, and where its data begins in the file."""
    if member.size < 8:
        raise damaged("tensors.safetensors is cut off")
    length = int.from_bytes(source.read(member.start, 8), "little")
    if length > min(member.size - 8, MAX_HEADER):
        raise damaged("the header of tensors.safetensors is said to be larger than it can be")
    text = source.read(member.start + 8, length)
    if text.count(b"{") > MOST_ENTRIES + 3:
        raise damaged("tensors.safetensors has too many entries")
    try:
        entries = _HEADER.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise damaged(f"the header of tensors.safetensors: {error}") from None
    return entries, member.start + 8 + length


_HEADER = msgspec.json.Decoder(dict[str, BlobEntry])
_RUN: msgspec.json.Decoder[BlobRun] = msgspec.json.Decoder(BlobRun)


def _decode_run(line: bytes) -> BlobRun:
    try:
        return _RUN.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise damaged(f"{OBJECTS}: {error}") from None


def most_runs(size: int) -> int:
    """How many runs a file of this size may have: where nothing is deflated, one takes 27 bytes."""
    return 8192 + size // 16


def find_blobs(source: ByteSource, member: Member, packed: Iterable[bytes]) -> StoredBlobs:
    """Every blob, each within the file, one after another without gaps."""
    entries, start = read_header(source, member)
    own = [_place_own(entries, start, number) for number in range(len(entries) - (REST in entries))]
    if any(blob.start != before.start + before.size for before, blob in itertools.pairwise(own)):
        raise damaged("the blobs of tensors.safetensors have gaps between them")
    end = member.start + member.size
    first = own[-1].start + own[-1].size if own else start
    runs = BlobRuns(first)
    for line in packed:
        runs.add(line, end)
    if (REST in entries) != bool(len(runs)):
        raise damaged("tensors.safetensors has other entries than objects.json says")
    if REST in entries:
        rest = entries[REST]
        offsets = (first - start, runs.end - start)
        if (rest.dtype, rest.shape, rest.data_offsets) != ("U8", (runs.end - first,), offsets):
            raise damaged("the shared blob isn't as long as objects.json says")
    if runs.end != end:
        raise damaged("tensors.safetensors is longer or shorter than its blobs")
    return StoredBlobs(source, own, runs)


def _place_own(entries: Mapping[str, BlobEntry], start: int, number: int) -> Blob:
    """The blob of an entry: the first one begins where the data does."""
    entry = entries.get(str(number))
    if entry is None:
        raise damaged("tensors.safetensors has entries with other names than numbers")
    first, last = entry.data_offsets
    blob = _place(entry.dtype, entry.shape, start + first)
    if last - first != blob.size or (number == 0 and first != 0):
        raise damaged(f"blob {number} isn't where its shape says")
    return blob


def _place(dtype: str, shape: tuple[int, ...], start: int) -> Blob:
    name = TORCH_NAMES.get(dtype)
    if name is None:
        raise damaged(f"a blob has the dtype {dtype[:20]!r}")
    if len(shape) > 64 or any(not 0 <= size < 1 << 63 for size in shape):
        raise damaged("a blob has a shape that no tensor has")
    return Blob(dtype, shape, start, math.prod(shape) * ITEM_SIZES[name])
