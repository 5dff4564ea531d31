"""Places: where a call could read something, and what was done there."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PlaceKind(enum.StrEnum):
    """What holds the value."""

    ARGUMENT = "argument"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    SUBMODULE = "submodule"
    ATTRIBUTE = "attribute"
    ABSENCE = "absence"
    ITEM = "item"
    HOOK = "hook"
    METHOD = "method"
    CLASS_ATTRIBUTE = "class attribute"
    GLOBAL = "global"
    CELL = "closure cell"
    DEFAULT = "default"
    CODE = "code"
    ENVIRONMENT = "environment"
    FLAG = "torch's flag"


@dataclass(frozen=True, slots=True)
class AuditedPlace:
    """One place, and the write that was tried there."""

    kind: PlaceKind
    path: str
    change: str

    def __str__(self) -> str:
        return f"{self.path}: {self.change}"


@dataclass(frozen=True, slots=True)
class Unreached:
    """Something that a call could read and that was not written."""

    path: str
    why: str
