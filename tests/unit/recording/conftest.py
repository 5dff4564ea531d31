"""Records of these tests aren't checked in a process of their own unless a test asks for it.

They need msgspec; where it is absent these tests say so.
"""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("msgspec") else ["test_*.py"]


def pytest_report_header(config: pytest.Config) -> str:
    return "" if not collect_ignore_glob else "msgspec is absent: the tests of records are left out"


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    monkeypatch.delenv("TRIPWIRE_RECORD_DIR", raising=False)
