"""Modules: what recorded code takes from a user's module, and nothing else, in another process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from carrying import ELSEWHERE, HERE, Carried

from tripwire.recording.format import nodes

FILES = {
    "shop/__init__.py": """
        from shop import prices
        SECRET = "in the package"
    """,
    "shop/prices.py": """
        import shop
        from shop import taxes as tx
        BASE = 10
        SECRET = "in prices"
        def price(n):
            return n * BASE + tx.rate()
        def discount():
            global BASE
            BASE -= 1
            return BASE
    """,
    "shop/taxes.py": """
        SECRET = "in taxes"
        class table:
            deep = {"rate": 3}
            shallow = SECRET
        def rate():
            from shop.prices import BASE
            return table.deep["rate"] + BASE
    """,
    "shop/lazy.py": """
        SECRET = "in lazy"
        def __getattr__(name):
            if name == "made_up":
                return 77
            raise AttributeError(name)
    """,
    "shop/deep/__init__.py": "",
    "shop/deep/er.py": """
        from .. import prices
        def far(n):
            from ..taxes import rate as r
            from . import side
            import shop.deep.side as again
            return prices.price(n), r(), side.VALUE, again.VALUE
    """,
    "shop/deep/side.py": """
        VALUE = 5
        SECRET = "side"
    """,
    "caller.py": """
        import shop
        import shop.prices
        import shop.deep.er as er
        import shop.lazy as lazy
        import shop.taxes as t
        import importlib

        def chain():
            return shop.prices.price(2), t.table.deep["rate"]

        def stores():
            before = shop.prices.BASE
            return shop.prices.discount(), shop.prices.BASE, before

        def far():
            return er.far(1)

        def asks_lazy():
            return lazy.made_up

        def missing():
            return shop.prices.nothing

        def missing_import():
            from shop.prices import nothing
            return nothing

        def absent():
            import no_such_module_anywhere

        def by_string():
            return importlib.import_module("shop.deep.side").VALUE

        def picks(name):
            return getattr(t, name)

        def passes_on():
            def use(module):
                return module.rate()
            return use(t)

        def lists():
            return [m.rate() for m in MODULES]

        def identity():
            import shop.taxes
            return shop.taxes is t, __name__, type(t).__name__, t.__name__

        MODULES = [t]
    """,
}


@pytest.fixture
def caller(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    monkeypatch.syspath_prepend(str(tmp_path))
    import caller
    import shop.deep.side  # noqa: F401  # functions import it when they run

    yield caller
    for name in [n for n in sys.modules if n == "caller" or n.partition(".")[0] == "shop"]:
        del sys.modules[name]


def outcome(function: Any, *args: Any) -> object:
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__, str(error)


NAMES = [
    "chain",
    "stores",
    "far",
    "asks_lazy",
    "missing",
    "missing_import",
    "absent",
    "by_string",
    "passes_on",
    "lists",
    "identity",
]


@pytest.mark.parametrize("magic", [HERE, ELSEWHERE])
@pytest.mark.parametrize("name", NAMES)
def test_modules_are_found_without_their_files(caller, name, magic) -> None:
    function = getattr(caller, name)
    carried = Carried(value=function)
    rebuilder = carried.rebuilder(magic)
    known = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "shop"}
    for module in known:
        del sys.modules[module]
    copy = carried.build_with(rebuilder)["value"]
    with rebuilder.importable():
        got = outcome(copy)
    assert not any(n.partition(".")[0] == "shop" for n in sys.modules)
    sys.modules.update(known)
    assert got == outcome(function)


def modules_in(function: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in Carried(value=function).nodes(nodes.Module):
        found.setdefault(node.name, set()).update(node.names)
    return found


def test_a_module_has_just_the_attributes_that_are_taken(caller) -> None:
    found = modules_in(caller.chain)
    assert found["shop"] - {"__file__"} == {"prices"}
    assert found["shop.prices"] - {"__file__"} == {"price", "BASE"}
    assert found["shop.taxes"] == {"table", "rate"}


def test_nothing_that_no_code_names_is_in_the_record(caller) -> None:
    for name in NAMES:
        carried = Carried(value=getattr(caller, name))
        text = b"".join(carried.record.read(n) for n in carried.record.members)
        for secret in (b"in the package", b"in prices", b"in lazy", b"in taxes"):
            assert secret not in text, (name, secret)


def test_a_computed_name_takes_the_module_whole(caller) -> None:
    assert "SECRET" in modules_in(caller.picks)["shop.taxes"]


def test_a_module_and_its_functions_share_one_namespace(caller) -> None:
    carried = Carried(module=caller.shop.prices, function=caller.shop.prices.discount)
    built = carried.build()
    assert vars(built["module"]) is built["function"].__globals__


def test_modules_in_data_are_dummies_too(caller) -> None:
    built = Carried(value=[caller.t, caller.t, caller.chain]).build()["value"]
    assert built[0] is built[1]
    assert built[0] is not caller.t
    assert built[2].__globals__["t"] is built[0]


def test_modules_of_libraries_are_themselves(caller) -> None:
    import torch.nn.functional as functional

    built = Carried(value=[sys, functional, subprocess]).build()["value"]
    assert built == [sys, functional, subprocess]


def test_two_modules_of_one_name_stay_two() -> None:
    import types

    one, two = types.ModuleType("same"), types.ModuleType("same")
    one.value, two.value = 1, 2  # type: ignore[attr-defined]

    def read(m):
        return m.value

    a, b, copy = Carried(value=[one, two, read]).build()["value"]
    assert (copy(a), copy(b)) == (1, 2)


CHILD = """
import sys
from tripwire.recording.replay import rerun
from tripwire.recording.format.file import Record
from tripwire.recording.replay.rebuild import Rebuilder
from tripwire.recording.capture.shelf import Shelf
record = Record.open(sys.argv[1])
rebuilder = Rebuilder(record.table, Shelf(record.table, record.read, record.manifest.python.magic))
roots = rerun.rebuild(record.table, record.blobs, rebuilder)
with rebuilder.importable():
    print([function() for function in roots["value"]])
"""


def test_a_clean_process_needs_none_of_the_files(caller, tmp_path) -> None:
    functions = [caller.chain, caller.far, caller.by_string, caller.asks_lazy]
    path = Carried(value=functions).write(tmp_path / "x.rec")
    source = Path(__file__).parents[4] / "src"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        env={"PYTHONPATH": str(source)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str([function() for function in functions])
