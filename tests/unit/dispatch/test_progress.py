"""A compile that takes long says so, to people who wait for it on a terminal."""

from __future__ import annotations

import io
import re
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tripwire
from tripwire.dispatch import telling

X = torch.ones(2)


class Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "compiles" in text:
            self.written.set()
        return super().write(text)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "LONG", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("TRIPWIRE_PROGRESS", raising=False)


def compile_until(shown: threading.Event | None) -> list[str]:
    """Compile something, in which the back end waits; which threads were there."""
    names: list[str] = []

    def slow(module: Any, inputs: Any) -> Any:
        if shown is not None:
            assert shown.wait(30)
        names.extend(thread.name for thread in threading.enumerate())
        return module.forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = tripwire.compile(doubled, backend=slow)
    for _ in range(3):
        assert torch.equal(compiled(X), X * 2)
    return names


def test_a_terminal_shows_what_is_compiled_by_whom_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    compile_until(terminal.written)
    shown = terminal.getvalue()
    assert re.search(r"tripwire: slow compiles doubled \(1 operation\), \d+ s", shown)
    assert "tripwire progress" not in [thread.name for thread in threading.enumerate()]
    assert sys.stderr is terminal


def test_logs_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    assert "tripwire progress" not in compile_until(None)
    assert not log.getvalue()


@pytest.mark.parametrize("stream", [None, SimpleNamespace()])
def test_a_stream_that_is_none_is_no_terminal(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert "tripwire progress" not in compile_until(None)


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TRIPWIRE_PROGRESS", "0")
    assert "tripwire progress" not in compile_until(None)
    assert not terminal.getvalue()


def test_what_is_over_soon_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(telling, "LONG", 60.0)
    compile_until(None)
    assert not terminal.getvalue()


def test_a_back_end_that_raises_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    def fails(module: Any, inputs: Any) -> Any:
        assert terminal.written.wait(30)
        raise ValueError("no luck")

    with pytest.raises(tripwire.BackendFailed):
        tripwire.compile(lambda x: x + 1, backend=fails)(X)
    assert "tripwire progress" not in [thread.name for thread in threading.enumerate()]


def test_a_notebook_shows_it_in_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, written = threading.Event(), []

    class ZMQInteractiveShell:
        pass

    class Shown:
        def update(self, data: Any, raw: bool) -> None:
            written.append(data["text/plain"])

    def display(data: Any, raw: bool, display_id: bool) -> Shown:
        written.append(data["text/plain"])
        shown.set()
        return Shown()

    fake = SimpleNamespace(
        get_ipython=ZMQInteractiveShell, display=SimpleNamespace(display=display)
    )
    monkeypatch.setitem(sys.modules, "IPython", fake)  # type: ignore[arg-type]
    compile_until(shown)
    assert written[0].startswith("tripwire: slow compiles doubled")
    assert written[-1] == ""
