"""The page as a file: small, closed, and nothing of the user's can end an element."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from unit.report.samples import (
    HOSTILE,
    header,
    hostile_events,
    span,
    write_gpt_run,
    write_log,
)

from tripwire.cli import main
from tripwire.report import build_report, compare, write_report
from tripwire.report.page import LICENCES, SCRIPTS, VENDOR
from tripwire.telemetry.schema import encode

STATIC = Path(__file__).parents[3] / "src/tripwire/report/static"


class Elements(HTMLParser):
    """Every element of a page, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self._inside: tuple[str, dict[str, str | None]] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = (tag, dict(attrs)) if tag in ("script", "style") else None

    def handle_data(self, data) -> None:
        if self._inside:
            self.texts.append((*self._inside, data))

    def handle_endtag(self, tag) -> None:
        self._inside = None


def read(path: Path) -> Elements:
    return Elements(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("small")
    write_log(base, header(1, "aa"), [span()])
    return write_report(*build_report(base), base / "report.html")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("hostile")
    write_log(base, header(1, "aa", argv=HOSTILE), hostile_events())
    report, details = build_report(base)
    report.diff = compare((report, details), (report, details))
    return write_report(report, details, base / "report.html")


def test_the_page_weighs_less_than_half_a_megabyte(small) -> None:
    assert small.stat().st_size < 500_000


def test_nothing_in_the_page_refers_to_anything_outside(small) -> None:
    for tag, attributes in read(small).tags:
        assert not {"src", "srcset", "action", "data", "poster"} & set(attributes), tag
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", (STATIC / "report.css").read_text())
    for name in SCRIPTS:
        text = (STATIC / f"{name}.js").read_text()
        assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|import\(", text), name


def test_no_script_of_ours_parses_text_as_markup_or_code() -> None:
    for name in SCRIPTS:
        text = (STATIC / f"{name}.js").read_text()
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
        found += re.findall(r"\beval\(|new Function|\.html\(", text)
        assert found == [], name


def test_the_policy_allows_the_pages_own_scripts_and_nothing_else(hostile) -> None:
    page = read(hostile)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag, attributes, text in page.texts:
        if attributes.get("type") != "application/json":
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy, tag


def test_hostile_texts_end_no_element(hostile, small) -> None:
    shape = [t for t in read(hostile).tags if t[1].get("type") != "application/json"]
    assert [tag for tag, _ in shape] == [
        tag for tag, a in read(small).tags if a.get("type") != "application/json"
    ]


def test_data_comes_back_as_it_was(hostile) -> None:
    data = {
        attributes["id"]: json.loads(text)
        for _, attributes, text in read(hostile).texts
        if attributes.get("type") == "application/json"
    }
    functions = [compile["function"] for compile in data["report"]["compiles"]]
    short = [text for text in HOSTILE if len(text) < 400]
    assert [name for name in functions if len(name) < 400] == short
    assert data["detail-0"]["guards"] == [HOSTILE[0]]
    assert data["report"]["processes"][0]["argv"][: len(short)][0] == HOSTILE[0]


def test_the_licences_of_the_parts_are_in_the_page_and_beside_them(small) -> None:
    texts = {a.get("id"): t for _, a, t in read(small).texts}
    licences = json.loads(texts["licences"])
    named = {name for names, _ in licences for name in names.split(", ")}
    assert named == set(LICENCES)
    assert all("Copyright" in text for _, text in licences)
    for name in VENDOR:
        assert (STATIC / f"vendor/{name}.min.js").is_file()
        assert (STATIC / f"vendor/{name}.LICENSE").is_file()


def test_every_static_file_is_used() -> None:
    expected = {f"{name}.js" for name in SCRIPTS} | {"report.html", "report.css"}
    assert {path.name for path in STATIC.iterdir() if path.is_file()} == expected
    vendor = {f"{n}.min.js" for n in VENDOR} | {f"{n}.LICENSE" for n in LICENCES}
    assert {path.name for path in (STATIC / "vendor").iterdir()} == vendor


@pytest.mark.skipif(shutil.which("node") is None, reason="node isn't installed")
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_javascript(name) -> None:
    subprocess.run(["node", "--check", STATIC / f"{name}.js"], check=True)


# --- the command line ----------------------------------------------------------------------


@pytest.fixture
def gpt(tmp_path) -> Path:
    return write_gpt_run(tmp_path / "gpt")


def run(*words: object):
    return CliRunner().invoke(main, [str(word) for word in words])


def test_report_prints_the_path_of_the_page(gpt, tmp_path) -> None:
    done = run("report", gpt)
    assert (done.exit_code, done.stdout) == (0, f"{gpt / 'report.html'}\n")
    done = run("report", gpt, "--diff", gpt, "-o", tmp_path / "x.html")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'x.html'}\n")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.html"]


def test_report_prints_json(gpt) -> None:
    done = json.loads(run("report", gpt, "--json").stdout)
    assert done["path"] == str(gpt / "report.html")
    assert (done["processes"], done["compiles"], done["retirements"]) == (2, 17, 8)
    assert (done["hits"], done["misses"], done["saved_us"]) == (2272, 24, 895_520)
    assert done["skipped"]["damaged"] == 0


def test_report_as_json_has_the_comparison(gpt, tmp_path) -> None:
    earlier = write_gpt_run(tmp_path / "earlier", earlier=True)
    done = json.loads(run("report", gpt, "--diff", earlier, "--json").stdout)
    graph = done["diff"]["graphs"][0]
    assert (graph["function"], graph["added"], graph["changed"]) == ("GPT.forward", 6, 12)
    assert any("gelu" in change[3] for change in graph["nodes"])
    assert json.loads(run("report", gpt, "--json").stdout)["diff"] is None


def test_making_a_report_again_reads_the_same_log(gpt) -> None:
    first = json.loads(run("report", gpt, "--json").stdout)
    run("trace", gpt)
    assert json.loads(run("report", gpt, "--json").stdout) == first


@pytest.mark.parametrize("command", ["report", "trace"])
def test_bad_input_is_a_message_and_exit_status_2(command, tmp_path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        done = run(command, path)
        assert done.exit_code == 2
        assert "Traceback" not in done.output
    assert "[log-empty]" in run(command, tmp_path).output


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_target_that_cannot_be_written_is_a_message(command, gpt) -> None:
    done = run(command, gpt, "-o", gpt / "no" / "such" / "file")
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert f"{gpt / 'no'}: No such file or directory. Choose another path." in done.output


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_target_that_is_a_folder_is_said_to_be_one(command, gpt) -> None:
    done = run(command, gpt, "-o", gpt)
    assert done.exit_code == 2
    assert done.output == f"Error: -o: {gpt} is a folder. Name a file in it.\n"


def test_a_page_that_cannot_be_put_in_its_place_leaves_nothing_behind(gpt, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    assert run("report", gpt, "-o", tmp_path / "folder").exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "gpt"]


OUTPUTS = {
    ("report",): "report.html",
    ("trace",): "trace.json",
    ("trace", "--format", "speedscope"): "speedscope.json",
    ("trace", "--format", "torch"): "torch_trace",
}


@pytest.mark.parametrize(("command", "name"), OUTPUTS.items(), ids=OUTPUTS.values())
def test_output_is_the_users_alone_whatever_the_umask(command, name, gpt) -> None:
    before = os.umask(0)
    try:
        assert run(*command, gpt).exit_code == 0
    finally:
        os.umask(before)
    for path in (gpt / name, *(gpt / name).rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize(("command", "name"), OUTPUTS.items(), ids=OUTPUTS.values())
@pytest.mark.parametrize("named", [False, True])
def test_a_link_that_was_put_in_the_place_isnt_followed(
    command, name, named, gpt, tmp_path
) -> None:
    """Whoever may write into a log's directory decides on no other file."""
    precious, folder = tmp_path / "bashrc", tmp_path / "home"
    precious.write_text("mine")
    folder.mkdir()
    is_folder = name == "torch_trace"
    (gpt / name).symlink_to(folder if is_folder else precious)
    done = run(*command, gpt, *(("-o", gpt / name) if named else ()))
    assert done.exit_code == (2 if is_folder else 0)
    assert precious.read_text() == "mine"
    assert list(folder.iterdir()) == []
    assert is_folder or not (gpt / name).is_symlink()


def test_a_link_for_a_file_of_a_torch_trace_isnt_followed(gpt, tmp_path) -> None:
    paths = json.loads(run("trace", gpt, "--format", "torch", "--json").stdout)["paths"]
    (tmp_path / "precious").write_text("mine")
    for path in map(Path, paths):
        path.unlink()
        path.symlink_to(tmp_path / "precious")
    assert run("trace", gpt, "--format", "torch").exit_code == 0
    assert (tmp_path / "precious").read_text() == "mine"
    assert not any(Path(path).is_symlink() for path in paths)


@pytest.mark.parametrize(("command", "name"), OUTPUTS.items(), ids=OUTPUTS.values())
def test_a_pipe_in_the_place_is_a_message_and_nobody_waits(command, name, gpt) -> None:
    os.mkfifo(gpt / name)
    done = run(*command, gpt)
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert (gpt / name).is_fifo()


@pytest.mark.parametrize("command", list(OUTPUTS)[:-1], ids=list(OUTPUTS.values())[:-1])
def test_a_stream_of_the_process_is_written_to(command, gpt) -> None:
    code = "from tripwire.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, gpt, "-o", "/dev/stdout"],
        capture_output=True,
        check=True,
    )
    assert len(done.stdout) > 1_000
    assert done.stdout.endswith(b"/dev/stdout\n")


@pytest.mark.parametrize(
    "token", ["/../../x", "../x", "a/b", "", ".", "..", "~", "x\u0000y", "é" * 300, "-rf *"]
)
@pytest.mark.parametrize("rank", ["/../../y", "٣", "9" * 5_000])
def test_what_a_log_says_never_becomes_a_path(token, rank, tmp_path) -> None:
    log = tmp_path / "deep" / "log"
    log.mkdir(parents=True)
    write_log(log, header(1, "aa"), [span()])
    hostile = encode(header(-1, token, host="/../z", ranks={"RANK": rank})) + encode(span())
    for name in ("tripwire-h-2-bb.jsonl", "tripwire-h-3-cc.jsonl"):
        (log / name).write_bytes(hostile)
    for command, name in OUTPUTS.items():
        done = run(*command, log)
        assert done.exit_code == 0, done.output
        assert (log / name).exists()
    made = {path for path in tmp_path.rglob("*") if "log" not in path.relative_to(tmp_path).parts}
    assert made == {tmp_path / "deep"}
    assert {path.name for path in log.iterdir()} == {
        *OUTPUTS.values(),
        *(path.name for path in log.glob("*.jsonl")),
    }
    assert len(list((log / "torch_trace").iterdir())) == 3


@pytest.mark.parametrize("command", ["report", "trace"])
def test_what_is_named_like_a_log_and_is_no_file_is_passed_by(command, gpt, tmp_path) -> None:
    (gpt / "tripwire-x-1-aa.jsonl").mkdir()
    (gpt / "tripwire-x-2-aa.jsonl").symlink_to("nowhere")
    os.mkfifo(gpt / "tripwire-x-3-aa.jsonl")
    assert run(command, gpt).exit_code == 0


def test_times_on_no_calendar_still_make_every_export(gpt) -> None:
    line = b'{"event":"span","time_ns":9223372036854775807,"name":"x","duration_ns":5}\n'
    (log, *_) = sorted(gpt.glob("*.jsonl"))
    log.write_bytes(log.read_bytes() + line)
    for kind in ("perfetto", "speedscope", "torch"):
        done = run("trace", gpt, "--format", kind)
        assert done.exit_code == 0, done.output
    assert run("report", gpt).exit_code == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [("perfetto", "trace.json"), ("speedscope", "speedscope.json"), ("torch", "torch_trace")],
)
def test_trace_writes_what_it_is_asked_for(gpt, tmp_path, kind, name) -> None:
    done = run("trace", gpt, "--format", kind, "--json")
    assert done.exit_code == 0
    paths = [Path(path) for path in json.loads(done.stdout)["paths"]]
    assert all(path.exists() and gpt / name in (path, path.parent) for path in paths)
    if kind != "torch":
        assert json.loads(paths[0].read_text())
