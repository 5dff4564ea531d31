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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from tripwire.recording.format.container import ByteSource, Content, Member, damaged

MOST_ENTRIES = 64
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


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Blobs of one form that lie one after another in a file."""

    first: Blob
    count: int


class StoredBlobs:
    """The blobs of a file. Nothing of them is in memory until it is asked for."""

    def __init__(self, source: ByteSource, runs: Sequence[ByteRun] = ()) -> None:
        self._source = source
        self._runs = runs
        self._ends = list(itertools.accumulate(run.count for run in runs))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Blob:
        """Where a blob lies, and what it is."""
        at = bisect.bisect_right(self._ends, number)
        if number < 0 or at == len(self._runs):
            raise IndexError(number)
        run = self._runs[at]
        first = run.first
        start = first.start + (number - self._ends[at] + run.count) * first.size
        return Blob(first.dtype, first.shape, start, first.size)

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


def find_blobs(source: ByteSource, member: Member, packed: tuple[BlobRun, ...]) -> StoredBlobs:
    """Every blob, each within the file, one after another without gaps."""
    entries, start = read_header(source, member)
    own = len(entries) - (REST in entries)
    if set(entries) - {REST} != {str(n) for n in range(own)} or (REST in entries) != bool(packed):
        raise damaged("tensors.safetensors has other entries than objects.json says")
    runs: list[ByteRun] = []
    position = start
    for number in range(own):
        entry = entries[str(number)]
        blob = _place(entry.dtype, entry.shape, position)
        if entry.data_offsets != (position - start, position - start + blob.size):
            raise damaged(f"blob {number} isn't where its shape says")
        runs.append(ByteRun(blob, 1))
        position += blob.size
    first = position
    for dtype, shape, count in packed:
        runs.append(ByteRun(_place(dtype, shape, position), count))
        position += count * runs[-1].first.size
    if packed:
        rest = entries[REST]
        offsets = (first - start, position - start)
        if (rest.dtype, rest.shape, rest.data_offsets) != ("U8", (position - first,), offsets):
            raise damaged("the shared blob isn't as long as objects.json says")
    if position != member.start + member.size:
        raise damaged("tensors.safetensors is longer or shorter than its blobs")
    return StoredBlobs(source, runs)


def _place(dtype: str, shape: tuple[int, ...], start: int) -> Blob:
    name = TORCH_NAMES.get(dtype)
    if name is None:
        raise damaged(f"a blob has the dtype {dtype[:20]!r}")
    if len(shape) > 64 or any(not 0 <= size < 1 << 63 for size in shape):
        raise damaged("a blob has a shape that no tensor has")
    return Blob(dtype, shape, start, math.prod(shape) * ITEM_SIZES[name])
