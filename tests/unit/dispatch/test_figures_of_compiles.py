"""Every field of CompilationMetrics has its occasion, or a reason why none came here."""

from __future__ import annotations

import tempfile

import msgspec
import pytest
import torch
from torch import nn

import tripwire
from tripwire import telemetry
from tripwire.telemetry import CompilationMetrics, pytorch
from tripwire.telemetry.contexts import get_runtime_metrics_context

# What stays None after all compiles below.
NOWHERE = {
    "triton_compile_time_us": "kernels are compiled by workers where there are several",
    "triton_kernel_compile_times_us": "Triton's kernels are for GPUs",
    "compile_time_autotune_time_us": "tuned with mode='max-autotune' alone",
    "runtime_triton_autotune_time_us": "Triton's kernels are for GPUs",
    "runtime_cudagraphify_time_us": "CUDA graphs are for GPUs",
    "cudagraph_skip_reason": "CUDA graphs are for GPUs",
    "cuda_version": "this torch is for CPUs",
    "triton_version": "Triton isn't installed",
}
# Whether these are filled depends on which torch is installed, and on the number of processors.
ELSEWHERE = {"cuda_version", "triton_version", "triton_compile_time_us"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x))).softmax(-1)


@torch.library.custom_op("figures::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)

LIBRARY = torch.library.Library("figures", "FRAGMENT")
LIBRARY.define("thrice(Tensor x) -> Tensor")
LIBRARY.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
thrice = torch.ops.figures.thrice


def compiles() -> list[CompilationMetrics]:
    get_runtime_metrics_context().finish()
    found = telemetry.get_compilation_metrics()
    telemetry.clear_compilation_metrics()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[CompilationMetrics]]:
    """What is known of some compiles, by what they were for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPWIRE_CACHE_DIR", str(tmp_path_factory.mktemp("store")))
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        compiles()
        return {name: occasion() for name, occasion in OCCASIONS.items()}


def train() -> list[CompilationMetrics]:
    compiled = tripwire.compile(Net(), backend="inductor", mode="default")
    for _ in range(3):
        compiled(torch.ones(4, 8)).sum().backward()
    return compiles()


def train_unkept() -> list[CompilationMetrics]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPWIRE_CACHE_DIR", "")
        with torch._inductor.config.patch(force_disable_caches=True):
            return train()


@torch.no_grad()
def infer() -> list[CompilationMetrics]:
    tripwire.compile(Net(), backend="inductor", check=True)(torch.ones(4, 8))
    return compiles()


def fail() -> list[CompilationMetrics]:
    compiled = tripwire.compile(lambda x: x @ torch.ones(3, 3), backend="eager")
    with pytest.raises(RuntimeError):
        compiled(torch.ones(2, 2))
    return compiles()


def refuse() -> list[CompilationMetrics]:
    compiled = tripwire.compile(lambda x: x * id(object()), backend="eager")
    compiled(torch.ones(2))
    return compiles()


def fail_behind() -> list[CompilationMetrics]:
    def broken(module, examples):
        raise NotImplementedError("no such operation")

    compiled = tripwire.compile(
        lambda x: x + 1, backend=broken, on_backend_error="eager", dynamic=True
    )
    compiled(torch.ones(5))
    compiled(torch.ones(6))
    return compiles()


def call_own() -> list[CompilationMetrics]:
    telemetry.register_hook_for_recompile_user_context(lambda: "epoch 3")
    compiled = tripwire.compile(lambda x: thrice(twice(x)), backend="eager", dynamic=False)
    compiled(torch.ones(2))
    compiled(torch.ones(3))
    telemetry.compiles.reset_recompile_user_contexts()
    return compiles()


def record() -> list[CompilationMetrics]:
    with tempfile.TemporaryDirectory() as folder:
        compiled = tripwire.compile(
            lambda x: x @ torch.ones(3, 3), backend="eager", record_on_error=folder
        )
        with pytest.raises(RuntimeError):
            compiled(torch.ones(2, 2))
    return compiles()


def vary() -> list[CompilationMetrics]:
    compiled = tripwire.compile(lambda x: x + len(x) if len(x) < 9 else x, backend="eager")
    for size in (3, 4, 5):
        compiled(torch.ones(size, 2))
    return compiles()


OCCASIONS = {
    "training": train,
    "training, warm": train,
    "training without a store": train_unkept,
    "inference": infer,
    "inference, warm": infer,
    "a failure": fail,
    "a refusal": refuse,
    "a back end's failure": fail_behind,
    "operators of the user's": call_own,
    "a record": record,
    "sizes that vary": vary,
}


def test_every_field_has_an_occasion_or_a_reason(found) -> None:
    rows = [msgspec.structs.asdict(one) for each in found.values() for one in each]
    filled = {name for row in rows for name, value in row.items() if value is not None}
    missing = set(CompilationMetrics.__struct_fields__) - filled
    assert missing - ELSEWHERE == set(NOWHERE) - ELSEWHERE


def test_a_warm_start_finds_what_the_first_one_kept_and_says_what_that_saved(found) -> None:
    for name in ("training", "inference"):
        cold, warm = found[name][0], found[f"{name}, warm"][0]
        assert (cold.local_cache_hit_count, cold.cache_saved_time_us) == (0, None)
        assert cold.local_cache_miss_count > 0
        assert warm.local_cache_hit_count > 0
        assert warm.cache_saved_time_us > 0
    assert cold.cache_miss_keys == warm.cache_hit_keys
    assert cold.cache_put_time_us > 0
    assert warm.cache_get_time_us > 0
    assert (warm.aot_autograd_time_us, warm.inductor_time_us) == (None, None)  # neither ran


def test_a_backward_that_is_kept_is_a_part_of_its_forwards_compile(found) -> None:
    one = found["training"][0]
    assert one.is_forward
    assert 0 < one.backward_time_us < one.inductor_time_us <= one.aot_autograd_time_us
    assert one.aot_autograd_time_us <= one.duration_us


def test_a_backward_that_is_compiled_later_has_its_forwards_number(found) -> None:
    forward, backward, *_ = found["training without a store"]
    assert forward.is_forward
    assert (forward.compile_id, forward.backward_time_us) == (backward.compile_id, None)
    assert not backward.is_forward
    assert 0 < backward.inductor_time_us <= backward.backward_time_us <= backward.duration_us


def test_events_say_which_of_them_are_for_a_backward() -> None:
    logger = pytorch.get_chromium_event_logger()
    logger.clear()
    try:
        train_unkept()
        ended = [event for event in logger.events() if event.ph == "E" and event.args]
    finally:
        pytorch.stop_chromium_event_logger()
    told = {(event.name, event.args.get("is_backward")) for event in ended}
    assert told >= {("compile", False), ("plan", False), ("compile", True), ("backward", True)}
    assert all(flag is not None for name, flag in told if name != "retire")


def test_what_runs_after_a_compile_belongs_to_it() -> None:
    logger = pytorch.get_chromium_event_logger()
    logger.clear()
    scales = {"by": 2.0}
    compiled = tripwire.compile(lambda x: x * scales["by"], backend="eager")
    try:
        compiled(torch.ones(2))
        compiles()
        scales["by"] = 3.0
        scales["by"] = 2.0
        compiled(torch.ones(2))
        names = {event.name: event.args["compile_id"] for event in logger.events()}
    finally:
        pytorch.stop_chromium_event_logger()
    assert names.keys() >= {"compile", "retire", "first_run"}
    assert len(set(names.values())) == 1
    (runtime,) = compiles()
    assert (runtime.is_runtime, runtime.compile_id) == (True, names["compile"])


def test_dynamos_own_metrics_context_is_back_in_its_place(found) -> None:
    from torch._dynamo.utils import get_metrics_context, record_compilation_metrics

    assert not get_metrics_context().in_progress()
    assert get_metrics_context()._on_exit is record_compilation_metrics


def test_a_failure_has_its_line_and_its_stack(found) -> None:
    (one,) = found["a failure"]
    assert (one.fail_type, one.has_guarded_code) == ("RuntimeError", None)
    assert "shapes cannot be multiplied" in one.fail_reason
    line = fail.__code__.co_firstlineno + 1
    assert one.exception_stack_trace == (f"{__file__}({line}): fail.<locals>.<lambda>",)
    assert (one.fail_user_frame_filename, one.fail_user_frame_lineno) == (__file__, line)
    assert one.stack_trace[0].endswith(": fail")
    refused, *_ = found["a refusal"]
    assert (refused.fail_type, refused.refusal) == ("Refusal", "reads-identity")


def test_a_back_ends_failure_is_a_restart_and_then_runs_the_graph_as_it_is(found) -> None:
    restarted, taken, *_ = found["a back end's failure"]
    assert "no such operation" in restarted.restart_reasons
    assert restarted.time_before_restart_us > 0
    assert (taken.fail_type, taken.has_guarded_code) == ("NotImplementedError", True)
    assert "broken" in taken.exception_stack_trace[0]


def test_what_is_open_is_counted(found) -> None:
    first, second, *_ = found["sizes that vary"]
    assert (first.symbol_count, first.shape_env_guard_count, first.decision_count) == (0, 0, 0)
    assert (second.symbol_count, second.decision_count) == (1, 1)
    assert second.shape_env_guard_count > 0
    assert second.graph_node_shapes == "x: float32[4, 2]; add: float32[4, 2]"
    assert first.accumulated_cache_size < second.accumulated_cache_size


def test_a_graph_is_told_by_its_calls_forms_and_own_operators(found) -> None:
    first = found["training"][0]
    assert first.graph_op_counts == {"torch._C._nn.linear": 2, "torch.relu": 1, "softmax": 1}
    assert first.graph_node_shapes.startswith("x: float32[4, 8]; inner_weight: float32[8, 8]; ")
    assert first.graph_node_shapes.endswith("softmax: float32[4, 8]")
    own = found["operators of the user's"][0]
    assert (own.compliant_custom_ops, own.non_compliant_ops) == (
        "figures::twice",
        "figures::thrice",
    )


def test_the_guards_time_is_one_calls_own(found) -> None:
    assert 0 < found["training"][0].guard_latency_us < found["training"][0].plan_us


def test_the_pipeline_counts_frames_operations_and_copies() -> None:
    from torch._dynamo.utils import ReinplaceCounters, ReInplaceTrigger

    def copying(module, examples):
        ReinplaceCounters.add_missed_opportunities(ReInplaceTrigger.AUTO_FUNC_V2, 2)
        ReinplaceCounters.add_missed_bytes(ReInplaceTrigger.AUTO_FUNC_V2, 96)
        return module.forward

    telemetry.reset_counters()
    pytorch.ReinplaceCounters.clear()
    compiled = tripwire.compile(lambda x: x.sin() + 1, backend=copying)
    for _ in range(3):
        compiled(torch.ones(3))
    counts = telemetry.statistics()
    assert (counts.frames, counts.ops) == (1, 2)
    assert pytorch.ReinplaceCounters.get_total_missed() == 2
    assert pytorch.ReinplaceCounters.get_total_missed_bytes() == 96
