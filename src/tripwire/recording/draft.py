"""Draft: a record that is being made, from the values that it starts from.

Objects are taken down when they are added; the bytes of tensors are read when the file is
written, so that a call can run in between and only what it changes need be copied.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from tripwire.recording import nodes
from tripwire.recording.code import Programs
from tripwire.recording.encode import Encoder
from tripwire.recording.format import Manifest, NewRecord
from tripwire.recording.kept import Blobs
from tripwire.recording.names import all_codes
from tripwire.recording.policy import KEEP_ALL, Policy
from tripwire.recording.secrets import Cleaner, clean_manifest, find_kinds
from tripwire.recording.texts import encode_json
from tripwire.redaction import Redactor

if TYPE_CHECKING:
    from torch import Tensor

    from tripwire.recording.habits import Habits


class RecordDraft:
    """Roots by name, and everything that they lead to."""

    def __init__(self, policy: Policy = KEEP_ALL) -> None:
        self.policy = policy
        self.blobs = Blobs(policy)
        self._programs = Programs()
        self._roots: dict[str, nodes.Slot] = {}
        self._encoder = Encoder(
            self.blobs,
            self._programs.codes,
            policy,
            encode_code=self._programs.encode,
            names=self._programs.names,
        )

    def add(self, name: str, value: object) -> None:
        """Take a value down, as it is now."""
        self._roots[name] = self._encoder.slot(value, name)
        self._encoder.advance()

    @property
    def met(self) -> list[object]:
        """Every object that was met."""
        return self._encoder.values

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that was met."""
        import torch

        met = self._encoder.values
        return (cast("Tensor", v) for v in met if issubclass(type(v), torch.Tensor))

    def habits(self) -> Habits:
        """What the code that was taken down may do."""
        from tripwire.recording.habits import find_habits  # needs torch

        return find_habits(self._programs.codes.all, self._encoder.values)

    def find_names(self) -> frozenset[str]:
        """Names of globals and attributes in the code that was taken down."""
        codes = (one for code in self._programs.codes.all for one in all_codes(code))
        return frozenset(name for code in codes for name in code.co_names)

    def is_like(self, other: RecordDraft) -> bool:
        """Whether two drafts hold the same, but for the bytes of tensors. Finishes both."""
        return self._describe() == other._describe()

    def _describe(self) -> tuple[bytes, list[bytes]]:
        arrays = [b"".join(kept.chunks()) for kept in self.blobs.arrays()]
        return encode_json(self.finish()), arrays

    def finish(self) -> nodes.Table:
        """The table; nothing can be added any more."""
        table = self._encoder.finish(self._roots)
        return msgspec.structs.replace(table, codes=self._programs.codes.table())

    def write(self, path: Path, manifest: Manifest) -> Path:
        """Write the record, never over another file; returns where."""
        return self.build(manifest).write(path)

    def build(self, manifest: Manifest) -> NewRecord:
        """The record, to be written."""
        self._programs.take_loaded(self._encoder)
        table = self.finish()
        manifest = msgspec.structs.replace(
            manifest,
            omissions=(*manifest.omissions, *self._encoder.left_out),
            policy=self.policy.describe(),
        )
        codes, redactor = self._programs.codes, Redactor()
        cleaner = Cleaner(table, codes.all, redactor)
        cleaner.learn()
        sources = cleaner.clean_sources(codes.sources())
        files = sources | codes.marshalled(cleaner.clean_code)
        table = cleaner.clean_table()
        manifest = clean_manifest(manifest, redactor)
        manifest = msgspec.structs.replace(manifest, holds=find_kinds(table, files, manifest))
        return NewRecord(manifest, table, self.blobs.settled, files)


def fresh_packages() -> str:
    """Versions of the installed packages whose modules are loaded, as pip takes them."""
    loaded = {name.partition(".")[0] for name in sys.modules}
    where = tuple((folder, _changed(folder)) for folder in sys.path)
    found = _find_distributions(where)
    names = {dist for top in loaded & found.keys() for dist in found[top]}
    return " ".join(f"{name}=={_find_version(name, where)}" for name in sorted(names))


_Folders = tuple[tuple[str, int], ...]  # where packages are, and when that changed


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1)
def _find_distributions(where: _Folders) -> Mapping[str, list[str]]:
    """Packages by the modules that they bring: a tenth of a second, so it is done once."""
    return importlib.metadata.packages_distributions()


@functools.lru_cache(maxsize=1000)
def _find_version(name: str, where: _Folders) -> str:
    return importlib.metadata.version(name)
