"""`make demo`: a story that fits on a screen, and the graph for those who ask for it."""

from __future__ import annotations

import os
import pty
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tripwire.writes.sentry import IS_COMPILED

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def screen() -> str:
    """What the demo writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PAGER": "false", "COLUMNS": "100"}
    running = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "demo.py")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            written += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert running.wait() == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def test_the_demo_takes_at_most_forty_lines_of_a_terminal(screen) -> None:
    assert 15 < len(screen.splitlines()) <= 40, screen


def test_the_demo_tells_of_a_compile_a_write_a_failure_a_replay_and_a_report(screen) -> None:
    assert "2 hits" in screen
    assert "L['self'].scale: 1.0 → 0.5" in screen
    assert ("settings.py:8 in change" if IS_COMPILED else "writer unknown") in screen
    assert screen.count("ValueError: no embedding for token 100") == 2
    (page,) = re.findall(r"^ *Open (.*)$", screen, re.MULTILINE)
    assert Path(page).is_file()


def test_the_demo_shows_no_traceback_no_table_and_no_control_sequence(screen) -> None:
    assert "Traceback" not in screen
    assert "blocks.1.attn.qkv" not in screen
    assert "\x1b" not in screen


def test_the_demo_has_a_graph_for_those_who_ask(capsys, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    demo["show_graph"](demo["Scaled"](), torch.zeros(1, 8, dtype=torch.long))
    out = capsys.readouterr().out
    assert "blocks.1.attn.qkv" in out
    assert "transformer.py:" in out
