"""torch's own values: tensors with all that hangs on them, dtypes, devices, sizes, generators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tripwire.recording import nodes
from tripwire.recording.instances import named
from tripwire.recording.looks import is_kind
from tripwire.recording.nodes import AnyNode
from tripwire.recording.policy import Omission
from tripwire.recording.tensors import Use, find_refusal, undisturbed, use_tensor
from tripwire.values.classes import isinstance
from tripwire.values.contents import own_dict

if TYPE_CHECKING:
    from tripwire.recording.encode import Draft, Encoder

# By id: a metaclass may have a hash of its own.
_VALUES = {
    id(torch.dtype): "dtype",
    id(torch.device): "device",
    id(torch.layout): "layout",
    id(torch.memory_format): "memory_format",
    id(torch.Size): "size",
}


def encode_torch(encoder: Encoder, value: Any, cls: type) -> AnyNode | Draft | None:
    """A node for anything of torch's that is data; None for what isn't."""
    if is_kind(cls, torch.Tensor):
        with undisturbed():
            return _encode_tensor(encoder, value, cls)
    kind = _VALUES.get(id(cls))
    if kind == "size":
        return nodes.TorchValue(kind, ",".join(str(int(size)) for size in tuple.__iter__(value)))
    if kind is not None:
        return nodes.TorchValue(kind, str(value).removeprefix("torch."))
    if cls is torch.Generator:
        state = encoder.reference(value.get_state(), ".get_state()")
        return nodes.Generator(str(value.device), state)
    return None


def _encode_tensor(encoder: Encoder, tensor: torch.Tensor, cls: type) -> AnyNode | Draft:
    reason = find_refusal(tensor)
    if reason is not None:
        return encoder.leave_out(cls, reason)
    path = encoder.path()
    use = use_tensor(encoder.blobs, tensor, path, encoder.strictness(tensor))
    if isinstance(use, Use) and use.kind == "graph":
        encoder.left_out.append(Omission(path, "its autograd history: it comes back as a result"))
    grad = tensor.grad if tensor.is_leaf else None
    state = named(own_dict(tensor) or {})
    subclass = cls is not torch.Tensor and cls is not torch.nn.Parameter
    if grad is None and not state and not subclass:
        return use
    if grad is not None and isinstance(use, Use):
        encoder.treat_alike(grad, use.treatment)
    encoder.hold_attributes(("grad", "class", *state))
    return nodes.TensorExtras(
        encoder.place(use),
        encoder.slot(grad, ".grad"),
        encoder.slot(cls, ".__class__") if subclass else None,
        tuple(state),
        tuple(encoder.slot(value, f".{name}") for name, value in state.items()),
    )


def build_torch_value(node: nodes.TorchValue) -> object:
    """A dtype, device, layout, memory format or size; ValueError for a text that is none."""
    match node.kind:
        case "size":
            sizes = [int(size) for size in node.text.split(",")] if node.text else []
            return torch.Size(sizes)
        case "device":
            return torch.device(node.text)
        case "dtype" | "layout" | "memory_format":
            found = vars(torch).get(node.text)
            if type(found) is getattr(torch, node.kind):
                return found
    raise ValueError(f"{node.kind} {node.text!r}")


def build_generator(device: torch.device, state: torch.Tensor) -> torch.Generator:
    """A generator that goes on from a state."""
    made = torch.Generator(device)
    made.set_state(state)
    return made
