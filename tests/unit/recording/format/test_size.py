"""A record's size: the tensors' bytes, 64 bytes for each tensor, 8 KB, and the source."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import tripwire
from tripwire.recording.format.file import Record


def spare(path: Path, unique: int, tensors: int) -> int:
    """How many bytes the promise leaves, by what the file itself says of its source."""
    with zipfile.ZipFile(path) as file:
        names = [name for name in file.namelist() if name.startswith(("src/", "code/"))]
        source = sum(file.getinfo(name).file_size for name in names)
    return unique + 64 * tensors + 8192 + source - os.path.getsize(path)


def count_tensors(*values: object) -> tuple[int, int]:
    """Bytes and number of the tensors of modules and lists; each storage once."""
    found: dict[int, int] = {}
    tensors = 0
    for value in values:
        for tensor in (
            (*value.parameters(), *value.buffers()) if isinstance(value, nn.Module) else value
        ):
            for one in (tensor, tensor.grad) if tensor.is_leaf else (tensor,):
                if one is not None:
                    tensors += 1
                    storage = one.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values()), tensors


def record(tmp_path: Path, monkeypatch, call, *args: object) -> Path:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    return tripwire.record_call(tmp_path / "x.rec")(call, *args)


SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2, 4, 36])
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_record_of_a_model_of_transformers_has_room_to_spare(
    tmp_path, monkeypatch, name, layers
) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SMALL, num_hidden_layers=layers)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    tokens = torch.randint(0, 64, (1, 8))
    monkeypatch.delenv("TRIPWIRE_RECORD_CHECK", raising=False)
    with torch.no_grad():
        path = tripwire.record_call(tmp_path / "x.rec")(model, tokens)
    assert tripwire.load_record(path).manifest.verdict.outcome == "reproduces"
    assert spare(path, *count_tensors(model, [tokens])) >= 0


def test_a_record_of_an_encoder_has_room_to_spare(tmp_path, monkeypatch) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    x = torch.randn(1, 3, 16)
    path = record(tmp_path, monkeypatch, model, x)
    assert spare(path, *count_tensors(model, [x])) >= 512


def test_a_record_of_a_model_with_gradients_has_room_to_spare(tmp_path, monkeypatch) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(100)))
    x = torch.randn(2, 8)
    model(x).sum().backward()
    path = record(tmp_path, monkeypatch, model, x)
    unique, tensors = count_tensors(model, [x])
    assert tensors == 401
    assert spare(path, unique, tensors) >= 512


def test_parameters_that_are_views_of_one_storage(tmp_path, monkeypatch) -> None:
    flat = torch.randn(300 * 64)
    model = nn.ParameterList(
        nn.Parameter(flat[i * 64 : i * 64 + 64].view(8, 8)) for i in range(300)
    )
    path = record(tmp_path, monkeypatch, _add_all, model)
    assert spare(path, *count_tensors(list(model))) >= 512


def _add_all(model):
    return sum(p.sum() for p in model)


def test_each_blob_has_an_entry_as_long_as_there_is_room(tmp_path, monkeypatch) -> None:
    few = record(tmp_path, monkeypatch, _add_all, [torch.randn(i + 1) for i in range(60)])
    many = record(tmp_path, monkeypatch, _add_all, [torch.randn(i + 1) for i in range(1000)])
    for path, least in ((few, 60), (many, 64)):
        with Record.open(path) as opened:
            head = opened.read("tensors.safetensors")
        assert head.count(b'"dtype"') >= least
    assert spare(many, sum(4 * (i + 1) for i in range(1000)), 1000) >= 512


CLASS = """
class Block{0}(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = {0}.5

    def mix(self, x):
        return helper{0}(x) * self.scale + SCALE

    def forward(self, x):
        return self.mix(self.inner(x))


def helper{0}(x, alpha=0.5):
    return torch.relu(x) * alpha + {0}
"""


def test_a_model_of_many_classes_and_functions(tmp_path, monkeypatch) -> None:
    source = "import torch\nfrom torch import nn\n\nSCALE = 2.0\n"
    (tmp_path / "many_blocks.py").write_text(source + "".join(map(CLASS.format, range(40))))
    monkeypatch.syspath_prepend(tmp_path)
    import many_blocks

    model = nn.Sequential(*(getattr(many_blocks, f"Block{i}")(4) for i in range(40)))
    x = torch.randn(2, 4)
    path = record(tmp_path, monkeypatch, model, x)
    assert spare(path, *count_tensors(model, [x])) >= 512
    assert torch.equal(tripwire.replay(path, trust=True), model(x))


def test_a_call_through_many_functions(tmp_path, monkeypatch) -> None:
    source = "def step0(x):\n    return x + 1\n"
    source += "".join(f"def step{i}(x):\n    return step{i - 1}(x) * {i}\n" for i in range(1, 250))
    (tmp_path / "many_steps.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import many_steps

    x = torch.randn(3)
    path = record(tmp_path, monkeypatch, many_steps.step249, x)
    assert spare(path, *count_tensors([x])) >= 512
    assert torch.equal(tripwire.replay(path, trust=True), many_steps.step249(x))
