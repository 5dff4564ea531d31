"""The log: one append-only file of events per process, if somebody wants it.

`TRIPWIRE_LOG_DIR` or `start_log` says where. The file is made with the first event, and begins
with a header. An event is one line and one `write` to a descriptor that appends, so threads don't
mix their lines. A forked child gets a file of its own. If a log can't be written, it is dropped and
a message says so once; the work that it describes never fails because of it. A log that has reached
`TRIPWIRE_LOG_BYTES` ends, too, and its last event says so.

Beside it are Python's loggers, for people: `TRIPWIRE_LOGS="recompiles,refusals"` turns these two
on. What looks like a secret is removed from what they say, before any handler gets it.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import re
import secrets
import socket
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripwire.errors import TelemetryError
from tripwire.files import make_folder, open_new
from tripwire.forks import make_lock
from tripwire.telemetry import clock, schema
from tripwire.telemetry.metrics import find_own_version
from tripwire.telemetry.threads import count, local

if TYPE_CHECKING:
    from tripwire.redaction import Redactor

logger = logging.getLogger("tripwire.telemetry")

LONGEST = 1 << 30  # bytes of one file, unless TRIPWIRE_LOG_BYTES says otherwise

_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|SLURM_(PROCID|LOCALID|NODEID|JOB_ID)|OMPI_COMM_WORLD_\w+|CUDA_VISIBLE_DEVICES"
)


_logs: weakref.WeakSet[EventLog] = weakref.WeakSet()


class EventLog:
    """The file of one process. `write` is all that its users need."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()  # a program may go elsewhere meanwhile
        self.path: Path | None = None  # none before the first event
        self.dropped = False
        self.lines = 0
        self.bytes = 0
        self.longest = find_longest()
        self.spent_ns = 0  # writing
        self._file: io.FileIO | None = None
        self._opening = make_lock()
        from tripwire.redaction import Redactor  # thirty patterns, which few processes need

        self._redactor = Redactor()
        self._named: set[int] = set()  # threads that have said their names
        _logs.add(self)

    def write(self, event: schema.Event) -> None:
        """Append one event."""
        begin = clock.monotonic_ns()
        if self._file is None and not self._open():
            return
        if event.thread not in self._named:
            self._name_thread(event)
        lines = schema.encode_lines(self._clean(event))
        if self.bytes + len(lines) > self.longest:
            self._end(event)
        else:
            self._append(lines)
        self.spent_ns += clock.monotonic_ns() - begin

    def _clean(self, event: schema.Event) -> schema.Event:
        before = self._redactor.count
        cleaned = schema.clean(event, self._redactor)
        if self._redactor.count > before:
            count("redaction", "values", self._redactor.count - before)
        return cleaned

    def close(self) -> None:
        """No more events; another `write` would begin a second file."""
        with self._opening:
            if self._file is not None:
                self._file.close()
            self._forget()

    def _append(self, lines: bytes) -> None:
        file = self._file
        if file is None:  # another thread closed it
            return
        try:
            _write(file, lines)
        except ValueError:  # the same, a moment later
            return
        except OSError as error:
            self._drop(error)
        else:
            self.lines += lines.count(b"\n")
            self.bytes += len(lines)

    def _end(self, event: schema.Event) -> None:
        """The file is as long as it may be: say so in it, and write no more."""
        if not self.dropped:
            full = schema.Instant(
                time_ns=event.time_ns, thread=event.thread, name="the log is full"
            )
            self._append(schema.encode(full))
            self._drop(
                f"the file has {self.bytes:,} bytes, and its limit is {self.longest:,}; "
                "TRIPWIRE_LOG_BYTES sets another limit"
            )

    def _open(self) -> bool:
        with self._opening:
            if self._file is not None:
                return True
            if self.dropped:
                return False
            header = describe_process()
            host = re.sub(r"[^\w.]+", "_", header.host)
            path = self.directory / f"tripwire-{host}-{header.pid}-{header.token}.jsonl"
            try:
                make_folder(self.directory)
                with ExitStack() as stack:
                    file = stack.enter_context(io.FileIO(open_new(path, os.O_APPEND), "wb"))
                    _write(file, schema.encode_lines(schema.clean(header, self._redactor)))
                    stack.pop_all()
            except OSError as error:
                self._drop(error)
                return False
            self.path, self._file = path, file
            return True

    def _drop(self, why: OSError | str) -> None:
        if not self.dropped:
            self.dropped = True
            self.close()
            logger.warning("nothing more is logged into %s: %s", self.directory, why)

    def _name_thread(self, event: schema.Event) -> None:
        self._named.add(event.thread)
        state = local.state
        if event.thread == state.ident and not isinstance(event, schema.ThreadNamed):
            named = schema.ThreadNamed(time_ns=event.time_ns, thread=state.ident, name=state.name)
            self._append(schema.encode(named))

    def _forget(self) -> None:
        self.path, self._file = None, None
        self._named = set()
        self.lines = 0
        self.bytes = 0

    def forget_parent(self) -> None:
        """In a forked child: the file is the parent's."""
        if self._file is not None:
            self._file.close()
        self._forget()


def _write(file: io.FileIO, lines: bytes) -> None:
    """In one piece, without a buffer."""
    if file.write(lines) < len(lines):  # a full disk: the next line would continue this one
        file.write(b"\n")


def find_longest() -> int:
    """How many bytes a file may have."""
    said = os.environ.get("TRIPWIRE_LOG_BYTES", "")
    if said and not (said.isdecimal() and len(said) < 19):
        logger.warning("TRIPWIRE_LOG_BYTES=%s isn't a number of bytes; %d is used", said, LONGEST)
        return LONGEST
    return int(said or LONGEST)


def describe_process() -> schema.Header:
    """This process, as the header of a log that begins now."""
    from tripwire.redaction import is_wanted  # see EventLog

    return schema.Header(
        major=schema.MAJOR,
        minor=schema.MINOR,
        host=socket.gethostname(),
        pid=os.getpid(),
        parent_pid=os.getppid(),
        token=secrets.token_hex(4),
        start_wall_ns=clock.wall_ns(),
        start_monotonic_ns=clock.monotonic_ns(),
        python=platform.python_version(),
        tripwire=find_own_version(),
        torch=getattr(sys.modules.get("torch.version"), "__version__", None),
        executable=sys.executable,
        argv=tuple(sys.argv),
        ranks={
            name: text
            for name, text in sorted(os.environ.items())
            if _RANK_VARIABLES.fullmatch(name) and text.isdecimal()
        },
        redacts=is_wanted(),
    )


current: EventLog | None = None  # ask for it each time: it comes and goes


def start_log(directory: str | os.PathLike[str]) -> EventLog:
    """Write events into a directory from now on; a log that was on ends."""
    global current
    stop_log()
    current = EventLog(directory)
    return current


def stop_log() -> None:
    """Write no more events."""
    global current
    before, current = current, None
    if before is not None:
        before.close()


@contextmanager
def logging_to(directory: str | os.PathLike[str]) -> Iterator[EventLog]:
    """Write events into a directory inside the block; then go on as before."""
    global current
    before = current
    current = mine = EventLog(directory)
    try:
        yield mine
    finally:
        current = before
        mine.close()


def write(event: schema.Event) -> None:
    """Append an event, if there is a log. To build one for nothing, ask `is_logging` first."""
    if current is not None:
        current.write(event)


def emit(kind: type[schema.Event], **fields: Any) -> None:
    """Append an event of this moment, this thread and the compile that is going on in it."""
    if current is not None:
        state = local.state
        stamp = {
            "time_ns": clock.monotonic_ns(),
            "thread": state.ident,
            "compile_id": state.compile_id,
        }
        current.write(kind(**{**stamp, **fields}))


def is_logging() -> bool:
    """Whether events go anywhere."""
    return current is not None and not current.dropped


def _after_fork_in_child() -> None:
    for log in list(_logs):
        log.forget_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)

if _directory := os.environ.get("TRIPWIRE_LOG_DIR"):
    start_log(_directory)


# --- loggers: which of them speak ---


NAMES = (
    *("trace", "recompiles", "refusals", "backends", "cache"),
    *("watch", "records", "recording", "telemetry"),
)

_FORMAT = "[%(name)s] %(message)s"


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever sys.stderr is at the moment."""

    @property
    def stream(self) -> object:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        pass


_handler = _Stderr()
_handler.setFormatter(logging.Formatter(_FORMAT))
_on: set[str] = set()


def set_logs(wanted: str) -> None:
    """Let the loggers of a comma-separated list speak, and no others; "all" means all of them.

    They write to stderr from INFO on. A name that no logger has is an error.
    """
    global _on
    names = {name.strip() for name in wanted.split(",")} - {""}
    unknown = sorted(names - {*NAMES, "all"})
    if unknown:
        raise TelemetryError(
            f"{', '.join(unknown)}: tripwire has no logger of that name.\n"
            f"TRIPWIRE_LOGS takes all, or a comma-separated list of {', '.join(NAMES)}.",
            slug="logs-unknown-name",
        )
    before, _on = _on, set(NAMES) if "all" in names else names
    for name in NAMES:
        logger = logging.getLogger(f"tripwire.{name}")
        if name in _on:
            logger.addHandler(_handler)
            logger.setLevel(logging.INFO)
        elif name in before:
            logger.removeHandler(_handler)
            logger.setLevel(logging.NOTSET)


def get_logs() -> tuple[str, ...]:
    """The loggers that write to stderr from INFO on."""
    return tuple(name for name in NAMES if name in _on)


def set_logs_from_environment() -> None:
    """What TRIPWIRE_LOGS says. A wrong name is said once, and stops nobody's import."""
    try:
        set_logs(os.environ.get("TRIPWIRE_LOGS", ""))
    except TelemetryError as error:
        logging.getLogger("tripwire.telemetry").error("TRIPWIRE_LOGS: %s", error)


# Where the name of something that was read begins, as `L['self'].api_key`. What stands before it
# in a message is cleaned on its own: its last word would be taken for the name of the value.
_SOURCE = re.compile(r"(?=\b[LGMFCT]\[)")


class _Redacted(logging.Filter):
    """Lets every message pass, without secrets. A logger asks it before any handler gets one."""

    def __init__(self) -> None:
        super().__init__()
        self._redactor: Redactor | None = None  # none before the first message: see EventLog

    def filter(self, record: logging.LogRecord) -> bool:
        if self._redactor is None:
            from tripwire.redaction import Redactor

            self._redactor = Redactor()
        try:
            said = record.getMessage()
        except Exception:  # a repr of the user's raises: logging itself says so
            return True
        cleaned = "".join(map(self._redactor.clean, _SOURCE.split(said)))
        if cleaned != said:
            record.msg, record.args = cleaned, ()
        if record.exc_info:  # formatters take this text, where there is one
            error = logging.Formatter().formatException(record.exc_info)
            record.exc_text = self._redactor.clean(error)
        return True


_redacted = _Redacted()
for _logger in ("tripwire", *(f"tripwire.{name}" for name in NAMES)):
    logging.getLogger(_logger).addFilter(_redacted)

set_logs_from_environment()
