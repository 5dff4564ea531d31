"""Repro: a record as one script, to be read, changed and sent on.

The recorded source stands in it as comments; the record itself is in it as text, and is what
runs. The script needs tripwire and the packages that the recorded code imports, nothing else.
"""

from __future__ import annotations

import base64
import os
import textwrap
import zlib
from pathlib import Path

from tripwire.recording.outcomes import explain, printable
from tripwire.recording.record import ExecutionRecord, load


def write_repro(path: str | os.PathLike[str]) -> str:
    """The script's text. Nothing of the record runs."""
    record = load(path)
    packed = base64.b85encode(zlib.compress(Path(path).read_bytes(), 9)).decode()
    data = "\n".join(f'    "{line}"' for line in textwrap.wrap(packed, 92))
    return f"{_head(record)}\n{_sources(record)}\nRECORD = (\n{data}\n)\n{_TAIL}"


def _head(record: ExecutionRecord) -> str:
    manifest = record.manifest
    where = manifest.function
    packages = ", ".join(f"{name} {version}" for name, version in manifest.packages.items())
    lines = [
        f"{where.name} at {where.file}:{where.line}",
        f"recorded: {explain(manifest.outcome)}",
        f"by Python {manifest.python.version} on {manifest.platform}, {manifest.created}",
        *textwrap.wrap(f"with {packages}", 90),
        "Needs tripwire: pip install tripwire",
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
