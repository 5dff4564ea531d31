"""Tracer: one real run of a callable becomes a Trace, or a refusal.

The run is the call: its result is the real one, and the user's code runs once (L4). An
exception of the user's comes out as it is. A refusal stops recording, not the run.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import torch
from torch import fx

from tripwire.env import is_own_code
from tripwire.errors import CannotTrace, TracerWarning
from tripwire.tracing import hooks
from tripwire.tracing.binding import Binding, build_binding
from tripwire.tracing.check import check_trace, copy_arguments
from tripwire.tracing.observe import observing
from tripwire.tracing.recorder import Recorder, recording
from tripwire.tracing.refusals import Refusal, Refused
from tripwire.tracing.result import Effect, Input, Trace, _LazyModule
from tripwire.tracing.rules import Refuse
from tripwire.tracing.sources import Local, Source
from tripwire.tracing.state import CURRENT, FACTS, NodeFacts, TracingState
from tripwire.tracing.structure import (
    Plan,
    Planner,
    Unbuildable,
    build_skeleton,
    holds_mutable,
    iter_tensors,
)
from tripwire.tracing.torchstate import sample_torch_state
from tripwire.tracing.values import TensorMeta, storage_of, version_of


@dataclass(frozen=True, slots=True)
class Run:
    """One observed execution: the real result, and the trace or why there is none."""

    result: object
    trace: Trace | None
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class Tracer:
    """Options of tracing, and the way to do it.

    force_outplace: in-place calls are recorded in their out-of-place form.
    strict: results may hold no list or dict, and None is no result, whatever was written.
    name_fn: names a tensor's node; None leaves names to the user's variables.
    check: run the function and the graph again on equal inputs, and compare.
    """

    force_outplace: bool = False
    strict: bool = False
    name_fn: Callable[[torch.Tensor], str | None] | None = None
    check: bool = False

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
        run = self.run(fn, args, kwargs)
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

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Run once, observed."""
        if CURRENT.tracing:
            raise CannotTrace(
                "trace was called inside a function that is being traced. Trace the inner "
                "function on its own, or call it plainly: the outer trace sees all it does.",
                slug="nested-trace",
            )
        binding = build_binding(fn)
        bound = binding.bind(args, kwargs)
        state = TracingState(force_outplace=self.force_outplace, strict=self.strict)
        state.name_fn = self.name_fn
        state.ends = (_run_user.__code__, hooks.CALL_IN_SCOPE)
        session = _Session(state, binding, bound)
        try:
            result = session.execute(fn, args, kwargs)
        except BaseException as error:
            error.__traceback__ = _without_own_frames(error.__traceback__)
            raise
        return session.freeze(result)


def _run_user(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Source ranges end at this frame."""
    return fn(*args, **kwargs)


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


class _Session:
    """One run: prepares a state, executes, freezes."""

    def __init__(self, state: TracingState, binding: Binding, bound: dict[str, object]) -> None:
        self.state = state
        self.binding = binding
        self.recorder: Recorder | None = None
        self.namespaces: dict[str, dict[str, Any]] = {}
        self.skeletons = {
            str(source): build_skeleton(value, source) for value, source in binding.sources(bound)
        }
        self.before = sample_torch_state()
        self.seed = torch.initial_seed()
        for value, source in binding.sources(bound):
            for tensor, path in iter_tensors(value, source):
                known = state.values.add(tensor)
                known.sources.setdefault(path)
                if known.node is None:
                    state.lift(tensor, known)
        for name, value in bound.items():
            state.reach.walk(value, Local(name))
        function = binding.function
        if function is not None:
            state.reach.walk_cells(function, None)
            self.on_start(function.__code__, function.__globals__)

    def on_start(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Reach the globals that a function names, when it first starts."""
        function = self.binding.function
        own = function is not None and namespace is function.__globals__
        module = "" if own else str(namespace.get("__name__", "?"))
        while self.namespaces.setdefault(module, namespace) is not namespace:
            module += "'"  # another namespace has the same name
        before, CURRENT.state = CURRENT.state, None  # what the walk asks of tensors isn't the run's
        try:
            self.state.reach.walk_function(code, namespace, module)
        finally:
            CURRENT.state = before

    def on_refused(self, refuse: Refuse) -> None:
        """A function of torch's that can't be followed starts."""
        self.state.refuse(Refusal(refuse.slug, refuse.reason, self.state.capture_range(2)))
        if self.recorder is not None:
            self.recorder.leave()

    def execute(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        CURRENT.tracing = True
        try:
            with hooks.installed(), observing(self) as observer:
                self.state.observer = observer
                with recording(self.state) as self.recorder:
                    return _run_user(fn, args, kwargs)
        finally:
            CURRENT.tracing = False

    def freeze(self, result: object) -> Run:
        """The finished run as a Trace, or its refusal."""
        state = self.state
        try:
            self._check_torch_state()
            self._check_exposed_memory()
            for tensor, known in state.values.live():
                if known.version != version_of(tensor):
                    state.check_seen(tensor, known)
            if state.refusal is None:
                return Run(result, self._build(result), None)
        except Refused as refused:
            state.refuse(Refusal(refused.slug, refused.reason))
        return Run(result, None, state.refusal)

    def _check_torch_state(self) -> None:
        if torch.initial_seed() != self.seed:
            raise Refused("generator-reseeded", "torch's default generator was seeded by the run.")
        if any(generator.initial_seed() != seed for generator, seed in self.state.reach.generators):
            raise Refused("generator-reseeded", "a torch.Generator was seeded by the run.")
        changed = set(self.before.find_changes(sample_torch_state())) - {"grad_enabled"}
        if changed:
            raise Refused(
                "torch-state-changed",
                f"the function leaves torch's {', '.join(sorted(changed))} changed, and the "
                "graph wouldn't. Set it outside, or restore it before returning.",
            )

    def _check_exposed_memory(self) -> None:
        for tensor, version, value in self.state.exposed:
            same = (tensor == value) | ((tensor != tensor) & (value != value))  # nan is nan
            if version_of(tensor) != version or not bool(same.all()):
                raise Refused(
                    "tensor-memory",
                    "a tensor's memory went to NumPy and was changed afterwards; the graph can't "
                    "tell by whom. Use tensor.clone().numpy(), or change the tensor with torch.",
                )

    def _build(self, result: object) -> Trace:
        state = self.state
        name = self.binding.name
        if inspect.isgenerator(result) or inspect.isawaitable(result):
            raise Refused(
                "lazy-result",
                f"{name} returned a {type(result).__name__}, whose code hasn't run yet. "
                "Return a list or a tuple.",
            )
        writes = list(state.reach.contents.find_writes())
        effects = tuple(map(Effect, dict.fromkeys(path for _, path in writes)))
        plan, tensors = self._plan(result, {id(owner) for owner, _ in writes})
        outputs = tuple(state.node_of(tensor) for tensor in tensors)  # may make more inputs
        inputs = self._inputs()
        self._check_result(result, tensors, inputs)
        graph = state.graph()
        graph.output(outputs)
        _drop_unused_parts(state)
        return Trace(
            name=name,
            inputs=inputs,
            outputs=plan,
            result=result,
            branches=tuple(state.branches),
            effects=effects,
            constants=tuple(state.constants),
            torch_state=self.before,
            strides_matter=state.strides_matter,
            requires_grad_matters=state.requires_grad_matters,
            binding=self.binding,
            namespaces=self.namespaces,
            skeletons=self.skeletons,
            _module=_LazyModule(graph, tuple(state.constants), _class_name(name)),
        )

    def _plan(self, result: object, written: set[int]) -> tuple[Plan, list[torch.Tensor]]:
        def was_written(value: object) -> bool:
            return id(value) in written or id(getattr(value, "__dict__", None)) in written

        planner = Planner(self.state.reach.find_source, was_written)
        try:
            return planner.plan(result), planner.tensors
        except Unbuildable as error:
            raise Refused(
                "unbuildable-result",
                f"{self.binding.name}: {error}. Return tensors in tuples, lists, dicts, "
                "dataclasses or plain objects.",
            ) from None

    def _check_result(
        self,
        result: object,
        tensors: list[torch.Tensor],
        inputs: tuple[Input, ...],
    ) -> None:
        name, strict = self.binding.name, self.state.strict
        written = any(wanted.written for wanted in inputs)
        if result is None and (strict or not written):
            raise Refused(
                "returns-nothing",
                f"{name} returned None"
                + (": strict tracing wants a result." if written else ", and changed no tensor.")
                + " Side effects alone are no graph. Return the tensors that it computes.",
            )
        if not tensors and not written:
            raise Refused(
                "no-tensors",
                f"{name} returned no tensor ({result!r:.60}), so there is no graph to run. "
                "Python values that it computed are gone with the run.",
            )
        if strict and holds_mutable(result):
            raise Refused(
                "mutable-result",
                f"{name} returned a list or a dict. Strict tracing allows tensors and tuples "
                "only, since a caller could change the others. Use strict=False.",
            )

    def _inputs(self) -> tuple[Input, ...]:
        rows = []
        for node, known in self.state.inputs:
            tensor = known()
            facts: NodeFacts = node.meta[FACTS]
            assert isinstance(facts.value, TensorMeta)
            rows.append(
                Input(
                    node.name,
                    *_first_and_others(known.sources),
                    facts.value,
                    self.state.traits[node],
                    tensor is not None and self._is_written(node, tensor),
                )
            )
        return tuple(rows)

    def _is_written(self, node: fx.Node, tensor: torch.Tensor) -> bool:
        if not self.state.force_outplace and version_of(tensor) != self.state.versions[node]:
            return True
        return storage_of(tensor) in self.state.written_storages


def _first_and_others(sources: dict[Source, None]) -> tuple[Source, tuple[Source, ...]]:
    first, *others = sources
    return first, tuple(others)


def _drop_unused_parts(state: TracingState) -> None:
    """Parts of multi-output calls that neither the graph nor a branch uses."""
    used = {node for branch in state.branches for node in branch.inputs}
    for node in reversed(state.parts):
        if not node.users and node not in used:
            state.graph().erase_node(node)


def _class_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name) or "traced"
