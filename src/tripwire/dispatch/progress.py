"""Progress: who waits for a compiler on a terminal sees what it does, and for how long.

Nothing is shown in the first two seconds, in logs, or with TRIPWIRE_PROGRESS=0; and when the
compiler is done, nothing is left of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

LONG = 2.0  # seconds


@contextmanager
def showing(what: str) -> Iterator[None]:
    """Say what goes on inside, once it takes long, where somebody may see it."""
    show = _find_way()
    if show is None:
        yield
        return
    done, began = threading.Event(), monotonic()

    def describe() -> str:
        return f"tripwire: {what}, {monotonic() - began:.0f} s"

    def wait() -> None:
        if not done.wait(LONG):
            show(describe, done)

    thread = threading.Thread(target=wait, name="tripwire progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


Show = Callable[[Callable[[], str], threading.Event], None]


def _find_way() -> Show | None:
    if os.environ.get("TRIPWIRE_PROGRESS") == "0":
        return None
    if _is_notebook():
        return _show_in_notebook
    # None, or an object of the user's, has no terminal behind it.
    is_terminal = getattr(sys.stderr, "isatty", None)
    return _show_on_terminal if is_terminal is not None and is_terminal() else None


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _show_on_terminal(describe: Callable[[], str], done: threading.Event) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    spinner = Spinner("dots")

    def render() -> Spinner:
        spinner.update(text=describe())
        return spinner

    # Other threads may print: their streams stay what they are.
    with Live(
        console=Console(stderr=True),
        get_renderable=render,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        done.wait()


def _show_in_notebook(describe: Callable[[], str], done: threading.Event) -> None:
    display: Any = sys.modules["IPython"].display.display
    shown = display({"text/plain": describe()}, raw=True, display_id=True)
    while not done.wait(0.5):
        shown.update({"text/plain": describe()}, raw=True)
    shown.update({"text/plain": ""}, raw=True)
