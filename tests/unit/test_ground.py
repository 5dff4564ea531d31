"""The ground: imports point one way, messages are explained, documents run."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from support import run_python

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tripwire"

# A module may import what stands in a line above its own, and nothing else of tripwire.
# They alone may import Dynamo or Inductor.
ADAPTERS = {"backends.torchs", "backends.inductor", "backends.handover", "backends.keys"}
LAYERS = [
    {"callables", "env", "errors", "files", "redaction"},
    {"sandbox"},
    {
        "tracing.uses",
        "validity.weakkeys",
        "validity.twin",
    },
    {"telemetry.clock", "telemetry.locks", "telemetry.serial", "telemetry.anchors"},
    {"telemetry.cleanup", "telemetry.flattening", "telemetry.kinds"},
    {"telemetry.once", "telemetry.tables"},
    {"telemetry.contexts", "telemetry.threads", "telemetry.debugdir", "telemetry.logs"},
    {"telemetry.usercontexts"},
    {"telemetry.counters", "telemetry.metrics"},
    {"telemetry.schema"},
    {"telemetry.log", "telemetry.reader"},
    {"telemetry.history"},
    {"telemetry.spans"},
    {"telemetry.compiles", "telemetry.chromium", "telemetry.prometheus", "telemetry.reports"},
    {"telemetry.events", "telemetry.perfetto", "telemetry.torchtrace", "telemetry.reinplace"},
    {"telemetry.speedscope", "telemetry.otel"},
    {"telemetry"},
    {"phases"},
    {
        "tracing.sources",
        "tracing.ranges",
        "tracing.scopes",
        "tracing.torchstate",
        "validity.sentry",
    },
    {"tracing.structure", "tracing.names", "tracing.branches", "tracing.refusals", "tracing.rules"},
    {"tracing.values", "tracing.purity", "tracing.questions"},
    {
        "tracing.belongings",
        "tracing.holders",
        "tracing.observe",
        "tracing.binding",
        "tracing.memory",
        "tracing.originals",
        "tracing.scripts",
        "tracing.forwards",
    },
    {"tracing.reader"},
    {"tracing.reach", "tracing.inner"},
    {"tracing.reads", "tracing.state", "tracing.render"},
    {"tracing.effects"},
    {"tracing.sizes", "tracing.writes", "tracing.result"},
    {"tracing.recorder"},
    {"tracing.hooks", "tracing.check"},
    {"tracing.tracer"},
    {"tracing"},
    {"validity.patching", "validity.wires", "validity.probes"},
    {"validity.snapshots", "validity.generation", "validity.guards"},
    {"validity.watching", "validity.plan"},
    {"validity.mutation"},
    {"validity"},
    {"backends.backwards"},
    {
        "backends.artifacts",
        "backends.blocks",
        "backends.handover",
        "backends.keys",
        "backends.rounds",
    },
    {"backends.inductor"},
    {"backends.torchs"},
    {"backends.registry", "backends.limits", "backends.picks"},
    {"backends.cuts"},
    {"backends"},
    {"dispatch.undo"},
    {"dispatch.entry", "dispatch.checkpoints", "dispatch.checking"},
    {"dispatch.telling"},
    {"dispatch.dispatcher"},
    {"dispatch.compiled"},
    {"dispatch"},
    {"explain"},
    {"auditing.places"},
    {"auditing.alternatives", "auditing.findings", "auditing.holdings"},
    {"auditing.walking"},
    {"auditing.images", "auditing.writes"},
    {"auditing.world"},
    {"auditing.judge", "auditing.scripts"},
    {"auditing"},
    {"recording.format.container", "recording.format.nodes"},
    {"recording.format.blobs", "recording.format.manifest"},
    {"recording.format.checks"},
    {"recording.format.file"},
    {"recording.format"},
    {"recording.capture.flags", "recording.capture.insides", "recording.capture.policy"},
    {"recording.capture.origin"},
    {"recording.capture.habits", "recording.capture.names", "recording.capture.wrapped"},
    {"recording.capture.arrays", "recording.capture.classes", "recording.capture.segments"},
    {"recording.capture.data", "recording.capture.shelf"},
    {"recording.capture.code", "recording.capture.tensors"},
    {"recording.capture.encode"},
    {"recording.capture.draft"},
    {"recording.capture.beginning", "recording.capture.outcomes"},
    {"recording.capture.calls"},
    {"recording.capture.failures"},
    {"recording.capture"},
    {"api"},
    {"recording.replay.rebuild", "recording.replay.script", "recording.replay.views"},
    {"recording.replay.objects"},
    {"recording.replay.decode"},
    {"recording.replay.record", "recording.replay.rerun"},
    {"recording.replay.repro"},
    {"recording.replay"},
    {"recording"},
    {"report.model"},
    {"report.lanes", "report.grouping", "report.details"},
    {"report.collector", "report.graphdiff", "report.page"},
    {"report.comparison"},
    {"report"},
    {"running", "doctor"},
    {"cli"},
    {"__main__"},
    {""},
]


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").removesuffix(".")] = path
    return found


def imports_of(path: Path) -> set[str]:
    """Modules of tripwire that a file imports when it runs; for type checking doesn't count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [name for name in full if name.removeprefix("tripwire.") in modules()]
            names.update(known or [node.module])
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def test_every_module_has_its_layer() -> None:
    assert set(modules()) == set().union(*LAYERS)


@pytest.mark.parametrize("name", sorted(set().union(*LAYERS)))
def test_imports_point_one_way(name: str) -> None:
    level = next(i for i, layer in enumerate(LAYERS) if name in layer)
    allowed = set().union(*LAYERS[:level])
    for imported in imports_of(modules()[name]):
        if imported.partition(".")[0] == "tripwire":
            assert imported.removeprefix("tripwire").removeprefix(".") in allowed, imported


def test_nothing_but_the_adapter_of_torchs_back_ends_leans_on_dynamo_or_jit() -> None:
    for name, path in modules().items():
        for imported in imports_of(path) if name not in ADAPTERS else ():
            assert not imported.startswith(("torch._dynamo", "torch.jit", "torch._inductor"))


def test_importing_tripwire_imports_no_compiler() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import tripwire;"
        "new = {m.partition('.')[0] + '.' + m.partition('.')[2].partition('.')[0]"
        " for m in set(sys.modules) - before};"
        "print(sorted(m for m in new if m in ('torch._dynamo', 'torch._inductor')))"
    )
    assert run_python(code) == "[]"


# --- messages ----------------------------------------------------------------------------------

_SLUG_CALLS = {"Refusal", "Refused", "Refuse"}


def slugs_in_code() -> set[str]:
    found: set[str] = set()
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                given = [k.value for k in node.keywords if k.arg == "slug"]
                if isinstance(node.func, ast.Name) and node.func.id in _SLUG_CALLS:
                    given += node.args[:1]
                found.update(
                    g.value
                    for g in given
                    if isinstance(g, ast.Constant) and isinstance(g.value, str)
                )
    return found


def test_every_slug_is_explained_and_every_explanation_has_its_slug() -> None:
    explained = re.findall(r"^### (\S+)$", (ROOT / "docs/messages.md").read_text(), re.MULTILINE)
    assert len(explained) == len(set(explained))
    assert len(explained) > 20
    assert set(explained) == slugs_in_code()


# --- documents ---------------------------------------------------------------------------------


def blocks(path: Path) -> list[tuple[str, str]]:
    """Fenced blocks of a document, as (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def test_every_python_block_of_the_readme_runs_and_prints_what_it_says() -> None:
    found = blocks(ROOT / "README.md")
    space: dict[str, object] = {"__name__": "readme"}
    ran = 0
    for index, (language, text) in enumerate(found):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, "readme.py", "exec"), space)
        ran += 1
        if index + 1 < len(found) and found[index + 1][0] == "text":
            assert printed.getvalue().rstrip() == found[index + 1][1].rstrip()
    assert ran


def test_every_command_of_the_readme_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [
        line.split("#")[0].split()
        for language, text in blocks(ROOT / "README.md")
        if language == "sh"
        for line in text.splitlines()
        if line.strip()
    ]
    assert commands
    for command in commands:
        assert command[0] in ("make", "git", "cd", "pip"), command
        if command[0] == "make":
            assert set(command[1:]) <= targets


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target


def test_ci_calls_make_test_only() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make test"]


def test_the_tour_runs(capsys) -> None:
    runpy.run_path(str(ROOT / "docs/tour.py"), run_name="__main__")
    assert "The end." in capsys.readouterr().out


def test_the_demo_runs(capsys, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples/demo.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "equal to the model" in out
    assert "blocks.1.attn.qkv" in out
    assert "transformer.py:" in out


def test_architecture_stays_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 150


def test_the_architectures_code_map_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in modules().values():
        if path.name != "__init__.py":
            assert f"/{path.name}`" in text or f"`{path.name}`" in text, path


def test_the_package_asks_for_what_the_readme_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "tripwire"
    assert project["requires-python"] == ">=3.11"
    names = [re.split("[<>=]", wanted)[0] for wanted in project["dependencies"]]
    assert names == ["click", "msgspec", "rich", "safetensors", "torch"]
    assert "torch>=2.11" in project["dependencies"]
