"""Probes: a tensor's value that Python used is computed again before an entry is chosen.

The part of the graph that leads from the call's inputs to the value is cut out. It runs before each
call, and the value is compared. This part must be small, and must compute the same when it runs
first: nothing random. In-place calls may be part of it. If they change an input, they change a
copy of it here: an optimizer counts a step, and then goes by the count. Entries of a callable share
equal probes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from tripwire.reading.names import fingerprint
from tripwire.reading.tensors import OUTSIDE, TensorMeta, storage_of
from tripwire.rulebook.refusals import Mismatch, Refused
from tripwire.rulebook.rules import GETATTR, SETATTR, Target, words
from tripwire.tracing.branches import HOOKS, Branch
from tripwire.tracing.casts import TAKING
from tripwire.tracing.result import Trace, build_module, is_random, name_of
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.values.classes import isinstance
from tripwire.values.identity import same_plain

LARGEST_PROBE = 128  # calls
LARGEST_SIZE = 16  # calls for one size, where other values settle it
LARGEST_COPY = 65_536  # numbers in all inputs that are copied
LARGEST_COST = 1_000_000  # multiplications in matrix products: some 50 µs
_HEAVY = words(
    "linear bilinear matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm addbmm mv addmv "
    "einsum tensordot conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d scaled_dot_product_attention multi_head_attention_forward lstm gru "
    "rnn_tanh rnn_relu"
)

_CONTEXTS = frozenset({"_enter_autocast", "_enter_inference_mode"})


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Computes the values that Python took, from the inputs of a call."""

    key: str  # equal for probes that compute the same; a text knows its hash
    indices: tuple[int, ...]  # the inputs that it needs
    module: fx.GraphModule
    expected: tuple[object, ...]
    branches: tuple[Branch, ...]
    is_opaque: bool  # code of somebody's runs inside, which may draw random numbers
    compute: Callable[..., tuple[object, ...]]  # not the module: fx would print what goes wrong
    is_of_ints: bool  # which come first among what guards fetch: no other inputs are needed
    n_ints: int  # so many of those decide; 0 where floats are among them
    agreed: set[tuple[Any, ...]]  # ints with which it was as expected

    def values(self, inputs: Sequence[torch.Tensor]) -> tuple[object, ...] | None:
        """The values on this call; None where they can't be computed."""
        if not self.is_opaque:
            return self._compute(inputs)
        before = _sample_generators()
        values = self._compute(inputs)
        if all(map(torch.equal, before, _sample_generators())):
            return values
        torch.set_rng_state(before[0])
        if len(before) > 1:
            torch.cuda.set_rng_state_all(before[1:])
        return None

    def _compute(self, inputs: Sequence[torch.Tensor]) -> tuple[object, ...] | None:
        try:
            return self.compute(*[inputs[i] for i in self.indices])
        except Exception:  # another way through the program: shapes needn't fit
            return None

    def agrees(self, values: tuple[object, ...] | None) -> bool:
        """Whether these are the values that the entry was traced with."""
        return values is not None and all(map(same_value, self.expected, values))

    def note_agreed(self, fetched: tuple[Any, ...]) -> None:
        """Know these ints again."""
        if self.n_ints and len(self.agreed) < _REMEMBERED:
            self.agreed.add(fetched[: self.n_ints])

    def find_failure(self, values: tuple[object, ...] | None) -> str | None:
        """The first value that differs."""
        change = self.find_mismatch(values)
        if change is None:
            return None
        return f"{change.source}: expected {change.old}, found {change.new}"

    def find_mismatch(self, values: tuple[object, ...] | None) -> Mismatch | None:
        """The same as data. A call that goes another way may have no value there."""
        if values is None:
            source = f"{self.branches[0].op} at {self.branches[0].where.short}"
            return Mismatch(
                source, describe_value(self.expected[0]), "nothing that can be computed"
            )
        for branch, want, got in zip(self.branches, self.expected, values, strict=True):
            if not same_value(want, got):
                source = f"{branch.op} at {branch.where.short}"
                return Mismatch(source, describe_value(want), describe_value(got))
        return None


def _sample_generators() -> list[torch.Tensor]:
    """The states of torch's own generators: the CPU's, and those of GPUs that are in use."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_gpus = torch.cuda.get_rng_state_all() if used else []
    return [torch.get_rng_state(), *on_gpus]


def describe_value(value: object) -> str:
    """A value that was taken out of a tensor, in short."""
    text = str(fingerprint(value)) if isinstance(value, torch.Tensor) else repr(value)
    return " ".join(text.split())[:60]


def same_value(left: Any, right: Any) -> bool:
    """Whether two values taken out of tensors are one to Python."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_value, left, right))
    if hasattr(left, "tobytes"):  # NumPy
        return bool(
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    return same_plain(left, right)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which values of a trace are computed before a call, and which are compared on its way."""

    past: _Past
    branches: list[Branch]
    needed: set[fx.Node]
    crossed: tuple[Branch, ...]

    def list_places(self) -> list[tuple[int, Branch]]:
        """The values that are compared on the way, in order, with their places in it."""
        return sorted(
            ((self.past.end_of(branch), branch) for branch in self.crossed),
            key=lambda placed: placed[0],
        )


def choose(trace: Trace, *, crosses: bool, hindrance: str = "") -> Choice:
    """Divide the values that decide. Raises Refused, unless values may be compared on the way.

    hindrance: why they may not.
    """
    past = _Past(trace.graph, trace.branches, _find_storages(trace))
    try:
        return _Chooser(past, crosses).choose(trace.branches)
    except Refused as refused:
        if not hindrance:
            raise
        reason = f"{refused.reason} The call can't turn back there either: {hindrance}."
        raise Refused(refused.slug, reason, refused.where) from None


def build_probe(trace: Trace, choice: Choice) -> Probe | None:
    """The probe of a trace's values; None if none is to be computed."""
    past, branches, needed = choice.past, choice.branches, choice.needed
    if not branches:
        return None
    placeholders = [node for node in trace.graph.nodes if node.op == "placeholder"]
    indices = tuple(i for i, node in enumerate(placeholders) if node in needed)
    module = build_module(_root_of(trace), past.build_graph(needed, branches), "Probe")
    names = [*(n.expression for n in trace.numbers), *(str(i.source) for i in trace.inputs)]
    sources = tuple(names[i] for i in indices)
    targets = [_target_of(node, module) for node in module.graph.nodes]
    key = repr((module.code, sources, *targets))
    expected = tuple(branch.value for branch in branches)
    opaque = any(node.meta[FACTS].opaque for node in needed)
    compute: Callable[..., Any] = torch.no_grad()(module.forward)
    of_ints = not opaque and _is_of_ints(trace, indices, module)
    if of_ints:
        compute = functools.lru_cache(_REMEMBERED)(compute)
    n_ints = (
        max(indices, default=-1) + 1
        if of_ints and not any(n.is_float for n in trace.numbers)
        else 0
    )
    return Probe(
        key, indices, module, expected, tuple(branches), opaque, compute, of_ints, n_ints, set()
    )


_REMEMBERED = 256  # sizes of which a probe knows the answers


def _is_of_ints(trace: Trace, indices: tuple[int, ...], module: fx.GraphModule) -> bool:
    """Whether nothing but open ints decides on what a probe finds."""
    ints = {i for i, number in enumerate(trace.numbers) if not number.is_float}
    if not ints.issuperset(indices) or any(map(is_random, module.graph.nodes)):
        return False
    return not any(node.op == "get_attr" for node in module.graph.nodes)


def _target_of(node: fx.Node, module: fx.GraphModule) -> object:
    """What a node calls or fetches; a graph's code tells its name only."""
    if node.op == "get_attr":
        return id(getattr(module, str(node.target)))
    return _identity_of(node.target)


def _identity_of(target: object) -> object:
    if isinstance(target, Target):
        return _identity_of(target.call)
    if isinstance(target, functools.partial):
        return (_identity_of(target.func), *map(_identity_of, target.args))
    return target if isinstance(target, str) else id(target)


class _Chooser:
    """Finds the values that are computed, and the nodes that lead to them."""

    def __init__(self, past: _Past, crosses: bool) -> None:
        self._past = past
        self._crosses = crosses  # what can't be computed before the call is compared on its way
        self._crossed: dict[Branch, None] = {}
        self._chosen: dict[Branch, None] = {}
        self._needed: set[fx.Node] = set()
        self._settled: set[Branch] = set()  # computed in place of sizes that depend on them
        self._pinned: set[fx.Node] = set()  # all of whose values are computed, or fixed

    def choose(self, branches: Sequence[Branch]) -> Choice:
        """Raises Refused where neither a value nor what settles it can be computed."""
        self._pin_shapes()
        for branch in branches:
            if not branch.instead:
                self._add_or_cross(branch, LARGEST_PROBE)
        for branch in branches:
            if branch.instead and not self._settled.issuperset(branch.instead):
                self._add_size(branch)
        chosen = sorted(self._chosen, key=self._past.end_of)
        return Choice(self._past, chosen, self._needed, tuple(self._crossed))

    def _pin_shapes(self) -> None:
        """What is made of shapes is the same on every call, where no values decide on them."""
        for node in self._past.order:  # those that decide come first
            facts: NodeFacts | None = node.meta.get(FACTS)  # the output has none
            if facts is not None and facts.of_shapes is not None:
                if all(map(self._surely_follows, facts.of_shapes)):
                    self._pinned.add(node)

    def _add_size(self, branch: Branch) -> None:
        """Ask for a size itself where that is cheap: it may be equal for many deciders."""
        if self._crosses:
            self._add_or_cross(branch, len(self._needed) + LARGEST_SIZE)
            return
        try:
            self._add(branch, len(self._needed) + LARGEST_SIZE)
        except Refused:
            for decider in branch.instead:
                self._add(decider, LARGEST_PROBE)
            self._settled.update(branch.instead)

    def _add_or_cross(self, branch: Branch, limit: int) -> None:
        try:
            self._add(branch, limit)
        except Refused:
            if not self._crosses:
                raise
            self._crossed[branch] = None
            self._pin(branch)

    def _pin(self, branch: Branch) -> None:
        """A value that is compared may say all of what its tensor holds."""
        if branch.op in _WHOLE_VALUES and len(branch.args) == 1 and not branch.kwargs:
            self._pinned.update(node for node in branch.inputs if self._past.can_pin(node))

    def _add(self, branch: Branch, limit: int) -> None:
        if branch in self._chosen or self._past.gradients.settle(branch):
            return
        if self._follows(branch):
            return
        leading = self._past.find_leading(branch)
        self._past.check_contexts(branch, leading)
        _check_leading(branch, sorted(leading, key=self._past.order.__getitem__))
        needed = self._needed | leading
        calls = sum(node.op != "placeholder" for node in needed)
        if calls > min(limit, LARGEST_PROBE):
            raise _refuse(branch, f"it depends on more than {LARGEST_PROBE} torch calls")
        self._chosen[branch] = None
        self._needed = needed
        self._pin(branch)

    def _surely_follows(self, branch: Branch) -> bool:
        try:
            return self._follows(branch)
        except Refused:
            if self._crosses:
                return False
            raise

    def _follows(self, branch: Branch) -> bool:
        """Whether a value is the same on every call, as long as the pinned ones are."""
        rest = self._past.find_leading(branch, self._pinned) - self._pinned
        return _is_constant(rest) and not (
            self._pinned and (branch.op == "grad" or any(n.target is GETATTR for n in rest))
        )


# Calls that hand out all that a tensor holds.
_WHOLE_VALUES = words("tolist item")


class _Past:
    """What came before what in a graph, and which calls changed which memory."""

    def __init__(
        self, graph: fx.Graph, branches: Sequence[Branch], storages: Mapping[fx.Node, int]
    ) -> None:
        self._own_inputs = storages
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
        self.gradients = _Gradients(self.order, branches, self._place_of)

    def find_leading(self, branch: Branch, pinned: Collection[fx.Node] = ()) -> set[fx.Node]:
        """The nodes that lead to a value, in-place calls on the way included. Raises Refused.

        What leads to the pinned ones is left out.
        """
        found: set[fx.Node] = set()
        given = _nodes_in(branch)
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
        """Refuse calls inside autocast or inference mode that the run itself enters."""
        for enter in self._contexts:
            left = [self.order[user] for user in enter.users]
            inside = range(self.order[enter], min(left, default=len(self.order)))
            if any(self.order[node] in inside for node in leading):
                raise _refuse(branch, "autocast or inference mode is entered before it")

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
        places = [self.order[node] + 1 for node in _nodes_in(branch)]
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
    """Of the graph's inputs: guards make sure that they share memory as in the run."""
    completion = trace.completion
    if completion is None or completion.effects.carried:  # what takes their places may share it
        return {}
    nodes = trace.graph.find_nodes(op="placeholder")[len(trace.numbers) :]
    pairs = zip(nodes, completion.tensors, strict=True)
    return {node: _UNKNOWN if t is None else storage_of(t) for node, t in pairs}


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
    fx.node.map_arg(node.args[0], found.append)
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


def _nodes_in(branch: Branch) -> list[fx.Node]:
    """What a value was taken from, constants included."""
    found: dict[fx.Node, None] = {}
    fx.node.map_arg((branch.args, branch.kwargs), lambda node: found.setdefault(node))
    return list(found)


def _is_constant(leading: set[fx.Node]) -> bool:
    """Whether no input leads to a value, and nothing random does: it is the same every time."""
    return all(
        node.op in ("call_function", "call_method") and not is_random(node) for node in leading
    )


def _root_of(trace: Trace) -> nn.Module:
    root = nn.Module()
    for constant in trace.constants:
        setattr(root, constant.name, constant.value)
    return root


def _check_leading(branch: Branch, leading: list[fx.Node]) -> None:
    heavy = [node for node in leading if name_of(node) in _HEAVY]
    if sum(map(_cost_of, heavy)) > LARGEST_COST:
        name = name_of(heavy[0])
        raise _refuse(branch, f"it depends on `{name}`, which costs too much to run twice")
    for node in leading:
        name = name_of(node)
        if is_random(node):
            raise _refuse(branch, f"it depends on `{name}`, which is random")
        facts: NodeFacts = node.meta[FACTS]
        if facts.python is not None and facts.opaque:
            raise _refuse(branch, f"it depends on `{name}`, a custom autograd function")


def _cost_of(node: fx.Node) -> int:
    """Multiplications, roughly: outputs times the length of a row."""
    shapes = [
        facts.value.shape
        for one in (node, *node.all_input_nodes)
        if isinstance((facts := one.meta["tripwire"]).value, TensorMeta)
    ]
    if len(shapes) < 2 or not all(shapes):
        return LARGEST_COST + 1
    return math.prod(shapes[0]) * max(shape[-1] for shape in shapes[1:])


def _refuse_written(branch: Branch, writer: fx.Node) -> Refused:
    what = "a tensor that the call didn't make itself"
    return _refuse(branch, f"`{writer.name}` changes {what} in place before it")


def _refuse(branch: Branch, why: str) -> Refused:
    return Refused(
        "tensor-branch",
        f"Python uses a tensor's value here ({branch}), and tripwire can't compute that value "
        f"before the call: {why}. Use torch.where or another tensor operation.",
        branch.where,
    )
