from __future__ import annotations

import pytest
import torch

from tripwire import telemetry
from tripwire.errors import TelemetryError
from tripwire.telemetry import LogReader, logging_to, timed
from tripwire.telemetry.pytorch import (
    CompileEventLogger,
    CompileEventLogLevel,
    CompileId,
    ReinplaceCounters,
    ReInplaceTrigger,
    compiling,
)
from tripwire.telemetry.schema import Instant, SpanDone
from tripwire.telemetry.threads import local

Level = CompileEventLogLevel


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
    assert [(e.ph, e.name, e.ts) for e in timeline.events()] == [
        ("i", "hit", 1000.0),
        ("i", "hit", 5.0),
    ]
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


# --- tensors that could not be turned back in place ----------------------------------------------


@pytest.fixture
def no_counts():
    ReinplaceCounters.clear()
    yield
    ReinplaceCounters.clear()


def test_missed_tensors_and_bytes_are_counted_by_trigger_without_dynamic_sizes(tmp_path, no_counts):
    ReinplaceCounters.add_missed_opportunities(ReInplaceTrigger.TRITON_OPS, 2)
    ReinplaceCounters.add_missed_opportunities(ReInplaceTrigger.AUTO_FUNC_V2, 1)
    ReinplaceCounters.add_missed_bytes(ReInplaceTrigger.TRITON_OPS, 64)
    ReinplaceCounters.add_missed_bytes(ReInplaceTrigger.TRITON_OPS, object())  # a symbolic size
    assert ReinplaceCounters.get_total_missed() == 3
    assert ReinplaceCounters.get_total_missed_bytes() == 64
    with telemetry.logging_to(tmp_path):
        ReinplaceCounters.log()
        ReinplaceCounters.clear()
        ReinplaceCounters.log()
    assert ReinplaceCounters.get_total_missed() == 0
    (instant,) = [e.event for e in telemetry.read_events(tmp_path) if hasattr(e.event, "data")]
    assert instant.data == {
        "missed_tensors_TRITON_OPS": 2,
        "missed_tensors_AUTO_FUNC_V2": 1,
        "missed_bytes_TRITON_OPS": 64,
    }
