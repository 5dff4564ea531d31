"""Refusals: why there is no compiled code, as data.

A refusal says why a run can't become a trace, and where. The run goes on as plain Python, so the
call's result is still right (L4, L5). A mismatch says why an entry doesn't fit a call. A cause says
why an entry was retired, and who wrote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from tripwire.errors import CannotTrace
from tripwire.ranges import NOWHERE, SourceRange

if TYPE_CHECKING:
    from tripwire.reading.sources import Source


class Refusal(Struct, frozen=True):
    """Why, and at which line of the user's."""

    slug: str
    reason: str
    where: SourceRange = NOWHERE

    def __str__(self) -> str:
        place = self.where.place
        if place is None:
            return self.reason
        return f"{place.file}:{place.line}: {self.reason}"

    def error(self) -> CannotTrace:
        """The refusal as an exception."""
        place = self.where.place
        text = f"\n    {place.text}\n" if place is not None and place.text else ""
        error = CannotTrace(f"{self}{text}", slug=self.slug)
        error.place = None if place is None else (place.file, place.line)
        return error


class Refused(Exception):
    """Carries a refusal from deep inside the recorder to the handler that stops recording."""

    def __init__(self, slug: str, reason: str, where: SourceRange = NOWHERE) -> None:
        super().__init__(reason)
        self.slug = slug
        self.reason = reason
        self.where = where

    @property
    def refusal(self) -> Refusal:
        """The refusal, at the line that whoever raised this knew."""
        return Refusal(self.slug, self.reason, self.where)


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote: the innermost frame that is neither torch's, Python's own nor tripwire's."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Mismatch(Struct, frozen=True):
    """Why an entry doesn't fit a call: what differed."""

    source: str
    old: str
    new: str

    @property
    def advice(self) -> str:
        """What would keep it from being part of compiled code."""
        if _TENSOR.search(self.old) and _TENSOR.search(self.new):
            return "Each size is compiled on its own here, so pad to a few sizes."
        if _NUMBER.fullmatch(self.old) and _NUMBER.fullmatch(self.new):
            return "Each number is compiled on its own here, so keep the number in a tensor."
        return "Don't change it between calls, or keep it in a tensor."

    @property
    def mismatch(self) -> Mismatch:
        """Itself: a cause has one, too."""
        return self

    def __str__(self) -> str:
        if self.new == FAILS:
            return f"{self.old} doesn't hold"
        # Redaction knows this form: the name of a secret stands right before both values.
        return f"{self.source}: {self.old} → {self.new}"


_TENSOR = re.compile(r"\b(bool|float|bfloat|int|uint|complex)\d*\[")
_NUMBER = re.compile(r"-?(\d.*|inf|nan)")


FAILS = "fails"  # what is found where a condition about sizes was expected
GONE = "gone"  # what is there in the place of something that died


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an entry was retired: what was written, and by whom where that is known."""

    source: Source | str
    old: str
    new: str
    writer: Writer | None

    @property
    def mismatch(self) -> Mismatch:
        """The same without the writer."""
        return Mismatch(str(self.source), self.old, self.new)

    def __str__(self) -> str:
        who = f"written at {self.writer}" if self.writer else "writer unknown"
        return f"{self.source}: {self.old} → {self.new} ({who})"
