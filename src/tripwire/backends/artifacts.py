"""Artifacts: compiled code on disk, one file per key. Many processes may share the folder.

A file is unpickled, which runs what is in it. So it is read only if nobody but this user can have
put it there (see files.py), and if a digest over the whole file, keyed with a secret of the user's,
says that tripwire wrote it for the key that was asked for. Any other file is reported once, and its
code is compiled again.

An empty folder becomes a store when it gets tripwire's tag. In a folder without the tag nothing is
read, written or removed.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tripwire import files
from tripwire.errors import BadStore
from tripwire.values.classes import isinstance

_KIND = b"tripwire artifact "
VERSION = 2
_MAGIC = _KIND + b"%d\n" % VERSION
_DIGEST = 64  # characters, and a line's end
_SECRET = 32  # bytes
_TAG = "CACHEDIR.TAG"  # which programs that make backups know
_TAGGED = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# A store of tripwire's: compiled code, which may be removed at any time.\n"
)
_KERNELS = "torch"  # the folder of what torch builds
_NAME = re.compile(r"[0-9a-f]{64}\.bin")
_LARGEST_FOLDER = 1 << 30  # bytes; the least recently used files go first
_IN_USE = 24 * 3600  # seconds in which a library that torch built may still be about to be loaded
_log = logging.getLogger("tripwire.cache")
_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class Artifact:
    """Compiled code, and what was found out while it was compiled."""

    payload: bytes
    facts: dict[str, int]


def find_store() -> Store | None:
    """The store that TRIPWIRE_CACHE_DIR names; one in the user's cache folder without it."""
    named = os.environ.get("TRIPWIRE_CACHE_DIR")
    if named is not None:
        return Store(Path(named)) if named else None
    try:
        return Store(files.find_user_folder("XDG_CACHE_HOME", ".cache") / "tripwire" / "store")
    except OSError as error:
        _tell(f"Compiled code can't be kept: {error}, or TRIPWIRE_CACHE_DIR to a folder.")
        return None


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of artifacts. Trouble with it is reported and costs a compile, nothing else."""

    folder: Path

    def read(self, key: str) -> Artifact | None:
        """The artifact of a key, if there is a sound one."""
        path = self._path(key)
        try:
            with _trusting(path):
                files.check_ours(path.parent)
                files.check_no_link(path.parent)
                self._check_tag()
                content = files.read_ours(path)
            artifact = _parse(content, key, find_secret())
        except FileNotFoundError:
            return None
        except (OSError, BadStore) as error:
            self.distrust(key, error)
            return None
        with suppress(OSError):
            os.utime(path)  # it was of use now
        return artifact

    def write(self, key: str, artifact: Artifact) -> None:
        """Keep an artifact. Others see the whole file or none."""
        path = self._path(key)
        header = json.dumps({"key": key, "facts": artifact.facts}).encode() + b"\n"
        try:
            digest = _sign(find_secret(), header, artifact.payload)
            self._prepare()
            self._make_folder(path.parent)
            with files.replacing(path) as file:
                file.writelines((_MAGIC, digest, b"\n", header, artifact.payload))
            self._prune()
        except (OSError, BadStore) as error:
            self.tell_unkept(error)

    def make_kernel_folder(self) -> Path:
        """The folder for libraries that torch builds and loads; nobody else may enter it."""
        self._prepare()
        folder = self.folder / _KERNELS
        self._make_folder(folder)
        if folder.stat().st_mode & 0o077:  # torch makes it anew where it is gone
            with _trusting(folder):
                files.check_ours_below(folder)
            folder.chmod(0o700)
        return folder

    def measure(self) -> tuple[int, int]:
        """How many artifacts there are, and their bytes."""
        found = self._list()
        return len(found), sum(size for _, size, _ in found)

    def find_trouble(self) -> str | None:
        """Why nothing can be kept here, if so. Nothing is made to find out."""
        above = (self.folder, *self.folder.parents)
        there = next(filter(os.path.lexists, above), self.folder)  # a link to nothing is there
        try:
            with _trusting(there):
                files.check_ours(there)
                if there == self.folder and not self._is_new():
                    self._check_tag()
        except (OSError, BadStore) as error:
            return str(error)
        return None if os.access(there, os.W_OK) else f"{there} is not writable"

    def distrust(self, key: str, reason: Exception) -> None:
        """Say that an artifact isn't used."""
        _tell(f"The cached code {self._path(key)} is ignored: {reason}")

    def tell_unkept(self, reason: Exception) -> None:
        """Say that nothing can be kept: once, whichever files it happens to."""
        _tell(f"Compiled code can't be kept in {self.folder}: {reason}", about=str(self.folder))

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.bin"

    def _prepare(self) -> None:
        """Make the folder a store, if it is new; raise if it is something else."""
        with _trusting(self.folder):
            files.make_folder(self.folder)
            files.check_ours(self.folder)
            if self._is_new():
                with files.replacing(self.folder / _TAG) as file:
                    file.write(_TAGGED)
            self._check_tag()

    def _make_folder(self, folder: Path) -> None:
        """A folder inside, made if need be."""
        with _trusting(folder):
            files.make_folder(folder)
            files.check_ours(folder)
            files.check_no_link(folder)

    def _is_new(self) -> bool:
        """Whether nothing is here but what others may begin with: a draft, torch's empty folders.

        Another process may be making the same store; torch makes its folder anew where it is gone.
        """
        names = [name for name in os.listdir(self.folder) if not files.is_draft(name)]
        return not names or (names == [_KERNELS] and not any(_walk(self.folder / _KERNELS)))

    def _check_tag(self) -> None:
        try:
            tag = files.read_ours(self.folder / _TAG, len(_TAGGED))
        except FileNotFoundError:
            tag = b""
        if tag != _TAGGED:
            raise BadStore(
                f"{self.folder} holds other files and isn't a store of tripwire's.\n"
                "tripwire keeps nothing there and removes nothing. Set TRIPWIRE_CACHE_DIR to a "
                "folder that is empty, or that doesn't exist yet.",
                slug="store-taken",
            )

    def _list(self) -> list[tuple[float, int, Path]]:
        """What is named like an artifact: when it was of use last, its bytes, its path."""
        found = []
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*.bin"):
            if _NAME.fullmatch(path.name) and path.name[:2] == path.parent.name:
                with suppress(OSError):  # another process was faster
                    status = path.lstat()
                    found.append((status.st_mtime, status.st_size, path))
        return found

    def _prune(self) -> None:
        found = self._list()
        surplus = sum(size for _, size, _ in found) - _LARGEST_FOLDER
        for _, size, path in sorted(found):
            if surplus <= 0:
                break
            with suppress(OSError):  # another process was faster, or it is somebody's
                if files.read_ours(path, len(_KIND)) == _KIND:
                    path.unlink()
                    surplus -= size
        if not (self.folder / _KERNELS).is_symlink():
            _prune_kernels(self.folder / _KERNELS)


def _prune_kernels(folder: Path) -> None:
    """Remove the least recently used of what torch built; it builds again what is missing."""
    found = []
    for path in _walk(folder):
        with suppress(OSError):
            status = os.lstat(path)
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    surplus = sum(size for _, size, _ in found) - _LARGEST_FOLDER
    for used, size, path in sorted(found):
        if surplus <= 0 or time.time() - used < _IN_USE:
            return
        with suppress(OSError):
            os.unlink(path)
            surplus -= size


def _walk(folder: Path) -> Iterator[str]:
    """All files in a folder, and in those inside."""
    for base, _, names in os.walk(folder):
        yield from (os.path.join(base, name) for name in names)


def tell_unused(variable: str, folder: str, why: OSError, instead: str) -> None:
    """Say that a folder of torch's isn't used, since others may have written in it, or for less."""
    whose = f"{folder} (as {variable} says, or torch by itself)"
    if not isinstance(why, files.NotOurs):
        _tell(f"{whose} can't be used: {why}. tripwire uses {instead} instead.")
        return
    error = BadStore(
        f"{whose}: other users may put code there that torch would run: {why}.\n"
        f"tripwire uses {instead} instead. Name a folder of your own; where others may write to it "
        "or to one above it, `chmod -R go-w` takes that right away.",
        slug="kernels-not-ours",
    )
    _tell(str(error))


def _tell(text: str, about: str | None = None) -> None:
    """Say something, unless it was said before, or something else about the same."""
    if (about or text) not in _told:
        _told.add(about or text)
        _log.warning("%s", text)


@contextmanager
def _trusting(path: Path) -> Iterator[None]:
    try:
        yield
    except files.NotOurs as error:
        raise BadStore(
            f"{path}: {error}.\n"
            "tripwire would run the code in it, so it and every folder above it must belong to "
            "you or to root, and be writable by nobody else. Or set TRIPWIRE_CACHE_DIR to "
            "another folder.",
            slug="store-not-ours",
        ) from None


# --- the digest --------------------------------------------------------------------------------


def find_secret() -> bytes:
    """What this user's digests are keyed with; made once, outside of any store.

    Whoever brings a store from elsewhere, or plants a file in one, doesn't have it.
    """
    try:
        folder = files.find_user_folder("XDG_CONFIG_HOME", ".config") / "tripwire" / "store"
        files.sweep(folder.parent)
        try:
            secret = _read_secret(folder)
        except FileNotFoundError:
            _make_secret(folder)
            secret = _read_secret(folder)
    except OSError as error:
        raise BadStore(
            f"The key that says which compiled code is yours can't be used: {error}.\n"
            "It is the file tripwire/store/key in XDG_CONFIG_HOME, or in ~/.config. You can "
            "remove it: tripwire makes a new key and compiles again.",
            slug="store-key",
        ) from None
    return secret


def _read_secret(folder: Path) -> bytes:
    files.check_ours(folder)
    secret = files.read_ours(folder / "key", _SECRET + 1, is_private=True)
    if len(secret) != _SECRET:
        raise files.NotOurs(f"{folder / 'key'} is damaged")
    return secret


def _make_secret(folder: Path) -> None:
    """Put a new secret into its place unless one is there.

    A folder takes the place of none or of an empty one, and never of one with a file in it: of
    many processes that come at the same time one succeeds, and all read its file.
    """
    files.make_folder(folder.parent)
    files.check_ours(folder.parent)
    with files.making_beside(folder) as draft:
        with os.fdopen(files.open_new(draft / "key"), "wb") as file:
            file.write(secrets.token_bytes(_SECRET))
        with suppress(OSError):
            draft.rename(folder)


def _sign(secret: bytes, header: bytes, payload: bytes) -> bytes:
    made = hmac.new(secret, header, "sha256")
    made.update(payload)
    return made.hexdigest().encode()


def _parse(content: bytes, key: str, secret: bytes) -> Artifact:
    if not content.startswith(_MAGIC):
        raise _unusable("it is no artifact of this version")
    start = len(_MAGIC) + _DIGEST + 1
    end = content.find(b"\n", start) + 1
    if not end:
        raise _unusable("it is cut off")
    header, payload = content[start:end], content[end:]
    digest = _sign(secret, header, payload) + b"\n"
    if not hmac.compare_digest(content[len(_MAGIC) : start], digest):
        raise _unusable("it is damaged, or it wasn't written by tripwire for this user")
    said = json.loads(header)  # it is ours
    if said["key"] != key:
        raise _unusable("it was written for something else")
    return Artifact(payload, said["facts"])


def _unusable(why: str) -> BadStore:
    return BadStore(f"{why}; tripwire makes it again", slug="artifact-unusable")
