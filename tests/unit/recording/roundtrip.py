"""What the tests of records share: values into a file and back, with classes by name."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tripwire.recording.capture.encode import Encoder
from tripwire.recording.capture.origin import KEEP_ALL, Blobs, Policy
from tripwire.recording.format import nodes
from tripwire.recording.format.decode import view
from tripwire.recording.format.file import NewRecord, Record
from tripwire.recording.format.manifest import Manifest
from tripwire.recording.format.nodes import AnyNode, Slot
from tripwire.recording.replay.rerun import rebuild


def name_code(encoder: Encoder, value: object) -> AnyNode | None:
    """Classes and functions by where they are found: enough for tests of data."""
    kinds = (type, types.FunctionType, types.BuiltinFunctionType)
    if any(issubclass(type(value), kind) for kind in kinds):
        module = "types" if value is types.NoneType else value.__module__
        return nodes.Library(module, value.__qualname__)
    return None


class ByName:
    """Finds again what `name_code` named."""

    def needs(self, node: AnyNode) -> Iterable[Slot]:
        return ()

    def make(self, node: AnyNode, value: Callable[[Slot], object]) -> object:
        assert isinstance(node, nodes.Library)
        found: Any = importlib.import_module(node.module)
        for part in node.name.split("."):
            found = getattr(found, part)
        return found

    def fill(self, node: AnyNode, made: object, value: Callable[[Slot], object]) -> None:
        pass


class AllNames:
    """Every attribute may be taken."""

    def wants(self, cls: type, name: str) -> bool:
        return True


def encode(
    value: object, policy: Policy = KEEP_ALL, names: Any = AllNames()
) -> tuple[NewRecord, Encoder]:
    """A record with one root, "value"."""
    blobs = Blobs(policy)
    encoder = Encoder(blobs, policy, name_code, names)
    root = encoder.slot(value, "value")
    table = encoder.finish({"value": root})
    manifest = Manifest(omissions=tuple(encoder.left_out), policy=policy.describe())
    return NewRecord(manifest, table, blobs.settled, {}), encoder


def write(path: Path, value: object, policy: Policy = KEEP_ALL) -> Path:
    return encode(value, policy)[0].write(path / "x.rec")


def data_of(tmp_path: Path, value: object, policy: Policy = KEEP_ALL) -> bytes:
    path = write(tmp_path, value, policy)
    data = path.read_bytes()
    path.unlink()
    return data


def again(tmp_path: Path, value: object, policy: Policy = KEEP_ALL) -> Any:
    """What comes back of a value, live."""
    with Record.of(data_of(tmp_path, value, policy)) as record:
        return rebuild(record.table, record.blobs, ByName())["value"]


def seen(tmp_path: Path, value: object, policy: Policy = KEEP_ALL) -> Any:
    """What is seen of a value without trust."""
    with Record.of(data_of(tmp_path, value, policy)) as record:
        return view(record.table, record.blobs)["value"]
