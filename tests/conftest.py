"""What holds for every test: a graph runs as it is, and nothing is kept on disk, unless asked."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import tempfile
from contextlib import suppress
from importlib import import_module

import pytest

os.environ["TRIPWIRE_BACKEND"] = "eager"
os.environ["TRIPWIRE_CACHE_DIR"] = ""
# Tensors are tiny: a pool of threads waits for itself, and one of compilers starts in vain.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# In a new folder for compiled code Inductor would try each kind of vectors with a C++ compiler.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
_home = tempfile.TemporaryDirectory(prefix="tripwire-tests-")
atexit.register(_home.cleanup)
os.environ["XDG_CONFIG_HOME"] = _home.name  # the key of the user's compiled code


def import_what_is_large() -> None:
    """torch and its compilers, then sympy and abstract classes, which torch's first comparison has.

    The collector leaves them alone from here on. Each collection, and each search for what refers
    to an object, would go through 390,000 objects that stay: a quarter of the time of many tests.
    """
    gc.disable()
    for name in ("torch._inductor.compile_fx", "tripwire"):
        import_module(name)
    torch = import_module("torch")
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    # pytest hands its handlers to loggers that don't propagate. With one of them torch spells out
    # each graph that it compiles.
    traces = logging.getLogger("torch.__trace")
    traces.handlers.clear()
    traces.propagate = True
    with suppress(ImportError):  # progress bars of Inductor's start a thread that wakes up at times
        import_module("tqdm").tqdm.monitor_interval = 0
    gc.enable()
    leave_alone_what_is_there()


def leave_alone_what_is_there() -> None:
    """The collector goes through it no more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def leave_alone_what_was_there_before() -> None:
    """The tests themselves stay, too, and what earlier files had imported and cached."""
    leave_alone_what_is_there()


import_what_is_large()
