"""Bounds: a log may say anything, and costs little more memory than it is long."""

from __future__ import annotations

import os
import sys
import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner, Result
from logs import build_header

from tripwire.cli import main
from tripwire.report import build_report
from tripwire.report.comparison import TWO_GRAPHS
from tripwire.telemetry import log, reader, timelines, write_torch_trace
from tripwire.telemetry.log import EventLog, logging_to
from tripwire.telemetry.reader import LogReader
from tripwire.telemetry.schema import (
    GraphCaptured,
    GraphNode,
    GuardsBuilt,
    Instant,
    ReadRow,
    ReadsSeen,
    Recompiled,
    WiresArmed,
    decode,
    encode,
    encode_lines,
    takes_much,
)

HEADER = build_header()
HEADER_LINE = encode(HEADER)
SPAN = {"event": "span", "time_ns": 1, "name": "s", "duration_ns": 1}
COMMANDS = [
    ("report",),
    ("trace",),
    ("trace", "--format", "speedscope"),
    ("trace", "--format", "torch"),
]
SPARE = 2 << 20  # for what doesn't grow with a log: a line and its event, the page's scripts
WIDE = "\N{GRINNING FACE}"  # one such character, and Python has four bytes for each of its text


def line(**fields: object) -> bytes:
    return msgspec.json.encode(fields) + b"\n"


def span(**fields: object) -> bytes:
    return line(**{**SPAN, **fields})


def repeated(length: int, make) -> bytes:
    """Lines until there are enough."""
    made, size = [], 0
    while size < length:
        made.append(make(len(made)))
        size += len(made[-1])
    return b"".join(made)


def one_line(length: int, part: bytes, begin: bytes, end: bytes) -> bytes:
    return begin + b",".join([part] * (length // (len(part) + 1))) + end + b"\n"


IN_DATA = b'{"event":"instant","time_ns":1,"name":"x","data":{"a":['
HOSTILE = {
    "no end": lambda size: b"x" * size,
    "brackets": lambda size: b"[" * size + b"\n",
    "nested data": lambda size: IN_DATA + b"[" * size + b"]" * size + b"]}}\n",
    "empty lists": lambda size: one_line(size, b"[]", IN_DATA, b"]}}"),
    "empty dicts": lambda size: one_line(size, b"{}", IN_DATA, b"]}}"),
    "small texts": lambda size: one_line(size, b'"ab"', IN_DATA, b"]}}"),
    "small numbers": lambda size: one_line(size, b"999", IN_DATA, b"]}}"),
    "inputs": lambda size: one_line(
        size, b'"ab"', b'{"event":"recompile","time_ns":1,"function":"f","reasons":[', b"]}"
    ),
    "keys": lambda size: (
        b'{"event":"instant","time_ns":1,"name":"x","data":{'
        + b",".join(b'"%d":0' % number for number in range(size // 9))
        + b"}}\n"
    ),
    "long name": lambda size: span(name="n" * size),
    "wide name": lambda size: span(name="n" * size + WIDE),
    "half a wide name": lambda size: span(name="n" * size + "\N{EURO SIGN}"),
    "wide names": lambda size: repeated(size, lambda n: span(name=f"{n:x}" + "n" * 40_000 + WIDE)),
    "wide threads": lambda size: repeated(
        size, lambda n: line(event="thread", time_ns=1, thread=n, name="n" * 40_000 + WIDE)
    ),
    "wide compiles": lambda size: repeated(
        size, lambda n: span(compile_id=f"{n:x}" + "n" * 40_000 + WIDE)
    ),
    "wide files": lambda size: repeated(
        size,
        lambda n: line(
            event="compile_started",
            time_ns=1,
            compile_id=f"{n}/0" + "n" * 20_000 + WIDE,
            function="f",
            file=f"{n}" + "n" * 20_000 + WIDE,
        ),
    ),
    "wide data": lambda size: span(data={"a": "n" * size + WIDE}),
    "wide and escaped": lambda size: (
        b'{"event":"thread","time_ns":1,"name":"%s\\ud83d\\ude00"}\n' % (b"n" * size)
    ),
    "wide guards": lambda size: line(
        event="guards", time_ns=1, compile_id="0/0", source="n" * size + WIDE
    ),
    "lines of guards": lambda size: line(
        event="guards", time_ns=1, compile_id="0/0", source="n\n" * (size // 3)
    ),
    "ends of lines": lambda size: span(name="\n" * (size // 2)),
    "wide node": lambda size: line(
        event="graph",
        time_ns=1,
        compile_id="0/0",
        nodes=[{"name": "n" * size + WIDE, "op": "o", "target": "t"}],
    ),
    "long compile": lambda size: span(compile_id="n" * size),
    "threads": lambda size: repeated(size, lambda n: span(thread=n)),
    "names": lambda size: repeated(size, lambda n: span(name=f"{n:x}")),
    "depths": lambda size: repeated(size, lambda n: span(depth=n % 1_000_000)),
    "threads at depths": lambda size: repeated(size, lambda n: span(thread=n, depth=999_999)),
    "depth": lambda size: span(depth=10**8),
    "below zero": lambda size: span(depth=-5),
    "digits": lambda size: span(time_ns=int("9" * 1000)) + span(thread=int("9" * 4000)),
    "too many digits": lambda size: b'{"event":"span","time_ns":%s}\n' % (b"9" * 5_000),
    "digits in data": lambda size: span(data={"a": int("9" * 4000)}),
    "edges": lambda size: (
        span(time_ns=2**63 - 1, duration_ns=2**63 - 1) * 50
        + span(time_ns=-(2**63), duration_ns=-(2**63)) * 50
    ),
    "huge float": lambda size: b'{"event":"span","time_ns":1e999}\n',
    "compiles": lambda size: repeated(
        size, lambda n: line(event="compile_started", time_ns=1, compile_id=f"{n}/0", function="f")
    ),
    "files": lambda size: repeated(
        size, lambda n: line(event="compile_started", time_ns=1, function="f", file=f"{n}")
    ),
    "headers": lambda size: repeated(
        size, lambda n: encode(msgspec.structs.replace(HEADER, token=f"{n:x}")) + span(thread=n)
    ),
    "refusals": lambda size: repeated(
        size, lambda n: line(event="refusal", time_ns=1, slug=f"{n}", reason="r")
    ),
    "counters": lambda size: repeated(
        size, lambda n: line(event="counters", time_ns=1, groups={f"{n}": {f"{n}": n}})
    ),
    "nested spans": lambda size: repeated(
        size, lambda n: span(time_ns=n, duration_ns=2_000_000 - 2 * n, depth=n % 1_000_000)
    ),
    "compiles with texts": lambda size: repeated(
        size,
        lambda n: line(
            event="compile_started",
            time_ns=1,
            compile_id=f"{n}/0",
            function="n" * 390 + WIDE,
            file="n" * 390 + WIDE,
        ),
    ),
    "retirements": lambda size: repeated(
        size, lambda n: line(event="retirement", time_ns=1, source=f"{n}")
    ),
    "wide retirements": lambda size: repeated(
        size,
        lambda n: line(
            event="retirement",
            time_ns=1,
            source=f"{n // 12}",
            old="n" * 190 + WIDE,
            new="n" * 190 + WIDE,
        ),
    ),
    "marks": lambda size: repeated(
        size, lambda n: line(event="instant", time_ns=1, thread=n % 200, name=f"{n}")
    ),
    "records": lambda size: repeated(size, lambda n: line(event="record", time_ns=1, path=f"{n}")),
    "nodes one by one": lambda size: repeated(
        size,
        lambda n: line(
            event="graph",
            time_ns=1,
            compile_id="0/0",
            nodes=[{"name": f"{n}", "op": "o", "target": "t"}],
            continues=True,
        ),
    ),
    "guards one by one": lambda size: repeated(
        size,
        lambda n: line(
            event="guards", time_ns=1, compile_id="0/0", source="n\n" * 20, continues=True
        ),
    ),
    "reads one by one": lambda size: repeated(
        size,
        lambda n: line(
            event="reads",
            time_ns=1,
            compile_id=f"{n % 7}/0",
            reads=[{"source": f"{n}"}],
            continues=True,
        ),
    ),
    "bytes": lambda size: bytes(range(256)) * (size // 256),
    "nodes": lambda size: one_line(
        size,
        b'{"name":"a","op":"call","target":"f","inputs":["b"]}',
        b'{"event":"graph","time_ns":1,"nodes":[',
        b"]}",
    ),
    "nodes of a compile": lambda size: one_line(
        size,
        b'{"name":"a","op":"call","target":"f","inputs":["b"]}',
        b'{"event":"graph","time_ns":1,"compile_id":"0/0","nodes":[',
        b"]}",
    ),
    "reads": lambda size: one_line(
        size, b'{"source":"a","seen":"1"}', b'{"event":"reads","time_ns":1,"reads":[', b"]}"
    ),
}


@cache
def warm_up(command: tuple[str, ...]) -> None:
    """Modules that are imported first aren't a log's."""
    with TemporaryDirectory() as folder:
        Path(folder, "tripwire-h-7-abc.jsonl").write_bytes(encode(HEADER) + span())
        assert CliRunner().invoke(main, [*command, folder]).exit_code == 0


def check_cost(command: tuple[str, ...], *folders: Path) -> Result:
    """Run a command; what it takes in memory is in proportion to what it reads."""
    spare = SPARE + (TWO_GRAPHS if "--diff" in command else 0)
    warm_up(command[:3] if command[1:2] == ("--format",) else command[:1])
    size = sum(path.stat().st_size for folder in folders for path in folder.glob("*.jsonl"))
    tracemalloc.start()
    try:
        done = CliRunner().invoke(main, [*command, str(folders[0])])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert done.exit_code in (0, 2), done.exception
    assert "Traceback" not in done.output
    assert peak < 2 * size + spare, (peak - 2 * size) / (1 << 20)
    return done


SIZES = pytest.mark.parametrize(
    "size",
    [
        1_000,
        pytest.param(70_000, marks=pytest.mark.slow),
        200_000,
        pytest.param(1_500_000, marks=pytest.mark.slow),
        pytest.param(3_000_000, marks=pytest.mark.slow),
        pytest.param(30_000_000, marks=pytest.mark.slow),
    ],
)


@SIZES
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("build", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_log_of_any_content_costs_at_most_twice_its_size(build, command, size, tmp_path) -> None:
    (tmp_path / "tripwire-h-7-abc.jsonl").write_bytes(encode(HEADER) + span() + build(size))
    check_cost(command, tmp_path)


@pytest.mark.parametrize(
    "size", [200_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (1_000, 3_000_000))]
)
@pytest.mark.parametrize("build", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_comparison_costs_at_most_twice_the_size_of_both_logs(build, size, tmp_path) -> None:
    folders = tmp_path / "now", tmp_path / "then"
    for number, folder in enumerate(folders):
        folder.mkdir()
        whole = encode(HEADER) + span() + build(size + 100 * number)
        (folder / "tripwire-h-7-abc.jsonl").write_bytes(whole)
    check_cost(("report", "--diff", str(folders[1])), *folders)


def head(**fields: object) -> bytes:
    return encode(msgspec.structs.replace(HEADER, **fields))


# What one file of a folder may say, by its number.
MANY = {
    "nothing": lambda n: b"",
    "no header": lambda n: b'{"event":"thread","time_ns":1,"name":""}\n',
    "a header": lambda n: head(token=f"{n:x}") + span(),
    "one process": lambda n: HEADER_LINE + span(thread=n),
    "a long token": lambda n: head(token=f"{n:x}" + "n" * 20_000 + WIDE) + span(thread=n),
    "a long host": lambda n: head(token=f"{n:x}", host="n" * 20_000 + WIDE) + span(),
    "many words": lambda n: head(token=f"{n:x}", argv=("n" * 390 + WIDE,) * 50) + span(),
    "counters": lambda n: (
        head(token=f"{n:x}")
        + line(event="counters", time_ns=1, groups={"a": {f"{m}" + WIDE: m for m in range(300)}})
    ),
    "groups": lambda n: (
        head(token=f"{n:x}")
        + b"".join(line(event="refusal", time_ns=1, slug=f"{m}", reason="") for m in range(60))
    ),
    "compiles that end": lambda n: (
        head(token=f"{n % 50:x}")
        + line(event="compile_finished", time_ns=1, compile_id="0/0", metrics={}) * 20
        + span(thread=n, name=f"{n:x}")
    ),
}


@pytest.mark.parametrize(
    "files", [100, *(pytest.param(n, marks=pytest.mark.slow) for n in (1_000, 10_000))]
)
@pytest.mark.parametrize("command", [*COMMANDS, ("report", "--diff")], ids=" ".join)
@pytest.mark.parametrize("build", MANY.values(), ids=MANY.keys())
def test_many_logs_cost_at_most_twice_their_size(build, command, files, tmp_path) -> None:
    for number in range(files):
        (tmp_path / f"tripwire-h-7-{number:x}.jsonl").write_bytes(build(number))
    both = (tmp_path, tmp_path) if "--diff" in command else (tmp_path,)
    check_cost((*command, *map(str, both[1:])), *both)


LONG = {
    "graph": (
        GraphCaptured,
        "nodes",
        tuple(
            GraphNode(name=f"n{n}", op="call", target="F.linear", inputs=("b", "c"), text=WIDE * 40)
            for n in range(20_000)
        ),
    ),
    "guards": (GuardsBuilt, "source", f"    if x is not None:  # {WIDE}\n" * 20_000),
    "wires": (WiresArmed, "wires", tuple(ReadRow(source=f"G['{n}']") for n in range(9_000))),
    "reads": (ReadsSeen, "reads", tuple(ReadRow(source=f"G['{n}']") for n in range(9_000))),
}


@pytest.mark.parametrize(("kind", "field", "value"), LONG.values(), ids=LONG)
def test_a_long_list_goes_on_in_further_lines(kind, field, value, tmp_path) -> None:
    with logging_to(tmp_path) as written:
        written.write(kind(time_ns=1, compile_id="0/0", **{field: value}))
    found = LogReader(tmp_path)
    pieces = [logged.event for logged in found if isinstance(logged.event, kind)]
    assert found.statistics().damaged == 0
    assert len(pieces) > 1
    assert [piece.continues for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    read = value[:0]
    for piece in pieces:
        read += getattr(piece, field)
    assert read == value


@pytest.mark.parametrize(
    "event",
    [
        Instant(time_ns=1, name="x" * 600_000),
        Instant(time_ns=1, name="x", data={str(n): [n, {"deep": [WIDE]}] for n in range(90_000)}),
        GraphCaptured(
            time_ns=1, nodes=(GraphNode(name="n", op="o", target="t", text=WIDE * 300_000),)
        ),
        Recompiled(time_ns=1, function="f", reasons=("why" * 5_000,) * 500),
        msgspec.structs.replace(HEADER, argv=("word" * 100,) * 5_000),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_that_is_too_long_is_shortened(event) -> None:
    assert len(encode(event)) > 600_000
    lines = encode_lines(event)
    assert lines.count(b"\n") == 1 and not takes_much(lines)
    assert type(decode(lines)) is type(event)
    assert 0 < len(lines) < 100_000


def test_a_report_holds_the_whole_of_a_long_graph(tmp_path) -> None:
    kind, field, nodes = LONG["graph"]
    with logging_to(tmp_path) as written:
        written.write(kind(time_ns=1, compile_id="0/0", **{field: nodes}))
        written.write(kind(time_ns=2, compile_id="1/0", **{field: nodes[:3]}))
    report, details = build_report(tmp_path)
    assert [row.nodes for row in report.compiles] == [20_000, 3]
    stretches = msgspec.json.decode(b"".join(details.stream(0)))["graph"]
    assert [row[0] for part in stretches for row in part["nodes"]] == [node.name for node in nodes]


def test_a_structured_trace_holds_the_whole_of_a_long_list(tmp_path) -> None:
    with logging_to(tmp_path / "log") as written:
        for kind, field, value in LONG.values():
            written.write(kind(time_ns=1, compile_id="0/0", **{field: value}))
    (path,) = write_torch_trace(tmp_path / "log", tmp_path / "out")
    text = path.read_text()
    assert text.count('"has_payload"') == 4  # none is divided
    assert text.count(" = call F.linear(") == 20_000
    for name in ("tripwire_wires", "tripwire_reads"):
        payload = text.partition(f'"name":"{name}"')[2].split("\n")[1].lstrip("\t")
        assert len(msgspec.json.decode(payload)) == 9_000


def test_a_second_header_is_damage(tmp_path) -> None:
    other = msgspec.structs.replace(HEADER, token="other")
    path = tmp_path / "tripwire-h-7-abc.jsonl"
    path.write_bytes(encode(HEADER) + span() + encode(other) + span())
    found = LogReader(tmp_path)
    assert {logged.process.token for logged in found} == {"abc"}
    assert found.statistics().damaged == 1


@pytest.mark.parametrize(
    ("make", "command"),
    [
        (lambda n: span(thread=n), ("trace",)),
        (lambda n: span(depth=n), ("trace",)),
        (lambda n: span(thread=n), ("trace", "--format", "speedscope")),
        (lambda n: span(name=str(n)), ("trace", "--format", "speedscope")),
        (
            lambda n: line(event="thread", time_ns=1, thread=n, name="n"),
            ("trace", "--format", "speedscope"),
        ),
    ],
)
def test_what_is_too_much_for_a_timeline_is_a_clear_error(
    make, command, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(reader, "FIXED", 1_000)
    lines = b"".join(map(make, range(100)))
    (tmp_path / "tripwire-h-7-abc.jsonl").write_bytes(encode(HEADER) + span() + lines)
    done = CliRunner().invoke(main, [*command, str(tmp_path)])
    assert done.exit_code == 2
    assert "[log-too-large]" in done.output
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"]


def test_spans_whose_root_never_comes_are_handed_on_a_few_at_a_time(tmp_path, monkeypatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(timelines, "WAITING", 10)
    monkeypatch.setattr(
        timelines, "_send_tree", lambda _, __, tree: sizes.append(len(tree)) or len(tree)
    )
    path = tmp_path / "tripwire-h-7-abc.jsonl"
    path.write_bytes(encode(HEADER) + b"".join(span(thread=n % 3, depth=1) for n in range(100)))
    exporter = SimpleNamespace(get_tracer=lambda name, tracer_provider: None)
    assert timelines._export(exporter, LogReader(path), None) == 100
    assert sum(sizes) == 100 and max(sizes) < 10


# --- logs that we write ------------------------------------------------------------------------


def events(number: int):
    return [Instant(time_ns=n, name="x" * 100) for n in range(number)]


def test_a_log_ends_at_its_cap_and_says_so(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(log, "LONGEST", 5_000)
    monkeypatch.setattr(sys, "argv", ["program"])  # which is in the log
    written = EventLog(tmp_path)
    for event in events(1_000):
        written.write(event)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 6_000
    read = [logged.event for logged in LogReader(tmp_path)]
    assert read[-1].name == "the log is full"
    assert len(read) > 10
    assert caplog.text.count("TRIPWIRE_LOG_BYTES") == 1


def test_the_environment_sets_another_cap(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("TRIPWIRE_LOG_BYTES", "2000")
    assert EventLog(tmp_path).longest == 2_000
    monkeypatch.setenv("TRIPWIRE_LOG_BYTES", "-1 GB")
    assert EventLog(tmp_path).longest == log.LONGEST
    assert "isn't a number of bytes" in caplog.text


def test_a_log_is_the_users_alone_whatever_the_umask(tmp_path) -> None:
    before = os.umask(0)
    try:
        written = EventLog(tmp_path / "a" / "b")
        written.write(events(1)[0])
    finally:
        os.umask(before)
    written.close()
    for path in (tmp_path / "a", *(tmp_path / "a").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_pipe_that_takes_a_logs_place_isnt_waited_for(tmp_path) -> None:
    path = tmp_path / "tripwire-h-7-abc.jsonl"
    os.mkfifo(path)
    with pytest.raises(OSError, match="no regular file"):
        list(LogReader(tmp_path).read_file(path))


def test_lines_are_as_long_as_they_may_be(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reader, "LONGEST_LINE", 1_000)
    (tmp_path / "tripwire-h-7-abc.jsonl").write_bytes(
        encode(HEADER) + span(name="n" * 2_000) + span()
    )
    found = LogReader(tmp_path)
    assert len(list(found)) == 1
    assert found.statistics().damaged == 1


ODD = "\x1b]0;title\a\u202egnp"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_name_of_a_logs_folder_cant_command_a_terminal(
    is_terminal, command, tmp_path, monkeypatch
) -> None:
    (tmp_path / ODD).mkdir()
    (tmp_path / ODD / "tripwire-h-7-abc.jsonl").write_bytes(encode(HEADER) + span())
    told: list[str] = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr("tripwire.cli.click.echo", lambda text, **_: told.append(str(text)))
    main.main([*command, str(tmp_path / ODD)], standalone_mode=False)
    shown = {"\x1b", "\a", "\u202e"} & set("".join(told))
    assert bool(shown) is not is_terminal


def test_what_doctor_says_cant_command_a_terminal(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_LOG_DIR", ODD)
    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", str(tmp_path / ODD))
    done = CliRunner().invoke(main, ["doctor"])
    assert "title" in done.output
    assert not {"\x1b", "\a", "\u202e"} & set(done.output)


def test_the_name_of_a_log_cant_command_a_terminal(tmp_path) -> None:
    (tmp_path / "tripwire-\x1b]0;title\a-7-abc.jsonl").write_bytes(
        b'{"event":"header","major":9}\n'
    )
    done = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert done.exit_code == 2
    assert "log-other-schema" in done.output
    assert "\x1b" not in done.output and "\a" not in done.output
