"""Serialising: what JSON can't hold becomes a marked string, never an exception."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import msgspec

# Whole numbers as events have them. Nobody has to compute with more digits than a clock gives.
Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
LONGEST = 10_000  # characters of one text
DEEPEST = 32


class TypeSafeSerializer(json.JSONEncoder):
    """A JSON encoder for anything: `json.dumps(value, cls=TypeSafeSerializer)`."""

    def iterencode(self, o: object, _one_shot: bool = False) -> Any:
        return super().iterencode(make_plain(o), _one_shot)


def mark(value: object) -> str:
    """A text that says what stood there: `<type: repr>`."""
    name = type(value).__qualname__
    try:
        text = repr(value)
    except Exception as error:
        text = f"repr raised {type(error).__name__}"
    return f"<{name}: {_cut(text)}>"


def make_plain(value: object, depth: int = 0) -> object:
    """The value as dicts with text keys, lists, texts, numbers, bools and None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else mark(int(value))
    if isinstance(value, float):
        return float(value) if value - value == 0 else mark(float(value))  # nan, inf
    if isinstance(value, str):
        return _cut(str(value).encode(errors="backslashreplace").decode())
    if depth >= DEEPEST:
        return f"<{type(value).__qualname__}: nested too deeply>"
    if isinstance(value, Mapping):
        return {_key(k): make_plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((make_plain(v, depth + 1) for v in value), key=str)
    if isinstance(value, (list, tuple)):
        return [make_plain(v, depth + 1) for v in value]
    if isinstance(value, msgspec.Struct):
        return make_plain(msgspec.structs.asdict(value), depth)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: make_plain(getattr(value, f.name), depth + 1) for f in fields(value)}
    return mark(value)


def make_plain_dict(data: Mapping[str, object] | None) -> dict[str, object]:
    """`make_plain` for what is attached to events."""
    return {_key(key): make_plain(value) for key, value in (data or {}).items()}


def _key(value: object) -> str:
    return str(make_plain(value)) if isinstance(value, (str, int, float)) else mark(value)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… {len(text)} characters"
