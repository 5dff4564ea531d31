"""The ground: imports point one way, messages are explained, documents run."""

from __future__ import annotations

import ast
import contextlib
import functools
import graphlib
import io
import linecache
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from support import run_python

import tripwire

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tripwire"

# They alone may import Dynamo or Inductor.
ADAPTERS = {
    *("backends.registry", "backends.inductor", "backends.handover", "backends.dynamo"),
    "backends.packing",
    "tracing.open.symbols",  # torch's shape environment names symbols by Dynamo's sources
}

# A package, or a module beside the packages, imports what stands in a line above its own, and
# nothing else of tripwire. Within a package imports make no circle.
LAYERS = [
    {"env", "errors", "files", "forks", "imports", "redaction"},
    {"values", "ranges"},
    {"telemetry", "writes", "rulebook"},
    {"reading"},
    {"tracing"},
    {"validity", "backends"},
    {"dispatch"},
    {"explaining", "auditing", "report", "recording.format"},
    {"recording.capture"},
    {"api", "recording.replay", "running", "doctor"},
    {"cli"},
    {"__main__", "recording", ""},
]


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").removesuffix(".")] = path
    return found


@functools.cache
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


def room_of(module: str) -> str:
    top, _, below = module.removeprefix("tripwire").removeprefix(".").partition(".")
    return top if top != "recording" or not below else f"{top}.{below.partition('.')[0]}"


def imports_of_rooms() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        inside = {m for m in imports_of(path) if m.partition(".")[0] == "tripwire"}
        found.setdefault(room_of(name), set()).update(map(room_of, inside))
    return found


def test_every_package_has_its_layer() -> None:
    assert set(map(room_of, modules())) == set().union(*LAYERS)


@pytest.mark.parametrize("room", sorted(set().union(*LAYERS)))
def test_imports_between_packages_point_one_way(room: str) -> None:
    level = next(i for i, layer in enumerate(LAYERS) if room in layer)
    assert imports_of_rooms()[room] <= {room}.union(*LAYERS[:level])


def test_imports_within_a_package_make_no_circle() -> None:
    every = modules()
    graph = {
        name: {m.removeprefix("tripwire.") for m in imports_of(path)} & every.keys() - {name}
        for name, path in every.items()
    }
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_no_public_name_is_a_modules_name() -> None:
    """The import of such a module would put it in the place of the function."""
    assert not modules().keys() & set(tripwire.__all__)


def test_what_a_users_value_is_is_asked_of_its_type_alone() -> None:
    """The builtin `isinstance` asks `__class__`, which a mock or a proxy answers with a lie."""
    rooms = [
        "writes",
        "rulebook",
        "reading",
        "tracing",
        "validity",
        "backends",
        "dispatch",
        "explaining",
        "auditing",
        "api",
    ]
    for name, path in modules().items():
        if room_of(name) in rooms and "isinstance(" in path.read_text():
            nodes = ast.walk(ast.parse(path.read_text()))
            named = [a.name for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names]
            assert "isinstance" in named, name


def test_nothing_but_the_adapter_of_torchs_back_ends_leans_on_dynamo_or_jit() -> None:
    for name, path in modules().items():
        for imported in imports_of(path) if name not in ADAPTERS else ():
            assert not imported.startswith(("torch._dynamo", "torch.jit", "torch._inductor"))


def test_importing_tripwire_imports_no_compiler() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import tripwire; tripwire.compile;"
        "new = {m.partition('.')[0] + '.' + m.partition('.')[2].partition('.')[0]"
        " for m in set(sys.modules) - before};"
        "print(sorted(m for m in new if m in ('torch._dynamo', 'torch._inductor', 'sympy.core')))"
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


PAGES = ("README.md", *(f"docs/{name}.md" for name in ("compile", "trace", "records", "explain")))


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_of_a_page_runs_and_prints_what_it_says(page, monkeypatch) -> None:
    found = blocks(ROOT / page)
    space: dict[str, object] = {"__name__": "example"}
    ran = 0
    for index, (language, text) in enumerate(found):
        if language != "python":
            continue
        ran += 1
        name = "example.py" if ran == 1 else f"example{ran}.py"
        lines = text.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, name, (len(text), None, lines, name))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, name, "exec"), space)
        if index + 1 < len(found) and found[index + 1][0] == "text":
            assert printed.getvalue().rstrip() == found[index + 1][1].rstrip()
    assert ran


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_link_between_the_documents_leads_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page}: {target}"


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
    called = [line.partition(" 2>")[0] for line in lines if line.startswith("make")]
    assert called == ["make test"]


def test_the_tour_runs(capsys) -> None:
    runpy.run_path(str(ROOT / "docs/tour.py"), run_name="__main__")
    assert "The end." in capsys.readouterr().out


def test_architecture_stays_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 150


def test_the_architecture_has_every_package_in_the_order_of_its_layers() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("|---|---|")[2]
    rows = re.findall(r"^\| ([^|]*) \|", table, re.M)
    told = [
        name.strip("/").replace("/", ".") for row in rows for name in re.findall("`(.*?)`", row)
    ]
    levels = [next(i for i, layer in enumerate(LAYERS) if name in layer) for name in told]
    assert set(told) == set().union(*LAYERS) - {"__main__", "recording", ""}
    assert levels == sorted(levels)


def test_no_two_classes_have_one_name() -> None:
    names = [
        node.name.lstrip("_")
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(names) == len(set(names))


def test_no_small_module_is_another_modules_own() -> None:
    every = modules()
    users: dict[str, set[str]] = {name: set() for name in every}
    for name, path in every.items():
        for imported in imports_of(path):
            users.get(imported.removeprefix("tripwire."), set()).add(name)
    lines = {name: len(path.read_text().splitlines()) for name, path in every.items()}
    packages = {name.rpartition(".")[0] for name in every} | {"__main__"}
    assert not [n for n in every if n not in packages and len(users[n]) < 2 and lines[n] < 100]


def test_the_package_asks_for_what_the_readme_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "tripwire"
    assert project["requires-python"] == ">=3.11"
    names = [re.split("[<>=]", wanted)[0] for wanted in project["dependencies"]]
    assert names == ["click", "msgspec", "rich", "torch"]
    assert "torch>=2.11" in project["dependencies"]
