"""A record's size, for models of many architectures: see docs/design/0008-records.md."""

from __future__ import annotations

import struct

import pytest
import torch
from architectures import ARCHITECTURES

import tripwire
from tripwire.recording.format import BESIDE, PER_TENSOR, Record
from tripwire.recording.nodes import Array, Tensor, TensorView

# Two layers, and much configuration. With six layers they have room to spare.
SHALLOW = {
    "blip-2", "deepseek-v3", "gemma3", "hubert", "idefics3", "jamba", "llava", "mixtral",
    "paligemma", "qwen2-moe", "qwen2-vl", "qwen2.5-vl", "qwen3-moe", "qwen3-next", "sew",
    "unispeech-sat", "wav2vec2", "wav2vec2-masked", "wavlm",
}  # fmt: skip


def spare(path) -> int:
    """How many bytes the promise leaves, by the tensors and the source in the file."""
    with Record.open(path) as record:
        tensors = record.read("tensors.safetensors")
        data = len(tensors) - 8 - struct.unpack("<Q", tensors[:8])[0]
        count = sum(isinstance(node, Tensor | TensorView | Array) for node in record.table.nodes)
        members = record.members.items()
        source = sum(one.size for name, one in members if name.startswith(("src/", "code/")))
    return data + PER_TENSOR * count + BESIDE + source - path.stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_a_record_is_hardly_larger_than_its_tensors(tmp_path, monkeypatch, architecture) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    with torch.no_grad():
        model, inputs = architecture.build(), architecture.inputs()
        path = tripwire.save_record(tmp_path / "x.rec", model, **inputs)
    least = -3000 if architecture.name in SHALLOW else 100  # room for the verdict
    assert spare(path) >= least
