"""Messages: said once, or written to files for people.

The debug directory is one per process; `TRIPWIRE_DEBUG_DIR` names its parent. Log files there have
no colours.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import ExitStack
from datetime import datetime
from functools import cache
from io import TextIOWrapper
from pathlib import Path

from tripwire.files import check_no_link, make_folder, open_to_append
from tripwire.forks import make_lock
from tripwire.redaction import Redactor
from tripwire.telemetry import clock


class DuplicateWarningChecker:
    """Remembers the latest `maxsize` keys: `add` says whether this one is new.

    `verbose=True` lets repetitions through.
    """

    def __init__(self, maxsize: int = 4096, *, verbose: bool = False) -> None:
        self.maxsize = maxsize
        self.verbose = verbose
        self._lock = make_lock()
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, key: Hashable) -> bool:
        """Remember a key; whether to speak of it."""
        with self._lock:
            if key in self._keys:
                self._keys.move_to_end(key)
                return self.verbose
            self._keys[key] = None
            if len(self._keys) > self.maxsize:
                self._keys.popitem(last=False)
            return True

    def __len__(self) -> int:
        return len(self._keys)

    def reset(self) -> None:
        """Everything is new again."""
        with self._lock:
            self._keys.clear()


_printed = DuplicateWarningChecker()
_warned = DuplicateWarningChecker()


def print_once(*values: object) -> None:
    """Print a line, unless it was printed before."""
    text = " ".join(map(str, values))
    if _printed.add(text):
        print(text)


def warn_once(message: str, stacklevel: int = 1) -> None:
    """Warn, unless the same was said before, whatever the filters do."""
    if _warned.add(message):
        warnings.warn(message, stacklevel=stacklevel + 1)


# --- files ----------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")


class StripAnsiFormatter(logging.Formatter):
    """Takes the colours out of what is logged, and what looks like a secret."""

    _redactor = Redactor()

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor.clean(strip_colours(super().format(record)))


class _OwnFileHandler(logging.FileHandler):
    """A file for this user alone; a link in its place is an error.

    Nothing waits in a buffer. A file that can't be written is dropped, and that is said once.
    """

    def _open(self) -> TextIOWrapper:
        raw = os.fdopen(open_to_append(self.baseFilename), "ab", buffering=0)
        return TextIOWrapper(raw, self.encoding, self.errors, write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        logger = logging.getLogger("tripwire")
        logger.removeHandler(self)
        logger.warning("nothing more is logged into %s: %s", self.baseFilename, error)


def strip_colours(text: str) -> str:
    """A text without terminal escapes."""
    return _ANSI.sub("", text)


def get_debug_dir() -> Path:
    """This process's debug directory; it isn't made by asking for its name."""
    root = os.environ.get("TRIPWIRE_DEBUG_DIR") or os.path.join(os.getcwd(), "tripwire_debug")
    return _directory_in(root, os.getpid())


@cache
def _directory_in(root: str, pid: int) -> Path:
    moment = datetime.fromtimestamp(clock.wall_ns() / 1e9)
    return Path(root) / f"run_{moment:%Y_%m_%d_%H_%M_%S_%f}-pid_{pid}"


def setup_compile_debug() -> ExitStack:
    """Where TRIPWIRE_DEBUG_DIR is set: log into the debug directory until the stack is closed."""
    return add_file_handler() if os.environ.get("TRIPWIRE_DEBUG_DIR") else ExitStack()


def add_file_handler() -> ExitStack:
    """Log all that tripwire says into `debug.log` there until the stack is closed."""
    directory = get_debug_dir()
    make_folder(directory)
    check_no_link(directory)
    return setup_log_file(directory / "debug.log", level=logging.DEBUG)


def setup_log_file(path: str | os.PathLike[str] | None, *, level: int | None = None) -> ExitStack:
    """Log all that tripwire says into a file until the stack is closed; None: nowhere."""
    stack = ExitStack()
    if path is None:
        return stack
    logger = logging.getLogger("tripwire")
    handler = _OwnFileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(StripAnsiFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.level
    stack.callback(handler.close)
    if level is not None:
        logger.setLevel(level)
        stack.callback(logger.setLevel, before)
    logger.addHandler(handler)
    stack.callback(logger.removeHandler, handler)
    return stack
