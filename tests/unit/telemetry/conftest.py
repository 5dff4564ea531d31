from __future__ import annotations

import gc

import pytest

from tripwire import telemetry
from tripwire.telemetry import log as event_log
from tripwire.telemetry import spans, threads


@pytest.fixture(autouse=True)
def fresh_figures(monkeypatch):
    """Each test begins with no figures, no log and spans on."""
    collecting = gc.callbacks.copy()
    monkeypatch.setattr(event_log, "current", None)
    monkeypatch.setattr(spans, "timeline", None)
    telemetry.enable()
    telemetry.get_runtime_metrics_context()._metrics = {}
    threads.clear_totals()
    telemetry.reset_counters()
    threads.forget_open_events()
    telemetry.clear_compilation_metrics()
    yield
    gc.callbacks[:] = collecting  # hypothesis leaves one that reads the clock in anybody's run
    telemetry.enable()
    telemetry.set_compilation_metrics_limit(64)


@pytest.fixture
def clock():
    with telemetry.using_clock(telemetry.FakeClock(1_000_000)) as fake:
        yield fake
