"""Records of these tests aren't checked in a process of their own unless a test asks for it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    monkeypatch.delenv("TRIPWIRE_RECORD_DIR", raising=False)
