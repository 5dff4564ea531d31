"""Outcomes: how a call ended, and what was around it, in a form that two processes can compare.

A record that was just written is replayed in a process of its own. The verdict, whether the replay
ended in the same way, is written into the file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec

from tripwire.errors import CannotTrace
from tripwire.recording.capture.draft import RecordDraft
from tripwire.recording.capture.origin import is_base_file, is_own_file
from tripwire.recording.format.file import Record, stamp
from tripwire.recording.format.manifest import (
    Autocast,
    Environment,
    Omission,
    Outcome,
    Raised,
    Returned,
    Verdict,
    encode_json,
    escape,
    printable,
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


def find_users_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the user's first frame on, as Python itself would print it."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not is_own_file(file) and not file.startswith("<frozen "):
            return trace
        trace = trace.tb_next
    return None


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


def tell_outcome(outcome: Outcome) -> str:
    """An outcome in one line."""
    match outcome:
        case Raised():
            message = outcome.message.partition("\n")[0]
            what = f"{outcome.type}: {message}" if message else outcome.type
            return printable(f"{what} ({outcome.file}:{outcome.line})")
        case Returned():
            return f"returned (digest {outcome.digest[:12]})" if outcome.digest else "returned"
    return "not known"


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
    "TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR TRITON_HOME TRITON_CACHE_DIR"
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
        return Verdict("differs", f"the replay can't run: {replayed.trouble}", *here)
    if is_same(recorded, replayed.outcome):
        return Verdict("reproduces", tell_outcome(replayed.outcome), *here)
    how = "raised " if isinstance(replayed.outcome, Raised) else ""
    return Verdict("differs", f"the replay {how}{tell_outcome(replayed.outcome)}", *here)


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


# --- what was around the call: found, and set again ---


def describe_environment(state: tuple[object, ...]) -> Environment:
    """torch's switches, from what `sample_quickly` found."""
    import torch

    from tripwire.reading.torchstate import SWITCHES, find_unusual, name_quickly
    from tripwire.recording.format.torchvalues import dtype_name

    known = name_quickly(state)
    precision = known["float32 matmul precision"]
    return Environment(
        grad_mode=known["grad mode"],
        inference_mode=known["inference mode"],
        autocast={
            kind: Autocast(enabled, dtype_name(to))
            for kind, enabled, to in known["autocast"] or ()
            if enabled
        },
        autocast_cache=torch.is_autocast_cache_enabled(),
        default_dtype=dtype_name(known["default dtype"]),
        default_device=str(known["default device"] or "cpu"),
        deterministic=bool(known["deterministic algorithms"]),
        deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        matmul_precision=precision if isinstance(precision, str) else "highest",
        num_threads=int(known["number of threads"]),
        flags=find_unusual(SWITCHES),
        precisions=_find_precisions(precision),
    )


def _find_precisions(precision: object) -> dict[str, str]:
    """Precisions of single back ends, where the one word for all doesn't say everything."""
    from tripwire.reading.torchstate import PRECISIONS, find_unusual

    unusual = find_unusual(PRECISIONS)
    if isinstance(precision, str) and all("matmul" in name for name in unusual):
        return {}
    return unusual


def is_switch(path: str) -> bool:
    """Whether a record may name this switch of torch.backends. Nobody can say without torch."""
    if importlib.util.find_spec("torch") is None:
        return False
    from tripwire.reading.torchstate import PRECISIONS, SWITCHES

    return any(path == switch.path for switch in (*SWITCHES, *PRECISIONS) if switch.path)


@contextlib.contextmanager
def entered(wanted: Environment) -> Iterator[None]:
    """torch's flags as they were when the call began; put back afterwards."""
    if importlib.util.find_spec("torch") is None:  # it was there, and perhaps isn't needed
        yield
        return
    import torch

    from tripwire.reading.torchstate import PRECISIONS, SWITCHES, find_matmul_precision, switched

    precision = find_matmul_precision()
    before = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        precision,
        torch.get_num_threads(),
        torch.is_autocast_cache_enabled(),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(_set_flags, *before)
        _set_flags(
            getattr(torch, wanted.default_dtype),
            wanted.deterministic,
            wanted.deterministic_warn_only,
            wanted.matmul_precision if isinstance(precision, str) else precision,
            wanted.num_threads or before[4],
            wanted.autocast_cache,
        )
        stack.enter_context(switched(SWITCHES, wanted.flags))
        if wanted.precisions:
            stack.enter_context(switched(PRECISIONS, wanted.precisions))
        device = torch.device(wanted.default_device)
        if device.type != "cpu" and (device.type == "meta" or torch.accelerator.is_available()):
            stack.enter_context(device)
        for kind, autocast in wanted.autocast.items():
            dtype = getattr(torch, autocast.dtype)
            stack.enter_context(torch.autocast(kind, dtype, autocast.enabled))
        if wanted.inference_mode:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(wanted.grad_mode))
        yield


def _set_flags(
    dtype: Any, deterministic: bool, warn_only: bool, precision: object, threads: int, cache: bool
) -> None:
    import torch

    from tripwire.reading.torchstate import find_matmul_precision

    torch.set_default_dtype(dtype)
    now = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if (now, only_warns) != (deterministic, warn_only):  # or torch imports its compilers: 1.3 s
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    # Else each back end was told its own, or is as it should be: leave them alone.
    if isinstance(precision, str) and precision != find_matmul_precision():
        torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    torch.set_autocast_cache_enabled(cache)


# --- switches that are told ---

_ENVIRONMENT = ("environ", "environb", "getenv")
_USUAL_LIMIT = 1000


def find_settings(raised: str, names: Set[str]) -> Iterator[Omission]:
    """Settings that may show in a call: by the error that it raised, and the names in its code."""
    from tripwire.reading.torchstate import NAMED

    told = [flag.set_by for flag in NAMED if flag.is_unusual()]
    if raised.endswith("Warning"):
        told.append("warnings.filters")
    if raised == "RecursionError" and sys.getrecursionlimit() != _USUAL_LIMIT:
        told.append("sys.setrecursionlimit")
    for what in told:
        yield Omission(what, "it isn't at its default, and a record doesn't keep it")
    if not names.isdisjoint(_ENVIRONMENT):
        yield Omission("os.environ", "a record doesn't keep the environment's variables")


# --- packages ---


def fresh_packages() -> str:
    """Versions of the installed packages whose modules are loaded, as pip takes them."""
    loaded = {name.partition(".")[0] for name in sys.modules}
    where = tuple((folder, _changed(folder)) for folder in sys.path)
    found = _find_distributions(where)
    names = {dist for top in loaded & found.keys() for dist in found[top]}
    return " ".join(f"{name}=={_find_version(name, where)}" for name in sorted(names))


_Folders = tuple[tuple[str, int], ...]  # where packages are, and when that changed


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1)
def _find_distributions(where: _Folders) -> Mapping[str, list[str]]:
    """Packages by the modules that they bring: a tenth of a second, so it is done once."""
    return importlib.metadata.packages_distributions()


@functools.lru_cache(maxsize=1000)
def _find_version(name: str, where: _Folders) -> str:
    return importlib.metadata.version(name)
