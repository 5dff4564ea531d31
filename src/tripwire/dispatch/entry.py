"""Entry: one compiled specialisation: the code to run, and how its results become the call's.

Its standing (validity/standing.py) decides whether it may run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
from msgspec import Struct
from torch.utils.checkpoint import _StopRecomputationError

from tripwire.backends.backwards import Settling
from tripwire.backends.dynamo import is_cut_off
from tripwire.backends.registry import Runtime
from tripwire.dispatch.originals import add_turning, build_undo
from tripwire.dispatch.tally import Saving
from tripwire.dispatch.turns import Turn
from tripwire.errors import FunctionChanged, raise_interruption
from tripwire.reading.names import ReadLine
from tripwire.reading.sources import Roots
from tripwire.reading.structure import (
    AgainPlan,
    Building,
    ComputedPlan,
    ConstantPlan,
    MadePlan,
    NumberPlan,
    PartPlan,
    SamePlan,
    TakenPlan,
    TensorPlan,
)
from tripwire.rulebook.refusals import Cause, Refused
from tripwire.telemetry.compiles import BACKEND, FIRST_RUN
from tripwire.tracing.answers import (
    Answers,
    FormChanged,
    begin,
    can_answer,
    end,
    hands_out_numbers,
    has_own,
)
from tripwire.tracing.modes import sample_depth
from tripwire.tracing.result import Completion, Trace, can_repeat, is_opaque
from tripwire.tracing.state import CURRENT
from tripwire.validity.plan import Plan
from tripwire.validity.standing import Standing
from tripwire.validity.ways import OtherWay
from tripwire.values.classes import isinstance
from tripwire.writes.sentry import call

_NO_ROOTS = Roots({}, None, {})
_NO_DEPTH = (False, 0)
_NUMBERS = (
    "a custom autograd function returns numbers to Python. If they differed in a later call, that "
    "call could not be made again, since it changes tensors in place first. Return tensors only."
)


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
    open: tuple[str, ...] = ()  # sizes and numbers that may be others on another call
    decisions: tuple[str, ...] = ()  # about those, each with the line that made it

    @staticmethod
    def of(trace: Trace, plan: Plan) -> Summary:
        """The summary of an entry that has this trace and this plan."""
        return Summary(
            trace.statistics().ops,
            len(trace.graph.nodes),
            len(trace.inputs),
            len(plan.guards.checks),
            len(plan.dicts) + len(plan.objects) + len(plan.pulled),
            tuple(_describe_branches(trace, plan)),
            tuple(map(str, trace.effects)),
            () if trace.shadow is None else trace.shadow.symbols.list_open(),
            () if trace.shadow is None else tuple(map(str, trace.shadow.decisions)),
        )


def _describe_branches(trace: Trace, plan: Plan) -> Iterator[str]:
    crossed = () if plan.ways is None else plan.ways.branches
    for branch in trace.branches:
        yield f"{branch}{_ON_THE_WAY if branch in crossed else ''}"


_ON_THE_WAY = " (compared in the middle of the call)"


class Wire(Struct, frozen=True):
    """Something of the world that an entry depends on, for people."""

    source: str
    seen: str
    where: ReadLine | None  # the user's line that reads it, or that leads there


TIMED = 5  # hits of an entry; later ones read no clock

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}


def _rank(wire: Wire) -> int:
    """The user's, then what every module and class has, then torch's."""
    source = wire.source
    if source.startswith(("G[torch", "G[builtins")):
        return 2
    last = source.rpartition(".")[2]
    return 1 if last.startswith("__") or last in _OF_EVERY_MODULE else 0


class Later:
    """Code that is compiled when its entry is first hit. Until then there is only the graph."""

    __slots__ = ("_compile", "_runtime", "_turn", "_waits")

    def __init__(
        self, compile_for: Callable[[Sequence[torch.Tensor]], Runtime], *, waits: bool
    ) -> None:
        self._compile = compile_for
        self._waits = waits
        self._turn = Turn()
        self._runtime: Runtime | None = None

    def compile(self, inputs: Sequence[torch.Tensor]) -> Runtime:
        """The code, made once, with the inputs of the call that wants it.

        Raises NotYet where another thread makes it, and nobody wants to wait for that; and where
        no compiler can work.
        """
        while self._runtime is None:
            if is_cut_off():
                raise NotYet
            with self._turn.taken() as token:
                if token is not None and self._runtime is None:
                    self._runtime = self._compile(inputs)
            if token is None and not (self._waits and self._turn.wait()):
                raise NotYet
        return self._runtime

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self.compile(inputs)(*inputs)


class NotYet(Exception):
    """An entry fits the call, but its code isn't compiled, and this thread can't do it now."""


class RunAgain(Exception):
    """The compiled code stopped, and left no effect that a plain call would repeat."""

    def __init__(self, answers: Answers | None = None) -> None:
        super().__init__()
        self.answers = answers  # of the custom functions that ran, and mustn't run twice


# What compiled code raises where nothing failed.
_NO_ERRORS = (RunAgain, OtherWay, NotYet, _StopRecomputationError)


class Entry:
    """One trace, compiled and under watch."""

    # Not a dict: setting __class__ makes one that CPython 3.11 has no quick way into. One op's hit:
    # 4.2 → 3.8 µs, bench_dispatch.py.
    __slots__ = (
        "__weakref__",
        "_answers",
        "_began",
        "_binding",
        "_build",
        "_can_repeat",
        "_can_undo",
        "_compares",
        "_contexts",
        "_direct",
        "_effects",
        "_expressions",
        "_fetched",
        "_fixed",
        "_generators",
        "_in_torch_ns",
        "_leading",
        "_leaves_traces",
        "_lines",
        "_n_numbers",
        "_namespaces",
        "_outputs",
        "_positions",
        "_risks",
        "_runtime",
        "_took_ns",
        "_undo",
        "_written",
        "because",
        "held",
        "hits",
        "last_used",
        "n_held",
        "probe",
        "standing",
        "summary",
        "ways",
    )

    def __init__(self, trace: Trace, plan: Plan, standing: Standing, runtime: Runtime) -> None:
        completion = trace.completion
        assert completion is not None
        self.standing = standing
        self.hits = 0
        self.last_used = 0
        # What had changed when it was made; None once it was worth that, see patience.py.
        self.because: tuple[str, ...] | None = None
        self.probe = plan.probe
        self.ways = plan.ways
        self.summary = Summary.of(trace, plan)
        self._lines = trace.reads.lines
        self._in_torch_ns = completion.in_torch_ns, completion.once_ns
        self._took_ns: list[int] = []  # of the hits that were timed
        self._began = 0, 0  # the latest look at a call: thread, time
        self._runtime = runtime
        self._contexts = plan.contexts
        self.held = plan.held  # the graph's inputs that are state, while it is in use
        self.n_held = len(self.held.tensors)
        self._positions = plan.fetched
        self._leading = self._positions == tuple(range(len(self._positions)))
        self._n_numbers = 0 if trace.shadow is None else len(trace.shadow.formulas.outputs)
        self._prepare_result(trace, completion)
        self._prepare_error(trace)
        # What was watched may have been written while the back end compiled.
        standing.check_suspects(plan.suspects)
        self.__class__ = _FreshEntry

    def _prepare_result(self, trace: Trace, completion: Completion) -> None:
        """Lay out how a result is built, and effects are repeated."""
        self._outputs = trace.outputs
        self._effects = completion.effects.steps
        self._risks = completion.risks
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
        is_alone = not (self._effects or self._fetched)
        outputs = trace.outputs
        is_tensor = isinstance(outputs, TensorPlan)
        self._direct = outputs.index if is_alone and isinstance(outputs, TensorPlan) else None
        self._build = _compile_result(outputs) if is_alone and not is_tensor else None

    def _prepare_error(self, trace: Trace) -> None:
        """Lay out what becomes of a call whose compiled code raises."""
        self._can_repeat = can_repeat(trace)
        self._undo = (
            None
            if self._can_repeat
            else build_undo(trace, self._runtime, has_effects=bool(self._effects))
        )
        self._can_undo = self._undo is not None
        if self.ways is not None:
            self._undo = add_turning(self._undo, trace, self.ways.done)
        self._compares = has_own(trace.graph)
        self._answers = (
            build_undo(trace, self._runtime, has_effects=bool(self._effects), answers=True)
            if self._compares and can_answer(trace.graph)
            else None
        )
        if self._answers is None and hands_out_numbers(trace.graph):
            raise Refused("tensor-branch", _NUMBERS)
        self._leaves_traces = not self._can_repeat or is_opaque(trace)
        self._generators = tuple(
            constant.value
            for constant in trace.constants
            if isinstance(constant.value, torch.Generator)
        )
        count = len(trace.numbers)
        self._written = tuple(count + i for i, w in enumerate(trace.inputs) if w.written)

    @property
    def source(self) -> str:
        """The guard function's text."""
        plan = self.standing.plan
        return "" if plan is None else plan.guards.source

    def retire_for(self, changed: FormChanged | FunctionChanged) -> None:
        """A custom function returned another kind of result than when this was traced."""
        self.standing.retire(Cause("a custom function", "as traced", str(changed), None))

    def list_wires(self) -> list[Wire]:
        """What of the world it depends on; what is the user's comes first."""
        plan = self.standing.plan
        rows = [] if plan is None else plan.wires()
        wires = [Wire(str(source), seen, self._lines.find(source)) for source, seen in rows]
        return sorted(wires, key=_rank)

    @property
    def is_compiled(self) -> bool:
        """Whether the back end has seen its graph."""
        return type(self._runtime) is not Later

    def find_saving(self) -> Saving | None:
        """What its hits saved; None before enough of them were timed."""
        took = self._took_ns[:TIMED]
        if len(took) < TIMED:
            return None
        return Saving(self.hits - 1, TIMED, *self._in_torch_ns, sorted(took)[TIMED // 2])

    # --- running ---

    def ask_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...] | None, tuple[torch.Tensor, ...]]:
        """What it fetches for a call, if it takes it, and its state at the moment of asking.

        Another thread retired it, or put other tensors there, while it was asked. With the state of
        a later moment a call could see what no order of reads and writes shows to plain code.
        """
        while len(state := self.held.tensors) == self.n_held:
            fetched = self.standing.admits(args, kwargs)
            if fetched is None or self.held.tensors is state:
                return fetched, state
        return None, state  # retired

    def join(
        self, fetched: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """All of the graph's inputs: those that came with the call, and state."""
        inputs = list(state)
        for position, tensor in zip(self._positions, fetched, strict=not self._n_numbers):
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
        if isinstance(self._runtime, Settling):
            self._runtime = self._runtime.settled

    def run(
        self,
        fetched: tuple[torch.Tensor, ...],
        state: tuple[torch.Tensor, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the compiled code; build the result, and repeat the effects."""
        numbers: tuple[Any, ...] = ()
        if self._n_numbers:
            fetched, numbers = fetched[: -self._n_numbers], fetched[-self._n_numbers :]
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
            if self._compares:
                tensors = self._run_comparing(fetched, state)
            else:
                tensors = call(self._runtime, fetched, state)
            if self._risks:
                _check_risks(self._risks, tensors, numbers)
        except BaseException as error:
            if self._contexts is not None:
                self._contexts.restore(error, depth)
            if isinstance(error, OtherWay):
                if saved is not None and not saved.restore():
                    raise AssertionError("what is to be undone has another form now") from error
                raise
            if isinstance(error, Exception) and not isinstance(error, _NO_ERRORS):
                raise_interruption(error)
                if self._can_repeat or (self._can_undo and saved is not None and saved.restore()):
                    raise RunAgain from error
            raise
        if self._direct is not None:
            return tensors[self._direct]
        if self._build is not None:
            return self._build(tensors, numbers)
        roots = _NO_ROOTS
        if self._fetched:
            bound = self._fixed | self._expressions(args, kwargs)
            roots = self._binding.roots(bound, self._namespaces)
        # All before the first effect, which may move what a path leads to.
        reached = {source: source.fetch(roots) for source in self._fetched}
        building = Building(tensors, roots, {}, reached, numbers)
        for step in self._effects:  # before the result, which may hold what they make
            step.apply(building)
        return self._outputs.build(building)

    def _run_comparing(
        self, fetched: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Run the compiled code as far as custom functions return what they did when traced."""
        undo = self._answers
        saved = None if undo is None else undo.save(fetched + state)
        answers = Answers(() if undo is None else undo.generators)
        before = begin(answers)
        try:
            tensors: tuple[torch.Tensor, ...] = call(self._runtime, fetched, state)
            return tensors
        except _NO_ERRORS:
            raise
        except Exception as error:
            raise_interruption(error)
            if saved is not None and saved.restore():
                raise RunAgain(answers) from error
            if not isinstance(error, FormChanged):
                raise
            raise FunctionChanged(
                f"{error}. The call can't be made again as plain Python: it changed a large "
                "tensor in place, or a custom function changes its arguments, returns views of "
                "them, writes to what the call reads, or runs in a checkpoint. Later calls run as "
                "plain Python. Return one kind of result (dtype, class, requires_grad), or call "
                "the function outside of compiled code.",
                slug="function-changed",
            ) from error
        finally:
            end(before)


def _check_risks(
    risks: tuple[tuple[PartPlan, type], ...],
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[Any, ...],
) -> None:
    """Raise as Python does, where compiled code gives infinity, nan, or what is left in 64 bits."""
    building = Building(tensors, _NO_ROOTS, {}, {}, numbers)
    for plan, kind in risks:
        value: Any = plan.build(building)
        if type(value) is not kind:
            raise TypeError(f"a number taken out of a tensor led to {value!r}")
        if kind is int and abs(value) >= 2**63:  # type: ignore[arg-type]  # an int, then
            raise OverflowError("a number taken out of a tensor led to one of more than 64 bits")


def _compile_locals(expressions: dict[str, str]) -> Callable[..., dict[str, object]]:
    spelled = ", ".join(f"{name!r}: {expression}" for name, expression in expressions.items())
    function: Callable[..., dict[str, object]] = eval(f"lambda args, kwargs: {{{spelled}}}")
    return function


def _compile_result(plan: PartPlan) -> Callable[..., object]:
    """What builds a result of this plan, as one function written for it.

    Going through the plan takes 2.5 µs more for the output object of a model of transformers.
    """
    space: dict[str, Any] = {}
    lines: list[str] = []

    def constant(value: object) -> str:
        space[f"k{len(space)}"] = value
        return f"k{len(space) - 1}"

    def spell(part: PartPlan) -> str:
        match part:
            case TensorPlan(index):
                return f"tensors[{index}]"
            case NumberPlan(index):
                return f"numbers[{index}]"
            case TakenPlan(tensor):
                return f"{spell(tensor)}.item()"
            case SamePlan(_, held) if held is not None:
                return f"{constant(held)}()"
            case ConstantPlan(value):
                return constant(value)
            case MadePlan(key, parts, make):
                made = f"[{', '.join(map(spell, parts))}]"
                lines.append(f"m{key} = {made if make is list else f'{constant(make)}({made})'}")
                return f"m{key}"
            case AgainPlan(key):
                return f"m{key}"
            case ComputedPlan(function, operands):
                return f"{constant(function)}({', '.join(map(spell, operands))})"
        raise AssertionError(part)  # what is reached through arguments isn't built here

    lines.append(f"return {spell(plan)}")
    body = "".join(f"    {line}\n" for line in lines)
    exec(compile(f"def build(tensors, numbers):\n{body}", "<tripwire result>", "exec"), space)
    return space["build"]  # type: ignore[no-any-return]


class _FreshEntry(Entry):
    """An entry until it first runs: back ends put work off until then."""

    __slots__ = ()

    def run(self, *call: Any) -> Any:
        if type(self._runtime) is Later:  # not below: an error here is the back end's own
            fetched, state, _, _ = call
            with BACKEND.of(self.standing.compile_id):
                self._runtime = self._runtime.compile(self.join(fetched, state))
        self.__class__ = _TimedEntry  # type: ignore[assignment]
        with FIRST_RUN.of(self.standing.compile_id):
            result = Entry.run(self, *call)
        self._note_first_run()
        return result


_get_standing = vars(Entry)["standing"].__get__  # the slot's own


class _TimedEntry(Entry):
    """An entry whose hits are timed, from the look at a call to its result."""

    __slots__ = ()

    @property
    def standing(self) -> Standing:  # type: ignore[override]  # read, as the slot is
        self._began = get_ident(), perf_counter_ns()
        standing: Standing = _get_standing(self)
        return standing

    def run(self, *call: Any) -> Any:
        thread, began = self._began
        # Not super(): another thread may have ended the timing, and with it this class.
        result = Entry.run(self, *call)
        if thread == get_ident():
            self._took_ns.append(perf_counter_ns() - began)
            if len(self._took_ns) >= TIMED:
                self.__class__ = Entry  # type: ignore[assignment]  # no question any more
        return result
