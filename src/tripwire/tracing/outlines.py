"""Outlines: a stretch of a graph that means something only as a whole becomes one call.

A level of torch.func's must be left as it was found, also if a call inside raises, and what is
wrapped for it must not be seen outside. So everything from the opening of a level to the last use
of a wrapped tensor is one call: nobody may cut it, compute a part of it beforehand or leave some of
it out. What it hands to the rest of the graph are its results, as of any other call.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from msgspec.structs import force_setattr
from torch import fx

from tripwire.ranges import NOWHERE, TOP
from tripwire.reading.tensors import OUTSIDE, TensorMeta
from tripwire.rulebook.refusals import Refused
from tripwire.tracing.branches import WRAPPED, Branch
from tripwire.tracing.fxnodes import LEAF
from tripwire.tracing.graphs import Level, Outline
from tripwire.tracing.levels import CLOSING, OPENING
from tripwire.tracing.open.opening import NUMBER
from tripwire.tracing.state import FACTS, NodeFacts, TracingState
from tripwire.values.classes import isinstance

_LEAKED = (
    "a tensor that a transform of torch.func wrapped is returned, stored or used after the "
    "transform, and it means nothing there. Return it from the function that is transformed."
)
_MIXED = (
    "between a transform of torch.func and the last use of what it wrapped, a checkpoint begins or "
    "ends, or a number is taken out of a tensor. Do it before or after the transform."
)
_UNCLOSED = "a level of forward-mode AD is entered here and not left. Leave it in the same call."


def outline_levels(state: TracingState, grad_mode: bool) -> None:
    """Make one call of everything that a transform did. grad_mode: when the run began."""
    graph = state.graph()
    nodes = list(graph.nodes)
    writers = [node for node in nodes if _facts_of(node).written]
    asked = {given for branch in _iter_branches(state) for given in branch.inputs}
    calls: dict[fx.Node, fx.Node] = {}
    for stretch in list(_Search(nodes, grad_mode).find_stretches()):
        calls |= dict.fromkeys(stretch, _outline(graph, stretch, asked))
    _count_writers_again(state, [calls.get(node, node) for node in writers])


_NO_FACTS = NodeFacts(NOWHERE, TOP, None, memory=())


def _facts_of(node: fx.Node) -> NodeFacts:
    found: NodeFacts = node.meta.get(FACTS, _NO_FACTS)
    return found


def _does(node: fx.Node, calls: Collection[Any]) -> bool:
    return isinstance(node.target, Level) and node.target.call in calls


# --- what belongs together ---


class _Search:
    """Finds the stretches of a graph."""

    def __init__(self, nodes: list[fx.Node], grad_mode: bool) -> None:
        self._nodes = nodes
        self._place = {node: index for index, node in enumerate(nodes)}
        self._grad_mode = grad_mode

    def find_stretches(self) -> Iterator[list[fx.Node]]:
        """The nodes of each, in order."""
        end = -1
        for index, node in enumerate(self._nodes):
            if index > end:
                self._note_grad_mode(node)
                if _does(node, OPENING):
                    end = self._find_end(index)
                    yield self._nodes[index : end + 1]

    def _note_grad_mode(self, node: fx.Node) -> None:
        if node.target is torch._C._set_grad_enabled:
            self._grad_mode = bool(node.args[0])

    def _find_end(self, begin: int) -> int:
        """Where all levels and contexts are left, and no wrapped tensor is used any more."""
        before, depth, index, last = self._grad_mode, 0, begin, begin
        while True:
            node = self._nodes[index]
            if node.op == "output":
                reason = _UNCLOSED if depth else _LEAKED
                raise Refused("function-transform", reason, _facts_of(self._nodes[begin]).where)
            depth += _does(node, OPENING) - _does(node, CLOSING)
            self._note_grad_mode(node)
            if not _stands_alone(node):
                last = max(last, *map(self._place.__getitem__, node.users), index)
            if index >= last and not depth:
                if self._grad_mode is before or not self._changes_later(index):
                    return index
            index += 1

    def _changes_later(self, index: int) -> bool:
        later = self._nodes[index + 1 :]
        return any(node.target is torch._C._set_grad_enabled for node in later)


def _stands_alone(node: fx.Node) -> bool:
    """Whether the rest of a graph may have a result: it is one tensor, and not wrapped."""
    is_one = isinstance(_facts_of(node).value, TensorMeta) or NUMBER in node.meta
    return is_one and WRAPPED not in node.meta


# --- one call ---


def _outline(graph: fx.Graph, stretch: list[fx.Node], asked: Collection[fx.Node]) -> fx.Node:
    begin, inside = stretch[0], set(stretch)
    for node in stretch:
        # Constants and open numbers stay outside, where others may use them.
        is_outer = node.op == "get_attr" or NUMBER in node.meta
        if node.op == "placeholder" or (is_outer and inside.isdisjoint(node.all_input_nodes)):
            inside.remove(node)
            begin.prepend(node)
    stretch = [node for node in stretch if node in inside]
    given = list(dict.fromkeys(g for n in stretch for g in n.all_input_nodes if g not in inside))
    results = [n for n in stretch if n in asked or not inside.issuperset(n.users)]
    inner = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in given:
        copies[node] = inner.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in stretch:
        copies[node] = inner.node_copy(node, copies.__getitem__)
    inner.output(tuple(copies[node] for node in results))
    kind = str(begin.target).strip("_").partition("_")[0]  # vmap, grad, jvp
    with graph.inserting_before(begin):
        call = graph.call_function(Outline(inner, f"{kind}_transform"), tuple(given))
    call.meta[FACTS] = _describe(stretch, given, results)
    for index, node in enumerate(results):
        _become_part(graph, node, call, index)
    for node in reversed(stretch):
        if node not in results:
            graph.erase_node(node)
    return call


def _describe(stretch: list[fx.Node], given: list[fx.Node], results: list[fx.Node]) -> NodeFacts:
    """What is known of the call: all that is known of what is inside."""
    facts = [_facts_of(node) for node in stretch]
    values = [_facts_of(node).value for node in results]
    tensors = tuple(value for value in values if isinstance(value, TensorMeta))
    if len({one.region for one in facts}) > 1 or len(tensors) < len(values):
        raise Refused("function-transform", _MIXED, facts[0].where)
    met = {memory for node in given for memory in _facts_of(node).memory} | {OUTSIDE}
    written = dict.fromkeys(m for one in facts for m in one.written if m in met)
    memory = dict.fromkeys(m for node in results for m in _facts_of(node).memory)
    return facts[0]._replace(
        value=tensors or None,
        memory=tuple(memory),
        written=tuple(written),
        python=next((one.python for one in facts if one.python is not None), None),
        opaque=any(one.opaque for one in facts),
        sized_by_values=any(one.sized_by_values for one in facts),
        makes_size=any(one.makes_size for one in facts),
        as_it_is=next((one.as_it_is for one in facts if one.as_it_is not in (None, LEAF)), None),
    )


def _become_part(graph: fx.Graph, node: fx.Node, call: fx.Node, index: int) -> None:
    """From now on a node stands for one of the results of a call."""
    graph._find_nodes_lookup_table.remove(node)
    node.op, node.target, node.args, node.kwargs = (
        "call_function",
        operator.getitem,
        (call, index),
        {},
    )
    graph._find_nodes_lookup_table.insert(node)
    node.meta[FACTS] = _facts_of(node)._replace(
        python=None, written=(), opaque=False, of_shapes=None, makes_size=False, as_it_is=None
    )


# --- branches count the calls before them that changed something ---


def _iter_branches(state: TracingState) -> Iterator[Branch]:
    open_ = [*state.branches]
    seen = set()
    while open_:
        branch = open_.pop()
        if id(branch) not in seen:
            seen.add(id(branch))
            yield branch
            open_ += branch.instead


def _count_writers_again(state: TracingState, before: list[fx.Node]) -> None:
    """before: the calls that changed something, each with the outline that stands for it now."""
    nodes = list(state.graph().nodes)
    place = {node: index for index, node in enumerate(nodes)}
    now = [index for index, node in enumerate(nodes) if _facts_of(node).written]
    for branch in _iter_branches(state):
        if branch.writes:
            count = bisect.bisect_right(now, place[before[branch.writes - 1]])
            force_setattr(branch, "writes", count)
