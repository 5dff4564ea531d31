"""Backwards: where AOTAutograd's backward differs from plain autograd's, and how that is repaired.

AOTAutograd makes one backward for all outputs of a graph. If no loss uses an output, its gradient
counts as zeros, so every input gets a gradient, of zeros if need be. Plain autograd leaves an input
without a gradient if no used output depends on it. Optimizers tell None from zeros: weight decay
and momentum move a parameter whose gradient is zeros. So such gradients are set to None again.

The code behind such an input still runs: the backward of a custom function, with zeros. And an
output that is kept for the next call keeps everything that any output depends on. If the call uses
its own last result, that grows with each call. So a graph that does this (`joins_pasts`) isn't
given to a compiler as a whole.

AOTAutograd also refuses a backward with `retain_graph` after one without it, which may have freed
what was saved. Plain autograd takes them in any order.

And it counts each write to an input. Plain code doesn't count what a batch norm writes to its
running statistics, nor what is written through `.data`; a plain call before saved these for its
backward, which asks for the count.

And AOTAutograd runs the backward of a custom function once, when it compiles. If somebody replaces
that function, or one that it names, between a call and its backward, plain autograd runs the new
one. Compiled code can't, and says so.

What AOTAutograd saves for a backward isn't what plain autograd saves. If somebody's own hooks get
what is saved (`saved_tensors_hooks`), the graph itself runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from msgspec import Struct
from torch import fx
from torch.autograd.function import FunctionMeta

from tripwire.errors import FunctionChanged
from tripwire.reading.tensors import OUTSIDE, TensorMeta
from tripwire.tracing.bodies import Baked
from tripwire.tracing.fxnodes import LEAF
from tripwire.tracing.result import name_of
from tripwire.tracing.state import FACTS, UNCOUNTED, NodeFacts
from tripwire.values.classes import isinstance
from tripwire.values.identity import is_library_function

Runtime = Callable[..., Sequence[torch.Tensor]]
Gradients = tuple[torch.Tensor | None, ...]
_COMPILED = "CompiledFunctionBackward"  # AOTAutograd's class for its backward


@contextmanager
def keeping_saved() -> Iterator[None]:
    """Inside, back ends compile backwards that leave what was saved for them as it is."""
    import torch._functorch.config as config

    with config.patch(donated_buffer=False), warnings.catch_warnings():
        # AOTAutograd looks at `.grad` of every input. Nobody asked for that warning, and where
        # warnings are errors it would be one.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


@contextmanager
def telling_inference(graph: fx.Graph) -> Iterator[None]:
    """Inside, code for inference mode isn't taken from what AOTAutograd kept for other calls.

    Its key says whether gradients are on, and nothing of inference mode (torch 2.13), in which a
    graph that turns gradients on has none all the same.
    """
    import torch._functorch.config as config

    patches = {"enable_autograd_cache": False} if torch.is_inference_mode_enabled() else {}
    switches = graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    with config.patch(patches if switches else {}):
        yield


def mend_backward(graph: fx.Graph, runtime: Runtime, is_part: bool = False) -> Runtime:
    """The runtime of a graph, with the backward of plain autograd.

    is_part: a custom function may follow, whose backward gives none of the outputs a gradient.
    """
    inputs = graph.find_nodes(op="placeholder")
    uncounted = [index for index, node in enumerate(inputs) if node.meta.get(UNCOUNTED)]
    if uncounted:
        runtime = _leave_uncounted(runtime, uncounted)
    feeds = find_feeds(graph)
    return FirstRun(runtime, feeds, _find_baked(graph), is_part) if any(feeds.values()) else runtime


def _find_baked(graph: fx.Graph) -> list[Baked]:
    calls = [node.meta[FACTS].python for node in graph.nodes if FACTS in node.meta]
    functions = {call.function: None for call in calls if call is not None}
    return [Baked(one) for one in functions if type(one) is FunctionMeta]


def _leave_uncounted(runtime: Runtime, positions: list[int]) -> Runtime:
    """A runtime that doesn't count what it writes to these inputs."""

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        written = tuple([one for i in positions if not (one := inputs[i]).is_inference()])
        versions = tuple([one._version for one in written])
        outputs = runtime(*inputs)
        torch._C._autograd._unsafe_set_version_counter(written, versions)
        return outputs

    return run


def find_feeds(graph: fx.Graph) -> dict[int, set[int]]:
    """Which outputs each input that wants a gradient leads to, by position.

    Too many do no harm: a gradient of zeros stays one. None where nothing that is computed can
    have a gradient.
    """
    computed = [node.meta[FACTS] for node in graph.nodes if node.op.startswith("call_")]
    if not any(wants_grad(facts.value) or facts.written or facts.opaque for facts in computed):
        return {}
    leads: dict[fx.Node, frozenset[int]] = {}  # from these inputs
    written: dict[int, frozenset[int]] = {}  # the same for memory that in-place calls changed
    none: frozenset[int] = frozenset()

    def find(node: fx.Node) -> frozenset[int]:
        if not written:
            return leads[node]
        return leads[node].union(*(written.get(m, none) for m in node.meta[FACTS].memory))

    inputs = graph.find_nodes(op="placeholder")
    for index, node in enumerate(inputs):
        leads[node] = frozenset({index}) if wants_grad(node.meta[FACTS].value) else none
    feeds: dict[int, set[int]] = {i: set() for i, node in enumerate(inputs) if leads[node]}
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            for position, output in enumerate(node.args[0]):
                for index in find(output):
                    feeds[index].add(position)
            break
        found = none.union(*map(find, node.all_input_nodes))
        facts: NodeFacts = node.meta[FACTS]
        if facts.opaque:
            found = found.union(*written.values())
        # What is written beside the result is statistics, which want no gradient.
        changed = facts.written if facts.value is None else set(facts.written) & set(facts.memory)
        for memory in changed:
            written[memory] = written.get(memory, none) | found
        leads[node] = found if wants_grad(facts.value) else none
    return feeds


def joins_pasts(graph: fx.Graph, pasts: Iterable[int]) -> bool:
    """Whether a backward from an output reaches one of these inputs that it doesn't depend on."""
    (output,) = graph.find_nodes(op="output")
    wanting = {i for i, node in enumerate(output.args[0]) if wants_grad(node.meta[FACTS].value)}
    feeds = find_feeds(graph)
    return any(not wanting <= feeds[index] for index in pasts if index in feeds)


def trains(graph: fx.Graph) -> bool:
    """Whether a backward may follow: under no_grad as well, if the graph turns gradients on."""
    inputs = graph.find_nodes(op="placeholder")
    switches = graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    is_on = torch.is_grad_enabled() or any(node.args[0] for node in switches)
    return is_on and any(wants_grad(node.meta[FACTS].value) for node in inputs)


def wants_grad(value: TensorMeta | tuple[TensorMeta | None, ...] | None) -> bool:
    """Whether a result, or one of several, has a gradient."""
    if isinstance(value, TensorMeta):
        return value.requires_grad
    return value is not None and any(map(wants_grad, value))


class Settling:
    """Compiled code that looks at its first run, and may have nothing to do from then on."""

    def __init__(self, runtime: Callable[..., Any]) -> None:
        self._runtime = runtime
        self._stays = False  # whether it still has something to do

    @property
    def settled(self) -> Callable[..., Any]:
        """What to call once it ran."""
        if isinstance(self._runtime, Settling):
            self._runtime = self._runtime.settled
        return self if self._stays else self._runtime

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        raise NotImplementedError


class Heeding:
    """Compiled code that trains; or its graph, where hooks of the user's get what is saved."""

    def __init__(self, runtime: Settling, plain: Runtime) -> None:
        self._first: Settling | None = runtime  # until it has run
        self._settled: Runtime = runtime
        self._plain = plain

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        hooks = _top_hooks(False)
        # Torch's own, such as save_on_cpu, give back what they got.
        if hooks is None or (type(hooks[0]) is FunctionType and is_library_function(hooks[0])):
            outputs = self._settled(*inputs)
            if self._first is not None:
                self._settled, self._first = self._first.settled, None
            return outputs
        return self._plain(*inputs)


_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class FirstRun(Settling):
    """Compiled code until it has run once: only then can its backward be looked at."""

    def __init__(
        self, runtime: Runtime, feeds: dict[int, set[int]], baked: list[Baked], is_part: bool
    ) -> None:
        super().__init__(runtime)
        self._feeds = feeds
        self._baked = baked
        self._is_part = is_part

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        runtime = self._runtime
        before = [(inputs[index], inputs[index].grad_fn) for index in self._feeds]
        outputs: Sequence[torch.Tensor] = runtime(*inputs)
        backward = _find_backward(outputs, {fn for _, fn in before if fn is not None})
        if backward is not None:
            _allow_retain_graph(backward.node)
            if self._baked:
                _check_before(backward.node, self._baked)
            if self._is_part or len({frozenset(outputs) for outputs in self._feeds.values()}) > 1:
                hook = _Hook(backward.slots, self._find_edges(backward.node, before))
                backward.node.register_hook(hook)
                self._runtime = _Hooked(runtime, hook, backward.position, backward.steps)
        return outputs

    def _find_edges(
        self, node: Any, before: list[tuple[torch.Tensor, Any]]
    ) -> list[set[int] | None]:
        """The outputs that each gradient of the node depends on; None where it isn't known."""
        by_edge = {
            (id(tensor) if fn is None else fn, tensor.output_nr): outputs
            for (tensor, fn), outputs in zip(before, self._feeds.values(), strict=True)
        }
        return [
            by_edge.get((id(fn.variable) if hasattr(fn, "variable") else fn, number))
            for fn, number in node.next_functions
        ]


class _Backward(Struct, frozen=True):
    """The node of a compiled backward."""

    node: Any
    slots: dict[int, set[int]]  # which outputs are behind each gradient that it takes
    position: int  # an output that leads to it
    steps: int  # in so many steps


def _find_backward(outputs: Sequence[torch.Tensor], others: set[Any]) -> _Backward | None:
    found: _Backward | None = None
    slots: dict[int, set[int]] = {}
    for position, output in enumerate(outputs):
        fn: Any = output.grad_fn
        slot, steps = output.output_nr, 0
        while fn is not None and fn not in others and type(fn).__name__ != _COMPILED:
            # A view of an output is made again outside the compiled code.
            fn, slot = fn.next_functions[0] if len(fn.next_functions) == 1 else (None, 0)
            steps += 1
        if fn is not None and fn not in others:  # else it is an input, or a view of one
            found = _Backward(fn, slots, position, steps)
            slots.setdefault(slot, set()).add(position)
    return found


def _allow_retain_graph(node: Any) -> None:
    """Say that nothing is eaten: what was compiled under `keeping_saved` doesn't know by itself."""
    type(node)._forward_cls.metadata.bw_donated_idxs = []


def _check_before(node: Any, baked: list[Baked]) -> None:
    """Let a compiled backward raise where it isn't the one that plain autograd would run."""
    cls = type(node)._forward_cls
    compiled = cls.backward

    def backward(ctx: Any, *gradients: Any) -> Any:
        for one in baked:
            if not one.is_current():
                raise FunctionChanged(
                    f"the backward of {one.function.__name__}, or a function or module that it "
                    "names, was replaced after the call, and the compiled backward has the old "
                    "one. Replace it after the backward, or before the call.",
                    slug="backward-changed",
                )
        return compiled(ctx, *gradients)

    cls.backward = staticmethod(backward)


class _Hooked:
    """Compiled code; each run hangs the hook on the node of its backward."""

    def __init__(self, runtime: Runtime, hook: _Hook, position: int, steps: int) -> None:
        self._runtime = runtime
        self._hook = hook
        self._position = position
        self._steps = steps

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        outputs = self._runtime(*inputs)
        node: Any = outputs[self._position].grad_fn
        for _ in range(self._steps):
            node = node.next_functions[0][0]
        node.register_hook(self._hook)
        return outputs


class _Hook:
    """After a backward: gradients that depend on unused outputs only become None."""

    def __init__(self, slots: dict[int, set[int]], edges: list[set[int] | None]) -> None:
        self._slots = slots
        self._edges = edges

    def __call__(self, given: Gradients, taken: Gradients) -> Gradients | None:
        used: set[int] = set()
        for slot, gradient in enumerate(taken):
            if gradient is not None:
                if slot not in self._slots:  # an input that was changed in place, say
                    return None
                used |= self._slots[slot]
        return tuple(
            None if outputs is not None and used.isdisjoint(outputs) else gradient
            for gradient, outputs in zip(given, self._edges, strict=True)
        )


# --- what leads to what in a graph ---


def find_shown(graph: fx.Graph) -> set[fx.Node]:
    """The calls through which gradients go, also by way of in-place changes.

    They begin at results, and where the graph runs a backward itself.
    """
    (output,) = graph.find_nodes(op="output")
    begins = [output, *graph.find_nodes(op="call_method", target="backward")]
    writers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for memory in written_by(node):
            so_far = writers.get(memory, [])
            if node.target == "detach_":  # what was a leaf before is none any more
                so_far = [one for one in so_far if one.meta[FACTS].as_it_is is not LEAF]
            writers[memory] = [*so_far, node]
    given = [node for one in begins for node in one.all_input_nodes]
    return find_behind(given, writers, passes_gradients)


def find_used(graph: fx.Graph) -> set[fx.Node]:
    """The calls that results, and writes to the call's inputs, depend on."""
    (output,) = graph.find_nodes(op="output")
    writers = find_writers(graph)
    return find_behind(
        [*output.all_input_nodes, *writers.get(OUTSIDE, ())], writers, lambda _: True
    )


def find_writers(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """The calls that change memory, by which."""
    writers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for memory in written_by(node):
            writers.setdefault(memory, []).append(node)
    return writers


def find_freed(graph: fx.Graph) -> Iterator[tuple[set[fx.Node], set[fx.Node]]]:
    """What each backward may go through and let go of; and what it surely does."""
    writers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if name_of(node) == "backward":
            starts = node.all_input_nodes
            may_be = find_behind(starts, writers, passes_gradients)
            yield may_be, find_behind(starts, {}, passes_gradients)
        else:
            for memory in written_by(node):
                writers.setdefault(memory, []).append(node)


def written_by(node: fx.Node) -> tuple[int, ...]:
    """The memory that a call changes."""
    facts: NodeFacts | None = node.meta.get(FACTS)
    return () if facts is None else facts.written


def passes_gradients(facts: NodeFacts) -> bool:
    """Whether a gradient may go through a call."""
    return facts.value is None or wants_grad(facts.value)


def find_behind(
    starts: Iterable[fx.Node],
    writers: Mapping[int, Sequence[fx.Node]],
    goes_on: Callable[[NodeFacts], bool],
) -> set[fx.Node]:
    """All that these calls depend on, by way of in-place changes too."""
    found: set[fx.Node] = set()
    open_ = list(starts)
    while open_:
        node = open_.pop()
        facts: NodeFacts | None = node.meta.get(FACTS)
        if node not in found and facts is not None:
            found.add(node)
            open_ += [one for memory in facts.memory for one in writers.get(memory, ())]
            if goes_on(facts):
                open_ += node.all_input_nodes
    return found
