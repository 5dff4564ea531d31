"""`tripwire run` and `tripwire doctor`."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from click.testing import CliRunner

from tripwire.cli import main

SCRIPT = """
import sys
import torch
print("arguments", sys.argv[1:])
compiled = torch.compile(torch.nn.Linear(3, 2), backend="eager")
for _ in range(3):
    compiled(torch.ones(1, 3))
print("by", type(compiled).__mro__[1].__module__)
{ending}
"""


@pytest.fixture
def script(tmp_path):
    def write(ending=""):
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(ending=ending))
        return str(path)

    return write


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_a_script_runs_unchanged_and_leaves_a_report(script, tmp_path) -> None:
    plain = torch.compile
    done = run("run", "--compile", "--dir", str(tmp_path / "log"), script(), "a", "--flag")
    assert done.exit_code == 0, done.output
    assert "arguments ['a', '--flag']" in done.output
    assert "by tripwire.dispatch.compiled" in done.output
    page = (tmp_path / "log" / "report.html").read_text()
    assert "Linear" in page
    assert torch.compile is plain


def test_without_compile_torch_is_left_alone(script, tmp_path) -> None:
    done = run("run", "--no-report", "--dir", str(tmp_path / "log"), script())
    assert "by tripwire" not in done.output
    assert not (tmp_path / "log" / "report.html").exists()


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('trouble')", 1), ("1 / 0", 1)],
)
def test_the_exit_code_is_the_scripts(script, tmp_path, ending, code) -> None:
    argv = list(sys.argv)
    done = run("run", "--compile", "--dir", str(tmp_path / "log"), script(ending))
    assert done.exit_code == code
    assert (tmp_path / "log" / "report.html").exists()
    assert sys.argv == argv


def test_run_json_says_where_everything_is(script, tmp_path) -> None:
    done = run("run", "--json", "--dir", str(tmp_path / "log"), script())
    told = json.loads(done.output.splitlines()[-1])
    assert told == {
        "exit": 0,
        "log": str(tmp_path / "log"),
        "report": str(tmp_path / "log" / "report.html"),
    }


def test_a_script_that_isnt_there_is_one_line_and_two(tmp_path) -> None:
    done = run("run", str(tmp_path / "nothing.py"))
    assert done.exit_code == 2
    assert len(done.output.strip().splitlines()) == 1


def test_a_module_runs_by_its_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "told.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    done = run("run", "-m", "--no-report", "--dir", "log", "told", "x")
    assert "__main__ ['x']" in done.output


def test_the_doctor_says_how_it_watches() -> None:
    done = run("doctor")
    assert "sentry" in done.output
    assert "torch" in done.output
    told = json.loads(run("doctor", "--json").output)
    assert {"name", "found", "good", "advice"} == set(told[0])


def test_the_doctor_shows_tripwires_variables(monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_DIR", "here")
    assert "TRIPWIRE_RECORD_DIR" in run("doctor").output
