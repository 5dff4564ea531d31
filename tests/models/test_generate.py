"""`generate` with a compiled model: eager's tokens, one entry for the prompt and one for decoding.

A cache of fixed size is an argument that every step writes to: lengths and positions are tensors,
so that no step differs from the next for Python. A cache that grows has open sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.modeltwins import BY_NAME
from torch import nn

import tripwire

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STATIC = {"cache_implementation": "static", "disable_compile": True, "use_cache": True}
NEW = 8


def compile_forward(model: Any, backend: str = "eager", **options: Any) -> Any:
    """As `transformers` does it: the method of one model, replaced."""
    model.forward = tripwire.compile(model.forward, backend=backend, **options)
    return model, model.forward


def compile_model(model: Any, backend: str = "eager", **options: Any) -> Any:
    compiled = tripwire.compile(model, backend=backend, **options)
    return compiled, compiled


WAYS: dict[str, Callable[..., Any]] = {"forward": compile_forward, "model": compile_model}


def make(name: str) -> Any:
    model: Any = BY_NAME[name].build()
    model.generation_config.eos_token_id = None  # all texts get as long as they may
    model.generation_config.decoder_start_token_id = 1
    return model


def prompt(seed: int, length: int = 7, batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 100, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate(model: nn.Module, seed: int = 0, **given: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    tokens: torch.Tensor = model.generate(**copy.deepcopy(given))  # type: ignore[operator]
    return tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_static_cache_needs_one_entry_for_the_prompt_and_one_for_all_steps(
    name: str, way: str
) -> None:
    plain = make(name)
    model, compiled = WAYS[way](make(name), fullgraph=True)
    for seed in range(3):
        given = {**prompt(seed), **STATIC, "max_new_tokens": NEW, "do_sample": False}
        assert torch.equal(generate(plain, **given), generate(model, **given))
    statistics = compiled.statistics()
    assert (statistics.traces, statistics.entries, statistics.refusals) == (2, 2, 0)
    assert statistics.hits == 3 * NEW - 2


@pytest.mark.parametrize("way", WAYS)
def test_sampled_tokens_are_eagers_too(way: str) -> None:
    plain = make("llama")
    model, compiled = WAYS[way](make("llama"), fullgraph=True)
    sampled = {"do_sample": True, "top_k": 20, "temperature": 1.3, "max_new_tokens": NEW}
    texts = set()
    for seed in range(3):
        given = {**prompt(0), **STATIC, **sampled}
        expected, got = generate(plain, seed, **given), generate(model, seed, **given)
        assert torch.equal(expected, got)
        texts.add(tuple(got.flatten().tolist()))
    assert len(texts) == 3
    assert compiled.statistics().traces == 2


def test_longer_prompts_have_entries_of_their_own_and_share_the_steps() -> None:
    # The first shadow's imports register abstract classes, which no entry made before survives.
    tripwire.compile(torch.sin, backend="eager", dynamic=True)(torch.ones(2))
    plain = make("llama")
    model, compiled = compile_forward(make("llama"), fullgraph=True)
    for length in (9, 5, 9, 5):
        given = {**prompt(1, length), **STATIC, "max_length": 16, "do_sample": False}
        assert torch.equal(generate(plain, **given), generate(model, **given))
    assert compiled.statistics().traces == 3


def test_prompts_with_padding_get_eagers_tokens() -> None:
    plain = make("llama")
    model, compiled = compile_forward(make("llama"), fullgraph=True)
    for _ in range(3):
        given = {**prompt(2), **STATIC, "max_new_tokens": NEW, "do_sample": False}
        given["attention_mask"][0, :3] = 0
        assert torch.equal(generate(plain, **given), generate(model, **given))
    assert compiled.statistics().traces <= NEW  # the mask grows with each step


def test_a_write_between_two_texts_is_seen() -> None:
    plain = make("llama")
    model, compiled = compile_forward(make("llama"), fullgraph=True)
    given = {**prompt(3), **STATIC, "max_new_tokens": NEW, "do_sample": False}
    texts = []
    for factor in (1.0, -1.0, 3.0):
        for each in (plain, model):
            with torch.no_grad():
                each.lm_head.weight.mul_(factor)
                each.model.norm.variance_epsilon *= 10
        expected, got = generate(plain, **given), generate(model, **given)
        assert torch.equal(expected, got)
        texts.append(got)
    assert not torch.equal(texts[0], texts[1])
    assert compiled.statistics().traces == 4  # the prompt's and a token's; again with it open


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 2},
    "sampled": {"do_sample": True, "top_k": 20},
    "padded": {"do_sample": False},
}


@pytest.mark.parametrize(
    ("name", "way", "how", "backend"),
    [
        ("llama", "forward", "greedy", "aot_eager"),
        ("llama", "model", "sampled", "eager"),
        ("qwen3", "forward", "padded", "eager"),
        ("gpt2", "forward", "beams", "eager"),
        pytest.param("qwen3", "forward", "padded", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_growing_cache_needs_four_traces_for_prompts_of_all_lengths(
    name: str, way: str, how: str, backend: str
) -> None:
    plain = make(name)
    model, compiled = WAYS[way](make(name), backend)
    lengths = (7, 5, 9, 12)
    for seed, length in enumerate(lengths):
        given = {**prompt(seed, length), **HOW[how], "use_cache": True, "max_new_tokens": 3 * NEW}
        if how == "padded":
            given["attention_mask"][0, : length // 3] = 0
        assert torch.equal(generate(plain, seed, **given), generate(model, seed, **given))
    told = tripwire.explain(compiled)
    assert told.traces <= 4
    assert told.hits >= 0.95 * told.calls
    assert told.calls == len(lengths) * 3 * NEW


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "phi3", "mixtral", "t5"])
def test_other_architectures_decode_with_a_static_cache(name: str) -> None:
    plain = make(name)
    model, compiled = compile_forward(make(name))
    for seed in range(2):
        given = {**prompt(seed), **STATIC, "max_new_tokens": NEW, "do_sample": False}
        assert torch.equal(generate(plain, **given), generate(model, **given))
    statistics = compiled.statistics()
    assert statistics.traces <= 4
    assert statistics.refusals == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_sliding_window_counts_in_python_and_needs_an_entry_for_each_position(name: str) -> None:
    plain = make(name)
    model, compiled = compile_forward(make(name), fullgraph=True)
    for seed in range(2):
        given = {**prompt(seed), **STATIC, "max_new_tokens": NEW, "do_sample": False}
        assert torch.equal(generate(plain, **given), generate(model, **given))
    statistics = compiled.statistics()
    assert (statistics.traces, statistics.hits) == (NEW, NEW)


@pytest.mark.slow
def test_inductor_decodes_with_a_static_cache() -> None:
    plain, model = make("llama"), make("llama")
    # Its first import registers abstract classes, which no entry made before survives.
    tripwire.compile(torch.sin, backend="inductor")(torch.ones(2))
    model.forward = tripwire.compile(model.forward, backend="inductor", fullgraph=True)
    for seed in range(2):
        given = {**prompt(seed), **STATIC, "max_new_tokens": NEW, "do_sample": False}
        assert torch.equal(generate(plain, **given), generate(model, **given))
    assert model.forward.statistics().traces == 2
