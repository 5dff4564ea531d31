"""Records need msgspec; where it is absent these tests say so."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("msgspec") else ["test_*.py"]


def pytest_report_header(config: pytest.Config) -> str:
    return "" if not collect_ignore_glob else "msgspec is absent: the tests of records are left out"
