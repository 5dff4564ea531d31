"""Calls: the record of one call, written, checked, and told of."""

from __future__ import annotations

import datetime
import inspect
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tripwire.phases import RECORD
from tripwire.reading.torchstate import sample_quickly
from tripwire.recording.capture.beginning import Beginning
from tripwire.recording.capture.draft import fresh_packages
from tripwire.recording.capture.flags import PRECISIONS, USUAL, find_settings, find_unusual
from tripwire.recording.capture.origin import find_patches
from tripwire.recording.capture.outcomes import check_record, place_of
from tripwire.recording.capture.policy import KEEP_ALL, Policy
from tripwire.recording.format.file import NewRecord
from tripwire.recording.format.manifest import (
    Autocast,
    Compiled,
    Environment,
    Manifest,
    Outcome,
    Raised,
    Where,
)
from tripwire.telemetry.log import emit
from tripwire.telemetry.schema import RecordWritten
from tripwire.values.classes import isinstance


@dataclass(frozen=True, slots=True)
class Writing:
    """Where and how records are written."""

    path: Path  # a file, or a folder in which each gets a name of its own
    policy: Policy = KEEP_ALL
    check: bool = True  # replay what was written, and stamp the verdict into it

    @staticmethod
    def to(path: str | os.PathLike[str], policy: Policy = KEEP_ALL, check: bool = True) -> Writing:
        """Records at `path`; checked, unless the environment says TRIPWIRE_RECORD_CHECK=0."""
        wanted = os.environ.get("TRIPWIRE_RECORD_CHECK") != "0"
        return Writing(Path(path).absolute(), policy, check and wanted)

    def find_path(self, name: str, outcome: Outcome) -> Path:
        """Where a record goes, if nothing is there yet."""
        if self.path.suffix == ".rec" and not self.path.is_dir():
            return self.path
        how, line = ("call", 0)
        if isinstance(outcome, Raised):
            how, line = outcome.type, outcome.line
        return self.path / f"{_plain(name, 120)}_{_plain(how, 80)}_{line}.rec"


def _plain(name: str, most: int) -> str:
    """A name as part of a file's: what identifiers are made of, in so many bytes at most.

    File systems take 255 bytes, with the line, the ending and a number to tell files apart.
    """
    coding = sys.getfilesystemencoding()  # may lack letters that Python has: they become `?`
    known = name.rpartition(".")[2].encode(coding, "replace").decode(coding)
    words = "".join(c if f"_{c}".isidentifier() else " " for c in known).split()
    short = "_".join(words).encode(coding)[:most].decode(coding, "ignore")
    return short.strip("_") or "call"


def write_call(
    writing: Writing,
    beginning: Beginning,
    name: str,
    outcome: Outcome,
    compiled: Compiled | None = None,
    backend: object = None,
) -> Path:
    """Write the record of a call that is over. Raises what the file system raises."""
    with RECORD:
        if beginning.built is None:  # else an earlier attempt to write it failed
            beginning.built = _build(beginning, name, outcome, compiled, backend)
        path = beginning.built.write(writing.find_path(name, outcome))
        if writing.check:
            check_record(path)
    emit(RecordWritten, path=str(path), function=name, exception=_name_of_error(outcome))
    return path


def _build(
    beginning: Beginning,
    name: str,
    outcome: Outcome,
    compiled: Compiled | None,
    backend: object,
) -> NewRecord:
    draft = beginning.finish()
    draft.add("locals", _bind(beginning))
    draft.add("generators", beginning.find_drawn())
    if backend is not None:
        draft.add("backend", backend)
    patches = find_patches(draft.met)
    if patches:
        draft.add("patches", patches)
    file, line = place_of(beginning.target)
    manifest = Manifest(
        packages=fresh_packages(),
        function=Where(name, file, line),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        compiled=compiled,
        outcome=outcome,
        environment=_describe(beginning.torch_state or sample_quickly()),
        omissions=(
            *beginning.omissions(),
            *find_settings(_name_of_error(outcome), draft.find_names()),
        ),
    )
    return draft.build(manifest)


def _name_of_error(outcome: Outcome) -> str:
    return outcome.type if isinstance(outcome, Raised) else ""


def _bind(beginning: Beginning) -> dict[str, object]:
    """Arguments by the names that the function has for them."""
    target = beginning.target
    try:
        signature = inspect.signature(target.forward if isinstance(target, nn.Module) else target)
        bound = signature.bind(*beginning.args, **beginning.kwargs)
    except (TypeError, ValueError):
        return {}
    return dict(bound.arguments)


def _describe(state: tuple[Any, ...]) -> Environment:
    grad, inference, autocast, dtype, device, *_, deterministic, precision, threads = state
    return Environment(
        grad_mode=grad,
        inference_mode=inference,
        autocast={
            kind: Autocast(enabled, _short(to)) for kind, enabled, to in autocast or () if enabled
        },
        autocast_cache=torch.is_autocast_cache_enabled(),
        default_dtype=_short(dtype),
        default_device=str(device or "cpu"),
        deterministic=bool(deterministic),
        deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        matmul_precision=precision if isinstance(precision, str) else "highest",
        num_threads=int(threads),
        flags=find_unusual(USUAL),
        precisions=_find_precisions(precision),
    )


def _find_precisions(precision: object) -> dict[str, str]:
    """Those of single back ends, where they say more than the one precision of all does."""
    unusual = find_unusual(PRECISIONS)
    if isinstance(precision, str) and all("matmul" in name for name in unusual):
        return {}
    return unusual


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def replay_command(path: Path) -> str:
    """What to type to see it again."""
    return f"tripwire replay {shlex.quote(str(path))} --trust"
