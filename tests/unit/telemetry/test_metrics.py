from __future__ import annotations

import json
from pathlib import Path

import pytest

from tripwire import telemetry
from tripwire.errors import CannotTrace, TelemetryError
from tripwire.telemetry import CompilationMetrics, pytorch
from tripwire.telemetry.metrics import PHASES
from tripwire.telemetry.pytorch import (
    CompileId,
    MetricsContext,
    RuntimeMetricsContext,
    TopN,
    compiling,
)


def test_metrics_are_handed_over_once_at_the_outermost_exit():
    given = []
    context = MetricsContext(given.append)
    with context:
        context.set("a", 1)
        with context:
            context.increment("b")
            context.increment("b", 2)
        assert not given
        assert context.in_progress()
    assert [g.metrics for g in given] == [{"a": 1, "b": 3}]
    assert given[0].error is None
    assert not context.in_progress()
    with context:
        context.set("a", 2)
    assert given[1].metrics == {"a": 2}


def test_the_exception_is_handed_over_and_goes_on():
    given = []
    context = MetricsContext(given.append)
    error = ValueError("no")
    with pytest.raises(ValueError), context:
        raise error
    assert given[0].error is error


def test_setting_twice_names_the_earlier_place():
    context = MetricsContext(lambda given: None)
    with context:
        context.set("a", 1)  # the earlier place
        line = next(
            n
            for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
            if text.endswith("# the earlier place")
        )
        with pytest.raises(TelemetryError, match=rf"(?s)a was already set.*test_metrics.py:{line}"):
            context.set("a", 2)
        with pytest.raises(TelemetryError, match=r"\[metric-set-twice\]"):
            context.update({"b": 1, "a": 2})
        assert context.get("b") is None
        context.set("a", 3, overwrite=True)
        context.update({"a": 4}, overwrite=True)
        assert context.get("a") == 4


def test_outer_updates_count_at_the_outermost_level_only():
    context = MetricsContext(lambda given: None)
    with context:
        with context:
            context.update_outer({"a": 1})
        assert context.get("a") is None
        context.update_outer({"a": 2})
        assert context.get("a") == 2


def test_collections_gather_values():
    given = []
    context = MetricsContext(given.append)
    with context:
        for value in ("b", "a", "b"):
            context.add_to_set("s", value)
        context.set_key_value("m", "x", True)
        context.set_key_value("m", "x", False)
        for n in range(30):
            context.add_top_n("t", f"k{n}", n % 10, at_most=3)
    metrics = given[0].metrics
    assert metrics["s"] == {"a", "b"}
    assert metrics["m"] == {"x": False}
    assert list(metrics["t"]) == [("k9", 9), ("k19", 9), ("k29", 9)]


@pytest.mark.parametrize(
    "use",
    [
        lambda c: c.set("a", 1),
        lambda c: c.update({"a": 1}),
        lambda c: c.update_outer({"a": 1}),
        lambda c: c.increment("a"),
        lambda c: c.add_to_set("a", 1),
        lambda c: c.add_top_n("a", "k", 1),
        lambda c: c.set_key_value("a", "k", 1),
        lambda c: c.__exit__(None, None, None),
    ],
)
def test_outside_of_a_context_every_use_is_an_error(use):
    with pytest.raises(TelemetryError, match=r"\[metrics-not-in-progress\]"):
        use(MetricsContext(lambda given: None))


def test_a_metric_holds_one_kind_of_thing():
    context = MetricsContext(lambda given: None)
    with context:
        context.set("a", "text")
        for use in (
            lambda: context.increment("a"),
            lambda: context.add_to_set("a", 1),
            lambda: context.set_key_value("a", "k", 1),
            lambda: context.add_top_n("a", "k", 1),
        ):
            with pytest.raises(TelemetryError, match=r"\[metric-of-another-kind\]"):
                use()


def test_a_hand_over_that_fails_is_logged_and_fails_nothing(caplog):
    def broken(given):
        raise OSError

    with MetricsContext(broken):
        pass
    assert "metrics could not be recorded" in caplog.text


def test_runtime_metrics_gather_until_they_are_finished(clock):
    given = []
    context = RuntimeMetricsContext(given.append)
    context.finish()
    assert not given
    context.increment("a", 2, {"b": 1, "c": None})
    clock.advance(us=3)
    context.increment("a", 3, {"b": 2})
    context.finish()
    assert given[0].metrics == {"a": 5, "b": 1}
    assert given[0].end_ns - given[0].start_ns == 3000
    context.finish()
    assert len(given) == 1


def test_top_n_keeps_the_highest():
    top = TopN(2)
    for key, value in [("a", 1), ("b", 3), ("c", 2), ("d", 3)]:
        top.add(key, value)
    assert list(top) == [("b", 3), ("d", 3)]
    assert len(top) == 2


# --- CompilationMetrics ------------------------------------------------------------------------


def test_sets_become_sorted_texts_and_older_units_are_derived():
    metrics = CompilationMetrics.create(
        {
            "restart_reasons": {"b", "a"},
            "cache_hit_keys": ["z", "y"],
            "duration_us": 1_500_000,
            "cache_get_time_us": 2999,
            "triton_kernel_compile_times_us": TopN(1),
            "compile_id": CompileId(3, 1),
        }
    )
    assert metrics.restart_reasons == "a,b"
    assert metrics.cache_hit_keys == "y,z"
    assert metrics.compile_id == "3/1"
    assert metrics.entire_frame_compile_time_s == 1.5
    assert metrics.cache_get_time_ms == 2
    row = metrics.as_row()
    assert row["entire_frame_compile_time_s"] == 1.5
    assert row["triton_kernel_compile_times_us"] == "[]"
    assert json.loads(json.dumps(row)) == row


def test_everything_that_was_promised_is_a_field():
    fields = set(CompilationMetrics.__struct_fields__)
    assert fields >= {
        *("compile_id", "frame_key", "co_name", "co_filename", "co_firstlineno"),
        *("cache_size", "accumulated_cache_size", "guard_count", "wire_count"),
        *("graph_op_count", "graph_node_count", "graph_input_count", "num_graph_breaks"),
        *("fail_type", "fail_reason", "fail_user_frame_filename", "fail_user_frame_lineno"),
        *("restart_reasons", "recompile_reason", "recompile_user_contexts"),
        *("local_cache_hit_count", "local_cache_miss_count"),
        *("python_version", "pytorch_version", "cuda_version", "triton_version"),
        *("param_numel", "param_bytes", "param_count", "guard_latency_us", "gc_time_us"),
        *PHASES,
    }


def test_an_unknown_metric_is_an_error_where_it_is_written():
    with compiling(CompileId(0), function="f") as context:
        with pytest.raises(TelemetryError, match=r"\[metric-unknown\]"):
            context.set("gaurd_count", 3)
    with pytest.raises(TelemetryError, match=r"\[metric-unknown\]"):
        CompilationMetrics.create({"gaurd_count": 3})


def test_a_failed_compile_says_what_and_where():
    import torch  # nobody asks for its version before somebody imports it

    def users_line():
        raise CannotTrace("a clock was read", slug="hidden-state")

    with pytest.raises(CannotTrace):
        with compiling(CompileId(1, 2), function="f", file="f.py", line=3, backend="eager"):
            users_line()
    (metrics,) = telemetry.get_compilation_metrics()
    assert metrics.fail_type == "CannotTrace"
    assert metrics.fail_reason == "a clock was read [hidden-state]"
    assert metrics.refusal == "hidden-state"
    assert metrics.fail_user_frame_filename == __file__
    assert metrics.fail_user_frame_lineno == users_line.__code__.co_firstlineno + 1
    assert (metrics.compile_id, metrics.co_name, metrics.backend) == ("1/2", "f", "eager")
    assert metrics.python_version
    assert metrics.pytorch_version == torch.__version__
    assert pytorch.current_compile_id() is None
