"""Past: what came before what in a graph, which calls changed which memory, and what `.grad` is."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from tripwire.reading.tensors import OUTSIDE, TensorMeta, storage_of
from tripwire.rulebook.refusals import Refused
from tripwire.rulebook.rules import GETATTR, SETATTR, Target, words
from tripwire.tracing.branches import HOOKS, Branch
from tripwire.tracing.casts import TAKING
from tripwire.tracing.result import Trace, name_of
from tripwire.tracing.state import FACTS, PAST, STATE, NodeFacts
from tripwire.values.classes import isinstance

LARGEST_COPY = 65_536  # numbers in all inputs that are copied
_CONTEXTS = frozenset({"_enter_autocast", "_enter_inference_mode", "_enter_attention"})


class Past:
    """What came before what in a graph, and which calls changed which memory."""

    def __init__(self, trace: Trace) -> None:
        graph, storages = trace.graph, _find_storages(trace)
        self._own_inputs = storages
        self._calm = find_calm(trace)
        floats = {number for node, number in storages.items() if _may_be_gradient(node)}
        self._ints = frozenset(storages.values()) - floats - {_UNKNOWN}  # no gradient's memory
        self._storages: dict[fx.Node, frozenset[int]] = {}  # of inputs that a node is, or views
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self._inputs = len(graph.find_nodes(op="placeholder"))  # these come first
        self._contexts = [node for node in graph.nodes if name_of(node) in _CONTEXTS]
        self._places: list[int] = []  # of the in-place calls
        self._writers: dict[int, list[fx.Node]] = {}  # of a memory, in order
        self._setters: list[fx.Node] = []  # of `.grad`
        for node in graph.nodes:
            facts: NodeFacts | None = node.meta.get(FACTS)  # the output has none
            if node in storages:
                self._storages[node] = frozenset({storages[node]})
            elif facts is not None and OUTSIDE in (*facts.memory, *facts.written):
                is_elsewhere = node.target is GETATTR and node.args[1] not in _VIEWS
                found = self._storages_of(_find_written(node))
                self._storages[node] = frozenset({_UNKNOWN}) if is_elsewhere else found
            if facts is not None and facts.written:
                self._places.append(self.order[node])
                if node.target is SETATTR and node.args[1] == "grad":
                    self._setters.append(node)  # no memory changes
                    continue
                for memory in facts.written:
                    self._writers.setdefault(memory, []).append(node)
        self.gradients = _Gradients(self.order, trace.branches, self._place_of)

    def find_leading(self, branch: Branch, pinned: Collection[fx.Node] = ()) -> set[fx.Node]:
        """The nodes that lead to a value, in-place calls on the way included. Raises Refused.

        What leads to the pinned ones is left out.
        """
        found: set[fx.Node] = set()
        given = nodes_in(branch)
        if self.gradients.are_untouched(branch):
            return set(given)
        if branch.op == "grad":
            self._check_outside(branch, self.end_of(branch), self._setters)
        open_ = [*given, *self._changes(branch, given, self.end_of(branch))]
        while open_:
            node = open_.pop()
            if node not in found:
                found.add(node)
                if node in pinned:
                    continue
                open_.extend(node.all_input_nodes)
                open_.extend(self._changes(branch, node.all_input_nodes, self.order[node]))
                if node.target is GETATTR:
                    self._check_outside(branch, self.order[node], self._setters)
                facts: NodeFacts = node.meta[FACTS]
                if facts.opaque:
                    self._check_outside(branch, self.order[node])
        return found

    def can_pin(self, node: fx.Node) -> bool:
        """Whether a node's value, once taken, says all: none is written, and its shape shows."""
        facts: NodeFacts = node.meta[FACTS]
        shown = isinstance(facts.value, TensorMeta) and 0 not in facts.value.shape
        return shown and not any(memory in self._writers for memory in facts.memory)

    def check_contexts(self, branch: Branch, leading: set[fx.Node]) -> None:
        """Refuse calls inside autocast or its like that the run itself enters."""
        for enter in self._contexts:
            left = [self.order[user] for user in enter.users]
            inside = range(self.order[enter], min(left, default=len(self.order)))
            if any(self.order[node] in inside for node in leading):
                raise refuse(branch, "autocast, inference mode or sdpa_kernel is entered before it")

    def build_graph(self, needed: set[fx.Node], branches: list[Branch]) -> fx.Graph:
        """A graph of these nodes that returns the values, each taken at its own time."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        taken: list[fx.Node] = []

        def copy_until(end: int) -> None:
            while rest and self.order[rest[-1]] < end:
                node = rest.pop()
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if not written.isdisjoint(self._storages_of([node])) and node.op == "placeholder":
                    copies[node] = graph.call_method("clone", (copies[node],))

        writers = [node for node in needed if OUTSIDE in node.meta[FACTS].written]
        written = self._storages_of(writers)
        rest = sorted(needed, key=self.order.__getitem__, reverse=True)
        for branch in branches:
            copy_until(self.end_of(branch))
            args, kwargs = fx.node.map_arg((branch.args, branch.kwargs), copies.__getitem__)
            take = Target(branch.take, f"take_{branch.op}")
            taken.append(graph.call_function(take, args, kwargs))
        graph.output(tuple(taken))
        return graph

    def end_of(self, branch: Branch) -> int:
        """The place in the order at which a value was taken, or one that is as good."""
        places = [self.order[node] + 1 for node in nodes_in(branch)]
        written = 0 if self.gradients.are_untouched(branch) else self._place_of(branch)
        return max(self._inputs, written, *places)

    def _place_of(self, branch: Branch) -> int:
        """The place behind the last in-place call before a value was taken."""
        return self._places[branch.writes - 1] + 1 if branch.writes else 0

    def _changes(self, branch: Branch, read: Sequence[fx.Node], end: int) -> list[fx.Node]:
        """In-place calls before `end` on memory that these nodes have."""
        found: list[fx.Node] = []
        seen = self._storages_of(read)
        for memory in {memory for node in read for memory in node.meta[FACTS].memory}:
            writers = (w for w in self._writers.get(memory, ()) if self.order[w] < end)
            found += [w for w in writers if memory != OUTSIDE or self._may_change(w, seen)]
        for writer in found:
            if OUTSIDE in writer.meta[FACTS].written:
                # A value that the call itself changes differs from call to call; an answer may not.
                is_unknown = _UNKNOWN in seen or not self._changes_copies(writer)
                if branch.op in TAKING or is_unknown:
                    raise _refuse_written(branch, writer)
        return found

    def _storages_of(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        return frozenset().union(*(self._storages.get(node, frozenset()) for node in nodes))

    def _may_change(self, writer: fx.Node, seen: frozenset[int]) -> bool:
        """Whether a call that changes inputs changes one that has this memory."""
        if seen and writer in self._calm and self._ints.issuperset(seen):
            return False
        written = self._storages[writer]
        is_known = bool(written) and _UNKNOWN not in written | seen
        return not is_known or not written.isdisjoint(seen)

    def _changes_copies(self, writer: fx.Node) -> bool:
        """Whether a call can change copies of inputs instead: none of which share memory."""
        written = self._storages[writer]
        given = [node for node, storage in self._own_inputs.items() if storage in written]
        is_known = bool(written) and _UNKNOWN not in written and len(given) == len(written)
        return is_known and sum(map(_size_of, given)) <= LARGEST_COPY

    def _check_outside(self, branch: Branch, end: int, setters: Sequence[fx.Node] = ()) -> None:
        for writer in (*self._writers.get(OUTSIDE, ())[:1], *setters[:1]):
            if self.order[writer] < end:
                raise _refuse_written(branch, writer)


def _find_storages(trace: Trace) -> dict[fx.Node, int]:
    """A number for the memory of each input that is state; those that overlap have one number.

    Memory of what a call passes isn't known: arrays of NumPy's may share it, which no guard sees.
    """
    completion = trace.completion
    if completion is None or completion.effects.carried:  # what takes their places may share it
        return {}
    nodes = trace.graph.find_nodes(op="placeholder")[len(trace.numbers) :]
    found = dict.fromkeys(nodes, _UNKNOWN)
    spans = []
    for node, tensor in zip(nodes, completion.tensors, strict=True):
        if tensor is not None and node.meta.get(STATE) and storage_of(tensor) != _UNKNOWN:
            storage = tensor.untyped_storage()
            spans.append((storage.data_ptr(), storage.nbytes(), node))
    first = end = 0
    for begin, size, node in sorted(spans, key=lambda span: span[:2]):
        first = begin if begin >= end else first
        found[node], end = first, max(end, begin + size)
    return found


def find_wanting(trace: Trace, before: Sequence[fx.Node]) -> set[fx.Node] | str:
    """The inputs to which backwards among these calls give a gradient; or what else they may do.

    An input that no call uses before the last of them gets none, such as an average of weights
    that a step moves at its end.
    """
    backwards = [index for index, node in enumerate(before) if name_of(node) == "backward"]
    if not backwards:
        return set()
    nodes = trace.graph.find_nodes(op="placeholder")[len(trace.numbers) :]
    inputs = list(zip(nodes, trace.inputs, strict=True))
    if any(node.meta.get(PAST) or not wanted.traits.is_leaf for node, wanted in inputs):
        return "its backward goes on into what was computed before the call"
    used = {given for node in before[: backwards[-1]] for given in node.all_input_nodes}
    wanting = {node for node in used.intersection(nodes) if _may_get_gradient(node)}
    asked = (one for one in trace.branches if one.op == HOOKS and one.value is False)
    if not wanting <= {node for branch in asked for node in branch.inputs}:
        return "its backward may run hooks"
    return wanting


def find_calm(trace: Trace) -> frozenset[fx.Node]:
    """The backwards that change nothing but gradients: they run no Python."""
    order = list(trace.graph.nodes)
    backwards = [index for index, node in enumerate(order) if name_of(node) == "backward"]
    if not backwards or isinstance(find_wanting(trace, order[: backwards[-1] + 1]), str):
        return frozenset()
    found: list[fx.Node] = []
    for node in order[: backwards[-1] + 1]:
        if name_of(node) == "backward":
            found.append(node)
        elif FACTS in node.meta and _may_run_python(node):
            break
    return frozenset(found)


def _may_run_python(node: fx.Node) -> bool:
    facts: NodeFacts = node.meta[FACTS]
    is_own = facts.python is not None or facts.region is not None
    return is_own or (facts.opaque and not is_profilers(node))


def _may_be_gradient(node: fx.Node) -> bool:
    value = node.meta[FACTS].value
    dtype = value.dtype if isinstance(value, TensorMeta) else None
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def _size_of(node: fx.Node) -> int:
    value = node.meta[FACTS].value
    return math.prod(value.shape) if isinstance(value, TensorMeta) else LARGEST_COPY + 1


def _find_written(node: fx.Node) -> list[fx.Node]:
    """What a call may change, or give views of."""
    name = name_of(node)
    is_method = name.endswith("_") and not name.startswith("_")  # in place: it changes its owner
    if name == "set_" or not (is_method or name in _CHANGE_FIRST) or "out" in node.kwargs:
        return node.all_input_nodes
    found: list[fx.Node] = []
    first = node.args[:1] or tuple(node.kwargs.values())[:1]  # `nn.init` passes all by name
    fx.node.map_arg(first, found.append)
    return found


_CHANGE_FIRST = words(
    "__setitem__ setitem __iadd__ __isub__ __imul__ __itruediv__ iadd isub imul itruediv"
)
_UNKNOWN = -1  # as `storage_of` has it for what has none
_VIEWS = words("data T mT H mH real imag")  # attributes that are of the tensor's own memory


class _Gradients:
    """What `.grad` of an input is where Python asks: as before the call, or as the graph leaves it.

    `zero_grad()`, `loss.backward()` and `opt.step()` in one function read `.grad` all the time. Its
    value after a backward follows from the graph and from its value before the call.
    """

    def __init__(
        self,
        order: Mapping[fx.Node, int],
        branches: Sequence[Branch],
        place_of: Callable[[Branch], int],
    ) -> None:
        self._order = order
        self._place_of = place_of
        self._backwards = [order[node] for node in order if name_of(node) == "backward"]
        self._set: dict[Any, int] = {}  # where `.grad` of an input is first set
        self._foreign = len(order)  # where the first call is that may set one unseen
        for node, place in order.items():
            if node.target is SETATTR and node.args[1] == "grad":
                self._set.setdefault(origin_of(node.args[0]), place)
            elif FACTS in node.meta and node.meta[FACTS].opaque and not is_profilers(node):
                self._foreign = min(self._foreign, place)
        self._unhooked = {n for branch in branches if branch.op == HOOKS for n in branch.inputs}
        self._asked: dict[fx.Node, int] = {}  # where it is first asked for
        for branch in filter(self._is_of_input, branches):
            given, place = _find_origin(branch), place_of(branch)
            self._asked[given] = min(self._asked.get(given, place), place)

    def are_untouched(self, branch: Branch) -> bool:
        """Whether a value is what `.grad` of an input was before the call."""
        return self._is_of_input(branch) and self._find_change(branch) is None

    def settle(self, branch: Branch) -> bool:
        """Whether a value follows from the graph, and from what is asked for before."""
        change = self._find_change(branch) if self._is_of_input(branch) else None
        if change is None:
            return False
        given = _find_origin(branch)
        is_set = self._set.get(given) == change
        has_run = any(place < self._place_of(branch) for place in self._backwards)
        if has_run and _may_get_gradient(given) and given not in self._unhooked:
            return False
        return is_set or self._asked[given] <= change

    def _is_of_input(self, branch: Branch) -> bool:
        if branch.op != "grad" or _find_origin(branch).op != "placeholder":
            return False
        return self._place_of(branch) <= self._foreign

    def _find_change(self, branch: Branch) -> int | None:
        """The first place before a value was taken at which the graph may give another."""
        given = _find_origin(branch)
        uses = [self._order[user] for user in given.users if user.target not in (GETATTR, SETATTR)]
        first = (
            min(uses, default=len(self._order)) if _may_get_gradient(given) else len(self._order)
        )
        changes = [place for place in self._backwards if place > first]
        changes += [self._set[given]] if given in self._set else []
        change = min(changes, default=len(self._order))
        return change if change < self._place_of(branch) else None


def _may_get_gradient(node: fx.Node) -> bool:
    """Whether an input wants a gradient, or may have been told to."""
    value = node.meta[FACTS].value
    if not isinstance(value, TensorMeta) or value.requires_grad:
        return True
    return any(
        user.target == "requires_grad_" or (user.target is SETATTR and user.args[1] != "grad")
        for user in node.users
    )


def _find_origin(branch: Branch) -> fx.Node:
    return origin_of(branch.inputs[0])


def origin_of(node: Any) -> fx.Node:
    """The node that a tensor had before methods changed it in place."""
    while node.op == "call_method" and node.target.endswith("_") and node.target[0] != "_":
        node = node.args[0]
    found: fx.Node = node
    return found


def is_profilers(node: fx.Node) -> bool:
    """Whether a call tells torch's profiler where the program is, as optimizers do."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "profiler"


def nodes_in(branch: Branch) -> list[fx.Node]:
    """What a value was taken from, constants included."""
    found: dict[fx.Node, None] = {}
    fx.node.map_arg((branch.args, branch.kwargs), lambda node: found.setdefault(node))
    return list(found)


def _refuse_written(branch: Branch, writer: fx.Node) -> Refused:
    what = "a tensor that the call didn't make itself"
    return refuse(branch, f"`{writer.name}` changes {what} in place before it")


def refuse(branch: Branch, why: str) -> Refused:
    """Why a value can't be computed before a call."""
    return Refused(
        "tensor-branch",
        f"Python uses a tensor's value here ({branch}), and tripwire can't compute that value "
        f"before the call: {why}. Use torch.where or another tensor operation.",
        branch.where,
    )
