"""Meters: what torch's compilers took, and what they found in caches, while a graph was compiled.

torch keeps such figures for Dynamo: times by the names of its phases, and the rest in a metrics
context of the thread. In this thread a context of ours stands in its place, so Dynamo's own records
hear nothing of it. Whoever compiles without Dynamo's modules has nothing to tell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Columns of CompilationMetrics, by torch's names of phases.
_TIMES = {
    "_recursive_pre_grad_passes": "pre_grad_pass_time_us",
    "_recursive_joint_graph_passes": "joint_graph_pass_time_us",
    "_recursive_post_grad_passes": "post_grad_pass_time_us",
    "create_aot_dispatcher_function": "aot_autograd_time_us",
    "compile_fx_inner": "inductor_time_us",
    "GraphLowering.codegen": "code_gen_time_us",
    "async_compile.wait": "triton_compile_time_us",
    "async_compile.precompile": "triton_compile_time_us",
    "benchmark_fused_nodes": "compile_time_autotune_time_us",
    "CachingAutotuner.benchmark_all_configs": "runtime_triton_autotune_time_us",
    "CachingAutotuner.coordinate_descent_tuning": "runtime_triton_autotune_time_us",
    "CachingAutotuner.combo_sequential_autotune": "runtime_triton_autotune_time_us",
    "cudagraphify.get_container": "runtime_cudagraphify_time_us",
    "CUDAGraphNode.record": "runtime_cudagraphify_time_us",
}
_TUNING = ("_template_autotuning", "_template_precompiling")  # behind the name of an operation
# The same for what torch counts, of which some is one figure here.
_COUNTS = {
    f"{cache}_{place}_cache_{what}_count": f"{place}_cache_{what}_count"
    for cache in ("inductor_fx", "aotautograd")
    for place in ("local", "remote")
    for what in ("hit", "miss")
} | {"distributed_ephemeral_timeout_us": "cache_saved_time_us"}
_KEYS = {
    "inductor_fx_remote_cache_hit_keys": "cache_hit_keys",
    "inductor_fx_remote_cache_miss_keys": "cache_miss_keys",
}


@contextmanager
def metering(figures: dict[str, Any]) -> Iterator[None]:
    """Take down what torch's compilers do inside, by columns of CompilationMetrics.

    Times are those of all threads.
    """
    before = _sum_times()
    heard: dict[str, Any] = {}
    try:
        with _hearing(heard):
            yield
    finally:
        for column, us in _sum_times().items():
            if us > before.get(column, 0):
                figures[column] = us - before.get(column, 0)
        _take(heard, figures)


def _sum_times() -> dict[str, int]:
    """What torch's phases took so far, in microseconds."""
    found: dict[str, int] = {}
    seconds = getattr(sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {})
    for phase in list(seconds):
        tunes = "compile_time_autotune_time_us" if phase.endswith(_TUNING) else None
        column = _TIMES.get(phase, tunes)
        if column is not None:
            found[column] = found.get(column, 0) + int(sum(seconds[phase]) * 1e6)
    return found


@contextmanager
def _hearing(heard: dict[str, Any]) -> Iterator[None]:
    """Take down what is told to torch's metrics context of this thread."""
    utils = sys.modules.get("torch._dynamo.utils")
    slots = getattr(utils, "_metrics_context_tls", None)
    if utils is None or slots is None:
        yield
        return
    outer = utils.get_metrics_context()
    slots.metrics_context = utils.MetricsContext(on_exit=lambda *told: heard.update(told[2]))
    try:
        # torch tells counts to the outermost event, and raises where there is none.
        with slots.metrics_context, utils.chromium_event_timed("tripwire"):
            yield
    finally:
        slots.metrics_context = outer


def _take(heard: Mapping[str, Any], figures: dict[str, Any]) -> None:
    for name, column in _COUNTS.items():
        if name in heard:
            figures[column] = figures.get(column, 0) + heard[name]
    for name, column in _KEYS.items():
        if name in heard:
            figures[column] = set(heard[name])
    if "cudagraph_skip_reason" in heard:
        figures["cudagraph_skip_reason"] = heard["cudagraph_skip_reason"]
    if "triton_kernel_compile_times_us" in heard:
        figures["triton_kernel_compile_times_us"] = dict(heard["triton_kernel_compile_times_us"])
