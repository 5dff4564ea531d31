"""Validity: compiled code is used for as long as nothing that it read has changed."""

from tripwire.validity.generation import (
    GenerationTracker,
    install_generation_tagging,
    is_dynamic_nn_module,
)
from tripwire.validity.mutation import MutationTracker, ensure_patched
from tripwire.validity.mutation import watch as watch_code
from tripwire.validity.watching import ABSENT, GONE, ORDER, Change, Watch, watch
from tripwire.validity.weakkeys import ExactWeakKeyDictionary
from tripwire.validity.wires import Cause, Writer

__all__ = [
    "ABSENT",
    "GONE",
    "ORDER",
    "Cause",
    "Change",
    "ExactWeakKeyDictionary",
    "GenerationTracker",
    "MutationTracker",
    "Watch",
    "Writer",
    "ensure_patched",
    "install_generation_tagging",
    "is_dynamic_nn_module",
    "watch",
    "watch_code",
]
