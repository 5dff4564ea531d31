"""Tracer: one real run of a callable becomes a Trace, or a refusal.

The run is the call: its result is the real one, and the user's code runs once (L4). An
exception of the user's comes out as it is. A refusal stops recording, not the run.

On request a trace is checked: the function runs again, then the graph, and the two are compared.
Both start from equal values: arguments as they were before the first run, everything else as the
first run left it. Afterwards everything is restored, random generators included. A trace that fails
the check depends on something that it doesn't hold: a counter, a clock, an effect.
"""

from __future__ import annotations

import difflib
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import NoneType, TracebackType
from typing import Any

import torch
from msgspec import Struct
from torch import fx
from torch.utils import _pytree as pytree

from tripwire.env import IS_KNOWN_PYTHON, is_library_file, is_own_code
from tripwire.errors import FLAG, CannotTrace, Kind, TraceDiffers, TripwireError, check_kinds
from tripwire.imports import HAS_GIL, importing, uncounted_registrations
from tripwire.ranges import SourceRange, capture_range
from tripwire.reading.binding import build_binding
from tripwire.reading.sources import Local, Roots
from tripwire.reading.structure import Planner, build_skeleton, find_difference
from tripwire.reading.tensors import iter_tensors
from tripwire.reading.torchstate import sample_quickly
from tripwire.rulebook.refusals import Refusal, Refused
from tripwire.telemetry.compiles import OBSERVE, TRACE
from tripwire.tracing import hooks
from tripwire.tracing.branches import TracerWarning
from tripwire.tracing.modes import sample_contexts, sample_depth
from tripwire.tracing.open.opening import Opening
from tripwire.tracing.result import Run, Trace
from tripwire.tracing.session import Session, run_user
from tripwire.tracing.state import CURRENT, TracingState
from tripwire.values.classes import isinstance

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("force_outplace", "strict", "check"), FLAG),
    "name_fn": ((Callable, NoneType), "a function of a tensor, or None"),
}


class Tracer(Struct, frozen=True):
    """Traces callables, with these options:

    force_outplace: in-place calls are recorded in their out-of-place form.
    strict: results may hold no list or dict, and None is refused, whatever was written.
    name_fn: names a tensor's node; None leaves names to the user's variables.
    check: run the function and the graph again on equal inputs, and compare.
    """

    force_outplace: bool = False
    strict: bool = False
    name_fn: Callable[[torch.Tensor], str | None] | None = None
    check: bool = False

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        check_kinds(given, _KINDS)

    def trace(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Trace:
        """Run once and return the trace. Raises CannotTrace where there can be none."""
        return self.trace_call(fn, args, kwargs, stacklevel=3)

    def trace_call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        stacklevel: int,
    ) -> Trace:
        """`trace`, with warnings pointed at a caller further up."""
        copied = copy_arguments(args, kwargs) if self.check else None
        callers = capture_range(stacklevel - 1, (None, None), None)
        run = self.run(fn, args, kwargs, callers=callers)
        if run.trace is None:
            assert run.refusal is not None
            raise run.refusal.error()
        if run.trace.effects:
            written = ", ".join(map(str, run.trace.effects))
            warnings.warn(
                f"{run.trace.name} wrote {written}. A graph holds tensors only: calling the "
                "trace won't repeat these writes.",
                TracerWarning,
                stacklevel=stacklevel,
            )
        if copied is not None:
            check_trace(run.trace, lambda args, kwargs: self.run(fn, args, kwargs), *copied)
        return run.trace

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        complete: bool = False,
        opening: Opening | None = None,
        exchanged: frozenset[str] = frozenset(),
        callers: SourceRange | None = None,
    ) -> Run:
        """Run once, observed.

        complete: refuse what can't be repeated or whose reads can't be seen, and plan effects,
        so that the trace can stand for later calls.
        exchanged: paths of what others put in its place from call to call.
        callers: the stack around the run, which is the end of each node's.
        """
        if CURRENT.tracing:
            raise CannotTrace(
                "trace was called inside a function that is being traced. Trace the inner "
                "function on its own, or call it plainly: the outer trace sees all it does.",
                slug="nested-trace",
            )
        if not HAS_GIL:
            return Run(fn(*args, **kwargs), None, Refusal("free-threaded", NEEDS_GIL))
        if not IS_KNOWN_PYTHON:
            return Run(fn(*args, **kwargs), None, Refusal("unknown-python", _UNKNOWN))
        with TRACE:
            torch_state = sample_quickly()
            session = self._begin(fn, args, kwargs, complete, opening, exchanged, callers)
        if isinstance(session, Refusal):
            with OBSERVE:
                return Run(fn(*args, **kwargs), None, session)
        state = session.state
        contexts, depth = sample_contexts(), sample_depth()
        try:
            with OBSERVE:
                result = session.execute(fn, *session.open_arguments(args, kwargs))
        except BaseException as error:
            if id(error) != state.raised and _is_own_fault(error):
                contexts.restore(error, depth)  # it may have hit the leaving of a `no_grad`
            with TRACE:
                session.leave()
                if state.shadow is not None:
                    state.shadow.settle(None)
                _let_go(state)
                error.__traceback__ = _without_own_frames(error.__traceback__)
            raise
        with TRACE:
            session.leave()
            try:
                run = session.freeze(result, torch_state)
            finally:
                _let_go(state)
            del session, state  # in here: what they held takes time to die
        return run

    def _begin(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        complete: bool,
        opening: Opening | None,
        exchanged: frozenset[str],
        callers: SourceRange | None,
    ) -> Session | Refusal:
        """Meet what the call reaches; a refusal where it can't be observed. Nothing runs yet."""
        binding = build_binding(fn)
        try:
            bound = binding.bind(args, kwargs)
        except TypeError:  # the call itself says it in the words that users know
            return Refusal("unbound-arguments", _UNBOUND)
        state = TracingState(force_outplace=self.force_outplace, strict=self.strict)
        state.name_fn = self.name_fn
        state.target = fn
        state.ends = (run_user.__code__, hooks.CALL_IN_SCOPE)
        state.outer = state.callers = callers
        state.quiet = complete
        state.reach.exchanged = exchanged
        function = binding.function
        is_told = function is not None and opening and opening.is_told_by(function.__code__)
        if opening is not None and not is_told:
            with importing(), uncounted_registrations():
                from tripwire.tracing.open.shadow import Shadow  # imports much

                state.shadow = Shadow(state, opening)
        try:
            session = Session(state, binding, bound, binding.expressions(args, kwargs), complete)
        except BaseException as error:
            state.reach.holders.uproot()
            if isinstance(error, ReferenceError):
                return Refusal("hidden-state", _GONE)
            if isinstance(error, Refused):
                return error.refusal
            raise
        session.shape = (len(args), tuple(kwargs), binding.takes_keywords)
        return session


def _let_go(state: TracingState) -> None:
    """Hold nothing of the user's: what is in a circle lives until the garbage collector comes."""
    state.values.clear()  # weak references would get in the way of swap_tensors
    state.reach.holders.uproot()
    state.shadow = None  # it knows the state


_GONE = "an argument is, or holds, a weak proxy of an object that no longer exists."
_UNBOUND = "the call's arguments don't fit the signature that the callable shows."
NEEDS_GIL = (
    "tripwire needs the GIL, and this Python runs without it (a free-threaded build). Set "
    "PYTHON_GIL=1, or use an ordinary build."
)
_UNKNOWN = (
    f"Python {platform.python_version()} may read and write in ways that tripwire can't see. "
    "It knows Python 3.11 to 3.13."
)


# What may be raised anywhere. Other errors that come out of tripwire are those of functions that
# it stands in for: `getattr` by a name, `hash`, an import, arithmetic on open numbers.
_ANYWHERE = (RecursionError, MemoryError, TripwireError)


def _is_own_fault(error: BaseException) -> bool:
    """Whether an exception comes out of tripwire, or of the library on its behalf.

    What a hook calls in the library is what the user called.
    """
    if isinstance(error, Exception) and not isinstance(error, _ANYWHERE):
        return False
    trace = error.__traceback__
    own = in_hook = False
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_own_code(code):
            own, in_hook = True, code.co_filename in hooks.FILES
        elif in_hook or not is_library_file(code.co_filename):
            own = False
        trace = trace.tb_next
    return own


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    entries = []
    while trace is not None:
        if not is_own_code(trace.tb_frame.f_code):
            entries.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


# --- checking a trace ---

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def copy_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Arguments with fresh tensors; one tensor in two places stays one."""
    copies: dict[int, torch.Tensor] = {}

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return copies[id(value)]

    copied: Arguments = pytree.tree_map(fresh, (args, kwargs))
    return copied


def check_trace(
    trace: Trace,
    run_again: Callable[[tuple[Any, ...], dict[str, Any]], Run],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Raise TraceDiffers where a second run, or the graph, disagrees with the first."""
    again_args, again_kwargs = copy_arguments(args, kwargs)
    with _undone(trace, trace.bind(*again_args, **again_kwargs)):
        again = run_again(again_args, again_kwargs)
    if again.trace is None:
        raise TraceDiffers(
            f"{trace.name}: a second run can't be traced: {again.refusal}.", slug="graph-differs"
        )
    _compare_graphs(trace, again.trace)
    graph_args, graph_kwargs = copy_arguments(args, kwargs)
    with _undone(trace, trace.bind(*graph_args, **graph_kwargs)):
        result = trace(*graph_args, **graph_kwargs)
    _compare(trace, "result", again.result, result, rtol, atol)
    _compare(trace, "arguments", (again_args, again_kwargs), (graph_args, graph_kwargs), rtol, atol)


@contextmanager
def _undone(trace: Trace, roots: Roots) -> Iterator[None]:
    """Undo what a run does to the graph's inputs and to the random generators."""
    written = [wanted for wanted in trace.inputs if wanted.written]
    before = [(wanted.source.fetch(roots), wanted) for wanted in written]
    saved = [(t, t.detach().clone()) for t, _ in before if isinstance(t, torch.Tensor)]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)


def _compare_graphs(first: Trace, second: Trace) -> None:
    before, after = _lines(first.graph), _lines(second.graph)
    if before != after:
        changes = difflib.unified_diff(before, after, "first run", "second run", n=1, lineterm="")
        diff = "\n".join(islice(changes, 20))
        raise TraceDiffers(
            f"{first.name}: a second run on equal inputs computed another graph:\n{diff}\n",
            slug="graph-differs",
        )


def _lines(graph: fx.Graph) -> list[str]:
    return [node.format_node() or "" for node in graph.nodes if node.op != "placeholder"]


def _compare(
    trace: Trace, what: str, expected: object, got: object, rtol: float, atol: float
) -> None:
    path = Local(what)
    left = build_skeleton(expected, path, identity=False)
    found = find_difference(left, build_skeleton(got, path, identity=False), what)
    if found:
        raise TraceDiffers(
            f"{trace.name}: {found[0]} is {found[1]} when the function runs and {found[2]} when "
            "the graph runs.",
            slug="result-differs",
        )
    for (wanted, where), (given, _) in zip(_tensors(expected), _tensors(got), strict=True):
        try:
            torch.testing.assert_close(given, wanted, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise TraceDiffers(
                f"{trace.name}: {what}, tensor {where}: the graph and a second run disagree.\n"
                f"{error}\n",
                slug="result-differs",
            ) from None


def _tensors(value: object) -> list[tuple[torch.Tensor, str]]:
    planner = Planner(lambda _: None)
    planner.plan(value)
    named = {id(t): str(path) for t, path in iter_tensors(value, Local("result"))}
    return [(t, named.get(id(t), f"number {i}")) for i, t in enumerate(planner.tensors)]
