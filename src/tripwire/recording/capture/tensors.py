"""Tensors: bytes by storage, everything else by tensor.

Each storage becomes one blob, trimmed to what the recorded tensors of it use, so what shared
memory shares it again. What is kept and where it lies is settled when all tensors are known.
Nothing here runs a tensor's Python: no torch function, no dispatch of a subclass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tripwire.reading.tensors import Copies, memory_of
from tripwire.recording.capture.data import named
from tripwire.recording.capture.origin import Blobs, Treatment
from tripwire.recording.format import nodes
from tripwire.recording.format.blobs import ITEM_SIZES, STORED_NAMES
from tripwire.recording.format.container import CHUNK
from tripwire.recording.format.manifest import Omission
from tripwire.recording.format.nodes import AnyNode, Statistics, TensorKind, default_strides
from tripwire.recording.format.torchvalues import bytes_of, dtype_name, undisturbed
from tripwire.values.classes import is_kind, isinstance
from tripwire.values.contents import own_dict

if TYPE_CHECKING:
    from tripwire.recording.capture.encode import Draft, Encoder


_ALIGNMENT = 16  # of trimmed starts: the largest element


def extent(shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> tuple[int, int]:
    """The elements of a storage that a view spans: the first, and one past the last."""
    if 0 in shape:
        return 0, 0
    span = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset, offset + span + 1


def find_refusal(tensor: torch.Tensor) -> str | None:
    """Why a tensor's bytes can't be kept; None where they can."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside a torch.func transform"
    if torch._is_functional_tensor(tensor):
        return "a functionalised tensor"
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    if dispatch is not torch._C._disabled_torch_dispatch_impl:
        return "a tensor subclass with its own __torch_dispatch__: its bytes are in other tensors"
    if tensor.is_quantized:
        return "a quantised tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor with the layout {tensor.layout}"
    if dtype_name(tensor.dtype) not in ITEM_SIZES:
        return f"a tensor of {tensor.dtype}"
    return None if tensor.device.type == "meta" else _find_missing_bytes(tensor)


def _find_missing_bytes(tensor: torch.Tensor) -> str | None:
    """Storages can be freed under their tensors; reading there would end the process."""
    storage = tensor.untyped_storage()
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    end = extent(shape, stride, int(tensor.storage_offset()))[1] * tensor.dtype.itemsize
    if end > storage.nbytes() or (end and not storage.data_ptr()):
        return "a tensor whose memory was freed"
    return None


def kind_of(tensor: torch.Tensor) -> TensorKind:
    """The word for a tensor's part in autograd."""
    if type(tensor) is torch.nn.Parameter:
        return "param" if tensor.requires_grad else "frozen"
    if tensor.is_inference():
        return "inference"
    if not tensor.requires_grad:
        return ""
    return "grad" if tensor.is_leaf else "graph"


# --- collecting ---


@dataclass(slots=True, eq=False)
class HeldStorage:
    """A storage that recorded tensors use."""

    storage: torch.UntypedStorage
    uses: list[TensorUse] = field(default_factory=list)
    treatment: Treatment = Treatment.FULL
    why: str = "policy"
    first: int = 0
    size: int = 0
    blob: int = -1
    shares: bool = True
    whole: TensorUse | None = None

    @property
    def memory(self) -> tuple[int, int]:
        start = self.storage.data_ptr()
        return start, start + self.storage.nbytes()

    def settle(self) -> None:
        """Trim to the bytes in use; see whether one tensor is all of them."""
        self.treatment = max(use.treatment for use in self.uses)
        spans = [use.byte_extent() for use in self.uses]
        spans = [span for span in spans if span[1] > span[0]]
        if spans:
            self.first = min(span[0] for span in spans) // _ALIGNMENT * _ALIGNMENT
            self.size = max(span[1] for span in spans) - self.first
        for use in self.uses:
            if self.first == 0 and use.is_plain() and use.bytes() == self.size:
                self.whole = use
                break

    def form(self) -> tuple[str, tuple[int, ...]]:
        if self.whole is None:
            return "U8", (self.size,)
        return STORED_NAMES[self.whole.dtype], self.whole.shape

    def paths(self) -> list[str]:
        return [use.path for use in self.uses]

    def chunks(self) -> Iterator[memoryview | bytes]:
        if not self.size:
            return
        storage = self.storage
        if storage.device.type != "cpu":
            with undisturbed():
                storage = storage.cpu()  # type: ignore[no-untyped-call]
        memory = bytes_of(storage, self.first, self.size)
        for start in range(0, self.size, CHUNK):
            yield memory[start : start + CHUNK]

    def keep(self) -> None:
        """Whoever writes to a tensor is seen: see `put_back`."""


@dataclass(slots=True, eq=False)
class TensorUse:
    """A tensor, over a storage. Becomes a node when all tensors are known."""

    held: HeldStorage
    tensor: torch.Tensor
    path: str
    treatment: Treatment
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: str
    kind: TensorKind
    conjugated: bool
    negated: bool

    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    def byte_extent(self) -> tuple[int, int]:
        low, high = extent(self.shape, self.stride, self.offset)
        return low * ITEM_SIZES[self.dtype], high * ITEM_SIZES[self.dtype]

    def is_plain(self) -> bool:
        return (
            self.offset == 0
            and not (self.conjugated or self.negated)
            and self.dtype in STORED_NAMES
            and self.stride == default_strides(self.shape)
        )

    def grow(self) -> None:
        """Nothing more to find."""

    def node(self) -> nodes.AnyNode:
        held = self.held
        if held.treatment is not Treatment.FULL:
            return self._withheld(held.treatment)
        whole = held.whole
        if whole is not None and self.is_plain():
            if (self.dtype, self.shape) == (whole.dtype, whole.shape):
                return nodes.Tensor(held.blob, self.kind, self.device)
        return nodes.TensorView(
            held.blob,
            self.shape,
            self.offset,
            self.kind,
            self.dtype,
            None if self.stride == default_strides(self.shape) else self.stride,
            held.first,
            self.device,
            self.conjugated,
            self.negated,
        )

    def _withheld(self, treatment: Treatment) -> nodes.Withheld:
        statistics = None
        if treatment is Treatment.STATISTICS:
            with undisturbed():
                statistics = measure(self.tensor)
        return nodes.Withheld(
            treatment.label, self.dtype, self.shape, self.stride, self.device, self.kind, statistics
        )


def use_tensor(
    blobs: Blobs, tensor: torch.Tensor, path: str, at_least: Treatment
) -> TensorUse | nodes.Withheld:
    """Keep a tensor: its node follows when all are known. Call it `undisturbed`."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    dtype, device, kind = dtype_name(tensor.dtype), str(tensor.device), kind_of(tensor)
    if device == "meta":  # no values to keep: its shape is all of it
        return nodes.Withheld("shape", dtype, shape, stride, device, kind, None)
    treatment = max(at_least, blobs.policy.treat(path, tensor))  # the user's, and may raise
    held = _find_held(blobs, tensor.untyped_storage())
    offset, conj, neg = int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
    use = TensorUse(
        held, tensor, path, treatment, dtype, shape, stride, offset, device, kind, conj, neg
    )
    held.uses.append(use)
    return use


def put_back(blobs: Blobs, copies: Copies) -> None:
    """Use bytes from before a call for the storages that it changed."""
    for memory, copy in copies.items():
        held = blobs.find(memory)
        if isinstance(held, HeldStorage):
            held.storage = copy.copied


def _find_held(blobs: Blobs, storage: torch.UntypedStorage) -> HeldStorage:
    key = memory_of(storage)
    held = blobs.find(key)
    if not isinstance(held, HeldStorage):
        held = HeldStorage(storage)
        blobs.add_once(key, held)
    if storage.nbytes() > held.storage.nbytes():
        held.storage = storage
    return held


# --- statistics ---


def measure(tensor: torch.Tensor) -> Statistics | None:
    """Lowest, highest, mean and deviation of the finite values; counts of nan, inf and -inf.

    Complex numbers are measured by their parts, as one row of reals.
    """
    if not tensor.numel():
        return None
    values = tensor.detach().resolve_conj().resolve_neg().cpu()
    if values.is_complex():
        values = torch.view_as_real(values.to(torch.complex128))
    values = values.to(torch.float64)
    finite = values[torch.isfinite(values)]
    counts = (
        float(torch.isnan(values).sum()),
        float((values == math.inf).sum()),
        float((values == -math.inf).sum()),
    )
    if not finite.numel():
        return (0.0, 0.0, 0.0, 0.0, *counts)
    low, high, mean = float(finite.min()), float(finite.max()), float(finite.mean())
    deviation = float(finite.std(correction=0))
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        mean, deviation = low / 2 + high / 2, 0.0
    return (low, high, mean, deviation, *counts)


# --- torch's own values ---


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
    if isinstance(use, TensorUse) and use.kind == "graph":
        why = "its autograd history isn't kept: at replay gradients end here"
        encoder.left_out.append(Omission(path, why))
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        encoder.left_out.append(Omission(path, "its hooks aren't kept: they don't run at replay"))
    grad = tensor.grad if tensor.is_leaf else None
    state = named(own_dict(tensor) or {})
    subclass = cls is not torch.Tensor and cls is not torch.nn.Parameter
    if grad is None and not state and not subclass:
        return use
    if grad is not None and isinstance(use, TensorUse):
        encoder.treat_alike(grad, use.treatment)
    encoder.hold_attributes(("grad", "class", *state))
    return nodes.TensorExtras(
        encoder.place(use),
        encoder.slot(grad, ".grad"),
        encoder.slot(cls, ".__class__") if subclass else None,
        tuple(state),
        tuple(encoder.slot(value, f".{name}") for name, value in state.items()),
    )
