"""Running: any script, unchanged, with telemetry on; its `torch.compile` may be tripwire's."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def logging_into(folder: Path) -> Iterator[None]:
    """Log here, and in every process that is started from here."""
    from tripwire.dispatch.telling import count_hits
    from tripwire.telemetry.log import start_log, stop_log
    from tripwire.telemetry.reports import log_counters

    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("TRIPWIRE_LOG_DIR")
    os.environ["TRIPWIRE_LOG_DIR"] = str(folder)
    start_log(str(folder))
    try:
        yield
    finally:
        count_hits()
        log_counters()
        stop_log()
        if before is None:
            del os.environ["TRIPWIRE_LOG_DIR"]
        else:
            os.environ["TRIPWIRE_LOG_DIR"] = before


@contextmanager
def compiling_with_tripwire() -> Iterator[None]:
    """`torch.compile` is tripwire's in here. Arguments that only torch's has are refused there."""
    import torch

    from tripwire.api import compile

    plain = torch.compile

    def compile_instead(model: Any = None, **options: Any) -> Any:
        return compile(model, **options)

    torch.compile = compile_instead
    try:
        yield
    finally:
        torch.compile = plain


def run_script(target: str, arguments: tuple[str, ...], as_module: bool) -> int:
    """Run a script or a module as Python itself would; its exit code."""
    argv, path = sys.argv, sys.path[0]
    sys.argv = [target, *arguments]
    try:
        if as_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(target))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as leaving:
        return _code_of(leaving)
    finally:
        sys.argv, sys.path[0] = argv, path
    return 0


def _code_of(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1
