from __future__ import annotations

import json
import logging
import os
import threading

from unit.telemetry.forking import in_fork

from tripwire.telemetry import pytorch, timed
from tripwire.telemetry.pytorch import ChromiumEventLogger


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


def test_an_instant_of_the_wall_clock_lands_where_it_belongs(timeline, clock):
    clock.wall_offset_ns = 10**18  # as time.time_ns() is far from time.perf_counter_ns()
    clock.advance(us=500)
    at = clock.read_wall()
    clock.advance(us=3)
    pytorch.CompileEventLogger.instant("then", time_ns=at)
    pytorch.CompileEventLogger.instant("same", time_ns=clock.now_ns - 3000)
    pytorch.CompileEventLogger.instant("now")
    assert [(name, ts) for _, name, ts in rows(timeline)] == [
        ("then", 1500.0),
        ("same", 1500.0),
        ("now", 1503.0),
    ]


def test_there_is_no_timeline_before_somebody_asks_for_it(clock):
    assert not pytorch.chromium_event_log_active()
    with timed("x"):
        pass
    logger = pytorch.get_chromium_event_logger()
    assert logger is pytorch.get_chromium_event_logger()
    assert rows(logger) == []
    pytorch.stop_chromium_event_logger()
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


def test_the_timeline_goes_on_in_a_forked_child(timeline):
    def child() -> list[int]:
        with timed("x"):
            pass
        return [e.pid for e in timeline.events()]

    assert os.getpid() not in in_fork(child)
