"""The page: one HTML file that loads nothing else.

Data lies in `<script type="application/json">` with `<` escaped, so no text of the user's can end
its element; scripts put it into the page as text, never as markup. The content security policy
names the hashes of the page's own scripts and style: the browser runs nothing else, and fetches
nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec import Struct

from tripwire.files import replacing
from tripwire.report.budgets import Details
from tripwire.report.model import Report

# In the order that they need each other.
VENDOR = (
    "d3-array",
    "d3-color",
    "d3-dispatch",
    "d3-ease",
    "d3-format",
    "d3-interpolate",
    "d3-path",
    "d3-selection",
    "d3-time",
    "d3-time-format",
    "d3-timer",
    "d3-drag",
    "d3-scale",
    "d3-shape",
    "d3-transition",
    "d3-zoom",
    "dagre",
)
_AT_ONCE = 500  # rows that become JSON together
LICENCES = (*VENDOR, "graphlib")  # which is in dagre's file
SCRIPTS = (
    "dom",
    "data",
    "table",
    "timeline",
    "scopes",
    "graph",
    "compile",
    "groups",
    "overview",
    "processes",
    "diff",
    "search",
    "main",
)


def write_report(report: Report, details: Details, target: str | os.PathLike[str]) -> Path:
    """Write the page to a file; a file or a link that is there is replaced at the end."""
    with replacing(target) as file:
        file.writelines(build_page(report, details))
    return Path(target)


def build_page(report: Report, details: Details) -> Iterator[bytes]:
    """The page, piece by piece: no more of it is held than a script or some rows."""
    style = _read("report.css")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(style)}; script-src {' '.join(map(_hash, _scripts()))}"
    )
    head, _, tail = _read("report.html").partition("<!-- data and scripts -->")
    head = head.replace("{{policy}}", policy).replace("{{style}}", style)
    yield head.encode()
    yield from _data("report", stream_json(report))
    for number, compile in enumerate(report.compiles):
        if compile.has_detail:
            yield from _data(f"detail-{number}", details.stream(number))
    yield from _data("licences", stream_json(_licences()))
    for script in _scripts():
        yield f"<script>{script}</script>\n".encode()
    yield tail.encode()


def _data(name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield b'<script type="application/json" id="%s">' % name.encode()
    for piece in pieces:
        yield piece.replace(b"<", b"\\u003c")
    yield b"</script>\n"


def stream_json(value: object) -> Iterator[bytes]:
    """A value as JSON, in pieces: rows of a long list a few at a time."""
    if isinstance(value, Struct) and not value.__struct_config__.array_like:
        for number, name in enumerate(value.__struct_fields__):
            yield b'%s"%s":' % (b"," if number else b"{", name.encode())
            yield from stream_json(getattr(value, name))
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], Struct):
        is_flat = value[0].__struct_config__.array_like
        yield b"["
        for begin in range(0, len(value), _AT_ONCE if is_flat else 1):
            yield b"," if begin else b""
            if is_flat:
                yield msgspec.json.encode(value[begin : begin + _AT_ONCE])[1:-1]
            else:
                yield from stream_json(value[begin])
        yield b"]"
    else:
        yield msgspec.json.encode(value)


def _scripts() -> Iterator[str]:
    for name in VENDOR:
        yield _read(f"vendor/{name}.min.js")
    yield _own_script()


def _read(name: str) -> str:
    return (files("tripwire.report") / "static" / name).read_text(encoding="utf-8")


def _own_script() -> str:
    """The page's own files share one scope, which nothing outside sees."""
    parts = "\n".join(_read(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _licences() -> list[tuple[str, str]]:
    """Licence texts, each with the names of what it is for."""
    found: dict[str, list[str]] = {}
    for name in LICENCES:
        found.setdefault(_read(f"vendor/{name}.LICENSE"), []).append(name)
    return [(", ".join(names), text) for text, names in found.items()]
