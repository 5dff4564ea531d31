"""Floats: a float that is open goes to compilers in a form that they don't fix.

They get it as a 64-bit tensor, with `item()` behind it. If a float whose value they know is added,
multiplied or compared, they use the tensor again; everywhere else they fix the float. Some calls
can take a float whose value is unknown, as they take numbers out of tensors. A few more are
rewritten with the tensor itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tripwire.reading.tensors import TensorMeta
from tripwire.rulebook.rules import words
from tripwire.tracing.open.opening import NUMBER, NumberInput
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.values.classes import isinstance

# Calls that compilers have code for, with a float of which they know nothing.
_TAKE_UNKNOWN = words(
    "clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_ full full_like new_full "
    "fill_ masked_fill masked_fill_ where setitem leaky_relu softplus threshold _threshold "
    "hardtanh normalize remainder __mod__ linspace"
)


# A float beside these changes nothing about the dtype.
_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)  # two steps round twice
_MOST = 64  # numbers in a list of which a tensor is made


def has_unknown_floats(graph: fx.Graph) -> bool:
    """Whether compilers get floats of which they know nothing."""
    inputs = graph.find_nodes(op="placeholder")
    numbers: list[NumberInput | None] = [node.meta.get(NUMBER) for node in inputs]
    return any(
        number is not None and number.is_float and is_better_unknown(node)
        for node, number in zip(inputs, numbers, strict=True)
    )


def is_better_unknown(node: fx.Node) -> bool:
    """Whether a float goes where compilers fix what they know: `add_(grad, alpha=-lr)`."""
    for one in node.users:
        if NUMBER in one.meta:
            found = is_better_unknown(one)
        else:
            name = _name_of(one)
            is_named = any(one.kwargs.get(key) is node for key in ("alpha", "value"))
            found = is_named or name.startswith("_foreach_") or name in _TAKE_UNKNOWN
        if found:
            return True
    return False


def spell_floats(graph: fx.Graph) -> None:
    """Give calls the tensor of an open float, where they take one for it."""
    for node in list(graph.nodes):
        spell = _SPELLINGS.get(_name_of(node)) if node.op.startswith("call_") else None
        if spell is not None and "out" not in node.kwargs:
            with graph.inserting_before(node):
                made = spell(node)
            if made is not None:
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
                graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if _find_tensor(node) is not None and not node.users:
            graph.erase_node(node)


def _name_of(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _find_tensor(value: object) -> fx.Node | None:
    """The tensor that an open float comes out of."""
    if not isinstance(value, fx.Node) or value.op != "call_method" or value.target != "item":
        return None
    owner = value.args[0]
    assert isinstance(owner, fx.Node)
    number: NumberInput | None = owner.meta.get(NUMBER)
    return owner if number is not None and number.is_float else None


def _has_dtype(value: object, dtypes: Collection[torch.dtype]) -> bool:
    meta = value.meta[FACTS].value if isinstance(value, fx.Node) and FACTS in value.meta else None
    return isinstance(meta, TensorMeta) and meta.dtype in dtypes


def _make(node: fx.Node, name: str, owner: Any, other: Any) -> fx.Node:
    """A step towards what a call gives: a tensor of its own, which nobody else sees."""
    made = node.graph.call_method(name, (owner, other))
    made.meta = _step_meta(node)
    return made


def _step_meta(node: fx.Node) -> dict[str, Any]:
    facts: NodeFacts = node.meta[FACTS]
    return {**node.meta, FACTS: facts._replace(memory=(), written=())}


def _fit(node: fx.Node, tensor: fx.Node, beside: fx.Node) -> fx.Node:
    """A tensor without dimensions has a say in the dtype beside another such, unlike a float."""
    meta: TensorMeta = beside.meta[FACTS].value
    return tensor if meta.shape else _make(node, "to", tensor, meta.dtype)


def _spell_power(node: fx.Node) -> fx.Node | None:
    base, exponent = node.args if len(node.args) == 2 else (None, None)
    tensor = _find_tensor(exponent)
    if tensor is None or not _has_dtype(base, (*_WIDE, *_NARROW)):
        return None
    assert isinstance(base, fx.Node)
    both = (base, _fit(node, tensor, base))
    return node.graph.call_function(torch.pow, both[::-1] if node.target == "__rpow__" else both)


def _spell_sum(node: fx.Node) -> fx.Node | None:
    """`x.add(y, alpha=s)`, in place or not."""
    tensor = _find_tensor(node.kwargs.get("alpha"))
    if tensor is None or len(node.args) != 2 or len(node.kwargs) != 1:
        return None
    owner, other = node.args
    if not _has_dtype(other, _WIDE):
        return None
    assert isinstance(other, fx.Node)
    scaled = _make(node, "mul", other, _fit(node, tensor, other))
    return node.graph.call_method(_name_of(node), (owner, scaled))


def _spell_lerp(node: fx.Node) -> fx.Node | None:
    weight = node.args[2] if len(node.args) == 3 else node.kwargs.get("weight")
    tensor = _find_tensor(weight)
    if tensor is None or len(node.args) < 2 or not _has_dtype(node.args[0], _WIDE):
        return None
    start, end = node.args[:2]
    assert isinstance(start, fx.Node)
    part = _make(node, "mul", _make(node, "sub", end, start), _fit(node, tensor, start))
    in_place = _name_of(node) == "lerp_"
    return node.graph.call_method("add_" if in_place else "add", (start, part))


def _spell_attention(node: fx.Node) -> fx.Node | None:
    """`scale` on the queries: what is scaled is their product with the keys."""
    tensor = _find_tensor(node.kwargs.get("scale"))
    if tensor is None or not node.args or not _has_dtype(node.args[0], _WIDE):
        return None
    query = node.args[0]
    assert isinstance(query, fx.Node)
    scaled = _make(node, "mul", query, tensor)
    kwargs = {**node.kwargs, "scale": 1.0}
    return node.graph.call_function(_call_of(node), (scaled, *node.args[1:]), kwargs)


def _spell_cross_entropy(node: fx.Node) -> fx.Node | None:
    """`label_smoothing` is a way between the loss without it and the one of equal labels."""
    tensor = _find_tensor(node.kwargs.get("label_smoothing"))
    if tensor is None or not node.args or not _has_dtype(node.args[0], _WIDE):
        return None
    ends = []
    for smoothing in (0.0, 1.0):
        kwargs = {**node.kwargs, "label_smoothing": smoothing}
        ends.append(node.graph.call_function(_call_of(node), node.args, kwargs))
        ends[-1].meta = _step_meta(node)
    plain, smooth = ends
    weight = _fit(node, tensor, node)
    part = _make(node, "mul", _make(node, "sub", smooth, plain), weight)
    return node.graph.call_method("add", (plain, part))


def _call_of(node: fx.Node) -> Callable[..., Any]:
    found = node.target
    assert callable(found)
    return found


def _spell_tensor(node: fx.Node) -> fx.Node | None:
    """`torch.tensor([t, 1.0])`."""
    if len(node.args) != 1 or not set(node.kwargs) <= {"dtype", "device"}:
        return None
    leaves, _ = pytree.tree_flatten(node.args[0])
    meta: TensorMeta = node.meta[FACTS].value
    if not any(NUMBER in leaf.meta for leaf in leaves if isinstance(leaf, fx.Node)):
        return None
    full = functools.partial(node.graph.call_function, torch.full)
    options: dict[str, Any] = {"dtype": meta.dtype, "device": meta.device}
    if len(set(leaves)) == 1:
        return full((meta.shape, leaves[0]), options)
    if len(leaves) > _MOST:
        return None
    parts = []
    for leaf in leaves:
        parts.append(full(((1,), leaf), options))
        parts[-1].meta = _step_meta(node)
    joined = node.graph.call_function(torch.cat, (parts,))
    joined.meta = _step_meta(node)
    return node.graph.call_method("reshape", (joined, meta.shape))


_SPELLINGS: dict[str, Callable[[fx.Node], fx.Node | None]] = {
    **dict.fromkeys(("pow", "__pow__", "__rpow__"), _spell_power),
    **dict.fromkeys(("add", "add_", "sub", "sub_"), _spell_sum),
    **dict.fromkeys(("lerp", "lerp_"), _spell_lerp),
    **dict.fromkeys(("tensor", "as_tensor"), _spell_tensor),
    "scaled_dot_product_attention": _spell_attention,
    "cross_entropy": _spell_cross_entropy,
}
