"""Files: made for this user alone, whole or not at all, and never where a link leads.

A new file has mode 0600 and a new folder 0700, whatever the umask says. What takes a place is
written under another name beside it, and moved. Whether a place can be trusted is decided as
OpenSSH decides it: by who may write to any folder on the way there.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_DRAFT = re.compile(r"\.tripwire-[0-9a-f]{16}\.draft")
_ABANDONED = 24 * 3600  # seconds after which a draft that nobody holds is removed
_MOST_LINKS = 40  # on one way, as Linux has it
_HAS_OWNERS = hasattr(os, "getuid")
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a pipe is opened at once, and then refused
_BINARY = getattr(os, "O_BINARY", 0)
_DESCRIPTORS = re.compile(r"/proc/(\d+)/(task/\d+/)?fd")


class NotOurs(OSError):
    """Why a file or folder isn't trusted: others may have put it there."""


# --- writing -----------------------------------------------------------------------------------


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and those above it that are missing, for this user alone."""
    folder = Path(path)
    if not os.path.lexists(folder.parent):
        make_folder(folder.parent)
    try:
        _make_own(folder)
    except FileExistsError:
        if not folder.is_dir():
            raise


def _make_own(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    if folder.lstat().st_mode & 0o700 != 0o700:  # a umask that keeps even us out
        folder.chmod(0o700)


def open_new(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor of a file that wasn't there, to write to; `FileExistsError` where one was."""
    new = os.O_CREAT | os.O_EXCL | _NOFOLLOW | _BINARY
    return _with_mode(os.open(path, os.O_WRONLY | new | flags, 0o600))


def open_to_append(path: str | os.PathLike[str]) -> int:
    """A descriptor of a file that is made if need be, to write at its end; a link is an error."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NOFOLLOW | _NONBLOCK | _BINARY
    return os.open(path, flags, 0o600)


def _with_mode(handle: int) -> int:
    if _HAS_OWNERS:
        os.fchmod(handle, 0o600)
    return handle


@contextmanager
def writing_beside(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, Path]]:
    """A draft in the folder of a path, and its name: moved by the caller, or gone at the end.

    Drafts of processes that were killed are removed, once they are a day old.
    """
    draft = _name_draft(path)
    with os.fdopen(open_new(draft), "wb", buffering=1 << 20) as file:
        try:
            _hold(file.fileno())
            yield file, draft
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)


@contextmanager
def making_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The same with a folder for a draft, since a folder never takes the place of a full one."""
    draft = _name_draft(path)
    _make_own(draft)
    held = os.open(draft, os.O_RDONLY) if fcntl else None
    try:
        if held is not None:
            _hold(held)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if held is not None:
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
    with suppress(FileNotFoundError):
        mode = os.lstat(place).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            kind = IsADirectoryError if stat.S_ISDIR(mode) else FileExistsError
            raise kind(errno.EEXIST, "There is something that is no file", str(place))
    with writing_beside(place) as (file, draft):
        yield file
        file.close()
        os.replace(draft, place)


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
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another, or a file system without locks
        return False
    return True


def _name_draft(path: str | os.PathLike[str]) -> Path:
    folder = Path(path).parent
    sweep(folder)
    return folder / f".tripwire-{secrets.token_hex(8)}.draft"


def sweep(folder: Path) -> None:
    """Remove what killed processes began in a folder: old drafts that no process holds."""
    with suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            if is_draft(entry.name):
                with suppress(OSError):  # another process was faster
                    _remove_abandoned(entry.path)


def _remove_abandoned(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | _NONBLOCK | _NOFOLLOW)
    try:
        status = os.fstat(handle)
        is_old = time.time() - status.st_mtime > _ABANDONED
        if not (is_old and _is_own(status) and _hold(handle)):
            return
        if stat.S_ISREG(status.st_mode):
            os.unlink(path)
        elif stat.S_ISDIR(status.st_mode):
            check_ours(os.path.dirname(path))  # else others may have moved a folder of ours there
            shutil.rmtree(path)
    finally:
        os.close(handle)


def _is_own(status: os.stat_result) -> bool:
    return not _HAS_OWNERS or status.st_uid == os.getuid()


def find_user_folder(variable: str, name: str) -> Path:
    """The folder that a variable names, or one of that name at home; `OSError` without a home.

    A path that begins nowhere counts as none: it would be another folder in each that one works in.
    """
    named = os.environ.get(variable, "")
    if os.path.isabs(named):
        return Path(named)
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise OSError("there is no home: set HOME to a whole path")
    return Path(home, name)


# --- reading what others may have put there ----------------------------------------------------


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> BinaryIO:
    """A file opened to be read; a pipe or a device is an error, and nobody waits for it."""
    handle = os.open(path, os.O_RDONLY | _NONBLOCK | _BINARY | flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotOurs("it is no regular file")
    return os.fdopen(handle, "rb")


def read_ours(path: str | os.PathLike[str], most: int = -1) -> bytes:
    """The content of a file that this user alone may write, by the one name that it has.

    The folder must have been looked at with `check_ours`.
    """
    try:
        file = open_regular(path, _NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise NotOurs("it is a link") from None
        raise
    with file:
        status = os.fstat(file.fileno())
        if not _is_own(status):
            raise NotOurs("it belongs to another user")
        if _HAS_OWNERS and status.st_mode & 0o022:
            raise NotOurs("other users may write it")
        if status.st_nlink > 1:  # it has none if it was replaced since it was opened
            raise NotOurs("it has a second name (a hard link), through which others may write it")
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
    if not _HAS_OWNERS:
        return
    whole = folder if os.path.isabs(folder) else os.path.join(os.getcwd(), folder)
    names = _split(os.fspath(whole))
    here, links = "/", 0
    _check_step(here, os.lstat(here), is_last=not names)
    while names:
        name = names.pop()
        place = os.path.dirname(here) if name == ".." else os.path.join(here, name)
        status = os.lstat(place)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            _check_link(place, status, links)
            target = os.readlink(place)
            names += _split(target)
            here = "/" if target.startswith("/") else here
        else:
            here = place
            _check_step(here, status, is_last=not names)


def check_ours_below(folder: str | os.PathLike[str]) -> None:
    """Raise `NotOurs` where others may have put or changed something anywhere in a folder.

    The folder must have been looked at with `check_ours`. Where nobody else may enter it, nobody
    else reaches what is in it.
    """
    if not _HAS_OWNERS or not os.stat(folder).st_mode & 0o011:
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
        raise NotOurs(f"other users may write to {folder}; `chmod go-w` ends that")


def _check_link(link: str, status: os.stat_result, links: int) -> None:
    if links > _MOST_LINKS:
        raise NotOurs(f"{link}: too many links on the way")
    if status.st_uid not in (0, os.getuid()):
        raise NotOurs(f"{link} is a link that belongs to another user")
