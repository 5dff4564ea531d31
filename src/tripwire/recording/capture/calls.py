"""Calls: what a call began with is kept until the call succeeds; if it fails, it is recorded.

A record shows a call as it began. Copying everything first would cost more than the call, so
as little as possible is done. A compiled call copies the tensors that its graph is known to change.
If a call runs as Python and its code may write at all, its objects are captured before it runs, and
each tensor is copied just before the first write to it.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from tripwire.errors import BadOption
from tripwire.reading.tensors import Copies, Copy, GeneratorStates, memory_of
from tripwire.reading.torchstate import sample_quickly
from tripwire.recording.capture.draft import RecordDraft
from tripwire.recording.capture.habits import find_written
from tripwire.recording.capture.origin import KEEP_ALL, Policy, find_patches
from tripwire.recording.capture.outcomes import (
    describe_environment,
    find_settings,
    fresh_packages,
    place_of,
)
from tripwire.recording.capture.record import ExecutionRecorder, take_down
from tripwire.recording.capture.tensors import put_back
from tripwire.recording.format.file import NewRecord
from tripwire.recording.format.manifest import Compiled, Manifest, Omission, Outcome, Raised, Where
from tripwire.values.classes import ids_of, isinstance, short_name_of
from tripwire.writes.subscriptions import ExactWeakKeyDictionary

log = logging.getLogger("tripwire.records")


class Beginning:
    """One call, as it began. Whoever runs it reports what it does (tracing.state.CallKeeper).

    Every call that may be recorded makes one. So making it only notes the call; the rest is done
    when it is needed.
    """

    snapshot: RecordDraft | None = None
    built: NewRecord | None = None
    torch_state: tuple[Any, ...] | None = None
    generators: GeneratorStates | None = None  # torch's own
    draws: Draws | None = None  # from others
    trusted = False  # ran without a snapshot, because its code was known to be harmless
    versions: Versions = ()  # of tensors that it was given
    trouble = ""  # what went wrong while it was kept
    code_error: BaseException | None = None  # of compiled code, where the plain call returned
    shown: Callable[..., Any] | None = None  # whose place a record names, if not the target's
    late = False  # nobody watched: all that is known is how it was when it had failed

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Policy = KEEP_ALL,
    ) -> None:
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.policy = policy
        self.copies: Copies = {}

    # --- while it runs ---

    def before_run(self) -> None:
        if self.snapshot is None and not self.trouble:
            try:
                self._note_state()
                snapshot = self._take_down()
                snapshot.blobs.keep()
                self.draws = Draws()
                self.versions = _versions_of(snapshot.tensors())
                self.snapshot = snapshot
            except Exception as error:
                self._note_trouble(error)

    def before_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.trouble:
            return
        try:
            for tensor in find_written(func, args, kwargs):
                self._keep(tensor)
            if self.snapshot is not None and getattr(func, "__name__", "") == "backward":
                for tensor in self.snapshot.tensors():  # gradients are added to in place
                    if tensor.is_leaf and tensor.grad is not None:
                        self._keep(tensor.grad)
        except Exception as error:
            self._note_trouble(error)

    def before_write(self, tensor: torch.Tensor) -> None:
        try:
            self._keep(tensor)
        except Exception as error:
            self._note_trouble(error)

    def _keep(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                return
            storage = tensor.untyped_storage()
            memory = memory_of(storage)
            if memory in self.copies:
                return
            if self.snapshot is None or self.snapshot.blobs.find(memory):
                self.copies[memory] = Copy.of(storage)

    def before_draw(self, generators: Iterable[torch.Generator]) -> None:
        if self.generators is None:
            try:
                self.generators = GeneratorStates(generators)
            except Exception as error:
                self._note_trouble(error)

    def run_plainly(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.snapshot is None and _is_harmless(fn, args, kwargs):
            self.trusted = True
            self._note_state()
            self.versions = _versions_of((*args, *kwargs.values()) if kwargs else args)
            return fn(*args, **kwargs)
        self.before_run()
        if self.snapshot is None:
            return fn(*args, **kwargs)
        with _Keeping(self):
            return fn(*args, **kwargs)

    def keeping(self) -> TorchFunctionMode:
        """A mode that sees writes to tensors, for code that runs unobserved."""
        return _Keeping(self)

    def note_code_failed(self, error: BaseException) -> None:
        self.code_error = error

    def find_own_mode(self) -> contextlib.AbstractContextManager[None] | None:
        mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
        return _left(mode) if isinstance(mode, _Keeping) else None

    def is_for_failures(self) -> bool:
        return True

    def _note_trouble(self, error: Exception) -> None:
        """Note why values couldn't be kept. The call goes on."""
        if not self.trouble:
            log.warning(
                "tripwire can't keep all the values that a call began with.", exc_info=error
            )
        self.trouble = f"{short_name_of(type(error))}: {error}"

    def _note_state(self) -> None:
        if self.torch_state is None:
            self.torch_state = sample_quickly()
        self.before_draw(())

    # --- when it is over ---

    def succeed(self) -> None:
        """The call returned: no record is needed, but it showed whether its code writes."""
        if self.snapshot is not None:
            _remember(self, self.snapshot)

    def has_written(self) -> bool:
        """Whether what was taken down has changed. Only for a call that succeeded."""
        if self.copies or self._find_changed():
            return True
        assert self.snapshot is not None
        return not self.snapshot.is_like(self._take_down())

    def _find_changed(self) -> list[torch.Tensor]:
        """Tensors that were written to, but not by a torch call that was seen."""
        with torch._C.DisableTorchFunction():
            kept = {copy.storage._cdata for copy in self.copies.values()}
            changed = [t for t, version in self.versions if t._version != version]
            return [t for t in changed if t.untyped_storage()._cdata not in kept]

    def build(
        self, name: str, outcome: Outcome, compiled: Compiled | None, backend: object
    ) -> NewRecord:
        """Its record, now that it is over; made once, though writing it may fail."""
        if self.built is None:
            draft = self._finish()
            recorder = ExecutionRecorder.of_call(self.target, self.args, self.kwargs, self.shown)
            record = recorder.get_record()
            record.generators = self._find_drawn()
            record.backend = backend
            record.patches = find_patches(draft.met)
            raised = name_of_error(outcome)
            record.manifest = Manifest(
                packages=fresh_packages(),
                function=Where(name, *place_of(self.shown or self.target)),
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                compiled=compiled,
                outcome=outcome,
                environment=describe_environment(self.torch_state or sample_quickly()),
                omissions=(*self._omissions(), *find_settings(raised, draft.find_names())),
            )
            self.built = record.build(draft)
        return self.built

    def _finish(self) -> RecordDraft:
        """The draft of a record of the call as it began."""
        if self.torch_state is None:
            self.torch_state = sample_quickly()  # compiled code leaves it as it was
        if self.snapshot is None:
            with contextlib.ExitStack() as stack:
                if self.generators is not None:
                    stack.enter_context(self.generators.as_before(all_of_them=False))
                self.snapshot = self._take_down()
        put_back(self.snapshot.blobs, self.copies)
        return self.snapshot

    def _find_drawn(self) -> dict[str, object]:
        """States at the beginning of the generators that the call drew from."""
        found: dict[str, object] = {}
        for generator, state in self.generators.find_moved() if self.generators else ():
            name = _name_of_default(generator)
            if name is not None:
                found[name] = state
        if self.draws is not None:
            found.update(self.draws.find_moved())
        return found

    def _omissions(self) -> Iterator[Omission]:
        """Why values in the record may be those after the call instead of those before it."""
        if self.late:
            yield Omission(
                _VALUES,
                "the call was not being recorded when it began, so what it changed before it "
                "failed is recorded as changed",
            )
        if self.trouble:
            yield Omission(
                _VALUES,
                f"not all of them could be kept ({self.trouble}), so what the call changed before "
                "it failed may be recorded as changed",
            )
        if self.trusted and self.snapshot is not None and not self.snapshot.habits().are_harmless:
            yield Omission(
                _VALUES,
                "something that the call uses was replaced since an earlier call and may write, so "
                "what it changed before it failed is recorded as changed",
            )
        elif changed := self._find_changed():
            yield Omission(
                _VALUES,
                f"{len(changed)} tensors that the call was given were changed, but not by a torch "
                "call that tripwire saw, so they are recorded as changed",
            )

    def _take_down(self) -> RecordDraft:
        return take_down(self.target, self.args, self.kwargs, self.policy)


_VALUES = "values at the beginning"  # what an omission is about
Versions = Sequence[tuple[torch.Tensor, int]]


def _versions_of(values: Iterable[object]) -> Versions:
    """How often each tensor was written to. Tensors of inference mode don't count writes."""
    with torch._C.DisableTorchFunction():
        tensors = [cast("torch.Tensor", v) for v in values if id(type(v)) in _OF_TORCH]
        return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


_OF_TORCH = ids_of(torch.Tensor, torch.nn.Parameter)


# --- generators ---


def _name_of_default(generator: torch.Generator) -> str | None:
    """What a record calls one of torch's default generators. Others are in it as objects."""
    if generator is torch.default_generator:
        return "torch"
    if any(generator is known for known in torch.cuda.default_generators):
        return f"cuda:{generator.device.index}"
    return None


@dataclass(frozen=True, slots=True)
class Draws:
    """States of the generators that aren't torch's."""

    python: object = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=lambda: _numpy_state())

    def find_moved(self) -> Iterator[tuple[str, object]]:
        if self.python != random.getstate():
            yield "python", self.python
        now = _numpy_state()
        if self.numpy is not None and not _is_same_state(self.numpy, now):
            yield "numpy", self.numpy


def _numpy_state() -> Any:
    """None without NumPy. Where it is, `numpy.random` may be loaded by its first use."""
    numpy = sys.modules.get("numpy")
    random_ = getattr(numpy, "random", None)
    get_state = getattr(random_, "get_state", None)  # another thread may be importing it
    return None if get_state is None else get_state(legacy=False)


def _is_same_state(before: dict[str, Any], now: dict[str, Any]) -> bool:
    inner, other = before["state"], now["state"]
    return (before["has_gauss"], before["gauss"]) == (now["has_gauss"], now["gauss"]) and (
        inner["pos"] == other["pos"] and bytes(inner["key"]) == bytes(other["key"])
    )


# --- watching ---


class _Keeping(TorchFunctionMode):
    """Sees writes to tensors while a callable runs unobserved."""

    def __init__(self, beginning: Beginning) -> None:
        super().__init__()
        self._beginning = beginning

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._beginning.before_call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _left(mode: TorchFunctionMode) -> Iterator[None]:
    """Leave the mode on top for a while: compiled code tells of its writes itself."""
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        mode.__enter__()  # type: ignore[no-untyped-call]


# --- what is known of callables ---


@dataclass(frozen=True, slots=True)
class _KnownCallable:
    """What was found of a callable, and the objects that it was found with."""

    harmless: bool
    objects: ExactWeakKeyDictionary[bool]


_known: ExactWeakKeyDictionary[_KnownCallable] = ExactWeakKeyDictionary()
_PLAIN = ids_of(
    *(torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size),
    *(int, float, complex, bool, str, bytes, type(None)),
)


def _remember(beginning: Beginning, snapshot: RecordDraft) -> None:
    target = beginning.target
    key = getattr(target, "__func__", target)  # bound methods are made anew for each call
    known = _known.get(key)
    if known is not None and not known.harmless:
        return
    try:
        harmless = snapshot.habits().are_harmless
        if known is None:  # what the code looks like isn't all there is: see what it did
            harmless = harmless and not beginning.has_written()
    except Exception:  # a user's object or policy raised: the call has succeeded all the same
        log.warning(
            "tripwire can't tell whether a function writes, so it watches each of its calls.",
            exc_info=True,
        )
        harmless = False
    if known is None or not harmless:
        known = _KnownCallable(harmless, ExactWeakKeyDictionary())
    with contextlib.suppress(TypeError):  # no weak references: its calls are taken down each time
        _known[key] = known
        for value in _other_parts(target, beginning.args, beginning.kwargs):
            known.objects[value] = True


def _is_harmless(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether earlier calls with the same objects showed code that changes nothing."""
    known = _known.get(getattr(fn, "__func__", fn))
    if known is None or not known.harmless:
        return False
    if not kwargs and _PLAIN.issuperset(map(id, map(type, args))) and type(fn) is FunctionType:
        return True
    return all(value in known.objects for value in _other_parts(fn, args, kwargs))


def _other_parts(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[object]:
    """What a call is given that may bring code of its own."""
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        yield owner
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if id(kind) in _PLAIN:
            continue
        if kind is list or kind is tuple:
            yield from (item for item in value if id(type(item)) not in _PLAIN)
        else:
            yield value


# --- its record ---


@dataclass(frozen=True, slots=True)
class Writing:
    """Where and how records are written."""

    path: Path  # a file, or a folder in which each gets a name of its own
    policy: Policy = KEEP_ALL
    check: bool = True  # replay what was written, and stamp the verdict into it

    @staticmethod
    def to(path: str | os.PathLike[str], policy: Policy = KEEP_ALL, check: bool = True) -> Writing:
        """Records at `path`; checked, unless the environment says TRIPWIRE_RECORD_CHECK=0."""
        if not isinstance(path, str | os.PathLike):
            example = '; as a decorator, @tripwire.record_on_error("records")'
            raise BadOption(
                f"path is {path!r}; it must be a file that ends in .rec, or a folder"
                f"{example if callable(path) else ''}.",
                slug="bad-option",
            )
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


def name_of_error(outcome: Outcome) -> str:
    """The class of what a call raised; empty where it returned."""
    return outcome.type if isinstance(outcome, Raised) else ""
