"""Cuts: calls that no compiler can take run uncompiled, between parts that are compiled.

AOTAutograd runs a graph once, with fake tensors, and keeps the outcome. So a custom autograd
function whose code reads or writes something would do so once and never again; a size that depends
on values has no number; a leaf, or a tensor of another class, comes out as neither. Such calls stay
calls. parts.py compiles the stretches between them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from msgspec import Struct
from torch import fx

from tripwire.backends.backwards import (
    find_behind,
    find_shown,
    find_used,
    find_writers,
    joins_pasts,
    passes_gradients,
    wants_grad,
)
from tripwire.backends.floats import called_name, spells_dropout, takes_open_float
from tripwire.backends.limits import BEGINS, is_pick, sets_data
from tripwire.env import LSTM_KEEPS_ITS_SHAPE
from tripwire.reading.tensors import OUTSIDE, TensorMeta
from tripwire.rulebook.refusals import Refusal
from tripwire.rulebook.rules import DELATTR, GETATTR, RECURRENT, SETATTR, words
from tripwire.tracing.fxnodes import LEAF
from tripwire.tracing.graphs import iter_calls
from tripwire.tracing.open.opening import FORMED, NUMBER
from tripwire.tracing.result import is_random
from tripwire.tracing.state import FACTS, PAST, NodeFacts
from tripwire.values.classes import isinstance

Runtime = Callable[..., Any]
Compile = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Runtime]

_SIZE = "the size of its result depends on values"
_SIZED = "it takes a tensor whose size depends on values"
_NUMBER = "it takes a number out of a tensor"
_DETACHED = "it makes a view without gradient of a tensor that has one"
_JOINED = (
    "one result depends on state that has a gradient, and another result doesn't. A compiler makes "
    "one backward for both, which would keep the graphs of all earlier calls alive. Detach the "
    "state"
)
_GRAD = "it reads or sets `.grad`, which isn't a value of the graph"
_DATA = "it gives a tensor other data, which a compiler's graph can't"
_BACKWARD = "it runs a backward"
_UNUSED = "it draws random numbers that nothing uses, and a compiler would remove it"
_PLACED = "it counts from the start of a storage that was passed in, and Inductor from elsewhere"
_UNFORMED = "torch can't tell the shape and dtype of its result without running it"
_CHANGED = "its backward needs a value from before a change in place"
_FIXED = "it takes a float that varies, which would become a constant of the compiled code"
_UNROLLED = "a compiler would unroll it, for one length"
_ONE_KERNEL = "it is one kernel of cuDNN's, which a compiler would take apart into its steps"
# `_rnn_helper` in torch/_decomp/decompositions.py, 2.13, compares the layers the wrong way round.
_NO_DROPOUT = "torch's compilers leave out the dropout between its layers"
_MORE_DIMENSIONS = "torch's compilers give its last states a dimension more (before torch 2.13)"
_GROUPED = words("_grouped_mm grouped_mm")  # of experts; fake tensors take bfloat16 alone
_MAKES_TENSORS = words("tensor as_tensor asarray new_tensor")


class Cuts(Struct, frozen=True):
    """The calls of a graph that run uncompiled, and why."""

    why: dict[fx.Node, str]
    whole: str | None  # why no part of the graph is compiled; None: the other parts are
    # Results that are kept, and that others are computed from. A part ends before their first use,
    # so that the gradient of what is computed goes through them, where hooks see it.
    joints: frozenset[fx.Node] = frozenset()
    ends_between: bool = False  # a part ends before some calls: see limits.py

    def __bool__(self) -> bool:
        return bool(self.why or self.joints or self.ends_between)

    def refusals(self) -> Iterator[Refusal]:
        """The first call of each kind, for people."""
        told: set[str] = set()
        for node, why in self.why.items():
            if why not in told and why not in (_SIZED, _GRAD):
                told.add(why)
                facts: NodeFacts = node.meta[FACTS]
                told_so = self.whole or _APART
                reason = f"`{_spell(node)}` can't be compiled: {why}. {told_so}"
                if why == _BACKWARD and self.whole is None:
                    reason = _BETWEEN
                yield Refusal("graph-cut", reason, facts.where)


_APART = "It runs uncompiled; the parts before and after it are compiled separately."
_BETWEEN = (
    "a graph has no `backward` inside. It runs between the parts before and after it, which are "
    "compiled separately, each with a backward of its own."
)
# What is compiled in parts has no gradient of gradients.
_GRADIENTS = "The whole graph runs uncompiled, because it also asks for gradients."
_PASTS = "The whole graph runs uncompiled."


def find_cuts(
    graph: fx.Graph, kept: int = 0, fixing: Set[str] | None = None, *, own_dropout: bool = False
) -> Cuts:
    """What must run as it is. So many outputs, the first ones, are kept by effects.

    fixing: names of calls of which a compiler would fix a float that is open. So it would where
    random numbers are drawn, save by a dropout of its own. None: let it.
    """
    why: dict[fx.Node, str] = {}
    shown = find_shown(graph)
    used = find_used(graph) if any(map(is_random, graph.nodes)) else set()
    unsized: set[fx.Node] = set()  # whose sizes may be others on the next call
    for node in graph.nodes:
        facts: NodeFacts | None = node.meta.get(FACTS)
        if facts is None or node.op in ("placeholder", "get_attr") or NUMBER in node.meta:
            continue
        takes_unsized = any(given in unsized for given in node.all_input_nodes)
        if facts.makes_size or (takes_unsized and facts.sized_by_values):
            unsized.add(node)
        found = (
            (None if facts.as_it_is is LEAF and node not in shown else facts.as_it_is)
            or (_SIZE if facts.makes_size else None)
            or (_SIZED if takes_unsized else None)
            or _find_gradient(node)
            or (_DETACHED if _loses_gradient(node) else None)
            or (_UNUSED if node not in used and is_random(node) else None)
            or (_FIXED if fixing is not None and _is_fixed(node, fixing, own_dropout) else None)
            or _find_inside(node, is_whole=fixing is None)
        )
        if found is not None:
            why[node] = found
    begins = [node for node in graph.nodes if BEGINS in node.meta]
    if any(map(_asks_for_gradients, graph.nodes)):
        return Cuts(dict.fromkeys(begins, _CHANGED) | why, _GRADIENTS)
    if not why and joins_pasts(graph, find_pasts(graph.find_nodes(op="placeholder"))):
        (output,) = graph.find_nodes(op="output")
        return Cuts({output.all_input_nodes[0]: _JOINED}, _PASTS)
    return Cuts(why, None, _find_joints(graph, kept), bool(begins))


def _find_inside(node: fx.Node, *, is_whole: bool) -> str | None:
    """What a compiler can't do of a call, or of those that an outline stands for."""
    for one in iter_calls([node]):
        found = (
            _find_number(one)
            or (_PLACED if _counts_from_outside(one) else None)
            or (_UNFORMED if _has_no_fake(one) else None)
            or (_UNROLLED if FORMED in one.meta else None)
            or (_find_layer(one, is_whole) if _name_of(one) in RECURRENT else None)
        )
        if found is not None:
            return found
    return None


def _find_joints(graph: fx.Graph, kept: int) -> frozenset[fx.Node]:
    """What is kept with its gradient, and leads to other results that have one."""
    (output,) = graph.find_nodes(op="output")
    outputs = [node for node in output.args[0] if wants_grad(node.meta[FACTS].value)]
    found = {node for node in output.args[0][:kept] if node in outputs and node.op != "placeholder"}
    if not found:
        return frozenset()
    givers = [one for node in outputs for one in node.all_input_nodes]
    return frozenset(found & find_behind(givers, find_writers(graph), passes_gradients))


def _is_fixed(node: fx.Node, fixing: Set[str], own_dropout: bool) -> bool:
    """Whether a compiler would fix a float that is open."""
    if not takes_open_float(node):
        return False
    is_drawn = is_random(node) and not (own_dropout and spells_dropout(node))
    return is_drawn or _name_of(node) in fixing


def _has_no_fake(node: fx.Node) -> bool:
    """Whether torch runs a call that it has no fake kernel for, as of 2.13."""
    name = _name_of(node)
    if name not in _GROUPED:
        return name == "ctc_loss"
    value = node.all_input_nodes[0].meta[FACTS].value
    return isinstance(value, TensorMeta) and value.dtype != torch.bfloat16


def _find_layer(node: fx.Node, is_whole: bool) -> str | None:
    """Why recurrent layers run as they are. Code that must be whole has their steps."""
    facts: NodeFacts = node.meta[FACTS]
    if facts.draws:
        return _NO_DROPOUT
    values = [given.meta[FACTS].value for given in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, TensorMeta)]
    if not LSTM_KEEPS_ITS_SHAPE and _name_of(node) == "lstm" and any(map(wants_grad, tensors)):
        return _MORE_DIMENSIONS
    return _ONE_KERNEL if not is_whole and tensors[0].device.type == "cuda" else None


def _find_gradient(node: fx.Node) -> str | None:
    """Whether a call has to do with gradients that tensors keep."""
    if node.target in (GETATTR, SETATTR, DELATTR) and node.args[1] == "grad":
        return _GRAD
    if sets_data(node):
        return _DATA
    return _BACKWARD if _name_of(node) == "backward" else None


def _asks_for_gradients(node: fx.Node) -> bool:
    """Whether gradients are wanted as values, of which there may be gradients."""
    if _name_of(node) == "backward":
        return bool(node.kwargs.get("create_graph") or any(node.args[3:]))
    return node.target is torch.autograd.grad


def find_pasts(given: Iterable[fx.Node]) -> Iterator[int]:
    """The positions of inputs that have a graph of autograd's from before the call."""
    return (index for index, node in enumerate(given) if node.meta.get(PAST))


def _counts_from_outside(node: fx.Node) -> bool:
    """Whether a call takes a place in memory that the call got, counted from its beginning."""
    if not _name_of(node).startswith("as_strided"):
        return False
    place = node.args[-1] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    return place is not None and OUTSIDE in node.meta[FACTS].memory


def runs_user_code(graph: fx.Graph) -> bool:
    """Whether code of the user's is in a graph that may do more than compute."""
    found = (node.meta.get(FACTS) for node in graph.nodes)
    return any(f is not None and f.python and (f.as_it_is or f.opaque) for f in found)


def _loses_gradient(node: fx.Node) -> bool:
    """Whether no_grad made a view that wants no gradient, of a leaf that is itself a view.

    Views of other leaves want theirs, and AOTAutograd takes this one for such a view.
    """
    value = node.meta[FACTS].value
    if not isinstance(value, TensorMeta) or value.requires_grad or not _is_differentiable(value):
        return False
    if node.target is GETATTR or _name_of(node) in ("detach", "detach_"):
        return False
    if find_maker(node) is not None:  # one of several results, of which others have gradients
        return False
    memory = set(node.meta[FACTS].memory)
    return any(
        wants_grad(given.meta[FACTS].value) and not memory.isdisjoint(given.meta[FACTS].memory)
        for given in node.all_input_nodes
        if FACTS in given.meta
    )


def _is_differentiable(value: TensorMeta) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _find_number(node: fx.Node) -> str | None:
    """Whether torch looks at a value inside the call, which fake tensors don't have."""
    if is_pick(node):
        return _NUMBER
    if _name_of(node) in _MAKES_TENSORS and any(map(_holds_node, _sequences(node.args))):
        return _NUMBER
    if any(map(_is_tensor, _scalars(node))):
        return _NUMBER
    return _NUMBER if any(map(_is_tensor, _bounds(node.args))) else None


# What torch takes numbers for, tensors too, and then looks at their values: position and name.
_SCALARS = {
    "full": ((1, "fill_value"),),
    "full_like": ((1, "fill_value"),),
    "new_full": ((2, "fill_value"),),
    "pad": ((3, "value"),),
    "threshold": ((1, "threshold"), (2, "value")),
}


def _scalars(node: fx.Node) -> Iterator[Any]:
    for index, name in _SCALARS.get(_name_of(node).lstrip("_"), ()):
        yield node.args[index] if len(node.args) > index else node.kwargs.get(name)
    yield from (node.kwargs.get(name) for name in ("alpha", "beta"))


def _is_tensor(argument: Any) -> bool:
    """Whether an argument stands for a tensor, and not for a number that is open."""
    return isinstance(argument, fx.Node) and argument.meta[FACTS].value is not None


def _sequences(args: Iterable[Any]) -> Iterator[Any]:
    return (arg for arg in args if isinstance(arg, (tuple, list)))


def _holds_node(items: Iterable[Any]) -> bool:
    return any(map(_is_tensor, items)) or any(map(_holds_node, _sequences(items)))


def _bounds(args: Iterable[Any]) -> Iterator[Any]:
    """The bounds of slices among the arguments."""
    for arg in args:
        if isinstance(arg, slice):
            yield from (arg.start, arg.stop, arg.step)
        elif isinstance(arg, (tuple, list)):
            yield from _bounds(arg)


def _name_of(node: fx.Node) -> str:
    return called_name(node).removesuffix("_apply")


def _spell(node: fx.Node) -> str:
    """A call as a program writes it."""
    if node.target in (GETATTR, SETATTR, DELATTR):
        return f".{node.args[1]} = ..." if node.target is SETATTR else f".{node.args[1]}"
    return _SPELLED.get(_name_of(node), _name_of(node))


_SPELLED = {"__bool__": "bool(...)", "getitem": "...[...]", "setitem": "...[...] = ..."}


def find_maker(node: fx.Node) -> fx.Node | None:
    """The call that a node is one of several results of."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    value = node.args[0].meta[FACTS].value
    is_one = value is None or isinstance(value, TensorMeta)
    return None if is_one else node.args[0]
