"""Records that nobody wrote: files with members of any content, whose hashes are right."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile

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
    roots: bytes = b"{}", nodes: bytes = b"", codes: bytes = b"", more: bytes = b""
) -> bytes:
    """The text of objects.json, of parts that may be anything."""
    return b'{"roots":%s,"nodes":[%s],"codes":[%s]%s}' % (roots, nodes, codes, more)


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
