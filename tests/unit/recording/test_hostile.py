"""Files made to harm: a typed error, soon, in little memory, and nothing runs."""

from __future__ import annotations

import io
import json
import random
import re
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from roundtrip import data_of
from support import run_python

import tripwire
from tripwire.errors import BadRecord
from tripwire.recording.container import Content, write_members
from tripwire.recording.decode import view
from tripwire.recording.format import Record


def valid(tmp_path: Path, floats: int = 64) -> bytes:
    base = torch.arange(float(floats))
    shared = [1, "two", None, 2.5]
    value = {"t": base, "v": base[3:9].requires_grad_(), "l": [shared, shared, (1, 2)], "b": b"xy"}
    value["self"] = [value]
    return data_of(tmp_path, value)


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def seal(members: dict[str, bytes]) -> bytes:
    """A file whose every hash is right, as an attacker would make it."""
    import hashlib

    manifest = json.loads(members["manifest.json"])
    manifest["members"] = {
        name: [len(data), hashlib.sha256(data).hexdigest()]
        for name, data in members.items()
        if name != "manifest.json"
    }
    members = {**members, "manifest.json": json.dumps(manifest).encode()}
    contents = {name: Content.of(data) for name, data in members.items()}
    out = io.BytesIO()
    write_members(out, {name: (c, c.digest()[1]) for name, c in contents.items()})
    return out.getvalue()


def lay_out(
    roots: bytes = b"{}", nodes: bytes = b"", codes: bytes = b"", count: int = -1, more: bytes = b""
) -> bytes:
    """The text of objects.json, of parts that may be anything; nodes are a line each."""
    many = count if count >= 0 else nodes.count(b"\n") + 1 if nodes else 0
    first = b'{"roots":' + roots + b',"count":%d' % many + more + b',"codes":['
    return b"\n".join(part for part in (first, codes, b'],"nodes":[', nodes, b"]}") if part)


def lay_out_tree(tree: dict) -> bytes:
    """The same for JSON that was taken apart."""
    nodes, codes = (
        b",\n".join(json.dumps(line).encode() for line in tree[name])
        if isinstance(tree.get(name), list)
        else json.dumps(tree.get(name)).encode()
        for name in ("nodes", "codes")
    )
    first = {name: value for name, value in tree.items() if name not in ("nodes", "codes")}
    start = json.dumps(first).encode().removesuffix(b"}") + b',"codes":['
    return b"\n".join(part for part in (start, codes, b'],"nodes":[', nodes, b"]}") if part)


def look(data: bytes) -> object:
    """All that opening and looking does."""
    with Record.of(data) as record:
        view(record.table, record.blobs)
        blobs = [record.blobs.read(i) for i in range(len(record.blobs))]
        return record.manifest, record.table, blobs


CONSTANT = 3 << 19  # one line of a table, which may take 1 MiB, and a buffer to read with


def check_refused(data: bytes) -> BadRecord:
    """A typed error, in under a second, in under twice the file's memory (and a constant).

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


ODD = [
    0, -1, 1, 2, 2**31, 2**62, 2**63, 10**30, 1.5, 1e308, True, None, "", "0", "dict", "list",
    "cpu", "view", [], [0], [1], [3], [99], [[]], {}, {"a": 1}, "meta", "cuda:0", "param", "graph",
    "default", "inference", [0, 0], [2, 3], "float64", "complex64", "nn", "torch", "object",
    "extras", "again", "more", "library", [0, 5], [3, 1], "0", "0:3", "a.0", "a b", "- a", 10**6,
]  # fmt: skip


def find_places(value: object) -> list[tuple[list | dict, int | str]]:
    places = []
    queue = [value]
    while queue:
        at = queue.pop()
        if isinstance(at, dict):
            places += [(at, key) for key in at]
            queue += at.values()
        elif isinstance(at, list):
            places += [(at, i) for i in range(len(at))]
            queue += at
    return places


def check_odd_values(data: bytes, seeds: range) -> None:
    """JSON that is JSON still, with odd values in odd places, and hashes that fit."""
    members = members_of(data)
    opened = 0
    for seed in seeds:
        random_ = random.Random(seed)
        name = random_.choice(["objects.json"] * 4 + ["manifest.json"])
        tree = json.loads(members[name])
        places = find_places(tree)
        for _ in range(random_.choice([1, 1, 2, 4])):
            holder, key = random_.choice(places)
            if random_.random() < 0.3:
                other, other_key = random_.choice(places)
                holder[key] = json.loads(json.dumps(other[other_key]))
            else:
                holder[key] = random_.choice(ODD)
        text = lay_out_tree(tree) if name == "objects.json" else json.dumps(tree).encode()
        changed = {**members, name: text}
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


def test_500_mutations(tmp_path) -> None:
    data = valid(tmp_path)
    check_mutations(data, range(200))
    check_sealed_mutations(data, range(200, 350))
    check_odd_values(rich(tmp_path), range(350, 550))


@pytest.mark.slow
def test_10_000_mutations(tmp_path) -> None:
    data = valid(tmp_path)
    check_mutations(data, range(1000, 5000))
    check_sealed_mutations(data, range(5000, 7000))
    check_odd_values(rich(tmp_path), range(7000, 11000))


def test_every_truncation(tmp_path) -> None:
    data = valid(tmp_path)
    for size in range(0, len(data), 7):
        with pytest.raises(BadRecord):
            look(data[:size])


# --- containers ---


def zipped(entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for name, data in entries:
            file.writestr(name, data)
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


def test_a_zip_bomb_is_never_unpacked(tmp_path) -> None:
    members = members_of(valid(tmp_path))
    members["objects.json"] = b" " * 100_000_000
    bomb = zipped(list(members.items()), zipfile.ZIP_DEFLATED)
    assert len(bomb) < 200_000
    check_refused(bomb)


def test_sizes_that_are_said_but_not_there(tmp_path) -> None:
    data = bytearray(valid(tmp_path))
    for place in (18, 22):  # the manifest's sizes
        for size in (0xFFFFFFFF, 0xFFFFFFFE, len(data), 0):
            changed = bytearray(data)
            changed[place : place + 4] = struct.pack("<I", size)
            check_refused(bytes(changed))


def test_members_that_overlap(tmp_path) -> None:
    """The directory points two names at one member's bytes."""
    data = bytearray(valid(tmp_path))
    first = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", first + 4)
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    check_refused(bytes(data))


def test_a_great_many_members() -> None:
    data = zipped([(f"src/{i}.py", b"") for i in range(20_000)])
    check_refused(data)


def test_wrong_hashes_and_sizes_in_the_manifest(tmp_path) -> None:
    members = members_of(valid(tmp_path))
    for change in ({"objects.json": [1, "0" * 64]}, {}, {"objects.json": [5, "zz"]}, [], None):
        manifest = json.loads(members["manifest.json"])
        manifest["members"] = change
        contents = {**members, "manifest.json": json.dumps(manifest).encode()}
        check_refused(zipped(list(contents.items())))


# --- tables ---


def with_objects(tmp_path: Path, objects: bytes) -> bytes:
    return seal({**members_of(valid(tmp_path)), "objects.json": objects})


def words(text: bytes = b"a") -> bytes:
    return b',"words":"' + text + b'"'


FILES = b',"files":[["f.py",null,null,0]]'
CODES = b'[0,"f g",[1,0,0,1,0,2,0,0,1,1],"a"]'
# By what the error says.
TABLES: dict[str, list[bytes]] = {
    "isn't laid out in lines": [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"roots":{},"count":0,"codes":[],"nodes":[]}',
        lay_out() + b"\n",
        b"\xff\xfe",
        b"",
        b"null",
    ],
    "a line of objects.json ends as it can't": [
        lay_out(nodes=b'["list"],'),
        lay_out(nodes=b'["list"]\n["list"]'),
    ],
    "has another number of nodes than it says": [
        lay_out(nodes=b'["list"]', count=2),
        lay_out(nodes=b'["list"],\n["list"]', count=1),
        lay_out(nodes=b'["list"],\n["again",1]', count=1),
        lay_out(nodes=b'["list"],\n["again",1]', count=3),
        lay_out(nodes=b'["nn",[0]]', count=2),
        lay_out(nodes=b'["library","a","a b"]', count=1),
    ],
    "refers to a node that it doesn't have": [
        lay_out(b'{"x":[0]}'),
        lay_out(b'{"x":[99999999999999999999]}'),
        lay_out(nodes=b'["list",[[7]]]'),
        lay_out(nodes=b'["list",[[0,1]]]'),
        lay_out(nodes=b'["list",[[1,0]]],\n["list"]'),
        lay_out(nodes=b'["list"],\n["more",[[9]]]', count=1),
        lay_out(nodes=b'["extras",[[7]]]'),
        lay_out(nodes=b'["nn",[1]]'),  # forms have no numbers
    ],
    "Expected": [  # msgspec: it isn't what the line is made of
        lay_out(b'{"x":' + b"[" * 100 + b"]" * 100 + b"}"),
        lay_out(more=b',"packed":[["F32",[4],0]]'),
        lay_out(more=b',"packed":[["F32",[0],9999999999]]'),
        lay_out(b'{"x":[-1]}'),
        lay_out(b'{"x":[0,0]}', b'["list"]'),
        lay_out(nodes=b'["list",[[]]]'),
        lay_out(nodes=b'["list",[[0,0,0]]]'),
        lay_out(nodes=b'["extras",[1]]'),
        lay_out(nodes=b'["nn",[0],"","",[],[],0]'),
        lay_out(nodes=b'["nn",[0,0]]'),
        lay_out(nodes=b'["list"],\n["again",0]'),
        lay_out(nodes=b'["library",0]', more=words()),
        lay_out(nodes=b'["object",[0],"a","b"]'),
        lay_out(codes=b'[-1,"f",[1,0,0,1,0]]', more=FILES),
        lay_out(codes=b'[0,"f",[1,0,0,-1,0]]', more=FILES),
        lay_out(nodes=b'["function",[0],[0]]', codes=CODES, more=FILES),
        lay_out(nodes=b'["cell",[],-1]'),
    ],
    "Invalid value": [lay_out(nodes=b'["nosuch",1]'), lay_out(nodes=b'["tensor",0]')],
    "unknown field": [lay_out(more=b',"more":1')],
    "Invalid base64": [lay_out(nodes=b'["text","!"]')],
    "refers to a blob that isn't there": [
        lay_out(more=b',"tensors":[[1,7,"","cpu"]]'),
        lay_out(more=b',"tensors":[[100000,0,"","cpu"]]'),
    ],
    "would take more memory": [
        lay_out(b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
        lay_out(more=b',"tensors":[[9223372036854775807,0,"","cpu"]]'),
        lay_out(nodes=b'["nn",[0],"","",[],[],999999999999]', count=10**12),
        lay_out(nodes=b'["nn",[0],"a","",[],[],999999999,[0],[1]]', count=10**9),
        lay_out(nodes=b'["list"],\n["again",999999999999]', count=10**12 + 1),
        lay_out(nodes=b'["list",[[0,%d]]],\n["again",%d]' % (10**5, 10**5), count=10**5 + 1),
        lay_out(nodes=b'["list","%s"],\n["again",%d]' % (b"a " * 99 + b"a", 10**5), count=10**5),
        lay_out(nodes=b'["list","%s"]' % (b"0.0 " * 9999 + b"0"), more=words(b"a" * 9999)),
        lay_out(
            nodes=b'["list","%s"]' % (b"0.0 " * 99 + b"0"),
            more=b',"pieces":"%s","words":"%s"' % (b"a" * 999, b"_".join([b"0"] * 999)),
        ),
        lay_out(more=b',"pieces":"%s","words":"%s"' % (b"a" * 9999, b"_".join([b"0"] * 9999))),
        lay_out(nodes=b'["list","%s"]' % (b"0:999 " * 999 + b"0"), more=words(b"a " * 999 + b"a")),
        lay_out(nodes=b'["extras",[[0,%d]],[],null,"- a a a a a a"]' % 10**6, count=10**6 + 1),
        lay_out(nodes=b'["cell",[],999999999]', count=10**9),
        lay_out(
            nodes=b'["nn",[0],"","%s",[%s],[],9999]' % (b"a " * 99 + b"a", b"0," * 99 + b"0"),
            count=9999,
        ),
        lay_out(nodes=b'["list","%s"]' % (b"." * 1_500_000)),
        lay_out(nodes=b'["object",[0],"%s"]' % (b"- " * 1_500_000 + b"-")),
        lay_out(
            nodes=b'["function",[%s],[0]]' % b",".join([b"[0,3999]"] * 100),
            codes=b",\n".join([CODES] * 2000),
            more=FILES,
            count=400_000,
        ),
    ],
    "a tensor has a kind": [lay_out(more=b',"tensors":[[1,0,"sparse","cpu"]]')],
    "an array isn't as large": [lay_out(nodes=b'["array",0,"|O8",[1],false,false]')],
    "an array has a shape": [lay_out(nodes=b'["array",0,"<f8",[9223372036854775807],false,false]')],
    "more names or keys than values, or less": [
        lay_out(nodes=b'["dict",[1],[]]'),
        lay_out(nodes=b'["dict","a b",[1]]'),
        lay_out(nodes=b'["dict","a",[[0,1]]],\n["list"]'),
        lay_out(nodes=b'["dict",[1],"a b"]'),
        lay_out(nodes=b'["dict",[1],[1]],\n["more",[2],[]]', count=1),
    ],
    "there is more of something that has no items": [
        lay_out(nodes=b'["more",[2]]', count=0),
        lay_out(nodes=b'["int","1"],\n["more",[2]]', count=1),
        lay_out(nodes=b'["library","a"],\n["more","b"]', count=1),
        lay_out(nodes=b'["list"],\n["again",1],\n["more",[2]]', count=2),
    ],
    "there is nothing that could be there again": [
        lay_out(nodes=b'["again",1]', count=1),
        lay_out(nodes=b'["list"],\n["again",1],\n["again",1]', count=3),
        lay_out(nodes=b'["nn",[0]],\n["again",1]', count=2),
        lay_out(nodes=b'["library","a","a b"],\n["again",1]', count=3),
        lay_out(nodes=b'["extras",[[0],[0]]],\n["again",1]', count=3),
        lay_out(nodes=b'["cell",[1,2]],\n["again",1]', count=3),
    ],
    "a line of objects.json stands for nothing": [
        lay_out(nodes=b'["extras",[]]', count=0),
        lay_out(nodes=b'["library","a",""]', count=0),
        lay_out(nodes=b'["cell"]', count=0),
    ],
    "another number of names than of values": [
        lay_out(nodes=b'["object",[0]],\n["more","a",[]]', count=1),
        lay_out(nodes=b'["namespace","m","a"]'),
        lay_out(nodes=b'["namespace","m"],\n["more","a",[]]', count=1),
        lay_out(nodes=b'["module","m","a",[1,2]]'),
        lay_out(nodes=b'["class","m","A",[0],[],"- a",[1]]'),
        lay_out(nodes=b'["object",[0]],\n["more","- a",[5]]', count=1),
        lay_out(nodes=b'["object",[0]],\n["more","a","b"]', count=1),
        lay_out(nodes=b'["object",[0],"- a"],\n["more","b"]', count=1),
        lay_out(nodes=b'["object",[0],"a",[]]'),
        lay_out(nodes=b'["object",[0],"a",[[0,1]]],\n["list"]'),
        lay_out(nodes=b'["object",[0],"- a",[1]]'),
        lay_out(nodes=b'["object",[0],"a - b - c",[1]]'),
        lay_out(nodes=b'["object",[0],"0:1",[1]]', more=words(b"a b")),
        lay_out(nodes=b'["extras",[[0]],[],null,"a"]'),
    ],
    "an object has more slots than names": [
        lay_out(nodes=b'["object",[0],"",[],null,1]'),
        lay_out(nodes=b'["object",[0],"",[],null,1],\n["again",1]', count=2),
        lay_out(nodes=b'["object",[0],"a",[1],null,4],\n["more","b c",[1,2]]', count=1),
    ],
    "but not the text that it needs": [
        lay_out(nodes=b'["object",[0]],\n["more",["a"],[5]]', count=1),
        lay_out(nodes=b'["object",[0]],\n["more"]', count=1),
        lay_out(nodes=b'["namespace","m"],\n["more",["a"],[1]]', count=1),
        lay_out(nodes=b'["str","a"],\n["more",["b"]]', count=1),
        lay_out(nodes=b'["bytes","YQ=="],\n["more",["YQ=="]]', count=1),
    ],
    "there are values for something that has none": [
        lay_out(nodes=b'["str","a"],\n["more","b",[1]]', count=1),
        lay_out(nodes=b'["list"],\n["more",[1],[1]]', count=1),
        lay_out(nodes=b'["nn",[0],"a","t",[1],[1]],\n["more","b",[1]]', count=1),
    ],
    "modules have other values than names": [
        lay_out(nodes=b'["nn",[0],"","",[],[1]]'),
        lay_out(nodes=b'["nn",[0],"a"]'),
        lay_out(nodes=b'["nn",[0]],\n["more",[1]]', count=1),
        lay_out(nodes=b'["nn",[0]],\n["more","a"]', count=1),
        lay_out(nodes=b'["nn",[0],"a","",[],[1],2]', count=2),
        lay_out(nodes=b'["nn",[0],"a","",[],[[0,1]]],\n["list"]'),
        lay_out(nodes=b'["nn",[0],"a b","t",[1],[1,2]],\n["more","c d"]', count=1),
        lay_out(nodes=b'["nn",[0],"a"],\n["list"]'),
    ],
    "modules have a value or a key where there is no name": [
        lay_out(nodes=b'["nn",[0],"a","",[],[],1,[1],[5]]'),
        lay_out(nodes=b'["nn",[0],"a","t",[2],[1]]'),
        lay_out(nodes=b'["nn",[0],"a b","s t",[1,2],[1,2]]'),
    ],
    "modules have other names than values": [
        lay_out(nodes=b'["nn",[0],"a","",[],[],1,[0],[]]'),
        lay_out(nodes=b'["nn",[0],"","t",[]]'),
    ],
    "modules have a value where there is no place": [
        lay_out(nodes=b'["nn",[0],"a b","",[],[],1,[0,0],[5,5]]'),
        lay_out(nodes=b'["nn",[0],"a b","",[],[],1,[1,0],[5,5]]'),
    ],
    "a name in objects.json has no value": [
        lay_out(nodes=b'["nn",[0],"- a"]'),
        lay_out(nodes=b'["nn",[0],"a","t",[1],[1]],\n["more","- b"]', count=1),
        lay_out(nodes=b'["list","a - b"]'),
        lay_out(nodes=b'["dict","- a",[]]'),
        lay_out(nodes=b'["library","- a"]'),
        lay_out(nodes=b'["list"]', more=words(b"- a")),
        lay_out(nodes=b'["list"]', more=b',"pieces":"- a"'),
    ],
    "another number of gradients": [
        lay_out(nodes=b'["extras",[[0]],[null,null]]'),
        lay_out(nodes=b'["extras",[[0],[0]],[null]]', count=2),
    ],
    "the name of a module isn't one name": [
        lay_out(nodes=b'["library",""]'),
        lay_out(nodes=b'["library","a b"]'),
        lay_out(nodes=b'["namespace","a b"]'),
        lay_out(nodes=b'["module",""]'),
        lay_out(nodes=b'["class","a b","A",[0],[]]'),
    ],
    "a name in objects.json isn't one": [
        lay_out(nodes=b'["list"]', more=words(b"a  b")),
        lay_out(nodes=b'["list"]', more=b',"pieces":"a  b"'),
        lay_out(nodes=b'["list","a_-b"]'),
        lay_out(nodes=b'["list","a_0x"]', more=b',"pieces":"a"'),
        lay_out(nodes=b'["list","a_0:1"]', more=b',"pieces":"a b"'),
        lay_out(nodes=b'["object",[0],"-a",[1]]'),
        lay_out(nodes=b'["object",[0],"a.-b",[1]]'),
        lay_out(nodes=b'["object",[0],"a  b",[1,2,3]]'),
        lay_out(nodes=b'["object",[0]," a",[1,2]]'),
        lay_out(nodes=b'["object",[0],"a ",[1,2]]'),
        lay_out(nodes=b'["object",[0],"0x",[1]]', more=words()),
        lay_out(nodes=b'["object",[0],"a.0x",[1]]', more=words()),
        lay_out(nodes=b'["object",[0],"0:0.0",[1]]', more=words()),
        lay_out(nodes=b'["object",[0],"a%zz",[1]]'),
        lay_out(nodes=b'["object",[0],"a%2",[1]]'),
        lay_out(nodes=b'["object",[0],"a.%",[1]]'),
        lay_out(nodes=b'["object",[0],"0:",[1]]', more=words()),
        lay_out(nodes=b'["object",[0],"99999999999999999999",[1]]', more=words()),
    ],
    "refers to a word that it doesn't have": [
        lay_out(nodes=b'["list"]', more=words(b"0")),
        lay_out(nodes=b'["object",[0],"0",[1]]'),
        lay_out(nodes=b'["object",[0],"1",[1]]', more=words()),
        lay_out(nodes=b'["object",[0],"a.1",[1]]', more=words()),
        lay_out(nodes=b'["object",[0],"0:1",[1,2]]', more=words()),
        lay_out(nodes=b'["object",[0],"1:0",[]]', more=words(b"a b")),
        lay_out(nodes=b'["library","1"]', more=words()),
        lay_out(nodes=b'["object",[0],"a_0",[1]]', more=words()),
        lay_out(nodes=b'["object",[0],"a_1",[1]]', more=b',"pieces":"a"'),
        lay_out(nodes=b'["object",[0],"0",[1]]', more=b',"pieces":"a"'),
        lay_out(nodes=b'["list"]', more=b',"pieces":"a","words":"0"'),
        lay_out(nodes=b'["list"]', more=b',"pieces":"a","words":"a_1"'),
        lay_out(nodes=b'["list"]', more=b',"pieces":"a a_0"'),
    ],
    "Only base64 data is allowed": [
        lay_out(nodes=b'["bytes","YQ=="],\n["more","!!!!"]', count=1),
    ],
    "Incorrect padding": [lay_out(nodes=b'["bytes","YQ=="],\n["more","YQ"]', count=1)],
    "has more than 64 bits": [
        lay_out(nodes=b'["list",[9223372036854775808]]'),
        lay_out(nodes=b'["list",[-9223372036854775809]]'),
    ],
    "something contains itself that can't": [lay_out(b'{"x":[0]}', b'["tuple",[[0]]]')],
    "a Range node makes no sense": [lay_out(b'{"x":[0]}', b'["range",0,[1],1],\n["list"]')],
    "a number isn't hexadecimal": [lay_out(nodes=b'["int","xyz"]')],
    "a source or code that objects.json names isn't there": [
        lay_out(more=b',"files":[["f","src/9.py",null,0]]'),
        lay_out(more=b',"files":[["f","objects.json",null,0]]'),
        lay_out(more=b',"files":[["f",null,"src/0.py",0]]'),
        lay_out(more=b',"files":[["f",null,"code/0",0]]'),
    ],
    "refers to a file that it doesn't have": [lay_out(codes=b'[1,"f",[1,0,0,1,0]]', more=FILES)],
    "codes have other numbers than names": [
        lay_out(codes=b'[0,"f",[1,0,0,1]]', more=FILES),
        lay_out(codes=b'[0,"f",[1,0,0,1,0,1,0,0,1,0]]', more=FILES),
        lay_out(codes=b'[0,"f",[1,0,0,1,1]]', more=FILES),
        lay_out(codes=b'[0,"f",[1,0,0,1,0],"a"]', more=FILES),
    ],
    "refers to a code that it doesn't have": [
        lay_out(nodes=b'["function",[[0]],[0]]'),
        lay_out(nodes=b'["function",[[2]],[0]]', codes=CODES, more=FILES),
        lay_out(nodes=b'["function",[[1,2]],[0]]', codes=CODES, more=FILES, count=2),
        lay_out(nodes=b'["function",[[1,0]],[0]]', codes=CODES, more=FILES),
    ],
    "functions have another number of cells each": [
        lay_out(nodes=b'["function",[],[0]]', codes=CODES, more=FILES),
        lay_out(nodes=b'["function",[[0,1]],[0],[[0]]]', codes=CODES, more=FILES, count=2),
        lay_out(
            nodes=b'["function",[[0],[1]],[0],[[0],[0],[0]]]', codes=CODES, more=FILES, count=2
        ),
    ],
    "tensors.safetensors": [lay_out(more=b',"packed":[["F32",[4],1]]')],
}


@pytest.mark.parametrize(
    ("reason", "objects"), [(reason, one) for reason, many in TABLES.items() for one in many]
)
def test_tables_that_cannot_be(tmp_path, reason, objects) -> None:
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
def test_views_beyond_their_blob(tmp_path, view_) -> None:
    node = f'["view",{view_}]'.encode()
    check_refused(with_objects(tmp_path, lay_out(b'{"x":[0]}', node)))


def test_many_functions_of_one_code_share_its_name(tmp_path) -> None:
    names = b'[0,"%s",[1,0,0,0,0]]' % (b"a." + b"b" * 300_000)
    many = b'["function",[%s],[0]]' % b",".join([b"[0]"] * 2000)
    data = with_objects(tmp_path, lay_out(nodes=many, codes=names, more=FILES, count=2000))
    tracemalloc.start()
    try:
        with Record.of(data) as record:
            assert len(record.table.nodes) == 2000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(data)


def test_an_array_again_and_again_takes_its_bytes_each_time(tmp_path) -> None:
    data = data_of(tmp_path, np.ones(200_000))
    objects = members_of(data)["objects.json"]
    line = next(line for line in objects.split(b"\n") if line.startswith(b'["array"'))
    more = line.rstrip(b",") + b',\n["again",999]' + line[len(line.rstrip(b",")) :]
    changed = objects.replace(line, more)
    tree = re.sub(rb'"count":(\d+)', lambda m: b'"count":%d' % (int(m[1]) + 999), changed)
    refused = seal({**members_of(data), "objects.json": tree})
    assert check_refused(refused).slug == "record-too-large"
    bare = line.rstrip(b",")
    listed = objects.replace(line, b",\n".join([bare] * 1000) + line[len(bare) :])
    tree = re.sub(rb'"count":(\d+)', lambda m: b'"count":%d' % (int(m[1]) + 999), listed)
    refused = seal({**members_of(data), "objects.json": tree})
    assert check_refused(refused).slug == "record-too-large"


def test_a_large_array_can_be_opened(tmp_path) -> None:
    look(data_of(tmp_path, np.zeros(5_000_000)))


def make_tuples(count: int, items: bytes) -> bytes:
    """A set of a tuple of the next one, and so on; `%d` is the next one's number."""
    chain = (b'["tuple",[%s]]' % items.replace(b"%d", b"%d" % (i + 2)) for i in range(count))
    return b",\n".join((b'["set",[[1]]]', *chain, b'["tuple"]'))


LARGE = b'["set",[[1]]],\n["tuple",[%s[2]]],\n["int","%s"]' % (b"[2]," * 999, b"f" * 300_000)
SIGNS = [b",".join(b"-%d" % (1 + (i >> k) % 2) for k in range(12)) for i in range(4096)]
SAME = b",\n".join((b'["set",[[1,4096]]]', *(b'["tuple",[%s]]' % one for one in SIGNS)))
KEYS = {
    "deep": (make_tuples(5000, b"[%d]"), "take too long to hash"),
    "wide": (make_tuples(24, b"[%d],[%d]"), "take too long to hash"),
    "large": (LARGE, "take too long to hash"),
    "equal hashes": (SAME, "collide"),
}


@pytest.mark.parametrize(("nodes", "reason"), KEYS.values(), ids=KEYS)
def test_keys_that_take_long(tmp_path, nodes, reason) -> None:
    with pytest.raises(BadRecord, match=reason):
        look(with_objects(tmp_path, lay_out(b'{"x":[0]}', nodes)))


def test_ranges_that_take_long(tmp_path) -> None:
    nodes = b'["range",0,[1],1],\n["int","%s"]' % (b"f" * 9000)
    check_refused(with_objects(tmp_path, lay_out(b'{"x":[0]}', nodes)))


def test_sources_are_read_once(tmp_path) -> None:
    """However many functions, codes and files name them."""
    files = ",".join(f'["f{i}.py","src/0.py",null,0]' for i in range(200))
    codes = b",\n".join(b'[%d,"f",[1,0,0,%d,0]]' % (i, 9000 * (i % 2)) for i in range(200))
    many = b'["function",[%s],[0]]' % b",".join([b"[0,199]"] * 5)
    text = lay_out(b'{"x":[0]}', many, codes, 1000, b',"files":[%s]' % files.encode())
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
    nodes = b",\n".join([part] * (12_000_000 // len(part)))
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

BAD = b'["int","xyz"]'  # the last line: all before it has been looked at when it is found


def repeat(line: bytes, size: int) -> bytes:
    return b",\n".join([line] * (size // len(line)))


def make_hoards(tmp_path: Path, size: int) -> dict[str, bytes]:
    """Files of about that size that would take many times as much if they were kept."""
    members = members_of(valid(tmp_path))
    listed = b"[" + b",".join([b"1.5"] * 1000) + b"]"

    def table(*parts: bytes, count: int | None = None, **more: bytes) -> bytes:
        nodes = b",\n".join(parts)
        many = nodes.count(b"\n") + 1 - nodes.count(b'["more"')
        text = lay_out(nodes=nodes, count=many if count is None else count, **more)
        return seal({**members, "objects.json": text})

    def manifest(**changes: object) -> bytes:
        changed = {**json.loads(members["manifest.json"]), **changes}
        return zipped([*members.items(), ("manifest.json", json.dumps(changed).encode())][1:])

    few = size // 3  # so large that the whole would be too much, but not each line
    forms = b'["nn",[0],"a","",[],[],1,[0],[1]]'
    return {
        "small nodes": table(repeat(b'["set"]', few), BAD),
        "references": table(repeat(b'["list",[' + b"[0]," * 9 + b"[0]]]", few), BAD),
        "one long list": table(b'["list"]', repeat(b'["more",' + listed + b"]", few), BAD),
        "one long line": table(b'["list",[' + b",".join([b"1.5"] * 25_000) + b"]]", BAD),
        "texts": table(repeat(b'["list",[' + b'"abc",' * 99 + b'"x"]]', few), BAD),
        "one long text": table(b'["str","' + b"[,{" * (size // 3) + b'"]', BAD),
        "forms": table(repeat(forms, few), BAD),
        "too long a line": table(b'["list",[' + b",".join([b"1.5"] * size) + b"]]", BAD),
        "deep": table(b'["list",' + b"[" * few + b"]" * few + b"]"),
        "modules": table(b'["nn",[0],"","",[],[],9999999]', b'["set"]', count=10000000),
        "tensors": table(BAD, more=b',"tensors":[[99999999,0,"","cpu"]]'),
        "blobs": table(BAD, more=b',"packed":[["U8",[0],2147483647]]'),
        "words": table(BAD, more=b',"words":"' + b"a " * 5000 + b'b"'),
        "names": table(repeat(b'["object",[0],"- ' + b"a " * 999 + b'b"]', few), BAD),
        "one long text of names": table(b'["object",[0],"- ' + b"a " * size + b'b"]', BAD),
        "names of modules": table(b'["nn",[0],"' + b"a " * size + b'b"]', BAD),
        "escaped tag": table(b'["\\u006fbject",[0],"- ' + b"a " * (size // 2) + b'b"]', BAD),
        "escaped spaces": table(b'["object",[0],"-' + b"\\u0020a" * (size // 7) + b'"]', BAD),
        "a wide name": table(b'["object",[0],"- ' + b"a" * size + b'\xf0\x9f\x98\x80"]', BAD),
        "a wide text": table(b'["str","' + b"a" * size + b'\xf0\x9f\x98\x80"]', BAD),
        "a text": table(b'["str","' + b"a" * size + b'"]', BAD),
        "pieces": table(b'["str",""]', repeat(b'["more","a"]', few), BAD),
        "parts of a name": table(b'["object",[0],"- ' + b"a." * (size // 2) + b'b"]', BAD),
        "long names": table(
            b'["object",[0],"- ' + b"0.0 " * (size // 8) + b'b"]',
            BAD,
            more=b',"words":"' + b"a" * (size // 2) + b'"',
        ),
        "long words": table(
            b'["object",[0],"- ' + b"0.0 " * (size // 16) + b'b"]',
            BAD,
            more=b',"pieces":"%s","words":"0%s"' % (b"a" * (size // 4), b"_0" * 50),
        ),
        "many pieces": table(BAD, more=b',"pieces":"' + b"ab " * 20_000 + b'b"'),
        "strings": table(repeat(b'["list","' + b"a " * 999 + b'b"]', few), BAD),
        "rows of words": table(
            repeat(b'["list","' + b"0:99 " * 99 + b'0"]', few),
            BAD,
            more=b',"words":"' + b"a " * 99 + b'b"',
        ),
        "rows": table(repeat(b'["list",[[0,99]]]', few), BAD),
        "the same again": table(b'["list",[1,2]]', b'["again",9999999]', BAD, count=10000001),
        "codes": table(
            BAD,
            codes=repeat(b'[0,"' + b"f " * 99 + b'f",[' + b"1,0,0,1,0," * 99 + b"1,0,0,1,0]]", few),
            more=FILES,
        ),
        "functions": table(
            repeat(b'["function",[' + b"[0,1]," * 99 + b"[0]],[0]]", few),
            BAD,
            codes=CODES,
            more=FILES,
        ),
        "cells": table(repeat(b'["cell",[[0,99]],99]', few), BAD),
        "classes": table(repeat(b'["class","m","A",[0],[],"- ' + b"a " * 99 + b'b"]', few), BAD),
        "libraries": table(repeat(b'["library","a","' + b"a " * 99 + b'b"]', few), BAD),
        "extras": table(b'["extras",[' + b"[0]," * 1000 + b"[0]]]", BAD, count=1002),
        "attributes of extras": table(
            b'["extras",[' + b"[0]," * 1000 + b'[0]],[],null,"- ' + b"a " * 8000 + b'b"]',
            b'["set",[[0]]]',
            count=1002,
        ),
        "roots": table(BAD, roots=b"{" + b",".join(b'"%d":1' % i for i in range(9000)) + b"}"),
        "omissions": manifest(omissions=[*[["a", "b"]] * (size // 20), 5]),
        "members": manifest(members={f"src/{i}.py": [0, "0" * 64] for i in range(size // 100)}),
        "notes": manifest(notes=[*["ab"] * (size // 8), 5]),
        "header": with_header(
            tmp_path,
            b'{"0":{"dtype":"U8","shape":[' + b"1," * 30_000 + b'1],"data_offsets":[0,1]}}',
        ),
    }


@pytest.mark.parametrize("size", [50_000, 2_000_000])
def test_a_file_that_is_refused_takes_less_than_twice_its_size(tmp_path, size) -> None:
    for name, data in make_hoards(tmp_path, size).items():
        try:
            check_refused(data)
        except AssertionError as error:
            raise AssertionError(f"{name}: {len(data)} bytes") from error


MEASURE = """
import os, resource, sys
import tripwire
from tripwire.errors import BadRecord
from tripwire.recording.format import Record
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
    for size, ending in ((20_000, "small"), (6_000_000, "large")):
        for number, data in enumerate(make_hoards(tmp_path, size).values()):
            path = tmp_path / f"{number}.{ending}"
            path.write_bytes(data)
            sizes[str(tmp_path / str(number))] = len(data)
            names.append(str(tmp_path / str(number)))
    names = sorted(set(names))
    out = run_python(f"import sys; sys.argv[1:] = {names!r}\n{MEASURE}")
    for line in out.splitlines():
        name, grown = line.rsplit(" ", 1)
        assert int(grown) < 2 * sizes[name] + 2 * CONSTANT, (name, sizes[name], grown)


# --- nothing runs ---

WATCH = """
import sys, pathlib, torch, numpy, warnings
import tripwire
from tripwire.errors import BadRecord
from tripwire.recording import arrays, decode, encode, format, tensors, torchvalues
files = [pathlib.Path(name) for name in sys.argv[1:]]
def look(path):
    try:
        with format.Record.open(path) as record:
            decode.view(record.table, record.blobs, record.read)
    except BadRecord:
        return "refused"
    return "opened"
look(files[0])  # what torch and Python do the first time isn't the file's doing
seen = []
ALLOWED = {"ctypes.cdata", "ctypes.cdata/buffer", "object.__getattr__", "sys._getframe"}
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
        b'["function",[[0]],[1]]', b'["namespace","os"]', b'["library","os","system"]',
        b'["opaque","a","b"]', b'["call",[2],["touch /tmp/evil"]]', b'["object",[2],"a",[1]]',
    ]  # fmt: skip
    known, at = b'[0,"f",[1,0,0,1,0]]', b',"files":[["f.py","src/0.py","code/0",0]]'
    code = lay_out(b'{"x":[0],"y":[2]}', b",\n".join(nodes), known, more=at)
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
