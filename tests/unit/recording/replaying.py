"""What the tests of failing calls share: make one fail, find its record, see it again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tripwire.recording.capture.outcomes import is_same, tell_outcome
from tripwire.recording.capture.record import ExecutionRecord, load_record
from tripwire.recording.format.manifest import Raised
from tripwire.recording.replay.rerun import find_outcome

SOURCE = Path(__file__).parents[3] / "src"


def fail(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception:
    """The exception of a call that must raise."""
    with pytest.raises(Exception) as caught:
        call(*args, **kwargs)
    return caught.value


def only(folder: Path) -> Path:
    """The one record in a folder."""
    found = sorted(folder.glob("*"))
    assert len(found) == 1, found
    return found[0]


def check_reproduces(path: Path) -> ExecutionRecord:
    """A record replays to what it says, here and now."""
    record = load_record(path)
    found = find_outcome(path)
    assert is_same(record.manifest.outcome, found), (
        f"recorded {tell_outcome(record.manifest.outcome)}, replayed {tell_outcome(found)}, "
        f"left out {record.manifest.omissions}"
    )
    return record


def raised_in(path: Path) -> Raised:
    """The exception that a record tells of."""
    outcome = load_record(path).manifest.outcome
    assert isinstance(outcome, Raised)
    return outcome


def run_elsewhere(
    *arguments: str | Path, cwd: Path, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in another folder, with tripwire and nothing of the tests' to import."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("TRIPWIRE_")}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**known, "PYTHONPATH": str(SOURCE), "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
