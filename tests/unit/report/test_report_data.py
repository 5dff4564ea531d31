"""What a report says of a log."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from unit.report.samples import (
    HOSTILE,
    MS,
    Run,
    flat_graph,
    gpt_graph,
    header,
    hostile_events,
    write_gpt_run,
    write_log,
)

from tripwire.errors import TelemetryError
from tripwire.report import build_report, compare
from tripwire.report.details import Details
from tripwire.report.grouping import OCCURRENCES, Grouping
from tripwire.report.lanes import Lanes
from tripwire.report.model import Occurrence, Place
from tripwire.telemetry import CompilationMetrics
from tripwire.telemetry.schema import (
    CompileFinished,
    CompileStarted,
    Counts,
    GraphCaptured,
    GraphNode,
    Instant,
    Retired,
    RunRefused,
    SpanDone,
)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    return build_report(write_gpt_run(tmp_path_factory.mktemp("gpt")))


def detail_of(built, number: int) -> dict:
    return json.loads(built[1].find(number))


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
    graph = detail_of(gpt, 0)["graph"]
    nodes = gpt_graph(6)
    assert len(graph["nodes"]) == len(nodes) > 200
    for row, node in zip(graph["nodes"], nodes, strict=True):
        name, op, target, inputs, scope, place, shape = row
        assert (name, op, target, shape) == (node.name, node.op, node.target, node.shape)
        assert [graph["nodes"][n][0] for n in inputs] == list(node.inputs)
        assert graph["scopes"][scope] == node.scope
        file, line, function, text, excerpt = graph["places"][place]
        assert (file, line, function) == (node.file, node.line, node.function)
        assert (text, excerpt) == (node.text, node.excerpt)
    assert len(graph["places"]) < 40  # each line once


def test_guards_wires_and_reads_are_there(gpt) -> None:
    detail = detail_of(gpt, 0)
    assert detail["guards"].startswith("def admits(self, tokens):")
    assert detail["wires"]["rows"][0][:2] == ["G['config'].scale", "0.125"]
    assert len(detail["reads"]["rows"]) == 36
    assert detail["metrics"]["backend"] == "inductor"


def test_details_of_the_fastest_compiles_go_first() -> None:
    details = Details(most_bytes=1000)
    for number, us in enumerate([30, 10, 20]):
        details.add(number, "guards", "x" * 400)
        details.finish(number, us)
    assert details.left_out == {1}
    assert details.find(1) is None
    assert json.loads(details.find(0)) == {"guards": "x" * 400}
    details.add(1, "wires", "late")  # what comes after is left out as well
    assert details.find(1) is None


def test_details_that_never_end_give_way_too() -> None:
    details = Details(most_bytes=1000)
    for number in range(10):
        details.add(number, "guards", "x" * 400)
    assert details.left_out == set(range(8))


# --- lanes --------------------------------------------------------------------------------------


def span(start: int, duration: int, depth: int = 0, thread: int = 1) -> SpanDone:
    return SpanDone(time_ns=start, thread=thread, name="s", duration_ns=duration, depth=depth)


def test_a_lane_keeps_its_heaviest_spans_and_says_how_many_there_were() -> None:
    lanes = Lanes(spans=10)
    for n in range(1000):
        lanes.add_span(0, span(n, n), n, 0, -1)
    (lane,) = lanes.rows([0])
    assert sorted(one.duration_ns for one in lane.spans) == list(range(990, 1000))
    assert lane.total == 1000
    assert lane.left_out_ns == 989


def test_what_is_around_a_kept_span_is_kept() -> None:
    lanes = Lanes(spans=6)
    for block in range(20):
        begin = block * 100
        for depth in (3, 2, 1, 0):  # all equally long
            lanes.add_span(0, span(begin, 50 + block, depth), begin, 0, -1)
    (lane,) = lanes.rows([0])
    by_start: dict[int, set[int]] = {}
    for one in lane.spans:
        by_start.setdefault(one.start_ns, set()).add(one.depth)
    for depths in by_start.values():
        assert depths == set(range(len(depths)))


def test_lanes_share_one_budget() -> None:
    lanes = Lanes(spans=100, lanes=4)
    for thread in range(6):
        for n in range(200):
            lanes.add_span(0, span(n, n + 1, thread=thread), n, 0, -1)
    rows = lanes.rows([0])
    assert [len(row.spans) for row in rows] == [25, 25, 25, 25]
    assert lanes.left_out == 2


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


def test_groups_stay_few_and_what_is_left_out_is_counted() -> None:
    grouping = Grouping(most=3)
    for n in range(50):
        grouping.add(f"t{n % 5}", "", Place(), Occurrence(n, 0, -1))
    groups = grouping.rows([0])
    assert (len(groups.rows), groups.total, groups.left_out) == (3, 50, 20)
    many = Grouping()
    for n in range(1000):
        many.add("t", "", Place(), Occurrence(n, 0, -1))
    (group,) = many.rows([0]).rows
    assert len(group.occurrences) == OCCURRENCES
    assert [group.occurrences[0].time_ns, group.occurrences[-1].time_ns] == [0, 999]


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
    with pytest.raises(TelemetryError, match=r"no event of tripwire's in it.*") as raised:
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
        len(details.find(n) or b"") for n in range(len(report.compiles))
    )
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert written > 5_000_000
    assert size < 300_000
    assert any("300,000 characters" in row.function for row in report.compiles)
    assert len(HOSTILE) == len(report.compiles)


def test_progress_hears_of_bytes(tmp_path) -> None:
    run = Run(0)
    run.steps(1000)
    path = write_log(tmp_path, header(1, "aa"), run.events)
    heard: list[int] = []
    build_report(tmp_path, heard.append)
    assert heard == sorted(heard)
    assert 0 < heard[-1] <= path.stat().st_size


# --- two runs -----------------------------------------------------------------------------------


def verdicts(changes) -> dict[str, str]:
    return {change.name: change.verdict for change in changes}


def test_a_comparison_tells_new_gone_slower_and_the_same(tmp_path) -> None:
    now = build_report(write_gpt_run(tmp_path / "now", 1.5))
    before = build_report(write_gpt_run(tmp_path / "before", 1.0, earlier=True))
    diff = compare(now, before)
    assert diff.other == "before"
    functions = verdicts(diff.functions)
    assert functions["lookup"] == "new"
    assert functions["old_eval"] == "gone"
    assert functions["GPT.forward"] == "slower"
    assert verdicts(diff.retirements)["G['config'].dropout"] == "new"
    assert verdicts(diff.retirements)["L['self'].head.weight"] == "same"
    assert verdicts(diff.refusals)["hidden-state"] == "same"
    assert verdicts(diff.counters)["frames.hit"] == "fewer"
    assert verdicts(diff.phases)["backend_us"] == "slower"
    assert verdicts(diff.figures)["compile time"] == "slower"
    assert diff.functions[0].verdict == "new"  # the worst first


def test_a_run_is_the_same_as_itself(gpt) -> None:
    diff = compare(gpt, gpt)
    assert diff.graphs == []
    assert diff.same_graphs == 12
    for part in ("figures", "functions", "phases", "spans", "retirements", "refusals", "counters"):
        assert {change.verdict for change in getattr(diff, part)} == {"same"}, part


def test_lines_that_moved_are_no_change(tmp_path) -> None:
    reports = []
    for name, line in (("a", 10), ("b", 14)):
        events = [RunRefused(time_ns=1, slug="s", reason="r", file="f.py", line=line, function="f")]
        write_log(tmp_path / name, header(1, "aa"), events)
        reports.append(build_report(tmp_path / name))
    assert verdicts(compare(*reports).refusals) == {"s": "same"}


def test_graphs_are_compared_node_by_node_and_by_scope(tmp_path) -> None:
    now = build_report(write_gpt_run(tmp_path / "now"))
    before = build_report(write_gpt_run(tmp_path / "before", earlier=True))
    graphs = compare(now, before).graphs
    assert {graph.function for graph in graphs} == {"GPT.forward"}
    first = graphs[0]
    assert (first.id_before, first.id_after) == ("0/0", "0/0")
    assert (first.added, first.removed, first.changed) == (6, 0, 12)
    in_first = [change for change in first.nodes if change.scope.startswith("blocks.0")]
    found = {(change.kind, change.scope, change.name): change for change in in_first}
    assert set(found) == {
        ("added", "blocks.0.attn.drop", "dropped_0"),
        ("changed", "blocks.0.attn", "y_0"),  # it is given another tensor
        ("changed", "blocks.0.mlp", "gelu_0"),
    }
    assert found["changed", "blocks.0.attn", "y_0"].what == "other inputs"
    gelu = found["changed", "blocks.0.mlp", "gelu_0"]
    assert gelu.what == "target torch.nn.functional.relu → torch.nn.functional.gelu"
    assert (gelu.line, gelu.text) == (46, "return self.down(F.gelu(self.up(x)))")


def graph_of(*calls: str) -> tuple[GraphNode, ...]:
    """Calls in a row, each named by its place, as in a graph without scopes."""
    return tuple(
        GraphNode(
            name=f"n{i}",
            op="call_function",
            target=call.partition(":")[0],
            shape=call.partition(":")[2],
            inputs=(f"n{i - 1}",) if i else (),
        )
        for i, call in enumerate(calls)
    )


def differences(folder: Path, before: tuple[GraphNode, ...], after: tuple[GraphNode, ...]):
    built = []
    for name, nodes in (("after", after), ("before", before)):
        ids = {"thread": 1, "compile_id": "0/0"}
        events = [
            CompileStarted(time_ns=1, function="f", **ids),
            GraphCaptured(time_ns=2, nodes=nodes, **ids),
        ]
        write_log(folder / name, header(1, "aa"), events)
        built.append(build_report(folder / name))
    graphs = compare(*built).graphs
    return [(change.kind, change.target, change.what) for g in graphs for change in g.nodes]


def test_a_node_more_is_one_change_though_it_renames_all_that_follow(tmp_path) -> None:
    found = differences(tmp_path, graph_of("a", "b", "c", "d"), graph_of("a", "b", "x", "c", "d"))
    assert found == [("added", "x", ""), ("changed", "c", "other inputs")]


def test_a_node_less_and_another_form_are_changes(tmp_path) -> None:
    before = graph_of("a:f32[2]", "b", "c", "d:f32[2]")
    found = differences(tmp_path, before, graph_of("a:f32[2]", "c", "d:f32[3]"))
    assert found == [
        ("removed", "b", ""),
        ("changed", "c", "other inputs"),
        ("changed", "d", "value f32[2] → f32[3]"),
    ]


def test_a_long_graph_without_scopes_is_compared_in_reasonable_time(tmp_path) -> None:
    before = flat_graph(6_000)
    middle = GraphNode(name="new", op="call_function", target="torch.relu", inputs=("n3000",))
    found = differences(tmp_path, before, (*before[:3002], middle, *before[3002:]))
    assert found == [("added", "torch.relu", "")]
