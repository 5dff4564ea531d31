"""Telemetry: where the time went, what was counted, and what is known of each compile.

What else people know from PyTorch is in `tripwire.telemetry.pytorch`.
"""

from tripwire.telemetry.compiles import register_hook_for_recompile_user_context
from tripwire.telemetry.contexts import (
    add_listener,
    clear_compilation_metrics,
    get_compilation_metrics,
)
from tripwire.telemetry.figures import compile_times, prometheus_text, serve_metrics
from tripwire.telemetry.log import emit, get_logs, logging_to, set_logs, start_log, stop_log
from tripwire.telemetry.metrics import CompilationMetrics
from tripwire.telemetry.reader import LogReader, read_events
from tripwire.telemetry.spans import disable, enable, is_enabled, timed
from tripwire.telemetry.threads import count, reset_counters, statistics
from tripwire.telemetry.timelines import export_spans, write_chrome_trace, write_speedscope
from tripwire.telemetry.torchtrace import write_torch_trace

__all__ = [
    "CompilationMetrics",
    "LogReader",
    "add_listener",
    "clear_compilation_metrics",
    "compile_times",
    "count",
    "disable",
    "emit",
    "enable",
    "export_spans",
    "get_compilation_metrics",
    "get_logs",
    "is_enabled",
    "logging_to",
    "prometheus_text",
    "read_events",
    "register_hook_for_recompile_user_context",
    "reset_counters",
    "serve_metrics",
    "set_logs",
    "start_log",
    "statistics",
    "stop_log",
    "timed",
    "write_chrome_trace",
    "write_speedscope",
    "write_torch_trace",
]
