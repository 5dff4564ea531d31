"""Records that nobody wrote: files with members of any content, whose hashes are right."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from typing import Any

from tripwire.recording.format.container import Content, write_members


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def seal(members: dict[str, bytes], level: int = 0) -> bytes:
    """A file whose every hash is right, as an attacker would make it.

    A table that deflates well is refused for that, so it isn't deflated unless a test asks for it.
    """
    manifest = json.loads(members["manifest.json"])
    objects = Content.deflate(members["objects.json"], level)
    manifest["members"] = {
        name: [len(data), hashlib.sha256(data).hexdigest()]
        for name, data in {**members, "objects.json": b"".join(objects.chunks)}.items()
        if name != "manifest.json"
    }
    contents = {name: Content.of(data) for name, data in members.items()}
    contents["objects.json"] = objects
    contents["manifest.json"] = Content.of(json.dumps(manifest).encode())
    out = io.BytesIO()
    write_members(out, {name: (c, c.digest()[1]) for name, c in contents.items()})
    return out.getvalue()


def lay_out(
    roots: bytes = b"{}",
    nodes: bytes = b"",
    codes: bytes = b"",
    packed: bytes = b"",
    more: bytes = b"",
) -> bytes:
    """The text of objects.json, of parts that may be anything.

    Each part is JSON with commas between its items, or lines.
    """
    parts = [_divide(part) for part in (packed, codes, nodes)]
    sizes = [sum(not line.startswith(b" ") for line in lines) for lines in parts]
    head = b'{"roots":%s,"packed":%d,"codes":%d,"nodes":%d%s}' % (roots, *sizes, more)
    return b"\n".join((head, *parts[0], *parts[1], *parts[2], b""))


def _divide(items: bytes) -> list[bytes]:
    if b"\n" in items or not items:
        return items.split(b"\n") if items else []
    depth, start, found = 0, 0, []
    for token in re.finditer(rb'"(?:[^"\\]++|\\.)*+"?|[][{},]', items):
        if token[0] in b"[{":
            depth += 1
        elif token[0] in b"]}":
            depth -= 1
        elif token[0] == b"," and depth == 0:
            found.append(items[start : token.start()])
            start = token.end()
    return [*found, items[start:]]


def read_table(text: bytes) -> dict[str, Any]:
    """The table of objects.json as one tree; no node of it may take several lines."""
    head, *lines = map(json.loads, text.splitlines())
    packed, codes = head.get("packed", 0), head.get("codes", 0)
    return {
        "roots": head["roots"],
        "packed": lines[:packed],
        "codes": lines[packed : packed + codes],
        "nodes": lines[packed + codes :],
    }


def write_table(tree: dict[str, Any]) -> bytes:
    """The text of objects.json of such a tree."""
    rows = {name: _as_list(tree.get(name)) for name in ("packed", "codes", "nodes")}
    head = {"roots": tree.get("roots"), **{name: len(found) for name, found in rows.items()}}
    lines = (head, *rows["packed"], *rows["codes"], *rows["nodes"])
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def _as_list(rows: object) -> list[Any]:
    return rows if isinstance(rows, list) else [rows]


# Values for places where others belong.
ODD = [
    0, -1, 1, 2, 2**31, 2**62, 2**63, 10**30, 1.5, 1e308, True, None, "", "0", "dict", "list",
    "cpu", "view", [], [0], [1], [3], [99], [[]], {}, {"a": 1}, "meta", "cuda:0", "param", "graph",
    "default", "inference", [0, 0], [2, 3], "float64", "complex64", "nn", "torch", "object",
    "extras", "nnform", "library", [0, 5], [3, 1], ["a"], ["a", "b"], [[0]], 10**6,
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
