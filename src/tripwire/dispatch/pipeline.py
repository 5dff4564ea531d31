"""Pipeline: how a call becomes compiled code. Read this file first.

The life of a call, `compiled(x)`:

    look up   The dispatcher (dispatcher.py) asks each entry, newest first, whether it takes the
              call. Its guard function compares the arguments and torch's state, and asks whether
              anything was written that the entry depends on (validity/).
    hit       An entry takes it: the compiled code runs, the result is built, and what the traced
              run wrote is written again (entry.py). That is all that most calls do.
    miss      No entry takes it. The call goes through the stages below, once:

    observe   It runs for real, as plain Python, and each torch call becomes a node (tracing/).
              Its result is the call's result, whatever comes of the rest.
    plan      What the run read becomes guards on a call's arguments and wires on everything else.
              The wires are armed at once, so that later writes are noticed.
    compile   The graph goes to the back end (backends/). If two entries were never used, the next
              one is compiled only when it is first hit: it may go unused as well.
    entry     Plan and compiled code together. The next call may be a hit.

    plain     One thread at a time goes through these stages (turns.py); a source that changes all
              the time is traced rarely (patience.py). Other calls run as plain Python meanwhile.

    refusal   Any stage may find that what the run did can't be repeated. The call has its result
              already. After a few refusals (patience.py) such calls run as plain Python for a
              while, and the user's log says why, once (telling.py).

tally.py counts. `Options.failures` records calls that fail.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import fx

from tripwire.backends.backwards import (
    Heeding,
    keeping_saved,
    mend_backward,
    telling_inference,
    trains,
)
from tripwire.backends.cuts import find_cuts, runs_user_code
from tripwire.backends.dynamo import observing
from tripwire.backends.floats import OWN_DROPOUT, find_fixing, has_unknown_floats
from tripwire.backends.handover import (
    FIXES,
    OPEN,
    LaidOut,
    Unmarked,
    handing_over,
    hiding_module_hooks,
    leaving_generators,
)
from tripwire.backends.limits import check_functional, spell_inference, spell_picks
from tripwire.backends.parts import cut
from tripwire.backends.registry import (
    Backend,
    Runtime,
    backend_name,
    count_runs_ahead,
    draws_its_own,
    eager,
    inductor,
    may_run_ahead,
    prepare,
    takes_graphs_as_they_are,
    takes_other_state,
)
from tripwire.dispatch.ahead import Counters, can_run_ahead, run_ahead
from tripwire.dispatch.entry import Entry, Later
from tripwire.dispatch.originals import Originals
from tripwire.dispatch.patience import Patience
from tripwire.dispatch.tally import Tally
from tripwire.dispatch.telling import (
    Teller,
    count_frame,
    in_few_lines,
    showing,
    tell_failure,
    telling_phases,
)
from tripwire.dispatch.variation import Variation
from tripwire.errors import BackendFailed, BadOption, raise_interruption
from tripwire.reading.tensors import meta_of
from tripwire.reading.torchstate import name_quickly, sample_quickly
from tripwire.rulebook.purity import DRAWS, NUMPY_DRAWS
from tripwire.rulebook.refusals import Cause, Refused
from tripwire.telemetry.compiles import BACKEND, FIRST_RUN, PLAN, RECORD, TRACE, note_figures
from tripwire.tracing import Refusal, Run, Trace, Tracer
from tripwire.tracing.modes import Contexts, contexts_of, restoring_contexts
from tripwire.tracing.open.draws import DRAWN_BY_BOTH, check_ways
from tripwire.tracing.open.opening import Opening
from tripwire.tracing.session import TOLD
from tripwire.tracing.state import CURRENT
from tripwire.validity.plan import Plan, admit_open, build_plan
from tripwire.validity.standing import Standing
from tripwire.values.classes import isinstance

if TYPE_CHECKING:
    from tripwire.dispatch.dispatcher import Dispatcher
    from tripwire.tracing.open.shadow import Shadow


# Entries without a hit, after which the next is compiled when it is first hit.
UNUSED_ALLOWED = 2
_TRACER = Tracer()
_log = logging.getLogger("tripwire.backends")


class Failures(Protocol):
    """Who records calls that fail."""

    def run(self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call through the dispatcher with `CURRENT.kept` set; record it if it raises."""


class Witness(Protocol):
    """Who is told of calls that failed and weren't recorded."""

    def __call__(
        self,
        dispatcher: Dispatcher,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> None:
        """A call raised."""


class Options(Struct, frozen=True):
    """How to compile."""

    backend: Backend
    fullgraph: bool = False
    cache_size: int = 32
    backend_options: tuple[tuple[str, Any], ...] = ()
    failures: Failures | None = None
    witness: Witness | None = None
    eager_on_backend_error: bool = False
    dynamic: bool | None = None  # None: what proves to vary is left open
    check: bool = False  # new code runs once beside the run that it was made of
    background: bool = False  # compilers work in a thread of their own
    waits: bool = False  # while another thread compiles; else calls run as plain Python
    recompile_limit: int | None = None  # entries that are made at most


class Made(Struct, frozen=True):
    """What came of a call that no entry took."""

    run: Run
    # None: an entry would never be used, since what the run wrote over can't come back; or the
    # next trace leaves open what keeps this one from being compiled.
    outcome: Entry | Refusal | None


class Planned(Struct, frozen=True):
    """A run that may become an entry: what it depends on is under watch. It isn't compiled yet."""

    run: Run
    originals: Originals | None
    counters: Counters | None
    plan: Plan
    standing: Standing
    waits: bool  # until it is first hit
    contexts: Contexts  # as they are around the call

    @property
    def trace(self) -> Trace:
        """The run's."""
        assert self.run.trace is not None
        return self.run.trace

    def can_move(self) -> bool:
        """Whether another thread can compile it: under no mode, and nothing is compared."""
        return self.originals is None and not has_modes()

    def for_later(self) -> Planned:
        """The same without the call's result, which may die meanwhile."""
        trace = dataclasses.replace(self.trace, result=None)
        return replace(self, run=replace(self.run, result=None, outputs=(), trace=trace))

    @contextmanager
    def surrounded(self) -> Iterator[bool]:
        """Inside, torch's state is the call's; or False: somebody changed what is everybody's."""
        state = self.run.torch_state
        with self.contexts.entered(bool(name_quickly(state)["inference mode"])):
            yield sample_quickly() == state

    def find_alive(self) -> tuple[torch.Tensor, ...]:
        """The graph's inputs; none where one of them is gone."""
        assert self.trace.completion is not None
        tensors = self.trace.completion.tensors
        alive = tuple(tensor for tensor in tensors if tensor is not None)
        return alive if len(alive) == len(tensors) else ()

    def is_intact(self) -> bool:
        """Whether the graph's inputs are still what they were, as far as compiled code goes."""
        assert self.trace.completion is not None
        pairs = zip(self.trace.completion.tensors, self.trace.inputs, strict=True)
        return all(tensor is None or meta_of(tensor) == wanted.meta for tensor, wanted in pairs)


class _Untaken(Exception):
    """The back end can't compile the graph with its open sizes and numbers."""


def check_drawn(trace: Trace) -> None:
    """Refuse what is drawn, where it can't be drawn on each call."""
    if trace.shadow is None or not trace.shadow.drawn:
        return
    check_ways(trace.shadow)
    if runs_user_code(trace.graph):
        raise Refused(DRAWS.slug, DRAWN_BY_BOTH)


class Pipeline(Struct, frozen=True):
    """The stages, for the calls of one callable."""

    target: Callable[..., Any]
    options: Options
    tally: Tally
    teller: Teller
    patience: Patience
    variation: Variation

    def begin(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: object,
        entries: Callable[[], Sequence[Entry]],
    ) -> Made | Planned:
        """Make a call, and plan an entry of it, beside those that there are after it."""
        with TRACE:
            opening = self.variation.look(self.target, args, kwargs)
            exchanged = self.variation.find_exchanged()
        run, originals, counters = self.observe(args, kwargs, opening, exchanged)
        self.tally.traces += 1
        count_frame("total")
        if run.trace is None:
            assert run.refusal is not None
            if run.refusal.slug == TOLD:
                self.variation.note_told(run.refusal.where)
                return Made(run, None)
            is_draw = run.refusal.reason in (DRAWS.reason, NUMPY_DRAWS.reason)
            if is_draw and self.variation.will_draw():
                return Made(run, None)
            return self._refuse(run, run.refusal, bool(opening or exchanged))
        has_taken = opening is not None and opening.takes
        try:
            planned = self._plan(run, originals, counters, key, entries(), has_taken)
        except Refused as refused:
            if refused.slug == "tensor-branch":
                will_take = not has_taken and self.variation.will_take()
                if will_take or self.variation.will_close(run.trace, refused.where):
                    return Made(run, None)
            return self._refuse(run, refused.refusal, bool(opening or exchanged))
        return planned if isinstance(planned, Planned) else Made(run, planned)

    def finish(self, planned: Planned) -> Made:
        """Compile it."""
        try:
            return Made(planned.run, self._build(planned))
        except Refused as refused:
            is_open = planned.trace.shadow is not None
            return self._refuse(planned.run, refused.refusal, is_open)

    def _refuse(self, run: Run, refusal: Refusal, is_open: bool) -> Made:
        if is_open and not self.patience.is_passing(refusal, run.was_alone):
            self.variation.give_up()  # it may be taken where less is open
        return Made(run, refusal)

    # --- plan ---

    def _plan(
        self,
        run: Run,
        originals: Originals | None,
        counters: Counters | None,
        key: object,
        entries: Sequence[Entry],
        has_taken: bool,
    ) -> Planned | Refusal | None:
        trace = run.trace
        assert trace is not None
        assert trace.completion is not None
        self.variation.note(trace)
        if self.variation.has_changed(trace):
            return None  # the run asked which one it got; the next gets those that are there
        is_written = any(wanted.written for wanted in trace.inputs)
        does_nothing = not (run.outputs or trace.completion.effects.steps or is_written)
        if does_nothing and not has_taken and self.variation.will_take():
            return None  # its result is numbers out of tensors, which the next leaves open
        self._check_drawn(trace, None)
        volatile = trace.completion.effects.volatile
        if volatile and self.variation.will_open(trace, volatile):
            return None  # the next call's entry is for every value
        if volatile:
            hits = self.tally.count_hits(entries)
            refusal = self.patience.note_volatile(volatile, key, hits)
            if refusal is not None or not self.patience.may_return(volatile):
                return refusal
        standing = Standing(self._note_retired, self.tally.note_rebound)
        rebinds = takes_other_state(self.options.backend, dict(self.options.backend_options))
        # Numbers that the next run leaves open would be compared as they are.
        is_last = has_taken or not self.variation.will_take()
        whole = self.options.fullgraph and is_last
        plan = build_plan(
            *(trace, run.torch_state, standing),
            rebinds=rebinds,
            crosses=is_last and not whole,
            whole=whole,
        )
        # The conditions of what is open are known when it is compiled.
        may_wait = originals is None and trace.shadow is None and not self.options.background
        waits = may_wait and self.tally.count_unused(entries) >= UNUSED_ALLOWED
        contexts = contexts_of(trace.torch_state)
        return Planned(run, originals, counters, plan, standing, waits, contexts)

    def _build(self, planned: Planned) -> Entry | None:
        trace, standing = planned.trace, planned.standing
        began = perf_counter_ns()
        try:
            with BACKEND:
                runtime = self.compile(trace, waits=planned.waits)
        except _Untaken as untaken:
            took_us = (perf_counter_ns() - began) // 1000
            note_figures(restart_reasons=str(untaken), time_before_restart_us=took_us)
            standing.close()
            self.variation.give_up()
            self.teller.warn_once("%s", untaken)
            return None
        with PLAN:
            if trace.shadow is not None:
                admit_open(planned.plan, trace.shadow, standing)
                self._check_marks(trace.shadow)
                has_learned = self.variation.note_closed(trace.shadow, self._find_fixing(trace))
                if has_learned and trace.shadow.drawn:
                    standing.close()
                    return None  # what is drawn is open in the next
                self._check_drawn(trace, standing)
                trace.shadow.forget()
            entry = Entry(trace, planned.plan, standing, runtime)
        if planned.originals is not None:
            self.check(entry, planned.run, planned.originals)
        elif not (planned.waits or self.options.background):
            self._run_ahead(entry, planned)
        return entry

    def _check_drawn(self, trace: Trace, standing: Standing | None) -> None:
        """Refuse what is drawn, where it can't be drawn on each call."""
        try:
            check_drawn(trace)
        except Refused:
            if standing is not None:
                standing.close()
            raise

    def _find_fixing(self, trace: Trace) -> set[str]:
        """The calls in which a compiler fixed a float that was left open."""
        assert trace.shadow is not None
        if self.options.fullgraph or not trace.shadow.fixed:
            return set()
        return find_fixing(trace.graph)

    def _check_marks(self, shadow: Shadow) -> None:
        """Say which sizes were marked as dynamic, and are part of the compiled code."""
        unmet = self.variation.find_unmet(shadow)
        if not unmet:
            return
        which = ", ".join(f"{path}.shape[{dim}]" for path, dim in unmet)
        why = "; ".join(str(one) for one in shadow.decisions if one.closed_by)
        reason = f"{which} is marked as dynamic, but compiled code fixes it{why and ': '}{why}."
        if self.options.fullgraph:
            raise Refused("mark-unmet", reason)
        self.teller.warn_once("%s: %s [mark-unmet]", self.teller.name, reason)

    def _note_retired(self, causes: tuple[Cause, ...], compile_id: str | None) -> None:
        self.tally.note_retired(causes, compile_id)
        self.variation.note_causes(causes)

    # --- observe ---

    def observe(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        opening: Opening | None,
        exchanged: frozenset[str],
    ) -> tuple[Run, Originals | None, Counters | None]:
        """Make the call, observed; and keep its inputs as they were where code will get them."""
        with BACKEND:
            prepare(self.options.backend)
        outer = CURRENT.kept
        originals = Originals(outer) if self.options.check else None
        ahead = originals is None and may_run_ahead(self.options.backend)
        counters = Counters(outer) if ahead else None
        CURRENT.kept = originals or counters or outer
        try:
            if CURRENT.kept is not None:
                with RECORD:
                    CURRENT.kept.before_run()
            with observing():
                run = _TRACER.run(
                    *(self.target, args, kwargs),
                    complete=True,
                    opening=opening,
                    exchanged=exchanged,
                )
            return run, originals, counters
        finally:
            CURRENT.kept = outer

    # --- compile ---

    def compile(self, trace: Trace, *, waits: bool) -> Runtime:
        """What the back end makes of a graph; in parts, where it can't look into some calls.

        `waits`: compile when it is first run. Refusals are raised now anyway. A part always waits.
        """
        if trace.shadow is not None:
            trace.graph_module.meta[OPEN] = trace.shadow
        if self.options.backend is eager:
            return self._run_backend(trace.graph_module, _find_examples(trace))
        check_functional(trace)
        module = spell_picks(trace.graph_module)
        if not takes_graphs_as_they_are(self.options.backend):
            module = spell_inference(module, bool(trace.torch_state["grad mode"]))
        module.meta |= trace.graph_module.meta
        assert trace.completion is not None
        own_dropout = draws_its_own(self.options.backend, dict(self.options.backend_options))
        module.meta[OWN_DROPOUT] = own_dropout
        fixing = None if self.options.fullgraph else self.variation.fixing
        cuts = find_cuts(module.graph, trace.completion.kept, fixing, own_dropout=own_dropout)
        note_figures(num_graph_breaks=len(cuts.why))
        if not cuts and waits:
            compile_for = functools.partial(self._compile_part, module)
            return Later(compile_for, waits=self.options.waits)
        if not cuts:
            return self._compile_part(module, _find_examples(trace))
        for refusal in cuts.refusals():
            if self.options.fullgraph:
                raise Refused(refusal.slug, refusal.reason, refusal.where)
            self.teller.count_refusal(refusal)
            self.teller.warn_cut(refusal)
        compile_part = functools.partial(self._compile_part, is_part=True)
        return cut(module, cuts, compile_part, _find_examples(trace))

    def _compile_part(
        self, module: fx.GraphModule, examples: Sequence[torch.Tensor], is_part: bool = False
    ) -> Runtime:
        with (
            self._showing(module.graph),
            keeping_saved(),
            telling_inference(module.graph),
            leaving_generators(),
            hiding_module_hooks(),
        ):
            runtime = mend_backward(module.graph, self._run_backend(module, examples), is_part)
        wrap = Unmarked if OPEN in module.meta else LaidOut
        code = wrap(runtime, module.graph)
        return Heeding(code, module.forward) if trains(module.graph) else code

    def _showing(self, graph: fx.Graph) -> AbstractContextManager[None]:
        """Whoever waits for the compiler is told."""
        if self.options.background:  # nobody does
            return nullcontext()
        count = sum(node.op.startswith("call_") for node in graph.nodes)
        size = f"{count:,} operation{'' if count == 1 else 's'}"
        return showing(f"{backend_name(self.options.backend)} compiles {self.teller.name} ({size})")

    def _run_backend(self, module: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Runtime:
        backend = self.options.backend
        options = dict(self.options.backend_options)
        if backend is inductor:
            options["around_backward"] = functools.partial(
                self.teller.compiling_backward, self.tally.traces - 1, self.options
            )
        if backend is inductor and self.options.eager_on_backend_error:
            options["on_failed_backward"] = self._run_as_it_is
        try:
            # Leaving inference mode, where a graph raised, brings back a compiler's keys.
            with torch._C._PreserveDispatchKeyGuard(), restoring_contexts(), telling_phases():
                if OPEN in module.meta and takes_graphs_as_they_are(backend):
                    with handing_over(module, examples) as (copied, handed):
                        return backend(copied, handed, **options)
                return backend(module, examples, **options)
        except BadOption:
            raise
        except Exception as error:
            raise_interruption(error)
            if FIXES not in module.meta and has_unknown_floats(module.graph):
                module.meta[FIXES] = True
                return self._run_backend(module, examples)
            reason = self._explain_failure(error)
            if OPEN in module.meta and not self.variation.fails_anyway(reason):
                raise _Untaken(
                    f"{reason} It failed with sizes or numbers left open, so from now on each "
                    "value is compiled on its own."
                ) from error
            if self.options.eager_on_backend_error:
                self.variation.note_failure(reason)
                self._run_as_it_is(error)
                return eager(module, examples)
            failed = BackendFailed(reason, slug="backend-failed")
            failed.graph_module = module
            raise failed from error

    def _explain_failure(self, error: Exception) -> str:
        return (
            f"The back end {backend_name(self.options.backend)} failed on the graph of "
            f"{self.teller.name}: {type(error).__name__}: {in_few_lines(error)}"
        )

    def _run_as_it_is(self, error: Exception) -> None:
        """Say that a graph, or the graph of its backward, isn't compiled."""
        reason = self._explain_failure(error)
        self.teller.count_refusal(Refusal("backend-failed", reason))
        tell_failure(error)
        end = "" if reason.endswith((".", "!", "?")) else "."
        self.teller.warn_once("%s%s The graph runs uncompiled.", reason, end)

    # --- the first run ---

    def _run_ahead(self, entry: Entry, planned: Planned) -> None:
        """Have the new code do now what it does once: the next call would wait for it."""
        trace, given = planned.trace, planned.find_alive()
        runs = count_runs_ahead(self.options.backend, given)
        if runs and entry.is_compiled and not has_modes() and can_run_ahead(trace):
            counters = planned.counters or Counters(None)
            run_ahead(self.teller.name, entry.run_code, runs, trace, given, counters)

    # --- check=True ---

    def check(self, entry: Entry, run: Run, originals: Originals) -> None:
        """Run the new code beside the run that it was made of; raise where they differ."""
        assert run.trace is not None
        name = self.teller.name
        if runs_user_code(run.trace.graph):
            self.teller.warn_once(
                "%s isn't checked: the check would run a custom function in it twice.", name
            )
            return
        try:
            with FIRST_RUN:
                numbers = tuple(number.value for number in run.trace.numbers)
                originals.check(
                    run,
                    lambda given: entry.run_code((*numbers, *given)),
                    name,
                    backend_name(self.options.backend),
                )
        except BaseException:
            entry.standing.close()
            raise


def has_modes() -> bool:
    """Whether a mode would see what is called now."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def _find_examples(trace: Trace) -> list[torch.Tensor]:
    """The graph's inputs, or tensors of their kind where the run let go of them."""
    assert trace.completion is not None
    pairs = zip(trace.completion.tensors, trace.inputs, strict=True)
    return [wanted.build() if tensor is None else tensor for tensor, wanted in pairs]
