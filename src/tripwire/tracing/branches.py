"""Branches: a tensor's value that Python used. The trace holds for that value only."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import Struct
from torch import fx

from tripwire.ranges import Scope, SourceRange
from tripwire.reading.tensors import describe, find_leaf, storage_of, version_of
from tripwire.rulebook.refusals import Refusal, Refused
from tripwire.values.classes import module_of

if TYPE_CHECKING:
    from tripwire.tracing.state import TracingState


class TracerWarning(torch.jit.TracerWarning):  # type: ignore[name-defined,misc]  # untyped
    """The trace holds only for a value that this run met, or leaves out a write of the run."""


WRAPPED = "tripwire_wrapped"  # in the meta of a tensor that a transform of torch.func wrapped
COMPARED = "Python uses its value"  # why no compiler takes a call that compares a value
HOOKS = "hooks"  # the `op` of a branch that asks whether tensors have hooks


class Branch(Struct, frozen=True, eq=False):
    """One value taken out of a tensor: which call took it, from what, and what it was."""

    op: str  # `item`, `__bool__`, `tolist`, `shape`, ...
    take: Callable[..., object]  # takes the value out again, from the same arguments
    inputs: tuple[fx.Node, ...]  # the tensors that it was taken from
    args: tuple[fx.node.Argument, ...]
    kwargs: dict[str, fx.node.Argument]
    value: object
    where: SourceRange
    scope: Scope
    writes: int = 0  # calls before this one that changed a tensor in place
    instead: tuple[Branch, ...] = ()  # values that settle this one, where it is a size

    def __str__(self) -> str:
        text = repr(self.value)
        text = text if len(text) <= 60 else text[:57] + "..."
        taken = ", ".join(node.name for node in self.inputs)
        return f"{self.op}({taken}) = {text} at {self.where.short}"


class Exposed(NamedTuple):
    """A tensor whose memory went to NumPy."""

    tensor: torch.Tensor
    version: int | None  # then
    value: torch.Tensor  # then
    array: weakref.ref[Any]  # views of the array keep it alive


# What Python does with a tensor, in words that a reader of the warning knows.
_VERBS = {
    "__bool__": "Python asks whether a tensor is true",
    "is_nonzero": "Python asks whether a tensor is true",
    "__int__": "Python takes an int out of a tensor",
    "__index__": "Python takes an index out of a tensor",
    "__float__": "Python takes a float out of a tensor",
    "__complex__": "Python takes a complex number out of a tensor",
    "item": "Python takes a number out of a tensor",
    "tolist": "Python takes a list out of a tensor",
    "numpy": "Python takes a NumPy array out of a tensor",
    "__array__": "Python takes a NumPy array out of a tensor",
    "__contains__": "Python looks for a value in a tensor",
    "unbind": "Python iterates over a tensor whose size depends on values",
}


def warn_of(branch: Branch) -> None:
    """Warn at the user's line that the trace holds for this value."""
    verb = _VERBS.get(
        branch.op, f"Python uses the result of `{branch.op}`, which depends on values"
    )
    place = branch.where.place
    message = f"{verb}. This trace holds for the value of this run only: {branch}"
    if place is None:
        warnings.warn(message, TracerWarning, stacklevel=2)
    else:
        warnings.warn_explicit(message, TracerWarning, place.file, place.line)


def add_branch(
    state: TracingState,
    op: str,
    take: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value: Any,
    where: SourceRange,
    taken: tuple[torch.Tensor, ...] = (),
    instead: tuple[Branch, ...] = (),
) -> None:
    """Note that Python used a tensor's value, and warn at the user's line.

    instead: other values that settle this one, where it is a size.
    """
    if module_of(type(value)) == "numpy":
        array, value = weakref.ref(value), value.copy()  # it shares the tensor's memory
        for tensor in taken:
            then = version_of(tensor), tensor.detach().clone()
            state.exposed.append(Exposed(tensor, *then, array))
    inputs = tensor_nodes((args, kwargs))
    if any(WRAPPED in node.meta for node in inputs):
        state.refuse(Refusal("function-transform", _IN_TRANSFORM.format(op), where))
        return
    branch = Branch(
        op,
        take,
        inputs,
        args,
        kwargs,
        value,
        where,
        state.scopes.current,
        state.writes,
        # What settles a size of a run whose sizes are fixed doesn't settle an open one.
        () if state.shadow is not None and state.shadow.asks_for_counts else instead,
    )
    if op == "grad" and inputs[0] in state.before_backward:
        state.branches += state.before_backward.pop(inputs[0])
    state.branches.append(branch)
    if not state.quiet:
        warn_of(branch)


_IN_TRANSFORM = (
    "`{}` takes a value out of a tensor that a transform of torch.func wrapped, and outside of the "
    "transform nothing can compute it. Use torch.where, or decide before the transform."
)


def note_length(
    state: TracingState, op: str, tensor: torch.Tensor, length: int, where: SourceRange
) -> None:
    """Note that Python asked for a tensor's length, or went through it.

    Nobody is warned: a trace compares the sizes of its inputs.
    """
    try:
        node = state.node_of(tensor)
    except Refused:  # a tensor of unknown origin: whatever is done with it says so
        return
    scope, writes = state.scopes.current, state.writes
    state.branches.append(Branch(op, len, (node,), (node,), {}, length, where, scope, writes))


def _iter_leaves(state: TracingState) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """The inputs that a backward may give a `.grad`."""
    for node, known in state.inputs:
        tensor = known()
        if tensor is not None and tensor.requires_grad and find_leaf(tensor):
            yield node, tensor


def note_accumulated(state: TracingState) -> None:
    """A backward adds to gradients in place, also to those of leaves that the run made."""
    for tensor, _ in state.values.live():
        gradient = tensor.grad if tensor.requires_grad and find_leaf(tensor) else None
        if gradient is not None and gradient.layout is torch.strided:
            state.written_storages[storage_of(gradient)] = state.calls
            known = state.values.find(gradient)
            if known is not None:
                known.version = version_of(gradient)


def is_settled(state: TracingState, name: str, owner: torch.Tensor) -> bool:
    """Whether it is the gradient of a leaf that the run made, and its backwards alone decide on it.

    What they leave there follows from what else is guarded, unless code of somebody's is among it.
    """
    if name != "grad" or state.custom_calls or _have_hooks(owner):
        return False
    return bool(find_leaf(owner)) and state.has_made(owner)


def note_gradients(state: TracingState, where: SourceRange) -> None:
    """Remember what `.grad` of each input is before a backward: Python may ask for it later.

    A hook of an input's may set it to something else meanwhile; none may be there then.
    """
    leaves = dict(_iter_leaves(state))
    if not state.quiet or _have_hooks(*leaves.values()):
        return
    nodes, scope = tuple(leaves), state.scopes.current
    hooks = Branch(HOOKS, _have_hooks, nodes, nodes, {}, False, where, scope)
    for node, tensor in leaves.items():
        seen = describe_attribute(tensor, "grad")
        asked, take = (node, "grad"), describe_attribute
        branch = Branch("grad", take, (node,), asked, {}, seen, where, scope, state.writes)
        state.before_backward.setdefault(node, (hooks, branch))


def differentiates_elsewhere(state: TracingState) -> bool:
    """Whether a backward runs hooks or custom functions in a thread of torch's own.

    So it does on other devices than the CPU.
    """
    others = [one for _, one in _iter_leaves(state) if not _is_on_cpu(one)]
    return bool(others) and (state.custom_calls > 0 or _have_hooks(*others))


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _have_hooks(*tensors: torch.Tensor) -> bool:
    return any(one._backward_hooks or one._post_accumulate_grad_hooks for one in tensors)


def describe_attribute(owner: torch.Tensor, name: str) -> str:
    """What a tensor's attribute is, in short."""
    return str(describe(getattr(owner, name)))


def tensor_nodes(nodes: Any) -> tuple[fx.Node, ...]:
    """Those among arguments that stand for tensors of the run."""
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(nodes, lambda node: found.setdefault(node))
    return tuple(node for node in found if node.op != "get_attr")
