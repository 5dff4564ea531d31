"""Compiled models of `transformers` return what plain ones return, to the bit, whatever is written.

Slow: all architectures. test_compiled_models.py has a few of them, and models of our own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.architectures import ARCHITECTURES
from models.modeltwins import (
    BRANCHES,
    BY_NAME,
    DROPS_LAYERS,
    MASKS_BY_NUMPY,
    MORE_WRITES,
    REFUSED,
    WRITES,
    Change,
    Inputs,
    Twins,
    check_gradients,
    check_in_place,
    check_modes,
    check_three_calls,
    check_write,
    check_writes,
    freeze,
    lists_of,
)
from support import check_same
from torch import nn

import tripwire

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NAMES = [row.name for row in ARCHITECTURES]
SPREAD = [
    "llama",
    "qwen2",
    "gemma2",
    "gpt2",
    "bert",
    "modernbert",
    "bart",
    "mixtral",
    "mamba2",
    "vit",
    "swin",
    "resnet",
    "wav2vec2",
    "clip",
]


# --- three calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED.keys() | BRANCHES])
def test_three_calls_are_one_trace_and_two_hits(name: str) -> None:
    check_three_calls(name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_compiled_whole_is_refused_for_the_reason_listed(name: str) -> None:
    with pytest.raises(tripwire.CannotTrace) as raised:
        check_three_calls(name)
    assert raised.value.slug == REFUSED[name][0]


def test_nineteen_of_twenty_are_compiled_whole() -> None:
    assert len(NAMES) >= 60
    assert len(REFUSED) <= len(NAMES) / 20


@pytest.mark.parametrize("name", sorted(REFUSED.keys() | BRANCHES))
def test_what_is_not_compiled_whole_returns_the_same_while_its_modules_are_compiled(
    name: str,
) -> None:
    twins = Twins(name)
    for seed in range(3):
        twins.check(twins.inputs(seed=seed))


@pytest.mark.parametrize("name", ["jetmoe", "encodec", "vilt"])
def test_values_that_decide_deep_inside_are_compared_on_the_way(name: str) -> None:
    twins = Twins(name, whole=False)
    for _ in range(3):
        twins.check(twins.inputs())
    assert twins.compiled.statistics().hits > 6


@pytest.mark.parametrize("name", sorted(DROPS_LAYERS - MASKS_BY_NUMPY))
def test_layers_that_are_dropped_at_random_are_compiled_while_training(name: str) -> None:
    twins = Twins(name, nn.Module.train, whole=False)
    for _ in range(3):
        twins.check()
    assert twins.compiled.statistics().hits > 6


def test_a_first_call_that_installs_hooks_is_compiled_from_the_second_on() -> None:
    row = BY_NAME["llava"]
    plain, model = row.build(), row.build()
    compiled = tripwire.compile(model, backend="eager")
    with torch.no_grad():
        for seed in range(4):
            check_same(plain(**row.inputs(seed=seed)), compiled(**row.inputs(seed=seed)))
    statistics = compiled.statistics()
    assert (statistics.traces, statistics.hits) == (2, 2)


# --- writes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_writes_are_seen_and_so_is_their_undoing(name: str) -> None:
    found = check_writes(name, WRITES)
    assert found
    if name != "encodec":  # which has no linear layers
        assert found >= {"a parameter replaced", "an adapter"}


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("what", MORE_WRITES)
def test_a_rarer_write_is_seen_and_so_is_its_undoing(what: str, name: str) -> None:
    if not check_write(Twins(name), Change(*MORE_WRITES[what])):
        pytest.skip("no such place")


def _check_patched(name: str, cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(name)
    twins.check()
    plain = cls.forward  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        return result * 2 if isinstance(result, torch.Tensor) else (result[0] * 2, *result[1:])

    monkeypatch.setattr(cls, "forward", forward)
    twins.check()
    twins.check()
    monkeypatch.undo()
    twins.check()
    twins.check_traces(2)


@pytest.mark.parametrize("name", SPREAD)
def test_a_method_of_a_class_that_is_replaced_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = [m for (m,) in lists_of(BY_NAME[name].build())]
    layers = [type(layer) for layer in (lists[0] if lists else ())]
    layers = [cls for cls in layers if cls.__module__.startswith("transformers.")]
    if not layers:
        pytest.skip("no layers of its own")
    _check_patched(name, layers[0], monkeypatch)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_a_method_of_a_class_of_torch_that_is_replaced_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_patched(name, nn.LayerNorm, monkeypatch)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "bart"])
def test_another_function_in_the_table_of_attentions_is_seen(name: str) -> None:
    table = transformers.AttentionInterface()
    plain = table["sdpa"]

    def doubled(*args: Any, **kwargs: Any) -> Any:
        result, *rest = plain(*args, **kwargs)
        return result * 2, *rest

    twins = Twins(name)
    twins.check()
    try:
        table.register("sdpa", doubled)
        twins.check()
        twins.check()
    finally:
        table.register("sdpa", plain)
    twins.check()
    twins.check_traces(2)


@pytest.mark.parametrize("name", SPREAD)
def test_results_want_gradients_as_long_as_parameters_do(name: str) -> None:
    def check() -> None:
        check_same(twins.plain(**twins.inputs()), twins.compiled(**twins.inputs()))

    twins = Twins(name)
    check()
    undo: list[Callable[[], None]] = []
    twins.write(lambda model: undo.append(freeze(model)))
    check()
    for step in undo:
        step()
    check()
    twins.check_traces(2)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_changed_in_place_cost_no_trace(name: str) -> None:
    check_in_place(name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reformer"])  # other lengths
def test_training_mode_has_an_entry_of_its_own(name: str) -> None:
    check_modes(name)


# --- other inputs ------------------------------------------------------------------------------

# Inputs that belong together in other ways, and a model that takes no mask with zeros.
FIXED = frozenset({"qwen2-vl", "qwen2.5-vl", "tapas", "nystromformer"})
TEXT = [
    row.name
    for row in ARCHITECTURES
    if {"attention_mask", "input_ids"} <= row.inputs().keys() and row.name not in FIXED
]


def _padded(inputs: Inputs) -> Inputs:
    """The mask leaves out some tokens at the end of the first row, and one within."""
    mask = inputs["attention_mask"].clone()
    mask[0, -3:] = 0
    mask[1, 4] = 0
    return inputs | {"attention_mask": mask}


def _unmasked(inputs: Inputs) -> Inputs:
    return {key: value for key, value in inputs.items() if key != "attention_mask"}


def _shortened(inputs: Inputs) -> Inputs:
    return inputs | {key: inputs[key][:, :9].clone() for key in ("input_ids", "attention_mask")}


def _alone(inputs: Inputs) -> Inputs:
    return {key: value[:1] for key, value in inputs.items()}


@pytest.mark.parametrize("name", TEXT)
def test_masks_lengths_and_batches_each_find_their_entry(name: str) -> None:
    twins = Twins(name)
    forms = [dict, _padded, _unmasked, _shortened]
    for seed in range(2):
        for form in forms:
            twins.check(form(twins.inputs(seed=seed)))
        if seed == 0:
            traces = twins.traces
    if name != "funnel":  # which keeps the last length
        twins.check_traces(traces)
        twins.check_traces(len(forms))


@pytest.mark.parametrize(
    "name",
    TEXT,
)
def test_a_batch_of_one_has_an_entry_of_its_own(name: str) -> None:
    twins = Twins(name)
    for seed in range(2):
        twins.check(_alone(twins.inputs(seed=seed)))
        twins.check(twins.inputs(seed=seed))
    twins.check_traces(2)


@pytest.mark.parametrize("name", NAMES)
def test_keywords_in_another_order_give_the_same_and_one_entry_more_at_most(name: str) -> None:
    twins = Twins(name)
    for seed in range(2):
        twins.check(twins.inputs(seed=seed))
        twins.check(dict(reversed(twins.inputs(seed=seed).items())))
    twins.check_traces(2)


@pytest.mark.parametrize("name", SPREAD)
def test_keywords_that_ask_for_more_outputs_find_their_entries(name: str) -> None:
    twins = Twins(name, hooks=True)
    asked: list[Inputs] = [
        {},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"return_dict": False},
    ]
    if name in TEXT and "pixel_values" not in twins.inputs():
        given = twins.inputs(seed=3)
        labels = given.get("decoder_input_ids", given["input_ids"])
        asked += [{"use_cache": True}, {"labels": labels}]
    for _ in range(2):
        for more in asked:
            twins.check(**more)
    twins.check_traces(len(asked))


# --- decoding ----------------------------------------------------------------------------------


def _decode(call: Any, cache: Any, ids: torch.Tensor) -> list[Any]:
    """What a few steps return, and what they leave in the cache."""
    seen: list[Any] = []
    with torch.no_grad():
        for _ in range(5):
            result = call(input_ids=ids, past_key_values=cache, use_cache=True)
            assert result.past_key_values is cache
            seen.append(result.logits)
            ids = result.logits[:, -1:].argmax(-1)
    return [*seen, *[(layer.keys, layer.values) for layer in cache.layers]]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "opt", "mistral"])
def test_steps_of_decoding_fill_a_growing_cache_alike(name: str) -> None:
    twins = Twins(name)
    for seed in range(2):
        ids = twins.inputs(seed=seed)["input_ids"]
        caches = [transformers.DynamicCache(config=twins.plain.config) for _ in range(2)]
        check_same(_decode(twins.plain, caches[0], ids), _decode(twins.compiled, caches[1], ids))
    twins.check_traces(5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_of_decoding_fill_a_cache_of_fixed_size_alike(name: str) -> None:
    twins = Twins(name)
    for seed in range(2):
        ids = twins.inputs(seed=seed)["input_ids"]
        caches = [
            transformers.StaticCache(config=twins.plain.config, max_cache_len=24) for _ in range(2)
        ]
        check_same(_decode(twins.plain, caches[0], ids), _decode(twins.compiled, caches[1], ids))


@pytest.mark.parametrize("how", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
def test_generate_makes_the_same_tokens(how: dict[str, Any]) -> None:
    twins = Twins("llama", whole=False)
    given = {**twins.inputs(), "max_new_tokens": 6, "use_cache": True, **how}
    for _ in range(2):
        made = []
        for model in (twins.plain, twins.compiled):
            torch.manual_seed(0)
            made.append(model.generate(**copy.deepcopy(given)))
        assert torch.equal(*made)


# --- gradients ---------------------------------------------------------------------------------

TRAINED = [
    "llama",
    "qwen2",
    "gemma2",
    "gpt2",
    "bert",
    "modernbert",
    "bart",
    "mixtral",
    "mamba2",
    "vit",
    "convnext",
    "wav2vec2",
    "clip",
]


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_equal_plain_ones_while_an_optimizer_steps(name: str) -> None:
    check_gradients(name)


def test_a_compiled_model_shares_the_state_of_its_model() -> None:
    twins = Twins("llama")
    twins.check()
    twins.compiled.lm_head.weight.data.zero_()
    with torch.no_grad():
        assert not twins.compiled(**twins.inputs()).logits.any()
        assert not twins.model(**twins.inputs()).logits.any()
