"""Limits: what torch's compilers can't take is refused, or rewritten before they get a graph.

AOTAutograd, which torch's back ends use, treats a graph's inputs as values. What a run does to
their form would be lost silently, or fail with a message about torch's internals. Such a graph is
refused, for all back ends but `eager`. What a graph does to `.grad` runs between parts: see
parts.py.

A pick is `alphas[t]`, with an integer in a tensor. For torch, `x[t]` is `x[int(t)]`, a view. It
takes the integer out of the tensor, and fake tensors have no integer there. If nobody can tell a
view from a copy, the values are gathered instead. If somebody can, the call stays, and the graph is
cut there. Inference mode that a graph enters is spelled as gradients that are off.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.nn import functional as F

from tripwire.backends.backwards import wants_grad
from tripwire.ranges import NOWHERE
from tripwire.reading.tensors import OUTSIDE, TensorMeta, meta_of, storage_of, traits_of
from tripwire.rulebook.refusals import Refused
from tripwire.rulebook.rules import DELATTR, GETATTR, SETATTR, words
from tripwire.tracing.branches import COMPARED
from tripwire.tracing.graphs import Outline, build_module, iter_calls
from tripwire.tracing.open.opening import NUMBER
from tripwire.tracing.result import Trace
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.values.classes import isinstance

_ALWAYS = words("retain_grad")
_OF_INPUTS = words("requires_grad_ detach_")
BEGINS = "tripwire_begins"  # in the meta of a call before which a part ends


def check_functional(trace: Trace) -> None:
    """Refuse a graph that no functional form of it can stand for. Raises Refused."""
    grad_mode, last = trace.torch_state["grad mode"], None
    for node in trace.graph.nodes:
        what = None if sets_data(node) else _find_unfit(node)
        if what is not None:
            raise _refuse(what, node)
        if node.target is torch._C._set_grad_enabled:
            grad_mode, last = node.args[0], node
    if last is not None and grad_mode != trace.torch_state["grad mode"]:
        raise _refuse("the grad mode is changed here and not set back", last)
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
    if any(wanted.meta.requires_grad for wanted in trace.inputs) and _leads_back(trace.graph):
        _check_kept(trace)


def _leads_back(graph: fx.Graph) -> bool:
    """Whether a backward may go through a graph, or runs in it."""
    (output,) = graph.find_nodes(op="output")
    returned = (node.meta.get(FACTS) for node in output.all_input_nodes)
    return any(facts is not None and wants_grad(facts.value) for facts in returned) or any(
        node.target == "backward" for node in graph.nodes
    )


def _check_kept(trace: Trace) -> None:
    """What the backward needs of an input may be the input itself, and be written over by then.

    It may also compute again what was computed from the input: where one with a gradient is
    computed from a result without a gradient, a part ends (`BEGINS`), and the next part gets the
    result. What an input is after the last write, it stays.
    An input's `.grad` counts as an input of its own, and is written by a backward.
    """
    placeholders = trace.graph.find_nodes(op="placeholder")[len(trace.numbers) :]
    names = dict(zip(placeholders, (str(wanted.source) for wanted in trace.inputs), strict=True))
    pairs = zip(placeholders, trace.inputs, strict=True)
    sources = {node: names[node] for node, wanted in pairs if wanted.written}
    calls = list_calls(trace.graph)
    firsts: dict[Any, fx.Node] = {}  # whose `.grad` → where it is read first
    views = {node: frozenset({node}) for node in sources}
    for call in calls:
        if _is_of_grad(call) and call.target is GETATTR:
            first = firsts.setdefault(call.args[0], call)
            views[call] = frozenset({first})
    sources |= {first: f"{names.get(whose, whose)}.grad" for whose, first in firsts.items()}
    if not sources:
        return
    add_views(calls, views)
    grad_mode = bool(trace.torch_state["grad mode"])
    for stretch in _split_at_backwards(calls):
        grad_mode = _check_stretch(stretch, sources, views, grad_mode, tuple(firsts.values()))


def _split_at_backwards(calls: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """What compilers get at once, at most: the backward in between is done before the rest."""
    begin = 0
    for index, call in enumerate(calls):
        if call.target == "backward":
            yield calls[begin : index + 1]
            begin = index + 1
    yield calls[begin:]


def _check_stretch(
    calls: list[fx.Node],
    sources: Mapping[fx.Node, str],
    views: Mapping[fx.Node, frozenset[fx.Node]],
    grad_mode: bool,
    grads: Sequence[fx.Node],
) -> bool:
    """Look for inputs that are used and written later. The grad mode at the end."""
    last = {one: call for call in calls for one in _find_inputs(_split(call, grads)[0], views)}
    uses: dict[fx.Node | int, dict[fx.Node, fx.Node]] = {}  # in a value or memory: input → call
    coming = set(last)
    for call in calls:
        if call.target is torch._C._set_grad_enabled:
            grad_mode = bool(call.args[0])
        written, used = _split(call, grads)
        changed = _find_inputs(written, views)
        found = direct = dict.fromkeys(coming.intersection(_find_inputs(used, views)), call)
        coming -= {one for one in changed if last[one] is call}
        for given in call.all_input_nodes:
            for origin in (given, *_made_by_run(given), *views.get(given, ())):
                found = uses.get(origin, {}) | found
        if found:
            facts: NodeFacts = call.meta[FACTS]
            is_kept = grad_mode and (wants_grad(facts.value) or _is_act(call))
            if is_kept and not direct:
                call.meta[BEGINS] = True
                uses.clear()
                continue
            if is_kept:
                one = next(one for one in sources if one in found)
                what = f"{sources[one]} is used here and changed in place later"
                raise _refuse(f"{what}, while gradients are on", found[one])
            if changed:  # an input is kept as it is then; a gradient isn't added to it again
                found = {one: use for one, use in found.items() if one not in grads}
            itself = views.get(call, ())
            uses[call] = {one: use for one, use in found.items() if one not in itself}
            places: list[fx.Node | int] = [*changed, *(m for m in facts.written if m != OUTSIDE)]
            for place in places:
                uses[place] = uses.get(place, {}) | {k: v for k, v in found.items() if k != place}
    return grad_mode


def _is_act(call: fx.Node) -> bool:
    """Whether a call is there for what it does, other than to write: a backward, say."""
    facts: NodeFacts = call.meta[FACTS]
    is_compared = facts.as_it_is is COMPARED
    return facts.value is None and not (facts.written or NUMBER in call.meta or is_compared)


def list_calls(graph: fx.Graph) -> list[fx.Node]:
    """What was recorded as the run went on."""
    return [node for node in graph.nodes if FACTS in node.meta and node.op != "placeholder"]


def add_views(calls: list[fx.Node], views: dict[fx.Node, frozenset[fx.Node]]) -> None:
    """To the inputs that nodes are, add those that each node may be a view of."""
    for call in calls:
        if OUTSIDE in call.meta[FACTS].memory and not _is_of_grad(call):
            written, _ = _split(call, ())
            found = _find_inputs(written or call.all_input_nodes, views)
            if found:
                views[call] = found


def find_changed(call: fx.Node, views: Mapping[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    """The inputs that a call changes in place."""
    return _find_inputs(_split(call, ())[0], views)


def _find_inputs(
    nodes: Iterable[fx.Node], views: Mapping[fx.Node, frozenset[fx.Node]]
) -> frozenset[fx.Node]:
    return frozenset().union(*(views[node] for node in nodes if node in views))


def _made_by_run(node: fx.Node) -> Iterable[int]:
    facts: NodeFacts | None = node.meta.get(FACTS)
    return () if facts is None else (memory for memory in facts.memory if memory != OUTSIDE)


def _is_of_grad(call: fx.Node) -> bool:
    """Whether a call reads, sets or deletes `.grad`, which changes no value."""
    return call.target in (GETATTR, SETATTR, DELATTR) and call.args[1] == "grad"


def _split(call: fx.Node, grads: Sequence[fx.Node]) -> tuple[Sequence[fx.Node], Sequence[fx.Node]]:
    """What a call may write to, and what it computes with. What is viewed is neither."""
    facts: NodeFacts = call.meta[FACTS]
    given = call.all_input_nodes
    if call.target == "backward":
        return grads, given
    if not facts.written or _is_of_grad(call):
        return (), () if OUTSIDE in facts.memory else given
    if sets_data(call):
        return given[:1], given[1:]
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
    if storage == -1 or tensor.is_nested or tensor.numel() == 0:
        return -1, 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin, width = int(tensor.storage_offset()), tensor.element_size()
    return storage, begin * width, (begin + last + 1) * width


def _refuse(what: str, node: fx.Node | None = None) -> Refused:
    facts: NodeFacts | None = None if node is None else node.meta[FACTS]
    where = NOWHERE if facts is None else facts.where
    return Refused("not-functional", f"{what}, and {_LOST}", where)


_LOST = (
    'only the back end "eager" keeps that in compiled code; others would lose it. Do it outside '
    'the compiled callable, or use backend="eager".'
)


def _find_unfit(node: fx.Node) -> str | None:
    """What a node does that a functional graph can't; None for nearly all."""
    if isinstance(node.target, Outline):
        if node.meta[FACTS].written:
            return "a tensor from before a transform of torch.func is changed in place there"
        return next(filter(None, map(_find_unfit, iter_calls([node]))), None)
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


def sets_data(node: fx.Node) -> bool:
    """Whether an input gets data of its form, which nothing else shares or changes: an average.

    Or it gets its own. Parts before and after it get the same tensor. `_check_kept` refuses it
    where a gradient needs the old data.
    """
    if node.target is not SETATTR or node.args[1] != "data" or not _is_input(node.args[0]):
        return False
    target, data = node.args[0], node.args[2]
    assert isinstance(target, fx.Node)
    if not isinstance(data, fx.Node):
        return False
    facts: NodeFacts = data.meta[FACTS]
    old, new = target.meta[FACTS].value, facts.value
    if not (isinstance(old, TensorMeta) and isinstance(new, TensorMeta)):
        return False
    if old != new._replace(requires_grad=old.requires_grad):
        return False
    if facts.memory == (OUTSIDE,):
        return _is_data_of(target, data)
    if OUTSIDE in facts.memory:
        return False
    (output,) = node.graph.find_nodes(op="output")
    returned = {memory for one in output.all_input_nodes for memory in _memory(one)}
    written = {m for one in _after(node) if FACTS in one.meta for m in one.meta[FACTS].written}
    return not (returned | written).intersection(facts.memory)


def _is_data_of(target: fx.Node, data: fx.Node) -> bool:
    """Whether this is `target.data`, maybe changed in place: so Python spells `p.data -= x`."""
    while data.target is not GETATTR:
        written, _ = _split(data, ())
        if len(written) != 1:
            return False
        (data,) = written
    return data.args[:2] == (target, "data")


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "output":
        node = node.next
        yield node


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


# --- picks ---


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def is_pick(node: fx.Node) -> bool:
    """Whether a call indexes with an integer that is in a tensor."""
    return node.target in (operator.getitem, operator.setitem) and any(
        map(_is_integer, _parts_of(node.args[1]))
    )


def spell_picks(module: fx.GraphModule) -> fx.GraphModule:
    """The same module, or one whose picks are gathers and scatters."""
    nodes = module.graph.nodes
    written = {m for node in nodes if FACTS in node.meta for m in node.meta[FACTS].written}
    (output,) = module.graph.find_nodes(op="output")
    returned = {memory for node in output.all_input_nodes for memory in _memory(node)}
    picks = {n for n in nodes if is_pick(n) and _can_gather(n, written | returned)}
    picks = {node for node in picks if BEGINS not in node.meta}
    if not picks:
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in picks:
            copies[node] = _Spelling(graph, node, copies.__getitem__).spell()
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return build_module(module, graph, type(module).__name__)


def spell_inference(module: fx.GraphModule, grad_mode: bool) -> fx.GraphModule:
    """The same module, or one that turns gradients off where the run entered inference mode.

    AOTAutograd gives no inference tensors, and fails where one is written into another tensor.
    """
    nodes = module.graph.nodes
    entered = [node.args[0] for node in nodes if node.target is _enter_inference_mode]
    if not entered or not all(entered):  # gradients are off where the call is in that mode
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    before: list[bool] = []
    for node in nodes:
        if node.target is _enter_inference_mode:
            before.append(grad_mode)
            grad_mode = False
        elif node.target is _exit_inference_mode:
            grad_mode = before.pop()
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.target is torch._C._set_grad_enabled:
                grad_mode = bool(node.args[0])
            continue
        switch = graph.call_function(torch._C._set_grad_enabled, (grad_mode,))
        switch.meta = dict(node.meta)
    return build_module(module, graph, type(module).__name__)


def _memory(node: fx.Node) -> tuple[int, ...]:
    facts: NodeFacts = node.meta[FACTS]
    return facts.memory


def _parts_of(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_integer(part: Any) -> bool:
    value = _value_of(part)
    return value is not None and value.shape == () and value.dtype in _INTEGERS


def _value_of(part: Any) -> TensorMeta | None:
    if not isinstance(part, fx.Node):
        return None
    value = part.meta[FACTS].value
    return value if isinstance(value, TensorMeta) else None


def _can_gather(node: fx.Node, seen: set[int]) -> bool:
    """Whether everything but integers is simple, and no view would show."""
    parts = _parts_of(node.args[1])
    if not all(
        _is_integer(part) or type(part) in (int, slice, type(None), type(...)) for part in parts
    ):
        return False
    if any(
        isinstance(b, fx.Node) for p in parts if type(p) is slice for b in (p.start, p.stop, p.step)
    ):
        return False
    owner = _value_of(node.args[0])
    if owner is None or owner.stride is None:
        return False
    if node.target is operator.setitem:
        return _can_scatter(node, owner)
    picked = _value_of(node)
    return picked is not None and not seen.intersection(_memory(node)) and _is_dense(picked)


def _is_dense(meta: TensorMeta) -> bool:
    return torch.empty(meta.shape, device="meta").stride() == meta.stride


def _can_scatter(node: fx.Node, owner: TensorMeta) -> bool:
    value: Any = node.args[2]
    if type(value) in (int, float, bool):
        return True
    given = _value_of(value)
    room = _shape_after(owner, node.args[1])
    return given is not None and given.dtype == owner.dtype and len(given.shape) <= len(room)


def _shape_after(owner: TensorMeta, index: Any) -> tuple[int, ...]:
    one = tuple(0 if _is_integer(part) else part for part in _parts_of(index))
    return tuple(_like(owner)[one].shape)


def _like(meta: TensorMeta) -> torch.Tensor:
    assert meta.stride is not None
    return torch.empty_strided(meta.shape, meta.stride, device="meta")


class _Spelling:
    """One pick, rewritten as other calls."""

    def __init__(self, graph: fx.Graph, node: fx.Node, find: Callable[[fx.Node], fx.Node]) -> None:
        self._graph = graph
        self._node = node
        self._find = find

    def spell(self) -> fx.Node:
        node = self._node
        owner = node.args[0]
        assert isinstance(owner, fx.Node)
        parts = _parts_of(node.args[1])
        seen, positions = self._view(owner, parts)
        integers = [part for part in parts if _is_integer(part)]
        by_position: list[fx.Node | None] = [None] * (max(positions) + 1)
        for position, integer in zip(positions, integers, strict=True):
            by_position[position] = self._find(integer)
        if node.target is operator.getitem:
            made = self._graph.call_function(torch.ops.aten.index.Tensor, (seen, by_position))
        else:
            value = self._value(owner, node.args[2])
            target = torch.ops.aten.index_put_.default
            made = self._graph.call_function(target, (seen, by_position, value))
        made.meta = dict(node.meta)
        return made

    def _view(self, owner: fx.Node, parts: tuple[Any, ...]) -> tuple[fx.Node, list[int]]:
        """What the other parts of an index leave, and where the integers stand in that."""
        meta = _value_of(owner)
        assert meta is not None
        rest = tuple(slice(None) if _is_integer(part) else part for part in parts)
        positions, position = [], 0
        for part in parts:
            if part is ...:
                taken = sum(p is not None and p is not ... for p in parts)
                position += len(meta.shape) - taken
            else:
                if _is_integer(part):
                    positions.append(position)
                position += type(part) is not int
        found = self._find(owner)
        if all(part == slice(None) for part in rest):
            return found, positions
        view = _like(meta)[rest]
        made = self._graph.call_function(operator.getitem, (found, rest))
        facts: NodeFacts = owner.meta[FACTS]
        value = meta._replace(shape=tuple(view.shape), stride=view.stride())
        made.meta = dict(self._node.meta)
        made.meta[FACTS] = facts._replace(
            value=value, written=(), where=self._node.meta[FACTS].where
        )
        return made, positions

    def _value(self, owner: fx.Node, value: Any) -> fx.Node:
        if isinstance(value, fx.Node):
            return self._find(value)
        meta = _value_of(owner)
        assert meta is not None
        options: dict[str, Any] = {"dtype": meta.dtype, "device": meta.device}
        made = self._graph.call_function(torch.ops.aten.full.default, ([], value), options)
        facts: NodeFacts = self._node.meta[FACTS]
        number = TensorMeta((), (), meta.dtype, meta.device, False)
        made.meta = dict(self._node.meta)
        made.meta[FACTS] = facts._replace(value=number, memory=(), written=())
        return made
