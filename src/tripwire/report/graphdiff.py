"""Graphs of two runs, node by node.

Nodes are matched scope by scope, in the order in which they run, by what they call; names count
for inputs only, since one more node renames all that follow. What is matched may still differ: in
its value's form, or in what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher

import msgspec
from msgspec import Struct

from tripwire.report.details import Details
from tripwire.report.model import (
    Compile,
    Graph,
    GraphChange,
    NodeChange,
    NodeRow,
    Place,
    Report,
)

PAIRS = 500  # compiles that are compared
SHOWN = 400  # changes of one graph
EXACT = 1_000  # nodes of a scope beyond which frequent ones are no anchors: it takes too long


class _Detail(Struct):
    graph: Graph | None = None


def compare_graphs(
    after: tuple[Report, Details], before: tuple[Report, Details]
) -> tuple[list[GraphChange], int]:
    """What differs between graphs that both runs have, and how many are the same."""
    changes, same = [], 0
    for number, other in _pairs(after[0], before[0]):
        now, then = _find_graph(after[1], number), _find_graph(before[1], other)
        if now is None or then is None:
            continue
        compile, earlier = after[0].compiles[number], before[0].compiles[other]
        found = _compare(now, then)
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
                id_after=compile.id,
                added=kinds.count("added"),
                removed=kinds.count("removed"),
                changed=kinds.count("changed"),
                nodes=found[:SHOWN],
                left_out=max(0, len(found) - SHOWN),
            )
        )
    return changes, same


def _pairs(after: Report, before: Report) -> Iterator[tuple[int, int]]:
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
    found = details.find(number)
    return None if found is None else msgspec.json.decode(found, type=_Detail).graph


def _compare(after: Graph, before: Graph) -> list[NodeChange]:
    now, then = _by_scope(after), _by_scope(before)
    pairs: dict[int, int] = {}  # nodes of `before`, by those of `after` that they became
    for scope in dict.fromkeys([*now, *then]):
        _match(after, before, now.get(scope, []), then.get(scope, []), pairs)
    gone = set(range(len(before.nodes))) - set(pairs.values())
    alone = [number for number in range(len(after.nodes)) if number not in pairs]
    changes = [_change("added", after, number) for number in alone]
    changes += [_change("removed", before, number) for number in sorted(gone)]
    for number, other in pairs.items():
        what = _difference(after.nodes[number], before.nodes[other], pairs)
        if what:
            changes.append(_change("changed", after, number, what))
    order = {scope: n for n, scope in enumerate(dict.fromkeys([*now, *then]))}
    return sorted(changes, key=lambda change: order[change.scope])


def _by_scope(graph: Graph) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        found.setdefault(graph.scopes[node.scope], []).append(number)
    return found


def _match(
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


def _difference(node: NodeRow, other: NodeRow, pairs: dict[int, int]) -> str:
    parts = [
        f"{label} {old} → {new}"
        for label, old, new in (
            ("kind", other.op, node.op),
            ("target", other.target, node.target),
            ("value", other.shape or "?", node.shape or "?"),
        )
        if old != new
    ]
    if [pairs.get(number, -1) for number in node.inputs] != other.inputs:
        parts.append("other inputs")
    return "; ".join(parts)


def _change(kind: str, graph: Graph, number: int, what: str = "") -> NodeChange:
    node = graph.nodes[number]
    place: Place = graph.places[node.place]
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
