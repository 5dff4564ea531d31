"""What a report says of two runs."""

from __future__ import annotations

from pathlib import Path

from unit.report.samples import flat_graph, header, write_gpt_run, write_log

from tripwire.report import build_report, compare, comparison
from tripwire.telemetry.schema import CompileStarted, GraphCaptured, GraphNode, RunRefused


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


def test_a_run_is_the_same_as_itself(tmp_path) -> None:
    built = build_report(write_gpt_run(tmp_path))
    diff = compare(built, built)
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
    assert (first.id_before, now[0].compiles[first.compile].id) == ("0/0", "0/0")
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


def test_what_takes_too_much_to_compare_is_left_out_and_counted(tmp_path, monkeypatch) -> None:
    now = build_report(write_gpt_run(tmp_path / "now"))
    before = build_report(write_gpt_run(tmp_path / "before", earlier=True))
    whole = compare(now, before)
    assert (whole.rows_left_out, whole.graphs_left_out) == (0, 0)
    monkeypatch.setattr(comparison, "TWO_GRAPHS", 0)
    monkeypatch.setattr(comparison, "NODE", 1 << 30)
    monkeypatch.setattr(comparison, "ROW", 1 << 30)
    diff = compare(now, before)
    assert diff.functions == diff.spans == diff.refusals == diff.counters == []
    assert diff.rows_left_out > len(whole.functions) + len(whole.spans)
    assert (diff.graphs, diff.same_graphs) == ([], 0)
    assert diff.graphs_left_out == len(whole.graphs) + whole.same_graphs
    assert diff.figures and diff.phases
