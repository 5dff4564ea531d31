"""Grouping: events that say the same are one row with a count, however many there are."""

from __future__ import annotations

from tripwire.report.model import Group, Groups, Occurrence, Place

GROUPS = 2_000
OCCURRENCES = 12  # that a group keeps: its first ones, then its latest


class Grouping:
    """Rows by what was written, where and by whom; or by the reason of a refusal."""

    def __init__(self, most: int = GROUPS) -> None:
        self._most = most
        self._groups: dict[tuple[str, str, Place], Group] = {}
        self._left_out = 0
        self.total = 0

    def add(self, title: str, reason: str, place: Place, occurrence: Occurrence) -> None:
        """Count one event."""
        self.total += 1
        key = title, reason, place
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= self._most:
                self._left_out += 1
                return
            group = self._groups[key] = Group(
                title=title, reason=reason, place=place, first_ns=occurrence.time_ns
            )
        group.count += 1
        group.last_ns = occurrence.time_ns
        process = occurrence.process
        group.by_process[process] = group.by_process.get(process, 0) + 1
        if len(group.occurrences) >= OCCURRENCES:
            group.occurrences.pop()
        group.occurrences.append(occurrence)

    def rows(self, beginnings: list[int]) -> Groups:
        """The groups, most frequent first, with times since each process's `beginning`."""
        for group in self._groups.values():
            for occurrence in group.occurrences:
                occurrence.time_ns -= beginnings[occurrence.process]
            # Clocks of processes differ by a constant; the first and the last are still told.
            group.first_ns = group.occurrences[0].time_ns
            group.last_ns = group.occurrences[-1].time_ns
        rows = sorted(self._groups.values(), key=lambda group: -group.count)
        return Groups(rows, self.total, self._left_out)
