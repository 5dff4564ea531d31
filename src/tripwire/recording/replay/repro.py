"""Repro: a record as one script, to be read, changed and sent on.

Where it can be, the script is plain Python and torch (script.py). Otherwise the record is in it as
text, with its source as comments, and the script needs tripwire to run it; it says so.
"""

from __future__ import annotations

import base64
import os
import textwrap
import zlib
from pathlib import Path

from tripwire.recording.capture.outcomes import explain, printable
from tripwire.recording.format.file import Record
from tripwire.recording.replay.record import ExecutionRecord, load_record
from tripwire.recording.replay.script import Unwritable, write_script


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
    data = "\n".join(f'    "{line}"' for line in textwrap.wrap(packed, 92))
    head = _head(record, f"Needs tripwire (pip install tripwire), since {why}.")
    return f"{head}\n{_sources(record)}\nRECORD = (\n{data}\n)\n{_TAIL}"


def _head(record: ExecutionRecord, needs: str) -> str:
    manifest = record.manifest
    where = manifest.function
    lines = [
        needs,
        f"{where.name} at {where.file}:{where.line}",
        f"recorded: {explain(manifest.outcome)}",
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
