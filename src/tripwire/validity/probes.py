"""Probes: a tensor's value that Python used is computed again before an entry is chosen.

The part of the graph that leads from the call's inputs to the value is cut out, run on each
call, and compared. It must be small, and mean the same when it runs first: nothing random, no
tensor changed in place on the way. Equal probes are shared by the entries of a callable.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tripwire.tracing.branches import Branch
from tripwire.tracing.reads import fingerprint
from tripwire.tracing.refusals import Refused
from tripwire.tracing.result import Trace
from tripwire.tracing.rules import Call, rule_for, words
from tripwire.tracing.structure import same_plain
from tripwire.tracing.values import TensorMeta

LARGEST_PROBE = 128  # calls
LARGEST_COST = 1_000_000  # multiplications in matrix products: some 50 µs
_HEAVY = words(
    "linear bilinear matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm addbmm mv addmv "
    "einsum tensordot conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d scaled_dot_product_attention multi_head_attention_forward lstm gru "
    "rnn_tanh rnn_relu"
)
_RANDOM = words(
    "rand randn randint randperm rand_like randn_like randint_like normal normal_ "
    "uniform_ bernoulli bernoulli_ multinomial poisson dropout dropout1d dropout2d "
    "dropout3d alpha_dropout feature_dropout feature_alpha_dropout random_ exponential_ "
    "cauchy_ log_normal_ geometric_ rrelu gumbel_softmax fractional_max_pool2d"
)


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Computes the values that Python took, from the inputs of a call."""

    key: tuple[object, ...]  # equal for probes that compute the same
    indices: tuple[int, ...]  # the inputs that it needs
    module: fx.GraphModule
    takes: tuple[tuple[Callable[..., object], Any, Any], ...]
    expected: tuple[object, ...]
    branches: tuple[Branch, ...]

    def values(self, inputs: Sequence[torch.Tensor]) -> tuple[object, ...] | None:
        """The values on this call; None where they can't be computed."""
        try:
            with torch.no_grad():
                parts = self.module(*[inputs[i] for i in self.indices])
                return tuple(
                    take(*_fill(args, parts), **_fill(kwargs, parts))
                    for take, args, kwargs in self.takes
                )
        except Exception:  # another way through the program: shapes needn't fit
            return None

    def agrees(self, values: tuple[object, ...] | None) -> bool:
        """Whether these are the values that the entry was traced with."""
        return values is not None and all(map(same_value, self.expected, values))

    def find_failure(self, values: tuple[object, ...] | None) -> str | None:
        """The first value that differs."""
        if values is None:
            return f"{self.branches[0]}: can't be computed for this call"
        for branch, want, got in zip(self.branches, self.expected, values, strict=True):
            if not same_value(want, got):
                expected, found = _in_short(want), _in_short(got)
                return f"{branch.op} at {branch.where.short}: expected {expected}, found {found}"
        return None


def _in_short(value: object) -> str:
    text = str(fingerprint(value)) if isinstance(value, torch.Tensor) else repr(value)
    return " ".join(text.split())[:60]


@dataclass(frozen=True, slots=True)
class _Part:
    """Stands for the nth output of a probe's graph."""

    index: int


def _fill(value: Any, parts: tuple[Any, ...]) -> Any:
    if isinstance(value, _Part):
        return parts[value.index]
    if isinstance(value, (tuple, list)):
        return type(value)(_fill(item, parts) for item in value)
    if isinstance(value, dict):
        return {key: _fill(item, parts) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_fill(b, parts) for b in (value.start, value.stop, value.step)))
    return value


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


def build_probe(trace: Trace) -> Probe | None:
    """The probe of a trace's branches; None if it has none. Raises Refused."""
    branches = tuple(branch for branch in trace.branches if not _is_constant(branch))
    if not branches:
        return None
    order = {node: index for index, node in enumerate(trace.graph.nodes)}
    needed: set[fx.Node] = set()
    for branch in branches:
        ancestors = _ancestors(branch.inputs)
        _check_branch(branch, ancestors, order)
        needed |= ancestors
    if sum(node.op != "placeholder" for node in needed) > LARGEST_PROBE:
        raise _refuse(branches[0], f"more than {LARGEST_PROBE} calls lead to it")
    placeholders = [node for node in trace.graph.nodes if node.op == "placeholder"]
    indices = tuple(i for i, node in enumerate(placeholders) if node in needed)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in sorted(needed, key=order.__getitem__):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs: dict[fx.Node, int] = {}
    takes = []
    for branch in branches:
        args, kwargs = fx.node.map_arg(
            (branch.args, branch.kwargs),
            lambda node: _Part(outputs.setdefault(node, len(outputs))),  # type: ignore[arg-type, return-value]
        )
        takes.append((branch.take, args, kwargs))
    graph.output(tuple(copies[node] for node in outputs))
    module = fx.GraphModule(_root_of(trace), graph, class_name="Probe")
    sources = tuple(str(trace.inputs[i].source) for i in indices)
    key = (module.code, sources, *(branch.op for branch in branches), repr(takes))
    expected = tuple(branch.value for branch in branches)
    return Probe(key, indices, module, tuple(takes), expected, branches)


def _is_constant(branch: Branch) -> bool:
    """Whether no input leads to a value, and nothing random does: it is the same every time."""
    return not branch.writers and all(
        node.op in ("call_function", "call_method") and not _is_random(node)
        for node in _ancestors(branch.inputs)
    )


def can_repeat(trace: Trace) -> bool:
    """Whether running a trace's graph leaves nothing behind: it draws and writes nothing."""
    return not any(wanted.written for wanted in trace.inputs) and not any(
        node.meta["tripwire"].python is not None
        or _is_random(node)
        or _name_of(node) in ("backward", "setitem", "setattr")
        for node in trace.graph.nodes
        if node.op in ("call_function", "call_method")
    )


def is_opaque(trace: Trace) -> bool:
    """Whether a graph calls code of the user's, which may draw without saying so."""
    called = (node.target for node in trace.graph.nodes if node.op == "call_function")
    rules = (rule_for(target) for target in called if callable(target))
    return any(type(rule) is Call and rule.opaque for rule in rules)


def _root_of(trace: Trace) -> nn.Module:
    root = nn.Module()
    for constant in trace.constants:
        setattr(root, constant.name, constant.value)
    return root


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    open_ = list(nodes)
    while open_:
        node = open_.pop()
        if node not in found:
            found.add(node)
            open_.extend(node.all_input_nodes)
    return found


def _check_branch(branch: Branch, ancestors: set[fx.Node], order: dict[fx.Node, int]) -> None:
    last = max((order[node] for node in branch.inputs), default=0)
    for writer in branch.writers:
        if order[writer] <= last or writer in ancestors:
            raise _refuse(branch, f"`{writer.name}` changes a tensor in place before it")
    heavy = [node for node in ancestors if _name_of(node) in _HEAVY]
    if sum(map(_cost_of, heavy)) > LARGEST_COST:
        name = _name_of(heavy[0])
        raise _refuse(branch, f"`{name}` leads to it, which costs too much to run twice")
    for node in ancestors:
        name = _name_of(node)
        if _is_random(node):
            raise _refuse(branch, f"`{name}` leads to it, and is random")
        if node.meta["tripwire"].python is not None:
            raise _refuse(branch, f"`{name}` leads to it, a custom autograd function")
    for node in order:
        if order[node] > last:
            break
        if _name_of(node) in ("_enter_autocast", "_enter_inference_mode"):
            raise _refuse(branch, "autocast or inference mode is entered before it")


def _is_random(node: fx.Node) -> bool:
    return _name_of(node) in _RANDOM or _is_seeded(_name_of(node))


@functools.cache
def _is_seeded(name: str) -> bool:
    """Whether an operator of this name draws from a generator, by torch's own tags."""
    packet = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags
        for overload in packet.overloads()
    )


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


def _name_of(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _refuse(branch: Branch, why: str) -> Refused:
    return Refused(
        "tensor-branch",
        f"Python uses a tensor's value here ({branch}), and it can't be computed before the "
        f"call: {why}. Use torch.where or another tensor operation.",
        branch.where,
    )
