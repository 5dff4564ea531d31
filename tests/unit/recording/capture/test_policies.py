"""Policies: how much of each tensor a record keeps, as users say it, and as the record tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import check_reproduces, fail, only
from torch import nn

import tripwire
from tripwire.recording.capture.record import ExecutionRecord, load_record
from tripwire.recording.format.manifest import Raised
from tripwire.recording.replay.rerun import find_outcome

SECRET = 1234.5


def fails(x, y):
    raise ValueError(f"{tuple(x.shape)} {tuple(y.shape)}")


def shows(x, y):
    raise ValueError(f"{x.tolist()}")


def record(folder: Path, function: Any = fails, **options: Any) -> Path:
    """The record of a failing call with two tensors."""
    call = tripwire.record_on_error(folder, **options)(function)
    fail(call, torch.full((3,), SECRET), torch.full((1000,), 2.0))
    return only(folder)


def omissions(found: ExecutionRecord) -> dict[str, str]:
    return {omission.what: omission.why for omission in found.manifest.omissions}


def holds_the_secret(path: Path) -> bool:
    data = path.read_bytes()
    return torch.tensor([SECRET]).numpy().tobytes() in data or str(SECRET).encode() in data


def test_full_keeps_every_value(tmp_path) -> None:
    path = record(tmp_path, shows)
    found = check_reproduces(path)
    assert found.manifest.policy == "full"
    assert not found.manifest.omissions
    assert holds_the_secret(path)


def test_statistics_keep_no_value_and_still_run(tmp_path) -> None:
    path = record(tmp_path, tensors="statistics")
    found = check_reproduces(path)
    assert found.manifest.policy == "statistics"
    assert omissions(found) == {
        "args[0]": "values left out by policy: statistics only",
        "args[1]": "values left out by policy: statistics only",
    }
    assert path.stat().st_size < 6000


def test_shape_keeps_the_shape_and_still_runs(tmp_path) -> None:
    path = record(tmp_path, tensors="shape")
    found = check_reproduces(path)
    assert found.manifest.policy == "shape"
    assert set(omissions(found).values()) == {"values left out by policy: shape only"}
    assert not holds_the_secret(path)


def test_redacted_keeps_nothing_and_says_what_is_missing(tmp_path) -> None:
    path = record(tmp_path, tensors="redacted")
    assert load_record(path).manifest.policy == "redacted"
    assert not holds_the_secret(path)
    error = fail(tripwire.replay, path, trust=True)
    assert isinstance(error, tripwire.CannotReplay)
    assert error.slug == "replay-redacted"


def test_patterns_choose_by_path(tmp_path) -> None:
    path = record(tmp_path, tensors={"args[0]*": "shape"})
    found = check_reproduces(path)
    assert found.manifest.policy == "args[0]*: shape"
    assert omissions(found).keys() == {"args[0]"}
    assert found.args[1].tolist() == [2.0] * 1000
    assert not holds_the_secret(path)


def test_patterns_reach_parameters(tmp_path) -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)
            self.body = nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.body(x)).reshape(99)

    call = tripwire.record_on_error(tmp_path, tensors={"*head*": "shape"})(Model().forward)
    fail(call, torch.ones(2))
    found = check_reproduces(only(tmp_path))
    assert len(found.manifest.omissions) == 2
    assert all("head" in what for what in omissions(found))


def test_a_function_chooses(tmp_path) -> None:
    seen: list[str] = []

    def choose(path, tensor):
        seen.append(path)
        return "shape" if tensor.numel() > 100 else "full"

    found = check_reproduces(record(tmp_path, shows, tensors=choose))
    assert found.manifest.policy == "chosen by a function"
    assert omissions(found).keys() == {"args[1]"}
    assert seen == ["args[0]", "args[1]"]


def test_above_the_cap_the_largest_are_left_out(tmp_path) -> None:
    path = record(tmp_path, shows, max_bytes=100)
    found = check_reproduces(path)
    assert found.manifest.policy == "full; at most 100 bytes of tensors"
    assert omissions(found).keys() == {"args[1]"}
    assert path.stat().st_size < 6000


def test_a_call_that_needs_what_was_left_out_differs(tmp_path) -> None:
    path = record(tmp_path, shows, tensors="shape")
    outcome = find_outcome(path)
    assert isinstance(outcome, Raised)
    assert outcome.message != load_record(path).manifest.outcome.message


def test_blocks_take_policies(tmp_path) -> None:
    x = torch.full((3,), SECRET)
    with tripwire.record_block(tmp_path, tensors={"kwargs*": "shape"}, max_bytes=10) as recording:
        x + 1
    assert (
        load_record(recording.path).manifest.policy == "kwargs*: shape; at most 10 bytes of tensors"
    )
    assert not holds_the_secret(recording.path)


@pytest.mark.parametrize("tensors", ["some", {"*": "some"}])
def test_an_unknown_policy_is_refused_at_once(tensors, tmp_path) -> None:
    error = fail(tripwire.record_on_error, tmp_path, tensors=tensors)
    assert isinstance(error, tripwire.BadOption)
    assert error.slug == "bad-option"


@pytest.mark.parametrize(
    "options",
    [
        {"tensors": 3},
        {"tensors": {3: "full"}},
        {"max_bytes": -1},
        {"max_bytes": "9"},
        {"check": "no"},
    ],
    ids=str,
)
def test_an_option_of_another_kind_is_refused_at_once(options, tmp_path) -> None:
    error = fail(lambda: tripwire.record_call(tmp_path, **options))
    assert isinstance(error, tripwire.BadOption)
    assert error.slug == "bad-option"


@pytest.mark.parametrize(
    "record",
    [
        tripwire.record_call,
        tripwire.record_on_error,
        tripwire.record_block,
    ],
)
def test_what_is_no_path_is_refused_at_once(record) -> None:
    error = fail(record, 3)
    assert isinstance(error, tripwire.BadOption)
    assert error.slug == "bad-option"
    assert "@" not in str(error)
    assert '@tripwire.record_on_error("records")' in str(fail(record, len))  # as a bare decorator


def test_a_path_that_cannot_be_written_is_named_as_it_was_given(tmp_path) -> None:
    (tmp_path / "taken").touch()
    path = tmp_path / "taken" / "x.rec"
    assert str(tmp_path / "taken") in str(fail(tripwire.record_call(path, check=False), len, ""))
    path = tmp_path / ("x" * 300 + ".rec")
    error = fail(tripwire.record_call(path, check=False), len, "")
    assert isinstance(error, OSError)
    assert error.filename == str(path)


@pytest.mark.parametrize("record", [tripwire.record_call, tripwire.record_on_error])
def test_what_cannot_be_called_cannot_be_recorded(record, tmp_path) -> None:
    error = fail(record(tmp_path), 3)
    assert isinstance(error, tripwire.BadOption)
    assert error.slug == "not-callable"
    assert not list(tmp_path.iterdir())


def test_what_a_function_chooses_nonsense_for_is_left_out(tmp_path) -> None:
    path = record(tmp_path, tensors=lambda path, tensor: "nonsense")
    assert omissions(load_record(path)) == {
        "args[0]": "looking at it raised BadOption",
        "args[1]": "looking at it raised BadOption",
    }
    assert not holds_the_secret(path)


def test_an_interrupted_chooser_isnt_swallowed(tmp_path) -> None:
    def choose(path, tensor):
        raise KeyboardInterrupt

    call = tripwire.record_on_error(tmp_path, tensors=choose)(fails)
    with pytest.raises(KeyboardInterrupt):
        call(torch.ones(1), torch.ones(1))


def test_compiled_functions_take_policies(tmp_path) -> None:
    where = tripwire.record_on_error(tmp_path, tensors={"args[0]": "shape"}, max_bytes=10_000)
    fail(tripwire.compile(fails, record_on_error=where), torch.full((3,), SECRET), torch.ones(2))
    path = only(tmp_path)
    assert load_record(path).manifest.policy == "args[0]: shape; at most 10000 bytes of tensors"
    assert not holds_the_secret(path)
    check_reproduces(path)
