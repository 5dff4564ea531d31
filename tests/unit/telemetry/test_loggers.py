from __future__ import annotations

import logging

import pytest
from support import run_python

from tripwire import telemetry
from tripwire.errors import TelemetryError
from tripwire.telemetry import log


@pytest.fixture
def quiet_after():
    yield
    telemetry.set_logs("")


def test_named_loggers_speak_and_others_dont(quiet_after, capsys):
    telemetry.set_logs("recompiles, guards")
    assert telemetry.get_logs() == ("guards", "recompiles")
    for name in ("recompiles", "guards", "trace"):
        logging.getLogger(f"tripwire.{name}").info("of %s", name)
    assert (
        capsys.readouterr().err
        == "[tripwire.recompiles] of recompiles\n[tripwire.guards] of guards\n"
    )
    telemetry.set_logs("")
    logging.getLogger("tripwire.recompiles").info("no more")
    assert capsys.readouterr().err == ""


def test_all_means_all(quiet_after):
    telemetry.set_logs("all")
    assert telemetry.get_logs() == log.NAMES
    assert {"trace", "guards", "recompiles", "refusals", "records"} <= set(log.NAMES)


def test_an_unknown_logger_is_a_clear_error():
    with pytest.raises(TelemetryError, match=r"(?s)gaurds: .*no logger.*recompiles.*logs-unknown"):
        telemetry.set_logs("guards,gaurds")
    assert telemetry.get_logs() == ()


def test_the_environment_switches_loggers_on_and_a_wrong_name_is_said_once():
    code = (
        "import os, sys; os.environ['TRIPWIRE_LOGS'] = '{}'; sys.stderr = sys.stdout\n"
        "from tripwire import telemetry; import tripwire.telemetry.log\n"
        "print(telemetry.get_logs())"
    )
    assert run_python(code.format("guards")) == "('guards',)"
    shown = run_python(code.format("gaurds"))
    assert shown.count("gaurds: tripwire has no logger of that name") == 1
    assert shown.endswith("()")
