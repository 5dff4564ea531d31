from __future__ import annotations

from tripwire.telemetry.pytorch import ChromiumEventLogger


def rows(logger: ChromiumEventLogger) -> list[tuple[str, str, float]]:
    """Of each event its phase, its name and its microseconds."""
    return [(e.ph, e.name, e.ts) for e in logger.events()]
