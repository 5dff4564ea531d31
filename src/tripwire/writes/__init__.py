"""Writes: reports when an object, a class or a container is written, and by whom."""

from tripwire.writes.snapshots import ABSENT, GONE, ORDER
from tripwire.writes.subscriptions import ExactWeakKeyDictionary, ensure_patched
from tripwire.writes.trackers import (
    GenerationTracker,
    MutationTracker,
    install_generation_tagging,
    is_dynamic_nn_module,
)
from tripwire.writes.trackers import watch as watch_code
from tripwire.writes.watching import Change, Watch, watch

__all__ = [
    "ABSENT",
    "GONE",
    "ORDER",
    "Change",
    "ExactWeakKeyDictionary",
    "GenerationTracker",
    "MutationTracker",
    "Watch",
    "ensure_patched",
    "install_generation_tagging",
    "is_dynamic_nn_module",
    "watch",
    "watch_code",
]
