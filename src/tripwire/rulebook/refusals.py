"""Refusals: a refusal is data. It says why a run can't become a trace, and where.

The run goes on as plain Python after a refusal, so the call's result is still right (L4, L5).
"""

from __future__ import annotations

from dataclasses import dataclass

from tripwire.errors import CannotTrace
from tripwire.ranges import NOWHERE, SourceRange


@dataclass(frozen=True, slots=True)
class Refusal:
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
        text = f"\n    {place.text}" if place is not None and place.text else ""
        error = CannotTrace(f"{self}{text}\n", slug=self.slug)
        error.place = None if place is None else (place.file, place.line)
        return error


class Refused(Exception):
    """Carries a refusal from deep inside the recorder to the handler that stops recording."""

    def __init__(self, slug: str, reason: str, where: SourceRange = NOWHERE) -> None:
        super().__init__(reason)
        self.slug = slug
        self.reason = reason
        self.where = where
