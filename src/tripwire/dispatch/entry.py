"""Entry: one compiled specialisation. Guards on the call, wires on the world, code to run.

An entry whose wire tripped is *retired*: it isn't used again unless the value that it was
traced with comes back. While retired it holds no tensor, so what was replaced can die.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import _StopRecomputationError

from tripwire.backends.backwards import FirstRun
from tripwire.backends.registry import Runtime
from tripwire.dispatch.undo import build_undo
from tripwire.phases import BACKEND, FIRST_RUN, PLAN, RETIRE, current_compile
from tripwire.reading.reads import Place
from tripwire.reading.sources import Roots
from tripwire.reading.structure import Building, TensorPlan
from tripwire.reading.torchstate import sample_depth
from tripwire.tracing.result import Trace
from tripwire.tracing.state import CURRENT
from tripwire.validity.plan import Plan, build_plan
from tripwire.validity.probes import can_repeat, is_opaque
from tripwire.validity.wires import NOBODY, Cause, Writers
from tripwire.values.classes import isinstance
from tripwire.writes.sentry import call
from tripwire.writes.twin import Touch

_NO_ROOTS = Roots({}, None, {})
_NO_DEPTH = (False, 0)


@dataclass(frozen=True, slots=True)
class Summary:
    """What an entry is made of."""

    ops: int
    nodes: int
    inputs: int
    guards: int
    wires: int
    branches: tuple[str, ...]
    effects: tuple[str, ...]

    @staticmethod
    def of(trace: Trace, plan: Plan) -> Summary:
        """Of a trace and its plan."""
        return Summary(
            trace.statistics().ops,
            len(trace.graph.nodes),
            len(trace.inputs),
            len(plan.guards.checks),
            len(plan.dicts) + len(plan.objects) + len(plan.pulled),
            tuple(map(str, trace.branches)),
            tuple(map(str, trace.effects)),
        )


@dataclass(frozen=True, slots=True)
class Wire:
    """Something of the world that an entry depends on, for people."""

    source: str
    seen: str
    where: Place | None  # the user's line that reads it, or that leads there


@dataclass(frozen=True, slots=True)
class Saving:
    """What the hits of an entry saved: an estimate, on the careful side.

    Nobody ran the call unwatched, so what it takes plainly isn't known. Its torch calls stand for
    it: they were timed while it was observed, without what watched them, and without Python's own
    time between them. Of calls alike, the fastest stands for all. One that has no other like it
    ran for the first time, and may have been slow: it is worth between nothing and what it took,
    and `ns` takes what is nearest to no saving.

    A hit is timed whole, guards and all, the first few times after the first run; the median
    stands for all hits. On a GPU both sides are the time until the work is handed over.
    """

    hits: int  # after the first run, which may have compiled
    timed: int  # of these
    torch_ns: int  # in the torch calls of the observed run
    once_ns: int  # of that, in calls with no other like them
    hit_ns: int

    @property
    def ns(self) -> int:
        """What is certain, all hits together; below zero, they cost that much."""
        most = self.most_ns
        return min(0, most) if most < self.hits * self.once_ns else most - self.hits * self.once_ns

    @property
    def most_ns(self) -> int:
        """The same with each torch call at what it took."""
        return self.hits * (self.torch_ns - self.hit_ns)


class Balance(NamedTuple):
    """The savings of several entries: of those that saved time, and of those that cost some."""

    saved_ns: int
    lost_ns: int


def add_saving(balance: Balance | None, saving: Saving | None) -> Balance | None:
    """Take one more in, where it is known."""
    if saving is None:
        return balance
    saved, lost = balance or (0, 0)
    return Balance(saved + max(0, saving.ns), lost + max(0, -saving.ns))


TIMED = 5  # hits of an entry; later ones read no clock

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}


def _rank(wire: Wire) -> int:
    """The user's, then what every module and class has, then torch's."""
    source = wire.source
    if source.startswith(("G[torch", "G[builtins")):
        return 2
    last = source.rpartition(".")[2]
    return 1 if last.startswith("__") or last in _OF_EVERY_MODULE else 0


Admits = Callable[[tuple[Any, ...], dict[str, Any]], tuple[torch.Tensor, ...] | None]
Retired = Callable[[], "Callable[[Cause, str | None], None] | None"]


class RunAgain(Exception):
    """The compiled code raised, and left nothing behind that running plainly would do twice."""


class Entry:
    """One trace, armed."""

    def __init__(
        self,
        trace: Trace,
        torch_state: tuple[object, ...],
        compile_graph: Callable[[Trace], Runtime],
        on_retired: Retired,
    ) -> None:
        me = weakref.ref(self)  # the guard function is mine: no cycle through it
        self.is_dead = False

        def settle() -> bool:
            entry = me()
            return entry is not None and entry._settle()

        def on_death(ref: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
            entry = me()
            if entry is not None and not is_finalizing():
                entry._note_death(ref)

        self._lock = threading.RLock()  # a death may come while settling
        self._causes: dict[tuple[bool, int], Cause] = {}
        self._pending: list[Touch] = []  # taken from the sentry, and not yet looked at
        trouble = _Trouble(self._causes, self._pending)
        self._plan: Plan | None = build_plan(trace, torch_state, settle, trouble, on_death)
        with BACKEND:
            self._runtime = compile_graph(trace)
        with PLAN:
            self._prepare(trace, self._plan, on_retired)
        self.__class__ = _FreshEntry

    def _prepare(
        self,
        trace: Trace,
        plan: Plan,
        on_retired: Retired,
    ) -> None:
        """Lay out what a hit needs."""
        self.summary = Summary.of(trace, plan)
        self._lines = trace.reads.lines
        self._on_retired = on_retired
        self._compile_id = current_compile()
        self._told = ""
        self.hits = 0
        self.last_used = 0
        completion = trace.completion
        assert completion is not None
        self._in_torch_ns = completion.in_torch_ns, completion.once_ns
        self._took_ns: list[int] = []  # of the hits that were timed
        self._began = 0, 0  # the latest look at a call: thread, time
        self._outputs = trace.outputs
        self._effects = completion.effects.steps
        self._binding = trace.binding
        self._namespaces = trace.namespaces
        self._fetched = completion.fetched
        self._expressions = _compile_locals(completion.expressions)
        self._fixed = (
            {
                name: value
                for name, value in completion.bound.items()
                if name not in completion.expressions
            }
            if completion.fetched
            else {}
        )
        self._can_repeat = can_repeat(trace)
        effects = bool(self._effects)
        self._undo = (
            None if self._can_repeat else build_undo(trace, self._runtime, has_effects=effects)
        )
        self._leaves_traces = not self._can_repeat or is_opaque(trace)
        self._generators = tuple(
            constant.value
            for constant in trace.constants
            if isinstance(constant.value, torch.Generator)
        )
        self._written = tuple(i for i, wanted in enumerate(trace.inputs) if wanted.written)
        self._contexts = plan.contexts
        self._held = plan.held
        self._n_held = len(self._held.tensors)
        self._positions = plan.fetched
        self._leading = self._positions == tuple(range(len(self._positions)))
        self._direct = (
            self._outputs.index if type(self._outputs) is TensorPlan and not self._effects else None
        )
        self.admits: Admits = plan.guards.admits
        self.probe = plan.probe
        for index in plan.suspects:
            cause = plan.dicts[index].find_cause(NOBODY)
            if cause is not None:
                self._causes[True, index] = cause
        if self._causes:  # until the value comes back that the run found
            self._held.release()
        # What was watched may have been written while the back end compiled.
        self._settle()

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Why the entry is retired; empty while it is in use."""
        return tuple(self._causes.values())

    @property
    def source(self) -> str:
        """The guard function's text."""
        return "" if self._plan is None else self._plan.guards.source

    def list_wires(self) -> list[Wire]:
        """What of the world it depends on; what is the user's comes first."""
        rows = [] if self._plan is None else self._plan.wires()
        wires = [Wire(str(source), seen, self._lines.find(source)) for source, seen in rows]
        return sorted(wires, key=_rank)

    def find_saving(self) -> Saving | None:
        """What its hits saved; None before enough of them were timed."""
        took = self._took_ns[:TIMED]
        if len(took) < TIMED:
            return None
        return Saving(self.hits - 1, TIMED, *self._in_torch_ns, int(median(took)))

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The graph's inputs that are state, while it is in use."""
        return self._held.tensors

    def find_failures(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Why this entry isn't for a call."""
        if self._causes:
            return [str(cause) for cause in tuple(self._causes.values())]
        if self._plan is None:
            return ["an object that it read is gone"]
        return self._plan.guards.find_failures(args, kwargs)

    # --- validity ---

    def look_at_pulled(self) -> None:
        """Tell, once, what differs of the things that no sentry watches."""
        if self._plan is None or self._causes:
            return
        found = (wire.find_cause(NOBODY) for wire in self._plan.pulled)
        cause = next(filter(None, found), None)
        if cause is not None and str(cause) != self._told:
            self._tell(cause)
        self._told = str(cause)

    def _tell(self, cause: Cause) -> None:
        tell = self._on_retired()
        if tell is not None:
            tell(cause, self._compile_id)

    def _settle(self) -> bool:
        """Look at what was touched. Whether everything is as it was traced."""
        with self._lock:
            return self._settle_alone()

    def _settle_alone(self) -> bool:
        plan = self._plan
        if plan is None:
            return False
        retired = bool(self._causes)
        self._pending.append(_ANYTHING)  # other threads wait, and an interrupt loses nothing
        self._pending.extend(plan.sentry.take())
        if plan.sentry.is_spent:  # it names everything each time: for the last time now
            plan = self._plan = plan.rearm()
        touches = [touch for touch in self._pending if touch is not _ANYTHING]
        owners = {touch.index: touch for touch in touches if not touch.is_dict}
        with RETIRE if touches else nullcontext():
            for touch in touches:
                self._compare(plan, touch, owners)
        self._pending.clear()
        if self._causes and not retired:
            self._held.release()
            self._tell(next(iter(self._causes.values())))
        elif retired and not self._causes:
            if not self._held.restore():
                self.close()
        return not self._causes and not self.is_dead

    def _compare(self, plan: Plan, touch: Touch, owners: dict[int, Touch]) -> None:
        """Whether what was touched is as it was."""
        if touch.is_dict:
            wire = plan.dicts[touch.index]
            owner = None if wire.owner is None else owners.get(wire.owner)
            cause = wire.find_cause(Writers(touch, owner))
        else:
            cause = plan.objects[touch.index].find_cause(Writers(touch))
        key = (touch.is_dict, touch.index)
        if cause is None:
            self._causes.pop(key, None)
        elif key not in self._causes:
            self._causes[key] = cause

    def _note_death(self, ref: object) -> None:
        """Something that was read is gone, and so is this entry.

        Nothing is looked at now: objects may be half taken apart.
        """
        plan = self._plan
        retired = bool(self._causes)
        self.close()
        for wire in () if plan is None or retired else plan.objects:
            if wire.is_about(ref):
                self._tell(wire.gone())
                break

    def close(self) -> None:
        """Let go of everything: never to be used again. May come in the midst of a call."""
        with self._lock:
            self.is_dead = True
            self._held.drop()
            plan, self._plan = self._plan, None
            if plan is not None:
                plan.sentry.close()
                self.admits = _admit_nothing

    # --- running ---

    def find_state(self) -> tuple[torch.Tensor, ...] | None:
        """The graph's inputs that are state.

        None where the entry was retired by another thread since it admitted the call.
        """
        state = self._held.tensors
        return state if len(state) == self._n_held else None

    def join(
        self, fetched: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """All of the graph's inputs: those that came with the call, and state."""
        inputs = list(state)
        for position, tensor in zip(self._positions, fetched, strict=True):
            inputs.insert(position, tensor)
        return tuple(inputs)

    def run_code(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Only the compiled code, on other inputs: no result is built, no effect repeated."""
        depth = _NO_DEPTH if self._contexts is None else sample_depth()
        try:
            outputs = tuple(call(self._runtime, inputs, ()))
        except BaseException as error:
            if self._contexts is not None:
                self._contexts.restore(error, depth)
            raise
        self._note_first_run()
        return outputs

    def _note_first_run(self) -> None:
        if type(self._runtime) is FirstRun:
            self._runtime = self._runtime.settled

    def run(
        self,
        fetched: tuple[torch.Tensor, ...],
        state: tuple[torch.Tensor, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the compiled code; build the result, and repeat the effects."""
        if not self._leading:
            fetched, state = self.join(fetched, state), ()
        if self._leaves_traces and CURRENT.kept is not None:
            CURRENT.kept.before_draw(self._generators)
            inputs = fetched + state
            for index in self._written:
                CURRENT.kept.before_write(inputs[index])
        saved = None if self._undo is None else self._undo.save(fetched + state)
        depth = _NO_DEPTH if self._contexts is None else sample_depth()
        try:
            tensors = call(self._runtime, fetched, state)
        except BaseException as error:
            if self._contexts is not None:
                self._contexts.restore(error, depth)
            if isinstance(error, Exception) and not isinstance(error, _StopRecomputationError):
                if self._can_repeat or (saved is not None and saved.restore()):
                    raise RunAgain from error
            raise
        if self._direct is not None:
            return tensors[self._direct]
        roots = _NO_ROOTS
        if self._fetched:
            bound = self._fixed | self._expressions(args, kwargs)
            roots = self._binding.roots(bound, self._namespaces)
        # All before the first effect, which may move what a path leads to.
        reached = {source: source.fetch(roots) for source in self._fetched}
        building = Building(tensors, roots, {}, reached)
        for step in self._effects:  # before the result, which may hold what they make
            step.apply(building)
        return self._outputs.build(building)


class _Trouble:
    """True while an entry is retired, or somebody looks whether it is."""

    __slots__ = ("_causes", "_pending")

    def __init__(self, causes: dict[tuple[bool, int], Cause], pending: list[Touch]) -> None:
        self._causes = causes
        self._pending = pending

    def __bool__(self) -> bool:
        return bool(self._causes or self._pending)


_ANYTHING = Touch(False, -1, None)


def _admit_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The guard function of an entry that is dead."""


def _compile_locals(expressions: dict[str, str]) -> Callable[..., dict[str, object]]:
    spelled = ", ".join(f"{name!r}: {expression}" for name, expression in expressions.items())
    function: Callable[..., dict[str, object]] = eval(f"lambda args, kwargs: {{{spelled}}}")
    return function


class _FreshEntry(Entry):
    """An entry until it first runs: back ends put work off until then."""

    def run(
        self,
        fetched: tuple[torch.Tensor, ...],
        state: tuple[torch.Tensor, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.__class__ = _TimedEntry  # type: ignore[assignment]
        with FIRST_RUN:
            result = Entry.run(self, fetched, state, args, kwargs)
        self._note_first_run()
        return result


class _TimedEntry(Entry):
    """An entry whose hits are timed, from the look at a call to its result."""

    @property
    def admits(self) -> Admits:
        self._began = get_ident(), perf_counter_ns()
        admits: Admits = self.__dict__["admits"]
        return admits

    @admits.setter
    def admits(self, admits: Admits) -> None:
        self.__dict__["admits"] = admits

    def run(
        self,
        fetched: tuple[torch.Tensor, ...],
        state: tuple[torch.Tensor, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        thread, began = self._began
        # Not super(): another thread may have ended the timing, and with it this class.
        result = Entry.run(self, fetched, state, args, kwargs)
        if thread == get_ident():
            self._took_ns.append(perf_counter_ns() - began)
            if len(self._took_ns) >= TIMED:
                self.__class__ = Entry  # type: ignore[assignment]  # no question any more
        return result
