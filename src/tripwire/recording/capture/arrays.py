"""Arrays: NumPy's arrays and scalars of plain dtypes, each as a blob of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tripwire.recording.capture.policy import Treatment, redacted
from tripwire.recording.format import nodes
from tripwire.recording.format.blobs import StoredBlobs
from tripwire.recording.format.checks import array_item_size
from tripwire.recording.format.nodes import AnyNode
from tripwire.values.classes import is_heap_type

if TYPE_CHECKING:
    from tripwire.recording.capture.encode import Encoder


def encode_array(encoder: Encoder, value: Any, cls: type) -> AnyNode | ArrayUse:
    """An array or a NumPy scalar. A view becomes an array of its own."""
    if cls is not np.ndarray and is_heap_type(cls):
        return encoder.leave_out(cls, "an instance of a subclass of a NumPy type")
    array = np.asarray(value)
    dtype = array.dtype.str
    if array.dtype.hasobject or array.dtype.fields or array_item_size(dtype) is None:
        return encoder.leave_out(cls, f"an array of {dtype}")
    path = encoder.path()
    treatment = encoder.policy.treat(path, value)
    scalar = cls is not np.ndarray
    use = ArrayUse(array, scalar, path, treatment, (0, 0) if scalar else _find_memory(array))
    encoder.blobs.add(use)
    return use


def _find_memory(array: Any) -> tuple[int, int]:
    """From where to where an array lies."""
    if not array.size:
        return 0, 0
    start: int = array.__array_interface__["data"][0]
    reach = [step * (size - 1) for size, step in zip(array.shape, array.strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return start + low, start + high + int(array.itemsize)


@dataclass(slots=True, eq=False)
class ArrayUse:
    """An array to keep; becomes a node when all tensors are known."""

    array: Any
    scalar: bool
    path: str
    treatment: Treatment
    memory: tuple[int, int]  # of the array itself, not of a copy that was kept
    why: str = "policy"
    blob: int = -1
    shares: bool = False

    @property
    def size(self) -> int:
        return int(self.array.nbytes)

    @property
    def fortran(self) -> bool:
        return bool(self.array.flags.f_contiguous and not self.array.flags.c_contiguous)

    def settle(self) -> None:
        """An array has one user: itself."""

    def form(self) -> tuple[str, tuple[int, ...]]:
        return "U8", (self.size,)

    def paths(self) -> list[str]:
        return [self.path]

    def chunks(self) -> Iterator[memoryview | bytes]:
        yield self.array.tobytes("F" if self.fortran else "C")

    def keep(self) -> None:
        if not self.scalar:
            self.array = self.array.copy(order="K")

    def grow(self) -> None:
        """Nothing more to find."""

    def node(self) -> AnyNode:
        shape, dtype = tuple(self.array.shape), self.array.dtype.str
        if self.treatment is Treatment.FULL:
            return nodes.Array(self.blob, dtype, shape, self.fortran, self.scalar)
        return nodes.Withheld(self.treatment.label, dtype, shape, (), "cpu", "array", None)


def build_array(node: nodes.Array, blobs: StoredBlobs) -> Any:
    """The array or scalar of a node that was checked."""
    dtype = np.dtype(node.dtype)
    flat = np.frombuffer(bytearray(blobs.read(node.blob)), dtype=dtype)
    shaped = flat.reshape(node.shape, order="F" if node.fortran else "C")
    return shaped[()] if node.scalar else shaped


def build_withheld_array(node: nodes.Withheld) -> Any:
    """Zeros in the place of an array."""
    if node.policy == "redacted":
        raise redacted("array", node.shape)
    return np.zeros(node.shape, dtype=np.dtype(node.dtype))
