"""The report's data: what the page shows, as the page reads it.

Times are nanoseconds since the report's beginning; a compile, a process and a span's name are told
by their numbers in the lists here. Rows that there are many of are arrays, not objects: their
fields' order is known to `static/data.js`. What was left out to stay small is counted.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Status = Literal["compiled", "no entry", "refused", "failed", "unfinished"]
Verdict = Literal["new", "gone", "slower", "faster", "more", "fewer", "same"]

NONE = -1  # the number of no compile


class Process(Struct, kw_only=True):
    """One process, and its sums."""

    label: str
    host: str
    pid: int
    parent_pid: int
    rank: int | None
    python: str
    torch: str | None
    tripwire: str | None
    argv: list[str]
    start_ns: int = 0
    end_ns: int = 0
    events: int = 0
    compiles: int = 0
    duration_us: int = 0
    unattributed_us: int = 0
    phases: dict[str, int] = {}
    retirements: int = 0
    refusals: int = 0
    recompiles: int = 0
    records: int = 0
    counters: dict[str, dict[str, int]] = {}


class SpanRow(Struct, array_like=True):
    """One span of a lane."""

    start_ns: int
    duration_ns: int
    depth: int
    name: int  # in `Report.span_names`
    compile: int
    error: str


class Moment(Struct, array_like=True):
    """A moment of a lane: what kind, and what it says."""

    time_ns: int
    kind: str
    text: str
    compile: int


class Lane(Struct, kw_only=True):
    """One thread: its heaviest spans by their beginnings, and its moments."""

    process: int
    thread: int
    name: str
    spans: list[SpanRow]
    marks: list[Moment]
    total: int  # spans that there were
    left_out_ns: int = 0  # how long the heaviest span is that isn't here


class Compile(Struct, kw_only=True):
    """One compile; what is long about it is its `Detail`."""

    id: str
    process: int
    thread: int = 0
    function: str = "?"
    file: str = ""
    line: int = 0
    backend: str | None = None
    start_ns: int = 0
    status: Status = "unfinished"
    reason: str = ""
    duration_us: int = 0
    unattributed_us: int = 0
    phases: dict[str, int] = {}
    nodes: int = 0
    guards: int = 0
    wires: int = 0
    reads: int = 0
    retired: int = 0
    has_detail: bool = False


class UserLine(Struct, array_like=True, frozen=True):
    """A line of the user's."""

    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""
    excerpt: str = ""  # source with carets below


class NodeRow(Struct, array_like=True):
    """A node of a graph; scope and place are numbers in the lists of its stretch."""

    name: str
    op: str
    target: str
    inputs: list[str]
    scope: int
    place: int
    shape: str


class Graph(Struct):
    """A graph, or a stretch of one; nodes stand in the order of execution."""

    nodes: list[NodeRow]
    scopes: list[str]
    places: list[UserLine]
    left_out: int = 0


class Seen(Struct, array_like=True):
    """A wire or a read."""

    source: str
    seen: str
    file: str
    line: int
    text: str


class Rows(Struct):
    """Wires or reads, and how many more there were."""

    rows: list[Seen]
    left_out: int = 0


class Occurrence(Struct, array_like=True):
    """One time that something of a group happened. `before` and `after` are a retirement's."""

    time_ns: int
    process: int
    compile: int
    before: str = ""
    after: str = ""


class Group(Struct, kw_only=True):
    """What happened alike: a cause and its writer, a refusal and its line."""

    title: str  # what was written, the slug, the function
    reason: str = ""
    place: UserLine
    count: int = 0
    by_process: dict[int, int] = {}
    occurrences: list[Occurrence] = []


class Groups(Struct):
    """Groups, and how many events belong to none because there were too many groups."""

    rows: list[Group]
    total: int
    left_out: int = 0


class RecordRow(Struct):
    """A record that was written."""

    path: str
    function: str
    exception: str
    time_ns: int
    process: int
    compile: int


class SpanTotal(Struct):
    """All spans of one name."""

    name: str
    calls: int = 0
    total_ns: int = 0
    longest_ns: int = 0
    errors: int = 0


class Skipped(Struct):
    """What reading met, and what isn't in the report."""

    files: int = 0
    events: int = 0
    damaged: int = 0
    newer: int = 0
    headless: int = 0
    processes: int = 0
    counters: int = 0
    lanes: int = 0
    marks: int = 0
    compiles: int = 0
    details: int = 0
    records: int = 0
    span_names: int = 0


class RowChange(Struct, kw_only=True):
    """One line of a comparison; a missing side is None."""

    name: str
    place: str = ""
    verdict: Verdict
    count_before: int | None = None
    count_after: int | None = None
    us_before: int | None = None
    us_after: int | None = None
    nodes_before: int | None = None
    nodes_after: int | None = None


class NodeChange(Struct, array_like=True):
    """One node that only one run has, or that differs."""

    kind: str  # added, removed, changed
    scope: str
    name: str
    target: str
    what: str  # what differs; the value's form of a node that came or went
    file: str
    line: int
    text: str  # the user's line


class GraphChange(Struct, kw_only=True):
    """A graph against the same function's graph in the earlier run."""

    function: str
    place: str
    compile: int
    id_before: str
    added: int
    removed: int
    changed: int
    nodes: list[NodeChange]  # by scope
    left_out: int = 0


class Comparison(Struct, kw_only=True):
    """This run against an earlier one."""

    other: str
    figures: list[RowChange]
    functions: list[RowChange]
    graphs: list[GraphChange]  # those that differ
    same_graphs: int
    phases: list[RowChange]
    spans: list[RowChange]
    retirements: list[RowChange]
    refusals: list[RowChange]
    recompiles: list[RowChange]
    counters: list[RowChange]
    rows_left_out: int = 0
    graphs_left_out: int = 0


class Report(Struct, kw_only=True):
    """Everything but the compiles' details, which the page reads one by one."""

    title: str
    begin_ms: int  # since 1970
    duration_ns: int
    processes: list[Process]
    span_names: list[str]
    lanes: list[Lane]
    compiles: list[Compile]
    retirements: Groups
    refusals: Groups
    recompiles: Groups
    records: list[RecordRow]
    spans: list[SpanTotal]
    skipped: Skipped
    diff: Comparison | None = None

    def sum_hits(self) -> dict[str, int | None]:
        """Hits, misses, and what hits saved in microseconds; None for what nobody counted."""
        sums: dict[str, int] = {}
        for process in self.processes:
            for name, count in process.counters.get("frames", {}).items():
                sums[name] = sums.get(name, 0) + count
        saved = sums.get("saved_us", 0) - sums.get("lost_us", 0)
        timed = "saved_us" in sums or "lost_us" in sums
        return {
            "hits": sums.get("hit"),
            "misses": sums.get("miss"),
            "saved_us": saved if timed else None,
        }


def cut(text: str, longest: int = 400) -> str:
    """A text, shortened where it is longer than a page can show."""
    return text if len(text) <= longest else f"{text[:longest]}… {len(text):,} characters"
