"""Metrics contexts: figures are collected in one place and passed on once.

A compile enters its `MetricsContext`. Nested entries belong to the outermost one, whose exit passes
everything on, with the exception if there was one. `RuntimeMetricsContext` has no block: it
collects from the first figure until `finish`. If passing on fails, that is logged; the work that
was measured never fails because of it.
"""

from __future__ import annotations

import heapq
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple, Self

from tripwire.errors import TelemetryError
from tripwire.telemetry import clock

log = logging.getLogger("tripwire.telemetry")

_OWN = __file__.removesuffix("contexts.py")

Metrics = dict[str, object]


class HandOver(NamedTuple):
    """What a context gives away at its end."""

    start_ns: int  # by the wall clock, as the end
    end_ns: int
    metrics: Metrics
    error: BaseException | None


OnExit = Callable[[HandOver], object]


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


class MetricsContext:
    """`with context: ...`; inside, figures are set, counted and collected by name.

    `names`: the only ones allowed; None allows any.
    """

    def __init__(self, on_exit: OnExit, names: frozenset[str] | None = None) -> None:
        self._on_exit = on_exit
        self._names = names
        self._metrics: Metrics = {}
        self._places: dict[str, str] = {}
        self._start_ns = 0
        self._level = 0

    def __enter__(self) -> Self:
        if self._level == 0:
            self._metrics, self._places = {}, {}
            self._start_ns = clock.wall_ns()
        self._level += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._level == 0:
            raise TelemetryError(
                "A metrics context was left that was never entered.", slug="metrics-not-in-progress"
            )
        self._level -= 1
        if self._level == 0:
            metrics, self._metrics, self._places = self._metrics, {}, {}
            _hand_over(self._on_exit, HandOver(self._start_ns, clock.wall_ns(), metrics, error))

    @property
    def start_ns(self) -> int:
        """When the outermost block began, by the wall clock."""
        return self._start_ns

    def in_progress(self) -> bool:
        """Whether a block is entered."""
        return self._level > 0

    def get(self, metric: str, default: object = None) -> object:
        """What is known of a metric so far."""
        return self._metrics.get(metric, default)

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

    def add_time(self, column: str, us: int) -> None:
        """`increment` for spans, which know that a compile is going on and the column exists."""
        self._metrics[column] = self._metrics.get(column, 0) + us  # type: ignore[operator]

    def add_to_set(self, metric: str, value: object) -> None:
        """Add to a set of values."""
        self._check(metric)
        found = self._metrics.setdefault(metric, set())
        if not isinstance(found, set):
            raise self._is_something_else(metric, found, "a set")
        found.add(value)

    def set_key_value(self, metric: str, key: str, value: object) -> None:
        """Say what one key of a mapping is, as often as wanted."""
        self._check(metric)
        found = self._metrics.setdefault(metric, {})
        if not isinstance(found, dict):
            raise self._is_something_else(metric, found, "a mapping")
        found[key] = value

    def add_top_n(self, metric: str, key: str, value: int, at_most: int = 25) -> None:
        """Offer an item to a list of the most expensive ones."""
        self._check(metric)
        found = self._metrics.setdefault(metric, TopN(at_most))
        if not isinstance(found, TopN):
            raise self._is_something_else(metric, found, "a top-N list")
        found.add(key, value)

    def _check(self, *metrics: str) -> None:
        if self._level == 0:
            raise TelemetryError(
                f"{', '.join(metrics)}: no metrics context is entered in this thread.\n"
                "Metrics belong to a compile: write them inside `with compiling(...)`.",
                slug="metrics-not-in-progress",
            )
        for metric in metrics:
            if self._names is not None and metric not in self._names:
                raise TelemetryError(
                    f"{metric}: no metric has that name. They are the fields of "
                    "tripwire.telemetry.CompilationMetrics.",
                    slug="metric-unknown",
                )

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


class RuntimeMetricsContext:
    """Figures of work outside a compile, from the first one until `finish`."""

    def __init__(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._metrics: Metrics = {}
        self._start_ns = 0

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

    def add_time(self, column: str, us: int) -> None:
        """`increment` for spans, which have started it."""
        self._metrics[column] = self._metrics.get(column, 0) + us  # type: ignore[operator]

    def get(self, metric: str, default: object = None) -> object:
        """What is known of a metric so far."""
        return self._metrics.get(metric, default)

    def finish(self) -> None:
        """Hand over what was gathered, if anything was, and begin anew."""
        if self._metrics:
            metrics, self._metrics = self._metrics, {}
            _hand_over(self._on_exit, HandOver(self._start_ns, clock.wall_ns(), metrics, None))


def _hand_over(on_exit: OnExit, given: HandOver) -> None:
    try:
        on_exit(given)
    except Exception:  # a listener's, or ours: what was measured goes on
        log.exception("metrics could not be recorded")


def _caller() -> str:
    """The file and line that called into telemetry."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
