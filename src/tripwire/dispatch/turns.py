"""Turns: one thread at a time traces and compiles a callable; the others go on without.

A turn belongs to whoever holds its token. It ends when that is given back, and by itself where the
token dies (an interrupt came in between), or where the process that took it was forked: threads
of the parent don't exist in the child.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class Token:
    """Who has the turn."""

    __slots__ = ("__weakref__", "process", "thread")

    def __init__(self) -> None:
        self.process, self.thread = os.getpid(), threading.get_ident()


class Turn:
    """To compile one callable."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._token: weakref.ref[Token] | None = None

    def take(self) -> Token | None:
        """The turn, or None where somebody has it."""
        token = Token()
        with self._changed:
            if self._find_holder() is not None:
                return None
            self._token = weakref.ref(token)
        return token

    def give_back(self, token: Token) -> None:
        """Let the next one take it."""
        with self._changed:
            if self._find_holder() is token:
                self._token = None
            self._changed.notify_all()

    def pass_on(self) -> Token:
        """The turn goes from this thread, which has it, to whoever holds this token."""
        token = Token()
        with self._changed:
            self._token = weakref.ref(token)
        return token

    @contextmanager
    def taken(self) -> Iterator[Token | None]:
        """Inside, the turn is this thread's, unless it is another's."""
        token = self.take()
        try:
            yield token
        finally:
            if token is not None:
                self.give_back(token)

    def wait(self) -> bool:
        """Until nobody has it. False where this thread itself does, and would wait for ever."""
        with self._changed:
            while (holder := self._find_holder()) is not None:
                if holder.thread == threading.get_ident():
                    return False
                del holder
                self._changed.wait(_LOOK_AGAIN)
        return True

    def _find_holder(self) -> Token | None:
        token = None if self._token is None else self._token()
        return token if token is not None and token.process == os.getpid() else None


_LOOK_AGAIN = 0.1  # seconds: a token may die untold
