"""What is kept of many spans, and of many events that say the same."""

from __future__ import annotations

from unit.report.samples import PLENTY, span

from tripwire.report.budgets import OCCURRENCES, Grouping, Lanes
from tripwire.report.model import Occurrence, UserLine


def test_a_lane_keeps_its_heaviest_spans_and_says_how_many_there_were() -> None:
    lanes = Lanes(PLENTY, spans=10)
    for n in range(1000):
        lanes.add_span(0, span(n, n), n, 0, -1)
    (lane,) = lanes.rows([0])
    assert sorted(one.duration_ns for one in lane.spans) == list(range(990, 1000))
    assert lane.total == 1000
    assert lane.left_out_ns == 989


def test_what_is_around_a_kept_span_is_kept() -> None:
    lanes = Lanes(PLENTY, spans=6)
    for block in range(20):
        begin = block * 100
        for depth in (3, 2, 1, 0):  # all equally long
            lanes.add_span(0, span(begin, 50 + block, depth), begin, 0, -1)
    (lane,) = lanes.rows([0])
    by_start: dict[int, set[int]] = {}
    for one in lane.spans:
        by_start.setdefault(one.start_ns, set()).add(one.depth)
    for depths in by_start.values():
        assert depths == set(range(len(depths)))


def test_lanes_share_one_budget() -> None:
    lanes = Lanes(PLENTY, spans=100, lanes=4)
    for thread in range(6):
        for n in range(200):
            lanes.add_span(0, span(n, n + 1, thread=thread), n, 0, -1)
    rows = lanes.rows([0])
    assert [len(row.spans) for row in rows] == [25, 25, 25, 25]
    assert lanes.left_out == 2


def test_groups_stay_few_and_what_is_left_out_is_counted() -> None:
    grouping = Grouping(PLENTY, most=3)
    for n in range(50):
        grouping.add(f"t{n % 5}", "", UserLine(), Occurrence(n, 0, -1))
    groups = grouping.rows([0])
    assert (len(groups.rows), groups.total, groups.left_out) == (3, 50, 20)
    many = Grouping(PLENTY)
    for n in range(1000):
        many.add("t", "", UserLine(), Occurrence(n, 0, -1))
    (group,) = many.rows([0]).rows
    assert len(group.occurrences) == OCCURRENCES
    assert [group.occurrences[0].time_ns, group.occurrences[-1].time_ns] == [0, 999]
