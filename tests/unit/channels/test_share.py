"""Falling back on plain code would obey L1 and be worthless: most channels run compiled.

torch.compile is asked the same, by a slow test that keeps its answers in torch_compile.json;
the table shows both sides (`pytest -s`).
"""

from pathlib import Path

import pytest
import torch
from unit.channels.cases import CASES
from unit.channels.share import TorchCompile, Tripwire, Verdict, classify, keep, load, render, share

import tripwire

KEPT = Path(__file__).with_name("torch_compile.json")
LEAST = 0.9


@pytest.mark.skipif(not hasattr(tripwire, "compile"), reason="no tripwire.compile")
def test_most_channels_run_compiled_and_none_is_wrong() -> None:
    ours = [classify(case, Tripwire) for case in CASES]
    print("", *render({"tripwire": ours, "torch.compile": load(KEPT)}), sep="\n")
    bad = [f for f in ours if f.verdict in (Verdict.WRONG, Verdict.FAILED)]
    assert not bad
    assert share(ours) >= LEAST


@pytest.mark.slow
def test_what_torch_compile_makes_of_the_same_channels() -> None:
    try:
        theirs = [classify(case, TorchCompile) for case in CASES]
    finally:
        torch._dynamo.reset()
    keep(theirs, KEPT)
    print("", *render({"torch.compile": theirs}), sep="\n")


def test_what_was_kept_is_about_these_cases() -> None:
    kept = {f"{f.family}: {f.case}" for f in load(KEPT)}
    assert kept == {str(case) for case in CASES}, "run `pytest -m slow` on this file"
