"""Sandbox: a trusted record's code runs without a network and writes only to a temporary folder.

bubblewrap makes the sandbox, on Linux. It contains Python with its packages, the system's programs
and libraries, the record, and a temporary folder, which is HOME and TMPDIR and isn't kept. It
contains no other files: a socket or a pipe in the file system would lead out, even on a read-only
mount. So would an open file: the code's input is empty, and its output goes through pipes.
"""

from __future__ import annotations

import codecs
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

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
    tried = subprocess.run(
        [found, *_isolate(), "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        why = " ".join(tried.stderr.split()) or f"it ended with {tried.returncode}"
        raise CannotReplay(
            f"--sandbox: bubblewrap is installed but can't make a sandbox: {why}. The kernel "
            "must allow user namespaces.",
            slug="no-sandbox",
        )
    return found


_SOURCE = Path(__file__).resolve().parents[3]
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Without a network, other processes, or a terminal to type into.
_ISOLATED = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    *("--dev", "/dev", "--proc", "/proc"),
)
# What programs need of the system; a folder that isn't there is passed over.
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix", "/gnu"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"),
    *("/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group"),
    "/sys/devices/system",  # how many processors there are
)


def _find_needed() -> Iterator[str]:
    """What is there to be read: the system, Python and its packages; nothing of the user's."""
    yield from _SYSTEM
    home = Path(os.path.expanduser("~")).resolve()
    mine = {Path.cwd().resolve(), home, *home.parents}
    python = Path(sys.executable).resolve().parents[1]
    prefixes = (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix)
    places = [str(python), *prefixes, str(_SOURCE)]
    for place in map(Path, [*places, *filter(None, sys.path)]):
        if place.resolve() not in mine:
            yield str(place)
            yield str(place.resolve())


def _isolate(*further: str) -> list[str]:
    """The options of bubblewrap, with what is needed and further files to be read."""
    places = dict.fromkeys((*_find_needed(), *further))
    return [*_ISOLATED, *(word for place in places for word in ("--ro-bind-try", place, place))]


def run_sandboxed(file: str, arguments: Sequence[str]) -> int:
    """Replay a record inside; the exit code."""
    command, record = find_command(), str(Path(file).resolve())
    with tempfile.TemporaryDirectory(prefix="tripwire-sandbox-") as folder:
        own = {"HOME": folder, "TMPDIR": folder, "PYTHONPATH": str(_SOURCE)}
        own["TRIPWIRE_CACHE_DIR"] = ""  # no store
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        wanted = [word for pair in (kept | own).items() for word in ("--setenv", *pair)]
        inside = ["--bind", folder, folder, "--chdir", folder, "--remount-ro", "/", "--clearenv"]
        python = [sys.executable, "-m", "tripwire", "replay", record, "--trust"]
        return _run([command, *_isolate(record), *inside, *wanted, *python, *arguments])


def _run(command: Sequence[str]) -> int:
    """Run a command whose words come through pipes; the exit code."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        pairs = ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
        threads = [threading.Thread(target=_pass_on, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return process.returncode


def _pass_on(said: BinaryIO, to: BinaryIO) -> None:
    """Hand on what is said as it comes, without what a terminal would obey."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    with said, suppress(BrokenPipeError):  # nobody listens any more: nor does `said`
        while data := os.read(said.fileno(), 1 << 16):
            text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", decoder.decode(data))
            to.write(text.encode())
            to.flush()
