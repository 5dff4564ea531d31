"""Files: readable by this user only, written whole or not at all, and never through a link.

A new file has mode 0600 and a new folder 0700, whatever the umask says. A file is written under
another name beside its place, and then moved there. The path to a folder is resolved once, name by
name, and everything is done in the folder that was reached: if somebody swaps it for a link
meanwhile, that has no effect. Links on the path are followed if they belong to this user or to
root. Whether a place can be trusted is decided as OpenSSH does: by who may write to any folder on
the path.

Foreign JSON is decoded only if that takes little enough memory. This is estimated from its text
beforehand: lists, items and strings have a price.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

_DRAFT = re.compile(r"\.tripwire-[0-9a-f]{16}\.draft")
_ABANDONED = 24 * 3600  # seconds after which a draft that nobody holds is removed
_MOST_LINKS = 40  # on one way, as Linux has it
# A pipe is opened at once, and then refused.
_NONBLOCK = os.O_NONBLOCK
# A folder is opened to go on from there, not to be listed: on Linux that needs no right to read it.
_ENTER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW
_DESCRIPTORS = re.compile(r"/proc/(\d+)/(task/\d+/)?fd")


class NotOurs(OSError):
    """Why a file or folder isn't trusted: others may have put it there."""


# --- folders -----------------------------------------------------------------------------------


class _Descriptor:
    """A folder's. Closed when its block ends, also if an interrupt keeps the block from closing it.

    Its files are known by name alone, and so would errors be: they get the folder's path.
    """

    handle: int | None = None
    path = Path()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None) -> None:
        if isinstance(error, OSError) and isinstance(error.filename, str):
            if os.path.basename(error.filename) == error.filename:
                error.filename = os.path.join(self.path, error.filename)
        handle, self.handle = self.handle, None
        if handle is not None:
            os.close(handle)

    __del__ = __exit__


class Folder(_Descriptor):
    """A folder that was reached: work is done in it, wherever its path leads by now."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a file in it, which is made with mode 0600 if the flags say so."""
        return os.open(name, flags, 0o600, dir_fd=self.handle)

    def look(self, name: str) -> os.stat_result:
        """What stands there under a name; a link is a link."""
        return os.stat(name, dir_fd=self.handle, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Take a file away."""
        os.unlink(name, dir_fd=self.handle)

    def move(self, name: str, to: str) -> None:
        """Give a file another name, in the place of any that has it."""
        os.replace(name, to, src_dir_fd=self.handle, dst_dir_fd=self.handle)

    def link(self, name: str, to: str) -> None:
        """Give a file a second name, unless that is taken."""
        os.link(name, to, src_dir_fd=self.handle, dst_dir_fd=self.handle)


def enter(path: str | os.PathLike[str], *, make: bool = False, strict: bool = False) -> Folder:
    """Go to a folder, name by name from the root on.

    make: folders that are missing are made, for this user alone. strict: `NotOurs` is raised unless
    this user and root alone decide what stands in each folder on the way, and in the last.
    """
    whole = Path(path) if os.path.isabs(path) else Path(os.getcwd(), path)
    with _Way() as way:
        names = _split(os.fspath(whole))
        given = len(names)  # of those left, so many are of the path itself, and not of a link
        way.step("/", strict=strict, is_last=not names)
        while names:
            is_given = len(names) <= given
            name = names.pop()
            given = min(given, len(names))
            try:
                target = way.step(name, strict=strict, is_last=not names)
            except FileNotFoundError:
                if not (make and is_given):  # a link may lead nowhere
                    raise
                way.make(name)
                target = way.step(name, strict=strict, is_last=not names)
            if target is not None:
                names += _split(target)
                if target.startswith("/"):
                    way.step("/", strict=strict, is_last=not names)
        reached = Folder(whole)
        reached.handle, way.handle = way.handle, None
        return reached


class _Way(_Descriptor):
    """How far a path has been followed."""

    def __init__(self) -> None:
        self._links = 0

    def make(self, name: str) -> None:
        """Make a folder here, unless another process was faster."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.handle)
            found = os.stat(name, dir_fd=self.handle, follow_symlinks=False)
            if found.st_mode & 0o700 != 0o700:  # a umask that keeps even us out
                os.chmod(name, 0o700, dir_fd=self.handle)

    def step(self, name: str, *, strict: bool, is_last: bool) -> str | None:
        """Go to a folder; where a link has the name, stay, and say where that leads."""
        place = os.path.normpath(os.path.join(self.path, name))
        try:
            handle = os.open(name, os.O_RDONLY | _ENTER, dir_fd=self.handle)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EMLINK):
                raise
            return self._read_link(name, place, strict)
        if self.handle is not None:
            os.close(self.handle)
        self.handle, self.path = handle, Path(place)
        if strict:
            _check_step(place, os.fstat(handle), is_last)
        return None

    def _read_link(self, name: str, place: str, strict: bool) -> str:
        status = os.stat(name, dir_fd=self.handle, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            if strict:
                raise NotOurs(f"{place} is no folder")
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
        self._links += 1
        _check_link(place, status, self._links)
        return os.readlink(name, dir_fd=self.handle)


# --- writing -----------------------------------------------------------------------------------


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and those above it that are missing, for this user alone."""
    enter(path, make=True).__exit__()


def open_new(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor of a file that wasn't there, to write to; `FileExistsError` where one was."""
    with enter(Path(path).parent) as folder:
        return _open_new(folder, Path(path).name, flags)


def _open_new(folder: Folder, name: str, flags: int = 0) -> int:
    new = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    handle = folder.open(name, os.O_WRONLY | new | flags)
    try:
        os.fchmod(handle, 0o600)
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_to_append(path: str | os.PathLike[str]) -> int:
    """A descriptor of a file that is made if need be, to write at its end; a link is an error."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | _NONBLOCK
    with enter(Path(path).parent) as folder:
        return folder.open(Path(path).name, flags)


@dataclass(slots=True)
class DraftFile:
    """A file that is being written, under a temporary name."""

    file: BinaryIO
    folder: Folder
    name: str

    def move(self, name: str) -> None:
        """Take the place of whatever has this name, a link included."""
        self.file.close()
        self.folder.move(self.name, name)

    def link(self, name: str) -> None:
        """Take a name that is free; `FileExistsError` where it is taken."""
        try:
            self.folder.link(self.name, name)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: take the name first, then move over it
            os.close(_open_new(self.folder, name))
            self.folder.move(self.name, name)


@contextmanager
def writing_beside(path: str | os.PathLike[str]) -> Iterator[DraftFile]:
    """A draft in the folder of a path: given its name by the caller, or gone at the end.

    Drafts of processes that were killed are removed, once they are a day old.
    """
    name = _name_draft(path)
    with (
        enter(Path(path).parent) as folder,
        os.fdopen(_open_new(folder, name), "wb", buffering=1 << 16) as file,
    ):
        try:
            _hold(file.fileno())
            yield DraftFile(file, folder, name)
        finally:
            with suppress(FileNotFoundError):
                folder.remove(name)


@contextmanager
def making_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The same with a folder for a draft, since a folder never takes the place of a full one.

    Goes by the path: the folder around it must have been looked at with `check_ours`.
    """
    draft = Path(path).parent / _name_draft(path)
    make_folder(draft)
    held = os.open(draft, os.O_RDONLY)
    try:
        _hold(held)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(held)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes a place at the end of the block, unless the block raises.

    A link that stands there is replaced, and what it leads to stays as it is. A stream of this
    process, such as /dev/stdout, is written to. Anything else that is no file is left alone.
    """
    place = Path(path)
    stream = _open_stream(place)
    if stream is not None:
        with stream:
            yield stream
        return
    with writing_beside(place) as draft:
        with suppress(FileNotFoundError):
            mode = draft.folder.look(place.name).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                kind = IsADirectoryError if stat.S_ISDIR(mode) else FileExistsError
                raise kind(errno.EEXIST, "This is no file, so it isn't replaced", str(place))
        yield draft.file
        draft.move(place.name)


def is_draft(name: str) -> bool:
    """Whether a file's name is one that drafts have."""
    return _DRAFT.fullmatch(name) is not None


def _open_stream(place: Path) -> BinaryIO | None:
    """A stream that programs are given by name: `-o /dev/stdout`, `-o >(gzip)`, `-o /dev/null`.

    A descriptor of this process is written to where it stands: what is printed later comes behind.
    """
    folder = os.path.realpath(place.parent)
    if folder == "/dev" and place.is_symlink():
        place = Path(folder, os.readlink(place))
        folder = os.path.realpath(place.parent)
    found = _DESCRIPTORS.fullmatch(folder)
    if found and int(found[1]) == os.getpid() and place.name.isdecimal():
        return os.fdopen(os.dup(int(place.name)), "wb")
    return place.open("wb") if folder == "/dev" and place.exists() else None


def _hold(handle: int) -> bool:
    """Whether a file is now held by this process; the kernel lets go of it when that ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another, or a file system without locks
        return False
    return True


def _name_draft(path: str | os.PathLike[str]) -> str:
    sweep(Path(path).parent)
    return f".tripwire-{secrets.token_hex(8)}.draft"


def sweep(folder: Path) -> None:
    """Remove what killed processes began in a folder: old drafts that no process holds."""
    with suppress(OSError), enter(folder) as place:
        for name in filter(is_draft, os.listdir(folder)):
            with suppress(OSError):  # another process was faster
                _remove_abandoned(place, name)


def _remove_abandoned(folder: Folder, name: str) -> None:
    handle = folder.open(name, os.O_RDONLY | _NONBLOCK | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        is_old = time.time() - status.st_mtime > _ABANDONED
        if not (is_old and _is_own(status) and _hold(handle)):
            return
        if stat.S_ISREG(status.st_mode):
            folder.remove(name)
        elif stat.S_ISDIR(status.st_mode):
            check_ours(folder.path)  # else others may have moved a folder of ours there
            shutil.rmtree(folder.path / name)
    finally:
        os.close(handle)


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid()


def find_user_folder(variable: str, name: str) -> Path:
    """The folder that a variable names, or one of that name at home; `OSError` without a home.

    A path that begins nowhere counts as none: it would be another folder in each that one works in.
    """
    named = os.environ.get(variable, "")
    if os.path.isabs(named):
        return Path(named)
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise OSError("there is no home folder: set HOME to an absolute path")
    return Path(home, name)


# --- reading what others may have put there ----------------------------------------------------


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A file opened to be read; a pipe or a device is an error, and nobody waits for it."""
    return _check_regular(os.open(path, os.O_RDONLY | _NONBLOCK))


def _check_regular(handle: int) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotOurs("it is no regular file")
    return os.fdopen(handle, "rb")


def read_ours(path: str | os.PathLike[str], most: int = -1, *, is_private: bool = False) -> bytes:
    """The content of a file that this user alone may write, by the one name that it has.

    `NotOurs` where anybody else could have put it there: see `check_ours`. is_private: nobody else
    may read it either.
    """
    with enter(Path(path).parent, strict=True) as folder:
        try:
            flags = os.O_RDONLY | _NONBLOCK | os.O_NOFOLLOW
            handle = folder.open(Path(path).name, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                raise NotOurs("it is a link") from None
            raise
        with _check_regular(handle) as file:
            status = os.fstat(handle)
            if not _is_own(status):
                raise NotOurs("it belongs to another user")
            if status.st_mode & 0o022:
                raise NotOurs("other users may write it")
            if is_private and status.st_mode & 0o077:
                raise NotOurs("other users may read it")
            if status.st_nlink > 1:  # it has none if it was replaced since it was opened
                raise NotOurs(
                    "it has a second name (a hard link), through which others may write it"
                )
            return file.read(most)


def check_no_link(folder: Path) -> None:
    """Raise `NotOurs` where a folder is a link to another."""
    if folder.is_symlink():
        raise NotOurs(f"{folder} is a link")


def check_ours(folder: str | os.PathLike[str]) -> None:
    """Raise `NotOurs` unless this user and root alone decide what stands in a folder.

    Each folder from the root on belongs to one of them, and nobody else may write to it. A link
    on the way belongs to one of them as well, and the way goes on where it leads. Unlike OpenSSH
    we pass through sticky folders such as /tmp: what is ours there can't be moved by others.
    """
    enter(folder, strict=True).__exit__()


def check_ours_below(folder: str | os.PathLike[str]) -> None:
    """Raise `NotOurs` where others may have put or changed something anywhere in a folder.

    The folder must have been looked at with `check_ours`. Where nobody else may enter it, nobody
    else reaches what is in it.
    """
    if not os.stat(folder).st_mode & 0o011:
        return
    with os.scandir(folder) as found:
        for entry in found:
            with suppress(FileNotFoundError):  # another process was faster
                status = entry.stat(follow_symlinks=False)
                if status.st_uid not in (0, os.getuid()):
                    raise NotOurs(f"{entry.path} belongs to another user")
                if entry.is_symlink():
                    raise NotOurs(f"{entry.path} is a link")
                if status.st_mode & 0o022:
                    raise NotOurs(f"other users may write to {entry.path}")
                if entry.is_dir(follow_symlinks=False):
                    check_ours_below(entry.path)


def _split(path: str) -> list[str]:
    """The names in a path, the last one first."""
    return [name for name in path.split("/") if name not in ("", ".")][::-1]


def _check_step(folder: str, status: os.stat_result, is_last: bool) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise NotOurs(f"{folder} is no folder")
    if status.st_uid not in (0, os.getuid()):
        raise NotOurs(f"{folder} belongs to another user")
    if status.st_mode & 0o022 and (is_last or not status.st_mode & stat.S_ISVTX):
        is_shared = status.st_mode & stat.S_ISVTX  # as /tmp is
        advice = "name a folder of your own" if is_shared else "run `chmod go-w` on it"
        raise NotOurs(f"other users may write to {folder}; {advice}")


def _check_link(link: str, status: os.stat_result, links: int) -> None:
    if links > _MOST_LINKS:
        raise NotOurs(f"{link}: too many links on the way")
    if status.st_uid not in (0, os.getuid()):
        raise NotOurs(f"{link} is a link that belongs to another user")


# --- what JSON takes in memory ---


# Beside its text: a list, an item of one, half of a string.
LIST, ITEM, QUOTE = 64, 32, 24

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_WIDE = re.compile(rb"[\xf0-\xff]|\\ud", re.IGNORECASE)
_HALF_WIDE = re.compile(rb"[\xc4-\xff]|\\u")


def estimate_memory(text: bytes) -> int:
    """At most what this JSON and decoding it takes: lists and structs, their items, strings.

    Of a text in pieces, the sum over the pieces is the same but for wide strings.
    """
    lists = text.count(b"[") + text.count(b"{")
    return LIST * lists + ITEM * text.count(b",") + QUOTE * text.count(b'"') + 2 * len(text)


def estimate_wide(text: bytes | bytearray) -> int:
    """What strings take beyond that: one wide character makes all of a string wide."""
    if text.isascii() and b"\\u" not in text:
        return 0
    return sum(_widen(found[0]) for found in _STRING.finditer(text))


def _widen(string: bytes) -> int:
    if string.isascii() and b"\\u" not in string:
        return 0
    return len(string) * (3 if _WIDE.search(string) else 1 if _HALF_WIDE.search(string) else 0)
