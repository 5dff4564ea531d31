from __future__ import annotations

import logging
import os
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripwire.telemetry import pytorch
from tripwire.telemetry.pytorch import DuplicateWarningChecker, messages


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
    messages._printed.reset()
    for _ in range(3):
        pytorch.print_once("a", 1, [2])
    pytorch.print_once("b")
    assert capsys.readouterr().out == "a 1 [2]\nb\n"


def test_warn_once_warns_once_at_the_callers_line_whatever_the_filters():
    messages._warned.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            pytorch.warn_once("careful")
    (warning,) = caught
    assert warning.filename == __file__


# --- files -------------------------------------------------------------------------------------


def test_debug_files_are_the_users_alone_and_follow_no_link(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPWIRE_DEBUG_DIR", str(tmp_path / "debug"))
    before = os.umask(0)
    try:
        with pytorch.setup_compile_debug():
            pass
    finally:
        os.umask(before)
    for path in (tmp_path / "debug", *(tmp_path / "debug").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    precious, log = tmp_path / "precious", pytorch.get_debug_dir() / "debug.log"
    precious.write_text("mine")
    log.unlink()
    log.symlink_to(precious)
    with pytest.raises(OSError):
        pytorch.setup_compile_debug()
    log.unlink()
    log.parent.rename(tmp_path / "moved")
    log.parent.symlink_to(tmp_path / "moved")
    with pytest.raises(OSError, match="is a link"):
        pytorch.setup_compile_debug()
    assert precious.read_text() == "mine"


def test_the_debug_directory_is_one_per_process_and_made_when_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPWIRE_DEBUG_DIR", str(tmp_path / "debug"))
    directory = pytorch.get_debug_dir()
    assert directory == pytorch.get_debug_dir()
    assert directory.parent == tmp_path / "debug"
    assert not directory.exists()
    logger = logging.getLogger("tripwire.trace")
    with pytorch.setup_compile_debug():
        logger.debug("\x1b[31mred\x1b[0m text")
    logger.warning("after")
    text = (directory / "debug.log").read_text()
    assert text.endswith("DEBUG tripwire.trace: red text\n")
    assert logging.getLogger("tripwire").level == logging.NOTSET


def test_without_a_debug_directory_nothing_is_set_up(monkeypatch):
    monkeypatch.delenv("TRIPWIRE_DEBUG_DIR", raising=False)
    before = list(logging.getLogger("tripwire").handlers)
    with pytorch.setup_compile_debug(), pytorch.setup_log_file(None):
        assert logging.getLogger("tripwire").handlers == before
    assert pytorch.get_debug_dir().parent.name == "tripwire_debug"


def test_a_log_file_takes_all_that_tripwire_says(tmp_path):
    with pytorch.setup_log_file(tmp_path / "log.txt"):
        logging.getLogger("tripwire.guards").warning("half a pair: \ud800")
    logging.getLogger("tripwire.guards").warning("not there")
    assert (tmp_path / "log.txt").read_text().endswith("tripwire.guards: half a pair: \\ud800\n")


@given(st.text())
def test_colours_are_all_that_is_stripped(text):
    plain = text.replace("\x1b", "")
    assert messages.strip_colours(plain) == plain
    assert messages.strip_colours(f"\x1b[1;31m{plain}\x1b[0m") == plain
