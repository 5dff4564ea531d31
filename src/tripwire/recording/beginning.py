"""Beginning: what a call began with, kept until it is known to succeed.

A record shows a call as it began. Copying everything first would cost more than the call, so
as little as possible is done: a compiled call copies the tensors that its graph is known to
change; a call that runs as Python has its objects taken down before it runs, if its code may
write at all, and its tensors copied just before the first write to each.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tripwire.recording.draft import RecordDraft
from tripwire.recording.habits import Habits, find_written
from tripwire.recording.kept import Key
from tripwire.recording.policy import Omission, Policy
from tripwire.recording.tensors import key_of, put_back
from tripwire.tracing.torchstate import sample_quickly


@dataclass(frozen=True, slots=True)
class Call:
    """What was called, and with what."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Beginning:
    """One call, as it began. Told of what the call does by whoever runs it (tracing.state.Kept)."""

    __slots__ = (
        "call",
        "copies",
        "draws",
        "generator",
        "policy",
        "snapshot",
        "torch_state",
        "versions",
    )

    def __init__(self, call: Call, policy: Policy) -> None:
        self.call = call
        self.policy = policy
        self.torch_state = sample_quickly()
        self.generator = torch.default_generator.get_state()
        self.snapshot: RecordDraft | None = None
        self.draws: Draws | None = None
        self.copies: dict[Key, Copy] = {}
        self.versions: list[tuple[torch.Tensor, int]] = []

    def before_run(self) -> None:
        if self.snapshot is None:
            self.snapshot = self._take_down()
            self.snapshot.blobs.keep()
            self.draws = Draws()
            _remember(self.call.target, self.snapshot.habits())

    def before_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for tensor in find_written(func, args, kwargs):
            self.before_write(tensor)

    def before_write(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            key = key_of(storage)
            if key in self.copies:
                return
            if self.snapshot is None or self.snapshot.blobs.find(key):
                self.copies[key] = Copy(storage, storage.clone())  # type: ignore[no-untyped-call]

    def run_plainly(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        habits = _known_habits(fn)
        if habits is not None and habits.are_harmless:
            self.versions = [(t, t._version) for t in args if isinstance(t, torch.Tensor)]
            return fn(*args, **kwargs)
        self.before_run()
        with self.keeping():
            return fn(*args, **kwargs)

    def keeping(self) -> TorchFunctionMode:
        """A mode that sees writes to tensors, for code that runs unobserved."""
        return _Keeping(self)

    def finish(self) -> RecordDraft:
        """The call as it began, now that it is over."""
        if self.snapshot is None:
            self.snapshot = self._take_down()
        put_back(self.snapshot.blobs, {k: copy.copied for k, copy in self.copies.items()})
        return self.snapshot

    def omissions(self) -> Iterator[Omission]:
        """What is in the record as it was when the call ended."""
        for number, (tensor, version) in enumerate(self.versions):
            if tensor._version != version and key_of(tensor.untyped_storage()) not in self.copies:
                yield Omission(
                    f"args, tensor {number}",
                    "the call changed it in place before it failed, and its code didn't show "
                    "that it would: these are the values after",
                )

    def _take_down(self) -> RecordDraft:
        draft = RecordDraft(self.policy)
        draft.add("call", self.call.target)
        draft.add("args", self.call.args)
        draft.add("kwargs", self.call.kwargs)
        return draft


@dataclass(frozen=True, slots=True)
class Copy:
    """A storage's bytes from before a write. The storage is held, so that its number is its own."""

    storage: torch.UntypedStorage
    copied: torch.UntypedStorage


@dataclass(frozen=True, slots=True)
class Draws:
    """States of the generators that aren't torch's."""

    python: object = field(default_factory=random.getstate)
    numpy: object = field(default_factory=lambda: _numpy_state())


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state(legacy=False)


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


# --- what is known of callables ---

_habits: weakref.WeakKeyDictionary[Any, Habits] = weakref.WeakKeyDictionary()


def _remember(target: Any, habits: Habits) -> None:
    with contextlib.suppress(TypeError):  # or its calls are taken down each time
        _habits[_key(target)] = habits


def _known_habits(target: Any) -> Habits | None:
    try:
        return _habits.get(_key(target))
    except TypeError:
        return None


def _key(target: Any) -> Any:
    return getattr(target, "__func__", target)  # bound methods are made anew for each call
