"""User contexts: what users say of the moment at which something is compiled again.

A hook returns a short text, such as the epoch, that a compiler can't know. A hook that raises is
dropped, and logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("tripwire.telemetry")

LONGEST = 256

Hook = Callable[[], str]

_hooks: tuple[Hook, ...] = ()


def register_hook_for_recompile_user_context(hook: Hook) -> None:
    """Ask `hook` at each recompile; of its text 256 characters are kept."""
    global _hooks
    _hooks = (*_hooks, hook)


def get_hook_for_recompile_user_context() -> list[Hook] | None:
    """The hooks, or None where there are none."""
    return list(_hooks) or None


def reset_recompile_user_contexts() -> None:
    """Ask nobody."""
    global _hooks
    _hooks = ()


def collect_user_contexts() -> tuple[str, ...]:
    """What the hooks say now."""
    global _hooks
    texts = []
    for hook in _hooks:
        try:
            texts.append(str(hook())[:LONGEST])
        except Exception:
            _hooks = tuple(kept for kept in _hooks if kept is not hook)
            logger.exception("%r raised, and is no longer asked about recompiles", hook)
    return tuple(texts)
