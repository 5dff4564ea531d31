"""What holds for every test: a graph runs as it is, and nothing is kept on disk, unless asked."""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress

import pytest

os.environ["TRIPWIRE_BACKEND"] = "eager"
os.environ["TRIPWIRE_CACHE_DIR"] = ""
# Tensors are tiny: a pool of threads waits for itself, and one of compilers starts in vain.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
_home = tempfile.TemporaryDirectory(prefix="tripwire-tests-")
atexit.register(_home.cleanup)
os.environ["XDG_CONFIG_HOME"] = _home.name  # the key of the user's compiled code


@pytest.fixture(scope="session", autouse=True)
def compared_before() -> None:
    """torch's first comparison imports sympy, which registers abstract classes: that retires."""
    import torch

    with suppress(ImportError):  # progress bars of Inductor's start a thread that wakes up at times
        import tqdm

        tqdm.tqdm.monitor_interval = 0
    torch.testing.assert_close(torch.ones(1), torch.ones(1))


@pytest.fixture(scope="module")
def light_collector() -> Iterator[None]:
    """For tests that collect garbage again and again: the collector looks at theirs only."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
