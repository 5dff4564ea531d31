"""A record as a file: written whole, the same bytes each time, read back as it was."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import zipfile

import msgspec
import pytest
import torch
from roundtrip import data_of, encode, write
from support import run_python

from tripwire.errors import BadRecord
from tripwire.recording.format import container
from tripwire.recording.format.container import ByteSource, Content, find_members, write_members
from tripwire.recording.format.file import NewRecord, Record, stamp
from tripwire.recording.format.manifest import (
    SCHEMA,
    Autocast,
    Environment,
    Manifest,
    Omission,
    Python,
    Raised,
    Returned,
    Verdict,
    Where,
)
from tripwire.recording.format.nodes import Code, Table

FULL = Manifest(
    packages="numpy==2.4 torch==2.13.0",
    function=Where("f", "/a/b.py", 12),
    created="2024-05-06T07:08:09Z",
    outcome=Raised("ValueError", "builtins", "no", "/a/b.py", 14),
    environment=Environment(autocast={"cpu": Autocast(True, "bfloat16")}, flags={"tf32": True}),
    omissions=(Omission("value[0]", "a lock"),),
    policy="full",
    verdict=Verdict("reproduces", "same error", "3.11.7", "2.13.0"),
    notes=("one",),
)


def full_record() -> NewRecord:
    blobs = encode([torch.arange(10.0)])[0]
    code = Code("f", "/a/b.py", 1, "src/0.py", (0, 0), "code/0", ())
    table = msgspec.structs.replace(blobs.table, codes=(code,))
    return NewRecord(FULL, table, blobs.blobs, {"src/0.py": b"def f(): pass\n", "code/0": b"\xe3"})


def rewrite(data: bytes, change) -> bytes:
    """The same record through Python's own zipfile, its manifest changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            member = old.read(info)
            if info.filename == "manifest.json":
                manifest = json.loads(member)
                change(manifest)
                member = json.dumps(manifest).encode()
            new.writestr(info.filename, member, info.compress_type)
    return out.getvalue()


def test_what_is_written_is_read(tmp_path) -> None:
    path = full_record().write(tmp_path / "a.rec")
    with Record.open(path) as record:
        members = record.manifest.members
        assert set(members) == {"objects.json", "tensors.safetensors", "src/0.py", "code/0"}
        assert msgspec.structs.replace(record.manifest, members={}) == FULL
        assert record.read("src/0.py") == b"def f(): pass\n"
        assert record.table.codes[0].name == "f"
        assert record.manifest.python == Python.here()


def test_any_zip_tool_reads_it_and_the_manifest_comes_first(tmp_path) -> None:
    path = full_record().write(tmp_path / "a.rec")
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert file.namelist()[0] == "manifest.json"
        deflated = [i.filename for i in file.infolist() if i.compress_type == zipfile.ZIP_DEFLATED]
        assert deflated == ["objects.json"]
        assert {i.compress_type for i in file.infolist()} == {zipfile.ZIP_STORED, 8}
        head = file.read("objects.json").splitlines()[0]
        assert json.loads(head).keys() == {"roots", "packed", "codes", "nodes"}


def test_the_same_record_gives_the_same_bytes(tmp_path) -> None:
    one, two = (full_record().write(tmp_path / name) for name in ("a.rec", "b.rec"))
    assert one.read_bytes() == two.read_bytes()


def test_no_file_is_ever_written_over(tmp_path) -> None:
    (tmp_path / "a.rec").write_text("mine")
    (tmp_path / "a-1.rec").symlink_to(tmp_path / "nowhere")
    assert full_record().write(tmp_path / "a.rec") == tmp_path / "a-2.rec"
    assert full_record().write(tmp_path / "sub" / "a.rec") == tmp_path / "sub" / "a.rec"
    assert (tmp_path / "a.rec").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_without_hard_links_nothing_is_written_over_either(tmp_path, monkeypatch) -> None:
    def refuse(*args: object, **where: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a.rec").write_text("mine")
    path = full_record().write(tmp_path / "a.rec")
    assert path == tmp_path / "a-1.rec"
    Record.open(path).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-1.rec", "a.rec"]


class Broken:
    def chunks(self):
        yield b"ab"
        raise OSError("disk full")


def test_a_failed_write_leaves_nothing(tmp_path) -> None:
    from tripwire.recording.format.blobs import NewBlob

    record = NewRecord(FULL, Table({}, ()), [NewBlob("U8", (4,), 4, Broken())], {})
    with pytest.raises(OSError, match="disk full"):
        record.write(tmp_path / "a.rec")
    assert list(tmp_path.iterdir()) == []


def test_a_verdict_is_stamped_and_everything_else_stays(tmp_path) -> None:
    path = full_record().write(tmp_path / "a.rec")
    with Record.open(path) as before:
        stamp(path, Verdict("differs", "another line"))
        with Record.open(path) as after:
            assert after.manifest.verdict == Verdict("differs", "another line")
            old = msgspec.structs.replace(before.manifest, verdict=after.manifest.verdict)
            assert after.manifest == old
            assert after.table == before.table
            assert after.blobs.read(0) == before.blobs.read(0)
    assert [p.name for p in tmp_path.iterdir()] == ["a.rec"]


def test_other_outcomes_are_kept(tmp_path) -> None:
    record, _ = encode([1])
    manifest = msgspec.structs.replace(record.manifest, outcome=Returned("abc"))
    path = NewRecord(manifest, record.table, record.blobs, {}).write(tmp_path / "a.rec")
    with Record.open(path) as found:
        assert found.manifest.outcome == Returned("abc")


def test_a_newer_major_version_is_told_clearly(tmp_path) -> None:
    data = data_of(tmp_path, [1])

    def change(manifest) -> None:
        manifest.clear()
        manifest["schema"] = "7.0"

    with pytest.raises(BadRecord, match=r"format 7\.0.*reads up to 6\.0") as raised:
        Record.of(rewrite(data, change))
    assert raised.value.slug == "record-newer"


def test_an_older_major_version_is_told_clearly(tmp_path) -> None:
    data = data_of(tmp_path, [1])
    with pytest.raises(BadRecord, match=r"format 5\.1.*reads 6\.x") as raised:
        Record.of(rewrite(data, lambda manifest: manifest.update(schema="5.1")))
    assert raised.value.slug == "record-older"


def test_a_newer_minor_version_is_read(tmp_path) -> None:
    data = data_of(tmp_path, [1])

    def change(manifest) -> None:
        manifest["schema"] = "6.7"
        manifest["mood"] = {"a": [1]}
        manifest["environment"]["weather"] = 3

    with Record.of(rewrite(data, change)) as record:
        assert record.manifest.schema == "6.7"
    assert SCHEMA == "6.0"


@pytest.mark.parametrize("schema", ["", "3", "x.y", "3.0.0", "-3.0", "٣.٠", "3" * 5000 + ".0"])
def test_a_schema_that_is_none_is_refused(tmp_path, schema) -> None:
    data = data_of(tmp_path, [1])
    with pytest.raises(BadRecord):
        Record.of(rewrite(data, lambda manifest: manifest.update(schema=schema)))


def test_members_beyond_four_gigabytes_are_written_and_found(tmp_path, monkeypatch) -> None:
    """With a smaller limit: the wide fields are the same ones."""
    monkeypatch.setattr(container, "_BIG", 100)
    path = tmp_path / "wide.zip"
    members = {"src/0.py": b"b" * 300, "code/0": b"c" * 10}
    with open(path, "wb") as out:
        contents = {name: Content.of(data) for name, data in members.items()}
        contents["objects.json"] = Content.deflate(b"a" * 500)
        write_members(out, {n: (c, c.digest()[1]) for n, c in contents.items()})
    with contextlib.closing(ByteSource.open(path)) as source:
        found = find_members(source)
        assert {n: source.read(found[n].start, found[n].size) for n in members} == members
        assert b"".join(source.inflate(found["objects.json"])) == b"a" * 500


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1_000_000])
def test_a_deflated_member_gives_what_it_holds_a_piece_at_a_time(size) -> None:
    for data in (bytes(size), random.Random(0).randbytes(size)):
        content = Content.deflate(data)
        out = io.BytesIO()
        write_members(out, {"objects.json": (content, content.digest()[1])})
        source = ByteSource.of(out.getvalue())
        pieces = list(source.inflate(find_members(source)["objects.json"]))
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) <= 1 << 16
        with zipfile.ZipFile(out) as file:
            assert file.read("objects.json") == data


def test_files_are_opened_once_and_closed(tmp_path) -> None:
    path = write(tmp_path, [torch.ones(3)])
    before = set(os.listdir("/proc/self/fd"))
    with Record.open(path):
        pass
    path.write_bytes(b"PK")
    with pytest.raises(BadRecord):
        Record.open(path)
    assert set(os.listdir("/proc/self/fd")) == before


WITHOUT_TORCH = """
import sys
for name in ("torch", "numpy"):
    sys.modules[name] = None
import types
package = types.ModuleType("tripwire")
package.__path__ = [sys.argv[1]]
sys.modules["tripwire"] = package
from tripwire.recording.format import decode
from tripwire.recording.capture import encode, origin
from tripwire.recording.format import file
with file.Record.open(sys.argv[2]) as record:
    print(decode.view(record.table, record.blobs)["value"])
blobs = origin.Blobs(origin.KEEP_ALL)
encoder = encode.Encoder(blobs, origin.KEEP_ALL, lambda *_: None, None)
table = encoder.finish({"value": encoder.slot([1, {2: (3,)}])})
path = file.NewRecord(file.Manifest(), table, blobs.settled, {}).write(sys.argv[3])
with file.Record.open(path) as record:
    print(decode.view(record.table, record.blobs)["value"])
"""


def test_a_record_is_written_and_read_without_torch(tmp_path) -> None:
    import tripwire.recording

    path = write(tmp_path, [1, "two", torch.ones(3), torch.float32])
    package = os.path.dirname(os.path.dirname(tripwire.recording.__file__))
    names = [package, str(path), str(tmp_path / "new.rec")]
    first, second = run_python(f"import sys; sys.argv[1:] = {names}\n{WITHOUT_TORCH}").split("\n")
    assert first.startswith("[1, 'two', <Tensor of a library that isn't installed here>")
    assert second == "[1, {2: (3,)}]"
