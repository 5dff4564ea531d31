"""Checking: a record that was just written is replayed in a process of its own.

The verdict is stamped into the file: whether somebody else will see the same.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tripwire.recording.format import Outcome, Record, Verdict, stamp
from tripwire.recording.outcomes import explain, is_same, tell_redacted

# Records above this size aren't replayed to see whether they reproduce.
LARGEST_CHECKED = 50_000_000
LONGEST_CHECK = 120  # seconds
# What Python and torch need to start as they did here. No other variable is in a record, so a call
# that needs one doesn't reproduce.
_KEPT = (
    "PATH HOME USER LOGNAME TMPDIR TEMP TMP TZ LANG LANGUAGE "
    "PYTHONHOME PYTHONUTF8 PYTHONIOENCODING PYTHONDONTWRITEBYTECODE VIRTUAL_ENV CONDA_PREFIX "
    "LD_LIBRARY_PATH LD_PRELOAD DYLD_LIBRARY_PATH DYLD_FALLBACK_LIBRARY_PATH "
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS MKL_THREADING_LAYER "
    "KMP_DUPLICATE_LIB_OK CC CXX CUDA_HOME CUDA_PATH CUDA_VISIBLE_DEVICES "
    "HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ROCM_PATH XDG_CACHE_HOME XDG_CONFIG_HOME TORCH_HOME "
    "TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR TRITON_HOME TRITON_CACHE_DIR "
    # Windows
    "SYSTEMROOT SYSTEMDRIVE WINDIR COMSPEC PATHEXT USERNAME USERPROFILE APPDATA LOCALAPPDATA "
    "PROGRAMDATA PROGRAMFILES NUMBER_OF_PROCESSORS PROCESSOR_ARCHITECTURE"
)
_KEPT_FAMILIES = ("LC_", "TRIPWIRE_")


class Finding(msgspec.Struct, frozen=True):
    """What a replay in another process came to."""

    outcome: Outcome | None
    trouble: str = ""
    torch: str = ""


def check_record(path: Path) -> Verdict:
    """Replay a record and stamp the verdict into it."""
    with Record.open(path) as record:
        recorded, redacted = record.manifest.outcome, record.manifest.redacted
    verdict = _judge(path, recorded)
    if redacted:  # whatever came of it, it came of other values
        said = f"{verdict.text}; {tell_redacted(redacted)}"
        verdict = msgspec.structs.replace(verdict, text=said.removeprefix("; "))
    stamp(path, verdict)
    return verdict


def _judge(path: Path, recorded: Outcome) -> Verdict:
    if path.stat().st_size > LARGEST_CHECKED:
        return Verdict("not checked", f"larger than {LARGEST_CHECKED} bytes")
    try:
        finding = _replay_elsewhere(path)
    except (subprocess.SubprocessError, msgspec.MsgspecError, OSError) as error:
        return Verdict("not checked", f"{type(error).__name__}: {error}")
    here = platform.python_version(), finding.torch
    if finding.outcome is None:
        return Verdict("differs", finding.trouble, *here)
    if is_same(recorded, finding.outcome):
        return Verdict("reproduces", explain(finding.outcome), *here)
    return Verdict("differs", f"replayed to {explain(finding.outcome)}", *here)


def _replay_elsewhere(path: Path) -> Finding:
    """In a folder and an environment of its own: nothing of the user's is found by accident."""
    with tempfile.TemporaryDirectory(prefix="tripwire-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tripwire.recording.finding", str(path.resolve())],
            cwd=folder,
            env=_small_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LONGEST_CHECK,
            check=True,
        )
    return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Finding)


def _small_environment(known: Mapping[str, str]) -> dict[str, str]:
    names = [n for n in known if n in _KEPT.split() or n.startswith(_KEPT_FAMILIES)]
    source = Path(__file__).resolve().parents[2]
    ours = {"PYTHONPATH": str(source), "TRIPWIRE_RECORD_DIR": ""}
    return {name: known[name] for name in names} | ours
