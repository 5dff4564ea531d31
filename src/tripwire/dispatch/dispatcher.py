"""Dispatcher: a call goes to the entry that admits it, or through the pipeline, or runs plainly.

Entries are tried newest first; where there are many, the one that took the last call of this form
is tried before them. A hit does work in its own arguments only. What can't be compiled runs as
plain Python (L5).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from tripwire.backends.registry import name_of, out_of_dynamo
from tripwire.backends.rounds import one_round
from tripwire.dispatch.entry import Entry, RunAgain
from tripwire.dispatch.options import Options
from tripwire.dispatch.patience import NOTED_FROM, Patience, form_of, key_of
from tripwire.dispatch.pipeline import Made, Pipeline
from tripwire.dispatch.tally import Balance, Statistics, Tally
from tripwire.dispatch.telling import Callee, Followed, Teller, count_frame, follow, tell_entry
from tripwire.dispatch.variation import Variation
from tripwire.env import is_fx_tracing
from tripwire.errors import CannotTrace, FunctionChanged
from tripwire.phases import PLAN, RETIRE, TRACE
from tripwire.tracing import Refusal
from tripwire.tracing.answers import FormChanged, giving
from tripwire.tracing.hooks import find_checkpoint, installed
from tripwire.tracing.modes import has_foreign_modes
from tripwire.tracing.state import CURRENT, all_plain
from tripwire.validity.wires import Cause, Mismatch
from tripwire.values.classes import isinstance, module_of, short_name_of

# Entries that are tried one after the other; of more, the likeliest comes first.
FEW = 4
# What is raised before any code of the user's ran.
_BEFORE_THE_RUN = frozenset({"generator-function", "coroutine-function", "no-monitoring-tool"})
_FOREIGN = Refusal(
    "foreign-mode",
    "the call came under a torch.func transform, forward-mode AD or a mode that isn't "
    "tripwire's, which must see every torch call. Other calls are compiled as before.",
)


class Dispatcher(Followed):
    """Everything that is compiled of one callable."""

    def __init__(self, target: Callable[..., Any], name: str, options: Options) -> None:
        self.target = target
        self.name = name
        self.options = options
        self._entries: tuple[Entry, ...] = ()
        self._failures = options.failures
        self._tally = Tally()
        self._teller = Teller(name)
        self._patience = Patience(name, fullgraph=options.fullgraph)
        self._is_told = False  # that it keeps changing
        self._plain = self._patience.plain  # one set: each call asks whether it is empty
        self._pipeline = Pipeline(
            target,
            options,
            self._tally,
            self._teller,
            self._patience,
            Variation(options.dynamic),
        )
        self._by_form: dict[object, Entry] = {}  # which entry took the last call of a form
        self._clock = itertools.count(1)
        self._lock = threading.Lock()
        # Submodules that are compiled on their own, until this goes.
        self._inner: list[tuple[weakref.ref[nn.Module], Dispatcher]] = []
        weakref.finalize(self, _make_plain, self._inner)

    @out_of_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call."""
        if CURRENT.tracing:  # an outer trace sees all that happens inside
            return self.target(*args, **kwargs)
        if self._failures is not None and CURRENT.kept is None:
            return self._failures.run(self, args, kwargs)
        try:
            if self._plain:
                if self._patience.is_plain_in_region(args, kwargs):
                    self._tally.calls += 1
                    with all_plain():
                        return self._run_target(args, kwargs)
                if key_of(self.target, args, kwargs) in self._plain:
                    self._tally.calls += 1
                    return self._run_plainly(args, kwargs)
            probed: dict[object, Any] | None = None
            entries, form, likely = self._entries, None, None
            if len(entries) > FEW:
                form = form_of(args, kwargs)
                likely = self._by_form.get(form)
                entries = entries if likely is None else (likely, *entries)
            for entry in entries:
                fetched = entry.standing.admits(args, kwargs)
                if fetched is not None:
                    state = entry.find_state()
                    if state is None:
                        continue
                    probe = entry.probe
                    if probe is not None:
                        if probed is None:
                            probed = {}
                        if probe.key not in probed:
                            inputs = fetched if probe.is_of_ints else entry.join(fetched, state)
                            probed[probe.key] = probe.values(inputs)
                        if not probe.agrees(probed[probe.key]):
                            continue
                    entry.hits += 1
                    entry.last_used = next(self._clock)
                    if form is not None and likely is not entry:
                        self._note_form(form, entry)
                    try:
                        return entry.run(fetched, state, args, kwargs)
                    except RunAgain as again:
                        if isinstance(again.__cause__, FormChanged):
                            return self._run_answered(entry, args, kwargs, again.__cause__)
                        return self._run_again(args, kwargs, again.__cause__)
                    except FunctionChanged as changed:
                        _retire_changed(entry, changed)
                        self._patience.stay_plain(key_of(self.target, args, kwargs))
                        raise
            return self._miss(args, kwargs, probed or {})
        except Exception as error:
            if self.options.witness is not None and CURRENT.kept is None:
                self.options.witness(self, args, kwargs, error)
            raise

    def _note_form(self, form: object, entry: Entry) -> None:
        if len(self._by_form) > 4 * self.options.cache_size:
            self._by_form = {}
        self._by_form[form] = entry

    # --- plain calls ---

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inner:
            with one_round():
                return self._run_target(args, kwargs)
        return self._run_target(args, kwargs)

    def _run_target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if CURRENT.kept is not None:
            return CURRENT.kept.run_plainly(self.target, args, kwargs)
        return self.target(*args, **kwargs)

    def _run_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException | None
    ) -> Any:
        """The plain call raises at its own line, after its own effects. If not, that is told."""
        result = self._run_plainly(args, kwargs)
        reason = (
            f"The code that {name_of(self.options.backend)} made of {self.name} raised "
            f"{type(error).__name__}: {error}, where the plain call returns."
        )
        self._teller.count_refusal(Refusal("backend-failed", reason))
        self._teller.warn_once("%s The plain call was made.", reason)
        return result

    def _run_answered(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], changed: FormChanged
    ) -> Any:
        """The plain call, in which the custom functions that ran aren't run again.

        It isn't traced: what these functions wrote can't be told from what was there before.
        """
        entry.hits -= 1
        self._tally.calls += 1
        _retire_changed(entry, changed)
        with installed(changed), all_plain(), giving(changed.answers):
            return self._run_plainly(args, kwargs)

    # --- misses ---

    def _miss(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], probed: dict[object, Any]
    ) -> Any:
        checkpoint = find_checkpoint()
        if checkpoint is not None:
            self._patience.note_region(checkpoint, self._entries)
        if is_fx_tracing():  # arguments are proxies: they stand for anything
            return self._run_plainly(args, kwargs)
        if has_foreign_modes():
            own = None if CURRENT.kept is None else CURRENT.kept.find_own_mode()
            if own is None:
                self._teller.warn_plain(_FOREIGN)
                return self._run_plainly(args, kwargs)
            with own:
                return self(*args, **kwargs)
        if not self._may_trace(args, kwargs, probed):
            self._tally.calls += 1
            return self._run_plainly(args, kwargs)
        key = key_of(self.target, args, kwargs)
        self._tally.calls += 1
        count_frame("miss")
        follow(self)
        number, backend = self._tally.traces, name_of(self.options.backend)
        with self._teller.compiling(self.target, number, backend):
            if self._entries:
                with RETIRE:
                    for entry in self._entries:
                        entry.standing.look_at_pulled()
                    self._teller.tell_miss(self._entries, args, kwargs, probed)
            return self._trace(args, kwargs, key)

    def _may_trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], probed: dict[object, Any]
    ) -> bool:
        """Whether a call is traced that no entry takes; if not, the user is told why, once."""
        traces, hits = self._tally.traces, self.count_hits()
        if self._patience.may_trace(hits):
            if traces >= NOTED_FROM and self._entries:
                for change in self._find_mismatches(self._entries[0], args, kwargs, probed):
                    self._patience.changes.note(change)
            return True
        if self.options.fullgraph or not self._is_told:
            self._is_told = True
            refusal = self._patience.find_churn(traces, hits)
            self._tally.refusals += 1
            self._teller.count_refusal(refusal)
            if self.options.fullgraph:
                raise refusal.error()
            self._teller.warn_once("%s keeps changing: %s [%s]", self.name, refusal, refusal.slug)
        return False

    def _find_mismatches(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        probed: dict[object, Any],
    ) -> list[Mismatch]:
        """Why an entry isn't for a call, as data."""
        changes = entry.standing.find_mismatches(args, kwargs)
        if not changes and entry.probe is not None and entry.probe.key in probed:
            change = entry.probe.find_mismatch(probed[entry.probe.key])
            changes = [] if change is None else [change]
        if not changes and entry.standing.is_gone:
            changes = [cause.mismatch for cause in self._tally.causes[-1:]]
        return changes

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: object) -> Any:
        """Make a call that no entry admits; take what comes of it."""
        try:
            made = self._pipeline.make(args, kwargs, key, lambda: self._entries)
        except CannotTrace as error:
            if self.options.fullgraph or error.slug not in _BEFORE_THE_RUN:
                raise
            self._patience.stay_plain(key)
            self._teller.warn_once("%s runs as plain Python: %s", self.name, error)
            return self._run_plainly(args, kwargs)
        with TRACE if isinstance(made.outcome, Refusal) else PLAN:
            result = made.run.result
            self._take(made, key)
            del made  # in here: what only the trace held takes time to die
        return result

    def _take(self, made: Made, key: object) -> None:
        outcome, trace = made.outcome, made.run.trace
        if isinstance(outcome, Refusal):
            self._refuse(outcome, key, made.run.modules)
        elif outcome is not None:
            assert trace is not None
            assert trace.completion is not None
            outcome.last_used = next(self._clock)
            with self._lock:
                self._entries = (outcome, *self._drop_entries())
                self._by_form = {}  # holds none that was dropped
            if not trace.completion.effects.volatile:
                self._patience.note_settled(key)
            tell_entry(outcome, trace, len(self._entries))

    def _drop_entries(self) -> tuple[Entry, ...]:
        """Entries that stay beside a new one: the dead go, and the least used above the bound."""
        alive = []
        for entry in self._entries:
            if entry.standing.is_gone:
                self._tally.note_dropped(entry)
            else:
                alive.append(entry)
        while len(alive) >= self.options.cache_size:
            oldest = min(alive, key=lambda entry: entry.last_used)
            alive.remove(oldest)
            self._tally.note_dropped(oldest)
            self._patience.changes.dropped += 1
            oldest.standing.close()
        return tuple(alive)

    # --- refusals ---

    def _refuse(self, found: Refusal, key: object, modules: tuple[nn.Module, ...]) -> None:
        """Refuse, unless it may settle."""
        refusal = self._patience.find_final(found, key)
        if refusal is None:
            return
        self._tally.refusals += 1
        self._teller.count_refusal(refusal)
        if self.options.fullgraph:
            raise refusal.error()
        self._teller.warn_plain(refusal)
        if self._patience.note_refused(key):
            self._compile_inside(modules)

    def _compile_inside(self, modules: tuple[nn.Module, ...]) -> None:
        """Compile the modules that a refused run called, each on its own.

        `_compiled_call_impl` is torch's own place for that; copies and pickles leave it out.
        """
        for module in modules:
            if module_of(type(module)) == "torch._dynamo.eval_frame":  # what torch.compile made
                continue
            if module._compiled_call_impl is None and next(module.children(), None) is not None:
                inner = Dispatcher(
                    module._call_impl, f"{self.name}.{short_name_of(type(module))}", self.options
                )
                module._compiled_call_impl = inner
                self._inner.append((weakref.ref(module), inner))

    # --- what it did ---

    def count_hits(self) -> int:
        """How many calls ran compiled code so far."""
        return self._tally.count_hits(self._entries)

    def find_balance(self) -> Balance | None:
        """What hits saved and cost so far; None where too few were timed."""
        return self._tally.find_balance(self._entries)

    def statistics(self) -> Statistics:
        """Counts so far."""
        return self._tally.statistics(self._entries)

    @property
    def callee(self) -> Callee | None:
        """What is known of the callable, once it was traced."""
        return self._teller.callee

    @property
    def refusals(self) -> dict[Refusal, int]:
        """Why calls were refused, and how often."""
        return dict(self._teller.refusals)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries, newest first."""
        return self._entries


def _make_plain(inner: list[tuple[weakref.ref[nn.Module], Dispatcher]]) -> None:
    """Take dispatchers away from modules again."""
    for ref, dispatcher in inner:
        module = ref()
        if module is not None and module._compiled_call_impl is dispatcher:
            module._compiled_call_impl = None


def _retire_changed(entry: Entry, changed: FormChanged | FunctionChanged) -> None:
    """A custom function returned another kind of result than when the entry was traced."""
    entry.standing.retire(Cause("a custom function", "as traced", str(changed), None))
