"""Torchvalues: the tensors, dtypes and generators of a record, made again.

Nothing here runs a tensor's Python: no torch function, no dispatch of a subclass.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tripwire.recording.format import nodes
from tripwire.recording.format.blobs import ITEM_SIZES, TORCH_NAMES, StoredBlobs
from tripwire.recording.format.nodes import default_strides
from tripwire.values.classes import isinstance
from tripwire.values.contents import own_dict


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No mode, no subclass and no autograd sees the torch calls made here."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def dtype_name(dtype: torch.dtype) -> str:
    """As torch prints it, without the `torch.`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(storage: torch.UntypedStorage, first: int, size: int) -> memoryview:
    """A CPU storage's own memory. The storage must outlive it."""
    kind = ctypes.c_ubyte * size
    return memoryview(kind.from_address(storage.data_ptr() + first)).cast("B")


class TensorBuilder:
    """Makes a record's tensors again: one storage per blob, on the device where there is one."""

    def __init__(self, blobs: StoredBlobs) -> None:
        self._blobs = blobs
        self._storages: dict[tuple[int, torch.device], torch.UntypedStorage] = {}

    def build(self, node: nodes.Tensor | nodes.TensorView) -> torch.Tensor:
        """The tensor of a node that was checked against the blobs."""
        with undisturbed():
            if isinstance(node, nodes.Tensor):
                blob = self._blobs[node.blob]
                dtype, shape = TORCH_NAMES[blob.dtype], blob.shape
                device, stride, offset = present_device(node.device), default_strides(shape), 0
                conj = neg = False
            else:
                dtype, shape, stride = node.dtype, node.shape, node.strides
                device = present_device(node.device)
                offset = node.offset - node.first // ITEM_SIZES[dtype]
                if 0 in shape:
                    offset = 0
                conj, neg = node.conjugated, node.negated
            storage = self._storage(node.blob, device)
            made = _empty(dtype, device)
            made.set_(storage, offset, shape, stride)
            made = torch._conj(made) if conj else made
            made = torch._neg_view(made) if neg else made
            return finish(made, node.kind)

    def _storage(self, number: int, device: torch.device) -> torch.UntypedStorage:
        found = self._storages.get((number, device))
        if found is None:
            size = self._blobs[number].size
            found = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
            if size:
                self._blobs.read_into(number, bytes_of(found, 0, size))
            if device.type != "cpu":
                moved: Any = found
                found = moved.to(device=device)
            self._storages[number, device] = found
        return found


def _empty(dtype: str, device: torch.device) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is said to be experimental
        return torch.empty(0, dtype=getattr(torch, dtype), device=device)


def present_device(text: str) -> torch.device:
    """The device of that name, or the CPU where this machine has none such."""
    try:
        device = torch.device(text)
    except RuntimeError:
        return torch.device("cpu")
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    here = torch.accelerator.current_accelerator()
    fits = here is not None and here.type == device.type
    return device if fits and (device.index or 0) < torch.accelerator.device_count() else _CPU


_CPU = torch.device("cpu")


class _Graft(torch.autograd.Function):
    """Gives a tensor a history, so that autograd takes it for the result of an operation."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return data.data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        return None, None


def finish(made: torch.Tensor, kind: str) -> torch.Tensor:
    """A plain tensor takes its part in autograd."""
    match kind:
        case "param" | "frozen":
            return torch.nn.Parameter(made, requires_grad=kind == "param")
        case "grad":
            return made.requires_grad_()
        case "graph":
            anchor = torch.zeros((), requires_grad=True)
            with torch.enable_grad():
                return _Graft.apply(anchor, made)  # type: ignore[no-any-return, no-untyped-call]
        case "inference":
            with torch.inference_mode():
                storage, offset = made.untyped_storage(), made.storage_offset()
                inner = _empty(dtype_name(made.dtype), made.device)
                return inner.set_(storage, offset, made.shape, made.stride())
        case _:
            return made


def dress(tensor: object, cls: object) -> object:
    """A tensor as an instance of a subclass; its constructor doesn't run."""
    if not isinstance(cls, type) or not isinstance(tensor, torch.Tensor):
        return tensor  # in a view classes and left-out tensors are descriptions
    if not issubclass(cls, torch.Tensor):
        raise ValueError(f"{cls.__name__} is no class of tensors")
    with undisturbed():
        needs = tensor.requires_grad
        plain = tensor.detach() if needs else tensor
        return torch.Tensor._make_subclass(cls, plain, needs)


def attach(tensor: object, grad: object, attributes: dict[str, object]) -> None:
    """Hang a gradient and attributes on a tensor."""
    if not isinstance(tensor, torch.Tensor):
        return
    with undisturbed():
        if isinstance(grad, torch.Tensor):
            try:
                tensor.grad = grad
            except RuntimeError as error:
                raise ValueError(str(error)) from None
    state = own_dict(tensor)
    if state is not None:
        state.update(attributes)


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


def build_generator(device: str, state: Any) -> torch.Generator:
    """A generator that goes on from a state."""
    return torch.Generator(present_device(device)).set_state(state)


# --- stand-ins for tensors without their values ---


def build_withheld(node: nodes.Withheld) -> torch.Tensor:
    """A stand-in for a tensor without its values."""
    device = torch.device("meta") if node.device == "meta" else present_device(node.device)
    dtype: torch.dtype = getattr(torch, node.dtype)
    with undisturbed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is said to be experimental
        made = torch.empty_strided(node.shape, node.stride, dtype=dtype, device=device)
        if device.type != "meta":
            _fill_like(made, node.statistics)
        return finish(made, node.kind)


def _fill_like(made: torch.Tensor, statistics: tuple[float, ...] | None) -> None:
    """Fill all of a new tensor's storage; elements may lie on one another."""
    count = made.untyped_storage().nbytes() // made.dtype.itemsize
    flat = made.as_strided((count,), (1,), 0)
    if statistics is None:
        flat.zero_()
    elif made.is_complex():
        flat.copy_(torch.view_as_complex(imitate(2 * count, statistics).reshape(count, 2)))
    else:
        flat.copy_(imitate(count, statistics))


def imitate(count: int, statistics: tuple[float, ...]) -> torch.Tensor:
    """Values with those statistics, the same each time, in no order."""
    low, high, mean, deviation, nans, highs, lows = statistics
    special = [(math.nan, int(nans)), (math.inf, int(highs)), (-math.inf, int(lows))]
    finite = max(count - sum(n for _, n in special), 0)
    values = torch.empty(count, dtype=torch.float64)
    values[:finite] = _spread(finite, low, high, mean, deviation)
    position = finite
    for value, many in special:
        values[position : position + many] = value
        position += many
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return values[shuffled]


def _spread(count: int, low: float, high: float, mean: float, deviation: float) -> torch.Tensor:
    """One value at each bound and two levels between that give the mean and the deviation."""
    values = torch.full((count,), mean, dtype=torch.float64)
    if count < 3 or deviation == 0:
        if count == 2:
            values[:] = torch.tensor([low, high], dtype=torch.float64)
        return values
    inner = count - 2
    centre = (count * mean - low - high) / inner
    squares = count * deviation**2 - (low - mean) ** 2 - (high - mean) ** 2
    variance = max(squares / inner - (centre - mean) ** 2, 0.0)
    down, up = max(centre - low, 0.0), max(high - centre, 0.0)
    # The share p of the lower level: its distance is sqrt(variance * (1 - p) / p).
    least = variance / (variance + down**2) if variance else 0.5
    most = up**2 / (variance + up**2) if variance else 0.5
    below = min(max(round((least + most) / 2 * inner), 1), inner - 1) if inner > 1 else 0
    share = below / inner
    step_down = math.sqrt(variance * (1 - share) / share) if below else 0.0
    step_up = math.sqrt(variance * share / (1 - share)) if below else 0.0
    values[0], values[1] = low, high
    values[2 : 2 + below] = centre - step_down
    values[2 + below :] = centre + step_up
    return values.clamp_(low, high)
