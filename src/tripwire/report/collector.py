"""The collector: one pass over a directory of logs, in memory that doesn't grow with them.

Every event is either added to a sum, joined to a group, or competes for one of a fixed number of
places. Nothing is read twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import compress
from pathlib import Path

import msgspec

from tripwire.report import budgets, model
from tripwire.telemetry import schema
from tripwire.telemetry.metrics import CompilationMetrics
from tripwire.telemetry.reader import Allowance, Logged, LogReader, check_has_events

COMPILES = 5_000
RECORDS = 2_000
SPAN_NAMES = 5_000
COUNTERS = 1_000  # names of one process
COMPILE, NAME, RECORD, PROCESS = 1_200, 400, 300, 1_500  # bytes that a row takes
EVERY = 2_000  # events between two calls of `progress`


def build_report(
    log: str | os.PathLike[str],
    progress: Callable[[int], object] | None = None,
    beside: budgets.Details | None = None,
) -> tuple[model.Report, budgets.Details]:
    """Read a log; `progress` hears now and then how many bytes are behind.

    beside: the details of another report, which is held at the same time.
    """
    check_has_events(log)
    reader = LogReader(log)
    if beside is None:
        allowance = Allowance(reader)
    else:
        allowance = beside.allowance
        allowance.go_on(reader)
    collector = Collector(allowance)
    for logged in reader:
        collector.add(logged)
        if progress is not None and collector.events % EVERY == 0:
            progress(reader.bytes_read)
    return collector.finish(reader), collector.details


class Collector:
    """What is known after the events so far."""

    def __init__(self, allowance: Allowance) -> None:
        self.events = 0
        self.details = budgets.Details(allowance)
        self._allowance = allowance
        self._skipped = model.Skipped()
        self._processes: list[model.Process] = []
        self._is_placed: list[bool] = []  # on the calendar, each process
        self._numbers: dict[str, int] = {}  # of processes, by token
        self._prices: list[int] = []  # of the counters of each process
        self._first: list[int] = []  # of each process, on the calendar
        self._last: list[int] = []
        self._latest_header: schema.Header | None = None
        self._latest_number = 0
        self._lanes = budgets.Lanes(allowance)
        self._names: dict[str, int] = {}
        self._totals: list[model.SpanTotal] = []
        self._compiles: list[model.Compile] = []
        self._compile_numbers: dict[tuple[int, str], int] = {}
        self._retirements, self._refusals, self._recompiles = (
            budgets.Grouping(allowance) for _ in range(3)
        )
        self._records: list[model.RecordRow] = []

    def add(self, logged: Logged) -> None:
        """Take in one event."""
        header, event = logged
        number = self._latest_number
        if header is not self._latest_header:
            number = self._latest_number = self._find_process(header)
            self._latest_header = header
        self.events += 1
        if number == model.NONE:
            return
        at = header.wall_of(event.time_ns)
        self._processes[number].events += 1
        if at < self._first[number]:
            self._first[number] = at
        if at > self._last[number]:
            self._last[number] = at
        take = _TAKERS.get(type(event))
        if take is not None:
            take(self, number, event, at)

    def finish(self, reader: LogReader) -> model.Report:
        """The report of all that was added."""
        placed = list(compress(self._first, self._is_placed))
        begin = min(placed, default=min(self._first, default=0))
        # A process whose header is lost has a clock that nothing places: it begins with the rest.
        beginnings = [
            begin if is_placed or not placed else first
            for first, is_placed in zip(self._first, self._is_placed, strict=True)
        ]
        for number, process in enumerate(self._processes):
            process.start_ns = self._first[number] - beginnings[number]
            process.end_ns = self._last[number] - beginnings[number]
        for number, row in enumerate(self._compiles):
            row.start_ns -= beginnings[row.process]
            row.has_detail = number in self.details
        for record in self._records:
            record.time_ns -= beginnings[record.process]
        return model.Report(
            title=str(Path(reader.path).resolve().name or reader.path),
            begin_ms=begin // 1_000_000 if placed else 0,
            duration_ns=max((p.end_ns for p in self._processes), default=0),
            processes=self._processes,
            span_names=[total.name for total in self._totals],
            lanes=self._lanes.rows(beginnings),
            compiles=self._compiles,
            retirements=self._retirements.rows(beginnings),
            refusals=self._refusals.rows(beginnings),
            recompiles=self._recompiles.rows(beginnings),
            records=self._records,
            spans=self._totals,
            skipped=msgspec.structs.replace(
                self._skipped,
                **msgspec.structs.asdict(reader.statistics()),
                lanes=self._lanes.left_out,
                marks=self._lanes.marks_left_out,
                details=len(self.details.left_out),
            ),
        )

    # --- finding rows -----------------------------------------------------------------------------

    def _find_process(self, header: schema.Header) -> int:
        """The number of a process, made if need be; `NONE` where there are too many."""
        number = self._numbers.get(header.token)
        if number is not None:
            return number
        process = model.Process(
            label=model.cut(header.label, 120),
            host=model.cut(header.host, 120),
            pid=header.pid,
            parent_pid=header.parent_pid,
            rank=header.rank,
            python=model.cut(header.python, 120),
            torch=header.torch and model.cut(header.torch, 120),
            tripwire=header.tripwire and model.cut(header.tripwire, 120),
            argv=[model.cut(word) for word in header.argv[:50]],
        )
        texts = process.label, process.host, process.python, process.torch, process.tripwire
        cost = budgets.measure(header.token, *filter(None, texts), *process.argv)
        if not self._allowance.take(PROCESS + cost):
            self._skipped.processes += 1
            return model.NONE
        number = self._numbers[header.token] = len(self._processes)
        self._processes.append(process)
        self._prices.append(0)
        self._is_placed.append(header.start_wall_ns != 0)
        self._first.append(1 << 63)
        self._last.append(-(1 << 63))
        return number

    def _find_compile(
        self, process: int, event: schema.Base, at: int, *, is_backward: bool = False
    ) -> int:
        """The number of an event's compile, made if need be; `NONE` where there are too many."""
        if event.compile_id is None:
            return model.NONE
        key = process, model.cut(event.compile_id, 40) + (" backward" if is_backward else "")
        number = self._compile_numbers.get(key)
        if number is None:
            if len(self._compiles) >= COMPILES or not self._allowance.take(COMPILE):
                return model.NONE
            number = self._compile_numbers[key] = len(self._compiles)
            self._compiles.append(
                model.Compile(id=key[1], process=process, thread=event.thread, start_ns=at)
            )
        return number

    def _known_compile(self, process: int, event: schema.Base) -> int:
        return self._compile_numbers.get(
            (process, model.cut(event.compile_id or "", 40)), model.NONE
        )

    def _mark(self, process: int, event: schema.Base, at: int, kind: str, text: str) -> None:
        number = self._known_compile(process, event)
        self._lanes.add_mark(
            process, event.thread, model.Moment(at, kind, model.cut(text, 200), number)
        )

    # --- taking in events -------------------------------------------------------------------------

    def _take_thread(self, process: int, event: schema.ThreadNamed, at: int) -> None:
        lane = self._lanes.find(process, event.thread)
        if lane is not None:
            lane.name = model.cut(event.name, 80)

    def _take_span(self, process: int, event: schema.SpanDone, at: int) -> None:
        end = at + event.duration_ns
        if end > self._last[process]:
            self._last[process] = end
        title = model.cut(event.name, 200)
        name = self._names.get(title)
        if name is None:
            cost = NAME + budgets.measure(title)
            if len(self._names) >= SPAN_NAMES or not self._allowance.take(cost):
                self._skipped.span_names += 1
                return
            name = self._names[title] = len(self._totals)
            self._totals.append(model.SpanTotal(title))
        total = self._totals[name]
        total.calls += 1
        total.total_ns += event.duration_ns
        total.longest_ns = max(total.longest_ns, event.duration_ns)
        total.errors += event.error is not None
        number = self._known_compile(process, event)
        self._lanes.add_span(process, event, at, name, number)

    def _take_instant(self, process: int, event: schema.Instant, at: int) -> None:
        self._mark(process, event, at, "instant", event.name)

    def _take_counts(self, process: int, event: schema.Counts, at: int) -> None:
        left = COUNTERS
        counters: dict[str, dict[str, int]] = {}
        for group, names in event.groups.items():
            counters[model.cut(group, 80)] = {
                model.cut(k, 80): v for k, v in [*names.items()][:left]
            }
            left -= len(names)
            if left <= 0:
                break
        names_of = [*counters, *(name for names in counters.values() for name in names)]
        price = budgets.COUNT * len(names_of) + budgets.measure(*names_of)
        self._allowance.give_back(self._prices[process])
        if not self._allowance.take(price):
            price, counters = 0, {}
            self._skipped.counters += 1
        self._prices[process] = price
        self._processes[process].counters = counters  # all counts at one moment: the latest

    def _take_start(self, process: int, event: schema.CompileStarted, at: int) -> None:
        number = self._find_compile(process, event, at, is_backward=event.is_backward)
        if number != model.NONE:
            row = self._compiles[number]
            row.function, row.file, row.line = (
                model.cut(event.function),
                model.cut(event.file),
                event.line,
            )
            if not self._allowance.take(budgets.measure(row.function, row.file)):
                row.function = row.file = "…"
            row.backend = event.backend and model.cut(event.backend, 80)
            row.thread, row.start_ns = event.thread, at

    def _take_end(self, process: int, event: schema.CompileFinished, at: int) -> None:
        metrics = event.metrics
        duration, phases = metrics.duration_us or 0, metrics.phases
        unattributed = phases.pop("unattributed_us", 0)
        sums = self._processes[process]
        sums.compiles += 1
        sums.duration_us += duration
        sums.unattributed_us += unattributed
        for phase, us in phases.items():
            sums.phases[phase] = sums.phases.get(phase, 0) + us
        is_backward = metrics.is_forward is False
        number = self._find_compile(process, event, at - duration * 1000, is_backward=is_backward)
        if number == model.NONE:
            self._skipped.compiles += 1
            return
        row = self._compiles[number]
        row.status, row.reason = _judge(metrics)
        if not self._allowance.take(budgets.measure(row.reason)):
            row.reason = "…"
        row.duration_us, row.phases, row.unattributed_us = duration, phases, unattributed
        if row.function == "?" and metrics.co_name:
            row.function = model.cut(metrics.co_name)
        row.file = row.file or model.cut(metrics.co_filename or "")
        row.line = row.line or metrics.co_firstlineno or 0
        row.backend = row.backend or (metrics.backend and model.cut(metrics.backend, 80))
        row.nodes = metrics.graph_node_count or row.nodes
        row.guards = metrics.guard_count or row.guards
        row.wires = metrics.wire_count or row.wires
        self.details.add(number, "metrics", budgets.plain_metrics(metrics))
        self.details.finish(number, duration)

    def _take_graph(self, process: int, event: schema.GraphCaptured, at: int) -> None:
        number = self._find_compile(process, event, at)
        if number != model.NONE:
            row, more = self._compiles[number], event.continues
            before = row.nodes if more else 0
            row.nodes = before + len(event.nodes)
            stretch = budgets.build_graph(event.nodes, budgets.NODES - before)
            self.details.add(number, "graph", stretch, continues=more)

    def _take_guards(self, process: int, event: schema.GuardsBuilt, at: int) -> None:
        number = self._find_compile(process, event, at)
        if number != model.NONE:
            before = sum(map(len, self.details.find(number, "guards"))) if event.continues else 0
            self._compiles[number].guards = event.count
            if before < budgets.SOURCE:
                source = model.cut(event.source, budgets.SOURCE - before)
                self.details.add(number, "guards", source, continues=event.continues)

    def _take_rows(
        self, process: int, event: schema.WiresArmed | schema.ReadsSeen, at: int
    ) -> None:
        number = self._find_compile(process, event, at)
        if number != model.NONE:
            part = schema.LONG[type(event)]
            found = getattr(event, part)
            before = getattr(self._compiles[number], part) if event.continues else 0
            setattr(self._compiles[number], part, before + len(found))
            rows = budgets.build_rows(found, budgets.ROWS - before)
            self.details.add(number, part, rows, continues=event.continues)

    def _take_retirement(self, process: int, event: schema.Retired, at: int) -> None:
        self._processes[process].retirements += 1
        number = self._known_compile(process, event)
        if number != model.NONE:
            self._compiles[number].retired += 1
        self._retirements.add(
            model.cut(event.source),
            "",
            _place(event.file, event.line, event.function, event.excerpt),
            model.Occurrence(
                at, process, number, model.cut(event.old, 200), model.cut(event.new, 200)
            ),
        )
        self._mark(process, event, at, "retirement", event.source)

    def _take_refusal(self, process: int, event: schema.RunRefused, at: int) -> None:
        self._processes[process].refusals += 1
        self._refusals.add(
            model.cut(event.slug, 80),
            model.cut(event.reason, 2_000),
            _place(event.file, event.line, event.function, event.excerpt),
            model.Occurrence(at, process, self._known_compile(process, event)),
        )
        self._mark(process, event, at, "refusal", event.slug)

    def _take_recompile(self, process: int, event: schema.Recompiled, at: int) -> None:
        self._processes[process].recompiles += 1
        number = self._find_compile(process, event, at)
        row = self._compiles[number] if number != model.NONE else None
        place = model.UserLine(row.file, row.line) if row is not None else model.UserLine()
        reasons = "\n".join(event.reasons[:50])
        said = "; ".join(event.user_contexts[:20])
        self._recompiles.add(
            model.cut(event.function),
            model.cut(reasons, 2_000),
            place,
            model.Occurrence(at, process, number, after=model.cut(said)),
        )
        self._mark(process, event, at, "recompile", event.function)

    def _take_record(self, process: int, event: schema.RecordWritten, at: int) -> None:
        self._processes[process].records += 1
        self._mark(process, event, at, "record", event.exception or event.function)
        cost = RECORD + budgets.measure(event.path, event.function, event.exception)
        if len(self._records) >= RECORDS or not self._allowance.take(cost):
            self._skipped.records += 1
            return
        self._records.append(
            model.RecordRow(
                model.cut(event.path, 1_000),
                model.cut(event.function),
                model.cut(event.exception, 1_000),
                at,
                process,
                self._known_compile(process, event),
            )
        )


_TAKERS: dict[type, Callable[..., None]] = {
    schema.ThreadNamed: Collector._take_thread,
    schema.SpanDone: Collector._take_span,
    schema.Instant: Collector._take_instant,
    schema.Counts: Collector._take_counts,
    schema.CompileStarted: Collector._take_start,
    schema.CompileFinished: Collector._take_end,
    schema.GraphCaptured: Collector._take_graph,
    schema.GuardsBuilt: Collector._take_guards,
    schema.WiresArmed: Collector._take_rows,
    schema.ReadsSeen: Collector._take_rows,
    schema.Retired: Collector._take_retirement,
    schema.RunRefused: Collector._take_refusal,
    schema.Recompiled: Collector._take_recompile,
    schema.RecordWritten: Collector._take_record,
}


def _place(file: str, line: int, function: str, excerpt: str) -> model.UserLine:
    return model.UserLine(
        model.cut(file), line, model.cut(function, 200), "", model.cut(excerpt, 2_000)
    )


def _judge(metrics: CompilationMetrics) -> tuple[model.Status, str]:
    reason = model.cut(metrics.fail_reason or "", 2_000)
    if metrics.refusal is not None:
        return "refused", reason or model.cut(metrics.refusal)
    if metrics.fail_type is not None:
        return "failed", f"{model.cut(metrics.fail_type, 200)}: {reason}"
    if metrics.has_guarded_code is False:
        return "no entry", ""
    return "compiled", ""
