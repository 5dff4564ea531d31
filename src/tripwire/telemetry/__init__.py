"""Telemetry: where the time went, what was counted, and what is known of each compile."""

from tripwire.telemetry.anchors import (
    Anchor,
    find_anchor,
    format_instruction,
    format_source_range,
    to_characters,
    underline,
)
from tripwire.telemetry.chromium import (
    ChromiumEvent,
    ChromiumEventLogger,
    chromium_event_log_active,
    get_chromium_event_logger,
    stop_chromium_event_logger,
)
from tripwire.telemetry.cleanup import CleanupHook, CleanupManager
from tripwire.telemetry.clock import FakeClock, using_clock
from tripwire.telemetry.compiles import CompileId, compiling, current_compile_id, new_frame_id
from tripwire.telemetry.contexts import HandOver, MetricsContext, RuntimeMetricsContext, TopN
from tripwire.telemetry.debugdir import (
    StripAnsiFormatter,
    add_file_handler,
    get_debug_dir,
    setup_compile_debug,
    setup_log_file,
    strip_colours,
)
from tripwire.telemetry.events import CompileEventLogger, CompileEventLogLevel
from tripwire.telemetry.flattening import call_boxed, flatten_graph_inputs, make_boxed_func
from tripwire.telemetry.history import (
    add_listener,
    clear_compilation_metrics,
    get_compilation_metrics,
    get_metrics_context,
    get_runtime_metrics_context,
    record_compilation_metrics,
    remove_listener,
    set_compilation_metrics_limit,
)
from tripwire.telemetry.kinds import (
    is_function,
    is_function_or_wrapper,
    is_lazy_module,
    is_lru_cache_wrapped_function,
    is_namedtuple,
    is_numpy_float_type,
    is_numpy_int_type,
    is_numpy_ndarray,
    is_tensor,
    is_typing,
    is_wrapper_or_member_descriptor,
    istensor,
    istype,
    make_cell,
)
from tripwire.telemetry.log import (
    EventLog,
    describe_process,
    emit,
    is_logging,
    logging_to,
    start_log,
    stop_log,
    write,
)
from tripwire.telemetry.logs import get_logs, set_logs
from tripwire.telemetry.metrics import PHASES, CompilationMetrics
from tripwire.telemetry.once import DuplicateWarningChecker, print_once, warn_once
from tripwire.telemetry.otel import export_spans
from tripwire.telemetry.perfetto import write_chrome_trace
from tripwire.telemetry.prometheus import prometheus_text, serve_metrics
from tripwire.telemetry.reader import Logged, LogReader, ReadStatistics, read_events
from tripwire.telemetry.reinplace import ReinplaceCounters, ReInplaceTrigger
from tripwire.telemetry.reports import (
    calculate_time_spent,
    compile_times,
    dump_compile_times,
    increment_frame,
    increment_op_count,
    log_counters,
    log_summary_at_exit,
    print_time_report,
    reset_frame_count,
)
from tripwire.telemetry.serial import TypeSafeSerializer
from tripwire.telemetry.spans import Span, disable, enable, is_enabled, timed
from tripwire.telemetry.speedscope import write_speedscope
from tripwire.telemetry.tables import tabulate
from tripwire.telemetry.threads import CounterStatistics, count, reset_counters, statistics
from tripwire.telemetry.torchtrace import write_torch_trace
from tripwire.telemetry.usercontexts import (
    collect_user_contexts,
    get_hook_for_recompile_user_context,
    register_hook_for_recompile_user_context,
    reset_recompile_user_contexts,
)

__all__ = [
    "PHASES",
    "Anchor",
    "ChromiumEvent",
    "ChromiumEventLogger",
    "CleanupHook",
    "CleanupManager",
    "CompilationMetrics",
    "CompileEventLogLevel",
    "CompileEventLogger",
    "CompileId",
    "CounterStatistics",
    "DuplicateWarningChecker",
    "EventLog",
    "FakeClock",
    "HandOver",
    "LogReader",
    "Logged",
    "MetricsContext",
    "ReInplaceTrigger",
    "ReadStatistics",
    "ReinplaceCounters",
    "RuntimeMetricsContext",
    "Span",
    "StripAnsiFormatter",
    "TopN",
    "TypeSafeSerializer",
    "add_file_handler",
    "add_listener",
    "calculate_time_spent",
    "call_boxed",
    "chromium_event_log_active",
    "clear_compilation_metrics",
    "collect_user_contexts",
    "compile_times",
    "compiling",
    "count",
    "current_compile_id",
    "describe_process",
    "disable",
    "dump_compile_times",
    "emit",
    "enable",
    "export_spans",
    "find_anchor",
    "flatten_graph_inputs",
    "format_instruction",
    "format_source_range",
    "get_chromium_event_logger",
    "get_compilation_metrics",
    "get_debug_dir",
    "get_hook_for_recompile_user_context",
    "get_logs",
    "get_metrics_context",
    "get_runtime_metrics_context",
    "increment_frame",
    "increment_op_count",
    "is_enabled",
    "is_function",
    "is_function_or_wrapper",
    "is_lazy_module",
    "is_logging",
    "is_lru_cache_wrapped_function",
    "is_namedtuple",
    "is_numpy_float_type",
    "is_numpy_int_type",
    "is_numpy_ndarray",
    "is_tensor",
    "is_typing",
    "is_wrapper_or_member_descriptor",
    "istensor",
    "istype",
    "log_counters",
    "log_summary_at_exit",
    "logging_to",
    "make_boxed_func",
    "make_cell",
    "new_frame_id",
    "print_once",
    "print_time_report",
    "prometheus_text",
    "read_events",
    "record_compilation_metrics",
    "register_hook_for_recompile_user_context",
    "remove_listener",
    "reset_counters",
    "reset_frame_count",
    "reset_recompile_user_contexts",
    "serve_metrics",
    "set_compilation_metrics_limit",
    "set_logs",
    "setup_compile_debug",
    "setup_log_file",
    "start_log",
    "statistics",
    "stop_chromium_event_logger",
    "stop_log",
    "strip_colours",
    "tabulate",
    "timed",
    "to_characters",
    "underline",
    "using_clock",
    "warn_once",
    "write",
    "write_chrome_trace",
    "write_speedscope",
    "write_torch_trace",
]
