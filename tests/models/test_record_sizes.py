"""A record's size, for models of many architectures: see docs/design/0008-records.md."""

from __future__ import annotations

import struct

import pytest
import torch
from models.architectures import ARCHITECTURES

import tripwire
from tripwire.recording.format.file import BESIDE, PER_TENSOR, Record
from tripwire.recording.format.nodes import Array, Tensor, TensorView

# Two layers, few tensors, much configuration: they have the least room. The others are slow.
TIGHTEST = {"paligemma", "qwen3-next", "qwen2.5-vl", "llava"}
ROOM = 2000  # the verdict of a call that returned takes 95


def spare(path) -> int:
    """How many bytes the promise leaves, by the tensors and the source in the file."""
    with Record.open(path) as record:
        tensors = record.read("tensors.safetensors")
        data = len(tensors) - 8 - struct.unpack("<Q", tensors[:8])[0]
        count = sum(isinstance(node, Tensor | TensorView | Array) for node in record.table.nodes)
        members = record.members.items()
        source = sum(one.size for name, one in members if name.startswith(("src/", "code/")))
    return data + PER_TENSOR * count + BESIDE + source - path.stat().st_size


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(one, marks=[] if one.name in TIGHTEST else pytest.mark.slow, id=one.name)
        for one in ARCHITECTURES
    ],
)
def test_a_record_is_hardly_larger_than_its_tensors(tmp_path, monkeypatch, architecture) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    with torch.no_grad():
        model, inputs = architecture.build(), architecture.inputs()
        path = tripwire.record_call(tmp_path / "x.rec")(model, **inputs)
    assert spare(path) >= ROOM


def test_the_models_with_the_least_room_are_among_them() -> None:
    assert {one.name for one in ARCHITECTURES} >= TIGHTEST
