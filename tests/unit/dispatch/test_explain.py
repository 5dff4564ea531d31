"""Explain: what is known of a compiled callable. Preview: what can be captured of a call."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tripwire
from tripwire import telemetry
from tripwire.tracing.open.draws import CAN_DRAW
from tripwire.writes.sentry import IS_COMPILED

tell = print  # under another name a compiled call doesn't print it: it is refused


X = torch.arange(4.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if x.sum() > 0:
            return x * self.scale
        return x


def compiled_net():
    net = Net()
    compiled = tripwire.compile(net, dynamic=False)
    compiled(X)
    compiled(X)
    net.scale = 3.0
    compiled(X)
    return compiled


def test_an_explanation_has_entries_with_guards_wires_hits_and_effects() -> None:
    found = tripwire.explain(compiled_net())
    newest, oldest = found.entries
    assert (newest.state, oldest.state) == ("in use", "retired")
    assert (newest.hits, oldest.hits) == (0, 1)
    assert "def " in newest.guards
    assert ("L['self'].scale", "3.0") in [(wire.source, wire.seen) for wire in newest.wires]
    assert ("L['self'].scale", "2.0") in [(wire.source, wire.seen) for wire in oldest.wires]
    assert newest.summary.effects == ("L['self'].calls",)
    assert "gt" in newest.summary.branches[0]


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        beta = 2.0
        for block in self.blocks:
            x = (lambda y: block(y) * beta)(x)
        return x


def test_a_wire_tells_the_users_line_that_reads_it_or_leads_there() -> None:
    compiled = tripwire.compile(Deep())
    compiled(X)
    found = tripwire.explain(compiled)
    wires = {wire.source: wire for wire in found.entries[0].wires}
    for source in ("L['self'].blocks", "L['self'].blocks[0]", "L['self'].blocks[0].weight"):
        assert wires[source].text == "for block in self.blocks:"
        assert wires[source].place == f"{__file__}:{Deep.forward.__code__.co_firstlineno + 2}"
    called = wires["T[L['self']].forward"]  # only torch's own code names it
    assert called.place.rpartition(":")[0].endswith("nn/modules/module.py")
    assert "test_explain.py:" in str(found)
    assert "for block in self.blocks:" in str(found)


def test_an_explanation_prints_what_the_users_lines_read_and_counts_the_rest() -> None:
    width = 3
    table = {"scale": 2.0}

    def call(x):
        y = nn.functional.pad(x, (0, width))
        return y.relu() * table["scale"]

    compiled = tripwire.compile(call, backend="eager")
    compiled(torch.ones(2))
    lines = str(tripwire.explain(compiled)).splitlines()
    own = [line for line in lines if line.startswith("    ") and "test_explain.py:" in line]
    assert any("C['width']" in line for line in own)
    assert any("C['table']" in line for line in own)
    shown = [line.split()[0] for line in own]
    assert shown[0] == "G['nn']"
    assert shown.index("C['width']") < shown.index("C['table']")
    assert not [line for line in lines if "['Tensor'].__" in line]
    wires = tripwire.explain(compiled).entries[0].wires
    assert f"    ... and {len(wires) - len(own)} more wires (.entries[i].wires)" in lines


def test_what_the_users_line_names_is_shown_before_what_it_leads_to() -> None:
    compiled = tripwire.compile(Outer(nn.Linear(4, 2)), backend="eager")
    compiled(X)
    lines = [line.split()[0] for line in str(tripwire.explain(compiled)).splitlines()]
    found = [line for line in lines if line.startswith(("L[", "T["))]
    assert found[:3] == ["L['self'].inner", "L['self'].inner.weight", "L['self'].inner.bias"]
    hidden = [line.startswith("T[") or "._" in line for line in found]
    assert hidden == sorted(hidden)


def test_equal_lines_are_shown_once() -> None:
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    compiled = tripwire.compile(step, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2, 3))
    told = str(tripwire.explain(compiled))
    entries = len(tripwire.explain(compiled).entries)
    assert told.count("holds for grad(") <= 4 * entries
    assert "more of grad() there (.entries[i].summary.branches)" in told


def test_a_write_that_retires_several_entries_is_shown_once() -> None:
    net = Net()
    compiled = tripwire.compile(net, dynamic=False, backend="eager")
    for size in (2, 3, 4):
        compiled(torch.ones(size))
    net.scale = 3.0
    compiled(torch.ones(2))
    found = tripwire.explain(compiled)
    assert len(found.retirements) == 3
    told = str(found)
    retired = told[told.index("  retired:") : told.index("  compiles:")]
    assert retired.count("L['self'].scale: 2.0 → 3.0") == 1
    assert retired.endswith(" ×3\n")


def test_modules_that_are_compiled_on_their_own_are_listed_with_their_hits() -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.head = nn.Linear(4, 2)  # without parts, so it stays as it is

        def forward(self, x):
            tell("")
            return self.head(self.body(x))

    compiled = tripwire.compile(Timed(), backend="eager")
    for _ in range(12):
        compiled(X)
    found = tripwire.explain(compiled)
    (inner,) = found.modules
    assert (inner.name, inner.calls, inner.hits, inner.entries) == ("Timed.Sequential", 9, 8, 1)
    told = str(found)
    assert "inside:\n    Timed.Sequential: 9 calls, 8 hits, 1 entry" in told


@pytest.mark.skipif(not CAN_DRAW, reason="tripwire's C modules aren't built")
def test_a_compile_without_an_entry_says_so() -> None:
    compiled = tripwire.compile(lambda x: x * random.random(), backend="eager")
    for _ in range(4):
        compiled(X)
    first, second = str(tripwire.explain(compiled)).splitlines()[-2:]
    assert first.endswith("no entry: a later trace leaves something else open")
    assert "no entry" not in second


def test_a_wire_on_a_closure_tells_the_line_that_uses_it() -> None:
    def outer():
        box = [2.0]

        def inner(x):
            y = x + 1
            return y * box[0]

        return inner

    compiled = tripwire.compile(outer())
    compiled(X)
    wires = tripwire.explain(compiled).entries[0].wires
    (box,) = [wire for wire in wires if wire.source.endswith("C['box']")]
    assert box.text == "return y * box[0]"


def test_an_explanation_names_what_was_written_and_by_whom() -> None:
    (cause,) = tripwire.explain(compiled_net()).retirements
    assert "L['self'].scale: 2.0 → 3.0" in cause
    assert ("test_explain.py" if IS_COMPILED else "writer unknown") in cause


def test_an_explanation_says_where_compile_time_went() -> None:
    found = tripwire.explain(compiled_net())
    assert [one.number.rpartition("/")[2] for one in found.compiles] == ["0", "1"]
    for one in found.compiles:
        assert {"trace", "observe", "plan", "arm", "backend"} <= set(one.phases)
        assert sum(one.phases.values()) <= one.duration * 1.01 + 100
    assert "scale" in found.compiles[1].reason


def test_an_explanation_groups_refusals_with_the_users_line(capsys) -> None:
    def loud(x):
        tell("loud")
        return x * 2

    compiled = tripwire.compile(loud)
    for _ in range(5):
        compiled(X)
    (refusal,) = tripwire.explain(compiled).refusals
    assert (refusal.slug, refusal.count) == ("prints", 3)
    assert refusal.place.endswith(f"test_explain.py:{loud.__code__.co_firstlineno + 1}")
    assert refusal.text == 'tell("loud")'


def test_an_explanation_is_plain_data_text_and_html() -> None:
    found = tripwire.explain(compiled_net())
    data = json.loads(json.dumps(found.data()))
    assert data["hits"] == 1
    text = str(found)
    for line in (
        "3 calls: 1 hit, 2 traced, 2 entries, 1 retirement",
        "entry 0: in use",
        "retired:",
        "compiles:",
    ):
        assert line in text
    assert found._repr_html_().startswith("<pre>")


def test_names_of_the_users_are_escaped_in_html() -> None:
    def f(x):
        return x + 1

    compiled = tripwire.compile(f, name="<script>alert(1)</script>")
    compiled(X)
    assert "<script>" not in tripwire.explain(compiled)._repr_html_()


def test_a_plain_callable_is_previewed_by_one_run() -> None:
    net = Net()
    found = tripwire.preview(net, X)
    assert net.calls == 1
    assert torch.equal(found.result, X * 2)
    assert found.refusal is None
    assert any(source == "L['self'].scale" for source, _, _ in found.reads)
    assert "can be captured: " in str(found)
    assert json.loads(json.dumps(found.data()))["effects"] == ["L['self'].calls"]


def test_what_is_printed_begins_with_reads_of_the_users_each_once() -> None:
    model = nn.Sequential(Net(), nn.Linear(4, 2))
    compiled = tripwire.compile(Outer(model), backend="eager")
    compiled(X)
    for told in (str(tripwire.preview(Outer(model), X)), str(tripwire.explain(compiled))):
        shown = [line.strip() for line in told.splitlines() if f"{Path(__file__).name}:" in line]
        assert len(shown) == len(set(shown)) > 0
        rest = told.splitlines()
        assert not [line for line in rest if "module.py:" in line or "__repr__" in line]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


def test_a_preview_says_why_a_call_would_be_refused(capsys) -> None:
    found = tripwire.preview(lambda x: tell("hello"), X)
    assert found.refusal.slug == "prints"
    assert "would run as plain Python" in str(found)
    assert found.data()["refusal"]["slug"] == "prints"


OWN = random.Random(5)
DRAWING: dict[str, tuple[Any, str | None, str]] = {
    "random": (lambda x: x * random.random(), None, "random.random()"),
    "randint": (lambda x: x * random.randint(0, 5), None, "random.randrange(6)"),
    "choice": (lambda x: x * random.choice([1, 2, 3]), None, "random.randrange(3)"),
    "gauss": (lambda x: x * random.gauss(0, 1), None, "random.gauss(0, 1)"),
    "NumPy's": (lambda x: x * np.random.rand(), None, "numpy.random.rand()"),
    "an own gauss": (lambda x: x * OWN.gauss(0, 1), "python-random", "`random.gauss` draws"),
    "an array": (lambda x: x + float(np.random.rand(2)[0]), "numpy-random",
                 "`numpy.random.rand` draws"),
    "a text": (lambda x: x * len(f"{random.random()}"), "python-random", "becomes part"),
    "a type": (lambda x: x if type(random.random()) is float else -x, "python-random", "`random`"),
    "many ways": (lambda x: random.shuffle([x, 1, 2, 3, 4]) or x, "python-random", "8 ways"),
}  # fmt: skip


@pytest.mark.skipif(not CAN_DRAW, reason="tripwire's C modules aren't built")
@pytest.mark.parametrize(("fn", "slug", "told"), DRAWING.values(), ids=DRAWING)
def test_a_preview_says_of_draws_what_compiling_does(fn, slug, told) -> None:
    seen = tripwire.preview(fn, X)
    compiled = tripwire.compile(fn, backend="eager")
    for _ in range(12):
        compiled(X)
    found = {refusal.slug for refusal in tripwire.explain(compiled).refusals}
    assert found == ({slug} if slug else set())
    assert (seen.refusal.slug if seen.refusal else None) == slug
    assert (compiled.statistics().hits == 0) is (slug is not None)
    assert told in (seen.refusal.reason if seen.refusal else seen.draws)
    assert told in str(seen)


def test_a_preview_of_something_compiled_runs_the_original_and_leaves_the_compiled_alone() -> None:
    compiled = compiled_net()
    before = compiled.statistics()
    assert torch.equal(tripwire.preview(compiled, X).result, X * 3)
    assert compiled.statistics() == before
    assert compiled.calls == 4


def test_what_cannot_be_called_cannot_be_previewed() -> None:
    with pytest.raises(tripwire.BadOption, match="not-callable"):
        tripwire.preview(3)


@pytest.mark.parametrize("plain", [3, Net(), compiled_net])
def test_what_is_not_compiled_is_not_explained_but_sent_to_preview(plain) -> None:
    with pytest.raises(tripwire.BadOption, match="preview") as caught:
        tripwire.explain(plain)
    assert caught.value.slug == "not-compiled"


def test_a_compiled_method_is_explained() -> None:
    class Scaler:
        scale = 2.0

        @tripwire.compile
        def apply(self, x):
            return x * self.scale

    scaler = Scaler()
    scaler.apply(X)
    scaler.apply(X)
    assert tripwire.explain(scaler.apply).hits == 1


def test_a_callable_that_was_never_called_has_nothing_to_explain() -> None:
    found = tripwire.explain(tripwire.compile(lambda x: x))
    assert (found.calls, found.entries, found.compiles) == (0, (), ())


# --- what the pipeline tells ---


def events_of(folder, tag):
    kinds = [logged.event for logged in telemetry.read_events(folder)]
    return [event for event in kinds if event.__struct_config__.tag == tag]


def test_a_compile_leaves_its_graph_guards_wires_and_reads_in_the_log(tmp_path) -> None:
    with telemetry.logging_to(str(tmp_path)):
        compiled_net()
    graph, again = events_of(tmp_path, "graph")
    assert graph.compile_id != again.compile_id
    (mul,) = [node for node in graph.nodes if "mul" in node.name]
    assert mul.text == "return x * self.scale"
    assert mul.file.endswith("test_explain.py")
    assert "def " in events_of(tmp_path, "guards")[0].source
    wires = [row.source for row in events_of(tmp_path, "wires")[0].wires]
    assert wires.index("L['self'].scale") < wires.index(
        "L['self']._forward_hooks"
    )  # the user's first
    for rows in (events_of(tmp_path, "wires")[0].wires, events_of(tmp_path, "reads")[0].reads):
        (scale,) = [row for row in rows if row.source == "L['self'].scale"]
        assert (scale.file, scale.line) == (mul.file, mul.line)
        assert scale.text == "return x * self.scale"
    (retired,) = events_of(tmp_path, "retirement")
    assert (retired.source, retired.old, retired.new) == ("L['self'].scale", "2.0", "3.0")
    assert retired.file.endswith("test_explain.py" if IS_COMPILED else "")
    (again,) = events_of(tmp_path, "recompile")
    assert "scale" in again.reasons[0]
    names = {event.name for event in events_of(tmp_path, "span")}
    assert {"compile", "trace", "observe", "plan", "arm", "backend", "retire"} <= names


def test_a_refusal_is_in_the_log_with_its_line(tmp_path, capsys) -> None:
    with telemetry.logging_to(str(tmp_path)):
        tripwire.compile(lambda x: (tell("1"), x)[1])(X)
    (refused,) = events_of(tmp_path, "refusal")
    assert refused.slug == "prints"
    assert 'tell("1")' in refused.excerpt


def test_metrics_of_a_compile_have_its_sizes(caplog) -> None:
    caplog.set_level(logging.ERROR)
    telemetry.clear_compilation_metrics()
    compiled_net()
    first, second = telemetry.get_compilation_metrics()
    assert first.graph_op_count == 3
    assert first.branch_count == 1
    assert first.guard_count > 0
    assert first.wire_count > 0
    assert first.recompile_reason is None
    assert second.cache_size == 2
    assert first.backend == "eager"


def test_hits_and_misses_are_counted_though_a_hit_tells_nobody() -> None:
    from tripwire.dispatch.telling import count_hits

    count_hits()
    before = telemetry.statistics().groups.get("frames", {})
    compiled = compiled_net()
    count_hits()
    count_hits()
    after = telemetry.statistics().groups["frames"]
    assert after["hit"] - before.get("hit", 0) == 1
    assert after["miss"] - before.get("miss", 0) == 2
    compiled(X)
    del compiled
    assert telemetry.statistics().groups["frames"]["hit"] - before.get("hit", 0) == 2


def test_without_telemetry_everything_compiles(monkeypatch) -> None:
    telemetry.disable()
    try:
        compiled = compiled_net()
    finally:
        telemetry.enable()
    assert compiled.statistics().hits == 1


def test_a_condition_about_a_size_names_what_the_user_passed() -> None:
    def short(x: torch.Tensor, step: int) -> torch.Tensor:
        return x * step if x.shape[0] < 6 and step < 4 else x

    fast = tripwire.compile(short, backend="eager")
    for count, step in ((3, 1), (4, 2), (5, 3), (8, 2), (4, 9)):
        fast(torch.ones(count), step)
    told = str(tripwire.explain(fast))
    assert "L['x'].shape[0] <= 5 doesn't hold" in told
    assert "L['step'] <= 3 doesn't hold" in told
