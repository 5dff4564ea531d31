"""Check: trace again, run the graph, and compare, on request.

The second run and the graph start from equal values: arguments as they were before the first
run, everything else as the first run left it, which is put back afterwards, as are the random
generators. A trace that fails here
depends on something that it doesn't hold: a counter, a clock, an effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tripwire.errors import TraceDiffers
from tripwire.reading.sources import Local, Roots
from tripwire.reading.structure import Planner, build_skeleton, find_difference, iter_tensors
from tripwire.tracing.result import Trace
from tripwire.values.classes import isinstance

if TYPE_CHECKING:
    from tripwire.tracing.tracer import Run

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def copy_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Arguments with fresh tensors; one tensor in two places stays one."""
    copies: dict[int, torch.Tensor] = {}

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return copies[id(value)]

    copied: Arguments = pytree.tree_map(fresh, (args, kwargs))
    return copied


def check_trace(
    trace: Trace,
    run_again: Callable[[tuple[Any, ...], dict[str, Any]], Run],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Raise TraceDiffers where a second run, or the graph, disagrees with the first."""
    again_args, again_kwargs = copy_arguments(args, kwargs)
    with _undone(trace, trace.bind(*again_args, **again_kwargs)):
        again = run_again(again_args, again_kwargs)
    if again.trace is None:
        raise TraceDiffers(
            f"{trace.name}: a second run can't be traced: {again.refusal}.", slug="graph-differs"
        )
    _compare_graphs(trace, again.trace)
    graph_args, graph_kwargs = copy_arguments(args, kwargs)
    with _undone(trace, trace.bind(*graph_args, **graph_kwargs)):
        result = trace(*graph_args, **graph_kwargs)
    _compare(trace, "result", again.result, result, rtol, atol)
    _compare(trace, "arguments", (again_args, again_kwargs), (graph_args, graph_kwargs), rtol, atol)


@contextmanager
def _undone(trace: Trace, roots: Roots) -> Iterator[None]:
    """Undo what a run does to the graph's inputs and to the random generators."""
    written = [wanted for wanted in trace.inputs if wanted.written]
    before = [(wanted.source.fetch(roots), wanted) for wanted in written]
    saved = [(t, t.detach().clone()) for t, _ in before if isinstance(t, torch.Tensor)]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)


def _compare_graphs(first: Trace, second: Trace) -> None:
    before, after = _lines(first.graph), _lines(second.graph)
    if before != after:
        changes = difflib.unified_diff(before, after, "first run", "second run", n=1, lineterm="")
        diff = "\n".join(islice(changes, 20))
        raise TraceDiffers(
            f"{first.name}: a second run on equal inputs computed another graph:\n{diff}\n",
            slug="graph-differs",
        )


def _lines(graph: fx.Graph) -> list[str]:
    return [node.format_node() or "" for node in graph.nodes if node.op != "placeholder"]


def _compare(
    trace: Trace, what: str, expected: object, got: object, rtol: float, atol: float
) -> None:
    path = Local(what)
    left = build_skeleton(expected, path, identity=False)
    found = find_difference(left, build_skeleton(got, path, identity=False), what)
    if found:
        raise TraceDiffers(
            f"{trace.name}: {found[0]} is {found[1]} when the function runs and {found[2]} when "
            "the graph runs.",
            slug="result-differs",
        )
    for (wanted, where), (given, _) in zip(_tensors(expected), _tensors(got), strict=True):
        try:
            torch.testing.assert_close(given, wanted, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise TraceDiffers(
                f"{trace.name}: {what}, tensor {where}: the graph and a second run disagree.\n"
                f"{error}\n",
                slug="result-differs",
            ) from None


def _tensors(value: object) -> list[tuple[torch.Tensor, str]]:
    planner = Planner(lambda _: None)
    planner.plan(value)
    named = {id(t): str(path) for t, path in iter_tensors(value, Local("result"))}
    return [(t, named.get(id(t), f"number {i}")) for i, t in enumerate(planner.tensors)]
