"""Arrays: NumPy's arrays and scalars of plain dtypes, each as a blob of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tripwire.recording import nodes
from tripwire.recording.blobs import StoredBlobs
from tripwire.recording.checks import array_item_size
from tripwire.recording.nodes import AnyNode
from tripwire.recording.policy import Omission, Treatment

if TYPE_CHECKING:
    from tripwire.recording.encode import Encoder


def encode_array(encoder: Encoder, value: Any) -> AnyNode:
    """An array or a NumPy scalar. A view becomes an array of its own."""
    scalar = not isinstance(value, np.ndarray)
    array = np.asarray(value)
    if not scalar and type(value) is not np.ndarray:
        return encoder.leave_out(type(value), "a subclass of numpy.ndarray")
    dtype = array.dtype.str
    if array.dtype.hasobject or array.dtype.fields or array_item_size(dtype) is None:
        return encoder.leave_out(type(value), f"an array of {dtype}")
    treatment = encoder.policy.treat(encoder.path(), value)
    if treatment is not Treatment.FULL:
        return _withhold(encoder, array, treatment)
    fortran = bool(array.flags.f_contiguous and not array.flags.c_contiguous)
    blob = encoder.blobs.add_bytes(array.tobytes("F" if fortran else "C"))
    return nodes.Array(blob, dtype, tuple(array.shape), fortran, scalar)


def _withhold(encoder: Encoder, array: Any, treatment: Treatment) -> AnyNode:
    kept = Treatment.SHAPE if treatment is Treatment.STATISTICS else treatment
    why = f"values left out by policy: {kept.label} only"
    encoder.left_out.append(Omission(encoder.path(), why))
    strides = tuple(0 for _ in array.shape)
    return nodes.Withheld(
        kept.label, array.dtype.str, tuple(array.shape), strides, "cpu", "array", None
    )


def build_array(node: nodes.Array, blobs: StoredBlobs) -> Any:
    """The array or scalar of a node that was checked."""
    dtype = np.dtype(node.dtype)
    flat = np.frombuffer(bytearray(blobs.read(node.blob)), dtype=dtype)
    shaped = flat.reshape(node.shape, order="F" if node.fortran else "C")
    return shaped[()] if node.scalar else shaped


def build_withheld_array(node: nodes.Withheld) -> Any:
    """Zeros in the place of an array."""
    return np.zeros(node.shape, dtype=np.dtype(node.dtype))
