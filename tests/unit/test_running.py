"""`tripwire run` and `tripwire doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tripwire
from tripwire.cli import main
from tripwire.doctor import NATIVES
from tripwire.imports import find_native

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
        "trouble": None,
    }


# --- scripts that do odd things ---


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """Run a script that compiles nothing, from its own folder, in this process."""
    monkeypatch.chdir(tmp_path)

    def go(text, *options, name="plain.py"):
        (tmp_path / name).write_text(text)
        return run("run", "--dir", "log", *options, name)

    return go


def test_a_script_that_compiles_nothing_leaves_a_report_as_well(plain, tmp_path) -> None:
    assert plain("print('hello')").exit_code == 0
    page = (tmp_path / "log" / "report.html").read_text()
    assert '"argv":["plain.py"]' in page  # not tripwire's own
    assert plain("raise SystemExit(3)").exit_code == 3


def test_an_interrupted_script_leaves_a_report_and_a_shells_code(plain, tmp_path) -> None:
    done = plain("raise KeyboardInterrupt")
    assert done.exit_code == 130
    assert "KeyboardInterrupt" in done.output
    assert (tmp_path / "log" / "report.html").exists()


def test_a_traceback_begins_in_the_script(plain) -> None:
    done = plain("def f():\n    raise ValueError('x')\nf()")
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "plain.py", line 3, in <module>'
    assert "runpy" not in done.output
    assert "tripwire/" not in done.output.replace(str(lines[-1]), "")


def test_a_script_that_is_no_python_is_a_syntax_error(plain) -> None:
    done = plain("def (:")
    assert done.exit_code == 1
    assert done.output.splitlines()[0] == '  File "plain.py", line 1'


def test_the_scripts_own_hook_is_told_of_its_error(plain, monkeypatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back at the end
    text = "import sys\nsys.excepthook = lambda kind, e, tb: print('hook', kind.__name__)\n1 / 0"
    done = plain(text)
    assert done.exit_code == 1
    assert done.stdout == "hook ZeroDivisionError\n"


def test_a_hook_that_raises_hides_no_error(plain, monkeypatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    done = plain("import sys\nsys.excepthook = lambda *_: 1 / 0\nraise KeyError('mine')")
    assert done.exit_code == 1
    assert "ZeroDivisionError" in done.output
    assert "KeyError: 'mine'" in done.output


def test_a_script_may_go_elsewhere(plain, tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    text = (
        "import os, torch, tripwire\nos.chdir('elsewhere')\n"
        "tripwire.compile(lambda x: x + 1)(torch.ones(2))"
    )
    assert plain(text).exit_code == 0
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == []
    assert "compile" in (tmp_path / "log" / "report.html").read_text()


def test_a_log_directory_stays_where_it_was_though_the_program_goes_elsewhere(
    tmp_path, monkeypatch
) -> None:
    from tripwire.telemetry.log import EventLog
    from tripwire.telemetry.schema import Instant

    monkeypatch.chdir(tmp_path)
    log = EventLog("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    log.write(Instant(time_ns=1, name="x"))
    log.close()
    assert len(list((tmp_path / "here").iterdir())) == 1


def run_apart(folder, text):
    """The command in a process of its own, which comes to its end."""
    (folder / "apart.py").write_text(text)
    command = [sys.executable, "-m", "tripwire", "run", "--dir", "log", "apart.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(tripwire.__file__).parents[1])}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_threads_of_the_script_belong_to_the_run(tmp_path) -> None:
    text = (
        "import threading, time\n"
        "from tripwire.telemetry.log import emit\nfrom tripwire.telemetry.schema import Instant\n"
        "def late():\n    time.sleep(0.2)\n    emit(Instant, name='late')\n    print('late')\n"
        "threading.Thread(target=late).start()\nprint('main ends')\nraise SystemExit(3)"
    )
    done = run_apart(tmp_path, text)
    assert (done.returncode, done.stdout) == (3, "main ends\nlate\n")
    assert "report.html" in done.stderr
    (log,) = (tmp_path / "log").glob("*.jsonl")
    assert '"late"' in log.read_text()


def test_idle_workers_of_a_pool_do_not_keep_the_run(tmp_path) -> None:
    text = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2)\nprint(pool.submit(lambda: 'done').result())"
    )
    done = run_apart(tmp_path, text)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "report.html" in done.stderr


def test_threads_of_others_are_not_waited_for(plain) -> None:
    ends = threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    try:
        assert "report.html" in plain("print('hello')").output
    finally:
        ends.set()
        other.join()


def test_a_log_that_the_script_removed_is_a_message_and_its_own_code(plain) -> None:
    text = (
        "import os, shutil\nshutil.rmtree(os.environ.pop('TRIPWIRE_LOG_DIR'))\nraise SystemExit(4)"
    )
    done = plain(text)
    assert done.exit_code == 4
    assert "there is no report" in done.output
    told = json.loads(plain(text, "--json").output.splitlines()[-1])
    assert told["report"] is None
    assert "log-missing" in told["trouble"]


def test_what_cannot_be_run_is_one_line_and_two(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package" / "sub").mkdir(parents=True)
    (tmp_path / "package" / "__main__.py").write_text("print('the wrong one')")
    (tmp_path / "plain.py").touch()
    given = ["package/sub"], ["-m", "no_such_module"], ["-m", "package.nothing"], ["-m", "plain.py"]
    for words in given:
        done = run("run", "--dir", "log", *words)
        assert done.exit_code == 2, words
        assert "[not-runnable]" in done.output
        assert ".." not in done.output
        assert len(done.output.strip().splitlines()) == 1
        assert not (tmp_path / "log").exists()


def test_a_log_that_was_there_stays_where_there_is_nothing_to_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "mine").touch()
    assert run("run", "--dir", "log", "-m", "no_such_module").exit_code == 2
    assert (tmp_path / "log" / "mine").exists()


@pytest.mark.parametrize("command", ["run", "audit"])
def test_an_unknown_option_is_no_script(command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--bogus"], ["-m", "--bogus"]):
        done = run(command, *words)
        assert done.exit_code == 2
        assert "No such option" in done.output
        assert "there is no such file" not in done.output
    done = run(command, "")
    assert (done.exit_code, done.output) == (2, "Error: The script's name is empty.\n")
    (tmp_path / "-script.py").write_text("print('it runs')")
    assert "it runs" in run(command, "-script.py").output


def test_a_run_says_that_its_log_is_elsewhere_than_the_variable_says(plain, monkeypatch) -> None:
    assert "TRIPWIRE_LOG_DIR" not in plain("pass").output
    monkeypatch.setenv("TRIPWIRE_LOG_DIR", "elsewhere")
    assert "not in TRIPWIRE_LOG_DIR (elsewhere)" in plain("pass").output


def test_a_listener_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m tripwire doctor | head -c 0; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_a_folder_with_a_main_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "other.py").write_text("VALUE = 5")
    (tmp_path / "app" / "__main__.py").write_text("import other\nprint('value', other.VALUE)")
    assert "value 5" in run("run", "--dir", "log", "app").output


def test_a_name_that_is_hard_to_spell_is_no_hindrance(plain, tmp_path) -> None:
    done = plain("print(__file__)", name="ünï code ✓ 'x'.py")
    assert done.exit_code == 0
    assert "ünï code ✓ 'x'.py" in done.output


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_leaves_the_report_to_its_parent(tmp_path) -> None:
    text = (
        "import os, sys, torch, tripwire\nf = tripwire.compile(lambda x: x + 1)\n"
        "f(torch.ones(2))\npid = os.fork()\nif pid == 0:\n    f(torch.ones(3))\n"
        "    sys.exit(5)\nprint('child', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = run_apart(tmp_path, text)
    assert (done.returncode, done.stdout) == (0, "child 5\n")
    assert done.stderr.count("report.html") == 1
    assert len(list((tmp_path / "log").glob("*.jsonl"))) == 2


@pytest.mark.parametrize("options", [{"mode": 3}, {"fullgraph": "no"}, {"nothing": 1}], ids=str)
def test_options_of_a_replacement_are_checked_at_once(options) -> None:
    plain = torch.compile
    with (
        pytest.raises((tripwire.BadOption, TypeError)),
        tripwire.replacing_torch_compile(**options),
    ):
        pass
    assert torch.compile is plain


def test_options_that_only_torch_has_are_left_out(plain, caplog) -> None:
    text = (
        "import torch\nf = torch.compile(lambda x: x + 1, dynamic=True, backend='eager', "
        "mode='default', recompile_limit=3, of_tomorrow=1)\nprint(f(torch.ones(1)).item())"
    )
    done = plain(text, "--compile")
    assert done.exit_code == 0, done.output
    assert "2.0" in done.output
    assert "of_tomorrow" in caplog.text
    assert "recompile_limit" not in caplog.text


def test_a_script_that_isnt_there_is_one_line_and_two(tmp_path) -> None:
    done = run("run", str(tmp_path / "nothing.py"))
    assert done.exit_code == 2
    assert len(done.output.strip().splitlines()) == 1


def test_a_module_runs_by_its_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "told.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    done = run("run", "-m", "--no-report", "--dir", "log", "told", "x")
    assert "__main__ ['x']" in done.output


def test_the_package_says_its_version() -> None:
    assert tripwire.__version__ in run("--version").output


def test_the_doctor_says_how_it_watches() -> None:
    done = run("doctor")
    assert "functions that run" in done.output
    assert "torch" in done.output
    told = json.loads(run("doctor", "--json").output)
    assert {"name", "found", "good", "advice"} == set(told[0])


def test_the_doctor_names_each_c_module_that_could_not_be_built(monkeypatch) -> None:
    for name in NATIVES:
        monkeypatch.setitem(sys.modules, f"tripwire.{name}", object())
    assert "all 5" in run("doctor").output
    monkeypatch.setitem(sys.modules, "tripwire.tracing._casts", None)
    assert "without tracing._casts" in run("doctor").output
    monkeypatch.setenv("TRIPWIRE_PURE", "1")
    assert "none  (" in run("doctor").output


def test_the_doctor_knows_that_no_writer_is_known_without_the_c_modules(monkeypatch) -> None:
    monkeypatch.setattr("tripwire.writes.sentry.IS_COMPILED", False)
    (line,) = (one for one in run("doctor").output.splitlines() if "writer of a change" in one)
    assert line.endswith("  unknown: that takes the C modules")


def test_every_c_module_can_be_built_or_none_can() -> None:
    sources = (Path(__file__).parents[2] / "src" / "tripwire").rglob("*.c")
    assert sorted(NATIVES) == sorted(f"{one.parent.name}.{one.stem}" for one in sources)
    assert len({find_native(name) is None for name in NATIVES}) == 1


def test_the_doctor_and_the_classifiers_say_what_was_tested() -> None:
    from tripwire.doctor import TESTED_MINORS

    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for minor in range(9, 20):
        classifier = f'Programming Language :: Python :: 3.{minor}"'
        assert (classifier in project) == (minor in TESTED_MINORS)
    is_tested = sys.version_info.minor in TESTED_MINORS
    assert (", tested" in run("doctor").output) == is_tested


def test_a_free_threaded_python_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("tripwire.api.HAS_GIL", False)
    with pytest.raises(tripwire.BadOption) as raised:
        tripwire.compile(len)
    assert raised.value.slug == "free-threaded"
    monkeypatch.setattr("tripwire.tracing.tracer.HAS_GIL", False)
    with pytest.raises(tripwire.CannotTrace) as not_traced:
        tripwire.trace(torch.relu, torch.ones(2))
    assert not_traced.value.slug == "free-threaded"


def test_on_a_python_that_is_too_new_calls_run_plain(monkeypatch, caplog) -> None:
    assert "newer than tripwire knows" not in run("doctor").output
    monkeypatch.setattr("tripwire.env.IS_KNOWN_PYTHON", False)
    monkeypatch.setattr("tripwire.tracing.tracer.IS_KNOWN_PYTHON", False)
    assert "newer than tripwire knows" in run("doctor").output
    compiled = tripwire.compile(lambda x, by: x * by)
    for by in (2, 3, 4):
        assert compiled(torch.ones(2), by).tolist() == [by, by]
    assert compiled.statistics().entries == 0
    assert "[unknown-python]" in caplog.text
    with pytest.raises(tripwire.CannotTrace, match="3.11 to 3.13") as raised:
        tripwire.trace(lambda x: x + 1, torch.ones(2))
    assert raised.value.slug == "unknown-python"


def test_the_doctor_says_why_nothing_is_kept(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", str(tmp_path / "new"))
    assert "that folder" not in run("doctor").output
    assert not (tmp_path / "new").exists()
    (tmp_path / "notes.txt").touch()
    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", str(tmp_path))
    assert "[store-taken]" in run("doctor").output
    tmp_path.chmod(0o777)
    assert "[store-not-ours]" in run("doctor").output


def test_the_doctor_shows_tripwires_variables(monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_PROGRESS", "0")
    assert "TRIPWIRE_PROGRESS" in run("doctor").output
