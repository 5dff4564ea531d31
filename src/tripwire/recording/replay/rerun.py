"""Rerun: a record is opened without running anything, or run again by somebody who trusts it."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tripwire.errors import CannotReplay, TripwireError
from tripwire.recording.capture.environment import entered
from tripwire.recording.capture.origin import Patch, applied
from tripwire.recording.capture.outcomes import (
    Replayed,
    describe_error,
    describe_result,
    tell_redacted,
)
from tripwire.recording.capture.record import SHOWN
from tripwire.recording.capture.shelf import Shelf
from tripwire.recording.format.file import Record
from tripwire.recording.format.manifest import Manifest, Outcome, encode_json
from tripwire.recording.format.nodes import find_hook_ids
from tripwire.recording.replay.objects import rebuild
from tripwire.recording.replay.rebuild import Rebuilder
from tripwire.values.classes import isinstance

logger = logging.getLogger("tripwire.recording")


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The call of a record, alive."""

    manifest: Manifest
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backend: Any
    generators: dict[str, Any]
    rebuilder: Rebuilder
    patches: list[Patch]

    def prepare(self, backend: str | None = None) -> Callable[[], Any]:
        """What runs it in its environment. `backend`: another one, or "none" to run plainly."""
        call = self._compile(backend)
        return lambda: self._run(call, backend)

    def _run(self, call: Callable[..., Any], backend: str | None) -> Any:
        compiled = self.manifest.compiled
        with (
            _generators_put_back(any(name.startswith("cuda:") for name in self.generators)),
            self.rebuilder.importable(),
            entered(self.manifest.environment),
            applied(self.patches),
        ):
            if compiled is not None and compiled.hit and backend != "none":
                # Compiled code raised: an earlier call made it, from values like these.
                self._set_generators()
                args, kwargs = self._copy_arguments()
                call(*args, **kwargs)
            self._set_generators()
            return call(*self.args, **self.kwargs)

    def _copy_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments. `deepcopy` refuses tensors that autograd made."""
        import torch

        memo: dict[int, Any] = {}
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone().requires_grad_() * 1
        return copy.deepcopy((self.args, self.kwargs), memo)

    def _compile(self, backend: str | None) -> Callable[..., Any]:
        compiled = self.manifest.compiled
        if backend == "none" or (backend is None and compiled is None):
            return self.target
        from tripwire.api import compile

        chosen = backend or self.backend or (compiled.backend if compiled else "eager")
        fullgraph = compiled is not None and compiled.fullgraph
        made: Callable[..., Any] = compile(
            self.target,
            backend=chosen,
            fullgraph=fullgraph,
            name=self.manifest.function.name,
            record_on_error="",  # the record is there already
            check=compiled is not None and compiled.check,
        )
        return made

    def _set_generators(self) -> None:
        if "python" in self.generators:
            random.setstate(self.generators["python"])
        if "numpy" in self.generators:
            import numpy

            numpy.random.set_state(self.generators["numpy"])
        if "torch" in self.generators:
            import torch

            torch.default_generator.set_state(self.generators["torch"])
        for name, state in self.generators.items():
            if name.startswith("cuda:"):
                self._set_cuda_generator(name, state)

    @staticmethod
    def _set_cuda_generator(name: str, state: Any) -> None:
        import torch

        number = int(name.partition(":")[2])
        if torch.cuda.is_available() and number < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, number)


@contextlib.contextmanager
def _generators_put_back(cuda: bool) -> Iterator[None]:
    """Put the generators of this process back after a replay. `cuda`: it draws there, too."""
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            stack.callback(numpy.set_state, numpy.get_state(legacy=False))
        torch = sys.modules.get("torch")
        if torch is not None:
            own = [torch.default_generator]
            if cuda and torch.cuda.is_available():
                torch.cuda.init()
            if torch.cuda.is_initialized():
                own += torch.cuda.default_generators
            for generator in own:
                stack.callback(generator.set_state, generator.get_state())
        yield


def check_trust(trust: bool) -> None:
    """A record's code runs only if somebody says that it may."""
    if not trust:
        raise CannotReplay(
            "A replay runs the code in the record. Look at the record first: "
            "tripwire.load_record(path) and `tripwire show` run nothing of it. If you trust it, "
            "pass trust=True, or --trust.",
            slug="replay-untrusted",
        )


@contextlib.contextmanager
def rebuilding(path: str | os.PathLike[str]) -> Iterator[Rebuilt]:
    """A record's call, built from its own code. Only for files that are trusted."""
    with Record.open(path) as record:
        shelf = Shelf(record.table, record.read, record.manifest.python.magic)
        rebuilder = Rebuilder(record.table, shelf)
        needed = {name: slot for name, slot in record.table.roots.items() if name not in SHOWN}
        table = msgspec.structs.replace(record.table, roots=needed)
        with rebuilder.importable():
            roots: dict[str, Any] = rebuild(table, record.blobs, rebuilder)
        _reserve_hook_ids(find_hook_ids(record.table))
        if "call" not in roots:
            raise CannotReplay("This record holds no call.", slug="replay-no-call")
        yield Rebuilt(
            record.manifest,
            roots["call"],
            tuple(roots.get("args") or ()),
            dict(roots.get("kwargs") or {}),
            roots.get("backend"),
            dict(roots.get("generators") or {}),
            rebuilder,
            list(roots.get("patches") or ()),
        )


def _reserve_hook_ids(taken: Iterable[int]) -> None:
    """Let hooks that the call registers have other ids than those that are recorded."""
    highest = max(taken, default=-1)
    if highest >= 0:
        from torch.utils.hooks import RemovableHandle

        RemovableHandle.next_id = max(RemovableHandle.next_id, highest + 1)


def replay(path: str | os.PathLike[str], *, trust: bool = False, backend: str | None = None) -> Any:
    """Run a record's call again: returns what it returns, raises what it raises.

    trust: must be True: the code in the record runs.
    backend: compile it with another back end; "none" runs it plainly.
    """
    check_trust(trust)
    with rebuilding(path) as call:
        if call.manifest.redacted:
            logger.warning("%s: %s", path, tell_redacted(call.manifest.redacted))
        return call.prepare(backend)()


def find_outcome(path: str | os.PathLike[str]) -> Outcome:
    """Run a trusted record's call, and say how it ended."""
    with rebuilding(path) as call:
        try:
            result = call.prepare()()
        except Exception as error:
            return describe_error(error, call.target)
        return describe_result(result)


# --- in a process that checks a record ---


def _replay_and_tell(path: str) -> Replayed:
    """Replay a record that this user's own process wrote a moment ago."""
    try:
        outcome = find_outcome(path)
    except TripwireError as error:  # it can't even be built
        return Replayed(None, str(error))
    torch = sys.modules.get("torch")
    return Replayed(outcome, "", "" if torch is None else str(torch.__version__))


def print_replayed() -> None:
    """What a process that checks a record runs: the path is its argument."""
    replayed = _replay_and_tell(sys.argv[1])
    sys.stdout.flush()  # what the replay prints comes before; the last line is ours
    sys.stdout.buffer.write(b"\n" + encode_json(replayed))
