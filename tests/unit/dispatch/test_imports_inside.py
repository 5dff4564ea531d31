"""Imports inside functions: what a call takes from a module is watched, however it gets there."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import tripwire

# What the function does, what it multiplies by, and which attribute of which module is written.
FORMS = {
    "import of a module in a package": ("import shop.till", "shop.till.k", "shop.till", "k"),
    "the package around it": ("import shop.till", "shop.top", "shop", "top"),
    "the module in its package": ("import shop.till", "shop.till.k", "shop", "till"),
    "import as": ("import shop.till as t", "t.k", "shop.till", "k"),
    "from a package": ("from shop import till", "till.k", "shop.till", "k"),
    "from a module": ("from shop.till import k", "k", "shop.till", "k"),
    "relative, from a module": ("from .till import k", "k", "shop.till", "k"),
    "relative, from the package": ("from . import top", "top", "shop", "top"),
    "relative, a module": ("from . import till", "till.k", "shop.till", "k"),
    "relative, a function": ("from .till import by", "by(1.0)", "shop.till", "k"),
    "standard library": ("import math", "math.pi", "math", "pi"),
    "from the standard library": ("from math import pi", "pi", "math", "pi"),
    "function of the standard library": ("import math", "math.sqrt(4.0)", "math", "sqrt"),
    "another name of the standard library": (
        "import os.path as p",
        "len(p.sep)",
        "posixpath",
        "sep",
    ),
    "__import__": ("m = __import__('math')", "m.pi", "math", "pi"),
    "importlib": ("import importlib; m = importlib.import_module('math')", "m.pi", "math", "pi"),
    "sys.modules": ("import sys; m = sys.modules['math']", "m.pi", "math", "pi"),
    "sys.modules, own": ("import sys; m = sys.modules['shop.till']", "m.k", "shop.till", "k"),
    "torch": ("from torch.nn import functional as F", "F.relu(x)", "torch.nn.functional", "relu"),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A package on the path, with a module in it."""
    folder = tmp_path_factory.mktemp("packages")
    package = folder / "shop"
    (package / "back").mkdir(parents=True)
    (package / "__init__.py").write_text("top = 2.0\n")
    (package / "till.py").write_text("k = 2.0\ndef by(n):\n    return n * k\n")
    (package / "later.py").write_text("k = 2.0\n")
    (package / "back" / "__init__.py").write_text("")
    sys.path.insert(0, str(folder))
    importlib.import_module("shop.till")
    yield package
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def build(package, statement, factor, home="shop", **more):
    """A function of a module of the package."""
    space = {"__name__": f"{home}.user", "__package__": home, **more}
    source = f"def call(x):\n    {statement}\n    return x * ({factor})\n"
    exec(compile(source, str(package / "user.py"), "exec"), space)
    return space["call"]


def find_other(value):
    if isinstance(value, ModuleType):
        return SimpleNamespace(k=9.0)
    if isinstance(value, str):
        return value * 3
    return (lambda *args: 9.0) if callable(value) else 9.0


def check_follows(call, module, attribute, monkeypatch, backend="eager"):
    x, compiled = torch.ones(2), tripwire.compile(call, backend=backend)
    for _ in range(3):
        assert torch.equal(compiled(x), call(x))
    assert compiled.statistics().hits == 2
    before = call(x)
    with monkeypatch.context() as patch:
        owner = importlib.import_module(module)
        patch.setattr(owner, attribute, find_other(getattr(owner, attribute)))
        assert not torch.equal(call(x), before)
        assert torch.equal(compiled(x), call(x))
    assert torch.equal(compiled(x), before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_function_imports_is_watched(form, backend, shop, monkeypatch) -> None:
    statement, factor, module, attribute = FORMS[form]
    check_follows(build(shop, statement, factor), module, attribute, monkeypatch, backend)


@pytest.mark.parametrize(
    ("statement", "factor", "module", "attribute"),
    [
        ("from ..till import k", "k", "shop.till", "k"),
        ("from .. import top", "top", "shop", "top"),
        ("from .. import till", "till.k", "shop.till", "k"),
    ],
)
def test_dots_lead_out_of_a_package(
    statement, factor, module, attribute, shop, monkeypatch
) -> None:
    call = build(shop, statement, factor, "shop.back")
    check_follows(call, module, attribute, monkeypatch)


@pytest.mark.filterwarnings("ignore:can.t resolve package:ImportWarning")
@pytest.mark.parametrize("name", ["shop.user", "shop"])
def test_a_module_without_a_package_of_its_own_goes_by_its_name(name, shop, monkeypatch) -> None:
    more = {"__path__": []} if name == "shop" else {}
    call = build(shop, "from .till import k", "k", __name__=name, __package__=None, **more)
    check_follows(call, "shop.till", "k", monkeypatch)


@pytest.mark.parametrize(
    ("name", "statement"),
    [
        ("shop.later", "import shop.later"),
        ("colorsys", "import colorsys"),
        ("torch.nn.utils.prune", "import torch.nn.utils.prune"),
    ],
)
def test_a_module_that_the_call_loads_is_no_reason_to_refuse(name, statement, shop) -> None:
    sys.modules.pop(name, None)
    compiled = tripwire.compile(build(shop, statement, "2"), backend="eager", fullgraph=True)
    for _ in range(4):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert compiled.statistics().hits >= 2


def test_a_branch_that_does_not_run_imports_nothing(shop) -> None:
    call = build(shop, "if len(x) > 5: import not_there_at_all", "2")
    compiled = tripwire.compile(call, backend="eager", fullgraph=True)
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert compiled.statistics().hits == 2


def test_nobody_looks_while_a_module_is_loaded(shop) -> None:
    (shop / "heavy.py").write_text(
        "from tripwire.tracing.state import CURRENT\n"
        "IS_LOOKED_AT = not CURRENT.state.observer.paused\n"
    )

    def call(x):
        from shop.heavy import IS_LOOKED_AT

        return x + (not IS_LOOKED_AT)

    compiled = tripwire.compile(call, backend="eager")
    x = torch.ones(2)
    for _ in range(3):
        assert torch.equal(compiled(x), x + 1)
