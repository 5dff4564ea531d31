"""History: the latest compiles, and whoever wants to hear of the next.

A compile's metrics are handed over here once, at its end. They go into a bounded ring, to the
log, and to every listener. A listener that raises is dropped, and logged once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from tripwire.forks import make_lock
from tripwire.telemetry import log as event_log
from tripwire.telemetry.contexts import HandOver, MetricsContext, RuntimeMetricsContext
from tripwire.telemetry.metrics import FIELDS, CompilationMetrics, build_metrics
from tripwire.telemetry.schema import CompileFinished, RuntimeMetrics

logger = logging.getLogger("tripwire.telemetry")

DEFAULT_LIMIT = 64

Listener = Callable[[CompilationMetrics], object]

_lock = make_lock()
_ring: deque[CompilationMetrics] = deque(maxlen=DEFAULT_LIMIT)
_listeners: tuple[Listener, ...] = ()


def record_compilation_metrics(given: HandOver) -> CompilationMetrics:
    """Keep what a context handed over, and tell whoever listens."""
    metrics = build_metrics(given)
    with _lock:
        _ring.append(metrics)
    kind = RuntimeMetrics if metrics.is_runtime else CompileFinished
    event_log.emit(kind, compile_id=metrics.compile_id, metrics=metrics)
    for listener in _listeners:
        try:
            listener(metrics)
        except Exception:
            remove_listener(listener)
            logger.exception("%r raised, so this listener is dropped", listener)
    return metrics


def get_compilation_metrics() -> list[CompilationMetrics]:
    """The latest records, oldest first."""
    with _lock:
        return list(_ring)


def clear_compilation_metrics() -> None:
    """Forget them."""
    with _lock:
        _ring.clear()


def set_compilation_metrics_limit(limit: int) -> None:
    """Keep so many records; of those there are, the latest stay."""
    global _ring
    with _lock:
        _ring = deque(_ring, maxlen=limit)


def add_listener(listener: Listener) -> Callable[[], None]:
    """Call `listener` with each record from now on; returns what ends that."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
    return lambda: remove_listener(listener)


def remove_listener(listener: Listener) -> None:
    """Call it no more."""
    global _listeners
    with _lock:
        _listeners = tuple(kept for kept in _listeners if kept != listener)


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.compile = MetricsContext(record_compilation_metrics, FIELDS)
        self.runtime = RuntimeMetricsContext(record_compilation_metrics)


_contexts = _Contexts()


def get_metrics_context() -> MetricsContext:
    """This thread's context of the compile that is going on."""
    return _contexts.compile


def get_runtime_metrics_context() -> RuntimeMetricsContext:
    """This thread's context of work outside a compile."""
    return _contexts.runtime


def _after_fork_in_child() -> None:
    _ring.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
