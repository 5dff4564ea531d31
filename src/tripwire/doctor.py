"""Doctor: what tripwire finds on this machine, and how it will watch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass

from tripwire.imports import HAS_GIL, find_native


@dataclass(frozen=True, slots=True)
class Checkup:
    """One thing that was looked at. `good` is None where it is neither good nor bad."""

    name: str
    found: str
    good: bool | None = None
    advice: str = ""


def examine() -> list[Checkup]:
    """Everything that is worth knowing before asking for help."""
    return [*_versions(), *_watching(), *_cache(), *_environment()]


def _versions() -> list[Checkup]:
    found = [_python()]
    for name in ("tripwire", "torch", "msgspec", "safetensors", "transformers"):
        try:
            found.append(Checkup(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            needed = name == "torch"
            advice = _WITHOUT.get(name, "")
            found.append(Checkup(name, "not installed", False if needed else None, advice))
    return found


def _python() -> Checkup:
    version = f"{platform.python_version()} on {sys.platform}"
    if not HAS_GIL:
        return Checkup("Python", f"{version}, free-threaded", False, "tripwire needs the GIL")
    tested = ", ".join(f"3.{minor}" for minor in TESTED_MINORS)
    if sys.version_info.minor in TESTED_MINORS:
        return Checkup("Python", f"{version}, tested")
    return Checkup("Python", version, None, f"tested on {tested} only")


# As the classifiers say; `make versions` runs the suite on each.
TESTED_MINORS = (11, 12, 13)
_WITHOUT = {"torch": "pip install torch", "safetensors": "only tests use it"}


def _watching() -> list[Checkup]:
    if importlib.util.find_spec("torch") is None:
        return []
    from tripwire.env import HAS_MONITORING, IS_KNOWN_PYTHON
    from tripwire.writes import sentry

    in_c = sentry.IS_COMPILED
    if in_c:
        dicts = "CPython tells of writes" if HAS_MONITORING else "version tags, summed on each call"
    else:
        dicts = "compared on each call"
    calls = "sys.monitoring" if HAS_MONITORING else "sys.setprofile"
    return [
        *([] if IS_KNOWN_PYTHON else [_UNKNOWN_PYTHON]),
        _natives(),
        Checkup("globals, attributes, dicts", dicts),
        Checkup("lists, sets, cells, slots", "compared on each call"),
        Checkup("functions that run", f"seen by {calls}"),
        Checkup("writer of a change", _find_writers(in_c, HAS_MONITORING)),
    ]


def _find_writers(in_c: bool, monitors: bool) -> str:
    """Of which changes the writer is known."""
    if not in_c:
        return "unknown: that takes the C modules"
    return "file and line" if monitors else _WRITERS


def _natives() -> Checkup:
    """Whether each C module is there. Building one may fail, and nothing else says so."""
    absent = [name for name in NATIVES if find_native(name) is None]
    if not absent:
        return Checkup("C modules", f"all {len(NATIVES)}", True)
    found = f"without {', '.join(absent)}" if len(absent) < len(NATIVES) else "none"
    is_off = os.environ.get("TRIPWIRE_PURE") == "1"
    how = "Unset TRIPWIRE_PURE" if is_off else "Install a C compiler, then reinstall tripwire"
    return Checkup("C modules", found, False, f"calls are slower, and fewer are compiled. {how}")


NATIVES = (
    "reading._reader",
    "tracing._casts",
    "tracing._sieve",
    "validity._table",
    "writes._watch",
)
_UNKNOWN_PYTHON = Checkup(
    "compiled code",
    "none: this Python is newer than tripwire knows",
    False,
    "every call runs as plain Python: use Python 3.11 to 3.13",
)


def _cache() -> list[Checkup]:
    from tripwire.backends.artifacts import find_store

    store = find_store()
    if store is None:
        is_off = os.environ.get("TRIPWIRE_CACHE_DIR") == ""
        why = "TRIPWIRE_CACHE_DIR is empty" if is_off else "there is no home folder"
        return [Checkup("compiled code on disk", f"off: {why}")]
    number, size = store.measure()
    trouble = store.find_trouble()
    advice = "nothing can be kept there, so every process compiles from scratch"
    return [
        Checkup("compiled code on disk", f"{store.folder}: {number} files, {size:,} bytes"),
        *([Checkup("that folder", " ".join(trouble.split()), False, advice)] if trouble else []),
    ]


_WRITERS = (
    "file and line of writes to modules' attributes, objects' classes and "
    "tensors' shapes; others unknown"
)


def _environment() -> list[Checkup]:
    named = sorted(name for name in os.environ if name.startswith("TRIPWIRE_"))
    return [Checkup(name, os.environ[name]) for name in named]
