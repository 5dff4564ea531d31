from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from faketime import FakeClock, using_clock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import build_header

from tripwire import telemetry
from tripwire.errors import TelemetryError
from tripwire.telemetry import log as event_log
from tripwire.telemetry import logging_to, prometheus_text, pytorch, timed
from tripwire.telemetry import metrics as metrics_module
from tripwire.telemetry.compiles import CompileId, compiling
from tripwire.telemetry.schema import (
    Counts,
    GraphCaptured,
    GraphNode,
    GuardsBuilt,
    ReadRow,
    ReadsSeen,
    Recompiled,
    RecordWritten,
    Retired,
    RunRefused,
    WiresArmed,
)

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def log(tmp_path, monkeypatch):
    """The log of a small run at fixed times, in a process with fixed numbers."""
    header = build_header(
        host="box",
        pid=40,
        token="cafe",
        start_wall_ns=1_700_000_000_000_000_000,
        start_monotonic_ns=1_000_000,
        python="3.11.7",
        argv=("/home/u/train.py",),
        ranks={"RANK": "0"},
    )
    monkeypatch.setattr(event_log, "describe_process", lambda: header)
    monkeypatch.setattr(metrics_module, "_versions", dict)
    monkeypatch.setattr(metrics_module, "find_user_place", lambda tb: ("/home/u/net.py", 4))
    monkeypatch.setattr(metrics_module, "list_frames", lambda tb: ["/home/u/net.py(4): forward"])
    monkeypatch.setattr(event_log.local.state, "ident", 41)
    monkeypatch.setattr(event_log.local.state, "name", "MainThread")
    directory = tmp_path / "log"
    with using_clock(FakeClock(1_000_000)) as clock, logging_to(directory):
        run(clock)
    return directory


def run(clock: FakeClock) -> None:
    with compiling(
        CompileId(2, 0), function="forward<T>", file="/home/u/net.py", line=3
    ) as metrics:
        with timed("trace", column_us="trace_us", metadata={"note": "a\r\nb"}):
            clock.advance(us=100)
            with timed("observe", column_us="observe_us"):
                clock.advance(us=30)
        telemetry.emit(
            GraphCaptured,
            nodes=(
                GraphNode(name="x", op="placeholder", target="x", shape="f32[2]"),
                GraphNode(
                    name="y",
                    op="call_function",
                    target="torch.sin",
                    inputs=("x",),
                    scope="blocks.0",
                    file="/home/u/net.py",
                    line=4,
                    function="forward",
                    shape="f32[2]",
                ),
            ),
        )
        telemetry.emit(GuardsBuilt, source="def admits(x):\n    return x.ndim == 1\n", count=1)
        telemetry.emit(WiresArmed, wires=(ReadRow(source="G['S']", seen="2.0"),))
        telemetry.emit(ReadsSeen, reads=(ReadRow(source="G['S']", seen="2.0", line=4),))
        with timed("back end", column_us="backend_us"):
            clock.advance(us=50)
        metrics.set("guard_count", 1)
        clock.advance(us=1)
    clock.advance(us=10)
    telemetry.emit(
        Retired,
        compile_id="2/0",
        source="G['S']",
        old="2.0",
        new="3.0",
        file="/home/u/cfg.py",
        line=9,
    )
    telemetry.emit(Recompiled, function="forward", reasons=("G['S']: 2.0 → 3.0",))
    telemetry.emit(Counts, groups={"frames": {"hit": 3}})
    with pytest.raises(ValueError), compiling(CompileId(2, 1), function="forward<T>"):
        clock.advance(us=5)
        raise ValueError("no <b>")
    telemetry.emit(RunRefused, slug="hidden-state", reason="a clock was read")
    telemetry.emit(RecordWritten, path="/home/u/forward.rec")
    pytorch.get_runtime_metrics_context().increment("first_run_us", 7, {"is_runtime": True})
    pytorch.get_runtime_metrics_context().finish()


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"{path} was written: read it, and commit it")
    assert text == path.read_text()


def test_the_chrome_trace_has_complete_events_real_ids_and_names(log, tmp_path):
    path = telemetry.write_chrome_trace(log, tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    check_golden("chrome_trace.json", json.dumps(trace, indent=1, ensure_ascii=False) + "\n")
    kinds = {e["ph"] for e in trace["traceEvents"]}
    assert kinds == {"M", "X", "i", "C"}
    assert {e["pid"] for e in trace["traceEvents"]} == {40}


def spans_of(path: Path) -> dict[tuple[int, int], list[tuple[int, int]]]:
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            span = (begin, begin + round(event["dur"] * 1000))
            lanes.setdefault((event["pid"], event["tid"]), []).append(span)
    return lanes


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from("<>"), st.integers(0, 3)), max_size=40))
def test_spans_of_a_thread_nest_or_follow_and_never_overlap(tmp_path, steps):
    shutil.rmtree(tmp_path / "l", ignore_errors=True)
    with using_clock(FakeClock(1_000)) as clock, logging_to(tmp_path / "l") as written:
        opened = []
        for kind, ns in steps:
            clock.advance(ns=ns)
            if kind == "<":
                opened.append(timed(str(len(opened))))
                opened[-1].__enter__()
            elif opened:  # not always the innermost: an overlap that is repaired
                opened.pop(ns % len(opened)).__exit__(None, None, None)
        while opened:
            opened.pop().__exit__(None, None, None)
        empty = written.path is None
    if empty:
        return
    for spans in spans_of(
        telemetry.write_chrome_trace(tmp_path / "l", tmp_path / "t.json")
    ).values():
        for a in spans:
            for b in spans:
                assert (
                    b[0] >= a[1]
                    or b[1] <= a[0]
                    or a[0] <= b[0] <= b[1] <= a[1]
                    or (b[0] <= a[0] <= a[1] <= b[1])
                )
    profiles = json.loads(
        telemetry.write_speedscope(tmp_path / "l", tmp_path / "s.json").read_text()
    )["profiles"]
    for profile in profiles:
        check_balanced(profile)


def check_balanced(profile: dict) -> None:
    stack, last = [], 0.0
    for event in profile["events"]:
        assert event["at"] >= last
        last = event["at"]
        if event["type"] == "O":
            stack.append(event["frame"])
        else:
            assert stack.pop() == event["frame"]
    assert not stack
    assert last <= profile["endValue"]


def test_speedscope_gets_a_balanced_profile_of_each_thread(log, tmp_path):
    path = telemetry.write_speedscope(log, tmp_path / "speed.json")
    found = json.loads(path.read_text())
    check_golden("speedscope.json", json.dumps(found, indent=1) + "\n")
    for profile in found["profiles"]:
        check_balanced(profile)


def test_the_structured_trace_has_the_form_that_tlparse_reads(log, tmp_path):
    (path,) = telemetry.write_torch_trace(log, tmp_path / "tt")
    assert path.name == "dedicated_log_torch_trace_rank_0_40_cafe.log"
    text = path.read_text()
    check_golden("torch_trace.log", text)
    prefix = re.compile(r"[VIWEC]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ [^:]+:\d+\] (\{.*\})")
    lines = text.split("\n")[:-1]
    at = 0
    while at < len(lines):
        found = prefix.fullmatch(lines[at])
        assert found, lines[at]
        envelope = json.loads(found[1])
        at += 1
        payload = []
        while at < len(lines) and lines[at].startswith("\t"):
            payload.append(lines[at][1:])
            at += 1
        wanted = envelope.get("has_payload")
        assert bool(payload) == (wanted is not None)
        if payload:
            assert hashlib.md5("\n".join(payload).encode()).hexdigest() == wanted


@pytest.fixture
def real_log(tmp_path):
    """What tripwire itself writes: a compile, a retirement, a refusal, a call that raises."""
    import torch

    import tripwire

    class Net(torch.nn.Linear):
        scale = 2.0

        def forward(self, x):
            return super().forward(x) * self.scale

    def fails(x):
        raise ValueError("no\r\n<b>\x00 日本語")

    x, net = torch.ones(2, 3), Net(3, 3)
    with logging_to(tmp_path / "real"):
        compiled = tripwire.compile(net)
        compiled(x)
        compiled(x)
        net.scale = 3.0
        compiled(x)
        tripwire.compile(lambda x: (time.time(), x)[1])(x)
        with pytest.raises(ValueError):
            tripwire.compile(fails)(x)
    return tmp_path / "real"


@pytest.mark.skipif(shutil.which("tlparse") is None, reason="tlparse isn't installed")
@pytest.mark.parametrize("made", ["log", "real_log"])
def test_tlparse_opens_the_structured_trace_without_errors(made, request, tmp_path):
    (path,) = telemetry.write_torch_trace(request.getfixturevalue(made), tmp_path / "tt")
    command = ["tlparse", str(path), "-o", str(tmp_path / "out"), "--no-browser", "--strict"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr + done.stdout
    (stats,) = re.findall(r"Stats \{ ok: \d+(.*) \}", said)
    assert stats == "", said  # what it can't take in is counted there
    assert (tmp_path / "out" / "index.html").exists()


def test_prometheus_text_names_counters_and_times(clock):
    telemetry.count("frames", 'odd"name\n')
    with timed("trace"):
        clock.advance(us=1500)
    with pytest.raises(ValueError), compiling(CompileId(0), function="f"):
        raise ValueError
    check_golden("prometheus.txt", prometheus_text())


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("prometheus_client", lambda log: telemetry.serve_metrics()),
        ("opentelemetry.trace", lambda log: telemetry.export_spans(log)),
    ],
)
def test_an_absent_package_is_a_clear_error(log, monkeypatch, package, use):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TelemetryError, match=r"\[exporter-missing\]"):
        use(log)


def test_prometheus_itself_reads_the_text(clock):
    parser = pytest.importorskip(
        "prometheus_client.parser", reason="prometheus-client isn't installed"
    )
    odd = 'odd"name\n\\'
    telemetry.count("frames", odd, 3)
    with timed("trace"):
        clock.advance(us=1500)
    found = {
        family.name: family for family in parser.text_string_to_metric_families(prometheus_text())
    }
    assert found["tripwire_events"].type == "counter"
    counted = {sample.labels["name"]: sample.value for sample in found["tripwire_events"].samples}
    assert counted[odd] == 3
    (trace,) = [s for s in found["tripwire_span_seconds"].samples if s.labels["key"] == "trace"]
    assert trace.value == 0.0015


def test_prometheus_is_answered_over_http(clock):
    client = pytest.importorskip("prometheus_client", reason="prometheus-client isn't installed")
    parser = pytest.importorskip("prometheus_client.parser")
    telemetry.count("frames", "hit", 7)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = set(client.REGISTRY._collector_to_names)
    server, thread = telemetry.serve_metrics(port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for collector in set(client.REGISTRY._collector_to_names) - before:
            client.REGISTRY.unregister(collector)
    found = {family.name: family for family in parser.text_string_to_metric_families(text)}
    (hit,) = [s for s in found["tripwire_events"].samples if s.labels["name"] == "hit"]
    assert hit.value == 7


def test_opentelemetry_gets_spans_with_their_times_and_parents(log):
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk isn't installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    assert telemetry.export_spans(log, provider) == 5
    spans = {span.name: span for span in exporter.get_finished_spans()[:4]}
    assert spans["observe"].parent.span_id == spans["trace"].context.span_id
    assert spans["trace"].end_time - spans["trace"].start_time == 130_000
    assert spans["trace"].attributes["tripwire.compile_id"] == "2/0"


def test_opentelemetry_is_told_of_a_compile_as_it_was(real_log):
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk isn't installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sent = telemetry.export_spans(real_log, provider)
    spans = exporter.get_finished_spans()
    assert len(spans) == sent
    by_id = {span.context.span_id: span for span in spans}
    for span in spans:
        if span.parent is not None:
            parent = by_id[span.parent.span_id]
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time
            assert parent.attributes["thread.id"] == span.attributes["thread.id"]
    compiles = [span for span in spans if span.name == "compile"]
    assert all(span.parent is None for span in compiles)
    assert {by_id[s.parent.span_id].name for s in spans if s.name == "observe"} == {"compile"}
    assert [span.status.status_code for span in compiles].count(StatusCode.ERROR) == 1
