"""Scopes: the module calls that enclose a node, innermost last.

A scope is a module's path from the traced module (`blocks.3.attn`). A module that is called
again gets the same path with the number of earlier calls (`act@1`), so that two calls of
one module can be told apart.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Scope(NamedTuple):  # a tuple: each call of a module makes one
    """One call of a module, or a stretch that the user named."""

    path: str
    call: int  # how often this path was entered before

    def __str__(self) -> str:
        return f"{self.path}@{self.call}" if self.call else self.path


TOP = Scope("", 0)


class ScopeStack:
    """The scopes that are open now."""

    __slots__ = ("_calls", "_open")

    def __init__(self) -> None:
        self._open: list[Scope] = [TOP]
        self._calls: Counter[str] = Counter()

    @property
    def current(self) -> Scope:
        """The innermost open scope; `TOP` outside any."""
        return self._open[-1]

    def __len__(self) -> int:
        return len(self._open) - 1

    def push(self, path: str) -> Scope:
        """Open a scope."""
        scope = Scope(path, self._calls[path])
        self._calls[path] += 1
        self._open.append(scope)
        return scope

    def pop(self) -> Scope:
        """Close the innermost scope; IndexError where none is open."""
        if not len(self):
            raise IndexError("no scope is open")
        return self._open.pop()
