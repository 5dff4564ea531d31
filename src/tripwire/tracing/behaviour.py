"""Behaviour: what a graph does besides computing its results.

It may draw random numbers, write to its inputs, call code of the user's, or depend on where its
inputs lie in memory. Each node says so by the name of what it calls.
"""

from __future__ import annotations

import torch
from torch import fx

from tripwire.rulebook.rules import Call, is_seeded, rule_for, words
from tripwire.tracing.result import Trace
from tripwire.tracing.state import FACTS
from tripwire.values.classes import isinstance

_DROPOUTS = words(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout"
)
_RANDOM = words(
    "rand randn randint randperm rand_like randn_like randint_like normal normal_ "
    "uniform_ bernoulli bernoulli_ multinomial poisson random_ exponential_ cauchy_ "
    "log_normal_ geometric_ rrelu gumbel_softmax fractional_max_pool2d"
)


def can_repeat(trace: Trace) -> bool:
    """Whether running a trace's graph leaves nothing behind: it draws and writes nothing."""
    writes = any(wanted.written for wanted in trace.inputs)
    return not (writes or draws(trace) or acts(trace))


def reads_offsets(trace: Trace) -> bool:
    """Whether what a run does depends on where its inputs begin in their memory.

    Python may ask. `as_strided` and `set_` count from the memory's beginning, and a view as another
    dtype is an error in some places, which back ends don't raise.
    """
    if not _OFFSETS.isdisjoint(trace.reads.names):
        return True
    return any(
        name_of(node) in _PLACED
        or (name_of(node) == "view" and any(type(a) is torch.dtype for a in _plain_of(node)))
        for node in _calls_of(trace)
    )


_OFFSETS = words("storage_offset sym_storage_offset")
_PLACED = words(
    "as_strided as_strided_ as_strided_copy as_strided_scatter set_ view_as_complex "
    "view_as_complex_copy"
)


def _plain_of(node: fx.Node) -> tuple[object, ...]:
    return *node.args, *node.kwargs.values()


def draws(trace: Trace) -> bool:
    """Whether a graph draws random numbers."""
    return any(map(is_random, _calls_of(trace)))


def acts(trace: Trace) -> bool:
    """Whether a graph does more than to compute, draw and write to tensors' memory."""
    return any(
        node.meta[FACTS].python is not None or name_of(node) in ("backward", "setattr")
        for node in _calls_of(trace)
    )


def _calls_of(trace: Trace) -> list[fx.Node]:
    return [node for node in trace.graph.nodes if node.op in ("call_function", "call_method")]


def is_opaque(trace: Trace) -> bool:
    """Whether a graph calls code of the user's, which may draw without saying so."""
    called = (node.target for node in trace.graph.nodes if node.op == "call_function")
    rules = (rule_for(target) for target in called if callable(target))
    return any(type(rule) is Call and rule.opaque for rule in rules)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if name_of(node) in _DROPOUTS:
        share = node.args[1] if len(node.args) > 1 else node.kwargs.get("p")
        if type(share) in (int, float) and share == 0:
            return False
        return not (len(node.args) > 2 and node.args[2] is False) and (
            node.kwargs.get("training") is not False and node.kwargs.get("train") is not False
        )
    if name_of(node) == "scaled_dot_product_attention":
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return not isinstance(dropout, (int, float)) or dropout != 0
    return name_of(node) in _RANDOM or is_seeded(name_of(node))


def name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]
