"""Trace: the frozen result of one observed run.

A trace holds for inputs of the shapes, types and plain values that the run saw, and for the
branches that it took. Calling it checks the first and runs the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from torch import fx, nn

from tripwire.errors import InputMismatch
from tripwire.ranges import SourceRange
from tripwire.reading.binding import Binding
from tripwire.reading.effects import Effects
from tripwire.reading.reach import Reach
from tripwire.reading.reads import ReadSet
from tripwire.reading.sources import Attr, Roots, Source
from tripwire.reading.structure import Building, PartPlan, build_skeleton, find_difference
from tripwire.reading.tensors import TensorMeta, Traits, meta_of, storage_of, traits_of, version_of
from tripwire.reading.torchstate import Answer, find_changes
from tripwire.rulebook.refusals import Refusal
from tripwire.rulebook.rules import DRAWING, DROPOUTS, Call, is_seeded, rule_for, words
from tripwire.tracing import attention
from tripwire.tracing.branches import Branch
from tripwire.tracing.graphs import Level, any_inside, build_module, iter_calls
from tripwire.tracing.modes import restoring_contexts
from tripwire.tracing.open.opening import OPEN_INPUT, NumberInput
from tripwire.tracing.state import (
    FACTS,
    HELD,
    PAST,
    STATE,
    UNCOUNTED,
    Constant,
    NodeFacts,
    TracingState,
)
from tripwire.values.classes import isinstance

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow


class Input(Struct, frozen=True):
    """One graph input: a tensor, and every path that reached it."""

    name: str
    source: Source
    aliases: tuple[Source, ...]  # the same tensor by other paths: tied, or passed twice
    meta: TensorMeta
    traits: Traits
    written: bool  # the run changed it in place
    storage: int  # its memory, when the run reached it

    def build(self) -> torch.Tensor:
        """Another tensor of its kind; its values are anything."""
        tensor = self.meta.build()
        if self.traits.is_leaf:
            return tensor
        with torch.enable_grad():  # AOTAutograd tells what has a past from what has none
            return tensor.view_as(tensor)

    def __str__(self) -> str:
        also = "".join(f" = {alias}" for alias in self.aliases)
        return f"{self.name}: {self.meta} from {self.source}{also}"


class Effect(Struct, frozen=True):
    """A write of the run outside tensors that was still there at its end."""

    source: Source

    def __str__(self) -> str:
        return str(self.source)


class Completion(Struct, frozen=True, eq=False):
    """What else a later call needs: effects to repeat, and what was reached, and how."""

    effects: Effects
    fetched: tuple[Source, ...]  # what result and effects reach through a call's arguments
    shape: tuple[int, tuple[str, ...], bool]  # arguments, keywords, whether their order counts
    environment: frozenset[str] | None  # variables that were read; None: all of them
    answers: tuple[Answer, ...]  # of flags that the executed code may have asked for
    expressions: dict[str, str]  # how this call's locals are spelled
    bound: dict[str, object]  # the locals themselves
    reach: Reach
    tensors: tuple[torch.Tensor | None, ...]  # of the inputs, those that are still alive
    sources: tuple[tuple[tuple[Source, bool], ...], ...]  # of the inputs, whether anchored
    asked: tuple[tuple[torch.Tensor, Source], ...]  # state that is no input: its form may be read
    attributes: dict[int, dict[str, object]]  # of tensors, by identity, before the run
    asks_for_types: bool  # the user's code names `type`, and could tell an open number by it
    in_torch_ns: int  # what the run's torch calls took, without what watched them
    once_ns: int  # of that, in calls with no other like them
    handed_out: frozenset[int]  # identities of state that result and effects hold as it is
    # Numbers out of tensors that Python may fail to compute, or in another class.
    risks: tuple[tuple[PartPlan, type], ...]
    kept: int  # so many of the outputs, the first ones, are put somewhere by effects
    unneeded: frozenset[int]  # identities of memos whose contents the run didn't ask for


class Row(Struct, frozen=True):
    """One node of a trace, with what is known of it."""

    node: fx.Node
    facts: NodeFacts

    @property
    def name(self) -> str:
        """The node's unique name."""
        return self.node.name

    @property
    def where(self) -> SourceRange:
        """The call stack, innermost first."""
        return self.facts.where

    @property
    def scope(self) -> str:
        """The enclosing module call."""
        return str(self.facts.scope)


class _LazyModule(Struct):
    """The graph's module: generated and compiled when it is first asked for."""

    graph: fx.Graph
    constants: tuple[Constant, ...]
    name: str
    built: fx.GraphModule | None = None

    def get(self) -> fx.GraphModule:
        if self.built is None:
            root = nn.Module()
            for constant in self.constants:
                setattr(root, constant.name, constant.value)
            self.built = build_module(root, self.graph, self.name)
        return self.built


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The graph of one run, its inputs, its result, and what it holds for."""

    name: str
    inputs: tuple[Input, ...]
    outputs: PartPlan
    result: object  # what the run returned
    branches: tuple[Branch, ...]
    effects: tuple[Effect, ...]
    reads: ReadSet
    constants: tuple[Constant, ...]
    torch_state: dict[str, object]  # found by the run
    strides_matter: bool  # inputs must have the strides that the run saw
    requires_grad_matters: bool  # and must want gradients as they did then
    binding: Binding = field(repr=False)
    namespaces: dict[str, dict[str, Any]] = field(repr=False)
    skeletons: dict[str, tuple[object, ...]] = field(repr=False)
    shadow: Shadow | None = field(repr=False)  # where something is open
    completion: Completion | None = field(repr=False)
    _module: _LazyModule = field(repr=False)

    @property
    def numbers(self) -> tuple[NumberInput, ...]:
        """The graph's inputs that are numbers. They come first."""
        return () if self.shadow is None else tuple(self.shadow.formulas.inputs.values())

    @property
    def graph(self) -> fx.Graph:
        """The recorded graph."""
        return self._module.graph

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph as a module: takes the inputs in order, returns a tuple of tensors."""
        return self._module.get()

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every node but the output's, in order."""
        return tuple(Row(n, n.meta[FACTS]) for n in self.graph.nodes if n.op != "output")

    def find(self, name: str) -> Row:
        """The row of a node, by name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on another call's arguments; the result has the run's structure."""
        roots = self.bind(*args, **kwargs)
        flat = self.fetch(roots)
        self._check_constants(roots)
        self._check_torch_state()
        with restoring_contexts():
            tensors = self.graph_module(*flat)
        return self.outputs.build(Building(tensors, roots, {}))

    def bind(self, *args: Any, **kwargs: Any) -> Roots:
        """A call's arguments as roots, checked against the structure that was traced."""
        bound = self.binding.bind(args, kwargs)
        sources = self.binding.sources(bound)
        names = {str(source) for _, source in sources}
        if names != self.skeletons.keys():
            raise InputMismatch(
                f"{self.name}: traced with {', '.join(self.skeletons)}; called with "
                f"{', '.join(sorted(names))}.",
                slug="input-structure",
            )
        for value, source in sources:
            skeleton = build_skeleton(value, source)
            found = find_difference(self.skeletons[str(source)], skeleton, str(source))
            if found:
                path, expected, got = found
                raise InputMismatch(
                    f"{self.name}: {path} was {expected} when traced and is {got} now. "
                    "A trace holds for the structure and the plain values that it saw: "
                    "trace again.",
                    slug="input-structure",
                )
        return self.binding.roots(bound, self.namespaces)

    def fetch(self, roots: Roots) -> list[torch.Tensor]:
        """The graph's inputs, in order, for one call; checked against what was traced."""
        flat = [self._fetch_input(wanted, roots) for wanted in self.inputs]
        if len(set(map(id, flat))) < len(flat):
            raise InputMismatch(
                f"{self.name}: one tensor was passed for two inputs that were two tensors when "
                "traced.",
                slug="input-alias",
            )
        return flat

    def _fetch_input(self, wanted: Input, roots: Roots) -> torch.Tensor:
        try:
            tensor = wanted.source.fetch(roots)
            same = all(alias.fetch(roots) is tensor for alias in wanted.aliases)
        except (LookupError, AttributeError, ValueError) as error:
            raise InputMismatch(
                f"{self.name}: {wanted.source} no longer exists: {error}.", slug="input-gone"
            ) from error
        if not isinstance(tensor, torch.Tensor) or not same:
            raise InputMismatch(
                f"{self.name}: {wanted} was one tensor when traced. Now its paths lead to "
                "different objects, or to no tensor.",
                slug="input-alias",
            )
        meta, traits = meta_of(tensor), traits_of(tensor)
        if self._compared(meta, traits) != self._compared(wanted.meta, wanted.traits):
            raise InputMismatch(
                f"{self.name}: {wanted.source} was {wanted.meta.full} when traced and is "
                f"{meta.full} now{_changed(wanted.traits, traits)}. A trace holds for tensors like "
                "those that it saw: trace again.",
                slug="input-shape",
            )
        return tensor

    def _compared(self, meta: TensorMeta, traits: Traits) -> tuple[object, ...]:
        strides = (meta.stride, traits.offset, traits.is_view) if self.strides_matter else None
        grad = (meta.requires_grad, traits.is_leaf) if self.requires_grad_matters else None
        always = (meta.shape, meta.dtype, meta.device, *traits[:3])
        return (*always, strides, grad)

    def _check_constants(self, roots: Roots) -> None:
        for constant in self.constants:
            if constant.source is not None and constant.source.fetch(roots) is not constant.value:
                raise InputMismatch(
                    f"{self.name}: {constant.source} was {constant.value!r:.60} when traced, and "
                    "is another object now. The graph holds the first: trace again.",
                    slug="input-object",
                )

    @property
    def has_contexts(self) -> bool:
        """Whether it enters autocast, `sdpa_kernel`, inference mode, or another grad mode."""
        return any(n.target in _CONTEXT_NODES for n in iter_calls(self.graph.nodes))

    def _check_torch_state(self) -> None:
        if not self.has_contexts and not self.requires_grad_matters:
            return
        changed = find_changes(self.torch_state)
        if changed:
            raise InputMismatch(
                f"{self.name}: torch's state differs from the traced run's in "
                f"{', '.join(changed)}, and the run read or set some of it.",
                slug="torch-state-differs",
            )

    def statistics(self) -> TraceStatistics:
        """Counts, for reports."""
        ops = [n for n in self.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
        scopes = {row.scope for row in self.rows}
        return TraceStatistics(
            len(self.inputs), len(ops), len(scopes), len(self.branches), len(self.effects)
        )

    def check(self) -> None:
        """Raise where the trace contradicts itself: the graph lints, and rows are complete."""
        self.graph_module.graph.lint()
        placeholders = [n.name for n in self.graph.nodes if n.op == "placeholder"]
        names = [*(n.name for n in self.numbers), *(wanted.name for wanted in self.inputs)]
        assert placeholders == names, placeholders

    def format(self, *, source: bool = False) -> str:
        """The table that `print` shows; with the user's source lines on request."""
        return _render(self, source=source)

    def __str__(self) -> str:
        return self.format()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def _changed(before: Traits, now: Traits) -> str:
    pairs = zip(Traits._fields, before, now, strict=True)
    changed = ", ".join(f"{name} {a} → {b}" for name, a, b in pairs if a != b)
    return f" ({changed})" if changed else ""


class TraceStatistics(Struct, frozen=True):
    """How large a trace is."""

    inputs: int
    ops: int
    scopes: int
    branches: int
    effects: int


_CONTEXT_NODES = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.autograd.grad_mode._enter_inference_mode,
        attention.ENTER,
    }
)


# --- a trace as a table, one row for each node ---

_WIDEST = (24, 34, 28, 28, 28)  # columns: name, op, value, scope, place


def _render(trace: Trace, *, source: bool) -> str:
    """The header, one row per node, then branches and effects where there are any."""
    table = [("name", "op", "value", "scope", "where"), *(_row(row) for row in trace.rows)]
    widths = [min(max(len(row[i]) for row in table), widest) for i, widest in enumerate(_WIDEST)]
    texts = [row.where.place for row in trace.rows] if source else []
    lines = [_title(trace)]
    for number, cells in enumerate(table):
        line = "  ".join(_fit(cell, width) for cell, width in zip(cells, widths, strict=True))
        place = texts[number - 1] if source and number else None
        lines.append(f"{line}  {place.text}" if place is not None else line.rstrip())
    lines += [f"branch: {branch}" for branch in trace.branches]
    lines += [f"written, not in the graph: {effect}" for effect in trace.effects]
    return "\n".join(lines)


def _title(trace: Trace) -> str:
    count = trace.statistics()
    return (
        f"trace of {trace.name}: {count.ops} ops, {count.inputs} inputs, {count.scopes} scopes, "
        f"{count.branches} branches"
    )


def _row(row: Row) -> tuple[str, str, str, str, str]:
    node = row.node
    where = row.where.short if row.where.frames else "-"
    return node.name, _op(node), _value(row.facts.value), row.scope or "-", where


def _op(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"constant {node.target}"
    if node.op == "call_method":
        return f".{node.target}({_arguments(node)})"
    target: Any = node.target
    return f"{getattr(target, '__name__', target)}({_arguments(node)})"


def _arguments(node: fx.Node) -> str:
    words = [str(arg) for arg in node.args]
    words += [f"{key}={value}" for key, value in node.kwargs.items()]
    return ", ".join(words)


def _value(value: TensorMeta | tuple[TensorMeta | None, ...] | None) -> str:
    if isinstance(value, TensorMeta) or value is None:
        return str(value or "-")
    return f"({', '.join('-' if item is None else str(item) for item in value)})"


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"


class Run(Struct, frozen=True):
    """One observed execution: the real result, and the trace or why there is none."""

    result: object
    trace: Trace | None
    refusal: Refusal | None
    modules: tuple[nn.Module, ...] = ()  # that it called, to be compiled on their own
    torch_state: tuple[object, ...] = ()  # as `sample_quickly` found it before the run
    outputs: tuple[torch.Tensor, ...] = ()  # the run's own, for each output of the graph
    was_alone: bool = True  # no other thread ran Python code meanwhile


# --- inputs ---


def build_inputs(state: TracingState) -> tuple[Input, ...]:
    """The tensors that came with the call or were reached, as the run used them."""
    rows = []
    for node, known in state.inputs:
        tensor = known()
        facts: NodeFacts = node.meta[FACTS]
        assert isinstance(facts.value, TensorMeta)
        traits = state.traits[node]
        node.meta[STATE] = any(known.sources.values())
        if state.shadow is not None:
            found = map(state.shadow.fakes.opened.get, map(str, known.sources))
            node.meta[OPEN_INPUT] = next(filter(None, found), None)
        node.meta[PAST] = node.meta[STATE] and facts.value.requires_grad and not traits.is_leaf
        is_written = tensor is not None and _is_written(state, node, tensor)
        node.meta[HELD] = is_written and any(map(_is_held, known.sources))
        if tensor is not None and is_written:
            node.meta[UNCOUNTED] = version_of(tensor) == state.versions[node]
        names = _first_and_others(known.sources)
        storage = state.storages[node]
        rows.append(Input(node.name, *names, facts.value, traits, is_written, storage))
    return tuple(rows)


def _is_written(state: TracingState, node: fx.Node, tensor: torch.Tensor) -> bool:
    if not state.force_outplace and version_of(tensor) != state.versions[node]:
        return True
    return storage_of(tensor) in state.written_storages


def _is_held(source: Source | None) -> bool:
    """Whether a path leads through an object."""
    while source is not None and not isinstance(source, Attr):
        source = source.base
    return source is not None


def _first_and_others(sources: dict[Source, bool]) -> tuple[Source, tuple[Source, ...]]:
    first, *others = sources
    return first, tuple(others)


# --- behaviour: what a graph does besides computing its results ---
# It may draw random numbers, write to its inputs, call code of the user's, or depend on where its
# inputs lie in memory. Each node says so by the name of what it calls.


def can_repeat(trace: Trace) -> bool:
    """Whether running a trace's graph leaves nothing behind: it draws and writes nothing."""
    writes = any(wanted.written for wanted in trace.inputs)
    return not (writes or draws(trace) or acts(trace))


def reads_offsets(trace: Trace) -> bool:
    """Whether what a run does depends on where its inputs begin in their memory.

    Python may ask. `as_strided` and `set_` count from the memory's beginning, and a view as another
    dtype is an error in some places, which back ends don't raise.
    """
    if not _OFFSETS.isdisjoint(trace.reads.names):
        return True
    return any(
        name_of(node) in _PLACED
        or (name_of(node) == "view" and any(type(a) is torch.dtype for a in _plain_of(node)))
        for node in _calls_of(trace)
    )


_OFFSETS = words("storage_offset sym_storage_offset")
_PLACED = words(
    "as_strided as_strided_ as_strided_copy as_strided_scatter set_ view_as_complex "
    "view_as_complex_copy"
)


def _plain_of(node: fx.Node) -> tuple[object, ...]:
    return *node.args, *node.kwargs.values()


def draws(trace: Trace) -> bool:
    """Whether a graph draws random numbers."""
    return any(map(is_random, _calls_of(trace)))


def acts(trace: Trace) -> bool:
    """Whether a graph does more than to compute, draw and write to tensors' memory."""
    return any(map(node_acts, _calls_of(trace)))


@any_inside
def node_acts(node: fx.Node) -> bool:
    """Whether a call does so. A custom function whose code is known only computes."""
    if runs_python(node):
        return True
    return name_of(node) in ("backward", "setattr")


def runs_python(node: fx.Node) -> bool:
    """Whether a call runs code of the user's that may read anything."""
    python = node.meta[FACTS].python
    return python is not None and (node.meta[FACTS].opaque or not isinstance(python.function, type))


def has_python(trace: Trace) -> bool:
    """Whether a graph calls functions of the user's."""
    return any(node.meta[FACTS].python is not None for node in _calls_of(trace))


def has_levels(trace: Trace) -> bool:
    """Whether a graph goes through transforms of torch.func."""
    return any(isinstance(node.target, Level) for node in _calls_of(trace))


def _calls_of(trace: Trace) -> list[fx.Node]:
    return list(iter_calls(trace.graph.nodes))


def is_opaque(trace: Trace) -> bool:
    """Whether a graph calls code of the user's, which may draw without saying so."""
    called = (node.target for node in _calls_of(trace) if node.op == "call_function")
    others = (target for target in called if not isinstance(target, Level))
    rules = (rule_for(target) for target in others if callable(target))
    return any(type(rule) is Call and rule.opaque for rule in rules)


@any_inside
def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    facts: NodeFacts | None = node.meta.get(FACTS)
    if facts is not None and facts.draws:
        return True
    if name_of(node) in DROPOUTS:
        share = node.args[1] if len(node.args) > 1 else node.kwargs.get("p")
        if type(share) in (int, float) and share == 0:
            return False
        return not (len(node.args) > 2 and node.args[2] is False) and (
            node.kwargs.get("training") is not False and node.kwargs.get("train") is not False
        )
    if name_of(node) == "scaled_dot_product_attention":
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return not isinstance(dropout, (int, float)) or dropout != 0
    return name_of(node) in DRAWING or is_seeded(name_of(node))


def name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]
