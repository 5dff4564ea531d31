"""Keys: everything that compiled code depends on, as one digest.

A graph that can't be described whole has no key, and isn't kept.
"""

from __future__ import annotations

import builtins
import hashlib
import math
import operator
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tripwire.reading.tensors import storage_of
from tripwire.reading.torchstate import sample_backends, sample_torch_state
from tripwire.tracing.state import STATE
from tripwire.values.classes import isinstance

_PLAIN = (bool, int, float, str, type(None))
# Of what becomes of a graph before it is compiled. Raised with every change to that: code that an
# earlier version compiled is then no more found.
_REVISION = 2


def find_key(
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor | None],
    patches: Mapping[str, Any],
) -> str | None:
    """The digest of a graph, its inputs, the options and everything around them."""
    if any(node.op in ("get_attr", "call_module") for node in module.graph.nodes):
        return None  # constants: their values may be in the code
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    if not all(map(_is_known, called)):
        return None
    if not all(type(value) in _PLAIN for value in patches.values()):
        return None
    if not all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in inputs):
        return None
    described = (
        _REVISION,
        module.code,
        _describe_inputs(module, [tensor for tensor in inputs if tensor is not None]),
        sorted(patches.items()),
        _describe_surroundings(inputs),
    )
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _is_known(target: Any) -> bool:
    """Whether a function is torch's or Python's own, and its name in the text says which."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).startswith(("aten", "prims"))  # others may be defined otherwise
    home = getattr(target, "__module__", None) or ""
    if home in ("_operator", "builtins", "math"):
        return any(
            getattr(owner, target.__name__, None) is target for owner in (operator, builtins, math)
        )
    found: Any = sys.modules.get(home) if home.split(".")[0] == "torch" else None
    for part in getattr(target, "__qualname__", "<locals>").split("."):
        found = getattr(found, part, None)
    return found is target or getattr(torch, getattr(target, "__name__", ""), None) is target


def _describe_inputs(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[object]:
    memory: dict[int, int] = {}
    return [
        (
            tuple(tensor.shape),
            tensor.stride() if tensor.layout is torch.strided else None,
            tensor.storage_offset() if tensor.layout is torch.strided else None,
            tensor.data_ptr() % 16 if tensor.layout is torch.strided else None,
            tensor.dtype,
            tensor.device,
            tensor.layout,
            tensor.requires_grad,
            tensor.is_leaf,
            tensor.is_inference(),
            tensor.is_conj(),
            tensor.is_neg(),
            tensor._is_view(),
            memory.setdefault(storage_of(tensor), len(memory)),  # which share it
            bool(node.meta.get(STATE)),
        )
        for tensor, node in zip(inputs, module.graph.find_nodes(op="placeholder"), strict=True)
    ]


def _describe_surroundings(inputs: Sequence[torch.Tensor | None]) -> list[object]:
    import torch._functorch.config
    import torch._inductor.config

    devices = {tensor.device for tensor in inputs if tensor is not None and tensor.is_cuda}
    return [
        torch.__version__,
        torch.version.git_version,
        torch.version.cuda,
        torch.version.hip,
        sys.version,
        platform.platform(),
        platform.processor(),
        torch.backends.cpu.get_cpu_capability(),
        sorted(str(torch.cuda.get_device_properties(device)) for device in devices),
        sample_torch_state(),
        sample_backends(),
        torch._inductor.config.save_config_portable(),
        torch._functorch.config.save_config_portable(),
    ]
