"""Dispatcher: a call is admitted by an entry, or traced into a new one, or runs plainly.

Entries are tried newest first. A hit does work in its own arguments only. A miss says why.
What can't be compiled runs as plain Python, and says so once (L5).
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn

from tripwire.backends.backwards import keeping_saved, mend_backward
from tripwire.backends.cuts import cut, find_cuts, runs_user_code
from tripwire.backends.limits import check_functional
from tripwire.backends.picks import spell_picks
from tripwire.backends.registry import Backend, Runtime, eager, name_of, prepare
from tripwire.backends.rounds import one_round
from tripwire.backends.torchs import out_of_dynamo
from tripwire.dispatch.checking import Originals
from tripwire.dispatch.checkpoints import Region, run_plainly_in
from tripwire.dispatch.entry import Balance, Entry, RunAgain, add_saving
from tripwire.dispatch.telling import (
    Callee,
    Counted,
    compiling,
    count_frame,
    follow,
    tell_entry,
    tell_miss,
    tell_refusal,
    tell_retired,
    wants_reasons,
)
from tripwire.env import is_fx_tracing
from tripwire.errors import BackendFailed, BadOption, CannotTrace
from tripwire.phases import BACKEND, FIRST_RUN, PLAN, RECORD, RETIRE, TRACE
from tripwire.reading.effects import Volatile
from tripwire.reading.reads import fingerprint
from tripwire.reading.torchstate import has_foreign_modes
from tripwire.rulebook.refusals import Refused
from tripwire.tracing import Refusal, Run, Trace, Tracer
from tripwire.tracing.hooks import find_checkpoint
from tripwire.tracing.state import CURRENT, all_plain
from tripwire.validity.wires import Cause
from tripwire.values.classes import isinstance, module_of

recompiles = logging.getLogger("tripwire.recompiles")
refusals = logging.getLogger("tripwire.refusals")

_TRACER = Tracer()
# What is raised before any code of the user's ran.
_BEFORE_THE_RUN = frozenset({"generator-function", "coroutine-function", "no-monitoring-tool"})
# What models do when they first need it: put hooks on themselves, mark tensors.
_MAY_SETTLE = frozenset({"module-changed", "tensor-attribute"})
_FOREIGN = Refusal(
    "foreign-mode",
    "it is called under a torch.func transform, forward-mode AD or somebody else's mode, which "
    "must see every torch call. Calls outside are compiled as ever.",
)
# A call that was refused this often stays plain. More than once, because much code does things
# on its first call only: it warns, fills a cache, makes a buffer.
REFUSALS_ALLOWED = 3
# Traces after which a callable must have been worth it: as many hits as traces.
TRACES_ON_TRUST = 16


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a compiled callable did so far."""

    calls: int
    hits: int
    traces: int
    refusals: int
    retired: int
    entries: int
    causes: tuple[Cause, ...]  # of the latest retirements
    saved_us: int | None = None  # estimated, see `Saving`; None before enough hits were timed


class Failures(Protocol):
    """Who records calls that fail."""

    def run(self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call through the dispatcher with `CURRENT.kept` set; record it if it raises."""


class Witness(Protocol):
    """Who is told of calls that failed, and weren't recorded."""

    def __call__(
        self,
        dispatcher: Dispatcher,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> None:
        """A call raised."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to compile."""

    backend: Backend
    fullgraph: bool = False
    cache_size: int = 8
    backend_options: tuple[tuple[str, Any], ...] = ()
    failures: Failures | None = None
    witness: Witness | None = None
    eager_on_backend_error: bool = False
    check: bool = False  # new code runs once beside the run that it was made of


class Dispatcher(Counted):
    """Everything that is compiled of one callable."""

    def __init__(self, target: Callable[..., Any], name: str, options: Options) -> None:
        self._entries: tuple[Entry, ...] = ()
        self._hits = 0  # of entries that were dropped
        self._balance: Balance | None = None
        self.target = target
        self.name = name
        self.options = options
        self._failures = options.failures
        self._refused: Counter[object] = Counter()
        self._unsettled: Counter[object] = Counter()
        self._hits_when_unsettled = 0
        self._plain: set[object] = set()
        self._told: set[str] = set()
        self._calls = self._traces = self._refusals = self._retired = 0
        self._causes: list[Cause] = []
        self._tell_retired = weakref.WeakMethod(self._note_retired)
        self._callee: Callee | None = None
        self._told_refusals: Counter[Refusal] = Counter()
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
                if self._is_traced_again(args, kwargs):
                    self._calls += 1
                    with all_plain():
                        return self._run_target(args, kwargs)
                if self._call_key(args, kwargs) in self._plain:
                    self._calls += 1
                    return self._run_plainly(args, kwargs)
            probed: dict[object, Any] | None = None
            for entry in self._entries:
                fetched = entry.admits(args, kwargs)
                if fetched is not None:
                    state = entry.find_state()
                    if state is None:
                        continue
                    probe = entry.probe
                    if probe is not None:
                        if probed is None:
                            probed = {}
                        if probe.key not in probed:
                            probed[probe.key] = probe.values(entry.join(fetched, state))
                        if not probe.agrees(probed[probe.key]):
                            continue
                    entry.hits += 1
                    entry.last_used = next(self._clock)
                    try:
                        return entry.run(fetched, state, args, kwargs)
                    except RunAgain as again:
                        return self._run_again(args, kwargs, again.__cause__)
            return self._miss(args, kwargs, probed or {})
        except Exception as error:
            if self.options.witness is not None and CURRENT.kept is None:
                self.options.witness(self, args, kwargs, error)
            raise

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inner:
            with one_round():
                return self._run_target(args, kwargs)
        return self._run_target(args, kwargs)

    def _run_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException | None
    ) -> Any:
        """The plain call raises at its own line, after its own effects. If not, that is told."""
        result = self._run_plainly(args, kwargs)
        reason = (
            f"The code that {name_of(self.options.backend)} made of {self.name} raised "
            f"{type(error).__name__}: {error}, where the plain call returns."
        )
        self._count_refusal(Refusal("backend-failed", reason))
        self._warn_once("%s The plain call was made.", reason)
        return result

    def _run_target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if CURRENT.kept is not None:
            return CURRENT.kept.run_plainly(self.target, args, kwargs)
        return self.target(*args, **kwargs)

    def _is_traced_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether checkpointed code, in which a call was traced, runs as it ran then."""
        for item in tuple(self._plain):
            if isinstance(item, Region):
                if item.is_over():
                    self._plain.discard(item)
                elif item.is_plain(args, kwargs):
                    return True
        return False

    # --- misses ---

    def _miss(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], probed: dict[object, Any]
    ) -> Any:
        checkpoint = find_checkpoint()
        if checkpoint is not None:
            run_plainly_in(checkpoint, self._plain, self._entries)
        if is_fx_tracing():  # arguments are proxies: they stand for anything
            return self._run_plainly(args, kwargs)
        if has_foreign_modes():
            own = None if CURRENT.kept is None else CURRENT.kept.find_own_mode()
            if own is None:
                self._tell_once(_FOREIGN)
                return self._run_plainly(args, kwargs)
            with own:
                return self(*args, **kwargs)
        key = self._call_key(args, kwargs)
        self._calls += 1
        count_frame("miss")
        if self._callee is None:
            self._callee = Callee.of(self.name, self.target)
            follow(self)
        with compiling(self._callee, self._traces, name_of(self.options.backend)):
            with BACKEND:
                prepare(self.options.backend)
            return self._trace(args, kwargs, probed, key)

    def _trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        probed: dict[object, Any],
        key: object,
    ) -> Any:
        """Run a call that no entry admits, observed; it becomes an entry or is refused."""
        if self._entries:
            with RETIRE:
                for entry in self._entries:
                    entry.look_at_pulled()
                self._tell_miss(args, kwargs, probed)
        outer = CURRENT.kept
        originals = Originals(outer) if self.options.check else None
        CURRENT.kept = originals or outer
        try:
            if CURRENT.kept is not None:
                with RECORD:
                    CURRENT.kept.before_run()
            run = _TRACER.run(self.target, args, kwargs, complete=True)
        except CannotTrace as error:
            if self.options.fullgraph or error.slug not in _BEFORE_THE_RUN:
                raise
            self._plain.add(key)
            refusals.warning("%s runs as plain Python: %s", self.name, error)
            return self._run_plainly(args, kwargs)
        finally:
            CURRENT.kept = outer
        self._traces += 1
        made: Entry | Refusal | None
        try:
            made = run.refusal or self._build_entry(run, originals, key)
        except Refused as refused:
            made = Refusal(refused.slug, refused.reason, refused.where)
        with TRACE if isinstance(made, Refusal) else PLAN:
            if isinstance(made, Refusal):
                self._take_refusal(made, key, run.modules)
            elif made is not None:
                self._add(made, run, key)
            result = run.result
            del run  # in here: what only the trace held takes time to die
        return result

    def _call_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Calls that are refused alike: of one form, in one mode."""
        training = self.target.training if isinstance(self.target, nn.Module) else None
        return len(args), tuple(kwargs), training, torch.is_grad_enabled()

    def _build_entry(
        self, run: Run, originals: Originals | None, key: object
    ) -> Entry | Refusal | None:
        """None: what the run wrote over can't come back, so an entry would never be used."""
        trace = run.trace
        assert trace is not None
        assert trace.completion is not None
        volatile = trace.completion.effects.volatile
        if volatile:
            refusal = self._note_volatile(volatile, key)
            if refusal is not None or not all(_can_return(v) for v in volatile):
                return refusal
        refusal = self._find_distrust()
        if refusal is not None:
            self._stay_plain(key)
            return refusal
        entry = Entry(trace, run.torch_state, self._compile, self._tell_retired)
        if originals is not None and runs_user_code(trace.graph):
            self._warn_once("%s isn't checked: a custom function in it would run twice.", self.name)
        elif originals is not None:
            try:
                with FIRST_RUN:
                    originals.check(run, entry.run_code, self.name, name_of(self.options.backend))
            except BaseException:
                entry.close()
                raise
        return entry

    def _add(self, entry: Entry, run: Run, key: object) -> None:
        trace = run.trace
        assert trace is not None
        assert trace.completion is not None
        entry.last_used = next(self._clock)
        with self._lock:
            self._entries = (entry, *self._drop_entries())
        if not trace.completion.effects.volatile:
            self._unsettled[key] = self._refused[key] = 0
        tell_entry(entry, trace, len(self._entries))

    def _find_distrust(self) -> Refusal | None:
        """A reason to try no more, once many traces brought few hits."""
        hits = self.count_hits()
        if self._traces <= TRACES_ON_TRUST or hits >= self._traces:
            return None
        return Refusal(
            "keeps-changing",
            f"{self.name} was traced {self._traces} times for {hits} hits. What it depends "
            "on keeps changing; see the log of tripwire.recompiles.",
        )

    def _note_volatile(self, volatile: tuple[Volatile, ...], key: object) -> Refusal | None:
        """What settles after a few calls is compiled then, and so is what goes in circles."""
        hits = self.count_hits()
        if hits > self._hits_when_unsettled:
            self._unsettled[key] = 0
        self._hits_when_unsettled = hits
        self._unsettled[key] += 1
        if self._unsettled[key] < REFUSALS_ALLOWED:
            return None
        self._stay_plain(key)
        return _refuse_volatile(volatile)

    def _stay_plain(self, key: object) -> None:
        """Try no more. With fullgraph every such call raises: none may run plainly unseen."""
        if not self.options.fullgraph:
            self._plain.add(key)

    def _drop_entries(self) -> tuple[Entry, ...]:
        """Entries that stay beside a new one: the dead go, and the least used above the bound."""
        alive = []
        for entry in self._entries:
            if entry.is_dead:
                self._count_dropped(entry)
            else:
                alive.append(entry)
        while len(alive) >= self.options.cache_size:
            oldest = min(alive, key=lambda entry: entry.last_used)
            alive.remove(oldest)
            self._count_dropped(oldest)
            oldest.close()
        return tuple(alive)

    def _count_dropped(self, entry: Entry) -> None:
        self._hits += entry.hits
        self._balance = add_saving(self._balance, entry.find_saving())

    def _compile(self, trace: Trace) -> Runtime:
        if self.options.backend is eager:
            return self._run_backend(trace.graph_module, _find_examples(trace))
        check_functional(trace)
        module = spell_picks(trace.graph_module)
        cuts = find_cuts(module.graph)
        if not cuts:
            return self._compile_part(module, _find_examples(trace))
        for refusal in cuts.refusals():
            if self.options.fullgraph:
                raise Refused(refusal.slug, refusal.reason, refusal.where)
            self._count_refusal(refusal)
            self._warn_once("%s is compiled in parts: %s [%s]", self.name, refusal, refusal.slug)
        return cut(module, cuts, self._compile_part)

    def _compile_part(self, module: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Runtime:
        with keeping_saved():
            return mend_backward(module.graph, self._run_backend(module, examples))

    def _run_backend(self, module: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Runtime:
        try:
            return self.options.backend(module, examples, **dict(self.options.backend_options))
        except BadOption:
            raise
        except Exception as error:
            reason = (
                f"The back end {name_of(self.options.backend)} failed on the graph of "
                f"{self.name}: {type(error).__name__}: {error}"
            )
            if self.options.eager_on_backend_error:
                self._count_refusal(Refusal("backend-failed", reason))
                self._warn_once("%s The graph runs as it is.", reason)
                return eager(module, examples)
            failed = BackendFailed(reason, slug="backend-failed")
            failed.graph_module = module
            raise failed from error

    def _note_retired(self, cause: Cause, compile_id: str | None) -> None:
        self._retired += 1
        self._causes = [*self._causes[-15:], cause]
        tell_retired(cause, compile_id)

    def _tell_miss(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], probed: dict[object, Any]
    ) -> None:
        if not recompiles.isEnabledFor(logging.INFO) and not wants_reasons():
            return
        reasons = []
        for entry in self._entries:
            failures = entry.find_failures(args, kwargs)
            if not failures and entry.probe is not None:
                failure = entry.probe.find_failure(probed.get(entry.probe.key))
                failures = [failure] if failure else []
            reasons.append("; ".join(failures) or "no reason found")
        recompiles.info("%s is traced again: %s", self.name, " | ".join(reasons))
        assert self._callee is not None
        tell_miss(self._callee, reasons)

    # --- refusals ---

    def _take_refusal(self, refusal: Refusal, key: object, modules: tuple[nn.Module, ...]) -> None:
        """Refuse, unless it may settle."""
        if refusal.slug == "another-thread":  # bad luck, as long as it doesn't last
            distrust = self._find_distrust()
            if distrust is None:
                return
            self._stay_plain(key)
            refusal = distrust
        if refusal.slug in _MAY_SETTLE:
            self._unsettled[key] += 1
            if self._unsettled[key] < REFUSALS_ALLOWED:
                return
        self._refuse(refusal, key, modules)

    def _refuse(self, refusal: Refusal, key: object, modules: tuple[nn.Module, ...]) -> None:
        self._refusals += 1
        self._count_refusal(refusal)
        if self.options.fullgraph:
            raise refusal.error()
        self._refused[key] += 1
        self._tell_once(refusal)
        if self._refused[key] >= REFUSALS_ALLOWED:
            self._plain.add(key)
            self._compile_inside(modules)

    def _count_refusal(self, refusal: Refusal) -> None:
        self._told_refusals[refusal] += 1
        assert self._callee is not None
        tell_refusal(self._callee, refusal)

    def _tell_once(self, refusal: Refusal) -> None:
        self._warn_once("%s runs as plain Python: %s [%s]", self.name, refusal, refusal.slug)

    def _warn_once(self, message: str, *parts: object) -> None:
        told = message % parts
        if told not in self._told:
            self._told.add(told)
            refusals.warning("%s", told)

    def _compile_inside(self, modules: tuple[nn.Module, ...]) -> None:
        """Compile the modules that a refused run called, each on its own.

        `_compiled_call_impl` is torch's own place for that; copies and pickles leave it out.
        """
        for module in modules:
            if module_of(type(module)) == "torch._dynamo.eval_frame":  # what torch.compile made
                continue
            if module._compiled_call_impl is None and next(module.children(), None) is not None:
                inner = Dispatcher(
                    module._call_impl, f"{self.name}.{type(module).__name__}", self.options
                )
                module._compiled_call_impl = inner
                self._inner.append((weakref.ref(module), inner))

    def count_hits(self) -> int:
        """How many calls ran compiled code so far."""
        return self._hits + sum(entry.hits for entry in self._entries)

    def find_balance(self) -> Balance | None:
        """What hits saved and cost so far; None where too few were timed."""
        balance = self._balance
        for entry in self._entries:
            balance = add_saving(balance, entry.find_saving())
        return balance

    def statistics(self) -> Statistics:
        """Counts so far."""
        hits = self.count_hits()
        balance = self.find_balance()
        alive = sum(not (entry.is_dead or entry.causes) for entry in self._entries)
        return Statistics(
            self._calls + hits,
            hits,
            self._traces,
            self._refusals,
            self._retired,
            alive,
            tuple(self._causes),
            None if balance is None else (balance.saved_ns - balance.lost_ns) // 1000,
        )

    @property
    def callee(self) -> Callee | None:
        """What is known of the callable, once it was traced."""
        return self._callee

    @property
    def refusals(self) -> dict[Refusal, int]:
        """Why calls were refused, and how often."""
        return dict(self._told_refusals)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries, newest first."""
        return self._entries


def _find_examples(trace: Trace) -> list[torch.Tensor]:
    """The graph's inputs, or tensors of their kind where the run let go of them."""
    assert trace.completion is not None
    pairs = zip(trace.completion.tensors, trace.inputs, strict=True)
    return [wanted.build() if tensor is None else tensor for tensor, wanted in pairs]


def _make_plain(inner: list[tuple[weakref.ref[nn.Module], Dispatcher]]) -> None:
    """Take dispatchers away from modules again."""
    for ref, dispatcher in inner:
        module = ref()
        if module is not None and module._compiled_call_impl is dispatcher:
            module._compiled_call_impl = None


def _can_return(volatile: Volatile) -> bool:
    """Whether a value that was written over may come back, and be known again."""
    return type(volatile.before) in (bool, int, float, str, type(None), list)


def _refuse_volatile(volatile: tuple[Volatile, ...]) -> Refusal:
    first = volatile[0]
    return Refusal(
        "volatile-source",
        f"{first.source} is read by the run and left changed ({fingerprint(first.before)} → "
        f"{fingerprint(first.after)}), so the next call finds something else. Counters that are "
        "only counted, and tensors, are no hindrance.",
    )
