"""What a report says of a log."""

from __future__ import annotations

import json

import msgspec
import pytest
from unit.report.samples import (
    HOSTILE,
    MS,
    PLENTY,
    Run,
    gpt_graph,
    header,
    hostile_events,
    span,
    write_gpt_run,
    write_log,
)

from tripwire.errors import TelemetryError
from tripwire.report import build_report
from tripwire.report.budgets import Details
from tripwire.telemetry import CompilationMetrics
from tripwire.telemetry.schema import (
    CompileFinished,
    CompileStarted,
    Counts,
    Instant,
    Retired,
    RunRefused,
    SpanDone,
    encode,
)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    return build_report(write_gpt_run(tmp_path_factory.mktemp("gpt")))


def detail_of(built, number: int) -> dict:
    return json.loads(b"".join(built[1].stream(number)))


def details_with(most_bytes: int) -> Details:
    return Details(PLENTY, most_bytes)


# --- sums ---------------------------------------------------------------------------------------


def test_each_process_has_its_own_sums(gpt) -> None:
    report, _ = gpt
    assert [process.rank for process in report.processes] == [0, 1]
    assert [process.compiles for process in report.processes] == [8, 9]
    assert [process.records for process in report.processes] == [0, 1]
    assert report.processes[0].counters["frames"]["hit"] == 1136
    for process in report.processes:
        claimed = sum(process.phases.values()) + process.unattributed_us
        assert claimed == pytest.approx(process.duration_us, abs=process.compiles)


def test_compiles_of_the_same_id_in_two_processes_are_two(gpt) -> None:
    report, _ = gpt
    firsts = [row for row in report.compiles if row.id == "0/0"]
    assert [row.process for row in firsts] == [0, 1]
    assert all(row.status == "compiled" and row.retired == 1 for row in firsts)


def test_outcomes_are_told_apart(gpt, tmp_path) -> None:
    report, _ = gpt
    by_function = {row.function: row for row in report.compiles}
    assert by_function["clip_and_step"].status == "refused"
    assert "tensor's value" in by_function["clip_and_step"].reason
    ids = {"thread": 1, "compile_id": "0/0"}
    failed = CompilationMetrics(fail_type="ValueError", fail_reason="no")
    write_log(
        tmp_path,
        header(1, "aa"),
        [
            CompileStarted(time_ns=1, function="open", thread=1, compile_id="9/9"),
            CompileStarted(time_ns=1, function="f", **ids),
            CompileFinished(time_ns=2, metrics=failed, **ids),
            CompileFinished(
                time_ns=2, compile_id="1/0", metrics=CompilationMetrics(has_guarded_code=False)
            ),
        ],
    )
    rows = build_report(tmp_path)[0].compiles
    assert [row.status for row in rows] == ["unfinished", "failed", "no entry"]
    assert rows[1].reason == "ValueError: no"


def test_the_latest_counters_of_a_process_count_not_their_sum(tmp_path) -> None:
    counts = [Counts(time_ns=n, groups={"frames": {"hit": n}}) for n in (1, 5)]
    write_log(tmp_path, header(1, "aa"), counts)
    assert build_report(tmp_path)[0].processes[0].counters == {"frames": {"hit": 5}}


# --- details ------------------------------------------------------------------------------------


def test_a_graph_keeps_its_nodes_scopes_lines_and_carets(gpt) -> None:
    stretches = detail_of(gpt, 0)["graph"]
    nodes = gpt_graph(6)
    rows = [(graph, row) for graph in stretches for row in graph["nodes"]]
    assert len(rows) == len(nodes) > 200
    for (graph, row), node in zip(rows, nodes, strict=True):
        name, op, target, inputs, scope, place, shape = row
        assert (name, op, target, shape) == (node.name, node.op, node.target, node.shape)
        assert inputs == list(node.inputs)
        assert graph["scopes"][scope] == node.scope
        file, line, function, text, excerpt = graph["places"][place]
        assert (file, line, function) == (node.file, node.line, node.function)
        assert (text, excerpt) == (node.text, node.excerpt)
    assert all(len(graph["places"]) < 40 for graph in stretches)  # each line once


def test_guards_wires_and_reads_are_there(gpt) -> None:
    detail = detail_of(gpt, 0)
    assert detail["guards"][0].startswith("def admits(self, tokens):")
    assert detail["wires"][0]["rows"][0][:2] == ["G['config'].scale", "0.125"]
    assert len(detail["reads"][0]["rows"]) == 36
    assert detail["metrics"][0]["backend"] == "inductor"


def test_details_of_the_fastest_compiles_go_first() -> None:
    details = details_with(1000)
    for number, us in enumerate([30, 10, 20]):
        details.add(number, "guards", "x" * 400)
        details.finish(number, us)
    assert details.left_out == {1}
    assert 1 not in details
    assert details.find(0, "guards") == [b'"%s"' % (b"x" * 400)]
    details.add(1, "wires", "late")  # what comes after is left out as well
    assert 1 not in details


def test_details_that_never_end_give_way_too() -> None:
    details = details_with(1000)
    for number in range(10):
        details.add(number, "guards", "x" * 400)
    assert details.left_out == set(range(8))


# --- groups -------------------------------------------------------------------------------------


def test_like_retirements_are_one_group_with_values_and_processes(gpt) -> None:
    report, _ = gpt
    assert report.retirements.total == 8
    group = report.retirements.rows[0]
    assert group.title == "G['config'].dropout"
    assert (group.place.file[-11:], group.place.line) == ("schedule.py", 17)
    assert "config.dropout = max" in group.place.excerpt
    assert group.count == 6
    assert group.by_process == {0: 3, 1: 3}
    assert (group.occurrences[0].before, group.occurrences[0].after) == ("0.10", "0.08")
    compile = report.compiles[group.occurrences[0].compile]
    assert (compile.id, compile.process) == ("0/0", 0)


def test_refusals_are_grouped_by_reason_and_line(gpt) -> None:
    rows = gpt[0].refusals.rows
    assert [(row.title, row.count) for row in rows] == [
        ("hidden-state", 15),
        ("unknown-origin", 3),
        ("tensor-branch", 2),
    ]


def test_recompiles_carry_reasons_and_what_users_said(gpt) -> None:
    row = next(r for r in gpt[0].recompiles.rows if "size(1)" in r.reason)
    assert row.reason.split("\n") == [
        "tokens.size(1) != 256: got 128",
        "tokens.size(0) != 8: got 4",
    ]
    assert row.occurrences[0].after == "epoch 4"


# --- damaged and odd logs ----------------------------------------------------------------------


def test_truncated_and_damaged_lines_are_counted_and_skipped(tmp_path) -> None:
    run = Run(0)
    run.steps(2)
    write_log(tmp_path, header(1, "aa"), run.events, b'garbage\n{"event":"span","time_ns":1,"na')
    report, _ = build_report(tmp_path)
    assert report.skipped.damaged == 2
    assert report.skipped.events == len(run.events)


def test_a_process_without_a_header_begins_with_the_others(tmp_path) -> None:
    write_log(tmp_path, header(1, "aa"), [span(5_010 * MS, MS), span(5_020 * MS, MS)])
    write_log(tmp_path, None, [span(77_000 * MS, MS), span(77_005 * MS, MS)])
    report, _ = build_report(tmp_path)
    assert report.skipped.headless == 1
    assert sorted(p.start_ns for p in report.processes) == [0, 0]
    assert report.duration_ns == 11 * MS


def test_events_of_unknown_compiles_make_no_compile(tmp_path) -> None:
    events = [
        Retired(time_ns=1, compile_id="3/0", source="G['x']"),
        RunRefused(time_ns=2, compile_id="4/0", slug="s", reason="r"),
        span(3, 1),
        Instant(time_ns=4, compile_id="5/0", name="i"),
    ]
    write_log(tmp_path, header(1, "aa"), events)
    report, _ = build_report(tmp_path)
    assert report.compiles == []
    assert report.retirements.rows[0].occurrences[0].compile == -1


@pytest.mark.parametrize("content", [None, b"", b"garbage\n"])
def test_a_directory_without_events_is_a_clear_error(tmp_path, content) -> None:
    if content is not None:
        (tmp_path / "tripwire-h-1-aa.jsonl").write_bytes(content)
    with pytest.raises(TelemetryError, match=r"contains no events of tripwire.*") as raised:
        build_report(tmp_path)
    assert raised.value.slug == "log-empty"


def test_limits_hold_for_compiles_and_records(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tripwire.report.collector.COMPILES", 3)
    monkeypatch.setattr("tripwire.report.collector.SPAN_NAMES", 2)
    events = []
    for n in range(10):
        events.append(CompileStarted(time_ns=n, compile_id=f"{n}/0", function="f"))
        events.append(SpanDone(time_ns=n, name=f"s{n}", duration_ns=1))
        metrics = CompilationMetrics(duration_us=5, trace_us=4, unattributed_us=1)
        events.append(CompileFinished(time_ns=n, compile_id=f"{n}/0", metrics=metrics))
    write_log(tmp_path, header(1, "aa"), events)
    report, _ = build_report(tmp_path)
    assert len(report.compiles) == 3
    assert report.skipped.compiles == 7
    assert report.skipped.span_names == 8
    assert report.processes[0].compiles == 10  # the sums are whole
    assert report.processes[0].duration_us == 50


def test_huge_texts_are_cut(tmp_path) -> None:
    write_log(tmp_path, header(1, "aa"), hostile_events())
    report, details = build_report(tmp_path)
    size = len(msgspec.json.encode(report)) + sum(
        len(b"".join(details.stream(n))) for n in range(len(report.compiles))
    )
    assert sum(len(encode(event)) for event in hostile_events()) > 5_000_000
    assert size < 300_000
    assert any("characters" in row.function for row in report.compiles)
    assert len(HOSTILE) == len(report.compiles)


def test_progress_hears_of_bytes(tmp_path) -> None:
    run = Run(0)
    run.steps(1000)
    path = write_log(tmp_path, header(1, "aa"), run.events)
    heard: list[int] = []
    build_report(tmp_path, heard.append)
    assert heard == sorted(heard)
    assert 0 < heard[-1] <= path.stat().st_size
