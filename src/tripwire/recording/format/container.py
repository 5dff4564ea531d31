"""Container: a record is a zip file whose members lie one after another.

The table of objects is deflated, all others are stored as they are. Reading trusts nothing:
members are found by walking the file from its first byte, the directory at the end must agree with
the walk, and no memory is allocated because of a size that a file claims. The result is positions;
bytes are read from there, in place.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tripwire.errors import BadRecord
from tripwire.files import DraftFile, NotOurs, make_folder, open_regular, replacing, writing_beside

MAX_MEMBERS = 1000  # each costs some 800 bytes of memory, and less in the file
CHUNK = 1 << 18
OBJECTS = "objects.json"  # the one member that is deflated

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_BIG = 0xFFFFFFFF
_EPOCH = 0x21  # 1 January 1980: the same record gives the same bytes
_STORED, _DEFLATED = 0, 8  # methods
_PIECE = 1 << 15  # bytes that are inflated together
_NAME = re.compile(
    rb"manifest\.json|objects\.json|tensors\.safetensors|src/\d{1,6}\.py|code/\d{1,6}"
)

Chunks = Iterable[bytes | bytearray | memoryview]


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a member to write: known by length, made only when asked for."""

    size: int  # in the file
    chunks: Chunks  # must start afresh each time it is iterated
    inflated: int | None = None  # how many bytes a deflated one holds
    held_crc: int | None = None  # and their crc32

    @staticmethod
    def of(data: bytes) -> Content:
        return Content(len(data), (data,))

    @staticmethod
    def deflate(data: bytes, level: int = 9) -> Content:
        packed = zlib.compress(data, level, -zlib.MAX_WBITS)
        return Content(len(packed), (packed,), len(data), zlib.crc32(data))

    def digest(self) -> tuple[str, int]:
        """The sha256 of its bytes in the file; the crc32 of what they hold, as zip has it."""
        sha, crc = hashlib.sha256(), 0
        for chunk in self.chunks:
            sha.update(chunk)
            crc = zlib.crc32(chunk, crc)
        return sha.hexdigest(), crc if self.held_crc is None else self.held_crc


@dataclass(frozen=True, slots=True)
class Member:
    """Where a member's bytes lie."""

    name: str
    start: int
    size: int  # in the file
    crc: int
    inflated: int | None = None  # how many bytes a deflated one says that it holds


def damaged(why: str) -> BadRecord:
    """The error for a file that isn't what a writer of records leaves."""
    return BadRecord(
        f"This is not a record, or it is damaged: {why}.\n"
        "Get the file again from where it was made.",
        slug="record-damaged",
    )


# --- writing ---


def write_members(out: BinaryIO, members: Mapping[str, tuple[Content, int]]) -> None:
    """Write members, each with its crc32, in order."""
    directory: list[bytes] = []
    position = 0
    for name, (content, crc) in members.items():
        head = _Head(name.encode("ascii"), position, content.size, content.inflated, crc)
        position += out.write(head.local())
        written = sum(out.write(chunk) for chunk in content.chunks)
        if written != content.size:
            raise RuntimeError(f"{name} changed its size while it was written")
        position += written
        directory.append(head.central())
    out.write(b"".join(directory))
    out.write(_ending(len(directory), sum(map(len, directory)), position))


@dataclass(frozen=True, slots=True)
class _Head:
    """What a zip says about a member, in its header and in its directory."""

    name: bytes
    start: int
    size: int
    inflated: int | None
    crc: int

    @property
    def _method(self) -> int:
        return _STORED if self.inflated is None else _DEFLATED

    def _sizes(self) -> tuple[bytes, int, int]:
        """Wide sizes, where there must be some; the sizes in the file and of what is held."""
        held = self.size if self.inflated is None else self.inflated
        if max(self.size, held) >= _BIG:
            return struct.pack("<2Q", held, self.size), _BIG, _BIG
        return b"", self.size, held

    def local(self) -> bytes:
        wide, *sizes = self._sizes()
        extra = struct.pack("<2H", 1, len(wide)) + wide if wide else b""
        version = 45 if wide else 20
        head = (b"PK\3\4", version, 0, self._method, 0, _EPOCH, self.crc, *sizes)
        return _LOCAL.pack(*head, len(self.name), len(extra)) + self.name + extra

    def central(self) -> bytes:
        wide, *sizes = self._sizes()
        wide += struct.pack("<Q", self.start) if self.start >= _BIG else b""
        extra = struct.pack("<2H", 1, len(wide)) + wide if wide else b""
        version = 45 if wide else 20
        head = (b"PK\1\2", version, version, 0, self._method, 0, _EPOCH, self.crc, *sizes)
        rest = (len(self.name), len(extra), 0, 0, 0, 0, min(self.start, _BIG))
        return _CENTRAL.pack(*head, *rest) + self.name + extra


def _ending(count: int, size: int, start: int) -> bytes:
    wide = b""
    if count >= 0xFFFF or start >= _BIG:
        wide = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
        wide += _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
    few = min(count, 0xFFFF)
    end = _END.pack(b"PK\5\6", 0, 0, few, few, min(size, _BIG), min(start, _BIG), 0)
    return wide + end


def _flush(out: BinaryIO) -> None:
    out.flush()
    os.fsync(out.fileno())


def write_new(path: Path, members: Mapping[str, tuple[Content, int]]) -> Path:
    """Write a whole file or nothing, beside any that exist: `x.rec`, `x-1.rec`, ..."""
    make_folder(path.parent)
    try:
        with writing_beside(path) as draft:
            write_members(draft.file, members)
            _flush(draft.file)
            return _link_free(draft, path)
    except OSError as error:
        error.filename = str(path)  # the draft has a name that nobody knows
        raise


def _link_free(draft: DraftFile, path: Path) -> Path:
    number = 0
    while True:
        target = path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path
        try:
            draft.link(target.name)
        except FileExistsError:
            number += 1
        else:
            return target


def replace(path: Path, members: Mapping[str, tuple[Content, int]]) -> None:
    """Write a file anew in the place of the one that is there."""
    with replacing(path) as out:
        write_members(out, members)
        _flush(out)


# --- reading ---


class ByteSource:
    """The bytes of a file, or bytes in memory, by position."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, io.SEEK_END)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> ByteSource:
        try:
            return ByteSource(open_regular(path))
        except NotOurs as error:  # a pipe, say, which nobody waits for
            if os.path.isdir(path):
                raise BadRecord("It is a folder. Name a record in it.", slug="no-record") from None
            raise damaged(str(error)) from None

    @staticmethod
    def of(data: bytes) -> ByteSource:
        return ByteSource(io.BytesIO(data))

    def read(self, start: int, size: int) -> bytes:
        """Exactly `size` bytes; the caller knows that the file is that long."""
        self._file.seek(start)
        data = self._file.read(size)
        if len(data) == size:
            return data
        whole = bytearray(size)  # one read gives at most 2 GiB
        self.read_into(start, memoryview(whole))
        return bytes(whole)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer."""
        self._file.seek(start)
        done = 0
        while done < len(buffer):
            count = self._file.readinto(buffer[done : done + (1 << 30)])  # type: ignore[attr-defined]  # raw files and BytesIO have it
            if not count:
                raise damaged("it ends early")
            done += count

    def chunks(self, start: int, size: int, most: int = CHUNK) -> Iterator[bytes]:
        """The same bytes, a piece at a time."""
        end = start + size
        while start < end:
            piece = self.read(start, min(most, end - start))
            yield piece
            start += len(piece)

    def inflate(self, member: Member, digest: str | None = None) -> Iterator[bytes]:
        """What a deflated member holds, a piece at a time: exactly as much as it says.

        digest: what its bytes in the file must have for a sha256.
        """
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        sha = hashlib.sha256()
        pieces = self.chunks(member.start, member.size, _PIECE)
        waiting, left = b"", member.inflated or 0
        while not stream.eof:
            given = waiting or next(pieces, b"")
            if not waiting:
                sha.update(given)
            try:
                found = stream.decompress(given, _PIECE)
            except zlib.error as error:
                raise damaged(f"{member.name} can't be inflated: {error}") from None
            waiting = stream.unconsumed_tail
            left -= len(found)
            if left < 0 or not (found or given):
                break
            yield found
        if left or not stream.eof or stream.unused_data or next(pieces, None) is not None:
            raise damaged(f"{member.name} holds more or less than it says")
        if digest is not None and sha.hexdigest() != digest:
            raise damaged(f"{member.name} isn't what the manifest says")

    def digest(self, member: Member) -> str:
        """The sha256 of a member."""
        sha = hashlib.sha256()
        for piece in self.chunks(member.start, member.size):
            sha.update(piece)
        return sha.hexdigest()

    def close(self) -> None:
        self._file.close()


def find_members(source: ByteSource) -> dict[str, Member]:
    """Every member; `BadRecord` for any zip that could be read in more than one way."""
    members: dict[str, Member] = {}
    heads: list[tuple[bytes, int, Member]] = []
    position = 0
    while source.size - position >= 4 and source.read(position, 4) == b"PK\3\4":
        name, member = _read_local(source, position)
        if member.name in members or len(members) >= MAX_MEMBERS:
            raise damaged(f"it has {member.name} twice, or too many members")
        members[member.name] = member
        heads.append((name, position, member))
        position = member.start + member.size
    if not members:
        raise damaged("it doesn't begin as records do")
    _check_directory(source, position, heads)
    return members


def _read_local(source: ByteSource, position: int) -> tuple[bytes, Member]:
    if source.size - position < _LOCAL.size:
        raise damaged("a member's header is cut off")
    head = _LOCAL.unpack(source.read(position, _LOCAL.size))
    _, _, flags, method, _, _, crc, packed, size, name_size, extra_size = head
    if flags & ~0x800:
        raise damaged("a member is encrypted or streamed")
    if name_size > 64 or extra_size not in (0, 20):
        raise damaged("a member's header has fields that records don't have")
    position += _LOCAL.size
    if source.size - position < name_size + extra_size:
        raise damaged("a member's name is cut off")
    name = source.read(position, name_size)
    if not _NAME.fullmatch(name):
        raise damaged("a member has a name that records don't have")
    is_deflated = name == OBJECTS.encode()
    if method != (_DEFLATED if is_deflated else _STORED):
        raise damaged(f"{name.decode()} is compressed in another way than in records")
    if extra_size:
        tag, length, wide, wide_packed = struct.unpack(
            "<2H2Q", source.read(position + name_size, extra_size)
        )
        if (tag, length) != (1, 16) or (size, packed) != (_BIG, _BIG):
            raise damaged("a member's header has fields that records don't have")
        size, packed = wide, wide_packed
    position += name_size + extra_size
    if (size != packed and not is_deflated) or packed > source.size - position:
        raise damaged(f"{name.decode()} is said to be larger than the file")
    return name, Member(name.decode(), position, packed, crc, size if is_deflated else None)


def _check_directory(
    source: ByteSource, start: int, heads: list[tuple[bytes, int, Member]]
) -> None:
    """The directory names the same members at the same places, and ends the file."""
    position = start
    for name, local, member in heads:
        wanted = _Head(name, local, member.size, member.inflated, member.crc).central()
        if source.size - position < len(wanted):
            raise damaged("its directory is cut off")
        entry = source.read(position, len(wanted))
        if _meaning(entry) != _meaning(wanted):
            raise damaged("its directory and its members disagree")
        position += len(wanted)
    ending = _ending(len(heads), position - start, start)
    if source.size - position != len(ending) or source.read(position, len(ending)) != ending:
        raise damaged("its end doesn't match its members")


def _meaning(entry: bytes) -> tuple[object, ...]:
    """What an entry of the directory says, without versions, dates and attributes."""
    fields = _CENTRAL.unpack_from(entry)
    flags = fields[3] & ~0x800  # names in UTF-8, which these are anyhow
    return fields[0], flags, fields[4], *fields[7:13], fields[16], entry[_CENTRAL.size :]
