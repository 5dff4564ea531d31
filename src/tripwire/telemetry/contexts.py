"""Metrics contexts: figures are collected in one place and passed on once.

A compile enters its `MetricsContext`. Nested entries belong to the outermost one, whose exit passes
everything on, with the exception if there was one. `RuntimeMetricsContext` has no block: it
collects from the first figure until `finish`. If passing on fails, that is logged; the work that
was measured never fails because of it.

What was passed on goes into a bounded ring, to the log, and to every listener. A listener that
raises is dropped, and logged once.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self, TypeVar

from tripwire.errors import TelemetryError
from tripwire.forks import make_lock
from tripwire.telemetry import clock
from tripwire.telemetry import log as event_log
from tripwire.telemetry.metrics import (
    FIELDS,
    CompilationMetrics,
    HandOver,
    TopN,
    build_metrics,
    unknown_metric,
)
from tripwire.telemetry.schema import CompileFinished, RuntimeMetrics

logger = logging.getLogger("tripwire.telemetry")

_OWN = __file__.removesuffix("contexts.py")
_T = TypeVar("_T")

OnExit = Callable[[HandOver], object]


class _Figures:
    """What was gathered by name, and who gets it."""

    def __init__(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._metrics: dict[str, object] = {}
        self._start_ns = 0  # by the wall clock

    def get(self, metric: str, default: object = None) -> object:
        """What is known of a metric so far."""
        return self._metrics.get(metric, default)

    def add_time(self, column: str, us: int) -> None:
        """`increment` for spans, which know that it was begun and that the column exists."""
        self._metrics[column] = self._metrics.get(column, 0) + us  # type: ignore[operator]

    def _hand_over(self, error: BaseException | None = None) -> None:
        metrics, self._metrics = self._metrics, {}
        try:
            self._on_exit(HandOver(self._start_ns, clock.wall_ns(), metrics, error))
        except Exception:  # a listener's, or ours: what was measured goes on
            logger.exception("metrics could not be recorded")


class MetricsContext(_Figures):
    """`with context: ...`; inside, figures are set, counted and collected by name.

    `names`: the only ones allowed; None allows any.
    """

    def __init__(self, on_exit: OnExit, names: frozenset[str] | None = None) -> None:
        super().__init__(on_exit)
        self._names = names
        self._places: dict[str, str] = {}
        self._level = 0

    def __enter__(self) -> Self:
        if self._level == 0:
            self._metrics, self._places = {}, {}
            self._start_ns = clock.wall_ns()
        self._level += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._level == 0:
            raise TelemetryError(
                "A metrics context was left that was never entered.", slug="metrics-not-in-progress"
            )
        self._level -= 1
        if self._level == 0:
            self._places = {}
            self._hand_over(error)

    @property
    def start_ns(self) -> int:
        """When the outermost block began, by the wall clock."""
        return self._start_ns

    def in_progress(self) -> bool:
        """Whether a block is entered."""
        return self._level > 0

    def set(self, metric: str, value: object, overwrite: bool = False) -> None:
        """Say what a metric is, once; again only with `overwrite`."""
        self._check(metric)
        self._check_new((metric,), overwrite)
        self._places[metric] = _caller()
        self._metrics[metric] = value

    def update(self, values: Mapping[str, object], overwrite: bool = False) -> None:
        """Say what several metrics are: all of them, or none where one was set before."""
        for metric in values:
            self._check(metric)
        self._check_new(tuple(values), overwrite)
        place = _caller()
        for metric, value in values.items():
            self._places[metric] = place
            self._metrics[metric] = value

    def update_outer(self, values: Mapping[str, object]) -> None:
        """`update`, if this is the outermost block; else nothing."""
        self._check(*values)
        if self._level == 1:
            self.update(values)

    def increment(self, metric: str, value: int = 1) -> None:
        """Add to a number."""
        self._check(metric)
        before = self._metrics.get(metric) or 0
        if not isinstance(before, int | float):
            raise self._is_something_else(metric, before, "a number")
        self._metrics[metric] = before + value

    def add_to_set(self, metric: str, value: object) -> None:
        """Add to a set of values."""
        self._gather(metric, set[object](), "a set").add(value)

    def set_key_value(self, metric: str, key: str, value: object) -> None:
        """Say what one key of a mapping is, as often as wanted."""
        self._gather(metric, dict[str, object](), "a mapping")[key] = value

    def add_top_n(self, metric: str, key: str, value: int, at_most: int = 25) -> None:
        """Offer an item to a list of the most expensive ones."""
        self._gather(metric, TopN(at_most), "a top-N list").add(key, value)

    def _gather(self, metric: str, fresh: _T, wanted: str) -> _T:
        """What a metric holds, which begins as `fresh`."""
        self._check(metric)
        found = self._metrics.setdefault(metric, fresh)
        if not isinstance(found, type(fresh)):
            raise self._is_something_else(metric, found, wanted)
        return found

    def _check(self, *metrics: str) -> None:
        if self._level == 0:
            raise TelemetryError(
                f"{', '.join(metrics)}: no metrics context is entered in this thread.\n"
                "Metrics belong to a compile: write them inside `with compiling(...)`.",
                slug="metrics-not-in-progress",
            )
        for metric in metrics:
            if self._names is not None and metric not in self._names:
                raise unknown_metric(metric)

    def _check_new(self, metrics: tuple[str, ...], overwrite: bool) -> None:
        known = [] if overwrite else [m for m in metrics if m in self._metrics]
        if known:
            first = known[0]
            place = self._places.get(first, "an increment")
            raise TelemetryError(
                f"{_caller()}: {', '.join(known)} was already set in this compile, at {place}.\n"
                "Pass overwrite=True if the later value is the one to keep.",
                slug="metric-set-twice",
            )

    def _is_something_else(self, metric: str, found: object, wanted: str) -> TelemetryError:
        return TelemetryError(
            f"{metric}: holds {type(found).__name__} in this compile, not {wanted} "
            f"(set at {self._places.get(metric, 'its first use')}).",
            slug="metric-of-another-kind",
        )


class RuntimeMetricsContext(_Figures):
    """Figures of work outside a compile, from the first one until `finish`."""

    def in_progress(self) -> bool:
        """Whether something was gathered since the last hand-over."""
        return bool(self._metrics)

    def start(self, **known: object) -> None:
        """Begin to gather, with what is known from the start."""
        self._start_ns = clock.wall_ns()
        self._metrics = {name: value for name, value in known.items() if value is not None}

    def increment(
        self, metric: str, value: int = 1, extra: Mapping[str, object] | None = None
    ) -> None:
        """Add to a number. Of `extra`, what is not known yet is taken along."""
        if not self._metrics:
            self.start()
        self.add_time(metric, value)
        for name, known in (extra or {}).items():
            if known is not None:
                self._metrics.setdefault(name, known)

    def finish(self) -> None:
        """Hand over what was gathered, if anything was, and begin anew."""
        if self._metrics:
            self._hand_over()


def _caller() -> str:
    """The file and line that called into telemetry."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# --- the latest compiles, and whoever wants to hear of the next ---

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


class _ThreadContexts(threading.local):
    def __init__(self) -> None:
        self.compile = MetricsContext(record_compilation_metrics, FIELDS)
        self.runtime = RuntimeMetricsContext(record_compilation_metrics)


_contexts = _ThreadContexts()


def get_metrics_context() -> MetricsContext:
    """This thread's context of the compile that is going on."""
    return _contexts.compile


def get_runtime_metrics_context() -> RuntimeMetricsContext:
    """This thread's context of work outside a compile."""
    return _contexts.runtime


def _after_fork_in_child() -> None:
    _ring.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
