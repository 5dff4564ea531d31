"""Sizes: which results have a shape that depends on values.

`x[x > 0]` does, and so does everything computed from it, except numbers. If Python reads such a
shape, it takes a value out of a tensor: a branch. What first turned values into a size *decides*:
how many elements of a mask are true, or an integer in a tensor. As long as that is what the run
saw, so are all shapes that follow from it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from tripwire.ranges import SourceRange
from tripwire.reading.tensors import TensorMeta, iter_given
from tripwire.rulebook.rules import SIZED_FIRST, Call, words
from tripwire.tracing.branches import Branch
from tripwire.tracing.state import FACTS, NodeFacts, TracingState
from tripwire.values.classes import isinstance


class Decisive(NamedTuple):
    """A number made of a tensor's values, which decides on a size."""

    op: str  # a method of the tensor
    tensor: torch.Tensor


def find_inherited(
    state: TracingState, rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Branch, ...]:
    """What decided on the shapes of the arguments, and so decides on that of the result."""
    if not state.met_data_sizes:
        return ()
    shaping: Any = (args, kwargs)
    if rule.name in KEEP_SHAPES and args:
        shaping = args[:1]
    elif rule.name in _KEEP_MASKED_SHAPES and args:
        shaping = (args[:2], kwargs.get("mask"))
    found: dict[Branch, None] = {}
    for known in map(state.values.find, iter_given(shaping)):
        if known is not None:
            found.update(dict.fromkeys(known.sized_by))
    return tuple(found)


def find_decisive(
    rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Decisive, ...] | None:
    """The values of which this call makes a size.

    None where it makes one in a way of its own: then the result's shape itself must be asked.
    """
    found: list[Decisive] = []
    if rule.sized_by_data:
        if rule.name == "__getitem__":
            found += [Decisive("count_nonzero", mask) for mask in _iter_masks(args[1])]
        elif rule.name in ("nonzero", "argwhere") or (
            rule.name == "where" and len(args) + len(kwargs) == 1
        ):
            found += [Decisive("count_nonzero", mask) for mask in iter_given((args, kwargs))]
        elif rule.name == "repeat_interleave":
            alone = len(args) == 1 and "repeats" not in kwargs
            if kwargs.get("output_size") is None:
                repeats = args if alone else (args[1:], kwargs)
                found += [Decisive("sum", tensor) for tensor in iter_given(repeats)]
        elif rule.name == "tensor_split":
            if _has_tensor((args[1:], kwargs)):
                return None
        elif rule.name == "one_hot":
            if (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1:
                return None
        elif rule.name != "where":
            return None
    if rule.takes_sizes:
        sizes = args if rule.name in SIZED_FIRST else args[1:]
        if rule.name == "__getitem__":
            sizes = tuple(bound for bound in _slice_bounds(args[1]))
        found += [Decisive("item", tensor) for tensor in _iter_sizes(sizes, kwargs)]
    return tuple(found)


# The result has the shape of the first argument, whatever is put into it.
KEEP_SHAPES = words(
    "index_add index_copy index_fill index_put index_reduce scatter scatter_add scatter_reduce "
    "index_add_ index_copy_ index_fill_ index_put_ index_reduce_ scatter_ scatter_add_ "
    "scatter_reduce_ masked_fill_ masked_scatter_ add_ sub_ mul_ div_ copy_ fill_ zero_ "
    "__iadd__ __isub__ __imul__ __itruediv__"
)
# Of the first argument, and of a mask that may be wider.
_KEEP_MASKED_SHAPES = words("masked_fill masked_scatter")


def _slice_bounds(index: Any) -> list[Any]:
    parts = index if isinstance(index, tuple) else (index,)
    return [b for part in parts if isinstance(part, slice) for b in _bounds(part)]


def _has_tensor(value: Any) -> bool:
    return next(iter_given(value), None) is not None


def _iter_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Integers in tensors that stand where sizes and slice bounds stand."""
    for value in (*args, *kwargs.values()):
        for part in _bounds(value) if isinstance(value, (slice, tuple)) else [value]:
            for tensor in iter_given(part):
                if tensor.numel() == 1 and not tensor.is_floating_point():
                    yield tensor


def _bounds(value: Any) -> list[Any]:
    """The bounds of slices in an index; an integer in one picks, and changes no size."""
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if any(isinstance(item, slice) for item in value):
        return [bound for item in value if isinstance(item, slice) for bound in _bounds(item)]
    return list(value)


def _iter_masks(index: Any) -> Iterator[torch.Tensor]:
    return (t for t in iter_given(index) if t.dtype in (torch.bool, torch.uint8))


def ask_tensor(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> object:
    """What a tensor answers under a name: an attribute, or a method's result."""
    answer = getattr(tensor, name)
    return answer(*args, **kwargs) if callable(answer) else answer


def find_deciders(
    state: TracingState,
    rule: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: SourceRange,
) -> tuple[tuple[Branch, ...] | None, bool]:
    """What decides on the shape of a call's result by values; None: nothing but the result.

    And whether this very call makes a size of values. Custom operators say so to compilers.
    """
    if rule.opaque:
        return None, rule.as_it_is is not None
    if not (rule.sized_by_data or rule.takes_sizes):
        return find_inherited(state, rule, args, kwargs), False
    decisive = find_decisive(rule, args, kwargs)
    if decisive is None:
        return None, True
    inherited = find_inherited(state, rule, args, kwargs)
    if not decisive:
        return inherited, False
    found = []
    for op, tensor in decisive:
        node, take = state.node_of(tensor), functools.partial(_take_number, op)
        value, scope = take(tensor), state.scopes.current
        found.append(Branch(op, take, (node,), (node,), {}, value, where, scope, state.writes))
    return (*inherited, *found), True


def _take_number(op: str, tensor: torch.Tensor) -> object:
    value = getattr(tensor.detach(), op)()
    return value.item() if isinstance(value, torch.Tensor) else value


def shape_of(state: TracingState, node: fx.Node) -> Branch:
    """The shape of a call's result, as it was made."""
    facts: NodeFacts = node.meta[FACTS]
    assert isinstance(facts.value, TensorMeta)
    shape, take = torch.Size(facts.value.shape), functools.partial(ask_tensor, "shape")
    where, scope = facts.where, facts.scope
    return Branch("shape", take, (node,), (node,), {}, shape, where, scope, state.writes)
