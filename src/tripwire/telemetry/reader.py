"""Reading logs: events stream out of a directory of many files, one line at a time.

A damaged line is counted and skipped; so is an event that a later minor version added. A file of a
later major version is an error, since nothing in it can be relied on. A file may be hostile: it
isn't held in memory, and a line is decoded only if that takes no more memory than tripwire's own
lines do. A file has one header, so there are no more processes than files. Of the files of a
directory only the names are held, and those only if there is about as much in the files. How much
of a log may be kept in memory is limited by an `Allowance`, which grows with what was read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from sys import getsizeof
from typing import BinaryIO, NamedTuple

import msgspec
from msgspec import Struct

from tripwire.errors import TelemetryError
from tripwire.files import open_regular
from tripwire.telemetry.schema import LONGEST_LINE, MAJOR, TAGS, Event, Header, decode, takes_much

FIXED = 1 << 19  # bytes that an `Allowance` begins with
_LISTED = 40  # bytes that a name takes in a list, beside its own
_FILE_NAME = re.compile(r"tripwire-(?P<host>.+)-(?P<pid>\d{1,18})-(?P<token>[0-9a-f]+)\.jsonl")


class Logged(NamedTuple):
    """An event and the process that wrote it."""

    process: Header
    event: Event

    @property
    def wall_ns(self) -> int:
        """When, in nanoseconds since 1970."""
        return self.process.wall_of(self.event.time_ns)


class ReadStatistics(Struct, frozen=True):
    """What was met in a directory so far."""

    files: int = 0
    events: int = 0
    damaged: int = 0  # lines that say nothing
    newer: int = 0  # lines of a kind that this version doesn't know
    headless: int = 0  # files without a header of their own


class _Line(Struct):
    event: str = ""


_tag_decoder = msgspec.json.Decoder(_Line)


class LogReader:
    """The events of one file, or of all logs in a directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._begin()

    def _begin(self) -> None:
        self.bytes_read = 0
        self._files = self._events = self._damaged = self._newer = self._headless = 0

    @property
    def files(self) -> list[Path]:
        """The files, by name."""
        return [*self._walk()]

    def measure(self) -> int:
        """How many bytes the files have."""
        return self.path.stat().st_size if self.path.is_file() else sum(s for _, s in self._list())

    def _walk(self) -> Iterator[Path]:
        """The files, by name, one after another."""
        if self.path.is_file():
            yield self.path
            return
        room = FIXED // 2
        for name, size in self._list():
            room += size // 4 - getsizeof(name) - _LISTED
        if room < 0:
            raise too_large("files")
        for name in sorted(name for name, _ in self._list()):
            yield self.path / name

    def _list(self) -> Iterator[tuple[str, int]]:
        """The names and sizes of the files of a directory."""
        if not self.path.is_dir():
            raise TelemetryError(
                f"{self.path} is no folder and no file.\n"
                "Set TRIPWIRE_LOG_DIR to a folder while the program runs, and pass that folder.",
                slug="log-missing",
            )
        with os.scandir(self.path) as found:
            for entry in found:
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    if _FILE_NAME.fullmatch(entry.name) and entry.is_file():  # a pipe has no end
                        yield entry.name, entry.stat().st_size

    def statistics(self) -> ReadStatistics:
        """What was met since reading last began."""
        return ReadStatistics(self._files, self._events, self._damaged, self._newer, self._headless)

    def __iter__(self) -> Iterator[Logged]:
        """Every event, file by file, each in the order of its writing."""
        self._begin()
        for path in self._walk():
            yield from self.read_file(path)

    def read_file(self, path: Path) -> Iterator[Logged]:
        """The events of one file; none if it was removed since it was listed."""
        try:
            opened = open_regular(path)
        except FileNotFoundError:
            return
        self._files += 1
        process: Header | None = None
        with opened as file:
            for event in self._events_of(file, path):
                if isinstance(event, Header):
                    if process is not None:
                        self._damaged += 1
                    process = process or event
                else:
                    if process is None:
                        self._headless += 1
                        process = _guess_header(path)
                    self._events += 1
                    yield Logged(process, event)

    def _events_of(self, file: BinaryIO, path: Path) -> Iterator[Header | Event]:
        """Headers and events; no line is held while its event is looked at."""
        is_there = True
        while is_there:
            is_there, event = self._read_event(file, path)
            if event is not None:
                yield event

    def _read_event(self, file: BinaryIO, path: Path) -> tuple[bool, Header | Event | None]:
        """Whether there was a line, and its event, if it has one."""
        line = file.readline(LONGEST_LINE)
        self.bytes_read += len(line)
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            self._damaged += 1
            while rest := file.readline(LONGEST_LINE):
                self.bytes_read += len(rest)
                if rest.endswith(b"\n"):
                    break
            return True, None
        return bool(line), self._decode(line, path) if line.strip() else None

    def _decode(self, line: bytes, path: Path) -> Header | Event | None:
        if takes_much(line):
            self._damaged += 1
            return None
        try:
            event = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._skip(line, path)
            return None
        if isinstance(event, Header) and event.major != MAJOR:
            raise _newer_schema(path, event.major)
        return event

    def _skip(self, line: bytes, path: Path) -> None:
        if b'"header"' in line[:200]:  # a later header may have other fields
            found = re.search(rb'"major":\s*(\d{1,9})[,}]', line)
            if found and int(found[1]) > MAJOR:
                raise _newer_schema(path, int(found[1]))
        try:
            known = _tag_decoder.decode(line).event in (*TAGS, "")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            known = True
        if known:
            self._damaged += 1
        else:
            self._newer += 1


class Allowance:
    """How much may be kept of logs: a little, and then no more than was read of them."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._before = FIXED
        self._taken = 0

    def go_on(self, reader: LogReader) -> None:
        """Another log is read, while what was kept is still there."""
        self._before += self._reader.bytes_read * 7 // 4
        self._reader = reader

    def take(self, size: int) -> bool:
        """Whether that much more may be kept."""
        if self._taken + size > self._before + self._reader.bytes_read * 7 // 4:
            return False
        self._taken += size
        return True

    def give_back(self, size: int) -> None:
        """Note that so much is no longer kept."""
        self._taken -= size


def read_events(path: str | os.PathLike[str]) -> Iterator[Logged]:
    """The events of a file or directory; `LogReader` also tells what was skipped."""
    return iter(LogReader(path))


def check_has_events(path: str | os.PathLike[str]) -> None:
    """Raise where a file or directory holds no event at all."""
    if next(iter(LogReader(path)), None) is None:
        raise TelemetryError(
            f"{path}: this contains no events of tripwire.\n"
            "A log is in the folder that TRIPWIRE_LOG_DIR named while the program ran, in files "
            "named tripwire-*.jsonl.",
            slug="log-empty",
        )


def too_large(what: str) -> TelemetryError:
    """The error of an export that would have to hold too much at once."""
    return TelemetryError(
        f"The log has so many {what} that holding them takes more memory than twice its size.\n"
        "Take fewer of its files at a time, or make a report: it keeps what is heaviest.",
        slug="log-too-large",
    )


def _newer_schema(path: Path, major: int) -> TelemetryError:
    return TelemetryError(
        f"{path}: this log has schema {major}; this version of tripwire reads schema {MAJOR}.\n"
        "Read it with the version of tripwire that wrote it, or a later one.",
        slug="log-other-schema",
    )


def _guess_header(path: Path) -> Header:
    """What a file's name says of the process, where its first line is lost."""
    found = _FILE_NAME.fullmatch(path.name)
    return Header(
        major=MAJOR,
        minor=0,
        host=found["host"] if found else "?",
        pid=int(found["pid"]) if found else 0,
        parent_pid=0,
        token=found["token"] if found else path.name,
        start_wall_ns=0,
        start_monotonic_ns=0,
        python="",
    )
