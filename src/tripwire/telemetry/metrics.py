"""CompilationMetrics: what is known of one compile, as one typed record.

Times are whole microseconds in fields that end in `_us`. The units that PyTorch's records had
before are properties, so a figure is stored once. What a compile collected in sets is stored as
one sorted text.
"""

from __future__ import annotations

import heapq
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from traceback import walk_tb
from types import TracebackType
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Struct

from tripwire.errors import TelemetryError
from tripwire.values.classes import name_of

LOG_FORMAT_VERSION = 1
LONGEST_STACK = 64  # frames that are kept of a stack
_OWN = __file__.rpartition("telemetry")[0]

# Whole numbers as events have them. Nobody has to compute with more digits than a clock gives.
Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

# The phases that follow each other in a compile; together they are nearly all of its time.
PHASES = (
    "trace_us",
    "observe_us",
    "plan_us",
    "arm_us",
    "backend_us",
    "first_run_us",
    "retire_us",
    "record_us",
)


class TopN:
    """The most expensive items of many: the N with the highest figures."""

    def __init__(self, at_most: int = 25) -> None:
        self.at_most = at_most
        self._heap: list[tuple[int, int, str]] = []
        self._met = 0

    def add(self, key: str, value: int) -> None:
        """Offer an item. Of equal ones, the earlier stays."""
        self._met += 1
        item = (value, -self._met, key)
        if len(self._heap) < self.at_most:
            heapq.heappush(self._heap, item)
        else:
            heapq.heappushpop(self._heap, item)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((key, value) for value, _, key in sorted(self._heap, reverse=True))


class HandOver(NamedTuple):
    """What a context gives away at its end."""

    start_ns: int  # by the wall clock, as the end
    end_ns: int
    metrics: dict[str, object]
    error: BaseException | None


class CompilationMetrics(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One compile, or the runtime work between two of them."""

    # what was compiled
    compile_id: str | None = None
    frame_key: str | None = None
    co_name: str | None = None
    co_filename: str | None = None
    co_firstlineno: Int | None = None
    backend: str | None = None
    is_forward: bool | None = None
    is_runtime: bool = False
    has_guarded_code: bool | None = None  # whether an entry came out of it
    feature_usage: dict[str, bool] | None = None
    tripwire_config: str | None = None
    backend_config: str | None = None

    # how much
    cache_size: Int | None = None  # entries of this callable
    accumulated_cache_size: Int | None = None  # entries of all callables
    guard_count: Int | None = None
    shape_env_guard_count: Int | None = None  # those on open sizes and numbers
    symbol_count: Int | None = None  # sizes and numbers that were left open
    decision_count: Int | None = None  # that the program made about those
    wire_count: Int | None = None
    probe_count: Int | None = None
    branch_count: Int | None = None
    effect_count: Int | None = None
    graph_op_count: Int | None = None
    graph_node_count: Int | None = None
    graph_input_count: Int | None = None
    graph_output_count: Int | None = None
    graph_op_counts: dict[str, Int] | None = None  # by what is called
    graph_node_shapes: str | None = None  # node by node, the first ones
    num_graph_breaks: Int | None = None  # submodules compiled on their own after a refusal
    param_numel: Int | None = None
    param_bytes: Int | None = None
    param_count: Int | None = None
    compliant_custom_ops: str | None = None
    non_compliant_ops: str | None = None

    # how long
    start_time_us: Int | None = None  # by the wall clock
    end_time_us: Int | None = None
    duration_us: Int | None = None
    trace_us: Int | None = None
    observe_us: Int | None = None
    plan_us: Int | None = None
    arm_us: Int | None = None
    backend_us: Int | None = None
    first_run_us: Int | None = None
    retire_us: Int | None = None
    record_us: Int | None = None
    unattributed_us: Int | None = None  # of the duration, what no phase claims
    gc_time_us: Int | None = None
    logging_overhead_us: Int | None = None
    guard_latency_us: float | None = None  # of one call of the guards that were built
    time_before_restart_us: Int | None = None
    pre_grad_pass_time_us: Int | None = None
    joint_graph_pass_time_us: Int | None = None
    post_grad_pass_time_us: Int | None = None
    aot_autograd_time_us: Int | None = None
    backward_time_us: Int | None = None
    inductor_time_us: Int | None = None
    code_gen_time_us: Int | None = None
    triton_compile_time_us: Int | None = None
    triton_kernel_compile_times_us: str | None = None  # the slowest, as JSON
    compile_time_autotune_time_us: Int | None = None
    runtime_triton_autotune_time_us: Int | None = None
    runtime_cudagraphify_time_us: Int | None = None
    cudagraph_skip_reason: str | None = None

    # caches on disk or elsewhere
    local_cache_hit_count: Int = 0
    local_cache_miss_count: Int = 0
    remote_cache_hit_count: Int = 0
    remote_cache_miss_count: Int = 0
    cache_hit_keys: str | None = None
    cache_miss_keys: str | None = None
    cache_backend_type: str | None = None
    cache_version: Int | None = None
    cache_get_time_us: Int | None = None
    cache_put_time_us: Int | None = None
    cache_saved_time_us: Int | None = None

    # what went wrong, and why it was compiled again
    fail_type: str | None = None
    fail_reason: str | None = None
    fail_user_frame_filename: str | None = None
    fail_user_frame_lineno: Int | None = None
    refusal: str | None = None  # the slug
    exception_stack_trace: tuple[str, ...] | None = None
    stack_trace: tuple[str, ...] | None = None  # of the call that was compiled
    restart_reasons: str | None = None
    recompile_reason: str | None = None
    recompile_user_contexts: str | None = None

    # by what
    python_version: str | None = None
    pytorch_version: str | None = None
    tripwire_version: str | None = None
    cuda_version: str | None = None
    triton_version: str | None = None
    log_format_version: Int = LOG_FORMAT_VERSION

    # in the units that PyTorch's records had before
    start_time = property(lambda self: _seconds(self.start_time_us))  # since 1970
    entire_frame_compile_time_s = property(lambda self: _seconds(self.duration_us))
    backend_compile_time_s = property(lambda self: _seconds(self.backend_us))
    inductor_compile_time_s = property(lambda self: _seconds(self.inductor_time_us))
    code_gen_time_s = property(lambda self: _seconds(self.code_gen_time_us))
    dynamo_time_before_restart_s = property(lambda self: _seconds(self.time_before_restart_us))
    structured_logging_overhead_s = property(lambda self: _seconds(self.logging_overhead_us))
    cache_get_time_ms = property(lambda self: _milliseconds(self.cache_get_time_us))
    cache_put_time_ms = property(lambda self: _milliseconds(self.cache_put_time_us))
    cache_saved_time_s = property(lambda self: _seconds(self.cache_saved_time_us))

    @property
    def phases(self) -> dict[str, int]:
        """The time of each phase that ran, and what none of them claims."""
        named = {name: getattr(self, name) for name in (*PHASES, "unattributed_us")}
        return {name: us for name, us in named.items() if us is not None}

    def as_row(self) -> dict[str, object]:
        """Every field and every derived one, by name."""
        return {**msgspec.structs.asdict(self), **{name: getattr(self, name) for name in _DERIVED}}

    @classmethod
    def create(cls, metrics: Mapping[str, object]) -> CompilationMetrics:
        """A record of what was gathered by name; sets and lists become texts."""
        for name in metrics:
            if name not in FIELDS:
                raise unknown_metric(name)
        return msgspec.convert({k: _field(k, v) for k, v in metrics.items()}, cls)


_DERIVED = tuple(
    name
    for name, value in vars(CompilationMetrics).items()
    if isinstance(value, property) and name != "phases"
)
FIELDS = frozenset(CompilationMetrics.__struct_fields__)
TIME_COLUMNS = frozenset(name for name in FIELDS if name.endswith("_us"))
_LISTS = frozenset({"exception_stack_trace", "stack_trace"})
_TEXTS = frozenset(
    field.name for field in msgspec.structs.fields(CompilationMetrics) if field.type == str | None
)


# msgspec looks at a class when it first makes one of it, and no lock keeps other threads from using
# what it knows by then: threads that compiled at once crashed. So it looks now.
CompilationMetrics.create({})


def unknown_metric(name: str) -> TelemetryError:
    """The error for a name that no field has."""
    return TelemetryError(
        f"{name}: no metric has that name. They are the fields of "
        "tripwire.telemetry.CompilationMetrics.",
        slug="metric-unknown",
    )


def build_metrics(given: HandOver) -> CompilationMetrics:
    """The record of a context that was handed over, with versions and the failure if any."""
    common: dict[str, object] = {
        "start_time_us": given.start_ns // 1000,
        "end_time_us": given.end_ns // 1000,
        **_versions(),
        **(_failure(given.error) if given.error is not None else {}),
    }
    return CompilationMetrics.create({**common, **given.metrics})


def join_sorted(values: Iterable[object]) -> str:
    """The texts of some values, sorted, with commas between them."""
    return ",".join(sorted(_text(value) for value in values))


def _field(name: str, value: object) -> object:
    if isinstance(value, TopN):
        return msgspec.json.encode(list(value)).decode()
    if isinstance(value, set | frozenset):
        return join_sorted(value)
    if name in _TEXTS and value is not None:
        return join_sorted(value) if isinstance(value, list | tuple) else _text(value)
    if name in _LISTS and isinstance(value, list | tuple):
        return [_text(line) for line in value]
    return value


def _text(value: object) -> str:
    try:
        text = str(value)
    except Exception:  # a `__str__` of the user's
        return "<unknown>"
    return text.encode(errors="backslashreplace").decode()


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / 1e6


def _milliseconds(us: int | None) -> int | None:
    return None if us is None else us // 1000


def _versions() -> dict[str, object]:
    torch_version = sys.modules.get("torch.version")
    return {
        "python_version": platform.python_version(),
        "tripwire_version": find_own_version(),
        "pytorch_version": getattr(torch_version, "__version__", None),
        "cuda_version": getattr(torch_version, "cuda", None),
        "triton_version": getattr(sys.modules.get("triton"), "__version__", None),
    }


@cache
def find_own_version() -> str | None:
    """tripwire's version; None where it isn't installed."""
    try:
        return version("tripwire")
    except PackageNotFoundError:
        return None


def _failure(error: BaseException) -> dict[str, object]:
    place = find_user_place(error.__traceback__)
    return {
        "fail_type": name_of(type(error)),
        "fail_reason": _text(error),
        "refusal": getattr(error, "slug", None),
        "fail_user_frame_filename": place and place[0],
        "fail_user_frame_lineno": place and place[1],
        "exception_stack_trace": list_frames(error.__traceback__),
    }


def list_frames(traceback: TracebackType | None) -> list[str]:
    """A traceback without tripwire's own frames: `file(line): function`, innermost first."""
    return [
        f"{frame.f_code.co_filename}({line}): {frame.f_code.co_qualname}"
        for frame, line in walk_tb(traceback)
        if not frame.f_code.co_filename.startswith(_OWN)
    ][: -LONGEST_STACK - 1 : -1]


def find_user_place(traceback: TracebackType | None) -> tuple[str, int] | None:
    """The innermost file and line of a traceback outside tripwire and torch."""
    own = (_OWN, *_torch_root())
    found = None
    for frame, line in walk_tb(traceback):
        if not frame.f_code.co_filename.startswith(own):
            found = (frame.f_code.co_filename, line)
    return found


def _torch_root() -> tuple[str, ...]:
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return (file.removesuffix("__init__.py"),) if file else ()
