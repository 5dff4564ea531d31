"""The page as a file: small, closed, and nothing of the user's can end an element."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from samples import HOSTILE, header, hostile_events, span_event, write_gpt_run, write_log

from tripwire.cli import main
from tripwire.report import build_report, compare, write_report
from tripwire.report.page import LICENCES, SCRIPTS, VENDOR

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
    write_log(base, header(1, "aa"), [span_event()])
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
    assert data["detail-0"]["guards"] == HOSTILE[0]
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


def test_report_as_json(gpt) -> None:
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
    assert "No such file" in done.output


def test_a_page_that_cannot_be_put_in_its_place_leaves_nothing_behind(gpt, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    assert run("report", gpt, "-o", tmp_path / "folder").exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "gpt"]


def test_a_link_stays_a_link_and_what_is_no_file_stays_what_it_is(gpt, tmp_path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    (tmp_path / "real.html").write_text("old")
    assert run("report", gpt, "-o", tmp_path / "link.html").exit_code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert "tripwire" in (tmp_path / "real.html").read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    assert run("report", gpt, "-o", pipe).exit_code == 0
    reader.join()
    assert got[0] == (tmp_path / "real.html").read_bytes()
    assert pipe.is_fifo()


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
