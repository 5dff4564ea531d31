"""Files made to harm: a typed error, soon, in little memory, and nothing runs."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from forging import ODD, find_places, lay_out, members_of, read_table, seal, write_table
from roundtrip import data_of
from support import run_python

import tripwire
from tripwire.errors import BadRecord
from tripwire.recording.format.container import Content, write_members
from tripwire.recording.format.decode import view
from tripwire.recording.format.file import Record


def valid(tmp_path: Path, floats: int = 64) -> bytes:
    base = torch.arange(float(floats))
    shared = [1, "two", None, 2.5]
    value = {"t": base, "v": base[3:9].requires_grad_(), "l": [shared, shared, (1, 2)], "b": b"xy"}
    value["self"] = [value]
    return data_of(tmp_path, value)


def look(data: bytes) -> object:
    """All that opening and looking does."""
    with Record.of(data) as record:
        view(record.table, record.blobs)
        blobs = [record.blobs.read(i) for i in range(len(record.blobs))]
        return record.manifest, record.table, blobs


CONSTANT = 1 << 19  # pieces to read with


def check_refused(data: bytes) -> BadRecord:
    """A typed error, in under a second, in under twice the file's memory and half a MiB.

    The file's own bytes are in memory before and aren't counted: a file isn't read as a whole.
    """
    tracemalloc.start()
    try:
        start = time.monotonic()
        with pytest.raises(BadRecord) as raised:
            look(data)
        took = time.monotonic() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert took < 30  # far below a second without tracemalloc; a machine may be busy
    assert peak < 2 * len(data) + CONSTANT
    return raised.value


# --- mutations ---


def mutate(data: bytes, random_: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random_.choice([1, 1, 1, 2, 5])):
        place = random_.randrange(len(changed)) if changed else 0
        match random_.randrange(6):
            case 0 | 1 | 2:
                changed[place] ^= 1 << random_.randrange(8)
            case 3:
                del changed[place:]
            case 4:
                other = random_.randrange(len(changed))
                changed[place : place + 40] = changed[other : other + random_.randrange(80)]
            case 5:
                changed[place:place] = random_.randbytes(random_.randrange(1, 20))
        if not changed:
            break
    return bytes(changed)


def check_mutations(data: bytes, seeds: range) -> None:
    wanted = look(data)
    refused = 0
    for seed in seeds:
        changed = mutate(data, random.Random(seed))
        try:
            found = look(changed)
        except BadRecord:
            refused += 1
        else:  # bytes that mean nothing, such as a member's date
            assert found == wanted, seed
    assert refused > len(seeds) * 0.8


def check_sealed_mutations(data: bytes, seeds: range) -> None:
    """The same inside the members, with hashes that fit."""
    members = members_of(data)
    for seed in seeds:
        random_ = random.Random(seed)
        name = random_.choice(["manifest.json", "objects.json", "tensors.safetensors"])
        changed = mutate(members[name], random_)
        try:
            if name == "manifest.json":
                json.loads(changed)
            look(seal({**members, name: changed}))
        except BadRecord:
            pass
        except (ValueError, TypeError, KeyError):
            if name != "manifest.json":  # `seal` itself reads the manifest
                raise


def dumps(tree: object) -> bytes:
    return json.dumps(tree).encode()


def check_odd_values(data: bytes, seeds: range) -> None:
    """JSON that is JSON still, with odd values in odd places, and hashes that fit."""
    members = members_of(data)
    opened = 0
    for seed in seeds:
        random_ = random.Random(seed)
        name = random_.choice(["objects.json"] * 4 + ["manifest.json"])
        read, write = (read_table, write_table) if name == "objects.json" else (json.loads, dumps)
        tree = read(members[name])
        places = find_places(tree)
        for _ in range(random_.choice([1, 1, 2, 4])):
            holder, key = random_.choice(places)
            if random_.random() < 0.3:
                other, other_key = random_.choice(places)
                holder[key] = json.loads(json.dumps(other[other_key]))
            else:
                holder[key] = random_.choice(ODD)
        changed = {**members, name: write(tree)}
        try:
            look(seal(changed) if name == "objects.json" else zipped(list(changed.items())))
        except BadRecord:
            continue
        opened += 1
    assert opened  # some make sense


def rich(tmp_path: Path) -> bytes:
    """A record with every kind of node that data can have."""
    import collections
    import datetime
    import enum

    import numpy as np

    leaf = torch.ones(4, requires_grad=True)
    leaf.grad = torch.ones(4)
    flipped = torch.ones(2, dtype=torch.complex64).conj()
    values = [
        leaf, flipped, leaf * 2, torch.nn.Linear(2, 2), torch.Generator(), torch.float32,
        torch.Size([1]), np.ones((2, 2), order="F"), np.float32(1), 2**99, float("nan"), 1j,
        "\ud800", "s" * 99, range(3), slice(1, 2), collections.deque([1], 3), {1: 2}, {1, 2},
        frozenset({3}), collections.defaultdict(list, a=1), collections.OrderedDict(a=1),
        collections.Counter("a"), torch.max(leaf, 0), datetime.date(1, 2, 3),
        enum.Enum("E", "A")["A"], ValueError("x"), ..., b"x", (1, (2,)), object(), iter([1]),
    ]  # fmt: skip
    return data_of(tmp_path, values)


def test_damaged_files_are_refused_or_read(tmp_path) -> None:
    data = valid(tmp_path)
    check_mutations(data, range(200))
    check_sealed_mutations(data, range(200, 350))
    check_odd_values(rich(tmp_path), range(350, 550))


@pytest.mark.slow
def test_ten_thousand_damaged_files_are_refused_or_read(tmp_path) -> None:
    data = valid(tmp_path)
    check_mutations(data, range(1000, 5000))
    check_sealed_mutations(data, range(5000, 7000))
    check_odd_values(rich(tmp_path), range(7000, 11000))


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path) -> None:
    data = valid(tmp_path)
    for size in range(0, len(data), 7):
        with pytest.raises(BadRecord):
            look(data[:size])


# --- containers ---


def zipped(entries: list[tuple[str, bytes]], method: int | None = None) -> bytes:
    """A zip as Python writes it; the table alone is deflated, if nothing else is asked for."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in entries:
            usual = zipfile.ZIP_DEFLATED if name == "objects.json" else zipfile.ZIP_STORED
            file.writestr(name, data, usual if method is None else method, 9)
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zips_that_are_no_records(tmp_path) -> None:
    data = valid(tmp_path)
    members = list(members_of(data).items())
    objects = dict(members)["objects.json"]
    assert look(zipped(members)) == look(data)  # any writer's plain zip will do
    hostile = [
        b"",
        b"PK",
        b"\0" * 1000,
        zipped([]),
        zipped(members[:1]),
        zipped(members[1:]),
        zipped(members, zipfile.ZIP_DEFLATED),
        zipped(members, zipfile.ZIP_STORED),
        zipped(members, zipfile.ZIP_BZIP2),
        zipped([*members, ("objects.json", objects)]),
        zipped([*members, ("objects.json", b"{}")]),
        zipped([*members, ("../evil.py", b"x")]),
        zipped([*members, ("/etc/passwd", b"x")]),
        zipped([*members, ("src/../../x.py", b"x")]),
        zipped([*members, ("src/1.py\0.txt", b"x")]),
        zipped([*members, ("notes.txt", b"x")]),
        zipped([*members, ("src/9.py", b"x")]),  # not in the manifest
        zipped([*members, ("src/", b"")]),
        b"#!/bin/sh\n" + data,
        data + b"junk",
        data + data,
        data[:-2] + b"\x05\0hello",  # a comment
    ]
    for number, file in enumerate(hostile):
        assert check_refused(file).slug == "record-damaged", number


def deflated(members: dict[str, bytes], packed: bytes, says: int) -> bytes:
    """A file whose table is any bytes, and says that it holds so many."""
    import hashlib

    manifest = json.loads(members["manifest.json"])
    manifest["members"]["objects.json"] = [len(packed), hashlib.sha256(packed).hexdigest()]
    contents = {name: Content.of(data) for name, data in members.items()}
    contents["manifest.json"] = Content.of(json.dumps(manifest).encode())
    contents["objects.json"] = Content(len(packed), (packed,), says, 0)
    out = io.BytesIO()
    write_members(out, {name: (c, c.digest()[1]) for name, c in contents.items()})
    return out.getvalue()


@pytest.mark.parametrize("says", [0, 1000, 100_000_000, 2**32 - 2, 2**40])
def test_a_zip_bomb_is_never_held(tmp_path, says) -> None:
    members = members_of(valid(tmp_path))
    bomb = deflated(members, zlib.compress(b" " * 100_000_000, 9, -15), says)
    assert len(bomb) < 200_000
    check_refused(bomb)


def test_what_is_inflated_is_as_long_as_it_says(tmp_path) -> None:
    members = members_of(valid(tmp_path))
    text = members["objects.json"]
    packed = zlib.compress(text, 9, -15)
    look(deflated(members, packed, len(text)))
    for odd, says in (
        (packed, len(text) - 1),
        (packed, len(text) + 1),
        (packed, 0),
        (packed + b"\0", len(text)),
        (packed + packed, len(text)),
        (packed[:-1], len(text)),
        (packed[: len(packed) // 2], len(text)),
        (b"", len(text)),
        (b"", 0),
        (zlib.compress(text), len(text)),
        (text, len(text)),
        (b"\0" * 100_000, 5),
        (b"\0\0\0\xff\xff" * 100_000, 5),  # blocks of nothing
    ):
        assert check_refused(deflated(members, odd, says)).slug == "record-damaged"


def test_sizes_that_are_said_but_not_there(tmp_path) -> None:
    data = bytearray(valid(tmp_path))
    for place in (18, 22):  # the manifest's sizes
        for size in (0xFFFFFFFF, 0xFFFFFFFE, len(data), 0):
            changed = bytearray(data)
            changed[place : place + 4] = struct.pack("<I", size)
            check_refused(bytes(changed))


def test_members_that_overlap_are_refused(tmp_path) -> None:
    """The directory points two names at one member's bytes."""
    data = bytearray(valid(tmp_path))
    first = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", first + 4)
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    check_refused(bytes(data))


def test_a_great_many_members_are_refused() -> None:
    data = zipped([(f"src/{i}.py", b"") for i in range(20_000)])
    check_refused(data)


def test_wrong_hashes_and_sizes_in_the_manifest(tmp_path) -> None:
    members = members_of(valid(tmp_path))
    for change in ({"objects.json": [1, "0" * 64]}, {}, {"objects.json": [5, "zz"]}, [], None):
        manifest = json.loads(members["manifest.json"])
        manifest["members"] = change
        contents = {**members, "manifest.json": json.dumps(manifest).encode()}
        check_refused(zipped(list(contents.items())))


def test_a_pipe_or_a_device_is_no_record_and_nobody_waits_for_it(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe.rec")
    for path in (tmp_path / "pipe.rec", Path("/dev/zero"), tmp_path):
        with pytest.raises((BadRecord, IsADirectoryError)):
            Record.open(path)


# --- tables ---


def with_objects(tmp_path: Path, objects: bytes) -> bytes:
    return seal({**members_of(valid(tmp_path)), "objects.json": objects})


CODES = b'["f","f.py",1,null,[1,0]],["g","f.py",2,null,[2,0],null,["a"]]'
# By what the error says.
TABLES: dict[str, list[bytes]] = {
    "objects.json: ": [
        b"[" * 1500 + b"\n",
        b'{"a":' * 500 + b"\n",
        b"\xff\xfe\n",
        b"\n",
        b"null\n",
        b"[]\n",
        b"{}\n",
        lay_out(nodes=b'["list"],'),
        lay_out(nodes=b'["list"]["list"]'),
        lay_out(nodes=b'["str","\\ud800"]'),
        lay_out(nodes=b'["str","\xff"]'),
        lay_out(nodes=b'["str","a\nb"]'),
    ],
    "ends within a line": [lay_out() + b"x", lay_out()[:-1], lay_out(nodes=b'["list"]')[:-1]],
    "fewer lines than it says": [
        b"",
        b'{"roots":{},"nodes":1}\n',
        b'{"roots":{},"codes":9223372036854775807}\n',
        b'{"roots":{},"packed":1}\n',
    ],
    "more lines than it says": [
        b'{"roots":{}}\n["list"]\n',
        b'{"roots":{},"nodes":1}\n["list"]\n["list"]\n',
        lay_out(nodes=b'["list"]') + b"\n",
        lay_out() + lay_out(),
    ],
    "goes on with another thing": [
        lay_out(nodes=b'["list",[1]]\n ["tuple",[1]]'),
        lay_out(nodes=b'["dict",[1],[2]]\n ["dict",[3],[4],"ordered"]'),
        lay_out(nodes=b'["object",[0],["a"],[1]]\n ["object",[1],["b"],[2]]\n["list"]'),
        lay_out(nodes=b'["tensor",0]\n ["tensor",1]'),
        lay_out(codes=b'["f","f.py",1,null,[1,0]]\n ["g","f.py",1,null,[1,0]]'),
    ],
    "refers to a node that it doesn't have": [
        lay_out(nodes=b'["list",[1]]\n ["list",[[1]]]'),
        lay_out(b'{"x":[0]}'),
        lay_out(b'{"x":[99999999999999999999]}'),
        lay_out(nodes=b'["list",[[7]]]'),
        lay_out(nodes=b'["dict",[[7]],[1]]'),
        lay_out(nodes=b'["dict",[1],[1],"default",[7]]'),
        lay_out(nodes=b'["extras",[7]]'),
        lay_out(nodes=b'["nn",[1]]'),
        lay_out(nodes=b'["nnform",[1]]'),
        lay_out(nodes=b'["object",[1]]'),
        lay_out(nodes=b'["cell",[1]]'),
        lay_out(nodes=b'["class","A","A","m",[0],[[0],[1]]]'),
        lay_out(nodes=b'["function","f","f",0,[0],null,null,[[1]]]', codes=CODES),
    ],
    "Expected": [  # msgspec: it isn't what a table is made of
        lay_out(b'{"x":' + b"[" * 100 + b"]" * 100 + b"}"),
        lay_out(b"[]"),
        lay_out(packed=b'["F32",[4],0]'),
        lay_out(packed=b'["F32",[0],9999999999]'),
        lay_out(b'{"x":[-1]}'),
        lay_out(b'{"x":[0,0]}', b'["list"]'),
        lay_out(b'{"x":[]}', b'["list"]'),
        lay_out(nodes=b'["list",[[]]]'),
        lay_out(nodes=b'["list",[[0,0]]]'),
        lay_out(nodes=b'["list","a b"]'),
        lay_out(nodes=b'["list",[],0]'),
        lay_out(nodes=b'["list"],7'),
        lay_out(nodes=b'["extras",1]'),
        lay_out(nodes=b'["nn",[0,0]]'),
        lay_out(nodes=b'["library",0]'),
        lay_out(nodes=b'["object",[0],"a",[1]]'),
        lay_out(nodes=b'["tensor",-1]'),
        lay_out(nodes=b'["range",0,1]'),
        lay_out(codes=b'["f","f.py",-1,null,[1,0]]'),
        lay_out(codes=b'["f","f.py",1,null,[1,-1]]'),
        lay_out(codes=b'["f","f.py",1,null,[1]]'),
        lay_out(codes=b'["f","f.py",1,null,[1,0],null,[],0,[-1,0]]'),
        lay_out(nodes=b'["function","f","f",[0],[0]]', codes=CODES),
        lay_out(nodes=b'["function","f","f",0,[0],null,null,[1]]', codes=CODES),
    ],
    "Invalid value": [lay_out(nodes=b'["nosuch",1]'), lay_out(nodes=b'["again",1]')],
    "unknown field": [lay_out(more=b',"more":1')],
    "Invalid base64": [lay_out(nodes=b'["text","!"]'), lay_out(nodes=b'["bytes","YQ"]')],
    "refers to a blob that isn't there": [
        lay_out(nodes=b'["tensor",1]'),  # there is one blob
        lay_out(nodes=b'["tensor",9223372036854775807]'),
        lay_out(nodes=b'["array",7,"<f8",[1],false,false]'),
    ],
    "would take more memory": [
        lay_out(b'{"x":' + b"[" * 900_000 + b"]" * 900_000 + b"}"),
        b"[" * 20_000 + b"\n",
        b'{"a":' * 100_000,
        lay_out(packed=b"\n".join([b'["U8",[0],1]'] * 60_000)),
        lay_out(nodes=b'["str","' + b"a" * 26_000_000 + b'"]'),
        lay_out(nodes=b'["str","' + b"a" * 12_000_000 + b'\xf0\x9f\x98\x80"]'),
        lay_out(nodes=b'["str","' + b"a" * 12_000_000 + b'\\uD83D\\uDE00"]'),
        lay_out(nodes=b'["str","' + b"a" * 18_000_000 + b'\\u20ac"]'),
    ],
    "Invalid enum value 'sparse'": [lay_out(nodes=b'["tensor",0,"sparse"]')],
    "of length <= 64": [lay_out(nodes=b'["tensor",0,"","%s"]' % (b"a" * 65))],
    "an array isn't as large": [lay_out(nodes=b'["array",0,"|O8",[1],false,false]')],
    "an array has a shape": [lay_out(nodes=b'["array",0,"<f8",[9223372036854775807],false,false]')],
    "the numbers of names or keys and of values differ": [
        lay_out(nodes=b'["dict",[1],[]]'),
        lay_out(nodes=b'["dict",["a","b"],[1]]'),
        lay_out(nodes=b'["dict",[],[1]]'),
        lay_out(nodes=b'["namespace","m",["a"]]'),
        lay_out(nodes=b'["module","m",["a"],[1,2]]'),
        lay_out(nodes=b'["class","A","A","m",[0],[],["a"]]'),
        lay_out(nodes=b'["object",[0],["a"],[]]'),
        lay_out(nodes=b'["object",[0],[],[1]]'),
        lay_out(nodes=b'["object",[0],[],[],null,["a"]]'),
        lay_out(nodes=b'["object",[0],[],[],null,[],[1]]'),
        lay_out(nodes=b'["extras",[0],null,null,["a"]]'),
    ],
    "a module has another number of values than of names": [
        lay_out(b'{"x":[0]}', b'["nn",[1],[1]],["nnform",[2]],["class","A","A","m",[2],[]]'),
        lay_out(b'{"x":[0]}', b'["nn",[1]],["nnform",[2],["a"]],["list"]'),
        lay_out(b'{"x":[0]}', b'["nn",[1]],["nnform",[2],[],[["_modules",1]]],["list"]'),
        lay_out(b'{"x":[0]}', b'["nn",[1],[1]],["nnform",[2],[],[],["a"]],["list"]'),
        lay_out(
            b'{"x":[0]}',
            b'["nn",[1],[1,2]],["nnform",[2],["a"],[["_modules",2]],["b","c"]],["list"]',
        ),
    ],
    "a module has a form that isn't one": [
        lay_out(b'{"x":[0]}', b'["nn",[1]],["list"]'),
    ],
    "Invalid enum value 'list'": [lay_out(nodes=b'["dict",[],[],"list"]')],
    "has more than 64 bits": [
        lay_out(nodes=b'["list",[9223372036854775808]]'),
        lay_out(nodes=b'["list",[-9223372036854775809]]'),
        lay_out(b'{"x":9223372036854775808}'),
    ],
    "an object that can't contain itself does": [lay_out(b'{"x":[0]}', b'["tuple",[[0]]]')],
    "a Range node makes no sense": [lay_out(b'{"x":[0]}', b'["range",0,[1],1],["list"]')],
    "matching regex": [
        lay_out(nodes=b'["int","xyz"]'),
        lay_out(nodes=b'["int",""]'),
        lay_out(nodes=b'["int","-"]'),
        lay_out(nodes=b'["bits","7ff8"]'),
        lay_out(nodes=b'["complex","%s","-%s"]' % (b"0" * 16, b"0" * 15)),
        lay_out(nodes=b'["withheld","partly","int8",[1],[1],"cpu"]'),
    ],
    "a source or code that objects.json names isn't there": [
        lay_out(codes=b'["f","f.py",1,"src/9.py",[1,0]]'),
        lay_out(codes=b'["f","f.py",1,"objects.json",[1,0]]'),
        lay_out(codes=b'["f","f.py",1,null,[1,0],"src/0.py"]'),
        lay_out(codes=b'["f","f.py",1,null,[1,0],"code/0"]'),
    ],
    "refers to a code that it doesn't have": [
        lay_out(nodes=b'["function","f","f",0,[0]]'),
        lay_out(nodes=b'["function","f","f",2,[0]]', codes=CODES),
    ],
    "tensors.safetensors": [lay_out(packed=b'["F32",[4],1]')],
    "its args are no tuple": [lay_out(b'{"args":[0]}', b'["list"]'), lay_out(b'{"args":1}')],
    "its locals are no dict": [lay_out(b'{"locals":[0]}', b'["list"]')],
    "isn't a text": [lay_out(b'{"locals":[0]}', b'["dict",[1],[1]]')],
}


@pytest.mark.parametrize(
    ("reason", "objects"), [(reason, one) for reason, many in TABLES.items() for one in many]
)
def test_tables_that_cannot_be_are_refused(tmp_path, reason, objects) -> None:
    assert reason in str(check_refused(with_objects(tmp_path, objects)))


@pytest.mark.parametrize(
    "view_",
    [
        "0,[65]",
        "0,[64],1",
        "0,[1],4611686018427387904",
        '0,[9223372036854775807,2],0,"","float32",[1,1]',
        '0,[4294967296,4294967296],0,"","float32",[0,0]',
        '0,[2,2],0,"","float32",[9223372036854775807,1]',
        '0,[2],0,"","float32",[1],256',
        '0,[2],2,"","float32",[1],2',
        '0,[1],0,"","float33"',
        '0,[1],0,"sparse"',
        '0,[1,1],0,"","float32",[1]',
        "9,[1]",
        "0,[-1]",
        f"0,{[1] * 65}",
        '0,[1],0,"","float32",[1],0,"cpu",true',
    ],
)
def test_views_beyond_their_blob_are_refused(tmp_path, view_) -> None:
    node = f'["view",{view_}]'.encode()
    check_refused(with_objects(tmp_path, lay_out(b'{"x":[0]}', node)))


@pytest.mark.parametrize("count", [999_999, 10**6 * 4])
@pytest.mark.parametrize("sign", [b"", b"-"])
def test_huge_numbers_are_refused(tmp_path, count, sign) -> None:
    for node in (b'["list",[%s]]', b'["tensor",%s]', b'["withheld","shape","int8",[%s],[1],"cpu"]'):
        check_refused(with_objects(tmp_path, lay_out(nodes=node % (sign + b"9" * count))))


def test_of_a_name_that_is_there_twice_the_last_counts(tmp_path) -> None:
    twice = b'{"roots":{"x":1},"nodes":7,"roots":{"y":1,"y":2},"nodes":0,"codes":0}\n'
    check_refused(with_objects(tmp_path, twice.replace(b"7", b'"x"')))
    with Record.of(with_objects(tmp_path, twice)) as record:
        assert record.table.roots == {"y": 2} and not record.table.nodes


def test_an_array_again_and_again_takes_its_bytes_each_time(tmp_path) -> None:
    members = members_of(data_of(tmp_path, np.ones(200_000)))
    tree = read_table(members["objects.json"])
    tree["nodes"] += [node for node in tree["nodes"] if node[0] == "array"] * 999
    refused = seal({**members, "objects.json": write_table(tree)})
    assert check_refused(refused).slug == "record-too-large"


def test_a_large_array_can_be_opened(tmp_path) -> None:
    look(data_of(tmp_path, np.zeros(5_000_000)))


def make_tuples(count: int, items: bytes) -> bytes:
    """A set of a tuple of the next one, and so on; `%d` is the next one's number."""
    chain = (b'["tuple",[%s]]' % items.replace(b"%d", b"%d" % (i + 2)) for i in range(count))
    return b",".join((b'["set",[[1]]]', *chain, b'["tuple"]'))


LARGE = b'["set",[[1]]]\n["tuple",[%s[2]]]\n["int","f"]\n%s' % (
    b"[2]," * 999,
    b"\n".join([b' ["int","%s"]' % (b"f" * 30_000)] * 10),
)
SIGNS = [b",".join(b"-%d" % (1 + (i >> k) % 2) for k in range(12)) for i in range(4096)]
ALL = b"\n".join(b' ["set",[[%d]]]' % (i + 1) for i in range(4096))
SAME = b"\n".join((b'["set"]', ALL, *(b'["tuple",[%s]]' % one for one in SIGNS)))
KEYS = {
    "deep": (make_tuples(5000, b"[%d]"), "take too long to hash"),
    "wide": (make_tuples(24, b"[%d],[%d]"), "take too long to hash"),
    "large": (LARGE, "take too long to hash"),
    "equal hashes": (SAME, "collide"),
}


@pytest.mark.parametrize(("nodes", "reason"), KEYS.values(), ids=KEYS)
def test_keys_that_take_long_are_refused(tmp_path, nodes, reason) -> None:
    with pytest.raises(BadRecord, match=reason):
        look(with_objects(tmp_path, lay_out(b'{"x":[0]}', nodes)))


def test_ranges_that_take_long_are_refused(tmp_path) -> None:
    nodes = b'["range",0,[1],1],["int","%s"]' % (b"f" * 9000)
    check_refused(with_objects(tmp_path, lay_out(b'{"x":[0]}', nodes)))


def test_sources_are_read_once(tmp_path) -> None:
    """However many functions, codes and files name them."""
    codes = b",".join(
        b'["f","f%d.py",1,"src/0.py",[1,0],null,[],0,[0,%d]]' % (i, 9000 * (i % 2))
        for i in range(200)
    )
    many = b",".join(b'["function","f","f",%d,[0]]' % (i % 200) for i in range(1000))
    text = lay_out(b'{"x":[0]}', many, codes)
    members = {**members_of(valid(tmp_path)), "objects.json": text, "src/0.py": b"x = 1\n" * 9000}
    path = tmp_path / "many.rec"
    path.write_bytes(seal(members))
    tracemalloc.start()
    try:
        tripwire.load_record(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20


def test_sources_are_shown_as_far_as_there_is_memory(tmp_path) -> None:
    """Functions may lie in one another, but not each in all others."""
    source = b"x = 1\n" * 200_000
    codes = b",".join(
        b'["f","f.py",1,"src/0.py",[1,0],null,[],0,[%d,199000]]' % i for i in range(900)
    )
    many = b",".join(b'["function","f","f",%d,[0]]' % i for i in range(900))
    roots = b"{%s}" % b",".join(b'"%d":[%d]' % (i, i) for i in range(400))
    members = {**members_of(valid(tmp_path)), "src/0.py": source}
    data = seal({**members, "objects.json": lay_out(roots, many, codes)})
    with Record.of(data) as record, pytest.raises(BadRecord, match="more source than"):
        view(record.table, record.blobs, record.read)


def test_a_huge_stand_in_allocates_nothing_when_looked_at(tmp_path) -> None:
    node = b'["withheld","shape","float32",[1000000000000],[1],"cpu"]'
    look(with_objects(tmp_path, lay_out(b'{"x":[0]}', node)))


def test_a_huge_expanded_view_allocates_nothing(tmp_path) -> None:
    node = b'["view",0,[1000000000000],0,"","float32",[0]]'
    data = with_objects(tmp_path, lay_out(b'{"x":[0]}', node))
    with Record.of(data) as record:
        assert view(record.table, record.blobs)["x"].shape == (10**12,)


@pytest.mark.parametrize(
    "part", [b'["list",[]]', b'["list",[' + b"[0]," * 20 + b"[0]]]", b'["const","Ellipsis"]']
)
def test_more_nodes_than_a_record_may_have(tmp_path, part) -> None:
    nodes = b"\n".join([part] * (15_000_000 // len(part)))
    data = with_objects(tmp_path, lay_out(nodes=nodes))
    assert check_refused(data).slug == "record-too-large"


# --- tensors ---


def with_header(tmp_path: Path, header: bytes, length: int | None = None) -> bytes:
    members = members_of(valid(tmp_path))
    old = members["tensors.safetensors"]
    data = old[8 + int.from_bytes(old[:8], "little") :]
    size = (len(header) if length is None else length).to_bytes(8, "little")
    return seal({**members, "tensors.safetensors": size + header + data})


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[]",
        b"",
        b"[" * 100_000,
        b'{"0":{"dtype":"F32","shape":[64],"data_offsets":[0,255]}}',
        b'{"0":{"dtype":"F32","shape":[64],"data_offsets":[8,264]}}',
        b'{"0":{"dtype":"F32","shape":[63],"data_offsets":[0,252]}}',
        b'{"0":{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,256]}}',
        b'{"0":{"dtype":"F32","shape":[-64],"data_offsets":[0,256]}}',
        b'{"0":{"dtype":"F99","shape":[64],"data_offsets":[0,256]}}',
        b'{"1":{"dtype":"F32","shape":[64],"data_offsets":[0,256]}}',
        b'{"rest":{"dtype":"U8","shape":[256],"data_offsets":[0,256]}}',
        b'{"0":{"dtype":"F32","shape":[32],"data_offsets":[0,128]},'
        b'"1":{"dtype":"F32","shape":[64],"data_offsets":[0,256]}}',
        b'{"0":{"dtype":"F32","shape":[32],"data_offsets":[0,128]},'
        b'"1":{"dtype":"F32","shape":[16],"data_offsets":[192,256]}}',
    ],
)
def test_headers_that_cannot_be(tmp_path, header) -> None:
    check_refused(with_header(tmp_path, header))


@pytest.mark.parametrize("length", [0, 7, 10_000, 2**32, 2**63 - 1, 2**64 - 1])
def test_header_lengths_that_cannot_be(tmp_path, length) -> None:
    check_refused(with_header(tmp_path, b"{}", length))


def test_a_large_file_is_refused_in_less_than_its_own_size(tmp_path) -> None:
    data = bytearray(valid(tmp_path, 4_000_000))
    data[len(data) // 2] ^= 1
    tracemalloc.start()
    try:
        with pytest.raises(BadRecord):
            Record.of(bytes(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * len(data)  # one copy of it is made by this test


# --- memory ---

WIDE = "\N{SNAKE}".encode()
BAD = b'["nosuch"]'  # the last node: all before it has been decoded when it is found
LATE = b'["int","xyz"]'  # and here all is decoded


def repeat(node: bytes, size: int) -> bytes:
    return b"\n".join([node] * (size // len(node)))


def make_hoards(tmp_path: Path, size: int, level: int) -> dict[str, bytes]:
    """Files whose tables have texts of about that size, made to take much memory."""
    members = members_of(valid(tmp_path))

    def table(*parts: bytes, **more: bytes) -> bytes:
        text = lay_out(nodes=b"\n".join(parts), **more)
        return seal({**members, "objects.json": text}, level)

    def manifest(**changes: object) -> bytes:
        changed = {**json.loads(members["manifest.json"]), **changes}
        rest = [item for item in members.items() if item[0] != "manifest.json"]
        return zipped([*rest, ("manifest.json", json.dumps(changed).encode())])

    parts = {
        "small nodes": repeat(b'["set"]', size),
        "nodes of many fields": repeat(b'["view",0,[]]', size),
        "objects": repeat(b'["object",[999]]', size),
        "functions": repeat(b'["function","","",0,[999]]', size),
        "classes": repeat(b'["class","","","",[0],[]]', size),
        "references": repeat(b'["list",[' + b"[999]," * 9 + b"[999]]]", size),
        "numbers": b'["list",[' + b",".join([b"1.5"] * (size // 4)) + b"]]",
        "lists": b'["withheld","shape","int8",[' + b"9999," * (size // 5) + b'1],[1],"cpu"]',
        "tables": b'["nnform",[0],[],[' + b'["",0],' * (size // 7) + b'["",0]]]',
        "forms": repeat(b'["nnform",[0]]', size),
        "modules": repeat(b'["nn",[0]]', size),
        "arrays": repeat(b'["array",0,"|u1",[256],false,false]', size),
        "large ints": b'["int","' + b"f" * size + b'"]',
        "large numbers": b'["list",[' + b"9" * size + b"]]",
        "parts": b'["list"]\n' + repeat(b' ["list",[[0],[0],[0],[0],[0],[0],[0],[0]]]', size),
        "parts of nothing": b'["list"]\n' + repeat(b' ["list"]', size),
        "empty lines": repeat(b" ", size),
        "long parts": repeat(b'["str","%s"]' % (b"a" * 60_000), size),
        "texts": repeat(b'["list",[' + b'"abc",' * 99 + b'"x"]]', size),
        "empty texts": repeat(b'["list",[' + b'"",' * 99 + b'""]]', size),
        "wide texts": repeat('["list",["€","😀","é"]]'.encode(), size),
        "brackets": b'["str","' + b"[,{" * (size // 3) + b'"]',
        "a text": b'["str","' + b"a" * size + b'"]',
        "a wide text": b'["str","' + b"a" * size + b'\xf0\x9f\x98\x80"]',
        "an escaped text": b'["str","' + b"a" * size + b'\\ud83d\\ude00"]',
        "a half wide text": b'["str","' + b"a" * size + b'\\u20ac"]',
        "quotes": b'["str","' + b'\\"' * (size // 2),
        "bytes": b'["bytes","' + b"YWFh" * (size // 4) + b'"]',
        "deep": b'["list",' + b"[" * (size // 2) + b"]" * (size // 2) + b"]",
        "names": b'["object",[0],[' + b'"a",' * (size // 4) + b'"b"]]',
    }
    codes = b'["","",0,null,[0,0]]'
    return {
        **{name: table(part, BAD) for name, part in parts.items()},
        **{f"{name}, decoded": table(part, LATE) for name, part in parts.items()},
        "tensors": table(LATE, repeat(b'["tensor",0]', size)),
        "blobs": table(BAD, packed=b'["U8",[0],2147483647]'),
        "many blobs": table(BAD, packed=repeat(b'["",[],1]', size)),
        "many empty blobs": table(BAD, packed=repeat(b'["U8",[0],1]', size)),
        "as many blobs as there may be": table(
            repeat(b'["tensor",0]', size), BAD, packed=repeat(b'["U8",[0],1]', min(size, 100_000))
        ),
        "codes": table(BAD, codes=repeat(codes, size)),
        "roots": table(BAD, roots=b"{" + b",".join(b'"%d":1' % i for i in range(size // 9)) + b"}"),
        "omissions": manifest(omissions=[*[["a", "b"]] * (size // 20), 5]),
        "members": manifest(members={f"src/{i}.py": [0, "0" * 64] for i in range(size // 100)}),
        "sources": seal(
            {
                **members,
                **{f"src/{i}.py": b"" for i in range(min(size // 200, 990))},
                "objects.json": lay_out(nodes=BAD),
            },
            level,
        ),
        "one source": seal(
            {**members, "src/0.py": b"x" * size + WIDE, "objects.json": lay_out(nodes=BAD)}, level
        ),
        "tensors of bytes": seal(
            {**members, "tensors.safetensors": b"\0" * size, "objects.json": lay_out(nodes=BAD)}
        ),
        "keys of the manifest": manifest(**{f"k{i}": i for i in range(size // 15)}, schema=5),
        "wide note": manifest(notes=["n" * size + WIDE.decode(), 5]),
        "notes": manifest(notes=[*["ab"] * (size // 8), 5]),
        "header": with_header(
            tmp_path,
            b'{"0":{"dtype":"U8","shape":[' + b"1," * 30_000 + b'1],"data_offsets":[0,1]}}',
        ),
    }


@pytest.mark.parametrize("level", [0, 9])
@pytest.mark.parametrize(
    "size",
    [
        2_000,
        50_000,
        300_000,
        pytest.param(3_000_000, marks=pytest.mark.slow),
        pytest.param(20_000_000, marks=pytest.mark.slow),
    ],
)
def test_a_record_of_any_content_costs_at_most_twice_its_size(tmp_path, size, level) -> None:
    for name, data in make_hoards(tmp_path, size, level).items():
        try:
            check_refused(data)
        except AssertionError as error:
            raise AssertionError(f"{name}: {len(data)} bytes") from error


MEASURE = """
import os, resource, sys
import tripwire
from tripwire.errors import BadRecord
from tripwire.recording.format.file import Record
def look(path):
    try:
        Record.open(path).close()
    except BadRecord:
        return
    raise AssertionError(path)
def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork():
        assert os.wait()[1] == 0
        continue
    look(name + ".small")  # what a file of this kind takes the first time, whatever its size
    before = peak()
    look(name + ".large")
    print(name, peak() - before, flush=True)
    os._exit(0)
"""


def test_the_process_takes_less_than_twice_the_file_too(tmp_path) -> None:
    """By what the system says of a process: after a small file of the kind, a large one."""
    names = []
    sizes = {}
    for size, ending in ((20_000, "small"), (4_000_000, "large")):
        for number, data in enumerate(make_hoards(tmp_path, size, 0).values()):
            path = tmp_path / f"{number}.{ending}"
            path.write_bytes(data)
            sizes[str(tmp_path / str(number))] = len(data)
            names.append(str(tmp_path / str(number)))
    names = sorted(set(names))
    out = run_python(f"import sys; sys.argv[1:] = {names!r}\n{MEASURE}")
    for line in out.splitlines():
        name, grown = line.rsplit(" ", 1)
        most = 2 * sizes[name] + CONSTANT
        assert int(grown) < most, (name, sizes[name], grown)


# --- nothing runs ---

WATCH = """
import sys, pathlib, torch, numpy, warnings
import tripwire
from tripwire.errors import BadRecord
from tripwire.recording.capture import encode, tensors
from tripwire.recording.format import decode
from tripwire.recording.format import file
files = [pathlib.Path(name) for name in sys.argv[1:]]
def look(path):
    try:
        with file.Record.open(path) as record:
            decode.view(record.table, record.blobs, record.read)
    except BadRecord:
        return "refused"
    return "opened"
look(files[0])  # what torch and Python do the first time isn't the file's doing
seen = []
ALLOWED = {"array.__new__", "ctypes.cdata", "ctypes.cdata/buffer"}
ALLOWED |= {"object.__getattr__", "sys._getframe"}
def hook(event, args):
    if event == "open" and args[1] in ("rb", "r", None) and not args[2] & 3:
        return
    if event not in ALLOWED:
        seen.append((event, str(args)[:80]))
sys.addaudithook(hook)
results = [look(path) for path in files]
count = len(seen)
print(results.count("opened"), results.count("refused"), seen[:5] if count else count)
"""


def test_an_audit_hook_sees_nothing_but_reading(tmp_path) -> None:
    """No exec, compile, import, marshal, socket, process or open file for writing."""
    import numpy as np

    good = {
        "all": data_of(tmp_path, [torch.ones(3), np.ones(3), torch.float32, {1: (2,)}]),
        "plain": valid(tmp_path),
    }
    members = members_of(good["plain"])
    nodes = [
        b'["function","f","f",0,[1]]', b'["namespace","os"]', b'["library","os","system"]',
        b'["opaque","a","b"]', b'["call",[2],["touch /tmp/evil"]]', b'["object",[2],["a"],[1]]',
    ]  # fmt: skip
    known = b'["f","f.py",1,"src/0.py",[1,0],"code/0"]'
    code = lay_out(b'{"x":[0],"y":[2],"z":[4],"w":[5]}', b",".join(nodes), known)
    bomb = b"\xe3" + b"\0" * 8 + b"\xff" * 100
    source = b"import os; os.system('x')"
    good["code"] = seal({**members, "objects.json": code, "src/0.py": source, "code/0": bomb})
    files = []
    for name, data in good.items():
        files.append(tmp_path / f"{name}.rec")
        files[-1].write_bytes(data)
    for seed in range(60):
        files.append(tmp_path / f"bad-{seed}.rec")
        files[-1].write_bytes(mutate(good["plain"], random.Random(seed)))
    names = ", ".join(repr(str(file)) for file in files)
    out = run_python(f"import sys; sys.argv = ['-', {names}]\n{WATCH}")
    opened, refused, rest = out.split(maxsplit=2)
    assert int(opened) >= 3 and int(refused) >= 50
    assert rest == "0"
