"""Comparison: what is new, gone, slower in one run against another.

Rows are matched by what they are about (a function and its file, a slug, a source), never by a
line number, since lines move between two runs. Nodes of a graph are matched scope by scope, in the
order in which they run, by what they call. Names count only for inputs, since one more node renames
all that follow. Matched nodes may still differ: in the form of their value, or in their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

import msgspec

from tripwire.report.budgets import Details
from tripwire.report.model import (
    Comparison,
    Compile,
    Graph,
    GraphChange,
    Groups,
    NodeChange,
    NodeRow,
    Report,
    RowChange,
    UserLine,
    Verdict,
)

SLOWER = 1.1  # a ratio within which two times are the same
AT_LEAST_US = 500  # as is a smaller difference
PAIRS = 500  # compiles that are compared
SHOWN = 400  # changes of one graph
EXACT = 1_000  # nodes of a scope beyond which frequent ones are no anchors: it takes too long


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

    def changes(side: Callable[[Report], Side]) -> list[RowChange]:
        return _match(side(after), side(before))

    graphs, same_graphs = _compare_graphs(built, earlier)
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


def _match(after: Side, before: Side, in_order: bool = False) -> list[RowChange]:
    found = []
    for key in dict.fromkeys([*after, *before]):
        now, then = after.get(key), before.get(key)
        change = RowChange(name=key[0], place=key[1], verdict=_judge(now, then))
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


def _weigh(change: RowChange) -> tuple[int, int]:
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


# --- graphs, node by node -------------------------------------------------------------------------


def _compare_graphs(
    after: tuple[Report, Details], before: tuple[Report, Details]
) -> tuple[list[GraphChange], int]:
    """What differs between graphs that both runs have, and how many are the same."""
    changes, same = [], 0
    for number, other in _pair_compiles(after[0], before[0]):
        now, then = _find_graph(after[1], number), _find_graph(before[1], other)
        if now is None or then is None:
            continue
        compile, earlier = after[0].compiles[number], before[0].compiles[other]
        found = _compare_nodes(now, then)
        if not found:
            same += 1
            continue
        kinds = [change.kind for change in found]
        changes.append(
            GraphChange(
                function=compile.function,
                place=compile.file,
                compile=number,
                id_before=earlier.id,
                added=kinds.count("added"),
                removed=kinds.count("removed"),
                changed=kinds.count("changed"),
                nodes=found[:SHOWN],
                left_out=max(0, len(found) - SHOWN),
            )
        )
    return changes, same


def _pair_compiles(after: Report, before: Report) -> Iterator[tuple[int, int]]:
    """Compiles that are the same function's, the same in its order, in processes alike."""
    numbers = {key: number for number, key in enumerate(_keys(before))}
    found = 0
    for number, key in enumerate(_keys(after)):
        other = numbers.get(key)
        if other is not None and found < PAIRS:
            found += 1
            yield number, other


def _keys(report: Report) -> Iterator[tuple[object, ...]]:
    met: dict[tuple[object, ...], int] = {}
    for compile in report.compiles:
        key = _function(report, compile)
        met[key] = met.get(key, -1) + 1
        yield (*key, met[key])


def _function(report: Report, compile: Compile) -> tuple[object, ...]:
    rank = report.processes[compile.process].rank
    return compile.function, compile.file, rank if rank is not None else compile.process


def _find_graph(details: Details, number: int) -> Graph | None:
    """The graph of a compile, whole."""
    stretches = [msgspec.json.decode(one, type=Graph) for one in details.find(number, "graph")]
    if not stretches:
        return None
    whole = Graph([], [], [])
    for stretch in stretches:
        for node in stretch.nodes:
            node.scope += len(whole.scopes)
            node.place += len(whole.places)
        whole.nodes += stretch.nodes
        whole.scopes += stretch.scopes
        whole.places += stretch.places
    return whole


def _compare_nodes(after: Graph, before: Graph) -> list[NodeChange]:
    now, then = _by_scope(after), _by_scope(before)
    pairs: dict[int, int] = {}  # nodes of `before`, by those of `after` that they became
    for scope in dict.fromkeys([*now, *then]):
        _pair_nodes(after, before, now.get(scope, []), then.get(scope, []), pairs)
    gone = set(range(len(before.nodes))) - set(pairs.values())
    alone = [number for number in range(len(after.nodes)) if number not in pairs]
    changes = [_tell_node("added", after, number) for number in alone]
    changes += [_tell_node("removed", before, number) for number in sorted(gone)]
    became = {after.nodes[n].name: before.nodes[other].name for n, other in pairs.items()}
    for number, other in pairs.items():
        what = _difference(after.nodes[number], before.nodes[other], became)
        if what:
            changes.append(_tell_node("changed", after, number, what))
    order = {scope: n for n, scope in enumerate(dict.fromkeys([*now, *then]))}
    return sorted(changes, key=lambda change: order[change.scope])


def _by_scope(graph: Graph) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        found.setdefault(graph.scopes[node.scope], []).append(number)
    return found


def _pair_nodes(
    after: Graph, before: Graph, now: list[int], then: list[int], pairs: dict[int, int]
) -> None:
    left = [_signature(before.nodes[n]) for n in then]
    right = [_signature(after.nodes[n]) for n in now]
    shorter = min(len(left), len(right))
    begin = next((i for i in range(shorter) if left[i] != right[i]), shorter)
    most = shorter - begin
    end = next((i for i in range(most) if left[-1 - i] != right[-1 - i]), most)
    pairs.update(zip(now[:begin], then[:begin], strict=True))
    if end:
        pairs.update(zip(now[-end:], then[-end:], strict=True))
        now, then = now[:-end], then[:-end]
    now, then = now[begin:], then[begin:]
    left, right = left[begin : begin + len(then)], right[begin : begin + len(now)]
    matcher = SequenceMatcher(None, left, right, autojunk=len(right) > EXACT)
    for kind, a, a_end, b, b_end in matcher.get_opcodes():
        # Calls that stand where others stood have changed; what is left over came or went.
        if kind in ("equal", "replace"):
            pairs.update(zip(now[b:b_end], then[a:a_end], strict=False))


def _signature(node: NodeRow) -> tuple[str, str]:
    return node.op, node.target


def _difference(node: NodeRow, other: NodeRow, names: dict[str, str]) -> str:
    """What differs; `names` are those that nodes of the earlier graph had, by those of now."""
    parts = [
        f"{label} {old} → {new}"
        for label, old, new in (
            ("kind", other.op, node.op),
            ("target", other.target, node.target),
            ("value", other.shape or "?", node.shape or "?"),
        )
        if old != new
    ]
    if [names.get(name) for name in node.inputs] != other.inputs:
        parts.append("other inputs")
    return "; ".join(parts)


def _tell_node(kind: str, graph: Graph, number: int, what: str = "") -> NodeChange:
    node = graph.nodes[number]
    place: UserLine = graph.places[node.place]
    return NodeChange(
        kind,
        graph.scopes[node.scope],
        node.name,
        node.target,
        what or node.shape,
        place.file,
        place.line,
        place.text,
    )
