"""Picks: `alphas[t]`, with an integer in a tensor, as compilers can take it.

To torch `x[t]` is `x[int(t)]`, a view, and takes the integer out of the tensor: something that
fake tensors don't have. Where nobody can tell a view from a copy, the same values are gathered.
Where somebody can, the call stays, and the graph is cut there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tripwire.reading.tensors import TensorMeta
from tripwire.tracing.result import build_module
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.values.classes import isinstance

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def is_pick(node: fx.Node) -> bool:
    """Whether a call indexes with an integer that is in a tensor."""
    return node.target in (operator.getitem, operator.setitem) and any(
        map(_is_integer, _parts_of(node.args[1]))
    )


def spell_picks(module: fx.GraphModule) -> fx.GraphModule:
    """The same module, or one whose picks are gathers and scatters."""
    nodes = module.graph.nodes
    written = {m for node in nodes if FACTS in node.meta for m in node.meta[FACTS].written}
    (output,) = module.graph.find_nodes(op="output")
    returned = {memory for node in output.all_input_nodes for memory in _memory(node)}
    picks = {n for n in nodes if is_pick(n) and _can_gather(n, written | returned)}
    if not picks:
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in picks:
            copies[node] = _Spelling(graph, node, copies.__getitem__).spell()
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return build_module(module, graph, type(module).__name__)


def _memory(node: fx.Node) -> tuple[int, ...]:
    facts: NodeFacts = node.meta[FACTS]
    return facts.memory


def _parts_of(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_integer(part: Any) -> bool:
    value = _value_of(part)
    return value is not None and value.shape == () and value.dtype in _INTEGERS


def _value_of(part: Any) -> TensorMeta | None:
    if not isinstance(part, fx.Node):
        return None
    value = part.meta[FACTS].value
    return value if isinstance(value, TensorMeta) else None


def _can_gather(node: fx.Node, seen: set[int]) -> bool:
    """Whether everything but integers is simple, and no view would show."""
    parts = _parts_of(node.args[1])
    if not all(
        _is_integer(part) or type(part) in (int, slice, type(None), type(...)) for part in parts
    ):
        return False
    if any(
        isinstance(b, fx.Node) for p in parts if type(p) is slice for b in (p.start, p.stop, p.step)
    ):
        return False
    owner = _value_of(node.args[0])
    if owner is None or owner.stride is None:
        return False
    if node.target is operator.setitem:
        return _can_scatter(node, owner)
    picked = _value_of(node)
    return picked is not None and not seen.intersection(_memory(node)) and _is_dense(picked)


def _is_dense(meta: TensorMeta) -> bool:
    return torch.empty(meta.shape, device="meta").stride() == meta.stride


def _can_scatter(node: fx.Node, owner: TensorMeta) -> bool:
    value: Any = node.args[2]
    if type(value) in (int, float, bool):
        return True
    given = _value_of(value)
    room = _shape_after(owner, node.args[1])
    return given is not None and given.dtype == owner.dtype and len(given.shape) <= len(room)


def _shape_after(owner: TensorMeta, index: Any) -> tuple[int, ...]:
    one = tuple(0 if _is_integer(part) else part for part in _parts_of(index))
    return tuple(_like(owner)[one].shape)


def _like(meta: TensorMeta) -> torch.Tensor:
    assert meta.stride is not None
    return torch.empty_strided(meta.shape, meta.stride, device="meta")


class _Spelling:
    """One pick, as other calls."""

    def __init__(self, graph: fx.Graph, node: fx.Node, find: Callable[[fx.Node], fx.Node]) -> None:
        self._graph = graph
        self._node = node
        self._find = find

    def spell(self) -> fx.Node:
        node = self._node
        owner = node.args[0]
        assert isinstance(owner, fx.Node)
        parts = _parts_of(node.args[1])
        seen, positions = self._view(owner, parts)
        integers = [part for part in parts if _is_integer(part)]
        by_position: list[fx.Node | None] = [None] * (max(positions) + 1)
        for position, integer in zip(positions, integers, strict=True):
            by_position[position] = self._find(integer)
        if node.target is operator.getitem:
            made = self._graph.call_function(torch.ops.aten.index.Tensor, (seen, by_position))
        else:
            value = self._value(owner, node.args[2])
            target = torch.ops.aten.index_put_.default
            made = self._graph.call_function(target, (seen, by_position, value))
        made.meta = dict(node.meta)
        return made

    def _view(self, owner: fx.Node, parts: tuple[Any, ...]) -> tuple[fx.Node, list[int]]:
        """What the other parts of an index leave, and where the integers stand in that."""
        meta = _value_of(owner)
        assert meta is not None
        rest = tuple(slice(None) if _is_integer(part) else part for part in parts)
        positions, position = [], 0
        for part in parts:
            if part is ...:
                taken = sum(p is not None and p is not ... for p in parts)
                position += len(meta.shape) - taken
            else:
                if _is_integer(part):
                    positions.append(position)
                position += type(part) is not int
        found = self._find(owner)
        if all(part == slice(None) for part in rest):
            return found, positions
        view = _like(meta)[rest]
        made = self._graph.call_function(operator.getitem, (found, rest))
        facts: NodeFacts = owner.meta[FACTS]
        value = meta._replace(shape=tuple(view.shape), stride=view.stride())
        made.meta = dict(self._node.meta)
        made.meta[FACTS] = facts._replace(
            value=value, written=(), where=self._node.meta[FACTS].where
        )
        return made, positions

    def _value(self, owner: fx.Node, value: Any) -> fx.Node:
        if isinstance(value, fx.Node):
            return self._find(value)
        meta = _value_of(owner)
        assert meta is not None
        options: dict[str, Any] = {"dtype": meta.dtype, "device": meta.device}
        made = self._graph.call_function(torch.ops.aten.full.default, ([], value), options)
        facts: NodeFacts = self._node.meta[FACTS]
        number = TensorMeta((), (), meta.dtype, meta.device, False)
        made.meta = dict(self._node.meta)
        made.meta[FACTS] = facts._replace(value=number, memory=(), written=())
        return made
