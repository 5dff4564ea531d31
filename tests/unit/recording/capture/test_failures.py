"""Failures: each way to fail leaves one file, and that replays where nothing of the user's is."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from cornershop.cases import CASES
from replaying import check_reproduces, fail, only, raised_in, run_elsewhere
from support import Nameless, Unnamed
from torch.overrides import TorchFunctionMode

import tripwire
from tripwire.cli import main
from tripwire.recording.capture.record import load_record

HERE = Path(__file__).parents[1]

# --- every way to fail, recorded by one process and replayed by another ---

REPLAY = """
import json, pathlib, sys, warnings
import msgspec
from tripwire.recording.capture.outcomes import is_same
from tripwire.recording.capture.record import load_record
from tripwire.recording.replay.rerun import find_outcome
warnings.simplefilter("ignore")
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*/*.rec")):
    outcome = find_outcome(path)
    same = is_same(load_record(path).manifest.outcome, outcome)
    found[path.parent.name] = msgspec.to_builtins(outcome) | {"same": same}
assert "cornershop" not in sys.modules or not getattr(sys.modules["cornershop"], "__file__", None)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Shop:
    """What a user's program showed, and what its records show elsewhere."""

    folder: Path
    raised: dict[str, dict[str, Any]]
    replayed: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Shop:
    home, records, elsewhere = (tmp_path_factory.mktemp(n) for n in ("home", "records", "else"))
    shutil.copytree(
        HERE / "cornershop", home / "cornershop", ignore=shutil.ignore_patterns("__pycache__")
    )
    done = run_elsewhere("-m", "cornershop", records, cwd=home, TRIPWIRE_RECORD_CHECK="0")
    shutil.rmtree(home)
    again = run_elsewhere("-c", REPLAY, records, cwd=elsewhere)
    return Shop(records, json.loads(done.stdout), json.loads(again.stdout))


@pytest.mark.parametrize("name", CASES)
def test_a_failure_replays_where_the_users_package_is_gone(name, shop) -> None:
    raised, replayed = shop.raised[name], shop.replayed[name]
    assert replayed["same"], (raised, replayed)
    assert (replayed["type"], replayed["message"]) == (raised["type"], raised["message"])


# Where the exception is raised by tripwire, its traceback has no line of the function's.
RAISED_BY_TRIPWIRE = {
    "unsupported_operation",
    "tensor_branch",
    "backend_error",
    "internal_error",
    "missing_argument",
    "bound_method",
    "partial",
    "sequential",
    "hit_on_values",
}


@pytest.mark.parametrize("name", sorted(set(CASES) - RAISED_BY_TRIPWIRE))
def test_a_replay_raises_at_the_line_that_the_user_saw(name, shop) -> None:
    assert shop.replayed[name]["line"] == shop.raised[name]["line"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("unsupported_operation", "time.monotonic()"), ("tensor_branch", "if y.sum() > 0:")],
)
def test_a_refusal_is_recorded_with_the_line_that_is_to_blame(name, text, shop) -> None:
    lines = (HERE / "cornershop/cases.py").read_text().splitlines()
    assert lines[shop.replayed[name]["line"] - 1].strip() == text


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_named_after_function_exception_and_line(name, shop) -> None:
    path = only(shop.folder / name)
    outcome = raised_in(path)
    function = load_record(path).manifest.function.name.rpartition(".")[2].strip("<>")
    assert path.name == f"{function}_{outcome.type}_{outcome.line}.rec"


@pytest.mark.parametrize("name", CASES)
def test_the_exception_has_a_note_with_the_command(name, shop) -> None:
    path = only(shop.folder / name)
    assert shop.raised[name]["notes"] == [
        f"tripwire recorded this call. See it again: tripwire replay {path} --trust"
    ]


def test_a_record_holds_only_what_was_accessed(shop) -> None:
    data = only(shop.folder / "user_exception").read_bytes()
    assert b"RATES" in data
    for name in (b"UNUSED", b"Basket", b"Till", b"weigh"):
        assert name not in data


# --- checked for real ---


def test_the_verdict_of_a_record_that_shows_the_same_is_reproduces(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("TRIPWIRE_RECORD_CHECK")

    def divide(x, by):
        return x.sum().item() / by

    fail(tripwire.compile(divide, record_on_error=tmp_path), torch.ones(2), 0)
    manifest = load_record(only(tmp_path)).manifest
    assert manifest.verdict.outcome == "reproduces"
    assert "ZeroDivisionError" in manifest.verdict.text
    assert manifest.verdict.torch == torch.__version__


def test_the_verdict_of_a_record_that_shows_something_else_is_differs(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.delenv("TRIPWIRE_RECORD_CHECK")

    def name_process():
        raise RuntimeError(f"process {os.getpid()}")

    error = fail(tripwire.record_on_error(tmp_path)(name_process))
    verdict = load_record(only(tmp_path)).manifest.verdict
    assert verdict.outcome == "differs"
    assert verdict.text.startswith("the replay raised RuntimeError: process")
    assert str(error) == f"process {os.getpid()}"


LOCK = threading.Lock()


def test_the_note_and_the_verdict_say_if_the_replay_cannot_run(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("TRIPWIRE_RECORD_CHECK")

    def locked(x):
        with LOCK:
            raise ValueError(x)

    (note,) = fail(tripwire.record_on_error(tmp_path)(locked), 1).__notes__
    verdict = load_record(only(tmp_path)).manifest.verdict
    assert verdict.text.startswith("the replay can't run: The call uses a _thread.lock that")
    assert not verdict.text.endswith("]")
    assert note.startswith(f"tripwire recorded this call, but {verdict.text}")
    assert note.endswith(f"tripwire show {only(tmp_path)}")
    done = CliRunner().invoke(main, ["replay", str(only(tmp_path)), "--trust"])
    assert done.exit_code == 2
    assert done.output.startswith("Error: The call uses a _thread.lock")
    assert len(done.output.splitlines()) == 1


def test_a_check_that_cannot_be_made_says_so(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("TRIPWIRE_RECORD_CHECK")
    monkeypatch.setattr("tripwire.recording.capture.outcomes.LARGEST_CHECKED", 10)
    fail(tripwire.record_on_error(tmp_path)(halve), "x")
    assert load_record(only(tmp_path)).manifest.verdict.outcome == "not checked"


def test_without_a_check_the_verdict_is_not_checked(tmp_path) -> None:
    fail(tripwire.record_on_error(tmp_path, check=False)(halve), "x")
    assert load_record(only(tmp_path)).manifest.verdict.outcome == "not checked"


# --- files ---


def halve(x):
    return x / 2


def test_a_record_is_never_written_over_another(tmp_path) -> None:
    compiled = tripwire.compile(halve, record_on_error=tmp_path)
    for text in ("a", "b", "c"):
        fail(compiled, text)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert {load_record(file).args for file in files} == {("a",), ("b",), ("c",)}
    assert all(file.name.startswith("halve_TypeError_") for file in files)


def test_a_path_that_ends_in_rec_is_the_file(tmp_path) -> None:
    path = tmp_path / "mine.rec"
    recorded = tripwire.record_on_error(path)(halve)
    fail(recorded, "a")
    fail(recorded, "b")
    assert load_record(path).args == ("a",)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_path_with_any_other_ending_is_a_folder(tmp_path) -> None:
    path = tripwire.record_call(tmp_path / "x.txt", check=False)(halve, 2)
    assert path == tmp_path / "x.txt" / "halve_call_0.rec"


def test_packages_are_those_that_are_loaded(monkeypatch, tmp_path) -> None:
    """Also one that was installed after another record had been written."""

    def install(name: str) -> None:
        (tmp_path / f"{name}.py").write_text("")
        about = tmp_path / f"{name}-1.2.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (about / "top_level.txt").write_text(f"{name}\n")

    def packages() -> list[str]:
        path = tripwire.record_call(tmp_path / "x.rec")(abs, -1)
        return tripwire.load_record(path).manifest.packages.split(" ")

    monkeypatch.syspath_prepend(tmp_path)
    install("tripwire_one")
    assert "tripwire_one==1.2" not in packages()
    importlib.import_module("tripwire_one")
    assert "tripwire_one==1.2" in packages()
    install("tripwire_two")
    importlib.invalidate_caches()
    importlib.import_module("tripwire_two")
    assert f"torch=={importlib.metadata.version('torch')}" in packages()
    assert "tripwire_two==1.2" in packages()


def test_the_folder_is_made(tmp_path) -> None:
    fail(tripwire.compile(halve, record_on_error=tmp_path / "a" / "b"), "x")
    assert only(tmp_path / "a" / "b").name.startswith("halve_TypeError_")


def test_a_relative_folder_is_that_of_the_start(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    compiled = tripwire.compile(halve, record_on_error="records")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    fail(compiled, "x")
    assert only(tmp_path / "records")


def test_the_environment_arms_everything_that_is_compiled(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_DIR", str(tmp_path / "all"))
    fail(tripwire.compile(halve), "x")
    fail(tripwire.compile(halve, record_on_error=tmp_path / "own"), "x")
    fail(tripwire.compile(halve, record_on_error=""), "x")
    assert only(tmp_path / "all")
    assert only(tmp_path / "own")


def test_a_replay_leaves_no_record_of_its_own(monkeypatch, tmp_path) -> None:
    fail(tripwire.compile(halve, record_on_error=tmp_path / "first"), "x")
    monkeypatch.setenv("TRIPWIRE_RECORD_DIR", str(tmp_path / "second"))
    check_reproduces(only(tmp_path / "first"))
    assert not (tmp_path / "second").exists()


# --- trouble ---


def test_a_folder_that_is_a_file_is_logged_and_not_raised(caplog, tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    error = fail(tripwire.compile(halve, record_on_error=tmp_path / "file"), "x")
    assert type(error) is TypeError
    assert not hasattr(error, "__notes__")
    (told,) = [entry for entry in caplog.records if entry.name == "tripwire.records"]
    assert "halve could not be recorded" in told.getMessage()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("trouble", [OSError("disk full"), MemoryError(), RecursionError()])
@pytest.mark.parametrize("where", ["Ended.write", "describe_error"])
def test_trouble_while_writing_is_logged_and_not_raised(
    where, trouble, caplog, monkeypatch, tmp_path
) -> None:
    def broken(*args, **kwargs):
        raise trouble

    monkeypatch.setattr(f"tripwire.recording.capture.failures.{where}", broken)
    for call in (
        tripwire.compile(halve, record_on_error=tmp_path),
        tripwire.record_on_error(tmp_path)(halve),
    ):
        assert type(fail(call, "x")) is TypeError
    told = [entry for entry in caplog.records if entry.name == "tripwire.records"]
    assert [entry.levelno for entry in told] == [logging.ERROR] * 2
    assert not list(tmp_path.iterdir())


def test_trouble_before_the_call_is_logged_and_the_call_made(caplog, monkeypatch, tmp_path) -> None:
    def broken(*args, **kwargs):
        raise OSError("broken")

    monkeypatch.setattr("tripwire.recording.capture.record.RecordDraft", broken)
    called = tripwire.record_on_error(tmp_path)(halve)
    assert called(4) == 2
    compiled = tripwire.compile(halve, record_on_error=tmp_path)
    assert compiled(torch.tensor(4.0)) == 2
    assert compiled(torch.tensor(4.0)) == 2
    assert type(fail(called, "x")) is TypeError
    assert type(fail(compiled, "x")) is TypeError
    assert not list(tmp_path.iterdir())
    assert {entry.name for entry in caplog.records} == {"tripwire.records"}


def test_a_file_that_cannot_be_finished_leaves_nothing(caplog, monkeypatch, tmp_path) -> None:
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(os, "rename", full)
    fail(tripwire.compile(halve, record_on_error=tmp_path), "x")
    assert not list(tmp_path.iterdir())
    assert "could not be recorded" in caplog.text


# --- who records ---


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit])
def test_what_is_no_error_isnt_recorded(kind, tmp_path) -> None:
    def leave(x):
        raise kind

    for call in (
        tripwire.compile(leave, record_on_error=tmp_path),
        tripwire.record_on_error(tmp_path)(leave),
    ):
        with pytest.raises(kind):
            call(torch.ones(1))
    assert not list(tmp_path.iterdir())


def test_calls_inside_each_other_leave_one_record(tmp_path) -> None:
    inner = tripwire.compile(halve, record_on_error=tmp_path)
    decorated = tripwire.record_on_error(tmp_path)(lambda x: inner(x))
    outer = tripwire.compile(lambda x: decorated(x), record_on_error=tmp_path, name="outer")
    fail(outer, "x")
    assert only(tmp_path).name.startswith("outer_TypeError_")
    check_reproduces(only(tmp_path))


def test_a_replay_of_a_decorated_helper_writes_nothing(tmp_path) -> None:
    helper = tripwire.record_on_error(tmp_path / "helper")(halve)

    @tripwire.record_on_error(tmp_path / "caller")
    def caller(x):
        return helper(x)

    fail(caller, "x")
    check_reproduces(only(tmp_path / "caller"))
    assert not (tmp_path / "helper").exists()


def test_an_inner_failure_that_is_handled_leaves_no_record(tmp_path) -> None:
    inner = tripwire.compile(halve, record_on_error=tmp_path)

    @tripwire.record_on_error(tmp_path)
    def careful(x):
        try:
            return inner(x)
        except TypeError:
            return None

    assert careful("x") is None
    assert not list(tmp_path.iterdir())


def test_after_a_failure_the_next_one_is_recorded_too(tmp_path) -> None:
    compiled = tripwire.compile(halve, record_on_error=tmp_path)
    fail(compiled, "x")
    assert compiled(torch.tensor(4.0)) == 2
    fail(compiled, None)
    assert len(list(tmp_path.iterdir())) == 2


def test_threads_record_their_own_calls(tmp_path) -> None:
    compiled = tripwire.compile(halve, record_on_error=tmp_path)
    threads = [threading.Thread(target=fail, args=(compiled, text)) for text in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(load_record(file).args for file in tmp_path.iterdir()) == [(c,) for c in "abcd"]


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_call_under_another_mode_is_recorded(tmp_path) -> None:
    def change(x):
        x.add_(1)
        raise ValueError(x.tolist())

    with Counting() as mode:
        fail(tripwire.compile(change, record_on_error=tmp_path), torch.zeros(2))
    assert mode.calls
    record = check_reproduces(only(tmp_path))
    assert record.manifest.outcome.message == "[1.0, 1.0]"


def test_a_compiled_function_inside_a_recorded_one_is_still_compiled(tmp_path) -> None:
    inner = tripwire.compile(lambda x: x * 2, fullgraph=True)

    @tripwire.record_on_error(tmp_path)
    def outer(items, x):
        items.append(1)
        y = inner(x)
        x.add_(1)
        if y.sum() > 5:
            raise ValueError(x.tolist())

    for size in (1, 1, 1):
        outer([], torch.ones(size))
    assert (inner.statistics().traces, inner.statistics().hits) == (1, 2)
    fail(outer, [], torch.ones(1) * 4)
    check_reproduces(only(tmp_path))


def test_a_refusal_inside_a_recorded_function_is_still_raised(tmp_path) -> None:
    import time

    inner = tripwire.compile(lambda x: (time.monotonic(), x)[1], fullgraph=True)

    @tripwire.record_on_error(tmp_path)
    def outer(items, x):
        items.append(1)
        return inner(x)

    assert isinstance(fail(outer, [], torch.ones(1)), tripwire.CannotTrace)
    check_reproduces(only(tmp_path))


def test_an_error_inside_tripwire_is_recorded(monkeypatch, tmp_path) -> None:
    def broken(*args, **options):
        raise AssertionError("a bug in tripwire")

    monkeypatch.setattr("tripwire.dispatch.pipeline.build_plan", broken)
    fail(tripwire.compile(halve, record_on_error=tmp_path), torch.ones(1))
    assert check_reproduces(only(tmp_path)).manifest.outcome.type == "AssertionError"


def test_a_message_that_cannot_be_made_is_no_hindrance(tmp_path) -> None:
    class Rude(Exception):
        def __str__(self):
            raise ValueError

    @tripwire.record_on_error(tmp_path)
    def call():
        raise Rude

    assert type(fail(call)) is Rude
    assert raised_in(only(tmp_path)).message == "<no message: ValueError>"


def test_the_command_in_the_note_quotes_its_path(tmp_path) -> None:
    folder = tmp_path / "a b"
    error = fail(tripwire.compile(halve, record_on_error=folder), "x")
    assert error.__notes__[0].endswith(f"tripwire replay '{only(folder)}' --trust")


def test_an_exception_that_takes_no_notes_is_recorded_without(caplog, tmp_path) -> None:
    class Closed(Exception):
        def add_note(self, note):
            raise RuntimeError

    def close():
        raise Closed("x")

    assert type(fail(tripwire.record_on_error(tmp_path)(close))) is Closed
    check_reproduces(only(tmp_path))
    assert not caplog.records


def off_by_some(graph, inputs):
    def run(*args):
        return tuple(result + 1 for result in graph(*args))

    return run


def doubles(x):
    x.mul_(2)
    return x + 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_wrong_result_found_by_a_check_is_recorded(tmp_path, fullgraph) -> None:
    compiled = tripwire.compile(
        doubles, backend=off_by_some, fullgraph=fullgraph, check=True, record_on_error=tmp_path
    )
    x = torch.ones(3)
    error = fail(compiled, x)
    assert type(error) is tripwire.WrongResult
    assert torch.equal(x, torch.full((3,), 2.0))  # the call itself ran, once
    record = check_reproduces(only(tmp_path))
    assert record.manifest.outcome.type == "WrongResult"
    assert torch.equal(record.args[0], torch.ones(3))


class _Fails(metaclass=Nameless):
    def __call__(self, x):
        raise Unnamed("x")


def test_a_call_whose_class_and_error_dont_tell_their_names_is_recorded(tmp_path):
    with pytest.raises(Unnamed):
        tripwire.record_on_error(tmp_path)(_Fails())(torch.ones(1))
    assert list(tmp_path.glob("*.rec"))
