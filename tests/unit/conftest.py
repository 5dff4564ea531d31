"""Records, telemetry and the report need msgspec; where it is absent their tests are left out."""

from __future__ import annotations

import importlib.util

import pytest

HAS_MSGSPEC = importlib.util.find_spec("msgspec") is not None
collect_ignore = (
    []
    if HAS_MSGSPEC
    else ["recording", "telemetry", "report", "test_running.py"]
    + [f"dispatch/test_{name}.py" for name in ("explain", "attribution", "savings")]
)


def pytest_report_header(config: pytest.Config) -> str:
    return "" if HAS_MSGSPEC else f"msgspec is absent, left out: {', '.join(collect_ignore)}"
