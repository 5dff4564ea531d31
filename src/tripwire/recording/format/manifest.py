"""Manifest: what a record says about itself: versions, outcome, environment, what isn't in it.

JSON can't hold half a surrogate pair, which Python has in file names. Values keep such texts whole
(nodes.Text); names and messages are escaped, as `\\udce9`.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from typing import Annotated

import msgspec

from tripwire.recording.format.container import Content
from tripwire.recording.format.nodes import Index

SCHEMA = "6.0"
_SHA256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Omission(msgspec.Struct, frozen=True, array_like=True):
    """Something that isn't in a record, by its path, and why."""

    what: str
    why: str


class Returned(msgspec.Struct, frozen=True, tag="returned", tag_field="how"):
    """The call returned; the digest of what."""

    digest: str


class Raised(msgspec.Struct, frozen=True, tag="raised", tag_field="how"):
    """The call raised."""

    type: str
    module: str
    message: str
    file: str
    line: int


class Unknown(msgspec.Struct, frozen=True, tag="unknown", tag_field="how"):
    """Nobody knows how the call ended."""


Outcome = Returned | Raised | Unknown


class Autocast(msgspec.Struct, frozen=True):
    """Autocast on one type of device."""

    enabled: bool
    dtype: str


class Environment(msgspec.Struct, frozen=True):
    """torch's flags at the start of the call. States of generators are among the roots.

    Fields with the default values given here are left out of the file.
    """

    grad_mode: bool = True
    inference_mode: bool = False
    autocast: dict[str, Autocast] = {}
    autocast_cache: bool = True
    default_dtype: str = "float32"
    default_device: str = "cpu"
    deterministic: bool = False
    deterministic_warn_only: bool = False
    matmul_precision: str = "highest"
    num_threads: int = 0
    flags: dict[str, bool] = {}  # of torch.backends, where they aren't as usual
    precisions: dict[str, str] = {}  # of float32 in single back ends, where told apart; likewise


class Verdict(msgspec.Struct, frozen=True):
    """What came of replaying the record after it was written."""

    outcome: str = "not checked"  # or "reproduces", "differs"
    text: str = ""
    python: str = ""
    torch: str = ""


class Where(msgspec.Struct, frozen=True):
    """The function that was called."""

    name: str = ""
    file: str = ""
    line: int = 0


class Python(msgspec.Struct, frozen=True):
    """An interpreter."""

    version: str
    magic: str  # of its bytecode, in hexadecimal
    implementation: str = "CPython"

    @staticmethod
    def here() -> Python:
        """The interpreter that runs this."""
        magic = importlib.util.MAGIC_NUMBER.hex()
        return Python(platform.python_version(), magic, platform.python_implementation())


class Compiled(msgspec.Struct, frozen=True):
    """How the function had been compiled. A back end that is no name is among the roots."""

    backend: str = ""
    fullgraph: bool = False
    hit: bool = False  # it was compiled code that raised
    check: bool = False  # new code ran beside the run that it was made of


class Manifest(msgspec.Struct, frozen=True):
    """manifest.json. A newer minor version may have more fields; they are passed over."""

    schema: str = SCHEMA
    members: dict[str, tuple[Index, _SHA256]] = {}
    python: Python = msgspec.field(default_factory=Python.here)
    packages: str = ""  # as pip takes them: `numpy==2.4.6 torch==2.13.0`
    platform: str = sys.platform
    function: Where = Where()
    created: str = ""  # ISO 8601, UTC
    compiled: Compiled | None = None  # None: it was called plainly
    outcome: Outcome = Unknown()
    environment: Environment = Environment()
    omissions: tuple[Omission, ...] = ()
    policy: str = "full"
    verdict: Verdict = Verdict()
    notes: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()  # what of the user's is in it
    redacted: tuple[str, ...] = ()  # for each secret that isn't, the name that told it


# --- as JSON ---


def encode_manifest(manifest: Manifest) -> Content:
    """manifest.json, without what is as usual."""
    fields = msgspec.structs.asdict(manifest)
    fields["omissions"] = _tell_some(manifest.omissions)
    flags = msgspec.structs.asdict(manifest.environment)
    usual = msgspec.structs.asdict(Environment())
    fields["environment"] = {name: flags[name] for name in flags if flags[name] != usual[name]}
    kept = {
        name: value
        for name, value in fields.items()
        if name not in _OMITTED or value != _OMITTED[name]
    }
    return Content.of(encode_json(kept))


_OMITTED = {
    "compiled": None,
    "omissions": (),
    "verdict": Verdict(),
    "notes": (),
    "holds": (),
    "redacted": (),
}
_MOST_OMISSIONS, _LONGEST_PATH = 1000, 300
_LONGEST_OMISSIONS = 1 << 15  # characters of all: a reader takes no manifest of any size


def _tell_some(omissions: tuple[Omission, ...]) -> tuple[Omission, ...]:
    """As many as somebody may read; how many more there are."""
    told: list[Omission] = []
    length = 0
    for one in omissions[:_MOST_OMISSIONS]:
        told.append(Omission(_cut(one.what), _cut(one.why)))
        length += len(told[-1].what) + len(told[-1].why)
        if length > _LONGEST_OMISSIONS:
            break
    more = len(omissions) - len(told)
    return (*told, Omission("...", f"and {more} more")) if more else tuple(told)


def _cut(text: str) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= _LONGEST_PATH else f"{text[:_LONGEST_PATH]}..."


def escape(text: str) -> str:
    """The text, as far as UTF-8 can hold it."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str, keep: str = "") -> str:
    """A text that can do nothing to a terminal or a script: one line, without control characters.

    `keep`: control characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


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
