"""Functions of libraries that the user replaced are those of the record while it replays."""

from __future__ import annotations

import numpy as np
import torch
from replaying import check_reproduces, fail
from torch import nn
from torch.nn import functional

import tripwire
from tripwire.recording.capture.record import load_record

SLOPE = 0.5


def leaky(x, inplace=False):
    return torch.where(x > 0, x, x * SLOPE)


def shouts(self, x):
    raise ValueError(f"{type(self).__name__} at {SLOPE}")


def test_a_replaced_function_of_a_module(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    own = functional.relu
    x = torch.tensor([-2.0, 2.0])
    with monkeypatch.context() as patching:
        patching.setattr(functional, "relu", leaky)
        path = tripwire.record_call(tmp_path / "x.rec")(nn.ReLU(), x)
    assert torch.equal(tripwire.replay(path, trust=True), torch.tensor([-1.0, 2.0]))
    assert functional.relu is own
    assert torch.equal(nn.ReLU()(x), torch.tensor([0.0, 2.0]))


def test_a_replaced_method_of_a_class_also_where_the_replay_raises(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    own = nn.Tanh.forward
    with monkeypatch.context() as patching:
        patching.setattr(nn.Tanh, "forward", shouts)
        patching.setattr(nn.Tanh, "extra", shouts, raising=False)
        path = tripwire.record_call(tmp_path / "x.rec")(nn.Sequential(nn.Tanh()), torch.ones(1))
    assert check_reproduces(path).manifest.outcome.message == "Tanh at 0.5"
    assert nn.Tanh.forward is own
    assert not hasattr(nn.Tanh, "extra")


def test_a_record_without_patches_has_none(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    path = tripwire.record_call(tmp_path / "x.rec")(nn.ReLU(), torch.ones(1))
    from tripwire.recording.format.file import Record

    with Record.open(path) as record:
        assert "patches" not in record.table.roots


def add(a, b):
    return a + b


def test_arrays_that_share_memory_are_told_of(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    base = np.arange(6.0)
    path = tripwire.record_call(tmp_path / "x.rec")(add, base[:3], base[2:5])
    told = [omission.why for omission in load_record(path).manifest.omissions]
    assert told == ["it shares memory with another value; at replay it has memory of its own"] * 2
    path = tripwire.record_call(tmp_path / "y.rec")(add, base[:3], base[3:])
    assert not load_record(path).manifest.omissions


def test_an_array_over_a_redacted_tensor_shows_nothing(tmp_path, monkeypatch) -> None:
    """Also where its bytes were copied before the call."""
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    secret = torch.full((4,), 42.0)

    @tripwire.record_on_error(tmp_path / "x.rec", tensors={"kwargs*": "redacted", "*": "full"})
    def fails(array, tensor):
        array += 0
        raise ValueError("no")

    fail(fails, secret.numpy(), tensor=secret)
    data = (tmp_path / "x.rec").read_bytes()
    assert secret.numpy().tobytes() not in data
