"""Outcomes: how a call ended, in a form that two processes can compare.

A record that was just written is replayed in a process of its own. The verdict is stamped into the
file: whether somebody else will see the same.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec

from tripwire.errors import CannotTrace
from tripwire.recording.capture.draft import RecordDraft
from tripwire.recording.capture.origin import is_base_file
from tripwire.recording.format.file import Record, stamp
from tripwire.recording.format.manifest import (
    Outcome,
    Raised,
    Returned,
    Verdict,
    encode_json,
    escape,
)
from tripwire.redaction import Redactor, without_numbers
from tripwire.values.classes import isinstance, module_of, name_of, short_name_of
from tripwire.values.contents import find_code


def describe_error(error: BaseException, target: Callable[..., Any] | None) -> Raised:
    """An exception by what a replay must show again: type, message and the user's line.

    Where no line of the user's is known: the one where the target begins.
    """
    kind = type(error)
    refused = error.place if isinstance(error, CannotTrace) else None
    file, line = refused or _find_place(error.__traceback__) or place_of(target)
    name, module = escape(name_of(kind)), escape(module_of(kind))
    return Raised(name, module, escape(_message_of(error)), escape(file), line)


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as trouble:  # its __str__ is the user's
        return f"<no message: {short_name_of(type(trouble))}>"


def _find_place(trace: TracebackType | None) -> tuple[str, int] | None:
    """The innermost line that isn't torch's, the standard library's or tripwire's."""
    found = None
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        if file.startswith("<eval_with_key>"):  # the code of a graph
            found = _find_place_in_graph(frame, line) or found
        elif not is_base_file(file):
            found = file, line
    return found


def _find_place_in_graph(frame: FrameType, line: int) -> tuple[str, int] | None:
    """The user's line from which a line of a graph's code was recorded."""
    from torch import fx  # there is one, or there would be no such frame

    from tripwire.tracing.state import FACTS, NodeFacts

    module = frame.f_locals.get("self")
    if not isinstance(module, fx.GraphModule):
        return None
    numbers = getattr(module, "_lineno_map", None) or {}
    number = numbers.get(line - getattr(module, "_prologue_start", 0))
    node = None if number is None else list(module.graph.nodes)[number]
    facts = None if node is None else node.meta.get(FACTS)
    place = facts.where.place if isinstance(facts, NodeFacts) else None
    return None if place is None else (place.file, place.line)


def place_of(target: Any) -> tuple[str, int]:
    """Where a callable's code begins."""
    code = find_code(target)
    return ("", 0) if code is None else (code.co_filename, code.co_firstlineno)


def describe_result(result: object) -> Returned:
    """A result by a digest of all that it holds."""
    draft = RecordDraft()
    draft.add("result", result)
    table = draft.finish()
    digest = hashlib.sha256(encode_json((table.roots, table.nodes)))
    for blob in draft.blobs.settled:
        for chunk in blob.data.chunks():
            digest.update(chunk)
    return Returned(digest.hexdigest())


def is_same(recorded: Outcome, found: Outcome) -> bool:
    """Whether a replay shows what the record says."""
    match recorded, found:
        case Raised(), Raised():
            same = recorded.type == found.type and _is_same_text(recorded.message, found.message)
            return same and recorded.line in (0, found.line)  # 0: no line was known
        case Returned(), Returned():
            return recorded.digest in ("", found.digest)  # "": nobody could see the result
    return False


def tell_redacted(names: tuple[str, ...]) -> str:
    """That a record lacks secrets, by the names that told them, and what that means."""
    shown = ", ".join(sorted(set(names))[:8])
    count = f"{len(names)} {'value is' if len(names) == 1 else 'values are'} redacted"
    return f"{count} ({shown}): with the real values the call may end differently"


def _is_same_text(recorded: str, found: str) -> bool:
    """Whether two messages are one, but for secrets that the record hasn't."""
    if recorded == found or "<redacted " not in recorded:
        return recorded == found
    return without_numbers(recorded) == without_numbers(Redactor(wanted=True).clean(found))


def explain(outcome: Outcome) -> str:
    """An outcome in one line."""
    match outcome:
        case Raised():
            message = outcome.message.partition("\n")[0]
            return printable(f"{outcome.type}: {message} ({outcome.file}:{outcome.line})")
        case Returned():
            return f"returned (digest {outcome.digest[:12]})" if outcome.digest else "returned"
    return "not known"


def printable(text: str, keep: str = "") -> str:
    """A text that can do nothing to a terminal or a script: one line, without control characters.

    `keep`: control characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


# --- the verdict ---


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
_REPLAY = "from tripwire.recording.replay.rerun import print_replayed; print_replayed()"


class Replayed(msgspec.Struct, frozen=True):
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
        replayed = _replay_elsewhere(path)
    except (subprocess.SubprocessError, msgspec.MsgspecError, OSError) as error:
        return Verdict("not checked", f"{short_name_of(type(error))}: {error}")
    here = platform.python_version(), replayed.torch
    if replayed.outcome is None:
        return Verdict("differs", replayed.trouble, *here)
    if is_same(recorded, replayed.outcome):
        return Verdict("reproduces", explain(replayed.outcome), *here)
    return Verdict("differs", f"replayed to {explain(replayed.outcome)}", *here)


def _replay_elsewhere(path: Path) -> Replayed:
    """In a folder and an environment of its own: nothing of the user's is found by accident."""
    with tempfile.TemporaryDirectory(prefix="tripwire-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", _REPLAY, str(path.resolve())],
            cwd=folder,
            env=_small_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LONGEST_CHECK,
            check=True,
        )
    return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Replayed)


def _small_environment(known: Mapping[str, str]) -> dict[str, str]:
    names = [n for n in known if n in _KEPT.split() or n.startswith(_KEPT_FAMILIES)]
    source = Path(__file__).resolve().parents[3]
    ours = {"PYTHONPATH": str(source), "TRIPWIRE_RECORD_DIR": ""}
    return {name: known[name] for name in names} | ours
