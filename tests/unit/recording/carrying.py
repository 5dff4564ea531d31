"""Things carried through a record: encoded, written as JSON, and built again."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tripwire.recording.capture.code import Programs
from tripwire.recording.capture.encode import Encoder
from tripwire.recording.capture.origin import Blobs, Policy
from tripwire.recording.capture.shelf import Shelf
from tripwire.recording.format.file import NewRecord, Record
from tripwire.recording.format.manifest import Manifest
from tripwire.recording.replay import rerun
from tripwire.recording.replay.rebuild import Rebuilder

HERE = importlib.util.MAGIC_NUMBER.hex()
ELSEWHERE = "00000000"


class Carried:
    """Some values as a record holds them."""

    def __init__(self, **values: object) -> None:
        programs, blobs = Programs(), Blobs(Policy())
        encoder = Encoder(blobs, Policy(), programs.encode, programs.names)
        table = encoder.finish({name: encoder.slot(value) for name, value in values.items()})
        table = msgspec.structs.replace(table, codes=programs.codes.table())
        self.left_out = encoder.left_out
        codes = programs.codes
        files = codes.sources() | codes.marshalled(lambda code: code)
        self._new = NewRecord(Manifest(), table, blobs.settled, files)
        with tempfile.TemporaryDirectory() as folder:
            self.record = Record.of(self.write(f"{folder}/x.rec").read_bytes())
        self.table = self.record.table

    def write(self, path: str | os.PathLike[str]) -> Path:
        return self._new.write(path)

    def nodes(self, kind: type[Any]) -> list[Any]:
        return [node for node in self.table.nodes if isinstance(node, kind)]

    def source(self) -> str:
        """All of the source in the record."""
        names = [name for name in self.record.members if name.startswith("src/")]
        return "".join(self.record.read(name).decode() for name in names)

    def rebuilder(self, magic: str = HERE) -> Rebuilder:
        return Rebuilder(self.table, Shelf(self.table, self.record.read, magic))

    def build(self, magic: str = HERE) -> dict[str, Any]:
        return self.build_with(self.rebuilder(magic))

    def build_with(self, rebuilder: Rebuilder) -> dict[str, Any]:
        return rerun.rebuild(self.table, self.record.blobs, rebuilder)


def both_ways(value: object) -> list[Any]:
    """A value from marshalled code, and again from source."""
    carried = Carried(value=value)
    assert not carried.left_out, carried.left_out
    return [carried.build(magic)["value"] for magic in (HERE, ELSEWHERE)]


def check_same_calls(function: Callable[..., Any], *calls: tuple[Any, ...]) -> list[Any]:
    """What comes back does as the function does, from marshalled code and from source."""
    made = both_ways(function)
    for copy in made:
        assert copy is not function
        for args in calls:
            assert outcome(copy, args) == outcome(function, args)
    return made


def outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> object:
    try:
        result = function(*args)
    except Exception as error:
        return type(error).__name__, str(error), _lines(error)
    return list(result) if hasattr(result, "__next__") else result


def _lines(error: BaseException) -> list[tuple[str, int, str]]:
    found = []
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if code.co_filename != __file__:
            found.append((code.co_filename, at.tb_lineno, code.co_name))
        at = at.tb_next
    return found
