"""Show: a record for people: printed in a terminal, or as one script to be read and sent on.

Where it can be, the script is plain Python and torch (script.py). Otherwise the record is in it as
text, with its source as comments, and the script needs tripwire to run it; it says so. Nothing of
the record runs.
"""

from __future__ import annotations

import base64
import os
import textwrap
import zlib
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from tripwire.recording.capture.outcomes import tell_outcome, tell_redacted
from tripwire.recording.capture.record import ExecutionRecord, load_record
from tripwire.recording.format.file import Record
from tripwire.recording.format.manifest import Manifest, printable
from tripwire.recording.format.views import in_short
from tripwire.recording.replay.script import Unwritable, wrap_literal, write_script

# --- in a terminal ---


def print_record(record: ExecutionRecord, source: bool = False) -> None:
    """Print what is in a record. Long lines stay whole: a terminal breaks them, a file needn't."""
    console = Console(soft_wrap=True, highlight=False)
    manifest = record.manifest
    for line in _describe_content(manifest):
        console.print(_text(line))
    where = manifest.function
    console.print(Text(printable(where.name), "bold"), "at", _text(f"{where.file}:{where.line}"))
    _print_rows(console, _facts(record))
    tables: dict[str, dict[str, Any]] = {
        "arguments": record.locals,
        "globals": record.globals,
        "taken from modules": record.accessed,
        "builtins": record.builtins,
    }
    for title, names in tables.items():
        if names:
            console.print(Text(title, "italic"))
            shown = {f" {name}": in_short(value) for name, value in names.items()}
            _print_rows(console, shown)
    for omission in manifest.omissions:
        console.print(_text(f"left out: {omission.what}: {omission.why}"))
    if source:
        for file, text in record.sources.items():
            console.print()
            console.print(_text(f"--- {file}"))
            console.print(Text(printable(text, keep="\n\t")), end="")
        if not record.sources:
            console.print("\nThe record has no source: none was found, or it isn't what ran.")


def _describe_content(manifest: Manifest) -> list[str]:
    """What of the user's data is in the file, for whoever wants to share it."""
    held = ", ".join(manifest.holds) or "unknown: an older tripwire wrote it"
    lines = [f"contains: {held}"]
    if manifest.redacted:
        lines.append(tell_redacted(manifest.redacted))
    lines.append("Look at all of it before you share it: docs/security.md.")
    return lines


def _print_rows(console: Console, rows: dict[str, str]) -> None:
    """Names and what they are; the latter begin in one column."""
    named = [(printable(name), printable(value)) for name, value in rows.items()]
    width = max(cell_len(name) for name, _ in named)
    for name, value in named:
        console.print(Text(f"{set_cell_size(name, width)}  {value}"))


def _facts(record: ExecutionRecord) -> dict[str, str]:
    manifest = record.manifest
    rows = {
        "outcome": tell_outcome(manifest.outcome),
        "verdict": ": ".join(filter(None, (manifest.verdict.outcome, manifest.verdict.text))),
        "compiled": _compiled(record),
        "written": manifest.created,
        "python": f"{manifest.python.version} ({manifest.platform})",
        "packages": " ".join(
            p for p in manifest.packages.split(" ") if p.partition("==")[0] in _NOTABLE
        ),
        "tensors kept": manifest.policy,
    }
    return {name: value for name, value in rows.items() if value}


def _text(text: str) -> Text:
    """A record's own text, which is no markup."""
    return Text(printable(text))


_NOTABLE = ("torch", "numpy", "transformers", "tripwire")


def _compiled(record: ExecutionRecord) -> str:
    compiled = record.manifest.compiled
    if compiled is None:
        return ""
    return f"back end {compiled.backend}" + (", fullgraph" if compiled.fullgraph else "")


# --- as a script ---


def write_repro(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The script, and why it needs tripwire, if it does. Nothing of the record runs."""
    record = load_record(path)
    try:
        with Record.open(path) as opened:
            body = write_script(opened)
    except Unwritable as error:
        why = printable(str(error))
        return _embed(record, Path(path), why), why
    return f"{_head(record, 'Needs torch, and the packages that its code imports.')}\n{body}", ""


def _embed(record: ExecutionRecord, path: Path, why: str) -> str:
    packed = base64.b85encode(zlib.compress(path.read_bytes(), 9)).decode()
    head = _head(record, f"Needs tripwire (pip install tripwire), since {why}.")
    return f"{head}\n{_sources(record)}\nRECORD = (\n{wrap_literal(packed)}\n)\n{_TAIL}"


def _head(record: ExecutionRecord, needs: str) -> str:
    manifest = record.manifest
    where = manifest.function
    lines = [
        needs,
        f"{where.name} at {where.file}:{where.line}",
        f"recorded: {tell_outcome(manifest.outcome)}",
        f"by Python {manifest.python.version} on {manifest.platform}, {manifest.created}",
        *textwrap.wrap(f"with {manifest.packages}", 90),
    ]
    # The first line settles how the script is read, whatever the others say.
    return "# coding: utf-8\n" + "".join(f"# {printable(line)}\n" for line in lines)


def _sources(record: ExecutionRecord) -> str:
    text = ""
    for file, source in record.sources.items():
        text += f"# --- {printable(file)}\n"
        lines = (printable(line, keep="\t") for line in source.splitlines())
        text += "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return text


_TAIL = """

def main():
    import base64
    import os
    import tempfile
    import zlib

    import tripwire

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "repro.rec")
        with open(path, "wb") as out:
            out.write(zlib.decompress(base64.b85decode(RECORD)))
        print(tripwire.replay(path, trust=True))


if __name__ == "__main__":
    main()
"""
