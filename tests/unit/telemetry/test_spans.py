from __future__ import annotations

import logging
import sys
import threading
from unittest import mock

import pytest
import torch
from support import Unnamed, run_python
from unit.telemetry.forking import in_fork

from tripwire import telemetry
from tripwire.errors import TelemetryError
from tripwire.telemetry import logging_to, pytorch, read_events, timed
from tripwire.telemetry.compiles import CompileId, compiling
from tripwire.telemetry.schema import SpanDone
from tripwire.telemetry.threads import local, merge_totals


def test_a_span_adds_its_time_to_its_key(clock):
    with timed("trace"):
        clock.advance(us=5)
    with timed("trace"):
        clock.advance(us=7)
    total = merge_totals()["trace"]
    assert (total.ns, total.calls) == (12_000, 2)
    assert list(total.durations_ns) == [5_000, 7_000]


def test_only_the_outermost_span_of_a_key_adds_to_the_total(clock):
    with timed("trace"):
        clock.advance(us=1)
        with timed("other"), timed("trace"):
            clock.advance(us=2)
    totals = merge_totals()
    assert totals["trace"].ns == 3_000
    assert totals["trace"].calls == 2
    assert totals["other"].ns == 2_000


def test_a_span_is_recorded_when_its_body_raises(clock):
    with pytest.raises(ValueError), timed("trace"):
        clock.advance(us=4)
        raise ValueError
    total = merge_totals()["trace"]
    assert (total.ns, total.errors) == (4_000, 1)
    assert local.state.stack == []


def test_a_span_decorates_functions_that_call_themselves(clock):
    @timed("down")
    def down(n: int) -> int:
        """Goes down."""
        clock.advance(us=1)
        return n if n == 0 else down(n - 1)

    assert down(3) == 0
    assert down.__doc__ == "Goes down."
    assert merge_totals()["down"].ns == 4_000
    assert merge_totals()["down"].calls == 4


def test_a_decorator_made_while_off_measures_once_spans_are_on(clock):
    telemetry.disable()

    @timed("late", column_us="trace_us")
    def work() -> None:
        clock.advance(us=3)

    work()
    assert merge_totals() == {}
    telemetry.enable()
    work()
    assert merge_totals()["late"].ns == 3_000
    assert pytorch.get_runtime_metrics_context().get("trace_us") == 3


def test_off_measures_nothing_and_swallows_nothing():
    telemetry.disable()
    with pytest.raises(KeyError), timed("trace", column_us="trace_us"):
        raise KeyError
    assert merge_totals() == {}


def test_a_span_that_is_open_while_spans_go_off_and_on_again_is_forgotten(clock):
    with timed("outer"):
        telemetry.disable()
        telemetry.enable()
        with timed("inner"):
            clock.advance(us=1)
    assert list(merge_totals()) == ["inner"]


def test_inside_a_compile_the_time_goes_to_that_compiles_metrics(clock):
    with compiling(CompileId(0), function="f"):
        with timed("trace", column_us="trace_us"):
            clock.advance(us=10)
            with timed("observe", column_us="observe_us"):
                clock.advance(us=5)
        clock.advance(us=2)
    (metrics,) = telemetry.get_compilation_metrics()
    assert metrics.trace_us == 15
    assert metrics.observe_us == 5
    assert metrics.duration_us == 17
    assert metrics.unattributed_us == 2
    assert metrics.phases == {"trace_us": 15, "observe_us": 5, "unattributed_us": 2}


def test_outside_a_compile_the_time_goes_to_the_runtime_metrics(clock):
    with timed("first run", column_us="first_run_us", compile_id="0/1", is_backward=True):
        clock.advance(us=10)
        with timed("check", column_us="record_us"):
            clock.advance(us=5)
    pytorch.get_runtime_metrics_context().finish()
    (metrics,) = telemetry.get_compilation_metrics()
    assert metrics.is_runtime
    assert (metrics.compile_id, metrics.is_forward) == ("0/1", False)  # of the span around
    assert (metrics.first_run_us, metrics.record_us, metrics.duration_us) == (15, 5, 15)


def test_a_column_must_be_in_microseconds_and_must_exist():
    with pytest.raises(TelemetryError, match=r"\[column-unit\]"), timed("x", column_us="trace_s"):
        pass
    with pytest.raises(TelemetryError, match=r"\[column-unknown\]"), timed("x", column_us="x_us"):
        pass
    assert local.state.stack == []


def test_overlapping_spans_are_repaired_with_a_warning(clock, caplog):
    outer, inner = timed("outer"), timed("inner")
    outer.__enter__()
    inner.__enter__()
    clock.advance(us=3)
    with caplog.at_level(logging.WARNING, "tripwire.telemetry"):
        outer.__exit__(None, None, None)
        with timed("around"):
            inner.__exit__(None, None, None)
    assert "inner was still open when an event around it ended" in caplog.text
    assert "is no longer open" in caplog.text
    assert merge_totals()["outer"].ns == 3_000
    assert local.state.stack == []


def test_threads_have_their_own_stacks_and_their_figures_outlive_them():
    started = threading.Barrier(4)

    def work() -> None:
        with timed("shared"):
            started.wait()
            for _ in range(500):
                with timed("many"):
                    telemetry.count("group", "name")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del threads, thread
    totals = merge_totals()
    assert totals["many"].calls == 2000
    assert totals["shared"].calls == 4
    assert totals["shared"].ns >= max(totals["shared"].durations_ns)
    assert telemetry.statistics()["group"]["name"] == 2000


def test_a_forked_child_begins_with_nothing_and_may_leave_its_parents_span():
    def child() -> tuple[int, int, list[str]]:
        span.__exit__(None, None, None)
        with timed("childs"):
            pass
        telemetry.count("a", "b")
        return telemetry.statistics()["a"]["b"], len(local.state.stack), list(merge_totals())

    telemetry.count("a", "b", 10)
    span = timed("parents")
    span.__enter__()
    assert in_fork(child) == (1, 0, ["childs"])
    span.__exit__(None, None, None)
    assert telemetry.statistics()["a"]["b"] == 10


def test_a_fork_while_another_thread_writes_leaves_a_child_that_works():
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            with timed("busy"):
                telemetry.count("a", "b")
            merge_totals()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(10):
            assert (
                in_fork(lambda: (telemetry.count("a", "c"), telemetry.statistics().frames)[1]) == 0
            )
    finally:
        stop.set()
        thread.join()


def test_spans_are_ranges_of_torchs_profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with timed("trace", wait_counter="trace"):
            torch.ones(1)
    names = {event.key for event in profile.key_averages()}
    assert "trace (tripwire)" in names


class Counted:
    def __init__(self, name, open_, seen):
        self.name, self.open, self.seen = name, open_, seen

    def guard(self):
        return self

    def __enter__(self):
        self.open.append(self.name)
        self.seen.append(tuple(self.open))

    def __exit__(self, *_):
        self.open.remove(self.name)


def test_the_outermost_span_of_the_metrics_feeds_a_wait_counter(monkeypatch):
    open_, seen = [], []
    monkeypatch.setattr(torch.monitor, "_WaitCounter", lambda name: Counted(name, open_, seen))
    with timed("unmeasured"), timed("first run", column_us="first_run_us"):
        with timed("plan", column_us="plan_us"):
            pass
    with compiling(CompileId(0), function="f"), timed("trace", column_us="trace_us"):
        pass
    with pytest.raises(KeyError), timed("retire", column_us="retire_us"):
        raise KeyError
    assert [name for (name,) in seen] == [
        "tripwire.wait_counter.runtime_overheads",
        "tripwire.wait_counter.compile",
        "tripwire.wait_counter.runtime_overheads",
    ]
    assert open_ == []


def test_spans_inside_have_the_compile_and_the_direction_of_the_one_around(clock):
    logger = pytorch.get_chromium_event_logger()
    with timed("run", compile_id="3/1", is_backward=True):
        with timed("load"):
            with timed("other", compile_id="4/0", is_backward=False):
                assert logger.get_pt2_compile_substack() == ["run", "load", "other"]
    with timed("alone", event_name="shown"):
        assert logger.get_pt2_compile_substack() == []
    begun = {event.name: event.args for event in logger.events() if event.ph == "B"}
    pytorch.stop_chromium_event_logger()
    assert begun == {
        "run": {"compile_id": "3/1", "is_backward": True},
        "load": {"compile_id": "3/1", "is_backward": True},
        "other": {"compile_id": "4/0", "is_backward": False},
        "shown": {"fn_name": "alone"},
    }


def test_telemetry_needs_no_torch():
    code = (
        "import sys; from tripwire import telemetry as t\n"
        "with t.timed('x', wait_counter='y'): pass\n"
        "print('torch' in sys.modules)"
    )
    assert run_python(code) == "False"
    assert "torch" in sys.modules


class _Unreal:
    @property
    def __class__(self):
        raise RuntimeError("it isn't told")


def test_a_class_that_doesnt_tell_its_name_changes_nothing_that_is_timed(tmp_path) -> None:
    with logging_to(tmp_path):
        with pytest.raises(Unnamed):
            with timed("span", metadata={"a": [_Unreal(), Unnamed(), mock.Mock(spec=dict)]}):
                raise Unnamed("x")
    (span,) = (one.event for one in read_events(tmp_path) if isinstance(one.event, SpanDone))
    assert span.error == "Unnamed"
    assert [text.partition(":")[0] for text in span.data["a"]] == ["<_Unreal", "<Unnamed", "<Mock"]
