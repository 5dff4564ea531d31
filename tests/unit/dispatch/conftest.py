"""Validity is tested twice: under the C sentry, and under its Python twin."""

import pytest

from tripwire.validity import plan, twin


@pytest.fixture(params=["c", "python"])
def sentry(request, monkeypatch):
    """Entries made by the test are watched by the C sentry, then by its twin."""
    if request.param == "python":
        monkeypatch.setattr(plan, "Sentry", twin.Sentry)
    elif plan.Sentry is twin.Sentry:
        pytest.skip("_watch isn't built: python setup.py build_ext --inplace")
    return plan.Sentry
