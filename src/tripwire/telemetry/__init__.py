"""Telemetry: where the time went, what was counted, and what is known of each compile."""

from tripwire.telemetry.clock import FakeClock, using_clock
from tripwire.telemetry.compiles import CompileId, compiling, current_compile_id, new_frame_id
from tripwire.telemetry.contexts import HandOver, MetricsContext, RuntimeMetricsContext, TopN
from tripwire.telemetry.counters import (
    CounterStatistics,
    count,
    increment_frame,
    increment_op_count,
    reset_counters,
    statistics,
)
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
from tripwire.telemetry.log import EventLog, is_logging, logging_to, start_log, stop_log, write
from tripwire.telemetry.metrics import PHASES, CompilationMetrics
from tripwire.telemetry.reader import Logged, LogReader, ReadStatistics, read_events
from tripwire.telemetry.serial import TypeSafeSerializer
from tripwire.telemetry.spans import Span, disable, enable, is_enabled, timed

__all__ = [
    "PHASES",
    "CompilationMetrics",
    "CompileId",
    "CounterStatistics",
    "EventLog",
    "FakeClock",
    "HandOver",
    "LogReader",
    "Logged",
    "MetricsContext",
    "ReadStatistics",
    "RuntimeMetricsContext",
    "Span",
    "TopN",
    "TypeSafeSerializer",
    "add_listener",
    "clear_compilation_metrics",
    "compiling",
    "count",
    "current_compile_id",
    "disable",
    "enable",
    "get_compilation_metrics",
    "get_metrics_context",
    "get_runtime_metrics_context",
    "increment_frame",
    "increment_op_count",
    "is_enabled",
    "is_logging",
    "logging_to",
    "new_frame_id",
    "read_events",
    "record_compilation_metrics",
    "remove_listener",
    "reset_counters",
    "set_compilation_metrics_limit",
    "start_log",
    "statistics",
    "stop_log",
    "timed",
    "using_clock",
    "write",
]
