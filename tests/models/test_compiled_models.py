"""Compiled models return what plain ones return, to the bit, whatever is written between calls.

Fast: models written for the tests, and a few architectures of `transformers`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.handmade import HANDMADE
from models.modeltwins import (
    BY_NAME,
    MORE_WRITES,
    WRITES,
    check_gradients,
    check_in_place,
    check_modes,
    check_three_calls,
    check_writes,
    train,
)
from support import tensors_of

import tripwire

pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

OWN = [row.name for row in HANDMADE]
FEW = ["qwen3", "bert", "t5", "mixtral", "mamba", "vit"]


@pytest.mark.parametrize("name", [*OWN, *FEW])
def test_three_calls_are_one_trace_and_two_hits(name: str) -> None:
    check_three_calls(name)


@pytest.mark.parametrize("name", [*OWN, "qwen3", "vit"])
def test_writes_are_seen_and_so_is_their_undoing(name: str) -> None:
    found = check_writes(name, WRITES)
    assert found >= {"a number that forward reads", "a parameter replaced", "an adapter"}


@pytest.mark.parametrize("name", [*OWN, "bert", "mixtral"])
def test_parameters_changed_in_place_cost_no_trace(name: str) -> None:
    check_in_place(name)


@pytest.mark.parametrize("name", [*OWN, "t5", "mamba"])
def test_training_mode_has_an_entry_of_its_own(name: str) -> None:
    check_modes(name)


@pytest.mark.parametrize("name", [name for name in OWN if name != "tied"])
def test_gradients_equal_plain_ones_while_an_optimizer_steps(name: str) -> None:
    check_gradients(name)


def test_a_buffer_that_is_replaced_is_seen() -> None:
    assert check_writes("tied", {"buffer": MORE_WRITES["a buffer replaced"]})


def test_lengths_of_another_longest_text_have_an_entry_of_their_own() -> None:
    row = BY_NAME["reader"]
    plain, compiled = row.build(), tripwire.compile(row.build(), backend="eager", fullgraph=True)
    tokens = row.inputs()["tokens"]
    with torch.no_grad():
        for lengths in ([7, 3], [7, 7], [5, 2], [4, 5], [7, 1]):
            given = torch.tensor(lengths)
            assert torch.equal(compiled(tokens, given), plain(tokens, given))
    assert compiled.statistics().traces == 2


def test_a_detector_that_finds_another_number_of_boxes_is_not_traced_again() -> None:
    row = BY_NAME["detector"]
    plain, compiled = row.build(), tripwire.compile(row.build(), backend="eager", fullgraph=True)
    counts = set()
    with torch.no_grad():
        for seed in range(5):
            expected, got = plain(**row.inputs(seed=seed)), compiled(**row.inputs(seed=seed))
            assert all(map(torch.equal, expected.values(), got.values()))
            counts.add(len(got["boxes"]))
    assert len(counts) > 1
    assert compiled.statistics().traces == 1


def _check_with_inductor(name: str) -> None:
    row = BY_NAME[name]
    plain, model = row.build(), row.build()
    compiled: Any = tripwire.compile(model, backend="inductor", fullgraph=True)
    for seed in range(2):
        with torch.no_grad():
            expected, got = plain(**row.inputs(seed=seed)), compiled(**row.inputs(seed=seed))
        for left, right in zip(tensors_of(expected), tensors_of(got), strict=True):
            torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-4)
    expected = train(plain, plain, row.inputs())
    got = train(compiled, model, row.inputs())
    for left, right in zip(expected, got, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(right, left, rtol=1e-3, atol=1e-4)
    assert compiled.statistics().traces == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "cell-loop", "autoencoder", "qwen3", "bert", "vit"])
def test_inductor_computes_the_same_within_its_tolerance(name: str) -> None:
    _check_with_inductor(name)
