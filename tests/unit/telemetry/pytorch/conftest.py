from __future__ import annotations

import pytest

from tripwire.telemetry import pytorch


@pytest.fixture
def timeline(clock):
    yield pytorch.get_chromium_event_logger()
    pytorch.stop_chromium_event_logger()
