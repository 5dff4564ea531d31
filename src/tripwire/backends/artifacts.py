"""Artifacts: compiled code on disk, one file per key. Many processes may share the folder.

A file is read only if it is whole, says the key that was asked for, and belongs to this user:
what is in it will be unpickled and run. Anything else is ignored with a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"tripwire artifact 1\n"
_LARGEST_FOLDER = 1 << 30  # bytes; the least recently used files go first
_log = logging.getLogger("tripwire.cache")


class _Unusable(Exception):
    """Why a file is ignored."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """Compiled code, and what was found out while it was compiled."""

    payload: bytes
    facts: dict[str, bool]


def find_store() -> Store | None:
    """The store that TRIPWIRE_CACHE_DIR names; one in the user's cache folder without it."""
    named = os.environ.get("TRIPWIRE_CACHE_DIR")
    if named is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Store(Path(home) / "tripwire")
    return Store(Path(named)) if named else None


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of artifacts. Trouble with it is told and costs a compile, nothing else."""

    folder: Path

    def read(self, key: str) -> Artifact | None:
        """The artifact of a key, if there is a sound one."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                _check_owner(os.fstat(file.fileno()))
                content = file.read()
            artifact = _parse(content, key)
            with suppress(OSError):
                os.utime(path)  # it was of use now
            return artifact
        except FileNotFoundError:
            return None
        except (OSError, _Unusable) as error:
            self.distrust(key, error)
            return None

    def write(self, key: str, artifact: Artifact) -> None:
        """Keep an artifact. Others see the whole file or none."""
        path = self._path(key)
        header = {
            "key": key,
            "sha256": hashlib.sha256(artifact.payload).hexdigest(),
            "facts": artifact.facts,
        }
        content = _MAGIC + json.dumps(header).encode() + b"\n" + artifact.payload
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".draft-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                Path(draft).replace(path)
            except BaseException:
                Path(draft).unlink(missing_ok=True)
                raise
            self._prune()
        except OSError as error:
            _log.warning("Compiled code can't be kept in %s: %s", self.folder, error)

    def measure(self) -> tuple[int, int]:
        """How many files there are, and their bytes."""
        found = self._list()
        return len(found), sum(size for _, size, _ in found)

    def is_writable(self) -> bool:
        """Whether something can be kept."""
        there = next((f for f in (self.folder, *self.folder.parents) if f.exists()), self.folder)
        return there.is_dir() and os.access(there, os.W_OK)

    def distrust(self, key: str, reason: Exception) -> None:
        """Say that an artifact isn't used."""
        _log.warning("The cached code %s is ignored: %s", self._path(key), reason)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.bin"

    def _list(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.folder.glob("??/*.bin"):
            with suppress(OSError):  # another process was faster
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return found

    def _prune(self) -> None:
        found = self._list()
        surplus = sum(size for _, size, _ in found) - _LARGEST_FOLDER
        for _, size, path in sorted(found):
            if surplus <= 0:
                return
            path.unlink(missing_ok=True)
            surplus -= size


def _check_owner(stat: os.stat_result) -> None:
    if not hasattr(os, "getuid"):
        return
    if stat.st_uid != os.getuid():
        raise _Unusable("it belongs to another user")
    if stat.st_mode & 0o022:
        raise _Unusable("other users may write it")


def _parse(content: bytes, key: str) -> Artifact:
    if not content.startswith(_MAGIC):
        raise _Unusable("it is no artifact of this version")
    header, _, payload = content[len(_MAGIC) :].partition(b"\n")
    try:
        said = json.loads(header)
        found, digest, facts = said["key"], said["sha256"], dict(said["facts"])
    except (ValueError, KeyError, TypeError) as error:
        raise _Unusable("its header is damaged") from error
    if found != key:
        raise _Unusable("it was written for something else")
    if digest != hashlib.sha256(payload).hexdigest():
        raise _Unusable("its content is damaged")
    return Artifact(payload, facts)
