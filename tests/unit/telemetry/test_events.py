from __future__ import annotations

import json
import logging
import threading

import pytest
import torch
from forking import in_fork

from tripwire import telemetry
from tripwire.errors import TelemetryError
from tripwire.telemetry import (
    ChromiumEventLogger,
    CompileEventLogger,
    CompileEventLogLevel,
    CompileId,
    LogReader,
    compiling,
    logging_to,
    timed,
)
from tripwire.telemetry.schema import Instant, SpanDone
from tripwire.telemetry.threads import local

Level = CompileEventLogLevel


@pytest.fixture
def timeline(clock):
    yield telemetry.get_chromium_event_logger()
    telemetry.stop_chromium_event_logger()


def rows(logger: ChromiumEventLogger) -> list[tuple[str, str, float]]:
    return [(e.ph, e.name, e.ts) for e in logger.events()]


def test_spans_begin_and_end_in_the_timeline_in_microseconds(timeline, clock):
    with timed("outer", metadata={"a": 1}), timed("inner"):
        clock.advance(us=2)
    assert rows(timeline) == [
        ("B", "outer", 1000.0),
        ("B", "inner", 1000.0),
        ("E", "inner", 1002.0),
        ("E", "outer", 1002.0),
    ]
    assert timeline.events()[-1].args == {"a": 1}
    assert timeline.events()[0].tid == threading.get_native_id()


def test_there_is_no_timeline_before_somebody_asks_for_it(clock):
    assert not telemetry.chromium_event_log_active()
    with timed("x"):
        pass
    logger = telemetry.get_chromium_event_logger()
    assert logger is telemetry.get_chromium_event_logger()
    assert rows(logger) == []
    telemetry.stop_chromium_event_logger()
    with timed("x"):
        pass
    assert rows(logger) == []


def test_data_is_attached_at_the_end(timeline):
    metadata = {"given": True}
    with timed("x", metadata=metadata):
        timeline.add_event_data("x", a=1)
        timeline.increment("x", "n", 2)
        timeline.increment("x", "n", 3)
        timeline.add_to_set("x", "s", "b")
        timeline.add_to_set("x", "s", "a")
        timeline.try_add_event_data("y", a=1)
    begin, end = timeline.events()
    assert begin.args == {"given": True}
    assert end.args == {"given": True, "a": 1, "n": 5, "s": ["a", "b"]}
    assert metadata == {"given": True}


def test_events_of_ones_own_share_the_stack_with_spans(timeline, clock):
    timeline.log_event_start("mine", metadata={"a": 1}, compile_id="1/2")
    with timed("span"):
        assert timeline.get_stack() == ["mine", "span"]
        assert timeline.get_outermost_event() == "mine"
        clock.advance(us=1)
    timeline.log_event_end("mine", metadata={"b": 2})
    assert rows(timeline)[-1] == ("E", "mine", 1001.0)
    assert timeline.events()[-1].args == {"a": 1, "b": 2, "compile_id": "1/2"}
    assert timeline.get_outermost_event() is None


def test_an_end_out_of_order_ends_what_was_opened_inside_with_a_warning(timeline, clock, caplog):
    timeline.log_event_start("a")
    timeline.log_event_start("b")
    clock.advance(us=1)
    with caplog.at_level(logging.WARNING):
        timeline.log_event_end("a")
        timeline.log_event_end("b")
    assert "b was still open when an event around it ended" in caplog.text
    assert [(ph, name) for ph, name, _ in rows(timeline)] == [
        ("B", "a"),
        ("B", "b"),
        ("E", "b"),
        ("E", "a"),
    ]
    timeline.log_event_start("c")
    timeline.reset()
    assert timeline.get_stack() == []


def test_the_timeline_is_bounded_and_its_json_stays_balanced(clock):
    logger = ChromiumEventLogger(limit=3)
    for n in range(3):
        logger.log_event_start(f"e{n}")
        logger.log_instant_event("tick")
        logger.log_event_end(f"e{n}")
    assert logger.dropped == 6
    for name in ("a", "b"):
        logger.log_event_start(name)
    logger.log_event_end("b")
    trace = json.loads(logger.as_json())
    assert [e["ph"] for e in trace["traceEvents"]] == ["B", "B", "E"]
    logger.log_event_end("a")
    trace = json.loads(logger.as_json())
    assert [e["ph"] for e in trace["traceEvents"]] == ["B", "E"]
    assert "dur" not in trace["traceEvents"][0]


def test_each_thread_has_its_own_stack(timeline):
    def work() -> None:
        assert timeline.get_stack() == []
        with timed("theirs"):
            pass

    with timed("mine"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    tids = {e.name: e.tid for e in timeline.events()}
    assert tids["mine"] != tids["theirs"]


# --- CompileEventLogger ------------------------------------------------------------------------


def test_each_level_includes_those_before_it(tmp_path, timeline):
    with logging_to(tmp_path):
        with compiling(CompileId(0), function="f"):
            CompileEventLogger.compilation_metric(guard_count=3)
            CompileEventLogger.increment_toplevel("wire_count", 2)
            CompileEventLogger.increment_toplevel("wire_count", 2)
            CompileEventLogger.add_to_set_toplevel("restart_reasons", "b")
            CompileEventLogger.add_to_set_toplevel("restart_reasons", "a")
            with timed("trace"):
                CompileEventLogger.chromium("trace", seen_by="timeline")
                CompileEventLogger.pt2_compile("trace", seen_by_log=True)
                CompileEventLogger.increment("trace", Level.PT2_COMPILE, "n", 1)
                CompileEventLogger.add_to_set("trace", Level.PT2_COMPILE, "s", 1)
    ends = {e.name: e.args for e in timeline.events() if e.ph == "E"}
    assert ends["trace"]["seen_by"] == "timeline"
    assert ends["trace"]["seen_by_log"] is True
    assert ends["compile"]["guard_count"] == 3
    spans = {e.event.name: e.event.data for e in LogReader(tmp_path) if type(e.event) is SpanDone}
    assert spans["trace"] == {"seen_by_log": True, "n": 1, "s": [1]}
    assert spans["compile"] == {"guard_count": 3, "wire_count": 4, "restart_reasons": ["a", "b"]}
    (metrics,) = telemetry.get_compilation_metrics()
    assert (metrics.guard_count, metrics.wire_count, metrics.restart_reasons) == (3, 4, "a,b")


def test_errors_say_what_isnt_there():
    logger = CompileEventLogger
    with pytest.raises(TelemetryError, match=r"'x' isn't open in this thread \(nothing is\)"):
        logger.chromium("x", a=1)
    with pytest.raises(TelemetryError, match=r"no outermost one"):
        logger.compilation_metric(guard_count=1)
    with timed("outer"):
        with pytest.raises(TelemetryError, match=r"\[event-outside-compile\]"):
            logger.pt2_compile("outer", a=1)
        with pytest.raises(TelemetryError, match=r"\[metrics-not-in-progress\]"):
            logger.compilation_metric(guard_count=1)
        with timed("inner"), pytest.raises(TelemetryError, match=r"'outer' is\).*"):
            logger.add_data("inner", Level.COMPILATION_METRIC, guard_count=1)
    with pytest.raises(TelemetryError, match=r"\[event-level\]"):
        logger.log_instant_event("x", {}, log_level=Level.COMPILATION_METRIC)
    with compiling(CompileId(0), function="f"):
        logger.compilation_metric(guard_count=1)
        with pytest.raises(TelemetryError, match=r"\[metric-set-twice\]"):
            logger.compilation_metric(guard_count=2)
        logger.compilation_metric(overwrite=True, guard_count=3)
        logger.chromium("compile", a="text")
        with pytest.raises(TelemetryError, match=r"\[metric-of-another-kind\]"):
            logger.increment("compile", Level.CHROMIUM, "a", 1)
        with pytest.raises(TelemetryError, match=r"\[metric-of-another-kind\]"):
            logger.add_to_set("compile", Level.CHROMIUM, "a", 1)


def test_the_quiet_forms_are_quiet_where_nothing_is_open_and_nowhere_else():
    logger = CompileEventLogger
    logger.try_add_pt2_compile("x", a=1)
    logger.try_(logger.compilation_metric, guard_count=1)
    with compiling(CompileId(0), function="f"):
        logger.try_(logger.compilation_metric, guard_count=1)
        logger.try_add_pt2_compile("compile", a=1)
        with pytest.raises(TelemetryError, match=r"\[metric-set-twice\]"):
            logger.try_(logger.compilation_metric, guard_count=2)
        assert local.state.stack[0].logged == {"guard_count": 1, "a": 1}


def test_instants_are_in_the_timeline_and_the_log(tmp_path, timeline, clock):
    with logging_to(tmp_path):
        CompileEventLogger.instant("hit", {"n": 1})
        CompileEventLogger.log_instant_event("hit", None, 5000, Level.PT2_COMPILE)
    assert rows(timeline) == [("i", "hit", 1000.0), ("i", "hit", 5.0)]
    found = [e.event for e in LogReader(tmp_path) if isinstance(e.event, Instant)]
    assert [(e.name, e.time_ns, e.data) for e in found] == [
        ("hit", 1_000_000, {"n": 1}),
        ("hit", 5000, {}),
    ]


def test_data_can_be_shown_in_torchs_profiler():
    CompileEventLogger.add_record_function_data("x", a=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        CompileEventLogger.add_record_function_data("x", a=1)
    assert "x_data: a=1" in {event.key for event in profile.key_averages()}


def test_the_timeline_goes_on_in_a_forked_child(timeline):
    def child() -> list[int]:
        with timed("x"):
            pass
        return [e.pid for e in timeline.events()]

    import os

    assert os.getpid() not in in_fork(child)
