from __future__ import annotations

import gc
import logging

import pytest

from tripwire import BadOption, telemetry
from tripwire.telemetry import compiles, pytorch
from tripwire.telemetry.compiles import CompileId, compiling


def test_the_ring_keeps_the_latest_records():
    pytorch.set_compilation_metrics_limit(3)
    for n in range(5):
        with compiling(CompileId(n), function="f"):
            assert pytorch.current_compile_id() == f"{n}/0"
    assert [m.compile_id for m in telemetry.get_compilation_metrics()] == ["2/0", "3/0", "4/0"]
    pytorch.set_compilation_metrics_limit(1)
    assert [m.compile_id for m in telemetry.get_compilation_metrics()] == ["4/0"]
    telemetry.clear_compilation_metrics()
    assert telemetry.get_compilation_metrics() == []


def test_a_broken_listener_is_dropped_and_logged_once(caplog):
    heard = []

    def broken(metrics):
        raise RuntimeError("listener")

    remove = [telemetry.add_listener(broken), telemetry.add_listener(heard.append)]
    with caplog.at_level(logging.ERROR):
        for n in range(3):
            with compiling(CompileId(n), function="f"):
                pass
    assert len(heard) == 3
    assert caplog.text.count("raised, so this listener is dropped") == 1
    for undo in remove:
        undo()
    with compiling(CompileId(9), function="f"):
        pass
    assert len(heard) == 3


def test_a_nested_compile_belongs_to_the_outermost(clock):
    with compiling(CompileId(0), function="outer"):
        with compiling(CompileId(1), function="inner") as context:
            context.set("guard_count", 2)
    (metrics,) = telemetry.get_compilation_metrics()
    assert (metrics.co_name, metrics.guard_count) == ("outer", 2)


def test_a_compile_while_telemetry_is_off_leaves_no_record():
    telemetry.disable()
    with compiling(CompileId(0), function="f") as context:
        context.set("guard_count", 2)
    assert telemetry.get_compilation_metrics() == []


def test_collections_of_garbage_are_timed():
    with compiling(CompileId(0), function="f"):
        cycle: list[object] = []
        cycle.append(cycle)
        gc.collect()
    (metrics,) = telemetry.get_compilation_metrics()
    assert metrics.gc_time_us > 0


def test_compile_ids_read_what_they_print():
    assert CompileId.find(str(CompileId(3, 1))) == CompileId(3, 1)
    assert CompileId.find("x/1") is None
    assert CompileId.find(None) is None
    assert compiles.new_frame_id() < compiles.new_frame_id()


# --- what users say of a recompile ---------------------------------------------------------------


@pytest.fixture
def no_hooks():
    pytorch.reset_recompile_user_contexts()
    yield
    pytorch.reset_recompile_user_contexts()


def test_user_contexts_are_asked_at_a_recompile_and_cut_at_256_characters(no_hooks):
    assert pytorch.get_hook_for_recompile_user_context() is None
    hooks = [lambda: "epoch 3", lambda: "x" * 1000]
    for hook in hooks:
        telemetry.register_hook_for_recompile_user_context(hook)
    assert pytorch.get_hook_for_recompile_user_context() == hooks
    assert compiles.collect_user_contexts() == ("epoch 3", "x" * 256)


def test_a_broken_user_context_is_dropped_and_logged_once(no_hooks, caplog):
    with pytest.raises(BadOption):
        telemetry.register_hook_for_recompile_user_context("epoch 3")
    telemetry.register_hook_for_recompile_user_context(lambda: 1 / 0)
    telemetry.register_hook_for_recompile_user_context(lambda: "fine")
    assert compiles.collect_user_contexts() == ("fine",)
    assert compiles.collect_user_contexts() == ("fine",)
    assert caplog.text.count("is no longer asked about recompiles") == 1
