"""File: a record as a file, version 6 of the format.

A record is a manifest, a table of objects, the bytes of tensors, source and code. Opening one
checks every byte of it against the manifest and every number against the file, and builds
nothing. docs/record-format.md is the specification.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from tripwire.errors import BadRecord
from tripwire.files import estimate_memory, estimate_wide
from tripwire.recording.format import nodes
from tripwire.recording.format.blobs import (
    MAX_HEADER,
    MOST_ENTRIES,
    BlobRun,
    NewBlob,
    StoredBlobs,
    build_content,
    build_header,
    find_blobs,
    most_runs,
    pack_blobs,
)
from tripwire.recording.format.checks import TableCheck, TableSizes
from tripwire.recording.format.container import (
    OBJECTS,
    ByteSource,
    Content,
    Member,
    damaged,
    find_members,
    replace,
    write_new,
)
from tripwire.recording.format.manifest import (
    SCHEMA,
    Manifest,
    Verdict,
    encode_json,
    encode_manifest,
)
from tripwire.recording.format.nodes import AnyNode, Code, Index, Slot, Table
from tripwire.recording.format.rows import (
    TableLines,
    decode,
    most_memory,
    too_large,
    weigh,
    write_rows,
)

MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"

# What a record may take beside its tensors' bytes and its source: so much for each tensor, and
# so much in all, some of it for the verdict, which is stamped later.
PER_TENSOR, BESIDE, _VERDICT = 64, 8192, 512
_MEMBER, _ENDING = 220, 124  # what the zip and the manifest have for a member, and at the end
_TENSORS = (nodes.Tensor, nodes.TensorView, nodes.Withheld, nodes.Array)

_PIECE = 1 << 16  # bytes of source that are looked at together
_MOST_MANIFEST = 1 << 19  # what decoding a manifest may take, unless the file is larger

_T = TypeVar("_T")


class _Schema(msgspec.Struct):
    schema: str


class _FirstLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of objects.json: where the record starts from, and how much follows.

    First the runs of blobs that share an entry of tensors.safetensors, then codes, then nodes.
    """

    roots: dict[str, Slot]
    nodes: Index = 0
    codes: Index = 0
    packed: Index = 0


# --- writing ---


@dataclass(frozen=True, slots=True)
class NewRecord:
    """All that a record is to hold."""

    manifest: Manifest  # without its members
    table: Table
    blobs: Sequence[NewBlob]
    files: Mapping[str, bytes]  # src/N.py and code/N

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the file, whole or not at all, never over another; returns where."""
        return write_new(Path(path), self.members())

    def members(self) -> dict[str, tuple[Content, int]]:
        """What the file is made of, each with its checksum."""
        rows = [*write_rows(self.table.codes), *write_rows(self.table.nodes)]
        packed = Content.deflate(_encode_objects(self.table, rows, pack_blobs(self.blobs, 0)))
        own = self._count_entries(packed.size)
        contents = {
            TENSORS: build_content(self.blobs, own),
            **{name: Content.of(data) for name, data in self.files.items()},
        }
        size = sum(content.size for content in contents.values())
        runs = pack_blobs(self.blobs, own)
        text = _encode_objects(self.table, rows, runs)
        contents = {OBJECTS: _deflate(text, len(runs), size), **contents}
        digests = {name: content.digest() for name, content in contents.items()}
        members = {name: (contents[name].size, sha) for name, (sha, _) in digests.items()}
        head = encode_manifest(msgspec.structs.replace(self.manifest, members=members))
        rest = {name: (content, digests[name][1]) for name, content in contents.items()}
        return {MANIFEST: (head, head.digest()[1]), **rest}

    def _count_entries(self, objects: int) -> int:
        """How many blobs have an entry of their own: as many as the promised size has room for.

        `objects` is the size of objects.json if none has.
        """
        tensors = sum(isinstance(node, _TENSORS) for node in self.table.nodes)
        room = PER_TENSOR * tensors + BESIDE - _VERDICT - objects
        room -= encode_manifest(self.manifest).size + 2 * _MEMBER + _ENDING
        room -= _MEMBER * (1 + len(self.files))
        own = min(MOST_ENTRIES, len(self.blobs))
        while own and len(build_header(self.blobs, own)) > min(room, MAX_HEADER):
            own -= 1
        return own


def _encode_objects(table: Table, rows: list[bytes], packed: Sequence[BlobRun]) -> bytes:
    head = _FirstLine(table.roots, len(table.nodes), len(table.codes), len(packed))
    return b"\n".join((encode_json(head), *map(encode_json, packed), *rows, b""))


def _deflate(text: bytes, runs: int, beside: int) -> Content:
    """The table as small as a reader believes it: as it is, where a million zeros become 2 KB."""
    content = Content.deflate(text)
    size = content.size + beside
    price = estimate_memory(text) + estimate_wide(text)
    is_believed = price <= most_memory(size) and runs <= most_runs(size)
    return content if is_believed else Content.deflate(text, 0)


def stamp(path: str | os.PathLike[str], verdict: Verdict) -> None:
    """Put a verdict into a record; a reader sees the file before or after, never between."""
    with Record.open(path) as record:
        head = encode_manifest(msgspec.structs.replace(record.manifest, verdict=verdict))
        replace(Path(path), {**record.contents(), MANIFEST: (head, head.digest()[1])})


def copy_record(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> Path:
    """The same record in another file, never over one that is there; returns where."""
    with Record.open(path) as record:
        return write_new(Path(to), record.contents())


@dataclass(frozen=True, slots=True)
class _MemberPieces:
    source: ByteSource
    member: Member

    def __iter__(self) -> Iterator[bytes]:
        return self.source.chunks(self.member.start, self.member.size)


# --- reading ---


class Record:
    """A record's file, checked. It stays open: table and tensors are read when asked for."""

    def __init__(
        self,
        source: ByteSource,
        members: Mapping[str, Member],
        manifest: Manifest,
        blobs: StoredBlobs,
    ) -> None:
        self.source = source
        self.members = members
        self.manifest = manifest
        self.blobs = blobs

    @functools.cached_property
    def table(self) -> Table:
        """All of its nodes: the one thing of a record that takes more memory than its file."""
        lines, head = _begin_objects(self.source, self.members[OBJECTS], self.manifest)
        for _ in range(head.packed):
            lines.take()
        codes = tuple(lines.read_whole(head.codes, _CODE))
        table = Table(head.roots, tuple(lines.read_whole(head.nodes, _NODE)), codes)
        lines.end()
        return table

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Record:
        """Open and check a file. What is wrong with it is said with its name."""
        try:
            return Record._read(ByteSource.open(path))
        except BadRecord as error:
            message = str(error).removesuffix(f" [{error.slug}]")
            raise BadRecord(f"{os.fspath(path)}: {message}", slug=error.slug) from None

    @staticmethod
    def of(data: bytes) -> Record:
        """The same for a file's bytes."""
        return Record._read(ByteSource.of(data))

    @staticmethod
    def _read(source: ByteSource) -> Record:
        with contextlib.ExitStack() as stack:
            stack.callback(source.close)
            record = _read_record(source)
            stack.pop_all()
            return record

    def read(self, name: str) -> bytes:
        """The bytes of a stored member."""
        member = self.members[name]
        return self.source.read(member.start, member.size)

    def contents(self) -> dict[str, tuple[Content, int]]:
        """The members as they are in the file, each with its checksum."""
        return {
            name: (Content(one.size, _MemberPieces(self.source, one), one.inflated), one.crc)
            for name, one in self.members.items()
        }

    def close(self) -> None:
        """Let go of the file."""
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_record(source: ByteSource) -> Record:
    members = find_members(source)
    for name in (MANIFEST, OBJECTS, TENSORS):
        if name not in members:
            raise damaged(f"it has no {name}")
    manifest = _read_manifest(source, members[MANIFEST])
    _check_members(source, members, manifest)
    return Record(source, members, manifest, _check_objects(source, members, manifest))


def _read_manifest(source: ByteSource, member: Member) -> Manifest:
    if zlib.crc32(source.read(member.start, member.size)) != member.crc:
        raise damaged("its manifest was changed")
    # The schema first: of a newer version nothing else need be as it is here.
    schema = _read_json(source, member, _SCHEMA).schema
    version = re.fullmatch(r"([0-9]{1,6})\.([0-9]{1,6})", schema, re.ASCII)
    if version is None:
        raise damaged("its manifest has no schema version")
    major, ours = int(version[1]), int(SCHEMA.partition(".")[0])
    if major > ours:
        raise BadRecord(
            f"This record has the format {schema}; this tripwire reads up to {SCHEMA}.\n"
            "Update tripwire, or write the record again with this version.",
            slug="record-newer",
        )
    if major < ours:
        raise BadRecord(
            f"This record has the format {schema}; this tripwire reads {ours}.x.\n"
            "Write the record again with this version, or open it with the tripwire it is from.",
            slug="record-older",
        )
    return _read_json(source, member, _MANIFEST)


def _check_members(source: ByteSource, members: Mapping[str, Member], manifest: Manifest) -> None:
    if set(members) - {MANIFEST} != set(manifest.members):
        raise damaged("its manifest names other members than it has")
    for name, (size, sha) in manifest.members.items():
        is_hashed = name == OBJECTS or source.digest(members[name]) == sha  # or when it is read
        if members[name].size != size or not is_hashed:
            raise damaged(f"{name} isn't what the manifest says")
        if name.startswith("src/"):
            _check_text(source, members[name])


def _check_text(source: ByteSource, member: Member) -> None:
    """Source is UTF-8. A piece at a time: as a text it may take four times as much."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    try:
        for piece in source.chunks(member.start, member.size, _PIECE):
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise damaged(f"{member.name} isn't UTF-8: {error.reason}") from None


def _check_objects(
    source: ByteSource, members: Mapping[str, Member], manifest: Manifest
) -> StoredBlobs:
    """Go through the table, which is never held as a whole; returns the blobs."""
    most = most_memory(source.size)
    lines, head = _begin_objects(source, members[OBJECTS], manifest)
    if head.packed > most_runs(source.size):
        raise too_large("Runs of blobs")
    packed = (lines.take() for _ in range(head.packed))
    tensors = members[TENSORS]
    blobs = find_blobs(source, tensors, packed)
    sizes = TableSizes(head.nodes, head.codes, tensors.size + most)
    check = TableCheck(head.roots, sizes, blobs, members)
    for _, code, is_whole in lines.read(head.codes, _CODE):
        check.check_code(code, is_whole)
    for number, node, is_whole in lines.read(head.nodes, _NODE):
        check.check_node(number, node, is_whole)
    lines.end()
    return blobs


def _begin_objects(
    source: ByteSource, member: Member, manifest: Manifest
) -> tuple[TableLines, _FirstLine]:
    """The lines after the first, which is read; at their end they are what the manifest says.

    So what is read again later is what was checked, whoever writes to the file meanwhile.
    """
    left = weigh(source.inflate(member), most_memory(source.size))
    lines = TableLines(source.inflate(member, manifest.members[OBJECTS][1]), left)
    return lines, decode(lines.take(), _FIRST_LINE)


def _read_json(source: ByteSource, member: Member, decoder: msgspec.json.Decoder[_T]) -> _T:
    text = source.read(member.start, member.size)
    if estimate_memory(text) + estimate_wide(text) > max(_MOST_MANIFEST, source.size):
        raise too_large(member.name)
    return decode(text, decoder, member.name)


_SCHEMA = msgspec.json.Decoder(_Schema)
_MANIFEST = msgspec.json.Decoder(Manifest)
_FIRST_LINE = msgspec.json.Decoder(_FirstLine)
_CODE = msgspec.json.Decoder(Code)
_NODE: msgspec.json.Decoder[AnyNode] = msgspec.json.Decoder(AnyNode)
