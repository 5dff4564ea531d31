"""Findings: the places that a call could read, what happened after each write, and their table."""

from __future__ import annotations

import enum
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class PlaceKind(enum.StrEnum):
    """What holds the value."""

    ARGUMENT = "argument"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    SUBMODULE = "submodule"
    ATTRIBUTE = "attribute"
    ABSENCE = "absence"
    ITEM = "item"
    HOOK = "hook"
    METHOD = "method"
    CLASS_ATTRIBUTE = "class attribute"
    GLOBAL = "global"
    CELL = "closure cell"
    DEFAULT = "default"
    CODE = "code"
    ENVIRONMENT = "environment"
    FLAG = "torch's flag"


@dataclass(frozen=True, slots=True)
class AuditedPlace:
    """One place, and the write that was tried there."""

    kind: PlaceKind
    path: str
    change: str

    def __str__(self) -> str:
        return f"{self.path}: {self.change}"


@dataclass(frozen=True, slots=True)
class Unreached:
    """Something that a call could read and that was not written."""

    path: str
    why: str


class Status(enum.StrEnum):
    """What the compiled callable did after a write."""

    FOLLOWED = "followed"  # the answer changed, and both gave the new one
    NO_EFFECT = "without effect"  # the answer is the same, from both
    STALE = "stale"  # compiled code gave the answer from before the write
    WRONG = "wrong"  # compiled code gave another answer
    REFUSED = "refused"  # the call ran as plain Python

    @property
    def is_fault(self) -> bool:
        """Whether the compiled callable broke its promise."""
        return self in (Status.STALE, Status.WRONG)


@dataclass(frozen=True, slots=True)
class Finding:
    """What happened after one write."""

    place: AuditedPlace
    status: Status
    plain: str  # what the plain call gave, in short
    compiled: str
    detail: str  # of a fault: the first difference; of a refusal: why


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found. It prints as a table."""

    name: str
    findings: tuple[Finding, ...]
    found: int  # places in all
    seed: int
    seconds: float
    unreached: tuple[Unreached, ...]

    @property
    def ok(self) -> bool:
        """Nothing was stale or wrong."""
        return not self.faults

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What was stale or wrong."""
        return tuple(f for f in self.findings if f.status.is_fault)

    def count(self) -> Counter[Status]:
        """How many writes came to what."""
        return Counter(finding.status for finding in self.findings)

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}

    def render(self, *, every: bool = False) -> str:
        """The table; `every` lists all places, and not faults and refusals alone."""
        text = io.StringIO()
        console = Console(file=text, width=120, force_terminal=False, highlight=False)
        self.print_to(console, every=every)
        return text.getvalue()

    def print_to(self, console: Console, *, every: bool = False) -> None:
        """Print the table."""
        console.print(_summary(self))
        for status in (Status.STALE, Status.WRONG):
            _print_faults(console, status, [f for f in self.findings if f.status is status])
        _print_refused(console, [f for f in self.findings if f.status is Status.REFUSED])
        if every:
            console.print(_every(self.findings))
        _print_unreached(console, self.unreached)
        console.print(escape(self._conclude()), soft_wrap=True)

    def _conclude(self) -> str:
        tried = f"{len(self.findings)} writes of {self.found} possible"
        sampled = f" (seed {self.seed})" if len(self.findings) < self.found else ""
        verdict = "nothing stale, nothing wrong" if self.ok else f"{len(self.faults)} FAULTS"
        return f"{self.name}: {verdict}; {tried}{sampled}, {self.seconds:.1f} s."

    def __str__(self) -> str:
        return self.render().rstrip()

    def __repr__(self) -> str:
        return self._conclude()


def _summary(audit: Audit) -> Table:
    table = Table(title=f"audit of {escape(audit.name)}", title_justify="left")
    table.add_column("place")
    for status in Status:
        table.add_column(status.value, justify="right")
    for kind in PlaceKind:
        counts = Counter(f.status for f in audit.findings if f.place.kind is kind)
        if counts:
            table.add_row(kind.value, *(_number(status, counts[status]) for status in Status))
    return table


def _number(status: Status, count: int) -> str:
    if not count:
        return ""
    return f"[bold red]{count}[/]" if status.is_fault else str(count)


def _print_faults(console: Console, status: Status, faults: list[Finding]) -> None:
    for fault in faults:
        console.print(f"[bold red]{status.value}[/]  {escape(str(fault.place))}", soft_wrap=True)
        console.print(escape(f"    plain:    {fault.plain}"), soft_wrap=True)
        console.print(escape(f"    compiled: {fault.compiled}"), soft_wrap=True)
        if fault.compiled not in fault.detail:  # an effect, a form, an alias
            console.print(escape(f"    {fault.detail}"), soft_wrap=True)


def _print_refused(console: Console, refused: list[Finding]) -> None:
    reasons = Counter(finding.detail for finding in refused)
    for reason, count in reasons.most_common():
        console.print(escape(f"refused {count}: {reason}"), soft_wrap=True)


def _print_unreached(console: Console, unreached: Iterable[Unreached]) -> None:
    reasons = Counter(item.why for item in unreached)
    for reason, count in reasons.most_common(8):
        example = next(item.path for item in unreached if item.why == reason)
        others = f" and {count - 1} more" if count > 1 else ""
        console.print(escape(f"not reached: {example}{others}: {reason}"), soft_wrap=True)


def _every(findings: tuple[Finding, ...]) -> Table:
    table = Table()
    for title in ("status", "place", "write", "plain", "compiled"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        cells = (finding.status.value, finding.place.path, finding.place.change)
        table.add_row(*map(escape, (*cells, finding.plain, finding.compiled)))
    return table
