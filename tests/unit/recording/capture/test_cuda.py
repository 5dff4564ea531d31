"""Tensors and generators of a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from replaying import check_reproduces
from roundtrip import again
from torch import nn

import tripwire

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def test_tensors_come_back_on_their_device(tmp_path) -> None:
    base = torch.arange(12.0, device="cuda")
    whole, view = again(tmp_path, [base, base.view(3, 4).t()[1:]])
    assert whole.device == base.device
    assert torch.equal(whole, base) and torch.equal(view, base.view(3, 4).t()[1:])
    whole.zero_()
    assert not view.any()  # one storage, as before


def test_a_generator_of_the_device_goes_on_where_it_was(tmp_path) -> None:
    source = torch.Generator("cuda").manual_seed(7)
    torch.rand(3, generator=source, device="cuda")
    found = again(tmp_path, source)
    drawn = [torch.rand(3, generator=g, device="cuda") for g in (found, source)]
    assert torch.equal(*drawn)


def draws(model, x):
    raise ValueError(str((model(x) + torch.rand(2, device="cuda")).tolist()))


def test_a_call_that_draws_on_the_device_reproduces(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).cuda()
    path = tripwire.record_call(tmp_path / "x.rec")(draws, model, torch.ones(2, device="cuda"))
    check_reproduces(path)


def test_values_are_those_at_entry(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")

    def changes(x):
        x.add_(1)
        raise ValueError(str(x.tolist()))

    path = tripwire.record_call(tmp_path / "x.rec")(changes, torch.ones(2, device="cuda"))
    assert check_reproduces(path).manifest.outcome.message == "[2.0, 2.0]"


def test_new_code_is_checked_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).cuda()
    compiled = tripwire.compile(model, check=True)
    x = torch.ones(2, device="cuda")
    torch.manual_seed(3)
    got = [compiled(x) for _ in range(3)]
    torch.manual_seed(3)
    for value in got:
        assert torch.equal(value, model(x))
