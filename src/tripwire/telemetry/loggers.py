"""Loggers: which of tripwire's speak. `TRIPWIRE_LOGS="recompiles,guards"` lets those two."""

from __future__ import annotations

import logging
import os
import sys

from tripwire.errors import TelemetryError

NAMES = ("trace", "guards", "recompiles", "refusals", "records", "telemetry")

_FORMAT = "[%(name)s] %(message)s"


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever sys.stderr is at the moment."""

    @property
    def stream(self) -> object:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        pass


_handler = _Stderr()
_handler.setFormatter(logging.Formatter(_FORMAT))
_on: set[str] = set()


def set_logs(wanted: str) -> None:
    """Let the loggers of a comma-separated list speak, and no others; "all" means all of them.

    They write to stderr from INFO on. A name that no logger has is an error.
    """
    names = {name.strip() for name in wanted.split(",")} - {""}
    unknown = sorted(names - {*NAMES, "all"})
    if unknown:
        raise TelemetryError(
            f"{', '.join(unknown)}: tripwire has no logger of that name.\n"
            f"TRIPWIRE_LOGS takes a comma-separated list of {', '.join(NAMES)}, or all.",
            slug="logs-unknown-name",
        )
    chosen = set(NAMES) if "all" in names else names
    for name in NAMES:
        logger = logging.getLogger(f"tripwire.{name}")
        if name in chosen and name not in _on:
            logger.addHandler(_handler)
            logger.setLevel(logging.INFO)
            _on.add(name)
        elif name not in chosen and name in _on:
            logger.removeHandler(_handler)
            logger.setLevel(logging.NOTSET)
            _on.discard(name)


def get_logs() -> tuple[str, ...]:
    """The loggers that were let speak."""
    return tuple(name for name in NAMES if name in _on)


def set_logs_from_environment() -> None:
    """What TRIPWIRE_LOGS says. A wrong name is said once, and stops nobody's import."""
    try:
        set_logs(os.environ.get("TRIPWIRE_LOGS", ""))
    except TelemetryError as error:
        logging.getLogger("tripwire.telemetry").error("TRIPWIRE_LOGS: %s", error)


set_logs_from_environment()
