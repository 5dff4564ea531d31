"""Comparison: what is new, gone, slower in one run against another.

Rows are matched by what they are about (a function and its file, a slug, a source), never by a
line number, since lines move between two runs. Nodes of a graph are matched scope by scope, in the
order in which they run, by what they call. Names count only for inputs, since one more node renames
all that follow. Matched nodes may still differ: in the form of their value, or in their arguments.

Comparing takes memory that the logs pay for (`Allowance`), but for two graphs of ordinary size at a
time. What isn't paid for is left out and counted: rows of one kind, or a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from operator import attrgetter
from typing import NamedTuple

import msgspec

from tripwire.files import estimate_memory, estimate_wide
from tripwire.report.budgets import Details, measure
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
# Bytes that what is compared takes: a row of either side, a compile, a node beside what it says.
ROW, PAIRED, NODE, CHANGE = 700, 400, 150, 200
TWO_GRAPHS = 16 << 20  # bytes that two graphs may take while they are compared, paid for or not


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
    allowance = built[1].allowance
    rows_left_out = 0

    def changes(
        texts: Callable[[Report], Iterable[tuple[str, ...]]], side: Callable[[Report], Side]
    ) -> list[RowChange]:
        nonlocal rows_left_out
        prices = [ROW + measure(*row) for report in (after, before) for row in texts(report)]
        if not allowance.take(sum(prices)):
            rows_left_out += len(prices)
            return []
        return _match(side(after), side(before))

    def groups(name: str) -> list[RowChange]:
        find: Callable[[Report], Groups] = attrgetter(name)
        return changes(
            lambda r: ((g.place.file, g.place.function) for g in find(r).rows),
            lambda r: _groups(find(r)),
        )

    graphs = _compare_graphs(built, earlier)
    return Comparison(
        other=before.title,
        figures=_match(_figures(after), _figures(before), in_order=True),
        functions=changes(lambda r: (() for _ in r.compiles), _functions),
        graphs=graphs.changed,
        same_graphs=graphs.same,
        phases=_match(_phases(after), _phases(before)),
        spans=changes(
            lambda r: (() for _ in r.spans),
            lambda r: {(s.name, ""): Sum(s.calls, s.total_ns // 1000) for s in r.spans},
        ),
        retirements=groups("retirements"),
        refusals=groups("refusals"),
        recompiles=groups("recompiles"),
        counters=changes(
            lambda r: ((g, n) for p in r.processes for g, ns in p.counters.items() for n in ns),
            _counters,
        ),
        rows_left_out=rows_left_out,
        graphs_left_out=graphs.left_out,
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


@dataclass(slots=True)
class _Graphs:
    """Graphs that both runs have."""

    changed: list[GraphChange]
    same: int = 0
    left_out: int = 0


def _compare_graphs(after: tuple[Report, Details], before: tuple[Report, Details]) -> _Graphs:
    """What differs between graphs that both runs have; those that take too much are left out."""
    found = _Graphs([])
    allowance = after[1].allowance
    compiles = PAIRED * (len(after[0].compiles) + len(before[0].compiles))
    if not allowance.take(compiles):
        found.left_out = len(after[0].compiles)
        return found
    for number, other in _pair_compiles(after[0], before[0]):
        pieces = after[1].find(number, "graph"), before[1].find(other, "graph")
        if not all(pieces):
            continue
        compile, earlier = after[0].compiles[number], before[0].compiles[other]
        needed = sum(map(_price, [*pieces[0], *pieces[1]])) + NODE * (compile.nodes + earlier.nodes)
        needed = 0 if needed <= TWO_GRAPHS else needed
        if not allowance.take(needed):
            found.left_out += 1
            continue
        change = _compare_graph(compile, earlier, *map(_build_graph, pieces))
        allowance.give_back(needed)
        if change is None:
            found.same += 1
        elif allowance.take(PAIRED + sum(map(_price_change, change.nodes))):
            change.compile = number
            found.changed.append(change)
        else:
            found.left_out += 1
    allowance.give_back(compiles)
    return found


def _price(piece: bytes) -> int:
    """What JSON that is here already takes as objects."""
    return estimate_memory(piece) + estimate_wide(piece) - len(piece)


def _price_change(change: NodeChange) -> int:
    return CHANGE + measure(*(getattr(change, name) for name in _TEXTS))


_TEXTS = ("scope", "name", "target", "what", "file", "text")


def _compare_graph(
    compile: Compile, earlier: Compile, now: Graph, then: Graph
) -> GraphChange | None:
    found, names = _compare_nodes(now, then)
    if not found:
        return None
    kinds = Counter(change.kind for change in found)
    return GraphChange(
        function=compile.function,
        place=compile.file,
        compile=0,
        id_before=earlier.id,
        added=kinds["added"],
        removed=kinds["removed"],
        changed=kinds["changed"],
        nodes=[_tell_node(change, now, then, names) for change in found[:SHOWN]],
        left_out=max(0, len(found) - SHOWN),
    )


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


def _build_graph(pieces: list[bytes]) -> Graph:
    """The graph of a compile, whole."""
    whole = Graph([], [], [])
    for piece in pieces:
        stretch = msgspec.json.decode(piece, type=Graph)
        for node in stretch.nodes:
            node.scope += len(whole.scopes)
            node.place += len(whole.places)
        whole.nodes += stretch.nodes
        whole.scopes += stretch.scopes
        whole.places += stretch.places
    return whole


class _ChangedNode(NamedTuple):
    """A node that came, went or differs, by its number in either graph."""

    kind: str
    scope: str
    now: int = -1
    then: int = -1


def _compare_nodes(after: Graph, before: Graph) -> tuple[list[_ChangedNode], dict[str, str]]:
    """What differs, by scope; and the names that nodes had before, by those of now."""
    now, then = _by_scope(after), _by_scope(before)
    order = {scope: number for number, scope in enumerate(dict.fromkeys([*now, *then]))}
    pairs: dict[int, int] = {}  # nodes of `before`, by those of `after` that they became
    for scope in order:
        _pair_nodes(after, before, now.get(scope, []), then.get(scope, []), pairs)
    gone = set(range(len(before.nodes))) - set(pairs.values())
    changes = [
        _ChangedNode("added", after.scopes[node.scope], number)
        for number, node in enumerate(after.nodes)
        if number not in pairs
    ]
    for number in sorted(gone):
        scope = before.scopes[before.nodes[number].scope]
        changes.append(_ChangedNode("removed", scope, then=number))
    became = {after.nodes[n].name: before.nodes[other].name for n, other in pairs.items()}
    for number, other in pairs.items():
        node = after.nodes[number]
        if _tell_difference(node, before.nodes[other], became):
            changes.append(_ChangedNode("changed", after.scopes[node.scope], number, other))
    return sorted(changes, key=lambda change: order[change.scope]), became


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


def _tell_difference(node: NodeRow, other: NodeRow, names: dict[str, str]) -> str:
    """How a node differs from the one that it was; empty where it doesn't."""
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


def _tell_node(
    change: _ChangedNode, after: Graph, before: Graph, names: dict[str, str]
) -> NodeChange:
    graph, number = (before, change.then) if change.now < 0 else (after, change.now)
    node = graph.nodes[number]
    place: UserLine = graph.places[node.place]
    what = node.shape
    if change.kind == "changed":
        what = _tell_difference(node, before.nodes[change.then], names)
    return NodeChange(
        change.kind, change.scope, node.name, node.target, what, place.file, place.line, place.text
    )
