"""Real models trace whole: outputs of the run, of the graph and of eager are equal.

Branches that a model takes on its inputs (masks tested for padding, experts that got no
token) hold a trace to that outcome. So other inputs are compared only where they lead to the
same branches, and the test says how many models that leaves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.architectures import ARCHITECTURES, Architecture
from support import check_same, quiet_trace, tensors_of

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
# The experts that get tokens are chosen by the tokens, in Python.
BRANCHES_DIFFER = {"switch-transformers", "jetmoe"}
# What the last call found is kept for the next one.
KEEPS_STATE = {"recurrent-gemma", "qwen2-vl", "qwen2.5-vl"}
# Layers are handed to a custom autograd function.
REFUSED = {"reformer"}


def test_the_list_is_long_enough_and_spread() -> None:
    assert len(BY_NAME) == len(ARCHITECTURES) >= 25
    families = {architecture.family for architecture in ARCHITECTURES}
    assert families >= {"text", "vision", "audio", "encoder-decoder", "moe"}


def _seeded(call: Any, inputs: dict[str, torch.Tensor]) -> Any:
    torch.manual_seed(0)  # some draw in eval mode, too
    return call(**inputs)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in REFUSED])
def test_model_traces_whole(name: str) -> None:
    architecture = BY_NAME[name]
    model = architecture.build()
    with torch.no_grad():
        expected = _seeded(model, architecture.inputs())
        torch.manual_seed(0)
        trace = quiet_trace(model, **architecture.inputs())
        trace.check()
        check_same(expected, trace.result)
        check_same(expected, _seeded(trace, architecture.inputs()))
        if name not in BRANCHES_DIFFER:
            others = architecture.inputs(seed=1)
            check_same(_seeded(model, others), _seeded(trace, others))
    assert not trace.effects or name in KEEPS_STATE
    assert {str(i.source).partition("]")[0] for i in trace.inputs} >= {"L['self'"}


TRAINED = ("llama", "bert", "t5", "mixtral", "vit", "wav2vec2")


def _gradients(architecture: Architecture, *, traced: bool) -> list[torch.Tensor | None]:
    model = architecture.build()
    model.train(False)
    call = quiet_trace(model, **architecture.inputs()) if traced else model
    outputs = [t for t in tensors_of(call(**architecture.inputs(seed=1))) if t.requires_grad]
    total = sum((t.double() * t.double()).sum() for t in outputs)
    return list(torch.autograd.grad(total, list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_every_parameter_equal_eagers(name: str) -> None:
    plain = _gradients(BY_NAME[name], traced=False)
    traced = _gradients(BY_NAME[name], traced=True)
    assert any(g is not None for g in plain)
    for left, right in zip(plain, traced, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-6)


def test_scopes_and_lines_of_a_36_layer_model() -> None:
    config = transformers.Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=36,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_cache=False,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        trace = quiet_trace(model, input_ids=tokens)
        check_same(model(input_ids=tokens).logits, trace(input_ids=tokens).logits)
    scopes = {row.scope for row in trace}
    assert "model.layers.35.self_attn.q_proj" in scopes
    places = [row.where.place for row in trace if row.node.op.startswith("call")]
    assert all(place is not None and not place.library for place in places)
    assert any(place.file.endswith("modeling_qwen3.py") for place in places)
    assert any(
        str(i.source) == "L['self'].model.layers[35].mlp.up_proj.weight" for i in trace.inputs
    )
