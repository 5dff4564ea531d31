from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from unit.telemetry.forking import in_fork

from tripwire import telemetry
from tripwire.forks import make_lock
from tripwire.telemetry import pytorch


def test_counts_are_kept_by_group_and_name():
    telemetry.count("frames", "hit")
    telemetry.count("frames", "hit", 2)
    pytorch.increment_frame()
    pytorch.increment_op_count(7)
    found = telemetry.statistics()
    assert found["frames"] == {"hit": 3, "total": 1}
    assert (found.frames, found.ops) == (1, 7)
    assert found["never"] == {}
    assert str(found) == "frames: hit=3, total=1\nops: total=7"


def test_statistics_are_frozen():
    telemetry.count("a", "b")
    found = telemetry.statistics()
    telemetry.count("a", "b")
    assert found["a"]["b"] == 1
    with pytest.raises(TypeError):
        found["a"]["b"] = 5
    with pytest.raises(AttributeError):
        found.ops = 3


def test_reset_makes_every_count_zero():
    telemetry.count("a", "b")
    telemetry.reset_counters()
    assert telemetry.statistics().groups == {}


def test_a_lock_that_another_thread_holds_at_a_fork_is_free_in_the_child():
    lock = make_lock()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_fork(lambda: lock.acquire(timeout=5)) is True
    finally:
        done.set()
        thread.join()


def test_the_first_record_of_a_compile_needs_nothing_that_threads_would_prepare_at_once():
    """msgspec resolves a class's annotations at first use, without a lock: a thread may crash."""
    script = (
        "import sys, msgspec._utils as utils\n"
        "from tripwire.telemetry import CompilationMetrics\n"
        "seen = set()\n"
        "sys.setprofile(lambda frame, event, arg: seen.add(frame.f_code))\n"
        "CompilationMetrics.create({'start_time_us': 1})\n"
        "sys.setprofile(None)\n"
        "assert CompilationMetrics.create.__code__ in seen\n"
        "assert utils.get_class_annotations.__code__ not in seen\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
