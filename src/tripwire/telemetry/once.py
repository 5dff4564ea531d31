"""Once: things that are said a first time and not again."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable

from tripwire.telemetry.threads import make_lock


class DuplicateWarningChecker:
    """Remembers the latest `maxsize` keys: `add` says whether this one is new.

    `verbose=True` lets repetitions through.
    """

    def __init__(self, maxsize: int = 4096, *, verbose: bool = False) -> None:
        self.maxsize = maxsize
        self.verbose = verbose
        self._lock = make_lock()
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, key: Hashable) -> bool:
        """Remember a key; whether to speak of it."""
        with self._lock:
            if key in self._keys:
                self._keys.move_to_end(key)
                return self.verbose
            self._keys[key] = None
            if len(self._keys) > self.maxsize:
                self._keys.popitem(last=False)
            return True

    def __len__(self) -> int:
        return len(self._keys)

    def reset(self) -> None:
        """Everything is new again."""
        with self._lock:
            self._keys.clear()


_printed = DuplicateWarningChecker()
_warned = DuplicateWarningChecker()


def print_once(*values: object) -> None:
    """Print a line, unless it was printed before."""
    text = " ".join(map(str, values))
    if _printed.add(text):
        print(text)


def warn_once(message: str, stacklevel: int = 1) -> None:
    """Warn, unless the same was said before, whatever the filters do."""
    if _warned.add(message):
        warnings.warn(message, stacklevel=stacklevel + 1)
