"""Running: any script, unchanged, with telemetry on, or with its compiled calls noted."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tripwire.dispatch.compiled import compile_callable
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.errors import BadOption
from tripwire.files import make_folder
from tripwire.recording.capture.outcomes import find_users_part
from tripwire.values.classes import isinstance

INTERRUPTED = 130  # what a shell says of a program that was interrupted


@contextmanager
def logging_into(folder: Path) -> Iterator[None]:
    """Log here, and in every process that is started from here."""
    from tripwire.dispatch.telling import count_hits
    from tripwire.telemetry.figures import log_counters
    from tripwire.telemetry.log import start_log, stop_log

    folder = folder.absolute()
    make_folder(folder)
    before = os.environ.get("TRIPWIRE_LOG_DIR")
    os.environ["TRIPWIRE_LOG_DIR"] = str(folder)
    start_log(folder)
    try:
        yield
    finally:
        count_hits()
        log_counters()
        stop_log()
        os.environ.pop("TRIPWIRE_LOG_DIR", None)
        if before is not None:
            os.environ["TRIPWIRE_LOG_DIR"] = before


def run_script(target: str, arguments: tuple[str, ...], as_module: bool) -> int:
    """Run a script or a module as Python itself would; its exit code."""
    from tripwire.telemetry.log import emit
    from tripwire.telemetry.schema import Instant

    argv, path = sys.argv, sys.path[0]
    sys.argv = [target, *arguments]
    emit(Instant, name="begins")  # a log has the script's name, and is there in any case
    try:
        return _run(target, as_module)
    finally:
        sys.argv, sys.path[0] = argv, path


def _run(target: str, as_module: bool) -> int:
    try:
        if as_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            is_folder = os.path.isdir(target)  # its own __main__.py runs, not one beside it
            sys.path[0] = target if is_folder else os.path.dirname(os.path.abspath(target))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as leaving:
        return _code_of(leaving)
    except BaseException as error:
        error.__traceback__ = find_users_part(error.__traceback__)
        if error.__traceback__ is None and isinstance(error, ImportError):
            why = str(error).rstrip(".")
            raise BadOption(f"{target} can't be run: {why}.", slug="not-runnable") from None
        _tell(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def after_threads(before: list[threading.Thread], finish: Callable[[], None]) -> None:
    """Finish now, or at the interpreter's exit where the script left threads.

    They belong to the run. The interpreter waits for them before its exit functions, and it alone
    can tell the idle workers of a pool to end: joining those here would wait for ever.
    """
    if all(t.daemon or t in before for t in threading.enumerate()):
        finish()
    else:
        atexit.register(finish)


def _tell(error: BaseException) -> None:
    try:
        sys.excepthook(type(error), error, error.__traceback__)  # the script's own, if it set one
    except Exception as trouble:  # both are told, as Python does
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(trouble)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)


def _code_of(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


# --- which compiled callables a script called, and how ---


class Calls:
    """What was called so far."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Dispatcher, tuple[Any, ...], dict[str, Any]]] = {}
        self._depth = 0

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note calls in here. What a compiled callable calls inside is a part of it."""
        whole = Dispatcher.__call__

        def call(dispatcher: Dispatcher, *args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                self._last[id(dispatcher)] = (dispatcher, args, kwargs)
            self._depth += 1
            try:
                return whole(dispatcher, *args, **kwargs)
            finally:
                self._depth -= 1

        Dispatcher.__call__ = call  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Dispatcher.__call__ = whole  # type: ignore[method-assign]

    def last(self) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        """Each callable and the arguments of its last call, in the order of first calls.

        A callable is compiled again: the script need not have kept what it had compiled.
        """
        return [
            (compile_callable(called.target, called.name, called.options), args, kwargs)
            for called, args, kwargs in self._last.values()
        ]
