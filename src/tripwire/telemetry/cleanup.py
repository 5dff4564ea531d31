"""Cleaning up: a name put into a module's globals goes when its owner dies.

A name that is there already is never taken over, and one that somebody has put something else
under since is left to them.
"""

from __future__ import annotations

import weakref
from typing import ClassVar

from tripwire.errors import TelemetryError


class CleanupHook:
    """Takes one name out of a scope, once."""

    __slots__ = ("_value", "name", "scope")

    def __init__(self, scope: dict[str, object], name: str, value: object) -> None:
        self.scope = scope
        self.name = name
        self._value: list[object] = [value]

    @staticmethod
    def create(scope: dict[str, object], name: str, value: object) -> CleanupHook:
        """Put a value into a scope under a new name."""
        if name in scope:
            raise TelemetryError(
                f"{name!r} exists in {scope.get('__name__', 'that scope')!r} already, and "
                "tripwire never overwrites it.",
                slug="global-name-taken",
            )
        scope[name] = value
        CleanupManager.count += 1
        return CleanupHook(scope, name, value)

    def __call__(self, *_: object) -> None:
        if self._value:
            value = self._value.pop()
            CleanupManager.count -= 1
            if self.scope.get(self.name, _NOTHING) is value:
                del self.scope[self.name]


class CleanupManager:
    """Calls the hooks of an object when it dies."""

    count: ClassVar[int] = 0  # names that are in some scope now
    instance: ClassVar[CleanupManager]

    def add(self, owner: object, hook: CleanupHook) -> None:
        """The hook's name goes with `owner`."""
        weakref.finalize(owner, hook).atexit = False


CleanupManager.instance = CleanupManager()

_NOTHING = object()
