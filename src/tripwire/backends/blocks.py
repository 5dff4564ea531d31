"""Blocks: what a graph repeats, as the layers of a model, is compiled once and called often.

torch's compilers have an operator for it, `invoke_subgraph`, for functions that the user marks.
Here nobody marks anything: equal stretches are found in the graph itself.

A row of equal stretches may be divided anywhere, as long as each cut is at the same place. The cuts
are before a matrix product, whose input has to be in memory anyway. So a cut separates nothing that
could have been fused.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import fx

from tripwire.reading.tensors import OUTSIDE, TensorMeta
from tripwire.rulebook.rules import words
from tripwire.tracing.result import is_random, name_of
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.values.classes import isinstance

LEAST_BLOCKS = 3
LEAST_NODES = 16  # of a block: calling it takes nodes, too
_PRODUCTS = words("linear matmul mm bmm addmm baddbmm scaled_dot_product_attention einsum")
# Inductor chooses the layout of images for the whole graph.
_OF_LAYOUTS = words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
# Views that begin where what they look at begins.
_KEEP_PLACE = words(
    "view reshape transpose permute unsqueeze squeeze flatten unflatten contiguous to float t"
)
_PERIODS = 8  # the most frequent distances between like nodes are tried


class _Period(NamedTuple):
    """Nodes that are like those one period before: from `begin` to `end`."""

    begin: int
    end: int
    period: int

    @property
    def saved(self) -> int:
        """How many nodes need not be compiled."""
        return ((self.end - self.begin) // self.period - 1) * self.period


class _Block(NamedTuple):
    nodes: Sequence[fx.Node]
    operands: tuple[fx.Node, ...]  # what comes from outside, in the order of use
    form: Hashable  # equal for blocks that compute the same of their operands


def fold_blocks(module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> bool:
    """Put one graph module, called each time, in the place of what a graph repeats.

    Whether there was something to fold.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    aligned = {n for n, t in zip(inputs, example_inputs, strict=True) if _begins_aligned(t)}
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    row = _find_row([_describe(node) for node in nodes])
    start = None if row is None else _find_cut(nodes, row)
    if row is None or start is None:
        return False
    alike = defaultdict(list)
    for i in range(start, row.end - row.period + 1, row.period):
        block = _build_block(nodes[i : i + row.period], aligned)
        alike[block.form].append(block)
    blocks = max(alike.values(), key=len)
    results = _find_results(blocks)
    if len(blocks) < LEAST_BLOCKS or not all(_can_fold(block, results) for block in blocks):
        return False
    _fold(module, blocks, results)
    return True


def _describe(node: fx.Node) -> Hashable:
    """What a node does, whatever it does it to. Unlike all others: what must stay where it is."""
    facts: NodeFacts | None = node.meta.get(FACTS)
    if facts is None or facts.value is None or _stays(node, facts):
        return node
    plain = fx.map_arg((node.args, node.kwargs), lambda argument: _SOME_NODE)
    return node.op, node.target, repr(plain), facts.value


def _stays(node: fx.Node, facts: NodeFacts) -> bool:
    """Whether a node does more than compute, or is compiled with a look at the whole graph."""
    return bool(
        facts.written
        or facts.opaque
        or facts.region is not None
        or facts.python is not None
        or node.op not in ("call_function", "call_method")
        or name_of(node) in _OF_LAYOUTS
        or is_random(node)
        or not all(map(_is_ordinary, _tensors_in(facts.value)))
    )


_SOME_NODE: Any = object()  # unlike any argument: None is one


def _tensors_in(value: TensorMeta | tuple[TensorMeta | None, ...] | None) -> list[TensorMeta]:
    values = (value,) if isinstance(value, TensorMeta) else value or ()
    return [one for one in values if one is not None]


def _is_ordinary(meta: TensorMeta) -> bool:
    """Not part of a graph of autograd's, nor conjugated in a way that its form doesn't tell."""
    return not meta.requires_grad and not meta.dtype.is_complex


def _find_row(likes: Sequence[Hashable]) -> _Period | None:
    """The row that saves most."""
    last: dict[Hashable, int] = {}
    distances: Counter[int] = Counter()
    for i, like in enumerate(likes):
        if i - last.get(like, i) >= LEAST_NODES:
            distances[i - last[like]] += 1
        last[like] = i
    rows = [
        row for period, _ in distances.most_common(_PERIODS) for row in _find_rows(likes, period)
    ]
    return max(rows, key=lambda row: row.saved, default=None)


def _find_rows(likes: Sequence[Hashable], period: int) -> Iterator[_Period]:
    begin = 0
    for end in range(period, len(likes) + 1):
        if end == len(likes) or likes[end] != likes[end - period]:
            if end - begin >= LEAST_BLOCKS * period:
                yield _Period(begin, end, period)
            begin = end - period + 1


def _find_cut(nodes: Sequence[fx.Node], row: _Period) -> int | None:
    """Where blocks begin: before a product, with as few values as possible handed on."""
    last = row.end - LEAST_BLOCKS * row.period
    cuts = [
        i
        for i in range(row.begin, min(row.begin + row.period, last + 1))
        if name_of(nodes[i]) in _PRODUCTS
    ]
    position = {node: i for i, node in enumerate(nodes)}

    def cost(cut: int) -> tuple[int, int]:
        middle = cut + row.period
        before = nodes[cut:middle]
        handed_on = sum(any(position.get(u, -1) >= middle for u in n.users) for n in before)
        return handed_on, cut

    return min(cuts, key=cost, default=None)


def _build_block(nodes: Sequence[fx.Node], aligned: Set[fx.Node]) -> _Block:
    inside = {node: i for i, node in enumerate(nodes)}
    operands: dict[fx.Node, int] = {}
    form: list[Hashable] = []

    def note(argument: fx.Node) -> fx.Node:
        here = inside.get(argument)
        form.append(here if here is not None else ~operands.setdefault(argument, len(operands)))
        return argument

    for node in nodes:
        fx.map_arg((node.args, node.kwargs), note)
        form.append(None)
    form += [_form_of(node, aligned) for node in operands]
    return _Block(nodes, tuple(operands), tuple(form))


def _form_of(node: fx.Node, aligned: Set[fx.Node]) -> Hashable:
    """All that a block's code depends on; the node itself where that isn't known."""
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.is_complex():
        return node
    if _needs_alignment(example.device) and not _is_aligned(node, aligned):
        return node  # on a GPU, code for one place in memory may not fit another
    return example.shape, example.stride(), example.dtype, example.device


def _is_aligned(node: fx.Node, aligned: Set[fx.Node]) -> bool:
    """Whether a value begins where its memory begins, or an input where code expects it."""
    if node.op == "placeholder":
        return node in aligned
    memory = set(_memory_of(node))
    shared = [one for one in node.all_input_nodes if not memory.isdisjoint(_memory_of(one))]
    if not shared:
        return OUTSIDE not in memory
    return name_of(node) in _KEEP_PLACE and all(_is_aligned(one, aligned) for one in shared)


def _begins_aligned(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return tensor.storage_offset() * tensor.element_size() % 16 == 0


def _needs_alignment(device: torch.device) -> bool:
    return device.type != "cpu"


def _find_results(blocks: Sequence[_Block]) -> tuple[int, ...]:
    """The places of all values that are used after some block."""
    found: set[int] = set()
    for block in blocks:
        inside = set(block.nodes)
        found.update(i for i, node in enumerate(block.nodes) if not inside.issuperset(node.users))
    return tuple(sorted(found))


def _can_fold(block: _Block, results: Sequence[int]) -> bool:
    """Whether all results are tensors of memory that the block made, each of its own.

    And whether all is on one device: Inductor takes a call to be where its first operand is.
    """
    examples = [node.meta.get("example_value") for node in (*block.operands, *block.nodes)]
    if len({one.device for one in examples if isinstance(one, torch.Tensor)}) != 1:
        return False
    seen = {OUTSIDE}
    for operand in block.operands:
        seen.update(_memory_of(operand))
    for i in results:
        facts: NodeFacts = block.nodes[i].meta[FACTS]
        if not isinstance(facts.value, TensorMeta) or not seen.isdisjoint(facts.memory):
            return False
        seen.update(facts.memory)
    return True


def _memory_of(node: fx.Node) -> tuple[int, ...]:
    facts = node.meta.get(FACTS)
    return facts.memory if isinstance(facts, NodeFacts) else (OUTSIDE,)


def _fold(module: fx.GraphModule, blocks: Sequence[_Block], results: Sequence[int]) -> None:
    name = "repeated"
    while hasattr(module, name):
        name += "_"
    module.add_module(name, _extract(module, blocks[0], results))
    replaced: dict[fx.Node, fx.Node] = {}
    for block in blocks:
        _replace(module.graph, block, results, name, replaced)
    module.graph.lint()
    module.recompile()


def _extract(module: fx.GraphModule, block: _Block, results: Sequence[int]) -> fx.GraphModule:
    """One block as a module of its own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, operand in enumerate(block.operands):
        copies[operand] = graph.placeholder(f"operand_{i}")
        copies[operand].meta["example_value"] = operand.meta["example_value"]
    for node in block.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[block.nodes[i]] for i in results))
    return fx.GraphModule(module, graph)


def _replace(
    graph: fx.Graph,
    block: _Block,
    results: Sequence[int],
    name: str,
    replaced: dict[fx.Node, fx.Node],
) -> None:
    """A call in the place of a block; `replaced` has what blocks before it returned."""
    operands = [replaced.get(node, node) for node in block.operands]
    given = [block.nodes[i] for i in results]
    with graph.inserting_before(block.nodes[0]):
        called = graph.get_attr(name)
        call = graph.call_function(
            torch.ops.higher_order.invoke_subgraph, (called, name, *operands)
        )
        call.meta["example_value"] = tuple(node.meta["example_value"] for node in given)
        for i, node in enumerate(given):
            item = replaced[node] = graph.call_function(operator.getitem, (call, i))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item)
    for node in reversed(block.nodes):
        graph.erase_node(node)
