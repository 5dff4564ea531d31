"""User contexts, re-inplacing, things said once, debug files, cleaning up, serialising."""

from __future__ import annotations

import gc
import json
import logging
import os
import types
import warnings
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripwire import telemetry
from tripwire.errors import TelemetryError
from tripwire.telemetry import (
    CleanupHook,
    CleanupManager,
    DuplicateWarningChecker,
    ReinplaceCounters,
    ReInplaceTrigger,
    TypeSafeSerializer,
    debugdir,
    once,
)


@pytest.fixture(autouse=True)
def forget():
    telemetry.reset_recompile_user_contexts()
    ReinplaceCounters.clear()
    yield
    telemetry.reset_recompile_user_contexts()
    ReinplaceCounters.clear()


# --- recompiles --------------------------------------------------------------------------------


def test_user_contexts_are_asked_at_a_recompile_and_cut_at_256_characters():
    assert telemetry.get_hook_for_recompile_user_context() is None
    hooks = [lambda: "epoch 3", lambda: "x" * 1000]
    for hook in hooks:
        telemetry.register_hook_for_recompile_user_context(hook)
    assert telemetry.get_hook_for_recompile_user_context() == hooks
    assert telemetry.collect_user_contexts() == ("epoch 3", "x" * 256)


def test_a_broken_user_context_is_dropped_and_logged_once(caplog):
    telemetry.register_hook_for_recompile_user_context(lambda: 1 / 0)
    telemetry.register_hook_for_recompile_user_context(lambda: "fine")
    assert telemetry.collect_user_contexts() == ("fine",)
    assert telemetry.collect_user_contexts() == ("fine",)
    assert caplog.text.count("is no longer asked about recompiles") == 1


# --- re-inplacing ------------------------------------------------------------------------------


def test_missed_tensors_and_bytes_are_counted_by_trigger_without_dynamic_sizes(tmp_path):
    ReinplaceCounters.add_missed_opportunities(ReInplaceTrigger.TRITON_OPS, 2)
    ReinplaceCounters.add_missed_opportunities(ReInplaceTrigger.AUTO_FUNC_V2, 1)
    ReinplaceCounters.add_missed_bytes(ReInplaceTrigger.TRITON_OPS, 64)
    ReinplaceCounters.add_missed_bytes(ReInplaceTrigger.TRITON_OPS, object())  # a symbolic size
    assert ReinplaceCounters.get_total_missed() == 3
    assert ReinplaceCounters.get_total_missed_bytes() == 64
    with telemetry.logging_to(tmp_path):
        ReinplaceCounters.log()
        ReinplaceCounters.clear()
        ReinplaceCounters.log()
    assert ReinplaceCounters.get_total_missed() == 0
    (instant,) = [e.event for e in telemetry.read_events(tmp_path) if hasattr(e.event, "data")]
    assert instant.data == {
        "missed_tensors_TRITON_OPS": 2,
        "missed_tensors_AUTO_FUNC_V2": 1,
        "missed_bytes_TRITON_OPS": 64,
    }


# --- once --------------------------------------------------------------------------------------


def test_a_key_is_new_once_and_again_when_it_is_forgotten():
    checker = DuplicateWarningChecker(maxsize=2)
    assert [checker.add(k) for k in ("a", "b", "a")] == [True, True, False]
    assert checker.add("c")  # "b" is the least recently used
    assert not checker.add("a")
    assert checker.add("b")
    assert len(checker) == 2
    checker.reset()
    assert checker.add("a")
    assert DuplicateWarningChecker().maxsize == 4096
    loud = DuplicateWarningChecker(verbose=True)
    assert [loud.add("a"), loud.add("a")] == [True, True]


def test_print_once_prints_once(capsys):
    once._printed.reset()
    for _ in range(3):
        telemetry.print_once("a", 1, [2])
    telemetry.print_once("b")
    assert capsys.readouterr().out == "a 1 [2]\nb\n"


def test_warn_once_warns_once_at_the_callers_line_whatever_the_filters():
    once._warned.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            telemetry.warn_once("careful")
    (warning,) = caught
    assert warning.filename == __file__


# --- files for people --------------------------------------------------------------------------


def test_debug_files_are_the_users_alone_and_follow_no_link(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPWIRE_DEBUG_DIR", str(tmp_path / "debug"))
    before = os.umask(0)
    try:
        with telemetry.setup_compile_debug():
            pass
    finally:
        os.umask(before)
    for path in (tmp_path / "debug", *(tmp_path / "debug").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    precious, log = tmp_path / "precious", telemetry.get_debug_dir() / "debug.log"
    precious.write_text("mine")
    log.unlink()
    log.symlink_to(precious)
    with pytest.raises(OSError):
        telemetry.setup_compile_debug()
    log.unlink()
    log.parent.rename(tmp_path / "moved")
    log.parent.symlink_to(tmp_path / "moved")
    with pytest.raises(OSError, match="is a link"):
        telemetry.setup_compile_debug()
    assert precious.read_text() == "mine"


def test_the_debug_directory_is_one_per_process_and_made_when_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPWIRE_DEBUG_DIR", str(tmp_path / "debug"))
    directory = telemetry.get_debug_dir()
    assert directory == telemetry.get_debug_dir()
    assert directory.parent == tmp_path / "debug"
    assert not directory.exists()
    logger = logging.getLogger("tripwire.trace")
    with telemetry.setup_compile_debug():
        logger.debug("\x1b[31mred\x1b[0m text")
    logger.warning("after")
    text = (directory / "debug.log").read_text()
    assert text.endswith("DEBUG tripwire.trace: red text\n")
    assert logging.getLogger("tripwire").level == logging.NOTSET


def test_without_a_debug_directory_nothing_is_set_up(monkeypatch):
    monkeypatch.delenv("TRIPWIRE_DEBUG_DIR", raising=False)
    before = list(logging.getLogger("tripwire").handlers)
    with telemetry.setup_compile_debug(), telemetry.setup_log_file(None):
        assert logging.getLogger("tripwire").handlers == before
    assert telemetry.get_debug_dir().parent.name == "tripwire_debug"


def test_a_log_file_takes_all_that_tripwire_says(tmp_path):
    with telemetry.setup_log_file(tmp_path / "log.txt"):
        logging.getLogger("tripwire.guards").warning("half a pair: \ud800")
    logging.getLogger("tripwire.guards").warning("not there")
    assert (tmp_path / "log.txt").read_text().endswith("tripwire.guards: half a pair: \\ud800\n")


@given(st.text())
def test_colours_are_all_that_is_stripped(text):
    plain = text.replace("\x1b", "")
    assert debugdir.strip_colours(plain) == plain
    assert debugdir.strip_colours(f"\x1b[1;31m{plain}\x1b[0m") == plain


# --- cleaning up -------------------------------------------------------------------------------


class Owner:
    pass


def test_a_name_goes_with_its_owner():
    scope = vars(types.ModuleType("users"))
    owner, before = Owner(), CleanupManager.count
    hook = CleanupHook.create(scope, "__compiled_0", 5)
    CleanupManager.instance.add(owner, hook)
    assert scope["__compiled_0"] == 5
    assert CleanupManager.count == before + 1
    del owner
    gc.collect()
    assert "__compiled_0" not in scope
    assert CleanupManager.count == before
    hook()
    assert CleanupManager.count == before


def test_an_existing_name_is_never_written_over():
    scope = {"__name__": "users", "taken": 1}
    with pytest.raises(TelemetryError, match=r"'taken' exists in 'users' already"):
        CleanupHook.create(scope, "taken", 2)
    assert scope["taken"] == 1


def test_a_name_that_somebody_else_uses_by_now_is_left_alone():
    scope: dict[str, object] = {}
    hook = CleanupHook.create(scope, "name", object())
    scope["name"] = "theirs"
    hook()
    assert scope == {"name": "theirs"}


# --- serialising -------------------------------------------------------------------------------


def test_what_json_cant_hold_is_marked():
    @dataclass
    class Point:
        x: int

    found = json.loads(
        json.dumps(
            {
                "set": {2, 1},
                "dtype": object,
                "point": Point(3),
                (1, 2): "key",
                1: "number",
                "nan": float("nan"),
                "long": "x" * 20_000,
            },
            cls=TypeSafeSerializer,
        )
    )
    assert found["set"] == [1, 2]
    assert found["dtype"] == "<type: <class 'object'>>"
    assert found["point"] == {"x": 3}
    assert found["<tuple: (1, 2)>"] == "key"
    assert found["1"] == "number"
    assert found["nan"] == "<float: nan>"
    assert found["long"].endswith("… 20000 characters")


@given(
    st.recursive(
        st.one_of(
            st.none(), st.integers(), st.floats(), st.text(st.characters()), st.binary(), st.dates()
        ),
        lambda inner: st.one_of(
            st.lists(inner), st.dictionaries(st.integers() | st.text() | st.binary(), inner)
        ),
        max_leaves=10,
    )
)
def test_nothing_is_too_odd_to_serialise(value):
    json.loads(json.dumps(value, cls=TypeSafeSerializer))
