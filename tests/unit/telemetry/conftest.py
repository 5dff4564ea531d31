from __future__ import annotations

import gc

import pytest
from faketime import FakeClock, using_clock

from tripwire import telemetry
from tripwire.telemetry import log as event_log
from tripwire.telemetry import pytorch, spans, threads


@pytest.fixture(autouse=True)
def fresh_figures(monkeypatch):
    """Each test begins with no figures, no log and spans on."""
    collecting = gc.callbacks.copy()
    monkeypatch.setattr(event_log, "current", None)
    monkeypatch.setattr(spans, "timeline", None)
    telemetry.enable()
    pytorch.get_runtime_metrics_context()._metrics = {}
    threads.clear_totals()
    telemetry.reset_counters()
    threads.forget_open_events()
    telemetry.clear_compilation_metrics()
    yield
    gc.callbacks[:] = collecting  # hypothesis leaves one that reads the clock in anybody's run
    telemetry.enable()
    pytorch.set_compilation_metrics_limit(64)


@pytest.fixture
def clock():
    with using_clock(FakeClock(1_000_000)) as fake:
        yield fake
