"""Versions: a record that one Python wrote runs under another, from source.

Interpreters are looked for in TRIPWIRE_PYTHONS (paths, separated as in PATH) and as `python3.12`
and `python3.13`. One without msgspec and torch can't replay a record and doesn't count.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import corpus
import pytest
from carrying import Carried

SOURCE = Path(__file__).parents[4] / "src"

READER = """
import json, sys
sys.modules["hypothesis"] = None  # as if it weren't installed
from tripwire.errors import TripwireError
from tripwire.recording.replay import rerun
from tripwire.recording.format.file import Record
from tripwire.recording.replay.rebuild import Rebuilder
from tripwire.recording.capture.shelf import Shelf

def outcome(path):
    with Record.open(path) as record:
        shelf = Shelf(record.table, record.read, record.manifest.python.magic)
        rebuilder = Rebuilder(record.table, shelf)
        try:
            function = rerun.rebuild(record.table, record.blobs, rebuilder)["value"]
        except TripwireError as error:
            return f"refused: {error.slug}: {error}"
        with rebuilder.importable():
            try:
                return repr(function())
            except TripwireError as error:
                return f"refused: {error.slug}"

found = {path: outcome(path) for path in sys.argv[1:]}
print(json.dumps(found))
"""


@functools.cache
def interpreters() -> dict[str, str]:
    """Other Pythons that can read records, by version."""
    given = os.environ.get("TRIPWIRE_PYTHONS", "").split(os.pathsep)
    found = {}
    for name in [*filter(None, given), "python3.12", "python3.13"]:
        path = shutil.which(name)
        if path is None:
            continue
        asked = "import msgspec, torch, sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([path, "-c", asked], capture_output=True, text=True)
        if done.returncode == 0:
            found.setdefault(done.stdout.strip(), path)
    return found


def run(version: str, *paths: Path) -> dict[str, str]:
    """What another interpreter makes of some records."""
    python = interpreters().get(version)
    if python is None:
        pytest.skip(f"no Python {version} with msgspec and torch: set TRIPWIRE_PYTHONS to one")
    done = subprocess.run(
        [python, "-c", READER, *map(str, paths)],
        env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return {Path(path).stem: text for path, text in found.items()}


OTHERS = [
    v for v in ("3.11", "3.12", "3.13") if v != f"{sys.version_info[0]}.{sys.version_info[1]}"
]


def test_there_are_enough_functions() -> None:
    assert len(corpus.ALL) >= 50
    assert len({function.__name__ for function in corpus.ALL}) == len(corpus.ALL)


@pytest.mark.parametrize("version", OTHERS)
def test_every_function_gives_the_same_under_another_python(version, tmp_path) -> None:
    paths = [Carried(value=f).write(tmp_path / f"{f.__name__}.rec") for f in corpus.ALL]
    found = run(version, *paths)
    expected = {f.__name__: repr(f()) for f in corpus.ALL if f.__name__ not in CHANGING}
    differing = {
        name: (text, found[name]) for name, text in expected.items() if found[name] != text
    }
    assert differing == {}


CHANGING = {"subclass_hooks"}  # each call adds to a list


@pytest.mark.parametrize("version", OTHERS)
def test_code_without_source_is_refused_by_name(version, tmp_path) -> None:
    space: dict[str, object] = {"__name__": "made"}
    exec("def made_up():\n    return 1", space)
    path = Carried(value=space["made_up"]).write(tmp_path / "made_up.rec")
    text = run(version, path)["made_up"]
    assert text.startswith("refused: replay-no-code: <string>:1: made_up can't be built here")


@pytest.mark.parametrize("version", OTHERS)
def test_a_library_that_is_missing_is_refused_by_name(version, tmp_path) -> None:
    import hypothesis

    def draws():
        return hypothesis.given()

    path = Carried(value=draws).write(tmp_path / "draws.rec")
    text = run(version, path)["draws"]
    assert text.startswith("refused: replay-missing-library: The record uses hypothesis, which")


def test_the_package_reads_records_without_torch() -> None:
    code = (
        "import sys, tripwire;"
        "import tripwire.recording.format.decode, tripwire.recording.replay.rebuild;"
        "import tripwire.recording.capture.code, tripwire.recording.capture.encode;"
        " assert 'torch' not in sys.modules;"
        "assert 'compile' in dir(tripwire); tripwire.compile; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, check=True)
