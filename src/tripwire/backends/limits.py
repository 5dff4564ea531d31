"""Limits: what only a graph that runs as it is can do.

AOTAutograd, on which torch's back ends stand, takes a graph's inputs for values. What a run does
to their form would be lost without a word, or fail in words that are not the user's. Such a graph
is refused, for all back ends but `eager`. What it does to `.grad` runs between parts: see cuts.py.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from tripwire.backends.backwards import wants_grad
from tripwire.ranges import NOWHERE
from tripwire.reading.tensors import meta_of, storage_of, traits_of
from tripwire.rulebook.refusals import Refused
from tripwire.rulebook.rules import DELATTR, GETATTR, SETATTR, words
from tripwire.tracing.memory import OUTSIDE
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
    if trace.torch_state["grad mode"] and any(w.meta.requires_grad for w in trace.inputs):
        _check_kept(trace)


def _check_kept(trace: Trace) -> None:
    """What the backward needs of an input may be the input itself, and be written over by then."""
    placeholders = trace.graph.find_nodes(op="placeholder")[len(trace.numbers) :]
    for wanted, node in zip(trace.inputs, placeholders, strict=True):
        used = _find_use_before_write(node) if wanted.written else None
        if used is not None:
            what = (
                f"{wanted.source} is used here and changed in place later, where gradients are on"
            )
            raise _refuse(what, used)


def _find_use_before_write(placeholder: fx.Node) -> fx.Node | None:
    """The first call that gets an input, or a view of it, and neither writes to it nor views it."""
    views = {placeholder}
    nodes: list[fx.Node] = list(placeholder.graph.nodes)
    for node in nodes:
        if node.op in ("placeholder", "output") or views.isdisjoint(node.all_input_nodes):
            continue
        facts: NodeFacts = node.meta[FACTS]
        if facts.written:
            return None
        if OUTSIDE in facts.memory:
            views.add(node)
        elif facts.value is None or wants_grad(facts.value):  # else nothing is kept
            return node
    return None


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
