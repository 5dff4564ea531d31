"""Floats: an open float goes to compilers in a form that they don't make a constant of.

They get it as a 64-bit tensor, with `item()` behind it. If a float whose value they know is added,
multiplied or compared, they use the tensor again; everywhere else they make the float a constant
(they *fix* it). Some calls can take a float whose value is unknown, as they take numbers out of
tensors. A few more are rewritten with the tensor itself.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from tripwire.reading.tensors import TensorMeta
from tripwire.rulebook.rules import Target, words
from tripwire.tracing.open.opening import ARITHMETIC, NUMBER, NumberInput
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
OWN_DROPOUT = "tripwire_own_dropout"  # in the meta of a module: see spell_floats
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
            name = called_name(one)
            is_named = any(one.kwargs.get(key) is node for key in ("alpha", "value"))
            found = is_named or name.startswith("_foreach_") or name in _TAKE_UNKNOWN
        if found:
            return True
    return False


def find_fixing(graph: fx.Graph) -> set[str]:
    """Names of the calls in which a compiler may have fixed an open float."""
    names: set[str] = set()
    for node in graph.find_nodes(op="placeholder"):
        number: NumberInput | None = node.meta.get(NUMBER)
        if number is not None and number.is_float and not number.symbol.node.expr.free_symbols:
            names.update(map(called_name, iter_takers(node)))
    return names - ARITHMETIC - _TAKE_UNKNOWN


def iter_takers(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that get a result, or an open number that is computed from it."""
    for one in node.users:
        if NUMBER in one.meta:
            yield from iter_takers(one)
        else:
            yield one


def takes_open_float(node: fx.Node) -> bool:
    """Whether an open float is among what a call gets."""
    numbers = (one for one in node.all_input_nodes if NUMBER in one.meta)
    kinds = (float, torch.SymFloat)
    return any(isinstance(one.meta.get("example_value"), kinds) for one in numbers)


def spell_floats(graph: fx.Graph, *, own_dropout: bool = False) -> None:
    """Give calls the tensor of an open float, where they take one for it.

    own_dropout: the compiler draws other random numbers than plain code does.
    """
    for node in list(graph.nodes):
        spell = _SPELLINGS.get(called_name(node)) if node.op.startswith("call_") else None
        if own_dropout and spell is None and spells_dropout(node):
            spell = _spell_dropout
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


def called_name(node: fx.Node) -> str:
    """The name of what a node calls, with the overload of an operator."""
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
    return node.graph.call_method(called_name(node), (owner, scaled))


def _spell_lerp(node: fx.Node) -> fx.Node | None:
    weight = node.args[2] if len(node.args) == 3 else node.kwargs.get("weight")
    tensor = _find_tensor(weight)
    if tensor is None or len(node.args) < 2 or not _has_dtype(node.args[0], _WIDE):
        return None
    start, end = node.args[:2]
    assert isinstance(start, fx.Node)
    part = _make(node, "mul", _make(node, "sub", end, start), _fit(node, tensor, start))
    in_place = called_name(node) == "lerp_"
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


# --- calls that torch has no code for with a tensor in the place of a float --------------------


def _spell_with(function: Callable[..., Any], *names: str) -> Callable[[fx.Node], fx.Node | None]:
    """Let a function compute what the one of its name does, whatever of these is open."""
    known: Callable[..., Any] = getattr(functional, function.__name__.strip("_"))
    signature, target = inspect.signature(known), Target(function, known.__name__)

    def spell(node: fx.Node) -> fx.Node | None:
        if node.target is not known or not _has_dtype(node, _WIDE) or _is_empty(node):
            return None  # of nothing, torch computes nothing: no statistics either
        bound = signature.bind(*node.args, **node.kwargs)
        given = bound.arguments
        opened = [name for name in names if _is_number(given.get(name))]
        if not opened:
            return None
        bound.apply_defaults()
        for name in opened:
            given[name] = _find_tensor(given[name]) or given[name]
        return node.graph.call_function(target, (), dict(given))

    return spell


def _is_empty(node: fx.Node) -> bool:
    meta: TensorMeta = node.meta[FACTS].value
    return 0 in meta.shape


def _is_number(value: object) -> bool:
    return isinstance(value, fx.Node) and NUMBER in value.meta


def _beside(number: Any, tensor: Tensor) -> Tensor:
    """A number as a tensor, in the dtype of another."""
    is_tensor = isinstance(number, Tensor)
    found: Tensor = number if is_tensor else torch.scalar_tensor(number, dtype=torch.float64)
    return found.to(device=tensor.device, dtype=tensor.dtype)


def _weigh(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = input if weight is None else input * weight
    return scaled if bias is None else scaled + bias


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: Any,
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    var, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    return _weigh((input - mean) * torch.rsqrt(var + _beside(eps, var)), weight, bias)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: Any
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    square = input.square().mean(dims, keepdim=True)
    return _weigh(input * torch.rsqrt(square + _beside(eps, square)), weight, None)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: Any
) -> Tensor:
    groups = input.reshape(input.shape[0], num_groups, -1)
    var, mean = torch.var_mean(groups, 2, correction=0, keepdim=True)
    normed = ((groups - mean) * torch.rsqrt(var + _beside(eps, var))).reshape(input.shape)
    shape = (-1, *[1] * (input.dim() - 2))
    return _weigh(
        normed,
        None if weight is None else weight.reshape(shape),
        None if bias is None else bias.reshape(shape),
    )


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: Any,
    eps: Any,
) -> Tensor:
    dims = (0, *range(2, input.dim()))
    shape = (-1, *[1] * (input.dim() - 2))
    if training:
        var, mean = torch.var_mean(input, dims, correction=0)
        if running_mean is not None and running_var is not None:
            count = math.prod(input.shape[dim] for dim in dims)
            for running, now in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
                moved = now.detach() - running
                running.add_(moved * _beside(momentum, moved))
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, var = running_mean, running_var
    scale = torch.rsqrt(var + _beside(eps, var))
    normed = (input - mean.reshape(shape)) * scale.reshape(shape)
    return _weigh(
        normed,
        None if weight is None else weight.reshape(shape),
        None if bias is None else bias.reshape(shape),
    )


def _dropout(input: Tensor, p: Any, training: bool, inplace: bool) -> Tensor:
    """As Inductor has it."""
    share = _beside(p, input)
    kept = torch.rand_like(input) > share
    return torch.mul(kept, input) * (1 / (1 - share))


_spell_dropout = _spell_with(_dropout, "p")


def spells_dropout(node: fx.Node) -> bool:
    """Whether it is a dropout that can be spelled for a compiler which draws numbers of its own."""
    if node.target is not functional.dropout or not _has_dtype(node, _WIDE):
        return False
    given = inspect.signature(functional.dropout).bind(*node.args, **node.kwargs).arguments
    return given.get("training", True) is True and not given.get("inplace", False)


_SPELLINGS: dict[str, Callable[[fx.Node], fx.Node | None]] = {
    **dict.fromkeys(("pow", "__pow__", "__rpow__"), _spell_power),
    **dict.fromkeys(("add", "add_", "sub", "sub_"), _spell_sum),
    **dict.fromkeys(("lerp", "lerp_"), _spell_lerp),
    **dict.fromkeys(("tensor", "as_tensor"), _spell_tensor),
    "scaled_dot_product_attention": _spell_attention,
    "cross_entropy": _spell_cross_entropy,
    "layer_norm": _spell_with(_layer_norm, "eps"),
    "rms_norm": _spell_with(_rms_norm, "eps"),
    "group_norm": _spell_with(_group_norm, "eps"),
    "batch_norm": _spell_with(_batch_norm, "momentum", "eps"),
}
