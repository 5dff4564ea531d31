"""Validity is tested twice: under the C sentry, and under its Python twin. A clock to be set."""

import pytest

from tripwire.dispatch import dispatcher, patience
from tripwire.validity import plan
from tripwire.writes import twin


@pytest.fixture(params=["c", "python"])
def sentry(request, monkeypatch):
    """Entries made by the test are watched by the C sentry, then by its twin."""
    if request.param == "python":
        monkeypatch.setattr(plan, "Sentry", twin.Sentry)
    elif plan.Sentry is twin.Sentry:
        pytest.skip("_watch isn't built: python setup.py build_ext --inplace")
    return plan.Sentry


class Clock:
    """One that stands still."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(patience, "now", clock)
    monkeypatch.setattr(dispatcher, "now", clock)
    return clock
