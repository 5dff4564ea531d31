"""`tripwire audit script.py`."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from property.faults import FAULTS_BY_NAME

from tripwire.cli import main

SCRIPT = """
import sys
import torch
import tripwire

SCALE = 2.0
print("arguments", sys.argv[1:])

@tripwire.compile(backend="eager")
def scaled(x, offset=1.0):
    return x * SCALE + offset

linear = tripwire.compile(torch.nn.Linear(3, 2), backend="eager")
for size in (1, 2):
    linear(scaled(torch.ones(size, 3)))
{ending}
"""


@pytest.fixture
def script(tmp_path):
    def write(ending="", text=SCRIPT):
        path = tmp_path / "script.py"
        path.write_text(text.format(ending=ending))
        return str(path)

    return write


def run(*arguments):
    return CliRunner().invoke(main, ["audit", *arguments])


def test_every_callable_that_was_called_is_audited_with_its_last_arguments(script) -> None:
    done = run("--every", "--places", "20", "--seed", "0", script(), "a", "--flag")
    assert done.exit_code == 0, done.output
    assert "arguments ['a', '--flag']" in done.output
    assert "scaled: nothing stale, nothing wrong" in done.output
    assert "Linear: nothing stale, nothing wrong" in done.output
    assert "float32[2, 2]" in done.output
    assert "(seed 0)" in done.output


def test_a_fault_is_an_exit_status(script, monkeypatch) -> None:
    FAULTS_BY_NAME["globals: wires"].apply(monkeypatch)
    done = run(script())
    assert done.exit_code == 1
    assert "stale  __main__.SCALE: another value" in done.output


def test_json_is_data_for_programs(script) -> None:
    done = run("--json", "--places", "3", "--seed", "4", script())
    assert done.exit_code == 0
    told = json.loads(done.output.splitlines()[-1])
    assert [audit["name"] for audit in told] == ["scaled", "Linear"]
    assert told[0]["ok"] is True
    assert told[0]["seed"] == 4
    assert len(told[0]["findings"]) == 3
    assert set(told[0]["findings"][0]) == {"place", "status", "plain", "compiled", "detail"}


def test_torch_compile_can_be_tripwires_inside(script) -> None:
    text = (
        "import torch\n"
        "torch.compile(torch.nn.Linear(3, 2), backend='eager')(torch.ones(1, 3)){ending}\n"
    )
    plain = torch.compile
    done = run("--compile", "--places", "5", script(text=text))
    assert done.exit_code == 0, done.output
    assert "Linear" in done.output
    assert torch.compile is plain


@pytest.mark.parametrize(
    ("ending", "told"),
    [("sys.exit(3)", "exited with 3"), ("1 / 0", "exited with 1"), ("linear = 3", None)],
)
def test_a_script_that_fails_is_not_audited(script, ending, told) -> None:
    done = run("--places", "2", script(ending))
    assert done.exit_code == (0 if told is None else 2)
    assert told is None or told in done.output


@pytest.mark.parametrize(
    "arguments", [["no_such_file.py"], ["--places", "0", "x.py"], ["--seconds", "0", "x.py"], []]
)
def test_bad_usage_is_exit_status_2(arguments) -> None:
    assert run(*arguments).exit_code == 2


def test_a_script_that_compiles_nothing_is_told(script) -> None:
    done = run(script(text="print('hello'){ending}"))
    assert done.exit_code == 2
    assert "called nothing that tripwire compiled" in done.output
