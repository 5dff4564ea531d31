"""Ways: a value that is only known in the middle of a call is compared there, in the graph.

Python used the value, so the trace holds for it alone. A probe computes such values before the call
(probes.py). Where that costs too much, or where the value is random or depends on what the call
writes, the graph gets a *crossing* at its place. If the value is another one, the compiled code
stops, what it did is undone, and the call goes on to an entry that went the other way, or is
traced.

Entries of one callable that begin alike tell each other: a crossing at which one of them turned
back rules out all that expect the same value there, without running them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import fx

from tripwire.reading.tensors import OUTSIDE, TensorMeta, describe, meta_of
from tripwire.rulebook.refusals import Mismatch
from tripwire.rulebook.rules import DELATTR, GETATTR, SETATTR, Target
from tripwire.tracing.branches import COMPARED, Branch
from tripwire.tracing.result import Input, Trace, is_random, name_of
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.validity.past import find_wanting, is_profilers, origin_of
from tripwire.validity.probes import describe_value, same_value
from tripwire.values.classes import isinstance

LARGEST_TURN = 1 << 22  # bytes that are copied before each run, at most;
COST_OF_A_COPY = 1 << 14  # each copy counts for some, and takes about 3 µs

_PATIENT = 8  # so often in a row a way is tried in vain,
_SELDOM = 16  # and then once in so many calls


class OtherWay(Exception):
    """A value on the way isn't what it was when the entry was traced."""

    def __init__(self, ways: Ways, index: int, value: object) -> None:
        self.ways = ways
        self.index = index
        self.value = value
        super().__init__(str(self.mismatch))

    @property
    def mismatch(self) -> Mismatch:
        """The value that differs, as data."""
        branch = self.ways.branches[self.index]
        source = f"{branch.op} at {branch.where.short}"
        return Mismatch(source, describe_value(branch.value), describe_value(self.value))


class Crossing:
    """A call in the graph: it compares a value with the traced one."""

    def __init__(self, ways: Ways, index: int) -> None:
        self._ways = ways
        self._index = index
        self._branch = ways.branches[index]
        self._is_last = index == len(ways.branches) - 1

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            value = self._branch.take(*args, **kwargs)
        if not same_value(self._branch.value, value):
            self._ways.turns += 1
            raise OtherWay(self._ways, self._index, value)
        if self._is_last:
            self._ways.turns = 0


class Ways(Struct, eq=False):
    """The values that decide in the middle of an entry's calls."""

    branches: tuple[Branch, ...]  # in the order of their crossings
    done: Done
    turns: int = 0  # how often in a row a run turned back

    def is_ruled_out(self, turned: OtherWay | None) -> bool:
        """Whether a run would turn back; `turned`: where another entry's run did in this call."""
        if turned is None:
            if self.turns < _PATIENT:
                return False
            self.turns += 1
            return self.turns % _SELDOM != 0
        index, theirs = turned.index, turned.ways.branches
        if len(self.branches) <= index or not all(
            map(_is_same, self.branches[:index], theirs[:index])
        ):
            return False
        mine = self.branches[index]
        return _place_of(mine) == _place_of(theirs[index]) and not same_value(
            mine.value, turned.value
        )


def _place_of(branch: Branch) -> tuple[str, str]:
    return branch.op, branch.where.short


def _is_same(left: Branch, right: Branch) -> bool:
    return _place_of(left) == _place_of(right) and same_value(left.value, right.value)


class Done(Struct, frozen=True):
    """What calls before the last crossing do that must be undone. Positions among the inputs."""

    written: tuple[int, ...]
    draws: bool
    # Whose `.grad` is set; and whether none is there, or the old one is let go unchanged.
    leaves: tuple[tuple[int, bool], ...]

    def __bool__(self) -> bool:
        return bool(self.written or self.draws or self.leaves)


Places = Sequence[tuple[int, Branch]]  # the places of crossings in the order of a graph's calls


def find_done(trace: Trace, places: Places) -> Done | str:
    """What calls before the last crossing do; or why that can't be undone."""
    before = list(trace.graph.nodes)[: places[-1][0]]
    hindrance = next(filter(None, map(_find_hindrance, before)), None)
    if hindrance is not None:
        return hindrance
    placeholders = trace.graph.find_nodes(op="placeholder")
    inputs = list(zip(placeholders[len(trace.numbers) :], trace.inputs, strict=True))
    draws = any(map(is_random, before))
    if draws and not all(map(_is_on_cpu, before)):
        return "it draws random numbers on another device than the CPU"
    written = _find_written(before)
    if not written.issubset(placeholders):
        return "it changes a tensor that isn't an input of its graph"
    wanting = find_wanting(trace, before)
    if isinstance(wanting, str):
        return wanting
    touched = wanting | _find_touched(before)
    if any(OUTSIDE in node.meta[FACTS].memory for node in touched.difference(placeholders)):
        return "it changes the gradient of a tensor that isn't an input of its graph"
    leaves = {node: wanted for node, wanted in inputs if node in touched}
    remade = _find_remade(trace, inputs, written)
    if remade is not None:
        return remade
    let_go = {*_find_cleared(before), *_find_without_gradient(trace)}
    copied = [wanted for node, wanted in inputs if node in written]
    copied += [wanted for node, wanted in leaves.items() if node not in let_go]
    if sum(COST_OF_A_COPY + bytes_of(wanted.meta) for wanted in copied) > LARGEST_TURN:
        return "it changes large tensors in place"
    nodes = [node for node, _ in inputs]
    return Done(
        tuple(i for i, node in enumerate(nodes) if node in written),
        draws,
        tuple((i, node in let_go) for i, node in enumerate(nodes) if node in leaves),
    )


_Inputs = Sequence[tuple[fx.Node, Input]]


def _find_remade(trace: Trace, inputs: _Inputs, written: set[fx.Node]) -> str | None:
    """Why an input that is written can't be made as it was."""
    assert trace.completion is not None
    for (node, wanted), tensor in zip(inputs, trace.completion.tensors, strict=True):
        if node in written:
            if tensor is None or not tensor.is_leaf or meta_of(tensor) != wanted.meta:
                return f"it gives {wanted.source} another form, or a gradient"
            if wanted.meta.device.type != "cpu":
                return f"it changes {wanted.source} in place, which isn't on the CPU"
    return None


def _is_on_cpu(node: fx.Node) -> bool:
    value = node.meta[FACTS].value
    found = (value,) if isinstance(value, TensorMeta) else value or ()
    return all(one is None or one.device.type == "cpu" for one in found)


def _find_without_gradient(trace: Trace) -> set[fx.Node]:
    """The inputs that had no `.grad` when it was first asked for: later, the run may let it go."""
    first: dict[fx.Node, object] = {}
    for branch in trace.branches:
        if branch.op == "grad":
            first = dict.fromkeys(branch.inputs, branch.value) | first
    return {node for node, value in first.items() if value == str(describe(None))}


def _find_hindrance(node: fx.Node) -> str | None:
    facts: NodeFacts = node.meta[FACTS]
    if facts.region is not None:
        return "it is inside a checkpoint"
    if facts.python is not None:
        return f"`{name_of(node)}` is a custom function, whose effects can't be undone"
    if facts.opaque and not (name_of(node) == "backward" or is_profilers(node)):
        return f"`{name_of(node)}` runs code of which tripwire knows nothing"
    if node.target in (SETATTR, DELATTR) and node.args[1] != "grad":
        return f"it sets the attribute {node.args[1]!r} of a tensor"
    return None


def _sets_gradients(node: fx.Node) -> bool:
    return name_of(node) == "backward" or node.target in (SETATTR, DELATTR)


def _find_touched(before: Sequence[fx.Node]) -> set[fx.Node]:
    """The tensors whose `.grad` is set, or may be changed in place."""
    grads = [node for node in before if node.target in (GETATTR, SETATTR, DELATTR)]
    grads = [node for node in grads if node.args[1] == "grad"]
    is_written = any(
        OUTSIDE in node.meta[FACTS].written for node in before if not _sets_gradients(node)
    )
    changed = [node for node in grads if is_written or node.target is not GETATTR]
    return {origin_of(node.args[0]) for node in changed}


def _find_written(before: Sequence[fx.Node]) -> set[fx.Node]:
    """The inputs that calls change in place, and some that they only read."""
    behind: dict[fx.Node, set[fx.Node]] = {}  # the inputs that a node is, or is a view of
    written: set[fx.Node] = set()
    for node in before:
        if node.op in ("placeholder", "get_attr"):
            behind[node] = {node}
            continue
        if _sets_gradients(node) or (node.target is GETATTR and node.args[1] == "grad"):
            continue  # the memory of gradients is kept with them
        facts: NodeFacts = node.meta[FACTS]
        found = set().union(*(behind.get(given, ()) for given in node.all_input_nodes))
        if OUTSIDE in facts.memory:
            behind[node] = found
        if OUTSIDE in facts.written:
            written |= found
    return written


def _find_cleared(before: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The inputs whose `.grad` is first of all set to None."""
    met: set[fx.Node] = set()
    for node in before:
        if name_of(node) == "backward":
            return
        if node.target is SETATTR and node.args[2] is None and node.args[0] not in met:
            yield node.args[0]  # type: ignore[misc]  # the tensor
        if node.target is GETATTR and node.args[1] == "grad" and node.users:
            met.update(node.all_input_nodes)


def bytes_of(meta: TensorMeta) -> int:
    """What a tensor's elements take."""
    return math.prod(meta.shape) * meta.dtype.itemsize


def lay_crossings(trace: Trace, places: Places, done: Done) -> Ways:
    """Put a crossing into a graph for each value."""
    nodes = list(trace.graph.nodes)
    ways = Ways(tuple(branch for _, branch in places), done)
    for index, (place, branch) in enumerate(places):
        with trace.graph.inserting_before(nodes[place]):
            target = Target(Crossing(ways, index), branch.op)
            node = trace.graph.call_function(target, branch.args, branch.kwargs)
        node.meta[FACTS] = NodeFacts(branch.where, branch.scope, None, memory=(), as_it_is=COMPARED)
    return ways
