"""Dispatcher: a call goes to the entry that admits it, or through the pipeline, or runs plainly.

Entries are tried newest first; of many, the one that took the last call of this form is the first.
A hit does work in its own arguments only. What can't be compiled runs as plain Python (L5).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from time import monotonic as now
from typing import Any

from msgspec.structs import replace
from torch import nn

from tripwire.backends import registry
from tripwire.backends.dynamo import (
    CUT_OFF,
    EVAL_FRAME,
    MODULES,
    find_stance,
    has_compiler_elsewhere,
    is_cut_off,
    tell_of_reset,
)
from tripwire.backends.handover import one_round
from tripwire.dispatch import patience, telling
from tripwire.dispatch.entry import Entry, NotYet, RunAgain
from tripwire.dispatch.patience import form_of, key_of
from tripwire.dispatch.pipeline import Made, Options, Pipeline, Planned
from tripwire.dispatch.tally import Balance, Statistics, Tally
from tripwire.dispatch.turns import BACKGROUND, Turn
from tripwire.dispatch.variation import Variation
from tripwire.env import is_fx_tracing
from tripwire.errors import CannotTrace, FunctionChanged, TripwireError
from tripwire.forks import make_lock
from tripwire.rulebook.refusals import Mismatch
from tripwire.telemetry.compiles import PLAN, RETIRE, TRACE, note_figures
from tripwire.tracing import Refusal, Run
from tripwire.tracing.answers import FormChanged, giving
from tripwire.tracing.hooks import find_checkpoint, installed
from tripwire.tracing.modes import FOREIGN, has_foreign_modes
from tripwire.tracing.state import CURRENT, all_plain
from tripwire.validity.ways import OtherWay
from tripwire.values.classes import isinstance

FEW = 4  # entries that are tried one after the other; of more, the likeliest comes first
_COMPARED = 4  # entries that a call is compared with, to tell what changed
_COMPARED_FROM = 4  # the trace from which on it is: most callables never come to it
_AGAIN = object()  # another thread made an entry meanwhile: look once more
# What is raised before any code of the user's ran.
_BEFORE_THE_RUN = frozenset({"generator-function", "coroutine-function", "no-monitoring-tool"})


class Dispatcher(telling.Followed):
    """Everything that is compiled of one callable."""

    def __init__(self, target: Callable[..., Any], name: str, options: Options) -> None:
        self.target = target
        self.name = name
        self.options = options
        self._failures = options.failures
        self._clock = itertools.count(1)
        self._lock = make_lock()
        self._turn = Turn()
        self._regions = patience.Regions()
        self._open_regions = self._regions.open  # one set: each call asks whether it is empty
        self._heeded: object = None  # the latest stance under which hits are served
        self._inner = patience.Inner()
        weakref.finalize(self, self._inner.leave)
        self._begin()

    def _begin(self) -> None:
        options = self.options
        self._entries: tuple[Entry, ...] = ()
        self._by_form: dict[object, Entry] = {}  # which entry took the last call of a form
        self._forced: dict[object, Dispatcher] = {}  # by the back end of a stance
        self._tally = Tally()
        self._teller = telling.Teller(self.name)
        self._patience = patience.Patience(
            self.name, fullgraph=options.fullgraph, cache_size=options.cache_size
        )
        self._is_told = False  # that it keeps changing
        self._failed: Exception | None = None  # in the background
        self._pipeline = Pipeline(
            self.target,
            options,
            self._tally,
            self._teller,
            self._patience,
            Variation(options.dynamic, whole=options.fullgraph),
        )

    @registry.out_of_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call."""
        if CURRENT.tracing:  # an outer trace sees all that happens inside
            return self.target(*args, **kwargs)
        if self._failures is not None and CURRENT.kept is None:
            return self._failures.run(self, args, kwargs)
        try:
            dynamo = MODULES.get(EVAL_FRAME)
            if dynamo is not None:
                stance = getattr(dynamo, "_stance", None)  # None: a thread is importing it
                if stance is not self._heeded and stance is not None:
                    instead = self._find_instead(stance)
                    if instead is not None:
                        return instead(args, kwargs)
            if self._open_regions and self._regions.is_plain(args, kwargs):
                self._tally.calls += 1
                with all_plain():
                    return self._run_target(args, kwargs)
            while True:
                probed: dict[object, Any] | None = None
                turned: OtherWay | None = None
                known = entries = self._entries
                form = likely = None
                if len(entries) > FEW:
                    form = form_of(args, kwargs)
                    likely = self._by_form.get(form)
                    entries = entries if likely is None else (likely, *entries)
                for entry in entries:
                    state = entry.held.tensors
                    fetched = entry.standing.admits(args, kwargs)
                    if fetched is not None:
                        if entry.held.tensors is not state or len(state) != entry.n_held:
                            fetched, state = entry.ask_again(args, kwargs)
                            if fetched is None:
                                continue
                        probe = entry.probe
                        if probe is not None and fetched[: probe.n_ints] not in probe.agreed:
                            if probed is None:
                                probed = {}
                            if probe.key not in probed:
                                inputs = fetched if probe.is_of_ints else entry.join(fetched, state)
                                probed[probe.key] = probe.values(inputs)
                            if not probe.agrees(probed[probe.key]):
                                continue
                            probe.note_agreed(fetched)
                        if entry.ways is not None and entry.ways.is_ruled_out(turned):
                            continue
                        entry.hits += 1
                        entry.last_used = next(self._clock)
                        if form is not None and likely is not entry:
                            self._note_form(form, entry)
                        again = None
                        try:
                            return entry.run(fetched, state, args, kwargs)
                        except RunAgain as raised:
                            again = raised
                        except NotYet:
                            pass
                        except OtherWay as other:
                            entry.hits -= 1
                            turned = other.with_traceback(None)  # which holds tensors
                            probed = (probed or {}) | {entry: other.mismatch}
                            continue
                        except FunctionChanged as changed:
                            entry.retire_for(changed)
                            self._rest_at_once(key_of(self.target, args, kwargs), changed)
                            raise
                        # Outside of `except`: what the call raises would have ours as its context.
                        return self._run_instead(entry, args, kwargs, known, again)
                result = self._miss(args, kwargs, known, probed or {})
                if result is not _AGAIN:
                    return result
        except Exception as error:
            if self.options.witness is not None and CURRENT.kept is None:
                self.options.witness(self, args, kwargs, error)
            raise

    def _note_form(self, form: object, entry: Entry) -> None:
        if len(self._by_form) > 4 * self.options.cache_size:
            self._by_form = {}
        self._by_form[form] = entry

    # --- torch.compiler.set_stance ---

    def _find_instead(self, stance: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
        """What takes a call in place of the entries under a stance; None where they do."""
        if stance.stance == "force_eager":
            return self._run_untraced
        if stance.stance == "default" and stance.backend is not None:
            backend = registry.find_backend(stance.backend)
            if backend is not self.options.backend:
                if backend not in self._forced:
                    chosen = replace(self.options, backend=backend, backend_options=())
                    self._forced[backend] = Dispatcher(self.target, self.name, chosen)
                forced = self._forced[backend]
                return lambda args, kwargs: forced(*args, **kwargs)
        self._heeded = stance
        return None

    def _check_stance(self, args: Any, kwargs: Any, probed: dict[object, Any]) -> bool:
        """Whether a call that no entry takes may be traced."""
        stance = find_stance()
        if stance is None or stance.stance not in ("eager_on_recompile", "fail_on_recompile"):
            return True
        if stance.stance == "eager_on_recompile":
            return False
        reasons = telling.explain_misses(self._entries, args, kwargs, probed)
        raise CannotTrace(
            f"{self.name}: no compiled code fits this call, and the stance fail_on_recompile "
            f"forbids a new trace. {' | '.join(reasons) or 'Nothing is compiled yet.'}",
            slug="fail-on-recompile",
        )

    # --- plain calls ---

    def _run_untraced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._tally.calls += 1
        return self._run_plainly(args, kwargs)

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inner:
            with one_round():
                return self._run_target(args, kwargs)
        return self._run_target(args, kwargs)

    def _run_target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if CURRENT.kept is not None:
            return CURRENT.kept.run_plainly(self.target, args, kwargs)
        return self.target(*args, **kwargs)

    def _run_instead(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: tuple[Entry, ...],
        again: RunAgain | None,
    ) -> Any:
        """The plain call where an entry's code gave up; or where it isn't there yet."""
        if again is None:
            entry.hits -= 1
            return self._run_meanwhile(args, kwargs, known)
        error, answers = again.__cause__, again.answers
        if isinstance(error, FormChanged):
            entry.hits -= 1
            self._tally.calls += 1
            entry.retire_for(error)
        if answers is None:
            result = self._run_plainly(args, kwargs)
        else:
            # Not traced: what custom functions wrote can't be told from what was there before.
            with installed(again), all_plain(), giving(answers):
                result = self._run_plainly(args, kwargs)
        if not isinstance(error, FormChanged):
            self._note_failed(error)
        return result

    def _note_failed(self, error: BaseException | None) -> None:
        """Tell of code that raised where the plain call doesn't.

        What raises in plain Python too is raised there, at its own line, after its own effects.
        """
        compiler = registry.backend_name(self.options.backend)
        reason = (
            f"The code that {compiler} compiled for {self.name} raised {type(error).__name__}: "
            f"{error}. The call ran as plain Python instead, and returned."
        )
        self._teller.count_refusal(Refusal("backend-failed", reason))
        is_new = self._teller.warn_once("%s", reason)
        if is_new and error is not None and CURRENT.kept is not None:
            CURRENT.kept.note_code_failed(error)

    # --- misses ---

    def _miss(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        entries: tuple[Entry, ...],
        probed: dict[object, Any],
    ) -> Any:
        key = key_of(self.target, args, kwargs)
        is_resting = self._patience.is_resting(key)
        if is_resting and self._failed is None and CURRENT.kept is None:
            if self._check_stance(args, kwargs, probed):  # asked first: beside plain 1.6 → 1.2 µs
                return self._run_meanwhile(args, kwargs, entries)
        if is_fx_tracing():  # arguments are proxies: they stand for anything
            return self._run_plainly(args, kwargs)
        if has_foreign_modes():
            own = None if CURRENT.kept is None else CURRENT.kept.find_own_mode()
            if own is None:
                self._teller.warn_plain(FOREIGN)
                return self._run_plainly(args, kwargs)
            with own:
                return self(*args, **kwargs)
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        changes: list[Mismatch] = []
        may_trace = self._check_stance(args, kwargs, probed) and not is_resting
        if may_trace and is_cut_off():
            self._refuse_to_compile(CUT_OFF, key)
        elif may_trace and not has_compiler_elsewhere(self.options.waits):
            if self._tally.traces >= _COMPARED_FROM:
                changes = self._find_changes(entries, args, kwargs, probed)
            if self._may_trace(changes):
                with self._turn.taken() as token:
                    if token is not None and self._prepare_later():
                        return self._run_meanwhile(args, kwargs, entries)
                    if token is not None and self._entries is entries:
                        return self._compile(args, kwargs, key, changes, probed)
                if token is not None or (self.options.waits and self._turn.wait()):
                    return _AGAIN
        return self._run_meanwhile(args, kwargs, entries)

    def _run_meanwhile(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], entries: tuple[Entry, ...]
    ) -> Any:
        """A call that may be a hit the next time; not when a checkpoint runs it again."""
        self._tally.calls += 1
        checkpoint = find_checkpoint()
        if checkpoint is None:
            return self._run_plainly(args, kwargs)
        self._regions.note(checkpoint, entries)
        with all_plain():
            return self._run_plainly(args, kwargs)

    def _may_trace(self, changes: list[Mismatch]) -> bool:
        """Whether a call is traced that no entry takes; if not, the user is told why, once."""
        limit = self.options.recompile_limit
        is_over = limit is not None and self._tally.made >= limit
        sources = [change.source for change in changes]
        if not is_over and self._patience.may_trace(sources, self._entries):
            return True
        if self.options.fullgraph or not self._is_told:
            self._is_told = True
            refusal = (
                patience.refuse_over_limit(limit)
                if is_over
                else self._patience.find_churn(self._tally.traces, self.count_hits())
            )
            self._note_refusal(refusal)
            if self.options.fullgraph:
                raise refusal.error()
            what = "has reached its recompile_limit" if is_over else "keeps changing"
            self._teller.warn_once("%s %s: %s [%s]", self.name, what, refusal, refusal.slug)
        return False

    def _find_changes(
        self,
        entries: tuple[Entry, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        probed: dict[object, Any],
    ) -> list[Mismatch]:
        """In what a call differs from those that have entries: from the one that is nearest."""
        near = sorted(entries, key=lambda entry: not entry.standing.is_in_use)[:_COMPARED]
        found: list[list[Mismatch]] = []
        for entry in near:
            failures = telling.find_failures(entry, args, kwargs, probed)
            if not failures and entry.standing.is_gone:
                failures += self._tally.causes[-1:]
            found.append([failure.mismatch for failure in failures])
        return min(filter(None, found), key=len, default=[])

    def _compile(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: object,
        changes: list[Mismatch],
        probed: dict[object, Any],
    ) -> Any:
        """Make a call that no entry takes, as what changed is what it is, and an entry of it."""
        self._tally.calls += 1
        checkpoint = find_checkpoint()
        if checkpoint is not None:
            self._regions.note(checkpoint, self._entries)
        telling.count_frame("miss")
        telling.follow(self)
        for change in changes:
            self._patience.changes.note(change)
        with self._teller.compiling(self.target, self._tally.traces, self.options):
            if self._entries:
                with RETIRE:
                    for entry in self._entries:
                        entry.standing.look_at_pulled()
                    self._teller.tell_miss(self._entries, args, kwargs, probed)
            return self._trace(args, kwargs, key, [change.source for change in changes])

    def _trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: object, sources: list[str]
    ) -> Any:
        """Make a call that no entry admits; take what comes of it."""
        began = now()
        try:
            made = self._pipeline.begin(args, kwargs, key, lambda: self._entries)
        except CannotTrace as error:
            if self.options.fullgraph or error.slug not in _BEFORE_THE_RUN:
                raise
            self._rest_at_once(key, error)
            self._teller.warn_once("%s runs as plain Python: %s", self.name, error)
            return self._run_plainly(args, kwargs)
        result = made.run.result
        if isinstance(made, Planned) and self.options.background and made.can_move():
            self._finish_later(made.for_later(), key, sources, now() - began)
            return result
        if isinstance(made, Planned):
            made = self._pipeline.finish(made)
        with TRACE if isinstance(made.outcome, Refusal) else PLAN:
            self._take(made, key, sources, now() - began)
            if isinstance(made.outcome, Entry):
                telling.tell_guards(made.outcome, args, kwargs)
            del made  # in here: what only the trace held takes time to die
        return result

    # --- in the background ---

    def _finish_later(self, planned: Planned, key: object, sources: list[str], took: float) -> None:
        """Compile in the background, and keep the turn until that is done."""
        token, me, pipeline = self._turn.pass_on(), weakref.ref(self), self._pipeline
        number = self._tally.traces - 1

        def finish() -> None:
            dispatcher = me()
            if dispatcher is None:
                return
            try:
                with dispatcher._teller.compiling(dispatcher.target, number, dispatcher.options):
                    if dispatcher._pipeline is pipeline:  # it may have begun anew
                        dispatcher._finish(planned, key, sources, took)
            finally:
                dispatcher._turn.give_back(token)

        BACKGROUND.submit(finish)

    def _finish(self, planned: Planned, key: object, sources: list[str], took: float) -> None:
        began = now()
        try:
            with planned.surrounded() as is_as_it_was:
                made = self._pipeline.finish(planned) if is_as_it_was else None
                if made is None or not planned.is_intact():
                    planned.standing.close()  # a later call is traced again
                    return
                self._take(made, key, sources, took + now() - began)
        except Exception as error:  # the next call raises it
            planned.standing.close()
            self._failed = error
            self._teller.warn_once("%s isn't compiled in the background: %s", self.name, error)

    def _prepare_later(self) -> bool:
        """Whether the back end must be imported first, which the background does now."""
        backend, turn = self.options.backend, self._turn
        if not self.options.background or registry.is_prepared(backend):
            return False
        token = turn.pass_on()

        def prepare_and_give_back() -> None:
            try:
                registry.prepare(backend)
            finally:
                turn.give_back(token)

        BACKGROUND.submit(prepare_and_give_back)
        return True

    def _take(self, made: Made, key: object, sources: list[str], took: float) -> None:
        """What came of a call, which took so many seconds and was made as these changed."""
        outcome, trace = made.outcome, made.run.trace
        if isinstance(outcome, Refusal):
            self._refuse(outcome, key, made.run, took)
            return
        self._patience.spend(sources, took)
        if outcome is not None:
            outcome.because = tuple(sources)
            assert trace is not None
            assert trace.completion is not None
            outcome.last_used = next(self._clock)
            self._tally.made += 1
            tell_of_reset(telling.reset)
            with self._lock:
                self._entries = (outcome, *self._drop_entries())
                self._by_form = {}  # holds none that was dropped
            if not trace.completion.effects.volatile:
                self._patience.note_settled(key)
            telling.tell_entry(outcome, trace, len(self._entries), self.options)

    def _drop_entries(self) -> tuple[Entry, ...]:
        """Entries that stay beside a new one: the dead go, and above the bound the oldest.

        Entries that nobody used take half of the room at most from those that somebody did.
        """
        alive = []
        for entry in self._entries:
            if entry.standing.is_gone:
                self._tally.note_dropped(entry)
            else:
                alive.append(entry)
        while len(alive) >= self.options.cache_size:
            unused = [entry for entry in alive if not entry.hits]
            is_crowd = 2 * len(unused) > self.options.cache_size
            oldest = min(unused if is_crowd else alive, key=lambda entry: entry.last_used)
            alive.remove(oldest)
            self._tally.note_dropped(oldest)
            self._patience.changes.dropped += 1
            oldest.standing.close()
        return tuple(alive)

    # --- refusals ---

    def _refuse(self, refusal: Refusal, key: object, run: Run, took: float) -> None:
        """Refuse, unless it may settle, or was bad luck."""
        is_passing = self._patience.is_passing(refusal, run.was_alone)
        if not is_passing and self._patience.may_settle(refusal, key):
            return
        if self.options.fullgraph:
            self._note_refusal(refusal)
            raise refusal.error()
        if is_passing:
            if self._patience.note_refused(key, refusal, took, is_passing=True):
                self._note_refusal(refusal)
                self._teller.warn_resting(refusal)
            return
        self._note_refusal(refusal)
        self._teller.warn_plain(refusal)
        if self._patience.note_refused(key, refusal, took, is_passing=False):
            self._compile_inside(run.modules)

    def _refuse_to_compile(self, refusal: Refusal, key: object) -> None:
        """Such calls run as plain Python, or raise with fullgraph, whatever they do."""
        self._note_refusal(refusal)
        if self.options.fullgraph:
            raise refusal.error()
        self._teller.warn_plain(refusal)
        self._patience.stay_plain(key, refusal)

    def _note_refusal(self, refusal: Refusal) -> None:
        self._tally.refusals += 1
        self._teller.count_refusal(refusal)

    def _rest_at_once(self, key: object, error: TripwireError) -> None:
        reason = str(error).removesuffix(f" [{error.slug}]")
        self._patience.stay_plain(key, Refusal(error.slug, reason))

    def _compile_inside(self, modules: tuple[nn.Module, ...]) -> None:
        before = len(self._inner)
        self._inner.compile(
            modules, lambda call, name: Dispatcher(call, f"{self.name}.{name}", self.options)
        )
        note_figures(num_graph_breaks=len(self._inner) - before)

    # --- what it did ---

    def reset(self) -> None:
        """Forget everything, as if nothing had been called yet."""
        self.tell_hits()
        self.told = (0, 0, 0)
        with self._lock:
            gone = self._entries
            self._begin()
        for entry in gone:
            entry.standing.close()

    def count_hits(self) -> int:
        """How many calls ran compiled code so far."""
        return self._tally.count_hits(self._entries)

    def count_entries(self) -> int:
        return len(self._entries)

    def find_balance(self) -> Balance | None:
        """What hits saved and cost so far; None where too few were timed."""
        return self._tally.find_balance(self._entries)

    def statistics(self) -> Statistics:
        """Counts so far."""
        return self._tally.statistics(self._entries)

    @property
    def callee(self) -> telling.Callee | None:
        """What is known of the callable, once it was traced."""
        return self._teller.callee

    @property
    def rests(self) -> list[tuple[Refusal, float]]:
        """Why calls run as plain Python for now, and for how many seconds more."""
        return self._patience.find_rests()

    @property
    def closed(self) -> list[str]:
        """What varies and isn't left open, with the line that needed its value."""
        return self._pipeline.variation.list_closed()

    @property
    def refusals(self) -> dict[Refusal, int]:
        """Why calls were refused, and how often."""
        return dict(self._teller.refusals)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries, newest first."""
        return self._entries

    @property
    def inner(self) -> list[Dispatcher]:
        """Those of modules that are compiled on their own, since calls were refused."""
        return [one for one in self._inner.list() if isinstance(one, Dispatcher)]
