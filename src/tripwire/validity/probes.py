"""Probes: a tensor's value that Python used is computed again before an entry is chosen.

The part of the graph that leads from the call's inputs to the value is cut out. It runs before each
call, and the value is compared. This part must be small, and must compute the same when it runs
first: nothing random. In-place calls may be part of it. If they change an input, they change a
copy of it here: an optimizer counts a step, and then goes by the count. Entries of a callable share
equal probes.

A number that decides on sizes is computed in the same way (`Sounder`). It isn't compared: the graph
gets it, as it gets numbers that are passed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import fx, nn

from tripwire.errors import raise_interruption
from tripwire.reading.names import fingerprint
from tripwire.reading.tensors import TensorMeta
from tripwire.rulebook.refusals import Mismatch, Refused
from tripwire.rulebook.rules import GETATTR, Target, words
from tripwire.tracing.branches import Branch
from tripwire.tracing.graphs import build_module
from tripwire.tracing.open.opening import spell_taken
from tripwire.tracing.open.soundings import LARGEST_SOUNDING, Sounding, find_draws
from tripwire.tracing.result import Trace, is_random, name_of, runs_python
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.validity.past import Past, refuse
from tripwire.values.classes import isinstance
from tripwire.values.identity import same_plain

LARGEST_PROBE = 128  # calls
LARGEST_SIZE = 16  # calls for one size, where other values settle it
LARGEST_COST = 1_000_000  # multiplications in matrix products: some 50 µs
# Where the graph may not be cut, and nothing is left but to refuse: some milliseconds.
LARGEST_WHOLE, LARGEST_WHOLE_COST = 2048, 50_000_000
_HEAVY = words(
    "linear bilinear matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm addbmm mv addmv "
    "einsum tensordot conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d scaled_dot_product_attention multi_head_attention_forward lstm gru "
    "rnn_tanh rnn_relu"
)


class Probe(Struct, frozen=True, eq=False):
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
        except Exception as error:  # another way through the program: shapes needn't fit
            raise_interruption(error)
            return None

    def agrees(self, values: tuple[object, ...] | None) -> bool:
        """Whether these are the values that the entry was traced with."""
        return values is not None and all(map(same_value, self.expected, values))

    def note_agreed(self, fetched: tuple[Any, ...]) -> None:
        """Know these ints again."""
        if self.n_ints and len(self.agreed) < _REMEMBERED:
            self.agreed.add(fetched[: self.n_ints])

    def find_mismatch(self, values: tuple[object, ...] | None) -> Mismatch | None:
        """The first value that differs. A call that goes another way may have no value there."""
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


class Choice(Struct, frozen=True):
    """Which values of a trace are computed before a call, and which are compared on its way."""

    past: Past
    branches: list[Branch]
    needed: set[fx.Node]
    crossed: tuple[Branch, ...]

    def list_places(self) -> list[tuple[int, Branch]]:
        """The values that are compared on the way, in order, with their places in it."""
        return sorted(
            ((self.past.end_of(branch), branch) for branch in self.crossed),
            key=lambda placed: placed[0],
        )


def choose(trace: Trace, *, crosses: bool, whole: bool = False, hindrance: str = "") -> Choice:
    """Divide the values that decide. Raises Refused, unless values may be compared on the way.

    whole: they may not, whatever they cost. hindrance: why they may not.
    """
    past = Past(trace)
    limits = (LARGEST_WHOLE, LARGEST_WHOLE_COST) if whole else (LARGEST_PROBE, LARGEST_COST)
    try:
        return _Chooser(past, crosses, *limits).choose(trace.branches)
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

    def __init__(self, past: Past, crosses: bool, calls: int, cost: int) -> None:
        self._past = past
        self._calls, self._cost = calls, cost  # so much may be computed
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
                self._add_or_cross(branch, self._calls)
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
                self._add(decider, self._calls)
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
        _check_leading(branch, sorted(leading, key=self._past.order.__getitem__), self._cost)
        needed = self._needed | leading
        calls = sum(node.op != "placeholder" for node in needed)
        if calls > min(limit, self._calls):
            raise refuse(branch, f"it depends on more than {self._calls} torch calls")
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


def _is_constant(leading: set[fx.Node]) -> bool:
    """Whether no input leads to a value, nothing random does, and no code that may read state."""
    return all(
        node.op in ("call_function", "call_method")
        and not (is_random(node) or node.meta[FACTS].opaque or runs_python(node))
        for node in leading
    )


def _root_of(trace: Trace) -> nn.Module:
    """A module that holds a trace's constants."""
    root = nn.Module()
    for constant in trace.constants:
        setattr(root, constant.name, constant.value)
    return root


def _check_leading(
    branch: Branch,
    leading: list[fx.Node],
    cost: int = LARGEST_COST,
    draws: Sequence[fx.Node] = (),
) -> None:
    """Refuse calls that can't be made before a call, or that cost too much.

    draws: those that are drawn ahead.
    """
    heavy = [node for node in leading if name_of(node) in _HEAVY]
    if sum(map(_cost_of, heavy)) > cost:
        name = name_of(heavy[0])
        raise refuse(branch, f"it depends on `{name}`, which costs too much to run twice")
    for node in leading:
        name = name_of(node)
        if is_random(node) and node not in draws:
            raise refuse(branch, f"it depends on `{name}`, which is random")
        facts: NodeFacts = node.meta[FACTS]
        if facts.python is not None and facts.opaque:
            raise refuse(branch, f"it depends on `{name}`, a custom autograd function")
        if node.target is torch.autograd.grad:  # no graph is kept before a call
            raise refuse(branch, "it depends on a gradient")


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


# --- numbers that decide on sizes: the guard function computes them, for the graph to get ---


class Sounder(Struct, frozen=True):
    """Computes numbers, from the graph's inputs at these places."""

    labels: tuple[str, ...]  # what the guard function calls them
    paths: tuple[str, ...]  # what users do
    indices: tuple[int, ...]
    compute: Callable[..., tuple[int | float, ...]]


def build_sounders(trace: Trace) -> list[Sounder]:
    """What computes a trace's numbers, in order: some need others. Raises Refused."""
    shadow = trace.shadow
    if shadow is None or not shadow.soundings.made:
        return []
    past = Past(trace)
    placeholders = trace.graph.find_nodes(op="placeholder")
    expressions = dict(zip(placeholders, (n.expression for n in trace.numbers), strict=False))
    levels: dict[str, int] = {}
    stages: dict[int, list[Sounding]] = {}
    leading: dict[str, set[fx.Node]] = {}
    for one in shadow.soundings.made:
        nodes = leading[one.label] = _find_leading(past, one)
        texts = " ".join(expressions[node] for node in nodes if node in expressions)
        needed = [levels[label] for label in re.findall(r"\w+", texts) if label in levels]
        levels[one.label] = max(needed, default=0) + 1
        stages.setdefault(levels[one.label], []).append(one)
    return [_build(trace, past, placeholders, stages[level], leading) for level in sorted(stages)]


def _find_leading(past: Past, one: Sounding) -> set[fx.Node]:
    """The nodes that lead to a number."""
    nodes = past.find_leading(one.branch)
    draws = _find_draws(past, one.branch, nodes)
    for draw in draws:
        nodes |= past.find_leading(replace(one.branch, inputs=(draw,), args=(draw,), kwargs={}))
    past.check_contexts(one.branch, nodes)
    _check_leading(one.branch, sorted(nodes, key=past.order.__getitem__), draws=draws)
    if any(node.meta[FACTS].opaque for node in nodes):
        raise refuse(one.branch, "it depends on a custom function")
    if len(nodes) > LARGEST_SOUNDING:
        raise refuse(one.branch, f"it depends on more than {LARGEST_SOUNDING} torch calls")
    return nodes


def _find_draws(past: Past, branch: Branch, leading: set[fx.Node]) -> list[fx.Node]:
    """What is drawn ahead, in order, where a number depends on what torch draws.

    If another thread draws from the same generator meanwhile, the graph draws other numbers. So
    nothing else may depend on these.
    """
    drawn = {node for node in leading if node.op != "placeholder" and is_random(node)}
    if not drawn:
        return []
    last = max(leading, key=past.order.__getitem__)
    draws = find_draws(last, past.order)
    reached = set(drawn)
    for node in past.order:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    if draws is None or not drawn.issubset(draws) or not reached <= leading:
        raise refuse(branch, "it depends on what is drawn")
    return draws


def _copy_generator() -> torch.Generator:
    """Another one that goes on as the CPU's."""
    return torch.default_generator.clone_state()


def _draw_ahead(graph: fx.Graph) -> None:
    """Have a graph draw from a copy of the generator."""
    draws = [node for node in graph.nodes if node.op != "placeholder" and is_random(node)]
    if draws:
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            generator = graph.call_function(Target(_copy_generator, "copy_generator"))
        for node in draws:
            node.kwargs = {**node.kwargs, "generator": generator}


def _build(
    trace: Trace,
    past: Past,
    placeholders: list[fx.Node],
    stage: list[Sounding],
    leading: dict[str, set[fx.Node]],
) -> Sounder:
    needed = set().union(*(leading[one.label] for one in stage))
    branches = sorted((one.branch for one in stage), key=past.end_of)
    graph = past.build_graph(needed, branches)
    _draw_ahead(graph)
    module = build_module(_root_of(trace), graph, "Sounding")
    by_branch = {one.branch: one.label for one in stage}
    return Sounder(
        tuple(by_branch[branch] for branch in branches),
        tuple(spell_taken(branch.where.short) for branch in branches),
        tuple(i for i, node in enumerate(placeholders) if node in needed),
        _Compute(torch.no_grad()(module.forward)),
    )


class _Compute:
    """Calls a graph; what fails there isn't for this entry, or fails again where it is traced."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *inputs: Any) -> Any:
        try:
            return self._run(*inputs)
        except Exception as error:  # another way through the program: shapes needn't fit
            raise_interruption(error)
            raise LookupError from error
