"""Flattening: nested inputs around a graph that takes flat ones, and calls that free their list.

A boxed function takes one list and empties it, so that inputs die as early as they can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def make_boxed_func(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A boxed function for one that takes positional arguments."""

    def boxed(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return function(*taken)

    boxed._boxed_call = True  # type: ignore[attr-defined]  # torch's mark, too
    return boxed


def call_boxed(function: Callable[..., Any], args: list[Any]) -> Any:
    """Call with a list that is empty afterwards, whether the function is boxed or not."""
    if getattr(function, "_boxed_call", False):
        result = function(args)
        args.clear()
        return result
    return make_boxed_func(function)(args)


def flatten_graph_inputs(
    graph: Callable[..., Any],
    inputs: Sequence[Any],
    compile_graph: Callable[[Callable[..., Any], list[Any]], Callable[..., Any]],
    *,
    steal: Sequence[int] = (),
) -> Callable[..., Any]:
    """Compile a graph that takes nested inputs as one that takes flat ones.

    `compile_graph` gets a callable on flat inputs and the flat inputs. The result takes nested
    inputs of the same structure; another structure is a ValueError. Inputs at the positions
    `steal` are lists that are emptied when the call begins.
    """
    from torch.utils import _pytree as pytree

    flat, spec = pytree.tree_flatten(tuple(inputs))

    def flat_graph(*leaves: Any) -> Any:
        return graph(*pytree.tree_unflatten(list(leaves), spec))

    compiled = compile_graph(flat_graph, flat)

    def call(*args: Any) -> Any:
        leaves, found = pytree.tree_flatten(args)
        if found != spec:
            raise ValueError(f"inputs are {found}, and were {spec} when the graph was compiled")
        for position in steal:
            args[position].clear()
        del args
        return call_boxed(compiled, leaves)

    return call
