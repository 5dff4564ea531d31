"""Replay: a record's call runs again, for whoever trusts it; records of all kinds of calls."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from replaying import check_reproduces, fail, only, raised_in, run_elsewhere
from torch import nn

import tripwire
from tripwire.recording.capture import failures
from tripwire.recording.capture.record import load_record
from tripwire.recording.format.manifest import Returned

SCALE = torch.tensor([3.0])


def scale(x, by=1.0):
    return x * SCALE * by


def reshape(x, *shape):
    return (x * SCALE).reshape(shape)


@pytest.fixture(autouse=True)
def _nothing_failed(monkeypatch):
    monkeypatch.setattr(failures, "_last", None)


# --- replay ---


def test_a_replay_needs_trust(tmp_path) -> None:
    path = tripwire.record_call(tmp_path)(scale, torch.ones(2))
    error = fail(tripwire.replay, path)
    assert isinstance(error, tripwire.CannotReplay)
    assert error.slug == "replay-untrusted"
    assert "trust=True" in str(error)


def test_a_replay_returns_what_the_call_returned(tmp_path) -> None:
    path = tripwire.record_call(tmp_path)(scale, torch.ones(2), by=2.0)
    assert tripwire.replay(path, trust=True).tolist() == [6.0, 6.0]


def test_a_replay_raises_what_the_call_raised(tmp_path) -> None:
    path = tripwire.record_call(tmp_path)(reshape, torch.ones(2), 5)
    with pytest.raises(RuntimeError, match=r"shape '\[5\]' is invalid"):
        tripwire.replay(path, trust=True)


def test_a_replay_can_be_repeated(tmp_path) -> None:
    def change(x):
        x.add_(1)
        raise ValueError(x.tolist())

    path = tripwire.record_call(tmp_path)(change, torch.zeros(1))
    for _ in range(20):
        assert str(fail(tripwire.replay, path, trust=True)) == "[1.0]"


def test_a_replay_may_use_another_back_end(tmp_path) -> None:
    def branch(x):
        y = torch.rand(1) + x
        return y if y.sum() > 0 else -y

    path = tripwire.record_call(tmp_path)(tripwire.compile(branch, fullgraph=True), torch.ones(1))
    assert isinstance(fail(tripwire.replay, path, trust=True), tripwire.CannotTrace)
    assert tripwire.replay(path, trust=True, backend="none").shape == (1,)
    assert isinstance(fail(tripwire.replay, path, trust=True, backend="eager"), Exception)
    error = fail(tripwire.replay, path, trust=True, backend="no such thing")
    assert isinstance(error, tripwire.BadOption)


@pytest.mark.parametrize(
    "options", [{"trust": "no"}, {"trust": [1]}, {"trust": True, "backend": []}], ids=str
)
def test_an_option_of_another_kind_is_refused_before_anything_runs(options, tmp_path) -> None:
    path = tripwire.record_call(tmp_path, check=False)(scale, torch.ones(1))
    assert isinstance(fail(tripwire.replay, path, **options), tripwire.BadOption)


@pytest.mark.parametrize("path", [None, 3, b"x.rec", ["x.rec"]], ids=str)
def test_what_is_no_path_is_refused_with_its_name(path) -> None:
    for error in (fail(tripwire.load_record, path), fail(tripwire.replay, path, trust=True)):
        assert isinstance(error, tripwire.BadOption)
        assert f"path is {path!r}" in str(error)


def test_a_compiled_function_that_is_a_part_of_the_call_is_compiled_again(tmp_path) -> None:
    inner = tripwire.compile(scale, fullgraph=True)
    module = tripwire.compile(nn.Linear(2, 2))
    module(torch.ones(2))

    def outer(x):
        return module(inner(inner(x))).reshape(7)

    fail(tripwire.record_on_error(tmp_path)(outer), torch.ones(2))
    check_reproduces(only(tmp_path))


def test_a_module_whose_parts_were_compiled_on_their_own_is_recorded(tmp_path) -> None:
    import time

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.fast = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x, shape):
            time.monotonic()
            return self.fast(x).reshape(shape)

    compiled = tripwire.compile(Slow(), record_on_error=tmp_path)
    for _ in range(5):
        compiled(torch.ones(2), (2, 1))
    fail(compiled, torch.ones(2), (7,))
    record = check_reproduces(only(tmp_path))
    assert not record.manifest.omissions


# --- record_call ---


def test_record_call_returns_where_and_raises_nothing_of_the_calls(tmp_path) -> None:
    path = tripwire.record_call(tmp_path / "r.rec")(reshape, torch.ones(2), 5)
    assert path == tmp_path / "r.rec"
    assert raised_in(path).type == "RuntimeError"
    check_reproduces(path)


def test_record_call_of_a_call_that_succeeds_has_a_digest_of_the_result(tmp_path) -> None:
    path = tripwire.record_call(tmp_path)(scale, torch.ones(2))
    outcome = check_reproduces(path).manifest.outcome
    assert isinstance(outcome, Returned)
    assert outcome.digest
    assert path.name == "scale_call_0.rec"


def test_record_call_raises_what_the_file_system_raises(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        tripwire.record_call(tmp_path / "file")(scale, torch.ones(2))


def test_record_call_lets_an_interrupt_through(tmp_path) -> None:
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tripwire.record_call(tmp_path)(interrupted)
    assert not list(tmp_path.iterdir())


def test_record_call_of_a_compiled_call_says_how_it_was_compiled(tmp_path) -> None:
    compiled = tripwire.compile(scale, fullgraph=True)
    path = tripwire.record_call(tmp_path)(compiled, torch.ones(2))
    manifest = check_reproduces(path).manifest
    assert (manifest.compiled.backend, manifest.compiled.fullgraph) == ("eager", True)
    assert compiled.statistics().traces == 1


def test_record_call_keeps_the_values_at_entry(tmp_path) -> None:
    x = torch.zeros(2)
    tripwire.record_call(tmp_path)(x.add_, 1)
    assert x.tolist() == [1.0, 1.0]
    x = torch.zeros(2)
    path = tripwire.record_call(tmp_path)(lambda t: t.add_(1), x)
    assert load_record(path).args[0].tolist() == [0.0, 0.0]
    check_reproduces(path)


def test_record_call_inside_a_recorded_call_leaves_both(tmp_path) -> None:
    @tripwire.record_on_error(tmp_path / "outer")
    def outer(x):
        tripwire.record_call(tmp_path / "inner")(scale, x)
        x.add_(1)
        raise ValueError(x.tolist())

    fail(outer, torch.zeros(1))
    assert load_record(only(tmp_path / "outer")).args[0].tolist() == [0.0]
    assert only(tmp_path / "inner")


# --- record_last ---


def test_record_last_without_a_failure_says_so(tmp_path) -> None:
    error = fail(tripwire.record_last, tmp_path)
    assert isinstance(error, tripwire.CannotReplay)
    assert error.slug == "nothing-failed"


def test_record_last_with_a_wrong_path_leaves_the_call_to_be_recorded(tmp_path) -> None:
    fail(tripwire.compile(reshape), torch.ones(2), 5)
    assert isinstance(fail(tripwire.record_last, 3), tripwire.BadOption)
    check_reproduces(tripwire.record_last(tmp_path))


def test_record_last_writes_an_armed_call_again(tmp_path) -> None:
    x = torch.ones(2)
    fail(tripwire.compile(reshape, record_on_error=tmp_path / "a"), x, 5)
    x.zero_()
    path = tripwire.record_last(tmp_path / "b")
    assert path.name == only(tmp_path / "a").name
    assert path.read_bytes() == only(tmp_path / "a").read_bytes()
    assert load_record(path).args[0].tolist() == [1.0, 1.0]
    check_reproduces(path)


def test_record_last_writes_what_could_not_be_written(caplog, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    x = torch.ones(1000)
    fail(tripwire.compile(reshape, record_on_error=tmp_path / "file"), x, 5)
    assert "could not be recorded" in caplog.text
    path = tripwire.record_last(tmp_path)
    assert path.stat().st_size < 2 * x.untyped_storage().nbytes()
    check_reproduces(path)


def test_an_armed_call_that_was_recorded_isnt_kept_alive(tmp_path) -> None:
    x = torch.ones(2)
    gone = weakref.ref(x)
    fail(tripwire.compile(reshape, record_on_error=tmp_path), x, 5)
    del x
    gc.collect()
    assert gone() is None


def test_record_last_of_a_decorated_call(tmp_path) -> None:
    fail(tripwire.record_on_error(tmp_path / "a")(reshape), torch.ones(2), 5)
    check_reproduces(tripwire.record_last(tmp_path / "b.rec"))


def test_record_last_of_a_compiled_call_that_nobody_armed(tmp_path) -> None:
    compiled = tripwire.compile(reshape)
    compiled(torch.ones(2), 2)
    error = fail(compiled, torch.ones(2), 5)
    assert not hasattr(error, "__notes__")
    path = tripwire.record_last(tmp_path)
    manifest = check_reproduces(path).manifest
    assert manifest.compiled.backend == "eager"
    assert [omission.what for omission in manifest.omissions] == ["values at the beginning"]
    assert path.name == f"reshape_RuntimeError_{raised_in(path).line}.rec"


def test_record_last_of_a_module_that_nobody_armed(tmp_path) -> None:
    fail(tripwire.compile(nn.Linear(2, 2)), torch.ones(3))
    check_reproduces(tripwire.record_last(tmp_path))


def test_record_last_of_a_hit_that_nobody_armed(tmp_path) -> None:
    def take(x, index):
        x.mul_(1)
        return x[index]

    compiled = tripwire.compile(take)
    compiled(torch.ones(2), torch.tensor(1))
    fail(compiled, torch.ones(2), torch.tensor(9))
    path = tripwire.record_last(tmp_path)
    assert load_record(path).manifest.compiled.hit
    check_reproduces(path)


def test_record_last_takes_the_latest_call_and_only_once(tmp_path) -> None:
    fail(tripwire.compile(reshape), torch.ones(2), 5)
    fail(tripwire.record_on_error(tmp_path / "a")(reshape), torch.ones(2), 6)
    fail(tripwire.compile(reshape), torch.ones(2), 7)
    assert "[7]" in raised_in(tripwire.record_last(tmp_path / "b")).message
    assert isinstance(fail(tripwire.record_last, tmp_path), tripwire.CannotReplay)


def test_of_calls_inside_each_other_the_outermost_is_the_latest(tmp_path) -> None:
    import time

    inner = tripwire.compile(reshape)

    def outer(x):
        time.monotonic()
        return inner(x, 5)

    compiled = tripwire.compile(outer)
    fail(compiled, torch.ones(2))
    path = tripwire.record_last(tmp_path)
    assert load_record(path).manifest.function.name == "outer"
    check_reproduces(path)


def run_out_of_memory(kind, text):
    raise kind(text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (MemoryError, ""),
        (torch.OutOfMemoryError, "CUDA out of memory"),
        (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_nothing_is_kept_of_a_call_that_ran_out_of_memory(kind, text, tmp_path) -> None:
    fail(tripwire.compile(reshape), torch.ones(2), 5)
    fail(tripwire.compile(run_out_of_memory), kind, text)
    assert isinstance(fail(tripwire.record_last, tmp_path), tripwire.CannotReplay)


def test_of_a_back_end_that_ran_out_of_memory_nothing_is_kept(tmp_path) -> None:
    def backend(module, inputs):
        raise MemoryError

    error = fail(tripwire.compile(scale, backend=backend), torch.ones(2))
    assert isinstance(error, tripwire.BackendFailed)
    assert isinstance(fail(tripwire.record_last, tmp_path), tripwire.CannotReplay)


class Local:
    pass


def test_a_failed_call_keeps_no_frames_alive() -> None:
    compiled = tripwire.compile(reshape)

    def run() -> weakref.ref[Any]:
        local = Local()
        with contextlib.suppress(RuntimeError):
            compiled(torch.ones(2), 5)
        return weakref.ref(local)

    gone = run()
    gc.collect()
    assert gone() is None


def test_what_a_failed_call_was_given_goes_with_the_next_failure() -> None:
    compiled = tripwire.compile(reshape)
    x = torch.ones(2)
    gone = weakref.ref(x)
    fail(compiled, x, 5)
    del x
    fail(compiled, torch.ones(2), 6)
    gc.collect()
    assert gone() is None


def test_a_program_without_failures_never_imports_the_recorder(tmp_path) -> None:
    text = (
        "import sys, torch, tripwire\n"
        "tripwire.compile(lambda x: x + 1)(torch.ones(1))\n"
        "print(any(name.startswith('tripwire.recording.') for name in sys.modules))\n"
    )
    done = run_elsewhere("-c", text, cwd=tmp_path)
    assert done.stdout.strip() == "False"


# --- decorators ---


def test_a_decorated_function_is_itself_in_all_but_failing(tmp_path) -> None:
    recorded = tripwire.record_on_error(tmp_path)(reshape)
    assert recorded.__name__ == "reshape"
    assert recorded(torch.ones(2), 2, 1).shape == (2, 1)
    assert not list(tmp_path.iterdir())


class Shelf:
    def __init__(self):
        self.items = [torch.ones(2)]

    def add(self, item):
        self.items.append(item)
        return torch.stack(self.items)


def test_a_decorated_method_is_recorded_with_its_object(tmp_path) -> None:
    class Recorded(Shelf):
        add = tripwire.record_on_error(tmp_path)(Shelf.add)

    shelf = Recorded()
    shelf.add(torch.ones(2))
    fail(shelf.add, torch.ones(3))
    record = check_reproduces(only(tmp_path))
    assert "[2] at entry 0 and [3] at entry 2" in record.manifest.outcome.message
    assert record.locals.keys() == {"self", "item"}


@pytest.mark.parametrize("kind", ["generator", "coroutine", "async_generator", "Class"])
def test_what_runs_after_its_call_is_refused(kind, tmp_path) -> None:
    class Class:
        def __call__(self):
            pass

    async def async_generator():
        yield

    def generator():
        yield

    async def coroutine():
        pass

    error = fail(tripwire.record_on_error(tmp_path), locals()[kind])
    assert isinstance(error, tripwire.BadOption)
    assert error.slug == "not-recordable"


def test_a_decorated_function_can_be_compiled(tmp_path) -> None:
    recorded = tripwire.record_on_error(tmp_path / "a")(reshape)
    compiled = tripwire.compile(recorded, record_on_error=tmp_path / "b")
    assert compiled(torch.ones(2), 2).tolist() == [3.0, 3.0]
    fail(compiled, torch.ones(2), 5)
    assert not (tmp_path / "a").exists()
    check_reproduces(only(tmp_path / "b"))


def test_trouble_with_describing_a_result_is_not_taken_for_the_calls(monkeypatch, tmp_path) -> None:
    def broken(result):
        raise RuntimeError("a bug of tripwire's")

    monkeypatch.setattr("tripwire.recording.capture.failures.describe_result", broken)
    with pytest.raises(RuntimeError, match="a bug of tripwire's"):
        tripwire.record_call(tmp_path / "x.rec")(lambda: 3)
    assert not list(tmp_path.iterdir())
