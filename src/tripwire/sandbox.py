"""Sandbox: a trusted record's code runs without a network and writes to a temporary folder alone.

bubblewrap makes it, on Linux: the file system is there to be read, HOME and TMPDIR are the
temporary folder, and nothing that was written is kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tripwire.errors import CannotReplay


def find_command() -> str:
    """Where bubblewrap is; raises `CannotReplay` where there is none, or where it can't work."""
    found = shutil.which("bwrap") if sys.platform == "linux" else None
    if found is None:
        raise CannotReplay(
            "--sandbox needs bubblewrap (`bwrap`) on Linux, and it isn't installed. Install it "
            "(Debian: apt-get install bubblewrap), or replay on a machine that holds nothing of "
            "value.",
            slug="no-sandbox",
        )
    tried = subprocess.run([found, *_ISOLATED, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        why = " ".join(tried.stderr.split()) or f"it ended with {tried.returncode}"
        raise CannotReplay(
            f"--sandbox: bubblewrap is installed but can't make a sandbox: {why}. The kernel "
            "must allow user namespaces.",
            slug="no-sandbox",
        )
    return found


# Everything can be read, nothing written; no network, no other process, no terminal to type into.
_ISOLATED = (
    *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all"),
    *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
)


def run_sandboxed(file: str, arguments: Sequence[str]) -> int:
    """Replay a record inside; the exit code."""
    command = find_command()
    source = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix="tripwire-sandbox-") as folder:
        own = {"HOME": folder, "TMPDIR": folder, "PYTHONPATH": str(source)}
        own["TRIPWIRE_CACHE_DIR"] = ""  # no store
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        wanted = [word for pair in (kept | own).items() for word in ("--setenv", *pair)]
        inside = ["--bind", folder, folder, "--chdir", folder, "--clearenv", *wanted]
        python = [sys.executable, "-m", "tripwire", "replay", str(Path(file).resolve()), "--trust"]
        done = subprocess.run([command, *_ISOLATED, *inside, *python, *arguments], check=False)
    return done.returncode
