"""TracingState: what a recording knows while it goes on.

One state is current per thread. Making another one current, or none, pauses recording into
the first. The tracer drives a state through a whole run; it can be used by hand as well:

    state = TracingState()
    set_value_trace(x, state.graph().placeholder("x"), state)
    with recording(state):
        y = x + 1
    print(state)
"""

from __future__ import annotations

import keyword
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from msgspec import Struct
from torch import fx, nn
from torch.nn.parameter import is_lazy

from tripwire.env import CAN_APPEND_NODES
from tripwire.errors import StateError
from tripwire.ranges import NOWHERE, Scope, ScopeStack, SourceRange, capture_range
from tripwire.reading.reach import Reach
from tripwire.reading.sources import ScopePaths, Source
from tripwire.reading.stores import InnerWrites, Stores
from tripwire.reading.tensors import (
    LAZY,
    OUTSIDE,
    PLAIN_TENSORS,
    Known,
    MemoryTable,
    TensorMeta,
    Traits,
    ValueTable,
    find_leaf,
    has_own_code,
    meta_of,
    storage_of,
    traits_of,
    version_of,
)
from tripwire.reading.torchstate import find_autocast
from tripwire.rulebook.refusals import Refusal, Refused
from tripwire.tracing.branches import Branch, Exposed
from tripwire.tracing.observe import Observer
from tripwire.values.classes import isinstance, name_of
from tripwire.values.contents import own_dict

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow
    from tripwire.tracing.outside import Outside


class PythonCall(Struct, frozen=True):
    """A node that runs Python code of the user's."""

    function: Callable[..., Any]  # a custom function; or what ran hooks, or an operator in Python
    # Of a custom function: its arguments' kinds, and the scalars among them.
    kinds: str = ""  # one letter per argument: `d` a tensor, `c` anything else
    scalars: tuple[object, ...] = ()


class Region(NamedTuple):
    """A checkpointed call that goes on."""

    number: int
    older: int  # the latest memory that was there before it


class NodeFacts(NamedTuple):  # a tuple: one per node, see SourceRange
    """What tripwire knows of a node; kept in its meta under `FACTS`."""

    where: SourceRange
    scope: Scope
    value: TensorMeta | tuple[TensorMeta | None, ...] | None
    region: int | None = None  # nodes of one checkpointed call share a number
    python: PythonCall | None = None
    memory: tuple[int, ...] = (OUTSIDE,)  # of the result, see MemoryTable
    written: tuple[int, ...] = ()  # memory that the call changed
    opaque: bool = False  # code runs inside that may read any memory
    # Where it is made of shapes alone: what decides on those by values.
    of_shapes: tuple[Branch, ...] | None = None
    sized_by_values: bool = False  # the result's shape may be another on the next call,
    makes_size: bool = False  # since this call makes a size of values
    as_it_is: str | None = None  # why no compiler may look inside this call; None: it may
    draws: bool = False  # random numbers, as the generators showed


FACTS = "tripwire"
STATE = "tripwire_state"  # in the meta of an input that is the same tensor on every call
HELD = "tripwire_held"  # of an input that an object which is passed holds, and the call changes
UNCOUNTED = "tripwire_uncounted"  # of an input that the call changes, and its version doesn't tell
PAST = "tripwire_past"  # of an input that is state, and was computed: a gradient goes on from it


class Inside(Struct):
    """A forward that runs, and whether all its sizes follow from shapes so far."""

    is_plain: bool
    copied: str | None = None  # a call that returned its argument: compilers may make a copy


class Constant(Struct, frozen=True):
    """An object that entered the graph as it is, because no graph argument can spell it."""

    name: str
    value: object
    where: SourceRange
    source: Source | None  # the path that reached it, where it wasn't made by the run


class TracingState:
    """The graph that grows, which node stands for which tensor, and the open scopes."""

    def __init__(self, *, force_outplace: bool = False, strict: bool = False) -> None:
        self.force_outplace = force_outplace
        self.strict = strict
        self.name_fn: Callable[[torch.Tensor], str | None] | None = None
        self.ends: tuple[CodeType | None, CodeType | None] = (None, None)  # see capture_range
        self.outer: SourceRange | None = None  # the stack around the innermost module call
        self.callers: SourceRange | None = None  # the stack around the run, where it is wanted
        self.values = ValueTable()
        self.scopes = ScopeStack()
        self.reach = Reach(self._reach_tensor, self.run_aside)
        self.inputs: list[tuple[fx.Node, Known]] = []
        # What `.grad` of inputs was before a backward, until somebody asks for it.
        self.before_backward: dict[fx.Node, tuple[Branch, ...]] = {}
        self.versions: dict[fx.Node, int | None] = {}  # inputs' version counters when lifted
        self.traits: dict[fx.Node, Traits] = {}
        self.storages: dict[fx.Node, int] = {}  # of inputs, when lifted: `x.data = y` gives another
        self.branches: list[Branch] = []
        self.constants: list[Constant] = []
        self.exposed: list[Exposed] = []
        self.parts: list[fx.Node] = []  # getitem nodes of multi-output calls
        self.contexts: dict[int, list[fx.Node]] = {}  # entered and not yet left, by identity
        self.inside: Inside | None = None  # the custom autograd function that runs
        self.is_inside = False  # whether a recorded call runs, which may run Python code inside
        self.inner = InnerWrites(self.reach.holders)  # of such functions
        self.stores = Stores()  # where they may write
        self.custom_calls = 0  # of such functions
        self.autocast = find_autocast()  # as the graph has it, so far
        self.regions: list[Region] = []
        self.next_region = 0
        self.met_data_sizes = False  # some tensor's size depends on values
        self.scope_paths = ScopePaths()
        self.calls = 0  # recorded so far
        # What they took, without recording: how many of a kind, and the fastest.
        self.durations: dict[tuple[object, ...], tuple[int, int]] = {}
        self.written_storages: dict[int, int] = {}  # storage → the last call that wrote to it
        self.memory = MemoryTable()
        self.written: dict[int, None] = {}  # memory that the call being recorded changed
        self.writes = 0  # calls that changed any
        self.strides_matter = False  # Python, or a call that may return its argument, read them
        self.requires_grad_matters = False  # Python read it
        self.copied_storages: set[int] = set()  # made by deepcopy
        self.observer: Observer | None = None
        self.quiet = False  # branches go untold: whoever asked for the run guards them
        self.environment: set[str] | None = set()  # variables that were read; None: all of them
        # Tensors with attributes of their own, and those.
        self.attributes: dict[int, tuple[torch.Tensor, dict[str, object]]] = {}
        self.attribute_at: SourceRange | None = None  # where a tensor handed out its `.grad`
        self.given: list[torch.Tensor] = []  # arguments; one may be let go before it is guarded
        self.computed_names: set[str] = set()  # given to getattr and its like
        self.tested_names: set[str] = set()  # of these: given to hasattr alone
        self.shadow: Shadow | None = None  # where something is open
        self.outside: Outside | None = None  # what it prints and logs, where that is repeated
        self.refusal: Refusal | None = None
        self.raised = 0  # the identity of the last exception that a torch call raised by itself
        self.target: object = None  # what is traced
        self.modules: dict[int, nn.Module] = {}  # called, by identity; those inside others left out
        self.open_modules = 0  # calls of such modules that go on
        self.differentiates_again = False  # gradients are asked for gradients
        # Without the patches that the run is observed by, for a while.
        self.lifted: Callable[[], AbstractContextManager[None]] = nullcontext
        self.has_levels = False  # whether a transform of torch.func went on
        self._graph = fx.Graph()

    # --- as in torch.jit ---

    def graph(self) -> fx.Graph:
        """The graph that is being recorded."""
        return self._graph

    def set_graph(self, graph: fx.Graph) -> None:
        """Record into another graph from now on."""
        self._graph = graph

    def push_scope(self, name: str) -> None:
        """Open a scope; nodes carry the innermost one."""
        self.scopes.push(name)

    def pop_scope(self) -> None:
        """Close the innermost scope."""
        if not len(self.scopes):
            raise StateError("pop_scope: no scope is open.", slug="no-open-scope")
        self.scopes.pop()

    def current_scope(self) -> str:
        """The innermost scope's path, empty outside any."""
        return str(self.scopes.current)

    def __str__(self) -> str:
        return str(self._graph)

    def __repr__(self) -> str:
        return (
            f"<TracingState: {len(self._graph.nodes)} nodes, {len(self.values)} live values, "
            f"scope {self.current_scope()!r}>"
        )

    # --- values ---

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node that stands for a tensor; lifts a reached tensor into an input."""
        known = self.values.find(tensor)
        if known is None:
            raise _unknown_origin(tensor)
        if known.version != version_of(tensor) or known.version == LAZY:
            self.check_seen(tensor, known)
        return known.node or self.lift(tensor, known)

    def check_seen(self, tensor: torch.Tensor, known: Known) -> None:
        """Raise Refused where a tensor was changed in place by no recorded call."""
        if known.version == LAZY:
            raise Refused(
                "lazy-parameter",
                f"{next(iter(known.sources))} has no shape yet. Call the module once before "
                "tracing it: a graph would initialise it again on every call.",
            )
        version = version_of(tensor)
        if version != known.version:
            if self.written_storages.get(storage_of(tensor), -1) <= known.seen_at:
                name = known.node.name if known.node is not None else next(iter(known.sources))
                raise Refused(
                    "unseen-write",
                    f"the tensor {name} was changed in place before this use, and no recorded "
                    "torch call did it: another thread, a scripted module, `.real =` or a C "
                    "extension. Do it with a torch function in this thread.",
                )
            known.version, known.seen_at = version, self.calls

    def note_write(self, tensor: torch.Tensor) -> None:
        """A recorded call changed this tensor, and with it all that share its memory."""
        known = self.values.find(tensor)
        node = None if known is None else known.node
        facts: NodeFacts | None = None if node is None else node.meta.get(FACTS)
        found = {self.memory.find(tensor), *(() if facts is None else facts.memory)}
        if len(found) > 1:  # `x.data = y`: what is x's and what is y's isn't told apart
            found.add(OUTSIDE)
        self.written.update(dict.fromkeys(found))
        if tensor.layout is torch.strided:
            self.written_storages[storage_of(tensor)] = self.calls

    def lift(self, tensor: torch.Tensor, known: Known) -> fx.Node:
        """Make a reached tensor an input of the graph. Raises Refused."""
        check_class(tensor)
        if find_leaf(tensor) is None:
            raise Refused("forbidden-view", _FORBIDDEN)
        name = _input_name(next(iter(known.sources)))
        last = self.inputs[-1][0] if self.inputs else None
        if self.shadow is not None:
            last = last or self.shadow.formulas.last_input
        known.node = create_node(self._graph, "placeholder", name, (), {}, name, last)
        known.node.target = known.node.name  # two sources can spell alike
        known.node.meta[FACTS] = NodeFacts(NOWHERE, self.scopes.current, meta_of(tensor))
        self.memory.add_outside(tensor)
        self.inputs.append((known.node, known))
        self.traits[known.node] = traits_of(tensor)
        self.storages[known.node] = storage_of(tensor)
        self.versions[known.node] = version_of(tensor)
        if self.shadow is not None:
            self.shadow.fakes.open(tensor, known.sources)
        return known.node

    def _reach_tensor(self, tensor: torch.Tensor, source: Source, anchored: bool) -> None:
        known = self.values.add(tensor)
        if self.quiet:
            if not anchored:
                self.given.append(tensor)
            attributes = own_dict(tensor)
            if attributes:
                self.attributes.setdefault(id(tensor), (tensor, dict(attributes)))
        if known.node is None or known.sources:  # not one that the run itself made
            known.sources.setdefault(source, anchored)

    def check_exposed_memory(self) -> None:
        """Refuse a run after which memory that NumPy got holds something else."""
        for tensor, version, value, _ in self.exposed:
            same = (tensor == value) | ((tensor != tensor) & (value != value))  # nan is nan
            if version_of(tensor) != version or not bool(same.all()):
                raise Refused(
                    "tensor-memory",
                    "a NumPy array got a tensor's memory, and the memory was changed afterwards; "
                    "tripwire can't tell by whom. Use tensor.clone().numpy(), or change the tensor "
                    "with torch.",
                )

    def check_kept_arrays(self, outputs: Iterable[torch.Tensor]) -> None:
        """Refuse an array that the run leaves behind beside the tensor whose memory it has."""
        kept = [one.tensor for one in self.exposed if one.array() is not None]
        if not kept:
            return
        inputs = (known() for _, known in self.inputs)
        seen = {storage_of(tensor) for tensor in (*outputs, *inputs) if tensor is not None}
        if not seen.isdisjoint(map(storage_of, kept)):
            raise Refused(
                "tensor-memory",
                "the run leaves behind a NumPy array that shares memory with one of its inputs or "
                "results, and in a compiled call the two wouldn't share memory. Use "
                "tensor.clone().numpy().",
            )

    def run_aside(self, function: Callable[..., object], *args: object) -> None:
        """Call a function that looks at things for us: it is no part of the run."""
        before, CURRENT.state = CURRENT.state, None
        observer = self.observer if self.observer and not self.observer.paused else None
        if observer is not None:
            observer.pause()
        try:
            with torch._C.DisableTorchFunction():
                function(*args)
        finally:
            if observer is not None:
                observer.resume()
            CURRENT.state = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The same as a `with`, where gradients don't matter."""
        before, CURRENT.state = CURRENT.state, None
        observer = self.observer if self.observer and not self.observer.paused else None
        if observer is not None:
            observer.pause()
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                yield
        finally:
            if observer is not None:
                observer.resume()
            CURRENT.state = before

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record nothing: what a call does inside, and what recording it asks of tensors."""
        CURRENT.state = None
        if self.observer is not None:
            self.observer.pause()
        try:
            yield
        finally:
            if self.observer is not None:
                self.observer.resume()
            CURRENT.state = self

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether the run made a tensor, in memory that is no one else's."""
        known = self.values.find(tensor)
        if known is None or known.sources or known.node is None:
            return False
        return OUTSIDE not in known.node.meta[FACTS].memory

    def capture_range(self, depth: int) -> SourceRange:
        """The user's call stack, from `depth` callers of this on."""
        return capture_range(depth + 1, self.ends, self.outer)

    def refuse(self, refusal: Refusal) -> None:
        """Keep the first refusal; nothing is recorded after it."""
        if self.refusal is None:
            self.refusal = refusal
            self.values.clear()  # weak references would get in the way of swap_tensors
            self.reach.reader.stop()
            if self.observer is not None:
                self.observer.stop()


def create_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    after: fx.Node | None = None,
) -> fx.Node:
    """A new node, at the end of a graph or after another node."""
    if name == "self":  # the generated code has one already
        name = "self_"
    if not CAN_APPEND_NODES:
        node = graph.create_node(op, target, args, kwargs, name=name)
        if after is not None:
            after.append(node)  # moves it there
        return node
    # What create_node does, without its search of the arguments for symbolic sizes, which a real
    # run has none of: a fifth of a trace's time (36 layers, torch 2.13, 184 → 146 ms).
    namespace: Any = graph._graph_namespace
    unique = namespace.create_name(name, None)
    node = fx.Node(graph, unique, op, target, args, kwargs)
    namespace.associate_name_with_obj(unique, node)
    insert = graph._insert if after is None else after.append
    insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def _input_name(source: Source) -> str:
    text = str(source)
    for prefix in ("L['self']", "L", "G", "C"):
        text = text.removeprefix(prefix)
    name = re.sub(r"\W+", "_", text).strip("_")
    usable = name.isidentifier() and not keyword.iskeyword(name)
    return name if usable else f"self_{name}"


_FORBIDDEN = (
    "a view that was made under torch.no_grad() is used here, and its base was changed in place "
    "where gradients are on. Autograd raises when it is asked about such a view, so no guard "
    "can check it. Make the view where it is used."
)


def check_class(tensor: object) -> None:
    """Raise Refused for a tensor whose class runs code of the user's, or that has no shape yet."""
    if id(type(tensor)) in PLAIN_TENSORS:
        return
    if isinstance(tensor, torch.Tensor) and is_lazy(tensor):
        raise Refused(
            "lazy-parameter",
            "a lazy module is made here, and a graph can't make and initialise it again. Make "
            "it outside.",
        )
    if has_own_code(type(tensor)):
        raise Refused(
            "tensor-subclass",
            f"{name_of(type(tensor))} has a __torch_function__ of its own, which runs for "
            "whatever is asked of such a tensor. Pass tensors of plain classes.",
        )


def _unknown_origin(tensor: torch.Tensor) -> Refused:
    return Refused(
        "unknown-origin",
        f"a tensor {meta_of(tensor)} is used here first, and its origin is unknown: it is no "
        "argument, was not read from anything observed, and no recorded torch call made it. "
        "It would be a constant in the graph. Pass it as an argument, keep it in an attribute "
        "or a global, or make it with a torch function (torch.tensor, not torch.Tensor or "
        "torch.from_numpy).",
    )


class CallKeeper(Protocol):
    """Who keeps what a call began with, in case that it fails."""

    def before_run(self) -> None:
        """The callable is about to run as Python code, observed or not."""

    def before_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A torch function is about to be called, and may change its arguments."""

    def before_write(self, tensor: torch.Tensor) -> None:
        """A tensor is about to be changed in place."""

    def before_draw(self, generators: Iterable[torch.Generator]) -> None:
        """Compiled code is about to run that draws from torch's generators, and from these."""

    def run_plainly(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the callable, unobserved."""

    def note_code_failed(self, error: BaseException) -> None:
        """Compiled code raised what the plain call, which returned, didn't."""

    def find_own_mode(self) -> AbstractContextManager[None] | None:
        """A `with` that leaves the mode on top of torch's stack, if it is this one's own."""

    def is_for_failures(self) -> bool:
        """Whether it is needed also where the run is refused: a call that fails is recorded."""


class _Current(threading.local):
    state: TracingState | None = None  # None while paused, and inside an op
    tracing: bool = False  # from the beginning of a traced run to its end
    kept: CallKeeper | None = None  # of the call that goes on, where failures are recorded


CURRENT = _Current()


@contextmanager
def all_plain() -> Iterator[None]:
    """What is compiled runs as plain Python in this thread, as it does in a traced run."""
    before, CURRENT.tracing = CURRENT.tracing, True
    try:
        yield
    finally:
        CURRENT.tracing = before


def get_tracing_state() -> TracingState | None:
    """The state that this thread records into now."""
    return CURRENT.state


def set_tracing_state(state: TracingState | None) -> None:
    """Record into `state` from now on; None pauses."""
    CURRENT.state = state


def get_value_trace(tensor: torch.Tensor, state: TracingState | None = None) -> fx.Node:
    """The node that stands for a tensor, in `state` or the current one."""
    try:
        with torch._C.DisableTorchFunction():  # what is asked of the tensor isn't the run's
            return _need(state).node_of(tensor)
    except Refused as refused:
        raise StateError(refused.reason, slug="no-value-trace") from None


def set_value_trace(tensor: torch.Tensor, node: fx.Node, state: TracingState | None = None) -> None:
    """Let `node` stand for a tensor, in `state` or the current one."""
    _need(state).values.add(tensor).node = node


def _need(state: TracingState | None) -> TracingState:
    state = state or CURRENT.state
    if state is None:
        raise StateError(
            "No tracing state is current in this thread. Pass one, or call this inside a trace.",
            slug="no-tracing-state",
        )
    return state


def drop_unused_parts(state: TracingState) -> None:
    """Parts of multi-output calls that neither the graph nor a branch uses."""
    used = {node for branch in state.branches for node in branch.inputs}
    for node in reversed(state.parts):
        if not node.users and node not in used:
            state.graph().erase_node(node)


def drop_unused_inputs(state: TracingState) -> None:
    """Tensors that came with the call and that the run did nothing with."""
    used = {node for branch in state.branches for node in branch.inputs}
    for node, known in tuple(state.inputs):
        if not node.users and node not in used:
            state.graph().erase_node(node)
            state.inputs.remove((node, known))
