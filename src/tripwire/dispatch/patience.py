"""Patience: which calls run as plain Python, and after how many tries.

Much code settles: on its first call it warns, fills a cache, makes a buffer, puts a hook on
itself. So a call that is refused is tried again a few times, and so is one whose run writes over
what it read.

A trace costs what a hit earns. A callable that has nothing left is traced ever more rarely, until
hits come: calls that no entry takes run as plain Python in between, and the user is told once what
keeps changing.

A checkpointed region is plain from the first call on that was traced in it. A traced call runs
plain code, a later one compiled code, which saves other tensors for its backward;
`torch.utils.checkpoint` runs a region twice, and must find the tensors of the second time where
it found those of the first.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tripwire.reading.effects import Volatile
from tripwire.reading.reads import fingerprint
from tripwire.reading.tensors import PLAIN_TENSORS
from tripwire.rulebook.refusals import Refusal
from tripwire.validity.wires import Mismatch
from tripwire.values.classes import isinstance
from tripwire.values.sameness import PLAIN

if TYPE_CHECKING:
    from tripwire.dispatch.entry import Entry

# A call that was refused this often stays plain.
REFUSALS_ALLOWED = 3
# Traces that a callable has at most before hits must pay for more, one for one.
TRACES_ON_TRUST = 16
# Calls that run plainly between two traces that nothing paid for; twice as many each time.
FIRST_PAUSE = 8
LONGEST_PAUSE = 128
# From this trace on is noted what had changed: most callables never come to it.
NOTED_FROM = 4
# What models do when they first need it: put hooks on themselves, mark tensors.
_MAY_SETTLE = frozenset({"module-changed", "tensor-attribute"})


def key_of(target: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Calls that are refused alike: of one form, in one mode."""
    training = target.training if isinstance(target, nn.Module) else None
    return len(args), tuple(kwargs), training, torch.is_grad_enabled()


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """What tells most calls apart that have entries of their own: sizes, and plain values.

    None under a mode, which would be told of the questions.
    """
    if torch._C._len_torch_function_stack():
        return None
    return tuple([_form(value) for value in (*args, *kwargs.values())])


def _form(value: Any) -> object:
    if type(value) is dict:
        value = tuple(value.values())
    if type(value) is tuple or type(value) is list:
        return tuple([_shape(item) for item in value])
    return value if id(type(value)) in PLAIN else _shape(value)


def _shape(value: Any) -> object:
    return value.shape if id(type(value)) in PLAIN_TENSORS and not value.is_nested else None


class Changes:
    """What had changed when calls were traced again: which source, how often, from what to what."""

    def __init__(self) -> None:
        self.dropped = 0  # entries that went to keep others
        self._counts: Counter[str] = Counter()
        self._latest: dict[str, Mismatch] = {}

    def note(self, change: Mismatch) -> None:
        """One more; of many sources only the first are told apart."""
        source = change.source if len(self._counts) < _SOURCES_KEPT else _MANY
        source = change.source if change.source in self._counts else source
        self._counts[source] += 1
        self._latest[source] = change

    def __str__(self) -> str:
        told = []
        for source, count in self._counts.most_common(_SOURCES_TOLD):
            latest = self._latest[source]
            told.append(
                f"{source} changed {count} times, the last time from {latest.old} to {latest.new}. "
                f"{latest.advice}"
            )
        if self.dropped:
            told.append(
                f"{self.dropped} entries went to keep no more than cache_size: raise it if such "
                "calls come again."
            )
        return " ".join(told)


_SOURCES_KEPT, _SOURCES_TOLD = 32, 3
_MANY = "Something else"


class Patience:
    """With the calls of one callable, by their keys."""

    def __init__(self, name: str, *, fullgraph: bool) -> None:
        self.plain: set[object] = set()  # keys of calls that stay plain, and regions
        self._name = name
        self._fullgraph = fullgraph
        self._refused: Counter[object] = Counter()
        self._unsettled: Counter[object] = Counter()
        self._hits_when_unsettled = 0
        self.changes = Changes()
        self._credit, self._hits_seen = TRACES_ON_TRUST, 0
        self._pause = self._left = 0  # plain calls between traces, and of those still to come

    def stay_plain(self, key: object) -> None:
        """Try no more. With fullgraph every such call raises: none may run plainly unseen."""
        if not self._fullgraph:
            self.plain.add(key)

    def note_volatile(
        self, volatile: tuple[Volatile, ...], key: object, hits: int
    ) -> Refusal | None:
        """A run wrote over what it read. A reason to make no entry, where that doesn't end.

        What settles after a few calls is compiled then, and so is what goes in circles.
        """
        if hits > self._hits_when_unsettled:
            self._unsettled[key] = 0
        self._hits_when_unsettled = hits
        if not self._may_settle(key):
            self.stay_plain(key)
            return _refuse_volatile(volatile[0])
        return None

    def may_trace(self, hits: int) -> bool:
        """Whether a call that no entry takes is worth a trace."""
        self._credit = min(self._credit + hits - self._hits_seen, TRACES_ON_TRUST)
        self._hits_seen = hits
        if self._credit > 0:
            self._credit -= 1
            self._pause = self._left = 0
        elif self._left:
            self._left -= 1
            return False
        else:
            self._left = self._pause = min(2 * self._pause or FIRST_PAUSE, LONGEST_PAUSE)
        return True

    def find_churn(self, traces: int, hits: int) -> Refusal:
        """Why calls run plainly for a while: what changed, and what would keep it open."""
        return Refusal(
            "keeps-changing",
            f"it was traced {traces} times for {hits} hits. {self.changes} Calls that no compiled "
            "code fits are traced ever more rarely, until there are hits again; others run "
            "compiled code as before.",
        )

    def find_final(self, refusal: Refusal, key: object) -> Refusal | None:
        """The refusal that counts; None where the next call may do better."""
        if refusal.slug == "another-thread":  # bad luck; where it lasts, few calls are traced
            return None
        if refusal.slug in _MAY_SETTLE and self._may_settle(key):
            return None
        return refusal

    def _may_settle(self, key: object) -> bool:
        self._unsettled[key] += 1
        return self._unsettled[key] < REFUSALS_ALLOWED

    def note_refused(self, key: object) -> bool:
        """One more such call was refused. Whether they stay plain now."""
        self._refused[key] += 1
        if self._refused[key] < REFUSALS_ALLOWED:
            return False
        self.plain.add(key)
        return True

    def note_settled(self, key: object) -> None:
        """Such a call became an entry, and left what it read as it was."""
        self._unsettled[key] = self._refused[key] = 0

    # --- checkpointed regions ---

    def is_plain_in_region(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether checkpointed code, in which a call was traced, runs as it ran then."""
        for item in tuple(self.plain):
            if isinstance(item, _Region):
                if item.is_over():
                    self.plain.discard(item)
                elif item.is_plain(args, kwargs):
                    return True
        return False

    def note_region(self, frame: Any, entries: Iterable[Entry]) -> None:
        """Calls in a checkpoint's frame are plain from now on, now and when it runs again.

        `entries` are those that did not admit the call that is about to be traced.
        """
        ref = weakref.ref(frame)
        plain = self.plain

        def is_over() -> bool:
            frame = ref()
            return frame is None or frame.forward_completed

        recompute = frame.recompute_fn

        def recompute_plainly(*args: Any) -> None:
            region = _Region(lambda: False, entries)
            plain.add(region)
            try:
                recompute(*args)
            finally:
                plain.discard(region)

        frame.recompute_fn = recompute_plainly
        plain.add(_Region(is_over))


def _refuse_volatile(first: Volatile) -> Refusal:
    return Refusal(
        "volatile-source",
        f"the run reads {first.source} and leaves it changed ({fingerprint(first.before)} → "
        f"{fingerprint(first.after)}), so the next call finds something else. Counters that are "
        "only counted, and tensors, are fine.",
    )


class _Region:
    """Checkpointed code in which a call was traced: that call and all later ones are plain.

    While it runs again, calls before that one are known by the entries that admitted them then.
    """

    def __init__(self, is_over: Callable[[], bool], before: Iterable[Entry] = ()) -> None:
        self.is_over = is_over
        self._before = tuple(before)

    def is_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call in the region runs plainly."""
        if any(entry.standing.admits(args, kwargs) is not None for entry in self._before):
            return False
        self._before = ()
        return True
