"""Limits: what only a graph that runs as it is can do.

AOTAutograd, on which torch's back ends stand, takes a graph's inputs for values. What a run does
to their `.grad`, or to their form, would be lost without a word, or fail in words that are not the
user's. Such a graph is refused, for all back ends but `eager`.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from tripwire.tracing.ranges import NOWHERE
from tripwire.tracing.refusals import Refused
from tripwire.tracing.result import Trace
from tripwire.tracing.rules import DELATTR, GETATTR, SETATTR, words
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.tracing.values import meta_of, traits_of

_ALWAYS = words("backward retain_grad")
_OF_INPUTS = words("requires_grad_ detach_")


def check_functional(trace: Trace) -> None:
    """Refuse a graph that no functional form of it can stand for. Raises Refused."""
    grad_mode, last = trace.torch_state.grad_enabled, None
    for node in trace.graph.nodes:
        what = _find_unfit(node)
        if what is not None:
            raise _refuse(what, node)
        if node.target is torch._C._set_grad_enabled:
            grad_mode, last = node.args[0], node
    if last is not None and grad_mode != trace.torch_state.grad_enabled:
        raise _refuse("the grad mode is left changed here", last)
    assert trace.completion is not None
    for wanted, tensor in zip(trace.inputs, trace.completion.tensors, strict=True):
        if tensor is None:
            continue
        meta, traits = meta_of(tensor), traits_of(tensor)
        before = (wanted.meta.shape, wanted.meta.stride, wanted.meta.dtype, wanted.traits.offset)
        if (meta.shape, meta.stride, meta.dtype, traits.offset) != before:
            what = f"the run changes the form of {wanted.source} in place"
            raise _refuse(what)
        if wanted.written and not traits.is_leaf:
            # AOTAutograd keeps the value before for the backward, and then writes over it.
            what = f"the run changes {wanted.source} in place, through which gradients go"
            raise _refuse(what)


def _refuse(what: str, node: fx.Node | None = None) -> Refused:
    facts: NodeFacts | None = None if node is None else node.meta[FACTS]
    where = NOWHERE if facts is None else facts.where
    return Refused("not-functional", f"{what}, and {_LOST}", where)


_LOST = (
    'back ends other than "eager" compile functions of values: it would be lost. Do it outside the '
    'compiled callable, or use backend="eager".'
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
                return "`.grad` is used here"
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
