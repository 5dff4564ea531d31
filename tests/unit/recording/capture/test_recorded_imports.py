"""Imports: modules that a recorded call loads itself are in its record like any others."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import check_reproduces, fail, only, raised_in

import tripwire
from tripwire.recording.capture.record import ExecutionRecord

FILES = {
    "depot/__init__.py": """
        RATE = 3
        SECRET = "in the depot"
        def __getattr__(name):
            import importlib
            if name == "late":
                return importlib.import_module(f"{__name__}.{name}")
            raise AttributeError(name)
    """,
    "depot/goods.py": """
        from depot import RATE
        from depot.shelf import HEIGHT
        class Box:
            sides = 6
            def __call__(self, x):
                return x * self.sides + RATE
        def thing(x):
            return x * HEIGHT + count()
        CALLS = []
        def count():
            CALLS.append(1)
            return 0
    """,
    "depot/shelf.py": "HEIGHT = 7\n",
    "depot/late.py": "WHEN = 11\n",
    "depot/sub/__init__.py": "",
    "depot/sub/near.py": """
        def far(x):
            from . import side
            from .. import shelf
            from ..goods import thing as t
            return t(x) + side.VALUE + shelf.HEIGHT
    """,
    "depot/sub/side.py": "VALUE = 5\n",
    "errands.py": """
        import importlib
        import torch

        def stop(y):
            raise ValueError(f"stopped at {y.sum().item()}")

        def package(x):
            import depot
            stop(x + depot.RATE)

        def module_under_a_name(x):
            import depot.goods as g
            stop(g.thing(x))

        def module_by_its_path(x):
            import depot.shelf
            stop(x + depot.shelf.HEIGHT + depot.RATE)

        def thing_of_a_module(x):
            from depot.goods import Box
            stop(Box()(x))

        def module_of_a_package(x):
            from depot import goods, shelf
            stop(goods.thing(x) + shelf.HEIGHT)

        def everything_relative(x):
            from depot.sub.near import far
            stop(far(x))

        def help_out(x):
            from depot.goods import thing
            return thing(x)

        def in_a_helper(x):
            stop(help_out(x))

        class Worker(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.full((3,), 2.0))
            def forward(self, x):
                from depot.goods import thing
                stop(thing(x) * self.weight)

        in_a_method = Worker()

        def where_it_is_needed(x):
            if x.shape[0] == 3:
                import depot.shelf as s
            else:
                import depot.nowhere as s
            stop(x + s.HEIGHT)

        def where_it_may_be_missing(x):
            try:
                import depot.nowhere
            except ImportError:
                import depot.shelf
            stop(x + depot.shelf.HEIGHT)

        def by_a_constant(x):
            stop(x + importlib.import_module("depot.shelf").HEIGHT)

        def by_a_computed_name(x):
            name = "".join(["sh", "elf"])
            stop(x + importlib.import_module(f"depot.{name}").HEIGHT)

        def by_the_builtin(x):
            stop(x + __import__("depot.shelf").shelf.HEIGHT)

        def by_a_module_that_loads_others(x):
            import depot
            stop(x + depot.late.WHEN)

        def in_a_nested_function(x):
            def inner():
                from depot.goods import thing
                return thing
            stop(inner()(x))
    """,
}
NAMES = [
    "package",
    "module_under_a_name",
    "module_by_its_path",
    "thing_of_a_module",
    "module_of_a_package",
    "everything_relative",
    "in_a_helper",
    "in_a_method",
    "where_it_is_needed",
    "where_it_may_be_missing",
    "by_a_constant",
    "by_a_computed_name",
    "by_the_builtin",
    "by_a_module_that_loads_others",
    "in_a_nested_function",
]


def forget_modules() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ("errands", "depot")]:
        del sys.modules[name]


@pytest.fixture
def errands(tmp_path, monkeypatch):
    files = tmp_path / "files"
    for name, text in FILES.items():
        path = files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(files))
        import errands

        yield errands
    forget_modules()


def check_without_files(path: Path, monkeypatch: Any) -> ExecutionRecord:
    """A record replays where neither the files nor what was loaded from them is there."""
    forget_modules()
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("files")])
    return check_reproduces(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_module_that_the_call_imports_is_in_its_record(
    errands, name, tmp_path, monkeypatch
) -> None:
    armed = tripwire.record_on_error(tmp_path / "records", check=False)(getattr(errands, name))
    fail(armed, torch.ones(3))
    path = only(tmp_path / "records")
    assert raised_in(path).type == "ValueError"
    check_without_files(path, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_call_keeps_what_it_imports(errands, name, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "records"
    compiled = tripwire.compile(
        getattr(errands, name),
        backend="eager",
        record_on_error=tripwire.record_on_error(folder, check=False),
    )
    fail(compiled, torch.ones(3))
    path = only(folder)
    assert raised_in(path).type == "ValueError"
    check_without_files(path, monkeypatch)


def test_a_module_that_was_loaded_before_is_kept_as_the_call_began(errands, tmp_path) -> None:
    from depot import goods

    armed = tripwire.record_on_error(tmp_path / "records", check=False)(errands.in_a_helper)
    fail(armed, torch.ones(3))
    assert len(goods.CALLS) == 1
    record = check_reproduces(only(tmp_path / "records"))
    assert not record.manifest.omissions
    assert len(goods.CALLS) == 1


def test_a_record_tells_which_modules_its_call_imported(errands, tmp_path) -> None:
    armed = tripwire.record_on_error(tmp_path / "records", check=False)(errands.in_a_helper)
    fail(armed, torch.ones(3))
    told = check_reproduces(only(tmp_path / "records")).manifest.omissions
    assert sorted(omission.what for omission in told) == ["depot", "depot.goods"]


def test_what_no_code_takes_from_an_imported_module_stays_out(errands, tmp_path) -> None:
    armed = tripwire.record_on_error(tmp_path / "records", check=False)(errands.package)
    fail(armed, torch.ones(3))
    assert b"in the depot" not in only(tmp_path / "records").read_bytes()


def test_a_branch_that_was_not_taken_imports_nothing(errands, tmp_path, monkeypatch) -> None:
    armed = tripwire.record_on_error(tmp_path / "records", check=False)(errands.where_it_is_needed)
    fail(armed, torch.ones(4))
    path = only(tmp_path / "records")
    assert raised_in(path).type == "ModuleNotFoundError"
    check_without_files(path, monkeypatch)
