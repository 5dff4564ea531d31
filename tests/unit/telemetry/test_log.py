from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import EVENTS, build_header
from support import run_python
from unit.telemetry.forking import in_fork

from tripwire import telemetry
from tripwire.errors import TelemetryError
from tripwire.telemetry import LogReader, figures, logging_to, reader, timed
from tripwire.telemetry import log as event_log
from tripwire.telemetry.compiles import CompileId, compiling
from tripwire.telemetry.schema import (
    MAJOR,
    TAGS,
    Counts,
    Event,
    Header,
    Instant,
    SpanDone,
    decode,
    encode,
)


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_every_kind_of_event_comes_back_as_it_was():
    assert {type(e) for e in EVENTS} == set(Event.__args__)
    assert len(TAGS) == len(EVENTS) + 1
    for event in EVENTS:
        line = encode(event)
        assert line.count(b"\n") == 1
        assert decode(line) == event


def test_what_json_cant_hold_becomes_text_and_never_an_error():
    class Rude:
        def __repr__(self):
            raise RuntimeError

    loop: list[object] = []
    loop.append(loop)
    data = {
        "rude": Rude(),
        "surrogate": "\ud800",
        "set": {2, 1},
        "huge": 1 << 100,
        "loop": loop,
        "nan": float("nan"),
        3: "key",
    }
    event = decode(encode(Instant(time_ns=0, name="x", data=data)))
    assert event.data["set"] == [1, 2]
    assert event.data["3"] == "key"
    assert event.data["rude"].endswith("Rude: repr raised RuntimeError>")
    assert "nested too deeply" in str(event.data["loop"])


def test_the_file_is_made_with_the_first_event_and_begins_with_a_header(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with logging_to(tmp_path / "deep") as log:
        assert not (tmp_path / "deep").exists()
        with timed("trace", metadata={"a": 1}):
            pass
        assert log.path == only_file(tmp_path / "deep")
    header, thread, span = map(decode, log_lines(tmp_path / "deep"))
    assert isinstance(header, Header)
    assert (header.major, header.pid, header.rank) == (MAJOR, os.getpid(), 3)
    assert header.ranks["LOCAL_RANK"] == "1"
    assert header.torch
    assert thread.name == threading.current_thread().name
    assert (span.name, span.data) == ("trace", {"a": 1})
    assert header.wall_of(span.time_ns) >= header.start_wall_ns - 1_000_000_000
    name = only_file(tmp_path / "deep").name
    assert f"-{os.getpid()}-{header.token}" in name


def log_lines(directory: Path) -> list[bytes]:
    return only_file(directory).read_bytes().splitlines()


def test_a_compile_leaves_its_start_its_spans_and_its_metrics(tmp_path):
    with logging_to(tmp_path):
        with compiling(CompileId(4, 2), function="f", file="f.py", line=3):
            with timed("trace", column_us="trace_us"):
                pass
    events = [logged.event for logged in LogReader(tmp_path)]
    assert [type(e).__name__ for e in events] == [
        "ThreadNamed",
        "CompileStarted",
        "SpanDone",
        "SpanDone",
        "CompileFinished",
    ]
    assert {e.compile_id for e in events[1:]} == {"4/2"}
    assert events[2].depth == 1
    assert events[-1].metrics == telemetry.get_compilation_metrics()[-1]
    assert events[-1].metrics.logging_overhead_us > 0


def test_the_environment_switches_the_log_on(tmp_path):
    code = (
        f"import os; os.environ['TRIPWIRE_LOG_DIR'] = {str(tmp_path)!r}\n"
        "from tripwire.telemetry import log, timed\n"
        "with timed('x'): pass\n"
        "print(log.is_logging())"
    )
    assert run_python(code) == "True"
    assert [logged.event.name for logged in LogReader(tmp_path)] == ["MainThread", "x"]


def test_threads_never_mix_their_lines(tmp_path):
    def work(number: int) -> None:
        for n in range(200):
            event_log.write(
                Instant(time_ns=n, thread=number, name=str(number), data={"x": "y" * 5000})
            )

    with logging_to(tmp_path) as log:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert log.path
    found = LogReader(tmp_path)
    names = [logged.event.name for logged in found]
    assert all(names.count(str(n)) == 200 for n in range(4))
    assert found.statistics() == reader.ReadStatistics(files=1, events=800)


def test_a_forked_child_writes_a_file_of_its_own(tmp_path):
    def child() -> int:
        with timed("child"):
            pass
        return os.getpid()

    with logging_to(tmp_path):
        with timed("parent"):
            pass
        pid = in_fork(child)
        with timed("parent"):
            pass
    by_process: dict[int, list[str]] = {}
    for logged in LogReader(tmp_path):
        if isinstance(logged.event, SpanDone):
            by_process.setdefault(logged.process.pid, []).append(logged.event.name)
    assert by_process == {os.getpid(): ["parent", "parent"], pid: ["child"]}


def test_a_log_that_cant_be_written_is_dropped_and_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with logging_to(tmp_path / "file"), caplog.at_level(logging.WARNING):
        for _ in range(3):
            with timed("x"):
                pass
        assert not event_log.is_logging()
    assert caplog.text.count("nothing more is logged into") == 1


# --- reading -----------------------------------------------------------------------------------


def write_log(directory: Path, lines: list[bytes], name: str = "tripwire-h-7-abc.jsonl") -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_bytes(b"".join(lines))
    return path


HEADER = encode(build_header())
LINES = [HEADER, *map(encode, EVENTS)]


def test_a_truncated_last_line_is_counted_and_skipped(tmp_path):
    write_log(tmp_path, [*LINES[:-1], LINES[-1][: len(LINES[-1]) // 2]])
    found = LogReader(tmp_path)
    assert [logged.event for logged in found] == EVENTS[:-1]
    assert found.statistics().damaged == 1


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_whatever_happens_to_the_bytes_the_other_lines_are_read(tmp_path, data):
    lines = LINES.copy()
    at = data.draw(st.integers(1, len(lines) - 1))
    line = lines[at]
    match data.draw(st.sampled_from(["cut", "noise", "flip", "join"])):
        case "cut":
            lines[at] = line[: data.draw(st.integers(0, len(line) - 2))] + b"\n"
        case "noise":
            lines[at] = data.draw(st.binary(max_size=200)).replace(b"\n", b"") + b"\n"
        case "flip":
            where = data.draw(st.integers(0, len(line) - 2))
            byte = data.draw(st.integers(0, 255).filter(lambda b: b != 10))
            lines[at] = line[:where] + bytes([byte]) + line[where + 1 :]
        case "join":
            lines[at] = line[: data.draw(st.integers(0, len(line) - 2))]
    write_log(tmp_path, lines)
    found = LogReader(tmp_path)
    events = [logged.event for logged in found]
    others = EVENTS[: at - 1] + EVENTS[at + 1 :]  # the line after a joined one is lost with it
    assert [e for e in others if e not in events] in ([], EVENTS[at : at + 1])
    counts = found.statistics()
    assert counts.events + counts.damaged + counts.newer <= len(EVENTS)


def test_a_newer_major_schema_is_a_clear_error(tmp_path):
    path = write_log(tmp_path, [b'{"event":"header","major":99,"other":1}\n', *LINES[1:]])
    with pytest.raises(
        TelemetryError, match=rf"(?s){path.name}: this log has schema 99.*log-other"
    ):
        list(LogReader(tmp_path))


def test_events_of_a_later_minor_version_are_skipped_and_counted(tmp_path):
    write_log(tmp_path, [*LINES, b'{"event":"aurora","time_ns":1}\n'])
    found = LogReader(tmp_path)
    assert len(list(found)) == len(EVENTS)
    assert (found.statistics().newer, found.statistics().damaged) == (1, 0)


def test_a_file_without_a_header_is_named_by_its_file_name(tmp_path):
    write_log(tmp_path, LINES[1:])
    found = LogReader(tmp_path)
    first = next(iter(found))
    assert (first.process.host, first.process.pid, first.process.token) == ("h", 7, "abc")
    assert found.statistics().headless == 1


def test_a_line_without_end_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "LONGEST_LINE", 1000)
    write_log(tmp_path, [HEADER, b"x" * 50_000 + b"\n", LINES[1]])
    found = LogReader(tmp_path)
    assert [logged.event for logged in found] == EVENTS[:1]
    assert found.statistics().damaged == 1


def test_the_logs_of_a_directory_are_read_by_name(tmp_path):
    for pid in (2, 1):
        header = msgspec.structs.replace(decode(HEADER), pid=pid)
        lines = [encode(header), *(encode(Instant(time_ns=t, name=f"{pid}")) for t in (0, 4500))]
        write_log(tmp_path, lines, f"tripwire-h-{pid}-a.jsonl")
    (tmp_path / "notes.txt").write_text("not a log")
    assert [logged.event.name for logged in LogReader(tmp_path)] == ["1", "1", "2", "2"]


def test_a_file_that_is_removed_while_others_are_read_is_left_out(tmp_path, monkeypatch):
    for number in range(3):
        with logging_to(tmp_path) as log:
            log.write(Instant(time_ns=number, name="x"))
    found = LogReader(tmp_path)
    listed = list(found._list())
    monkeypatch.setattr(LogReader, "_list", lambda self: iter(listed))
    found.files[1].unlink()
    assert sum(isinstance(logged.event, Instant) for logged in found) == 2
    assert found.statistics().files == 2


@pytest.mark.parametrize("make", [lambda path: None, os.mkfifo])
def test_what_is_no_folder_and_no_file_is_a_clear_error(tmp_path, make):
    make(tmp_path / "log")
    with pytest.raises(TelemetryError, match=r"no folder and no file.*\n.*\[log-missing\]"):
        list(LogReader(tmp_path / "log"))


def test_every_line_is_plain_json():
    for line in LINES:
        assert json.loads(line)["event"] in TAGS


def test_counters_are_left_in_the_log(tmp_path):
    with logging_to(tmp_path):
        figures.log_counters()
        telemetry.count("frames", "hit", 3)
        figures.log_counters()
    (found,) = [e.event.groups for e in LogReader(tmp_path) if isinstance(e.event, Counts)]
    assert found == {"frames": {"hit": 3}}


def test_a_child_forked_inside_a_nested_log_leaves_the_outer_one_to_its_parent(tmp_path):
    def child() -> None:
        event_log.current = outer
        with timed("child"):
            pass

    with logging_to(tmp_path / "outer") as outer:
        with timed("parent"):
            pass
        with logging_to(tmp_path / "inner"):
            in_fork(child)
    assert len(list((tmp_path / "outer").iterdir())) == 2
