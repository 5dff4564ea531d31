"""Comparison: what is new, gone, slower in one run against another.

Rows are matched by what they are about (a function and its file, a slug, a source), never by a
line number, since lines move between two runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tripwire.report.details import Details
from tripwire.report.graphdiff import compare_graphs
from tripwire.report.model import Change, Comparison, Groups, Report, Verdict

SLOWER = 1.1  # a ratio within which two times are the same
AT_LEAST_US = 500  # as is a smaller difference


@dataclass(slots=True)
class Sum:
    """One side of a row. What a row doesn't have is None on both sides."""

    count: int | None = None
    us: int | None = None
    nodes: int | None = None

    def add(self, count: int | None = None, us: int | None = None) -> None:
        """Add to the figures that are given."""
        if count is not None:
            self.count = (self.count or 0) + count
        if us is not None:
            self.us = (self.us or 0) + us


Side = dict[tuple[str, str], Sum]  # by name and place


def compare(built: tuple[Report, Details], earlier: tuple[Report, Details]) -> Comparison:
    """`built` is the run that the report is about."""
    after, before = built[0], earlier[0]

    def changes(side: Callable[[Report], Side]) -> list[Change]:
        return _match(side(after), side(before))

    graphs, same_graphs = compare_graphs(built, earlier)
    return Comparison(
        other=before.title,
        figures=_match(_figures(after), _figures(before), in_order=True),
        functions=changes(_functions),
        graphs=graphs,
        same_graphs=same_graphs,
        phases=changes(_phases),
        spans=changes(lambda r: {(s.name, ""): Sum(s.calls, s.total_ns // 1000) for s in r.spans}),
        retirements=changes(lambda r: _groups(r.retirements)),
        refusals=changes(lambda r: _groups(r.refusals)),
        recompiles=changes(lambda r: _groups(r.recompiles)),
        counters=changes(_counters),
    )


def _match(after: Side, before: Side, in_order: bool = False) -> list[Change]:
    found = []
    for key in dict.fromkeys([*after, *before]):
        now, then = after.get(key), before.get(key)
        change = Change(name=key[0], place=key[1], verdict=_judge(now, then))
        if now is not None:
            change.count_after, change.us_after, change.nodes_after = now.count, now.us, now.nodes
        if then is not None:
            change.count_before, change.us_before = then.count, then.us
            change.nodes_before = then.nodes
        found.append(change)
    return found if in_order else sorted(found, key=_weigh)


def _judge(after: Sum | None, before: Sum | None) -> Verdict:
    if before is None:
        return "new"
    if after is None:
        return "gone"
    now, then = after.us or 0, before.us or 0
    if abs(now - then) >= AT_LEAST_US:
        if now > then * SLOWER:
            return "slower"
        if then > now * SLOWER:
            return "faster"
    more = (after.count or 0) - (before.count or 0)
    return "more" if more > 0 else "fewer" if more < 0 else "same"


_RANK: dict[str, int] = {"new": 0, "slower": 1, "more": 2, "gone": 3, "faster": 4, "fewer": 5}


def _weigh(change: Change) -> tuple[int, int]:
    us = (change.us_after or 0) - (change.us_before or 0)
    count = (change.count_after or 0) - (change.count_before or 0)
    return _RANK.get(change.verdict, 6), -abs(us or count)


def _functions(report: Report) -> Side:
    found: Side = {}
    for compile in report.compiles:
        row = found.setdefault((compile.function, compile.file), Sum())
        row.add(1, compile.duration_us)
        row.nodes = max(row.nodes or 0, compile.nodes)
    return found


def _phases(report: Report) -> Side:
    found: Side = {}
    for process in report.processes:
        for phase, us in (*process.phases.items(), ("unattributed_us", process.unattributed_us)):
            found.setdefault((phase, ""), Sum()).add(us=us)
    return found


def _groups(groups: Groups) -> Side:
    found: Side = {}
    for group in groups.rows:
        place = f"{group.place.file} {group.place.function}".strip()
        found.setdefault((group.title, place), Sum()).add(group.count)
    return found


def _counters(report: Report) -> Side:
    """The counters of all processes together, as `group.name`."""
    found: Side = {}
    for process in report.processes:
        for group, names in process.counters.items():
            for name, count in names.items():
                found.setdefault((f"{group}.{name}", ""), Sum()).add(count)
    return found


def _figures(report: Report) -> Side:
    def total(name: str) -> int:
        return sum(getattr(process, name) for process in report.processes)

    counted = ("compiles", "retirements", "refusals", "recompiles", "records")
    return {
        ("processes", ""): Sum(len(report.processes)),
        **{(name, ""): Sum(total(name)) for name in counted},
        ("compile time", ""): Sum(us=total("duration_us")),
        ("unattributed time", ""): Sum(us=total("unattributed_us")),
    }
