from __future__ import annotations

import pytest
from support import run_python

from tripwire import telemetry
from tripwire.telemetry import compile_times, pytorch, timed
from tripwire.telemetry.pytorch import CompileId, compiling, tabulate


@pytest.fixture
def spent(clock):
    for us in (1500, 2500):
        with compiling(CompileId(0), function="f"):
            with timed("trace", column_us="trace_us"):
                clock.advance(us=us)
            clock.advance(us=500)


def test_compile_times_list_each_span_or_their_sum(spent):
    assert compile_times() == (
        "tripwire compile times:\n"
        "| Span    | Seconds        |\n"
        "|---------|----------------|\n"
        "| trace   | 0.0015, 0.0025 |\n"
        "| compile | 0.0020, 0.0030 |"
    )
    assert compile_times(aggregate=True).splitlines()[-1] == "| compile | 0.0050  |"
    assert compile_times("csv") == (
        ["trace", "compile"],
        ["0.001500, 0.002500", "0.002000, 0.003000"],
    )
    assert compile_times("csv", aggregate=True)[1] == ["0.004000", "0.005000"]
    with pytest.raises(ValueError, match="repr='xml'"):
        compile_times("xml")


def test_time_spent_has_a_total_and_prints_in_one_line(spent, capsys):
    assert pytorch.calculate_time_spent() == pytest.approx(
        {"trace": 0.004, "compile": 0.005, "total_wall_time": 0.005}
    )
    pytorch.print_time_report()
    assert capsys.readouterr().out == "TIMING: trace:0.004 compile:0.005 total_wall_time:0.005\n"
    telemetry.count("a", "b")
    pytorch.reset_frame_count()
    assert pytorch.calculate_time_spent() == {"total_wall_time": 0}
    assert telemetry.statistics().groups == {}


def test_a_summary_is_logged_at_exit_when_it_is_switched_on():
    code = (
        "import logging, os, sys\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
        "{}"
        "from tripwire import telemetry as t\n"
        "with t.timed('trace'): pass\n"
    )
    assert run_python(code.format("")) == ""
    shown = run_python(code.format("os.environ['TRIPWIRE_SUMMARY'] = '1'\n"))
    assert "tripwire compile times:" in shown
    assert "trace" in shown


def test_a_summary_is_shown_where_no_log_is_set_up():
    code = (
        "import os, sys\n"
        "sys.stderr = sys.stdout\n"
        "os.environ['TRIPWIRE_SUMMARY'] = '1'\n"
        "from tripwire import telemetry as t\n"
        "with t.timed('trace'): pass\n"
    )
    assert "tripwire compile times:" in run_python(code)


def test_counters_and_runtime_metrics_that_nobody_finished_are_in_the_log_at_exit(tmp_path):
    code = (
        f"import os; os.environ['TRIPWIRE_LOG_DIR'] = {str(tmp_path)!r}\n"
        "from tripwire import telemetry as t\n"
        "with t.timed('x', column_us='first_run_us'): t.count('frames', 'hit')\n"
    )
    run_python(code)
    *_, metrics, counts = (logged.event for logged in telemetry.read_events(tmp_path))
    assert metrics.metrics.is_runtime
    assert counts.groups == {"frames": {"hit": 1}}


def test_a_table_is_markdown_and_shows_texts_as_they_are():
    assert tabulate([("a", 1), ("[b]", 20.5)], ("name", "n")) == (
        "| name |    n |\n|------|------|\n| a    |    1 |\n| [b]  | 20.5 |"
    )
    assert tabulate([], ("x",)) == "| x |\n|---|"


def test_a_table_is_as_wide_as_its_cells():
    times = ", ".join(["0.0015"] * 1024)
    (_, _, row) = tabulate([("trace", times)], ("Span", "Seconds")).split("\n")
    assert row == f"| trace | {times} |"
