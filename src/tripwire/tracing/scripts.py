"""Scripts: whether the results of a scripted function have sizes that follow from shapes alone.

A TorchScript graph shows all that its function does: a size can only depend on a tensor's
values through an operator that says so, or that takes a number out of a tensor. Operators that
aren't known to do neither make a function opaque.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tripwire.rulebook.rules import SIZED_BY_DATA, is_seeded, words

_STRUCTURE = words(
    "Constant If Loop ListConstruct ListUnpack TupleConstruct TupleUnpack TupleIndex "
    "unchecked_cast RaiseException Uninitialized device dtype layout is_cuda is_cpu min max"
)
_METADATA = words("size dim len numel is_floating_point is_complex __is__ __isnot__")
_ARITHMETIC = words(
    "add sub mul div floordiv remainder neg pow sqrt log exp abs ceil floor round min max eq ne lt "
    "le gt ge __and__ __or__ __xor__ __not__ __is__ __isnot__ Int Float Bool len slice append "
    "__getitem__ __contains__ __range_length __derive_index"
)
_KNOWN: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def has_plain_sizes(function: Any) -> bool:
    """Whether the sizes of what a scripted function returns follow from its arguments' shapes.

    It holds no tensor of its own, either, and draws nothing: what it returns is new, or an
    argument's.
    """
    found = _KNOWN.get(function)
    if found is None:
        found = _KNOWN[function] = _is_plain(function.inlined_graph)
    return found


def follows_from_shapes(function: Any) -> bool:
    """Whether a scripted function makes what it returns of its tensors' shapes alone."""
    return has_plain_sizes(function) and all(
        use.user.kind().partition("::")[2] in _METADATA
        for value in function.inlined_graph.inputs()
        if _has_tensor(value)
        for use in value.uses()
    )


def _is_plain(block: Any) -> bool:
    return all(
        _is_plain_node(node) and all(map(_is_plain, node.blocks())) for node in block.nodes()
    )


def _is_plain_node(node: Any) -> bool:
    space, _, name = node.kind().partition("::")
    makes_tensor = any(map(_has_tensor, node.outputs()))
    if space == "prim":
        return name in _STRUCTURE and not (name == "Constant" and makes_tensor)
    if space != "aten":
        return False
    if makes_tensor:
        return not (_is_sized_by_data(name, node.schema()) or is_seeded(name))
    if any(map(_has_tensor, node.inputs())):
        return name in _METADATA
    return name in _ARITHMETIC


def _has_tensor(value: Any) -> bool:
    return "Tensor" in str(value.type())


def _is_sized_by_data(name: str, schema: str) -> bool:
    overload = schema.partition("(")[0].partition(".")[2] or "default"
    if (name, overload) == ("where", "self"):
        return False
    operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
    tags = [] if operator is None else operator.tags
    return name in SIZED_BY_DATA or torch.Tag.dynamic_output_shape in tags
