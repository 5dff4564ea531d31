"""Limits: what only a graph that runs as it is can do.

AOTAutograd, on which torch's back ends stand, takes a graph's inputs for values. What a run does
to their form would be lost without a word, or fail in words that are not the user's. Such a graph
is refused, for all back ends but `eager`. What it does to `.grad` runs between parts: see cuts.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx
from torch.nn import functional as F

from tripwire.backends.backwards import wants_grad
from tripwire.ranges import NOWHERE
from tripwire.reading.tensors import OUTSIDE, meta_of, storage_of, traits_of
from tripwire.rulebook.refusals import Refused
from tripwire.rulebook.rules import DELATTR, GETATTR, SETATTR, words
from tripwire.tracing.open.opening import NUMBER
from tripwire.tracing.result import Trace
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.values.classes import isinstance

_ALWAYS = words("retain_grad")
_OF_INPUTS = words("requires_grad_ detach_")


def check_functional(trace: Trace) -> None:
    """Refuse a graph that no functional form of it can stand for. Raises Refused."""
    grad_mode, last = trace.torch_state["grad mode"], None
    for node in trace.graph.nodes:
        what = _find_unfit(node)
        if what is not None:
            raise _refuse(what, node)
        if node.target is torch._C._set_grad_enabled:
            grad_mode, last = node.args[0], node
    if last is not None and grad_mode != trace.torch_state["grad mode"]:
        raise _refuse("the grad mode is left changed here", last)
    assert trace.completion is not None
    for wanted, tensor in zip(trace.inputs, trace.completion.tensors, strict=True):
        if tensor is None:
            continue
        meta, traits = meta_of(tensor), traits_of(tensor)
        before = (wanted.meta.shape, wanted.meta.stride, wanted.meta.dtype, wanted.traits.offset)
        if (meta.shape, meta.stride, meta.dtype, traits.offset) != before:
            what = f"the run changes the shape, strides or dtype of {wanted.source} in place"
            raise _refuse(what)
        if wanted.written and not traits.is_leaf:
            # AOTAutograd keeps the value before for the backward, and then writes over it.
            what = f"the run changes {wanted.source} in place, and gradients flow through it"
            raise _refuse(what)
    _check_overlap(trace)
    if any(wanted.meta.requires_grad for wanted in trace.inputs):
        _check_kept(trace)


def _check_kept(trace: Trace) -> None:
    """What the backward needs of an input may be the input itself, and be written over by then.

    It may also compute again what was computed from the input: a result without a gradient counts
    where one with a gradient is computed from it. What an input is after the last write, it stays.
    """
    placeholders = trace.graph.find_nodes(op="placeholder")[len(trace.numbers) :]
    pairs = zip(placeholders, trace.inputs, strict=True)
    sources = {node: wanted.source for node, wanted in pairs if wanted.written}
    if not sources:
        return
    calls = [node for node in trace.graph.nodes if FACTS in node.meta and node.op != "placeholder"]
    views = _find_views(calls, sources)
    last = {one: call for call in calls for one in _find_inputs(_split(call)[0], views)}
    uses: dict[fx.Node | int, dict[fx.Node, fx.Node]] = {}  # in a value or memory: input → call
    coming, grad_mode = set(last), trace.torch_state["grad mode"]
    for call in calls:
        if call.target is torch._C._set_grad_enabled:
            grad_mode = bool(call.args[0])
        written, used = _split(call)
        changed = _find_inputs(written, views)
        found = dict.fromkeys(coming.intersection(_find_inputs(used, views)), call)
        coming -= {one for one in changed if last[one] is call}
        for given in call.all_input_nodes:
            for origin in (given, *_made_by_run(given), *views.get(given, ())):
                found = uses.get(origin, {}) | found
        if found:
            facts: NodeFacts = call.meta[FACTS]
            if grad_mode and (wants_grad(facts.value) or _is_act(call)):
                one = next(one for one in sources if one in found)
                what = f"{sources[one]} is used here and changed in place later"
                raise _refuse(f"{what}, where gradients are on", found[one])
            itself = views.get(call, ())
            uses[call] = {one: use for one, use in found.items() if one not in itself}
            places: list[fx.Node | int] = [*changed, *(m for m in facts.written if m != OUTSIDE)]
            for place in places:
                uses[place] = uses.get(place, {}) | {k: v for k, v in found.items() if k != place}


def _is_act(call: fx.Node) -> bool:
    """Whether a call is there for what it does, other than to write: a backward, say."""
    facts: NodeFacts = call.meta[FACTS]
    return facts.value is None and not facts.written and NUMBER not in call.meta


def _find_views(
    calls: list[fx.Node], inputs: Iterable[fx.Node]
) -> dict[fx.Node, frozenset[fx.Node]]:
    """The inputs that each node is, or may be a view of."""
    views = {node: frozenset({node}) for node in inputs}
    for call in calls:
        if OUTSIDE in call.meta[FACTS].memory:
            found = _find_inputs(call.all_input_nodes, views)
            if found:
                views[call] = found
    return views


def _find_inputs(
    nodes: Iterable[fx.Node], views: dict[fx.Node, frozenset[fx.Node]]
) -> frozenset[fx.Node]:
    return frozenset().union(*(views[node] for node in nodes if node in views))


def _made_by_run(node: fx.Node) -> Iterable[int]:
    facts: NodeFacts | None = node.meta.get(FACTS)
    return () if facts is None else (memory for memory in facts.memory if memory != OUTSIDE)


def _split(call: fx.Node) -> tuple[Sequence[fx.Node], Sequence[fx.Node]]:
    """What a call may write to, and what it computes with. What is viewed is neither."""
    facts: NodeFacts = call.meta[FACTS]
    given = call.all_input_nodes
    if not facts.written:
        return (), () if OUTSIDE in facts.memory else given
    first: list[fx.Node] = []
    fx.map_arg(call.kwargs.get("out", call.args[:1]), first.append)
    if call.target is operator.setitem or set(facts.written) <= set(facts.memory):
        return first, [one for one in given if one not in first]
    return given, first  # statistics, which are written beside the result


def _check_overlap(trace: Trace) -> None:
    """AOTAutograd puts overlapping inputs together: one that is returned isn't itself then."""
    assert trace.completion is not None
    pairs = zip(trace.inputs, trace.completion.tensors, strict=True)
    found = [(wanted, _span_of(tensor)) for wanted, tensor in pairs if tensor is not None]
    for wanted, (storage, begin, end) in found:
        for other, (its_storage, its_begin, its_end) in found if wanted.written else ():
            if other is not wanted and storage == its_storage != -1:
                if max(begin, its_begin) < min(end, its_end):
                    what = f"the run changes {wanted.source} in place, which overlaps "
                    raise _refuse(what + str(other.source))


def _span_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Which memory a tensor has, where it begins there, and where it ends, in bytes."""
    storage = storage_of(tensor)
    if storage == -1 or tensor.numel() == 0:
        return -1, 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin, width = int(tensor.storage_offset()), tensor.element_size()
    return storage, begin * width, (begin + last + 1) * width


def _refuse(what: str, node: fx.Node | None = None) -> Refused:
    facts: NodeFacts | None = None if node is None else node.meta[FACTS]
    where = NOWHERE if facts is None else facts.where
    return Refused("not-functional", f"{what}, and {_LOST}", where)


_LOST = (
    'only the back end "eager" can do that in compiled code; others would lose it. Do it '
    'outside the compiled callable, or use backend="eager".'
)


def _find_unfit(node: fx.Node) -> str | None:
    """What a node does that a functional graph can't; None for nearly all."""
    if node.op == "call_method" or node.op == "call_function":
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name in _ALWAYS:
            return f"`{name}` runs here"
        if name in _OF_INPUTS and _is_input(node.args[0]):
            return f"`{name}` changes an input here"
        if node.target in (GETATTR, SETATTR, DELATTR):
            attribute = node.args[1]
            if attribute == "grad":
                return None
            if node.target is SETATTR and (attribute == "data" or _is_input(node.args[0])):
                return f"`.{attribute}` is set here"
        if _wants_sparse_gradient(node):
            return "a sparse gradient is asked for here"
    return None


def _wants_sparse_gradient(node: fx.Node) -> bool:
    position = _SPARSE.get(node.target)
    if position is not None and len(node.args) > position:
        return bool(node.args[position])
    return any(node.kwargs.get(name) is True for name in ("sparse", "sparse_grad"))


# AOTAutograd gives dense gradients. Where the argument stands that asks for others.
_SPARSE: dict[object, int] = {
    F.embedding: 6,
    F.embedding_bag: 7,
    torch.embedding: 4,
    torch.gather: 3,
}


def _is_input(argument: object) -> bool:
    return isinstance(argument, fx.Node) and argument.op == "placeholder"
