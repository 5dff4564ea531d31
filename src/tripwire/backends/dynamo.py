"""Dynamo: torch.compile's settings hold here, too, and its compilers' figures are collected.

Stances, resets and the default back end are settings of Dynamo. It is asked for them only if
somebody has imported it: before that, nobody can have set them.

torch keeps figures for Dynamo while a graph is compiled: times by the names of its phases, and the
rest in a metrics context of the thread. In this thread tripwire puts a context of its own in its
place, so Dynamo's own records don't contain these figures. A compile without Dynamo's modules has
no such figures.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from time import monotonic, sleep
from typing import Any

from msgspec import Struct

from tripwire.imports import import_dynamo
from tripwire.rulebook.refusals import Refusal
from tripwire.values.classes import isinstance

# A hit looks here for Dynamo, which may be imported at any time: 25 ns where it isn't.
MODULES = sys.modules
EVAL_FRAME = "torch._dynamo.eval_frame"


def find_stance() -> Any:
    """What torch.compiler.set_stance set, as Dynamo has it: `stance` and `backend`; or None."""
    return getattr(MODULES.get(EVAL_FRAME), "_stance", None)  # a thread may be importing it


def find_default_backend() -> str | Callable[..., Any]:
    """What torch.compiler.set_default_backend set; Inductor without it."""
    registry = MODULES.get("torch._dynamo.backends.registry")
    find = getattr(registry, "get_default_backend", None)  # torch 2.13 has it
    return "inductor" if find is None else find()


def tell_of_reset(listener: Callable[[], None]) -> None:
    """Have a listener called when torch.compiler.reset, or torch._dynamo.reset, is called next.

    Dynamo resets the code objects that it has seen, which it holds as weak references: it calls
    each, and leaves alone what is None. The list is cleared by each reset.
    """
    frames = MODULES.get("torch._dynamo.convert_frame")
    seen = getattr(getattr(frames, "input_codes", None), "seen", None)
    if isinstance(seen, list) and listener not in seen:
        seen.append(listener)


# --- torch.compile's own code, watched ---


class DynamoCompile(Struct, frozen=True):
    """One compile of Dynamo's."""

    number: str  # such as 3/1: the second compile of its fourth frame
    reason: str  # why what was compiled before didn't fit; empty for the first of a frame


def find_plain(compiled: Any) -> Callable[..., Any] | None:
    """What torch.compile compiled; None where it compiled nothing."""
    if getattr(compiled, "_compiled_call_impl", None) is not None:
        return compiled._call_impl  # type: ignore[no-any-return]  # nn.Module.compile
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):  # of a module, of a function
        plain: Callable[..., Any] | None = getattr(compiled, name, None)
        if plain is not None:
            return plain
    return None


# --- one thread's compiler, and runs of the others ---
# torch's compilers keep what they are at in globals. While they work, methods of nn.Module, anomaly
# mode and more are other than usual for all threads, and a run that is observed meanwhile comes to
# nothing.


_observing: set[int] = set()  # threads in which a run is observed
# Seconds that a compiler waits for such a run: it may itself wait for the compiler's thread.
_LONGEST_WAIT = 10.0


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Inside, no other thread compiles, nor is a run of another thread observed.

    The lock is torch.compile's own.
    """
    import_dynamo()
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:
        ends, me = monotonic() + _LONGEST_WAIT, get_ident()
        while _observing - {me} and monotonic() < ends:
            sleep(0.001)
        yield


@contextmanager
def observing() -> Iterator[None]:
    """Inside, a run of this thread is observed: compilers of others wait for it."""
    me = get_ident()
    is_outermost = me not in _observing
    _observing.add(me)
    try:
        yield
    finally:
        if is_outermost:
            _observing.discard(me)


def has_compiler_elsewhere(wait: bool) -> bool:
    """Whether another thread compiles; with `wait`, none does any more."""
    lock = _find_lock()
    if lock is None:
        return False
    is_free: bool = lock.acquire(wait)
    if is_free:
        lock.release()
    return not is_free


def _find_lock() -> Any:
    return getattr(MODULES.get("torch._dynamo.convert_frame"), "compile_lock", None)


def is_cut_off() -> bool:
    """Whether this process was forked while another thread compiled, or observed a run.

    A compiler may hang here. Modules that were being imported then can't be imported any more, and
    locks of torch's and of other packages that were held stay so.
    """
    return _is_cut_off


_is_cut_off = False
CUT_OFF = Refusal(
    "forked-while-compiling",
    "this process was forked while another thread compiled or traced, so a compiler may wait here "
    "for a thread that only the parent has. Calls that compiled code fits run it. Fork before "
    "other threads compile, or start processes by spawn or forkserver.",
)


def _after_fork_in_child() -> None:
    global _is_cut_off
    me = get_ident()
    if has_compiler_elsewhere(wait=False):
        _is_cut_off = True
        _find_lock()._at_fork_reinit()
    if _observing - {me}:
        _is_cut_off = True
        _observing.intersection_update({me})


os.register_at_fork(after_in_child=_after_fork_in_child)


def prepare() -> None:
    """Have Dynamo patch nn.Module now, and not in its first compile of the process."""
    import_dynamo()
    from torch._dynamo.mutation_guard import install_generation_tagging_init

    install_generation_tagging_init()


class DynamoCompiles:
    """What Dynamo compiles inside the `with`, in this process."""

    def __enter__(self) -> list[DynamoCompile]:
        import_dynamo()
        from torch._dynamo.utils import get_compilation_metrics

        self._list = get_compilation_metrics
        self._before = {id(found): found for found in get_compilation_metrics()}
        self._new: list[DynamoCompile] = []
        return self._new

    def __exit__(self, *_: object) -> None:
        self._new += [
            DynamoCompile(str(found.compile_id), found.recompile_reason or "")
            for found in self._list()
            if id(found) not in self._before and not found.is_runtime
        ]


# --- what torch's compilers took ---


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


def count_copies() -> dict[str, int]:
    """Tensors and bytes that Inductor could not turn back in place so far, by torch's names."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "ReinplaceCounters", None)
    return dict(getattr(counters, "_values", {}))


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
    # torch tells counts to the outermost open event, and raises where there is none.
    opened = utils.get_chromium_event_logger().get_stack()
    opened.insert(0, "tripwire")
    try:
        with slots.metrics_context:
            yield
    finally:
        slots.metrics_context = outer
        opened.remove("tripwire")


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
