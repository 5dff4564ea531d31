"""Records of these tests aren't checked in a process of their own unless a test asks for it."""

from __future__ import annotations

import pytest

from tripwire.recording.capture import encode
from tripwire.recording.format import rows


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    monkeypatch.delenv("TRIPWIRE_RECORD_DIR", raising=False)


@pytest.fixture(params=[8, pytest.param(1, marks=pytest.mark.slow)], ids=["part", "whole"])
def room(request, monkeypatch) -> int:
    """An eighth of the room that a record's table has, for an eighth as much; or all of it."""
    most = rows.MOST_MEMORY // request.param
    for module in (rows, encode):
        monkeypatch.setattr(module, "MOST_MEMORY", most)
    return request.param
