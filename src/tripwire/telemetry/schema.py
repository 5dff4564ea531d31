"""The log's schema: a closed set of events, one JSON object a line.

The first line of a file is its `Header`. A reader understands every file of its own major
version; an event that a later minor version added is skipped by its tag. Times are nanoseconds of
the process's monotonic clock, which the header places on the calendar. What users attach may be
anything: what JSON can't hold becomes a marked text, never an exception. No line takes much memory
when it is decoded: a long list goes on in further lines, and any other long event is shortened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Struct

from tripwire.files import estimate_memory, estimate_wide
from tripwire.forks import make_lock
from tripwire.telemetry.metrics import CompilationMetrics, Int
from tripwire.values.classes import name_of

if TYPE_CHECKING:
    from tripwire.redaction import Redactor

MAJOR, MINOR = 2, 0
LONGEST = 10_000  # characters of one text that users attach
DEEPEST = 32  # levels of it
LINE = 512 << 10  # bytes that a line and what it is decoded to may take
LONGEST_LINE = LINE // 2  # bytes of it in a file
_SHORT = LINE // 72  # bytes in which no JSON takes more than `LINE`
_ITEMS, _TEXT = 20, 1_000  # what is kept of a list, a dict and a text of an event that is too long

_Kind = TypeVar("_Kind", bound=Struct)

Data = dict[str, Any]  # what users attach; JSON, checked by nobody


class Header(Struct, frozen=True, kw_only=True, tag="header", tag_field="event"):
    """Who writes this file."""

    major: Int
    minor: Int
    host: str
    pid: Int
    parent_pid: Int
    # Told apart: a process that reuses a pid, a second log of one process.
    token: Annotated[str, msgspec.Meta(max_length=64)]
    start_wall_ns: Int
    start_monotonic_ns: Int
    python: str
    tripwire: str | None = None
    torch: str | None = None
    executable: str = ""
    argv: tuple[str, ...] = ()
    ranks: dict[str, str] = {}  # RANK, WORLD_SIZE and their like, where they are numbers
    redacts: bool = False  # secrets are taken out of what follows

    @property
    def rank(self) -> int | None:
        """The process's rank, where it has one."""
        text = self.ranks.get("RANK", "")
        return int(text) if text.isdecimal() and len(text) < 10 else None

    @property
    def label(self) -> str:
        """`rank 3, train.py (host:1234)`."""
        script = self.argv[0].rpartition("/")[2] if self.argv and self.argv[0] else "python"
        rank = "" if self.rank is None else f"rank {self.rank}, "
        return f"{rank}{script} ({self.host}:{self.pid})"

    def wall_of(self, monotonic_ns: int) -> int:
        """The calendar time of a reading, in nanoseconds since 1970."""
        return self.start_wall_ns + monotonic_ns - self.start_monotonic_ns


class Base(Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """What every event has."""

    time_ns: Int
    thread: Int = 0
    compile_id: str | None = None


class ThreadNamed(Base, frozen=True, kw_only=True, tag="thread"):
    """The first event of a thread."""

    name: str


class SpanDone(Base, frozen=True, kw_only=True, tag="span"):
    """A timed stretch. `time_ns` is its beginning."""

    name: str
    duration_ns: Int
    depth: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0  # spans around it in its thread
    key: str | None = None  # where it isn't the name
    is_backward: bool | None = None
    error: str | None = None  # the class of what its body raised
    data: Data = {}


class Instant(Base, frozen=True, kw_only=True, tag="instant"):
    """Something that has no duration."""

    name: str
    data: Data = {}


class Counts(Base, frozen=True, kw_only=True, tag="counters"):
    """All counters at one moment."""

    groups: dict[str, dict[str, Int]]


class CompileStarted(Base, frozen=True, kw_only=True, tag="compile_started"):
    """A compile began."""

    function: str
    file: str = ""
    line: Int = 0
    backend: str | None = None
    is_backward: bool = False  # of what an earlier compile with the same id came to


class CompileFinished(Base, frozen=True, kw_only=True, tag="compile_finished"):
    """A compile ended, well or not."""

    metrics: CompilationMetrics


class GraphNode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node of a graph."""

    name: str
    op: str
    target: str
    inputs: tuple[str, ...] = ()
    scope: str = ""
    file: str = ""
    line: Int = 0
    function: str = ""
    text: str = ""  # the user's line
    shape: str = ""
    excerpt: str = ""  # the user's source with carets below, as `ranges.underline` makes it


class GraphCaptured(Base, frozen=True, kw_only=True, tag="graph"):
    """The graph of a compile."""

    nodes: tuple[GraphNode, ...]
    continues: bool = False  # the event before, of the same kind


class GuardsBuilt(Base, frozen=True, kw_only=True, tag="guards"):
    """The guards of an entry, as the source of the function that checks them."""

    source: str
    count: Int = 0
    continues: bool = False


class ReadRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that a run read: the path to it, what was seen, and the user's line."""

    source: str
    seen: str = ""
    file: str = ""
    line: Int = 0
    text: str = ""  # what stands there


class WiresArmed(Base, frozen=True, kw_only=True, tag="wires"):
    """What of the world an entry depends on."""

    wires: tuple[ReadRow, ...]
    continues: bool = False


class ReadsSeen(Base, frozen=True, kw_only=True, tag="reads"):
    """What a run read."""

    reads: tuple[ReadRow, ...]
    continues: bool = False


class Retired(Base, frozen=True, kw_only=True, tag="retirement"):
    """An entry died: what was written, and who wrote it, where Python tells."""

    source: str
    old: str = ""
    new: str = ""
    file: str = ""
    line: Int = 0
    function: str = ""
    excerpt: str = ""  # the writer's source, with carets below where columns are known
    others: tuple[str, ...] = ()  # what else was written, and by whom


class RunRefused(Base, frozen=True, kw_only=True, tag="refusal"):
    """A run couldn't become a trace."""

    slug: str
    reason: str
    function: str = ""
    file: str = ""
    line: Int = 0
    excerpt: str = ""


class RecordWritten(Base, frozen=True, kw_only=True, tag="record"):
    """A failing call was kept in a file."""

    path: str
    function: str = ""
    exception: str = ""


class Recompiled(Base, frozen=True, kw_only=True, tag="recompile"):
    """No entry admitted a call: why not, entry by entry, and what users said of the moment."""

    function: str
    reasons: tuple[str, ...]
    user_contexts: tuple[str, ...] = ()


class RuntimeMetrics(Base, frozen=True, kw_only=True, tag="metrics"):
    """What was measured outside of compiles."""

    metrics: CompilationMetrics


Event = (
    ThreadNamed
    | SpanDone
    | Instant
    | Counts
    | CompileStarted
    | CompileFinished
    | GraphCaptured
    | GuardsBuilt
    | WiresArmed
    | ReadsSeen
    | Retired
    | RunRefused
    | RecordWritten
    | Recompiled
    | RuntimeMetrics
)

TAGS = frozenset(str(kind.__struct_config__.tag) for kind in Event.__args__) | {"header"}


# --- without secrets ------------------------------------------------------------------------------


def clean(event: _Kind, redactor: Redactor) -> _Kind:
    """An event without secrets, and without values of the environment's variables."""
    changed: dict[str, object] = {}
    for name in event.__struct_fields__:
        before = getattr(event, name)
        if isinstance(event, (ReadRow, Retired)) and name in ("seen", "old", "new"):
            after: object = redactor.clean_at(before, event.source)
        elif isinstance(event, Header) and name == "argv":
            after = redactor.clean_arguments(before)
        elif isinstance(event, GuardsBuilt) and name == "source":
            after = redactor.clean_guards(before)
        else:
            after = _clean_value(before, name, redactor)
        if after is not before and after != before:
            changed[name] = after
    return msgspec.structs.replace(event, **changed) if changed else event


def _clean_value(value: object, name: str, redactor: Redactor) -> object:
    if isinstance(value, str):
        return redactor.clean(value, name)
    if isinstance(value, Struct):
        return clean(value, redactor)
    if type(value) is dict:
        from tripwire.redaction import find_name  # see EventLog

        return {
            _clean_key(k, redactor): _clean_value(v, find_name(str(k), name) or "", redactor)
            for k, v in value.items()
        }
    if type(value) is list or type(value) is tuple:
        return type(value)([_clean_value(item, name, redactor) for item in value])
    return value


def _clean_key(key: object, redactor: Redactor) -> object:
    return redactor.clean(key) if isinstance(key, str) else key


# --- as JSON --------------------------------------------------------------------------------------


def mark(value: object) -> str:
    """A text that says what stood there: `<type: repr>`."""
    name = name_of(type(value))
    try:
        text = repr(value)
    except Exception as error:  # a `__repr__` of the user's
        text = f"repr raised {name_of(type(error))}"
    return f"<{name}: {_cut(text)}>"


def make_plain(value: object, depth: int = 0) -> object:
    """The value as dicts with text keys, lists, texts, numbers, bools and None."""
    if not _tells_its_class(value):
        return mark(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else mark(int(value))
    if isinstance(value, float):
        return float(value) if value - value == 0 else mark(float(value))  # nan, inf
    if isinstance(value, str):
        return _cut(str(value).encode(errors="backslashreplace").decode())
    if depth >= DEEPEST:
        return f"<{name_of(type(value))}: nested too deeply>"
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


def _tells_its_class(value: object) -> bool:
    """Whether `isinstance` can be relied on: mocks and proxies name another class, or raise."""
    try:
        return value.__class__ is type(value)
    except Exception:  # it is the user's
        return False


def make_plain_dict(data: Mapping[str, object] | None) -> dict[str, object]:
    """`make_plain` for what is attached to events."""
    return {_key(key): make_plain(value) for key, value in (data or {}).items()}


def _key(value: object) -> str:
    return str(make_plain(value)) if isinstance(value, (str, int, float)) else mark(value)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… {len(text)} characters"


_encoder = msgspec.json.Encoder(enc_hook=make_plain)
_MAKING = make_lock()  # two threads that make msgspec's first decoder of a class can crash


@cache  # it takes as long to make as ten modules of tripwire to import
def _decoder() -> msgspec.json.Decoder[Header | Event]:
    with _MAKING:
        return msgspec.json.Decoder(Header | Event)


def encode(event: Header | Event) -> bytes:
    """One line, with its end."""
    try:
        return _encoder.encode(event) + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError):  # half a surrogate pair, say
        plain = make_plain(event)
        assert isinstance(plain, dict)
        return _encoder.encode({"event": event.__struct_config__.tag, **plain}) + b"\n"


def join_pieces(pieces: Iterable[bytes], separator: bytes) -> Iterator[bytes]:
    """Pieces of a file with something between them."""
    for number, piece in enumerate(pieces):
        if number:
            yield separator
        yield piece


LONG: dict[type, str] = {  # what of an event may go on in further lines
    GraphCaptured: "nodes",
    GuardsBuilt: "source",
    WiresArmed: "wires",
    ReadsSeen: "reads",
}


def encode_lines(event: Header | Event) -> bytes:
    """The lines of an event, none of which takes much memory when it is decoded."""
    line = encode(event)
    needed = _measure(line)
    return line if needed <= LINE else b"".join(_divide(event, needed // LINE + 1))


def _divide(event: Header | Event, parts: int) -> Iterator[bytes]:
    field = LONG.get(type(event), "")
    whole = getattr(event, field, ())
    if len(whole) < 2:
        yield encode(_shorten(event))
        return
    step = -(-len(whole) // min(parts, len(whole)))
    for begin in range(0, len(whole), step):
        piece: dict[str, object] = {field: whole[begin : begin + step]}
        later = {"continues": True} if begin else {}
        yield encode_lines(msgspec.structs.replace(event, **piece, **later))


def _shorten(value: Any, depth: int = 0) -> Any:
    """An event with the beginnings of its texts, lists and dicts."""
    if isinstance(value, str):
        return value if len(value) <= _TEXT else f"{value[:_TEXT]}… {len(value):,} characters"
    if isinstance(value, Struct):
        shortened = {n: _shorten(getattr(value, n), depth) for n in value.__struct_fields__}
        return msgspec.structs.replace(value, **shortened)
    if not isinstance(value, (tuple, list, dict)):
        return value
    if depth:
        return type(value)()
    if isinstance(value, dict):
        return {_shorten(k): _shorten(v, depth + 1) for k, v in islice(value.items(), _ITEMS)}
    return type(value)([_shorten(item, depth + 1) for item in value[:_ITEMS]])


def takes_much(line: bytes) -> bool:
    """Whether a line would take more memory than lines of ours."""
    return _measure(line) > LINE


def _measure(line: bytes) -> int:
    """What a line takes, at most."""
    return 0 if len(line) < _SHORT else estimate_memory(line) + estimate_wide(line)


def decode(line: bytes) -> Header | Event:
    """The event of a line; raises `msgspec.MsgspecError` or `UnicodeDecodeError`."""
    return _decoder().decode(line)
