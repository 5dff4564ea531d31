"""Words: names as one text, `training 4 - dtype loss_type - layers.7 num_2_heads 2:5`.

Names are the bulk of a record that has few tensors. Between two dashes are those of attributes that
are None and have no value. 4 is the word of that number in the first line of objects.json, as is
the 7 in a name of two parts; the 2 is one of the pieces there, since it stands beside an
underscore; 2:5 is four words in a row. docs/record-format.md has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import digits
from typing import NamedTuple, TypeGuard, cast

from tripwire.recording.container import damaged


class Numbers(NamedTuple):
    """Words and pieces by themselves, to write names."""

    words: Mapping[str, int] = {}
    pieces: Mapping[str, int] = {}


class Known(NamedTuple):
    """Words and pieces by their numbers, to read names."""

    words: Sequence[str] = ()
    pieces: Sequence[str] = ()


class Lengths(NamedTuple):
    """How long words and pieces are at most, to check names without keeping any."""

    words: Sequence[int] = ()
    pieces: Sequence[int] = ()


# --- writing ---


def join_names(names: Iterable[tuple[str, bool]], numbers: Numbers) -> str:
    """A text of names, each with whether it has no value."""
    tokens: list[str] = []
    first = last = -1  # the words in a row that the last token is
    before = False
    for name, is_none in names:
        number = numbers.words.get(name)
        if is_none is not before:
            tokens.append(_TURN)
            last = -1
        before = is_none
        if number is None:
            parts = (_spell_part(part, numbers) for part in name.split("."))
            tokens.append(".".join(parts) or _EMPTY)
            last = -1
        elif last >= 0 and number == last + 1:
            last = number
            tokens[-1] = f"{first}:{last}"
        else:
            tokens.append(str(number))
            first = last = number
    return " ".join(tokens)


def are_names(slots: Sequence[object]) -> TypeGuard[Sequence[str]]:
    """Whether these are strings that a text is short for."""
    if not slots or not all(type(slot) is str for slot in slots):
        return False
    text = " ".join(cast("Sequence[str]", slots))
    return text.count(" ") == len(slots) - 1 and not _ODD_TEXT.search(text)


def _spell_part(part: str, numbers: Numbers) -> str:
    if part in numbers.words:
        return str(numbers.words[part])
    if "_" not in part:
        return _escape(part)
    pieces = numbers.pieces
    return "_".join(
        str(pieces[piece]) if piece in pieces else _escape(piece) for piece in part.split("_")
    )


def _escape(piece: str) -> str:
    return _ODD.sub(lambda match: f"%{ord(match[0]):02x}", piece)


# --- reading ---


def split_names(text: str, known: Known) -> Iterator[tuple[str, bool]]:
    """The names in a text that was checked, each with whether it has no value."""
    for token, is_none in _tokens(text):
        row = _ROW.fullmatch(token)
        if row is None:
            yield ".".join(_read_part(part, known) for part in token.split(".")), is_none
            continue
        for number in range(int(row[1]), int(row[2] or row[1]) + 1):
            yield known.words[number], is_none


def _read_part(part: str, known: Known) -> str:
    if "_" not in part:
        return _read_piece(part, known.words)
    return "_".join(_read_piece(piece, known.pieces) for piece in part.split("_"))


def _read_piece(piece: str, known: Sequence[str]) -> str:
    if piece and piece[0] in digits:
        return known[int(piece)]
    return "" if piece == _EMPTY else _ESCAPED.sub(lambda match: chr(int(match[1], 16)), piece)


# --- checking ---


class NameCount(NamedTuple):
    """How many names a text has, how many of them have a value, and how much longer they are.

    Those that are words as a whole are shared.
    """

    names: int
    given: int
    growth: int


def count_names(text: str, lengths: Lengths) -> NameCount:
    """Count the names in a text.

    Raises `BadRecord` for a text that isn't one of names, or has numbers of no word or piece.
    """
    counts = [0, 0]
    growth = 0
    for token, is_none in _tokens(text):
        row = _ROW.fullmatch(token)
        if row is None:
            counts[is_none] += 1
            growth += max(0, _measure_name(token, lengths) - len(token))
            continue
        first, last = int(row[1]), int(row[2] or row[1])
        if first > last or last >= len(lengths.words):
            raise damaged("objects.json refers to a word that it doesn't have")
        counts[is_none] += last - first + 1
    return NameCount(sum(counts), counts[False], growth)


def measure_names(text: str, lengths: Lengths) -> list[int]:
    """The length of each name in a text that was counted, at most; none is a word."""
    return [_measure_name(token, lengths) for token, _ in _tokens(text)]


def _measure_name(token: str, lengths: Lengths) -> int:
    """How long a name is at most."""
    if token == _EMPTY:
        return 0
    if not token:
        raise damaged("a name in objects.json isn't one")
    length = 0
    for part in _split(token, "."):
        if "_" not in part:
            length += 1 + _measure_piece(part, lengths.words)
            continue
        for piece in _split(part, "_"):
            length += 1 + _measure_piece(piece, lengths.pieces)
    return length


def _measure_piece(piece: str, lengths: Sequence[int]) -> int:
    if not _PIECE.fullmatch(piece) or ("%" in piece and "%" in _ESCAPED.sub("", piece)):
        raise damaged("a name in objects.json isn't one")
    if not piece or piece[0] not in digits:
        return len(piece)
    if int(piece) >= len(lengths):
        raise damaged("objects.json refers to a word that it doesn't have")
    return lengths[int(piece)]


def _tokens(text: str) -> Iterator[tuple[str, bool]]:
    """What stands between the spaces, with whether it is of None."""
    is_none = False
    for token in _split(text, " ") if text else ():
        if token == _TURN:
            is_none = not is_none
        else:
            yield token, is_none


def _split(text: str, separator: str) -> Iterator[str]:
    """One at a time: a text of a hostile file may be long."""
    start = 0
    while (end := text.find(separator, start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


_TURN, _EMPTY = "-", "%"
_ROW = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?")
_PIECE = re.compile(r"[0-9]{1,9}|[^-0-9].*|", re.DOTALL)
# A reader counts brackets, commas and quotation marks, so a name has none.
_ODD = re.compile(r'^[-0-9]|[ %\[{,"]')
_ODD_TEXT = re.compile(r'^$|^ | $|  |[%\[{,"]|(?:^|[ .])[-0-9]')
_ESCAPED = re.compile(r"%([0-9a-f]{2})")
