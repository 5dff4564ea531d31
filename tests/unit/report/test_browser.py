"""The page in a real browser: every page opens, works by mouse and keys, and asks for nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.report.browser import CHROMIUM, Browser
from unit.report.samples import MS, flat_graph, header, hostile_events, write_gpt_run, write_log

from tripwire.report import build_report, compare, write_report
from tripwire.telemetry import CompilationMetrics
from tripwire.telemetry.metrics import PHASES
from tripwire.telemetry.schema import CompileFinished, CompileStarted, GraphCaptured

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium isn't installed: the report's page is not opened"
)
SHOTS = os.environ.get("TRIPWIRE_SCREENSHOTS")  # a directory; `make screenshots` says docs
PAGES = (
    "",
    "timeline",
    "compiles",
    "retirements",
    "refusals",
    "recompiles",
    "records",
    "processes",
    "diff",
    "about",
)
TABS = ("graph", "nodes", "guards", "wires", "reads", "phases", "figures")


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("logs")
    report, details = build_report(write_gpt_run(base / "gpt-nightly", 1.15))
    earlier = build_report(write_gpt_run(base / "gpt-last-week", earlier=True))
    report.diff = compare((report, details), earlier)
    return write_report(report, details, base / "report.html")


@pytest.fixture
def page(opened, sample) -> Iterator[Browser]:
    """The sample's report; at the end nothing was asked for and nothing complained of."""
    yield from watched(opened, sample)


def watched(browser: Browser, path: Path) -> Iterator[Browser]:
    browser.prefer("light")
    browser.call("Page.navigate", url="about:blank")
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(path)
    yield browser
    browser.evaluate("new Promise((r) => setTimeout(r, 30))")
    assert browser.complaints == []
    assert {url.partition("#")[0] for url in browser.requests} == {path.resolve().as_uri()}


def heading(browser: Browser) -> str:
    return browser.evaluate("document.querySelector('h1').textContent")


def count(browser: Browser, selector: str) -> int:
    return browser.evaluate(f"document.querySelectorAll({selector!r}).length")


def shoot(browser: Browser, name: str) -> None:
    if SHOTS:
        browser.screenshot(Path(SHOTS) / f"report-{name}.png")


def test_every_page_opens_from_the_navigation(page) -> None:
    titles = []
    for number in range(len(PAGES)):
        link = f"nav a:nth-child({number + 1})"
        page.click_until(link, f"document.querySelector('{link}').ariaCurrent")
        titles.append(heading(page))
    assert titles[0] == "gpt-nightly"
    assert len(set(titles)) == len(PAGES)


@pytest.mark.parametrize("tab", TABS)
def test_every_part_of_a_compile_opens(page, tab) -> None:
    page.go("compile/0")
    shown = f"document.getElementById('tab-{tab}').ariaSelected === 'true'"
    page.click_until(f"#tab-{tab}", shown)
    assert count(page, "#panel > *") >= 1
    assert count(page, "#panel .empty") == 0


def test_the_overview_tells_the_figures(page) -> None:
    text = page.evaluate("document.querySelector('.figures').innerText")
    for part in (
        "compile time",
        "unattributed",
        "hits",
        "2,272",
        "saved by hits",
        "896",
        "refusals",
    ):
        assert part in text
    assert count(page, ".stack .hatched") == 1
    shoot(page, "overview")


def test_a_compiles_figures_show_caches_parts_and_its_backward(opened, tmp_path) -> None:
    figures = {
        "is_forward": True,
        "local_cache_hit_count": 2,
        "cache_saved_time_us": 8_400_000,
        "aot_autograd_time_us": 1_200,
        "guard_latency_us": 3.5,
        "symbol_count": 1,
        "graph_op_counts": {"torch.relu": 2},
        "graph_node_shapes": "x: float32[4, 8]",
        "stack_trace": ["train.py(3): step"],
    }
    events = [
        CompileStarted(time_ns=1, compile_id="0/0", function="net"),
        CompileFinished(time_ns=2, compile_id="0/0", metrics=CompilationMetrics.create(figures)),
        CompileStarted(time_ns=3, compile_id="0/0", function="net", is_backward=True),
        CompileFinished(
            time_ns=4,
            compile_id="0/0",
            metrics=CompilationMetrics(is_forward=False, backward_time_us=2_500_000),
        ),
    ]
    write_log(tmp_path, header(1, "aa"), events)
    built = build_report(tmp_path)
    assert [row.id for row in built[0].compiles] == ["0/0", "0/0 backward"]
    for browser in watched(opened, write_report(*built, tmp_path / "report.html")):
        browser.go("compile/0/figures")
        text = browser.evaluate("document.getElementById('panel').innerText")
        for name in figures:
            assert name in text
        for value in ("8.4", "1.2", "torch.relu", "x: float32[4, 8]", "train.py(3): step"):
            assert value in text
        browser.go("compile/1/figures")
        text = browser.evaluate("document.getElementById('panel').innerText")
        assert "backward_time_us" in text
        assert "2.5" in text


def test_wires_tell_the_users_line_and_what_stands_there(page) -> None:
    page.go("compile/0/wires")
    rows = page.evaluate("document.querySelector('#panel table').innerText")
    assert "model.py:35" in rows
    assert "score = (q @ k.transpose(-2, -1)) * self.config.scale" in rows
    shoot(page, "wires")


def test_scopes_open_and_close_by_mouse_and_keys(page) -> None:
    page.go("compile/0/graph")
    page.wait_until("document.querySelector('.graph-box .node')")
    closed = count(page, ".graph-box .node")
    assert closed < 40
    page.click('[data-path="blocks.0"]')
    page.wait_until(f"document.querySelectorAll('.graph-box .node').length > {closed}")
    focused = "document.activeElement.ariaExpanded"
    assert page.evaluate(focused) == "true"
    page.press("Enter")
    page.wait_until(f"document.querySelectorAll('.graph-box .node').length === {closed}")
    assert page.evaluate(focused) == "false"


def test_a_node_tells_its_line_with_carets_inputs_and_users(page) -> None:
    page.go("compile/0/graph/31")
    page.wait_until("document.querySelector('.side dl')")
    text = page.evaluate("document.querySelector('.side').innerText")
    assert "model.py:" in text
    assert "Inputs" in text
    assert "Users" in text
    assert "^" in page.evaluate("document.querySelector('.side .carets').textContent")
    assert count(page, ".graph-box .selected") == 1
    shoot(page, "graph")
    before = page.evaluate("document.querySelector('.side h3').textContent")
    page.click(".side button.link")
    page.wait_until(f"document.querySelector('.side h3').textContent !== {before!r}")


def test_parameters_are_drawn_when_they_are_wanted(page) -> None:
    page.go("compile/0/graph")
    page.wait_until("document.querySelector('.graph-box .node')")
    page.click('[data-path="blocks.0"]')
    page.wait_until("document.querySelector('[aria-label^=\"node norm1_0,\"]')")
    assert count(page, '[aria-label^="node blocks_0_norm1_weight"]') == 0
    page.evaluate("document.querySelector('.tools input[type=search]').focus()")
    page.type("blocks_0_norm1_weight")
    page.press("Enter")
    page.wait_until("document.querySelector('.graph-box .selected')")
    assert count(page, '[aria-label^="node blocks_0_norm1_weight"]') == 1
    assert page.evaluate("document.querySelector('.tools input[type=checkbox]').checked")


def test_a_node_is_found_by_name(page) -> None:
    page.go("compile/0/graph")
    page.evaluate("document.querySelector('.tools input[type=search]').focus()")
    page.type("up_5")
    page.press("Enter")
    page.wait_until("document.querySelector('.side h3')?.textContent === 'up_5'")


def test_tables_sort_and_filter(page) -> None:
    page.go("compiles")
    took = "[...document.querySelectorAll('tbody tr td:nth-child(6)')].map((e) => e.textContent)"
    unsorted = page.evaluate(took)
    page.click("thead th:nth-child(6) button")
    assert page.evaluate("document.querySelector('thead th:nth-child(6)').ariaSort") == "descending"
    assert page.evaluate(took) != unsorted
    rows = count(page, "tbody tr")
    page.evaluate("document.querySelector('.table-tools input').focus()")
    page.type("refused log_step")
    page.wait_until(f"document.querySelectorAll('tbody tr').length < {rows}")
    assert count(page, "tbody tr") == 2  # one of each rank


def test_the_timeline_zooms_by_keys(page) -> None:
    page.go("timeline")
    pixels = "document.querySelectorAll('.timeline canvas')[1].toDataURL()"
    page.wait_until("document.querySelectorAll('.timeline canvas')[1].width > 300")
    page.evaluate("new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")
    assert count(page, ".timeline .lane") == 5  # the axis, and two threads of two processes
    shoot(page, "timeline")
    whole = page.evaluate(pixels)
    page.evaluate("document.querySelector('.timeline').focus()")
    page.press("+")
    page.wait_until(f"{pixels}.length !== {len(whole)}")
    page.press("0")
    page.wait_until(f"{pixels}.length === {len(whole)}")


def test_search_finds_in_everything(page) -> None:
    page.press("/")
    page.type("dropout")
    page.press("Enter")
    page.wait_until("document.querySelector('h1').textContent.startsWith('Search')")
    kinds = page.evaluate(
        "[...document.querySelectorAll('h2')].map((e) => e.firstChild.data.trim())"
    )
    assert {"Retirements", "Nodes", "Wires", "Reads"} <= set(kinds)
    assert count(page, "mark") > 5


def test_retirements_name_the_writers_line(page) -> None:
    page.go("retirements")
    text = page.evaluate("document.querySelector('table').innerText")
    assert "G['config'].dropout" in text
    assert "schedule.py:17" in text
    assert "config.dropout = max(0.0, config.dropout - 0.02)" in text
    shoot(page, "retirements")
    page.click("details summary")
    page.wait_until("document.querySelector('details').open")


def test_the_comparison_says_what_is_new_gone_and_slower(page) -> None:
    page.go("diff")
    text = page.evaluate("document.getElementById('main').innerText")
    for word in ("new", "gone", "slower", "lookup", "old_eval"):
        assert word in text
    page.click_until(".graph-change summary", "document.querySelector('.graph-change').open")
    rows = page.evaluate("document.querySelector('.graph-change table').innerText")
    for word in ("added", "changed", "blocks.0.attn.drop", "dropped_0", "model.py:46", "F.gelu("):
        assert word in rows
    shoot(page, "diff")


def test_colours_follow_the_system_and_are_readable_in_both(page) -> None:
    page.go("compile/0/phases")
    script = """(() => {
        const style = getComputedStyle(document.documentElement);
        const light = (name) => {
            const hex = style.getPropertyValue(name).trim().slice(1);
            const [r, g, b] = [0, 2, 4].map((n) => parseInt(hex.slice(n, n + 2), 16) / 255)
                .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const pairs = [];
        for (const text of ["--text", "--muted", "--accent"])
            for (const back of ["--bg", "--surface", "--sunken"]) pairs.push([text, back]);
        for (const kind of ["good", "bad", "warn"]) pairs.push([`--${kind}`, `--${kind}-soft`]);
        for (const name of [...PHASE_NAMES, "other"]) pairs.push(["--on-fill", `--p-${name}`]);
        return pairs.map(([a, b]) => {
            const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
            return [a, b, (high + 0.05) / (low + 0.05)];
        });
    })()"""
    names = f"var PHASE_NAMES = {[name.removesuffix('_us') for name in PHASES]}"
    backgrounds = []
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert [pair for pair in page.evaluate(f"{names}; {script}") if pair[2] < 4.5] == []
    assert backgrounds[0] != backgrounds[1]
    page.go("compile/0/graph/31")
    shoot(page, "dark")


@pytest.mark.parametrize("route", [*PAGES, "compile/0/graph", "compile/0/nodes", "search/model"])
def test_everything_that_can_be_used_has_a_name_and_nothing_overflows(page, route) -> None:
    page.go(route)
    nameless = """[...document.querySelectorAll(
        "a, button, input, summary, [role=button], [role=img], [tabindex='0']")]
        .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length))
        .map((e) => e.outerHTML.slice(0, 200))"""
    assert page.evaluate(nameless) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_narrow_window_still_shows_everything(page) -> None:
    page.resize(480, 800)
    for route in PAGES:
        page.go(route)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), route
    page.resize(1280, 820)


def test_a_flat_graph_of_thousands_of_nodes_stays_small_to_draw(opened, tmp_path) -> None:
    ids = {"thread": 1, "compile_id": "0/0"}
    events = [
        CompileStarted(time_ns=5_001 * MS, function="long", **ids),
        GraphCaptured(time_ns=5_002 * MS, nodes=flat_graph(6_000), **ids),
        CompileFinished(time_ns=5_003 * MS, metrics=CompilationMetrics(duration_us=9), **ids),
    ]
    write_log(tmp_path, header(7, "aa"), events)
    path = write_report(*build_report(tmp_path), tmp_path / "report.html")
    for browser in watched(opened, path):
        browser.go("compile/0/graph")
        browser.wait_until("document.querySelector('.graph-box .scope')")
        assert 10 < count(browser, ".graph-box [role=button]") <= 121
        browser.go("compile/0/graph/4321")
        browser.wait_until("document.querySelector('.graph-box .selected')")
        assert count(browser, ".graph-box [role=button]") < 300


def test_hostile_texts_are_shown_and_never_run(opened, tmp_path) -> None:
    evil = "</script><img src=x onerror=\"document.title='owned'\">"
    head = header(8, "bb", argv=(evil,), host="node01", python=evil)
    write_log(tmp_path / evil.replace("/", "\\"), head, hostile_events())
    built = build_report(tmp_path / evil.replace("/", "\\"))
    built[0].diff = compare(built, built)
    path = write_report(*built, tmp_path / "report.html")
    compiles = len(built[0].compiles)
    assert compiles == 10
    routes = [*PAGES, "search/onerror", "search/x%%", "compile/99", "compile/x", evil]
    routes += [f"compile/{n}/{tab}" for n in range(compiles) for tab in TABS]
    for browser in watched(opened, path):
        for route in routes:
            if route != evil:
                browser.go(route)
            assert count(browser, "img, iframe, object, embed, link, base") == 0, route
            assert count(browser, "#main script, #main style") == 0, route
            assert not browser.evaluate("document.title.startsWith('owned')"), route
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), route
        browser.go("refusals")
        text = browser.evaluate("document.getElementById('main').innerText")
        assert evil in text
        assert "\\u202egnp.exe" in text  # written out: it reorders nothing
        assert "300,000 characters" in text
