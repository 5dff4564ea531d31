"""The page: one HTML file that asks nobody for anything.

Data lies in `<script type="application/json">` with `<` escaped, so no text of the user's can end
its element; scripts put it into the page as text, never as markup. The content security policy
names the hashes of the page's own scripts and style: the browser runs nothing else, and fetches
nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

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
    """The page, piece by piece."""
    style = _read("report.css")
    scripts = [_read(f"vendor/{name}.min.js") for name in VENDOR] + [_own_script()]
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}"
    )
    head, _, tail = _read("report.html").partition("<!-- data and scripts -->")
    head = head.replace("{{policy}}", policy).replace("{{style}}", style)
    yield head.encode()
    yield _data("report", msgspec.json.encode(report))
    for number, compile in enumerate(report.compiles):
        if compile.has_detail:
            yield _data(f"detail-{number}", details.find(number) or b"null")
    yield _data("licences", msgspec.json.encode(_licences()))
    for script in scripts:
        yield f"<script>{script}</script>\n".encode()
    yield tail.encode()


def _data(name: str, json: bytes) -> bytes:
    escaped = json.replace(b"<", b"\\u003c")
    return b'<script type="application/json" id="%s">%s</script>\n' % (name.encode(), escaped)


@cache
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
