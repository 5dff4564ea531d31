"""Files that nobody wrote: logs, records and artifacts of any content run nothing, and end well.

`make soak` plays thousands; the counts are printed.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import EVENTS, build_header

import tripwire
from tripwire.backends.artifacts import Artifact, Store
from tripwire.errors import BadRecord, TelemetryError
from tripwire.recording.format.container import Content, write_members
from tripwire.report import build_report, write_report
from tripwire.telemetry import (
    write_chrome_trace,
    write_speedscope,
    write_torch_trace,
)
from tripwire.telemetry.schema import (
    encode,
)


def play(example: st.SearchStrategy, check: Callable[..., str], number: int) -> Counter[str]:
    """How many of so many examples ended how."""
    ends: Counter[str] = Counter()

    @settings(
        max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(example)
    def run(drawn) -> None:
        ends[check(drawn)] += 1

    run()
    return ends


@pytest.fixture
def tell(capsys):
    def print_through(what: str, ends: Counter[str]) -> None:
        with capsys.disabled():
            told = ", ".join(f"{end} {count:,}" for end, count in sorted(ends.items()))
            print(f"\n{what}: {ends.total():,} played; {told}")

    return print_through


class Watch:
    """What runs code or writes outside of a folder in a block, told by the interpreter."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.met: list[str] = []
        sys.addaudithook(self._hear)  # there is no way to take it away again

    @contextmanager
    def over(self, folder: Path):
        before = os.listdir()
        self.folder = os.path.realpath(folder)
        self.met.clear()
        try:
            yield
        finally:
            self.folder = None
        if os.listdir() != before:
            self.met.append("something was written to the working folder")

    def _hear(self, event: str, args: tuple) -> None:
        if self.folder is None:
            return
        if event in (
            "exec",
            "os.system",
            "subprocess.Popen",
            "pickle.find_class",
            "socket.connect",
        ):
            self.met.append(f"{event} {args}"[:200])
        elif event == "open" and isinstance(args[0], (str, bytes)) and args[2] & 3:
            # A draft has no path: it is made in a folder that was entered before.
            path = os.fsdecode(args[0])
            is_draft = path.startswith(".tripwire-") and path.endswith(".draft")
            if not is_draft and not os.path.realpath(path).startswith(self.folder):
                self.met.append(f"{event} {args}"[:200])


watch = Watch()


# --- bytes -------------------------------------------------------------------------------------


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """Some bytes, after up to three things that disks, editors and attackers do."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        until = draw(st.integers(at, min(len(content), at + 200)))
        match draw(st.sampled_from(["cut", "drop", "put", "repeat", "flip", "move"])):
            case "cut":
                content = content[:at]
            case "drop":
                content = content[:at] + content[until:]
            case "put":
                content = content[:at] + draw(st.binary(max_size=50)) + content[at:]
            case "repeat":
                piece = content[at:until]
                content = content[:at] + piece * draw(st.integers(2, 50)) + content[until:]
            case "flip" if at < len(content):
                byte = content[at] ^ (1 << draw(st.integers(0, 7)))
                content = content[:at] + bytes([byte]) + content[at + 1 :]
            case "move":
                content = content[:at] + content[until:] + content[at:until]
    return content


# --- logs --------------------------------------------------------------------------------------

HEADER = build_header(start_wall_ns=1_760_000_000_000_000_000, argv=("train.py",))
LOG = [HEADER, *EVENTS]
NUMBERS = st.one_of(
    st.integers(-10, 10),
    st.sampled_from([10**8, 2**31, 2**53, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30, 10**1000]),
    st.floats(allow_nan=False, allow_infinity=False),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20), st.just("/../../x")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def changed(draw) -> bytes:
    """An event of ours in which values at some places are others, of their kind or not."""
    tree = json.loads(encode(draw(st.sampled_from(LOG))))
    for _ in range(draw(st.integers(0, 3))):
        holder = tree
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            below = holder[key]
            if isinstance(below, (dict, list)) and below and draw(st.booleans()):
                holder = below
                continue
            holder[key] = draw(NUMBERS if isinstance(below, int) else VALUES)
            break
    return json.dumps(tree).encode() + b"\n"


@st.composite
def logs(draw) -> bytes:
    lines = [encode(HEADER)] if draw(st.integers(0, 9)) else []
    lines += draw(
        st.lists(st.one_of(changed(), st.sampled_from(LOG).map(encode)), min_size=3, max_size=12)
    )
    content = b"".join(lines)
    return draw(damaged(content)) if draw(st.integers(0, 2)) == 0 else content


def export(folder: Path) -> tuple[Path, Path]:
    write_report(*build_report(folder), folder / "report.html")
    write_torch_trace(folder, folder / "torch_trace")
    timeline = write_chrome_trace(folder, folder / "trace.json")
    return timeline, write_speedscope(folder, folder / "speedscope.json")


def check_log(base: Path, content: bytes) -> str:
    """Every command makes its output of a log, or says in a line why there is none."""
    with tempfile.TemporaryDirectory(dir=base) as name:
        folder = Path(name) / "log"
        folder.mkdir()
        (folder / "tripwire-h-7-abc.jsonl").write_bytes(content)
        try:
            with watch.over(folder):
                timeline, flames = export(folder)
        except TelemetryError as error:
            return f"[{error.slug}]"
        assert watch.met == []
        assert [path.name for path in Path(name).iterdir()] == ["log"]
        assert msgspec.json.decode(timeline.read_bytes())["traceEvents"]
        assert "profiles" in msgspec.json.decode(flames.read_bytes())
    return "made"


@pytest.mark.parametrize("number", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_log_of_any_content_is_exported_or_refused_in_a_line(number, tmp_path, tell) -> None:
    (tmp_path / "tripwire-h-7-abc.jsonl").write_bytes(b"".join(map(encode, LOG)))
    export(tmp_path)  # what is imported or read once is read now
    ends = play(logs(), lambda content: check_log(tmp_path, content), number)
    tell("logs", ends)
    assert ends["made"] > number // 3


# --- records -----------------------------------------------------------------------------------

SCALE = {"gain": 2.0, "names": ["a", "b"]}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.settings = {"depth": 2, "kind": ("x", None, 1.5)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * SCALE["gain"] * self.settings["depth"]


def seal(members: dict[str, bytes]) -> bytes:
    """A file with these members, whose every hash is right, as an attacker would make it."""
    contents = {name: Content.of(data) for name, data in members.items()}
    contents["objects.json"] = Content.deflate(members["objects.json"])
    try:
        manifest = json.loads(members["manifest.json"])
        manifest["members"] = {
            name: [content.size, content.digest()[0]]
            for name, content in contents.items()
            if name != "manifest.json"
        }
        contents["manifest.json"] = Content.of(json.dumps(manifest).encode())
    except (ValueError, TypeError):
        pass  # the manifest itself is damaged
    out = io.BytesIO()
    write_members(out, {name: (c, c.digest()[1]) for name, c in contents.items()})
    return out.getvalue()


@st.composite
def records(draw, whole: bytes) -> bytes:
    """A record whose bytes are damaged, or one of its members, with hashes that fit."""
    if draw(st.booleans()):
        return draw(damaged(whole))
    with zipfile.ZipFile(io.BytesIO(whole)) as file:
        members = {name: file.read(name) for name in file.namelist()}
    name = draw(st.sampled_from(sorted(members)))
    return seal({**members, name: draw(damaged(members[name]))})


@pytest.mark.parametrize("number", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_record_of_any_content_is_opened_or_refused_and_runs_nothing(
    number, tmp_path, tell
) -> None:
    path = tmp_path / "call.rec"
    tripwire.record_call(path)(Layer(), torch.ones(3))
    whole = path.read_bytes()
    str(tripwire.load_record(path))  # what is imported once is imported now

    def check(content: bytes) -> str:
        path.write_bytes(content)
        try:
            with watch.over(tmp_path):
                str(tripwire.load_record(path))
        except BadRecord as error:
            return f"[{error.slug}]"
        finally:
            assert watch.met == []
        return "opened"

    ends = play(st.one_of(records(whole), st.just(whole)), check, number)
    tell("records", ends)
    assert ends["opened"] > 0
    assert ends.total() - ends["opened"] > number // 3


# --- the store ---------------------------------------------------------------------------------

KEY = "ab" * 32
KEPT = Artifact(b"\x80\x04payload\n\xff" * 20, {"best_isa": True})


@pytest.mark.parametrize("number", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_an_artifact_is_read_as_it_was_written_or_not_at_all(
    number, tmp_path, tell, monkeypatch
) -> None:
    monkeypatch.setattr("tripwire.backends.artifacts._tell", lambda text: None)
    store = Store(tmp_path / "store")
    store.write(KEY, KEPT)
    path = store._path(KEY)
    whole = path.read_bytes()

    def check(content: bytes) -> str:
        path.write_bytes(content)
        with watch.over(tmp_path):
            found = store.read(KEY)
        assert watch.met == []
        assert found == (KEPT if content == whole else None)
        return "read" if found else "refused"

    examples = st.one_of(damaged(whole), st.binary(max_size=300), st.just(whole))
    ends = play(examples, check, number)
    tell("artifacts", ends)
    assert ends["refused"] > number // 3
    assert ends["read"] > 0


@pytest.mark.parametrize("number", [100, pytest.param(5_000, marks=pytest.mark.slow)])
def test_a_store_with_any_tag_and_any_key_reads_its_own_or_nothing(
    number, tmp_path, tell, monkeypatch
) -> None:
    monkeypatch.setattr("tripwire.backends.artifacts._tell", lambda text: None)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    store = Store(tmp_path / "store")
    store.write(KEY, KEPT)
    places = [store.folder / "CACHEDIR.TAG", tmp_path / "config/tripwire/store/key"]
    wholes = [place.read_bytes() for place in places]

    def check(contents: tuple[bytes, bytes]) -> str:
        for place, content in zip(places, contents, strict=True):
            place.write_bytes(content)
        found = store.read(KEY)
        # What stands behind a tag is nobody's concern.
        fits = contents[0].startswith(wholes[0]) and contents[1] == wholes[1]
        assert found == (KEPT if fits else None)
        return "read" if found else "refused"

    examples = st.tuples(*(st.one_of(damaged(whole), st.just(whole)) for whole in wholes))
    ends = play(examples, check, number)
    tell("tags and keys", ends)
    assert len(ends) == 2
