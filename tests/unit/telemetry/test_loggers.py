from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from support import run_python

import tripwire
from tripwire import telemetry
from tripwire.errors import TelemetryError
from tripwire.telemetry import log


@pytest.fixture
def quiet_after():
    yield
    telemetry.set_logs("")


def test_named_loggers_speak_and_others_dont(quiet_after, capsys):
    telemetry.set_logs("recompiles, cache")
    assert telemetry.get_logs() == ("recompiles", "cache")
    for name in ("recompiles", "cache", "trace"):
        logging.getLogger(f"tripwire.{name}").info("of %s", name)
    assert (
        capsys.readouterr().err
        == "[tripwire.recompiles] of recompiles\n[tripwire.cache] of cache\n"
    )
    telemetry.set_logs("")
    logging.getLogger("tripwire.recompiles").info("no more")
    assert capsys.readouterr().err == ""


def test_the_loggers_that_can_be_named_are_those_that_speak():
    source = Path(tripwire.__file__).parent
    texts = [path.read_text() for path in source.rglob("*.py")]
    used = {name for text in texts for name in re.findall(r'getLogger\("tripwire\.(\w+)"\)', text)}
    assert used == set(log.NAMES)


def test_all_means_all(quiet_after):
    telemetry.set_logs("all")
    assert telemetry.get_logs() == log.NAMES
    assert {"trace", "recompiles", "refusals", "records"} <= set(log.NAMES)


def test_an_unknown_logger_is_a_clear_error():
    with pytest.raises(TelemetryError, match=r"(?s)guards: .*no logger.*recompiles.*logs-unknown"):
        telemetry.set_logs("cache,guards")
    assert telemetry.get_logs() == ()


def test_the_environment_switches_loggers_on_and_a_wrong_name_is_said_once():
    code = (
        "import os, sys; os.environ['TRIPWIRE_LOGS'] = '{}'; sys.stderr = sys.stdout\n"
        "from tripwire import telemetry; import tripwire.telemetry.log\n"
        "print(telemetry.get_logs())"
    )
    assert run_python(code.format("cache")) == "('cache',)"
    shown = run_python(code.format("guards"))
    assert shown.count("guards: tripwire has no logger of that name") == 1
    assert shown.endswith("()")


SECRET = "sk-1234567890abcdefghijklmn"


@pytest.mark.parametrize("name", ["tripwire", *(f"tripwire.{name}" for name in log.NAMES)])
def test_no_logger_hands_a_secret_to_anybodys_handler(name, caplog):
    logger = logging.getLogger(name)
    with caplog.at_level(logging.INFO, logger=name):
        logger.info("%s: %r", "password", "swordfish-1")
        try:
            raise ValueError(f"no such key: {SECRET}")
        except ValueError:
            logger.exception("it raised")
    assert "swordfish" not in caplog.text
    assert SECRET not in caplog.text
    assert caplog.text.count("<redacted") == 2
    assert "ValueError: no such key" in caplog.text


def test_a_message_without_a_secret_stays_as_it_was_given(caplog):
    logging.getLogger("tripwire.watch").warning("%s went to %s", "a", "b")
    assert (caplog.records[0].msg, caplog.records[0].args) == ("%s went to %s", ("a", "b"))


def test_a_message_that_cant_be_made_raises_nothing(monkeypatch):
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    monkeypatch.setattr(logging, "raiseExceptions", False)
    monkeypatch.setattr(logging.getLogger("tripwire.watch"), "propagate", False)
    logging.getLogger("tripwire.watch").warning("%r", Silent())
