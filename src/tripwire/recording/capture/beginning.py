"""Beginning: what a call began with, kept until it is known to succeed.

A record shows a call as it began. Copying everything first would cost more than the call, so
as little as possible is done: a compiled call copies the tensors that its graph is known to
change; a call that runs as Python has its objects taken down before it runs, if its code may
write at all, and its tensors copied just before the first write to each.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from tripwire.reading.torchstate import sample_quickly
from tripwire.recording.capture.draft import RecordDraft
from tripwire.recording.capture.habits import find_written
from tripwire.recording.capture.policy import KEEP_ALL, Key, Policy
from tripwire.recording.capture.tensors import key_of, put_back
from tripwire.recording.format.file import NewRecord
from tripwire.recording.format.manifest import Omission
from tripwire.values.classes import ids_of, isinstance, short_name_of
from tripwire.writes.weakkeys import ExactWeakKeyDictionary

log = logging.getLogger("tripwire.records")


class Beginning:
    """One call, as it began. Told of what the call does by whoever runs it (tracing.state.Kept).

    An armed call makes one, so making it only notes the call; the rest comes when it is needed.
    """

    snapshot: RecordDraft | None = None
    built: NewRecord | None = None
    torch_state: tuple[Any, ...] | None = None
    generators: States | None = None  # torch's own
    draws: Draws | None = None  # from others
    trusted = False  # ran without a snapshot, because its code was known to be harmless
    versions: Versions = ()  # of tensors that it was given
    trouble = ""  # what went wrong while it was kept
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
        self.copies: dict[Key, Copy] = {}

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
            key = key_of(storage)
            if key in self.copies:
                return
            if self.snapshot is None or self.snapshot.blobs.find(key):
                self.copies[key] = Copy(storage, storage.clone())  # type: ignore[no-untyped-call]

    def before_draw(self, generators: Iterable[torch.Generator]) -> None:
        if self.generators is None:
            try:
                self.generators = States(generators)
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

    def find_own_mode(self) -> contextlib.AbstractContextManager[None] | None:
        mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
        return _left(mode) if isinstance(mode, _Keeping) else None

    def _note_trouble(self, error: Exception) -> None:
        """The call goes on, whatever stands in the way of its record."""
        if not self.trouble:
            log.warning("The values that a call began with can't all be kept.", exc_info=error)
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
        """Whether what was taken down is another now. Only for a call that succeeded."""
        if self.copies or self._find_changed():
            return True
        assert self.snapshot is not None
        return not self.snapshot.is_like(self._take_down())

    def _find_changed(self) -> list[torch.Tensor]:
        """Tensors that were written to, though no call told of it."""
        with torch._C.DisableTorchFunction():
            kept = {copy.storage._cdata for copy in self.copies.values()}
            changed = [t for t, version in self.versions if t._version != version]
            return [t for t in changed if t.untyped_storage()._cdata not in kept]

    def finish(self) -> RecordDraft:
        """The call as it began, now that it is over."""
        if self.torch_state is None:
            self.torch_state = sample_quickly()  # compiled code leaves it as it was
        if self.snapshot is None:
            with contextlib.nullcontext() if self.generators is None else self.generators.back():
                self.snapshot = self._take_down()
        put_back(self.snapshot.blobs, {k: copy.copied for k, copy in self.copies.items()})
        return self.snapshot

    def find_drawn(self) -> dict[str, object]:
        """States at the beginning of the generators that the call drew from."""
        found: dict[str, object] = {}
        if self.generators is not None:
            found.update(self.generators.find_moved())
        if self.draws is not None:
            found.update(self.draws.find_moved())
        return found

    def omissions(self) -> Iterator[Omission]:
        """What is in the record as it was when the call ended."""
        if self.late:
            yield Omission(
                "values at the beginning",
                "nothing recorded the call when it began: what it changed before it failed is "
                "here as it left it",
            )
        if self.trouble:
            yield Omission(
                "values at the beginning",
                f"they couldn't all be kept ({self.trouble}): what the call changed before it "
                "failed may be here as it left it",
            )
        if self.trusted and self.snapshot is not None and not self.snapshot.habits().are_harmless:
            yield Omission(
                "values at the beginning",
                "something that the call uses was replaced since an earlier call, and may write: "
                "what it changed before it failed is here as it left it",
            )
        elif changed := self._find_changed():
            yield Omission(
                "values at the beginning",
                f"{len(changed)} tensors that the call was given were changed in a way that "
                "can't be seen: they are here as it left them",
            )

    def _take_down(self) -> RecordDraft:
        draft = RecordDraft(self.policy)
        draft.add("call", self.target)
        draft.add("args", self.args)
        draft.add("kwargs", self.kwargs)
        return draft


@dataclass(frozen=True, slots=True)
class Copy:
    """A storage's bytes from before a write. The storage is held, so that its number is its own."""

    storage: torch.UntypedStorage
    copied: torch.UntypedStorage


Versions = Sequence[tuple[torch.Tensor, int]]


def _versions_of(values: Iterable[object]) -> Versions:
    """How often tensors were written to; those of inference mode don't know."""
    with torch._C.DisableTorchFunction():
        tensors = [cast("torch.Tensor", v) for v in values if id(type(v)) in _OF_TORCH]
        return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


_OF_TORCH = ids_of(torch.Tensor, torch.nn.Parameter)


# --- generators ---


class States:
    """States of torch's default generators, and of others that a graph draws from."""

    __slots__ = ("_default", "_own")

    def __init__(self, own: Iterable[torch.Generator]) -> None:
        self._default = [("torch", _CPU, _CPU.get_state())]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._default += _cuda_states()
        self._own = [(g, g.get_state()) for g in own] if own else []

    def find_moved(self) -> Iterator[tuple[str, object]]:
        for name, generator, state in self._default:
            if not torch.equal(generator.get_state(), state):
                yield name, state

    @contextlib.contextmanager
    def back(self) -> Iterator[None]:
        """The generators that belong to the user as they were, for a while."""
        now = [(g, g.get_state()) for g, _ in self._own]
        try:
            for generator, state in self._own:
                generator.set_state(state)
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)


_CPU = torch.default_generator


def _cuda_states() -> list[tuple[str, torch.Generator, torch.Tensor]]:
    if torch.cuda.is_current_stream_capturing():  # nobody may ask now
        return []
    found = enumerate(torch.cuda.default_generators)
    return [(f"cuda:{number}", generator, generator.get_state()) for number, generator in found]


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
    """Without the mode on top, which compiled code doesn't need: it tells of its writes itself."""
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        mode.__enter__()  # type: ignore[no-untyped-call]


# --- what is known of callables ---


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found of a callable, and the objects that it was found with."""

    harmless: bool
    objects: ExactWeakKeyDictionary[bool]


_known: ExactWeakKeyDictionary[_Known] = ExactWeakKeyDictionary()
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
            "It can't be told whether a function writes, so each of its calls is watched.",
            exc_info=True,
        )
        harmless = False
    if known is None or not harmless:
        known = _Known(harmless, ExactWeakKeyDictionary())
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
