"""Texts: half a surrogate pair, which Python has in file names, is written as `\\udce9`.

JSON can't hold it. Values keep such texts whole (nodes.Text); names and messages are escaped.
"""

from __future__ import annotations

import msgspec


def escape(text: str) -> str:
    """The text, as far as UTF-8 can hold it."""
    return text.encode("utf-8", "backslashreplace").decode()


def encode_json(value: object) -> bytes:
    """JSON of anything that msgspec encodes, with texts escaped where they must be."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape_all(msgspec.to_builtins(value)))


def _escape_all(value: object) -> object:
    match value:
        case str():
            return escape(value)
        case dict():
            return {_escape_all(key): _escape_all(item) for key, item in value.items()}
        case list() | tuple():
            return [_escape_all(item) for item in value]
    return value
