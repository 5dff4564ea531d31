"""Patience: which calls are worth a trace. Giving up is never for good.

Much code settles: on its first call it warns, fills a cache, makes a buffer, puts a hook on itself.
So a refused call is tried again a few times, and so is one whose run changes what it read. If it is
still refused, such calls rest: they run as plain Python for a while. If the reason passes (another
thread wrote, a profiler ran), they rest for as long as the trace took; otherwise for a minute, then
two, and an hour at most.

Hits pay for traces. Each source that changes may cost as many traces as entries are kept. One more
is allowed when an entry has been used enough, and after enough time: in the long run at most a
tenth of the time goes into traces without hits. Calls in between run as plain Python, unless an
entry fits them. The user is told once what keeps changing.

The modules of a refused call that it called are compiled on their own (`Inner`).

In checkpointed code, once a call has run as plain Python, that call and all later ones do
(`Regions`). `torch.utils.checkpoint` runs a region twice, and the second run must save the same
tensors as the first. A call that no entry fits runs plain code, traced or not; in the second run it
might be a hit, and compiled code saves other tensors for its backward.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from time import monotonic as now
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from torch import nn

from tripwire.reading.effects import Volatile
from tripwire.reading.kinds import ABSENT
from tripwire.reading.names import fingerprint
from tripwire.reading.tensors import PLAIN_TENSORS
from tripwire.rulebook.refusals import Mismatch, Refusal
from tripwire.values.classes import is_exactly, isinstance, module_of, short_name_of
from tripwire.values.identity import PLAIN

if TYPE_CHECKING:
    from tripwire.dispatch.entry import Entry


# A call that was refused this often rests.
REFUSALS_ALLOWED = 3
# A call that fills or lengthens what it reads, so often in a row; and one that replaces it: the
# first steps of a method that looks back at several, each of which differs.
STEPS_ALLOWED, CHANGES_ALLOWED = 16, 8
# What a trace takes, times this, passes until the next that nothing paid for.
SHARE = 10
# How long calls rest, in seconds: where the reason is the moment, at most; else at first, at most.
LONGEST_MOMENT, FIRST_REST, LONGEST_REST = 60.0, 60.0, 3600.0
# An entry with so many hits was worth its trace.
HITS_THAT_PAY = 16
# Traces of a callable, whatever changes, as a multiple of the entries that it keeps.
ALL_SOURCES = 4
# What models do when they first need it: put hooks on themselves, mark tensors.
_MAY_SETTLE = frozenset({"module-changed", "tensor-attribute"})
# Reasons that pass by themselves,
_OF_THE_MOMENT = frozenset({"another-thread", "not-observed", "no-monitoring-tool"})
# and those that another thread may have been: it replaced, wrote or set something meanwhile.
_OF_OTHERS = _MAY_SETTLE | {
    "unknown-origin",
    "unseen-write",
    "tensor-reshaped",
    "tensor-memory",
    "library-changed",
    "process-state",
    "torch-state-changed",
    "generator-reseeded",
    "hidden-state",
}


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
            what = "changes" if source != _MANY else "changes of other things"
            told.append(f"{latest}, the latest of {count} {what}. {latest.advice}")
        if self.dropped:
            told.append(
                f"{self.dropped} entries were dropped to stay within cache_size: raise it if their "
                "calls come back."
            )
        return " ".join(told)


_SOURCES_KEPT, _SOURCES_TOLD = 32, 3
# Values that are the same ones if they are equal; a list is compared by its elements.
_KNOWN_AGAIN = (bool, int, float, str, type(None), list)
_MANY = "other things"


class _Trust:
    """How many traces one source that changes may still cost."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = float(most)
        self._seconds = 0.0  # until there is one more
        self._at = 0.0  # when that was last looked at

    def find_left(self) -> float:
        """Traces that are left by now."""
        at = now()
        if self._seconds:
            self._left = min(self._most, self._left + (at - self._at) / self._seconds)
        self._at = at
        return self._left

    def spend(self, took: float) -> None:
        """One more, which took so many seconds."""
        self.find_left()
        self._seconds = max(SHARE * took, 1e-6)
        self._left -= 1

    def give_back(self) -> None:
        """Allow one more: an entry was worth its trace."""
        self._left = min(self._most, self._left + 1)


class _Rest(Struct):
    """How long refused calls run as plain Python."""

    times: int = 0
    until: float = 0.0
    refusal: Refusal | None = None


class Patience:
    """Decides for the calls of one callable, by their keys and by what changed."""

    def __init__(self, name: str, *, fullgraph: bool, cache_size: int) -> None:
        self._name = name
        self._fullgraph = fullgraph
        self._cache_size = cache_size
        self._rests: dict[object, _Rest] = {}
        self._unsettled: Counter[object] = Counter()
        self._hits_when_unsettled = 0
        self._emptied: set[str] = set()  # where runs put something, since nothing was there
        self.changes = Changes()
        self._trust: dict[str, _Trust] = {}
        self._in_all = _Trust(ALL_SOURCES * cache_size)

    # --- calls that are refused ---

    def is_resting(self, key: object) -> bool:
        """Whether such calls run as plain Python for now."""
        rest = self._rests.get(key)
        return rest is not None and now() < rest.until

    def find_rests(self) -> list[tuple[Refusal, float]]:
        """Why calls rest, and for how many seconds more."""
        at = now()
        found = [(rest.refusal, rest.until - at) for rest in tuple(self._rests.values())]
        return [(refusal, left) for refusal, left in found if refusal is not None and left > 0]

    def note_refused(self, key: object, refusal: Refusal, took: float, is_passing: bool) -> bool:
        """One more such call was refused. Whether they rest now.

        is_passing: the reason is the moment's.
        """
        rest = self._rests.setdefault(key, _Rest())
        rest.times += 1
        if rest.times < REFUSALS_ALLOWED and refusal.slug != "volatile-source":  # tried already
            return False
        if is_passing:
            # Three times as long: 12 and 23% of the calls of tests/laws/server.py hit; this long:
            # 48 and 53%. One thread of many is the slower for it.
            self._lay_to_rest(rest, refusal, min(took, LONGEST_MOMENT))
        else:
            longer = 2.0 ** min(max(rest.times - REFUSALS_ALLOWED, 0), 10)
            self._lay_to_rest(rest, refusal, min(FIRST_REST * longer, LONGEST_REST))
        return True

    def stay_plain(self, key: object, refusal: Refusal) -> None:
        """Such calls rest at once. With fullgraph each raises: none may run plainly unseen."""
        if not self._fullgraph:
            rest = self._rests.setdefault(key, _Rest())
            rest.times = max(rest.times, REFUSALS_ALLOWED - 1)
            self.note_refused(key, refusal, 0.0, is_passing=False)

    def _lay_to_rest(self, rest: _Rest, refusal: Refusal, seconds: float) -> None:
        rest.refusal, rest.until = refusal, now() + seconds

    def note_settled(self, key: object) -> None:
        """Such a call became an entry, and left what it read as it was."""
        self._unsettled[key] = 0
        self._rests.pop(key, None)

    def is_passing(self, refusal: Refusal, was_alone: bool) -> bool:
        """Whether a refusal depends on the moment, and nobody needs to be told."""
        if refusal.slug in _OF_THE_MOMENT:
            return True
        return not was_alone and refusal.slug in _OF_OTHERS

    def may_settle(self, refusal: Refusal, key: object) -> bool:
        """Whether the next call may do better."""
        return refusal.slug in _MAY_SETTLE and self._may_settle(key)

    def note_volatile(
        self, volatile: tuple[Volatile, ...], key: object, hits: int
    ) -> Refusal | None:
        """A run wrote over what it read. A reason to make no entry, where that doesn't end.

        What settles after a few calls is compiled then, and so is what goes in circles. A memo
        that is filled, or a window that grows, settles later.
        """
        if hits > self._hits_when_unsettled:
            self._unsettled[key] = 0
        self._hits_when_unsettled = hits
        allowed = CHANGES_ALLOWED if all(one.repeated for one in volatile) else REFUSALS_ALLOWED
        if all(map(_moves_on, volatile)):
            allowed = STEPS_ALLOWED
        return None if self._may_settle(key, allowed) else _refuse_volatile(volatile[0])

    def may_return(self, volatile: tuple[Volatile, ...]) -> bool:
        """Whether what was written over may come back, be known again, and be written over.

        That nothing is there comes back where it did before: most memos are filled once.
        """
        empty = {str(one.source) for one in volatile if one.before is ABSENT}
        came_back = empty <= self._emptied
        if len(self._emptied) < _SOURCES_KEPT:
            self._emptied |= empty
        return came_back and all(
            one.repeated and (one.before is ABSENT or is_exactly(one.before, *_KNOWN_AGAIN))
            for one in volatile
        )

    def _may_settle(self, key: object, allowed: int = REFUSALS_ALLOWED) -> bool:
        self._unsettled[key] += 1
        return self._unsettled[key] < allowed

    # --- what changes ---

    def may_trace(self, sources: Sequence[str], entries: Iterable[Entry]) -> bool:
        """Whether a call that no entry takes, as these sources changed, is worth a trace."""
        self.settle(entries)
        return all(trust.find_left() >= 1 for trust in self._find_trust(sources))

    def spend(self, sources: Sequence[str], took: float) -> None:
        """It was traced, which took so many seconds."""
        for trust in self._find_trust(sources):
            trust.spend(took)

    def settle(self, entries: Iterable[Entry]) -> None:
        """Entries that were used give back what they cost."""
        for entry in entries:
            if entry.because is not None and entry.hits >= HITS_THAT_PAY:
                for trust in self._find_trust(entry.because):
                    trust.give_back()
                entry.because = None

    def _find_trust(self, sources: Sequence[str]) -> list[_Trust]:
        found = {id(self._in_all): self._in_all}
        for source in sources:
            name = source if source in self._trust or len(self._trust) < _SOURCES_KEPT else _MANY
            trust = self._trust.setdefault(name, _Trust(self._cache_size))
            found[id(trust)] = trust
        return list(found.values())

    def find_churn(self, traces: int, hits: int) -> Refusal:
        """Why calls run plainly for a while: what changed, and what would keep it open."""
        return Refusal(
            "keeps-changing",
            f"it was traced {traces} times, and {hits} calls ran compiled code. {self.changes} "
            "From now on only a few of the calls that no compiled code fits are traced; the rest "
            "of them run as plain Python. Calls that fit still run compiled code.",
        )


def _moves_on(volatile: Volatile) -> bool:
    """Whether something was put where nothing was, or at the end of a list."""
    before, after = volatile.before, volatile.after
    if type(before) is list and type(after) is list:
        return len(after) > len(before)
    return before is ABSENT


def _refuse_volatile(first: Volatile) -> Refusal:
    return Refusal(
        "volatile-source",
        f"the call reads {first.source} and changes it ({fingerprint(first.before)} → "
        f"{fingerprint(first.after)}), so compiled code would not fit the next call. Keep it in a "
        "tensor, or change it outside the compiled callable. Counters that are only counted are "
        "fine.",
    )


# --- checkpointed regions ---


class Regions:
    """The checkpointed regions in which calls of one callable run as plain Python."""

    def __init__(self) -> None:
        self.open: set[_PlainRegion] = set()

    def is_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether checkpointed code of this thread runs as it ran before."""
        me = get_ident()
        for region in tuple(self.open):
            if region.is_over():
                self.open.discard(region)
            elif region.thread == me and region.is_plain(args, kwargs):
                return True
        return False

    def note(self, frame: Any, entries: Iterable[Entry]) -> None:
        """Calls in a checkpoint's frame are plain from now on, now and when it runs again.

        `entries` are those that did not admit the call that is about to run plainly.
        """
        ref = weakref.ref(frame)
        regions = self.open

        def is_over() -> bool:
            frame = ref()
            return frame is None or frame.forward_completed

        recompute = frame.recompute_fn

        def recompute_plainly(*args: Any) -> None:
            region = _PlainRegion(lambda: False, entries)
            regions.add(region)
            try:
                recompute(*args)
            finally:
                regions.discard(region)

        frame.recompute_fn = recompute_plainly
        regions.add(_PlainRegion(is_over))


class _PlainRegion:
    """Checkpointed code in which a call ran plainly: that call and all later ones are plain.

    While it runs again, calls before that one are recognised by the entries that admitted them.
    """

    def __init__(self, is_over: Callable[[], bool], before: Iterable[Entry] = ()) -> None:
        self.is_over = is_over
        self.thread = get_ident()
        self._before = tuple(before)

    def is_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call in the region runs plainly."""
        if any(entry.standing.admits(args, kwargs) is not None for entry in self._before):
            return False
        self._before = ()
        return True


def refuse_over_limit(limit: int | None) -> Refusal:
    """The refusal of calls after the last entry that recompile_limit allows."""
    return Refusal(
        "recompile-limit",
        f"{limit} entries were compiled, and recompile_limit allows no more. Calls that fit one of "
        "them still run it; others run as plain Python, or raise with fullgraph=True. Raise "
        "recompile_limit, or leave it out.",
    )


class Inner:
    """The modules that are compiled inside one callable.

    `_compiled_call_impl` is torch's own place for a compiled module; copies and pickles leave it
    out.
    """

    def __init__(self) -> None:
        self._compiled: list[tuple[weakref.ref[nn.Module], Callable[..., Any]]] = []

    def __len__(self) -> int:
        return len(self._compiled)

    def list(self) -> tuple[Callable[..., Any], ...]:
        """What is called for each of them."""
        return tuple(compiled for _, compiled in self._compiled)

    def compile(
        self,
        modules: Iterable[nn.Module],
        build: Callable[[Callable[..., Any], str], Callable[..., Any]],
    ) -> None:
        """Compile those that have parts, and that nobody compiled: `build` gets call and name."""
        for module in modules:
            if module_of(type(module)) == "torch._dynamo.eval_frame":  # what torch.compile made
                continue
            if module._compiled_call_impl is None and next(module.children(), None) is not None:
                compiled = build(module._call_impl, short_name_of(type(module)))
                module._compiled_call_impl = compiled
                self._compiled.append((weakref.ref(module), compiled))

    def leave(self) -> None:
        """Let the modules be plain again."""
        for ref, compiled in self._compiled:
            module = ref()
            if module is not None and module._compiled_call_impl is compiled:
                module._compiled_call_impl = None
