"""Fake tensors may be used in any thread."""

from __future__ import annotations

import threading

import pytest
import torch

import tripwire
from tripwire.tracing.open import fakes


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_stands_for_a_missing_gpu_outlives_the_thread_that_needed_it(
    monkeypatch, backend
) -> None:
    """Torch frees it at the end of the thread that set it, and uses it in all."""
    setters: list[threading.Thread] = []

    def set_guard() -> None:
        if not any(one.is_alive() for one in setters):
            setters.append(threading.current_thread())

    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", set_guard)
    monkeypatch.setattr(torch._C, "_has_cuda", True)
    monkeypatch.setattr(fakes, "_set_device_guard", fakes._set_device_guard.__wrapped__)
    compiled = tripwire.compile(lambda x: x * x.shape[0], backend=backend)

    def call() -> None:
        for size in (2, 3, 4):
            assert torch.equal(compiled(torch.ones(size)), torch.full((size,), float(size)))

    for _ in range(2):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    call()
    assert len(setters) == 1
    assert setters[0].is_alive()
