"""Odd annotations, names, messages and values are recorded; odd files are refused by name."""

from __future__ import annotations

import collections
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from forging import ODD, find_places, lay_out, members_of, read_table, seal, write_table
from replaying import check_reproduces, fail, only, raised_in, run_elsewhere

import tripwire
from tripwire.cli import main
from tripwire.errors import BadRecord, CannotReplay
from tripwire.recording.capture.record import ExecutionRecord, load_record
from tripwire.recording.format.checks import WRAPPED
from tripwire.recording.format.views import in_short
from tripwire.recording.replay import rebuild
from tripwire.recording.replay.show import print_record, write_repro

HALF = "\udce9"  # half a surrogate pair, as in the name of a file that isn't UTF-8
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _programs_go_again():
    yield
    for name in [name for name in sys.modules if name.startswith("program_")]:
        del sys.modules[name]


def import_program(folder: Path, text: str) -> ModuleType:
    """A user's program in a file of its own."""
    file = folder / f"program_{next(_numbers)}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def record_failing(folder: Path, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Path:
    """The record of a call that raises."""
    fail(tripwire.record_on_error(folder)(call), *args, **kwargs)
    return only(folder)


def rename(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    return function


# --- annotations ---

ANNOTATED = """
import dataclasses
from typing import *


@dataclasses.dataclass
class Config:
    size: int = 3
    KIND: ClassVar[str] = "a"
    TABLES: ClassVar[Dict[str, List[int]]] = {}
    limit: Final[int] = 4
    mode: Literal["a"] = "a"
    maybe: Optional[int] = None


class Options(TypedDict, total=False):
    size: Required[int]
    name: NotRequired[Annotated[str, "shown"]]


class Plain:
    RATE: Final[float] = 0.5


def is_size(value: object) -> TypeGuard[int]:
    return True


def fails(x, config):
    found = [typed.__annotations__ for typed in (Config, Options, Plain, is_size)]
    options = Options(size=config.size)
    raise ValueError(options, config, Plain.RATE, Config.KIND, [list(one) for one in found])
"""


@pytest.mark.parametrize("head", ["", "from __future__ import annotations\n"])
def test_annotations_that_take_one_type_are_made_again(tmp_path, head) -> None:
    program = import_program(tmp_path, head + ANNOTATED)
    path = record_failing(tmp_path / "out", program.fails, torch.ones(2), program.Config())
    record = check_reproduces(path)
    assert not record.manifest.omissions


# --- files that make no sense ---


def a_call(tmp_path: Path) -> bytes:
    """The record of a call with functions, classes, partials and arguments of several kinds."""
    program = import_program(
        tmp_path,
        "import functools\n"
        "class Shop:\n"
        "    @property\n"
        "    def price(self): return 2\n"
        "    def sell(self, x, by=3): return x / (self.price - by)\n"
        "def fails(x, shop, more, *, scale=1.0):\n"
        "    half = functools.partial(shop.sell, by=2)\n"
        "    return half(x.sum().item() * scale)\n",
    )
    more = {"a": [1, 2**99], "b": collections.deque([None])}
    folder = tmp_path / program.__name__
    path = record_failing(folder, program.fails, torch.ones(2), program.Shop(), more, scale=2.0)
    return path.read_bytes()


def with_table(tmp_path: Path, objects: bytes, **members: bytes) -> Path:
    """A file with another objects.json, and hashes that fit."""
    named = {name.replace("_", "/") + ".py": data for name, data in members.items()}
    path = tmp_path / "changed.rec"
    path.write_bytes(seal({**members_of(a_call(tmp_path)), "objects.json": objects, **named}))
    return path


def check_refused_everywhere(path: Path, match: str) -> None:
    """Whoever looks at the file gets one line that says what is wrong."""
    for look in (load_record, write_repro):
        with pytest.raises(BadRecord, match=match) as caught:
            look(path)
        assert caught.value.slug == "record-damaged"
    for command in ("show", "repro"):
        done = CliRunner().invoke(main, [command, str(path)])
        assert done.exit_code == 2
        assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("roots", "nodes", "match"),
    [
        (b'{"args":1}', b"", "args are no tuple"),
        (b'{"args":[0]}', b'["list"]', "args are no tuple"),
        (b'{"args":[0]}', b'["library","os"]', "args are no tuple"),
        (b'{"args":null}', b"", "args are no tuple"),
        (b'{"kwargs":[0]}', b'["tuple",[1]]', "kwargs are no dict"),
        (b'{"locals":[0]}', b'["list",["ab"]]', "locals are no dict"),
        (b'{"locals":"a"}', b"", "locals are no dict"),
        (b'{"locals":[0]}', b'["dict",[null],[1]]', "isn't a text"),
        (b'{"locals":[0]}', b'["dict",[[1]],[1]],["int","7"]', "isn't a text"),
        (b'{"generators":[0]}', b'["dict",[1],[1]]', "isn't a text"),
        (b'{"builtins":[0]}', b'["set"]', "builtins are no dict"),
        (b'{"code_options":5}', b"", "code_options are no dict"),
        (b'{"patches":[0]}', b'["dict"]', "patches are no list"),
    ],
)
def test_roots_that_arent_what_they_are_called(tmp_path, roots, nodes, match) -> None:
    check_refused_everywhere(with_table(tmp_path, lay_out(roots, nodes)), match)


def test_a_tensor_is_no_root(tmp_path) -> None:
    table = lay_out(b'{"locals":[0]}', b'["tensor",0]')
    check_refused_everywhere(with_table(tmp_path, table), "locals are no dict")


@pytest.mark.parametrize("form", [*WRAPPED, "nosuch"])
def test_wrapped_things_have_all_their_parts(tmp_path, form) -> None:
    for count in {0, WRAPPED.get(form, 1) + 1} - ({2} if form == "called" else set()):
        node = json.dumps(["wrapped", form, [None] * count]).encode()
        path = with_table(tmp_path, lay_out(b'{"call":[0]}', node))
        check_refused_everywhere(path, "wrapped|parts")


def test_the_forms_that_are_checked_are_those_that_can_be_made() -> None:
    assert WRAPPED.keys() == rebuild._MAKERS.keys()


def test_source_is_utf_8(tmp_path) -> None:
    for text in (b"x = '\xb9'", b"\xff", b"ab\xe2\x82"):
        path = with_table(tmp_path, lay_out(), src_0=text)
        check_refused_everywhere(path, r"src/0\.py isn't UTF-8")


@pytest.mark.parametrize("before", [*range(65_530, 65_537), 0])
def test_source_with_any_character_at_the_end_of_a_piece(tmp_path, before) -> None:
    text = "a" * before + HALF + "\N{SNOWMAN}\N{SNAKE}"
    data = text.encode("utf-8", "surrogatepass")
    assert load_record(with_table(tmp_path, lay_out(), src_0=data)).args == ()


def test_files_with_odd_values_are_refused_or_shown(tmp_path, capsys) -> None:
    """Odd values in odd places: what can be opened can be printed and written as a script."""
    members = members_of(a_call(tmp_path))
    path = tmp_path / "odd.rec"
    opened = 0
    for seed in range(300):
        random_ = random.Random(seed)
        tree = read_table(members["objects.json"])
        places = find_places(tree)
        for _ in range(random_.choice([1, 1, 2])):
            holder, key = random_.choice(places)
            holder[key] = random_.choice([*ODD, None, "os", "__class__", [[0]], [2]])
        path.write_bytes(seal({**members, "objects.json": write_table(tree)}))
        try:
            print_record(load_record(path), source=True)
            write_repro(path)
        except BadRecord:
            continue
        opened += 1
    assert opened > 10


# --- values that are hard to show ---


def test_arguments_that_dont_fit_are_told_of(tmp_path) -> None:
    def fails(*numbers):
        raise ValueError(len(numbers))

    path = record_failing(tmp_path, fails, *range(2_000_000))
    record = load_record(path)
    assert record.args == ()
    assert [one.what for one in record.manifest.omissions] == ["args", "locals['numbers']"]
    with pytest.raises(CannotReplay, match="2000000 elements"):
        tripwire.replay(path, trust=True)


def test_builtins_of_any_mapping_can_be_looked_at(tmp_path) -> None:
    own = collections.ChainMap({"print": 1})
    record = ExecutionRecord(fail.__code__, builtins=own)  # type: ignore[arg-type]
    record.dump(tmp_path / "x.rec")
    assert load_record(tmp_path / "x.rec").builtins == {"print": 1}


def nest(make: Callable[[object], object], levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = make(value)
    return value


SHOWN: list[tuple[Callable[[], object], str]] = [
    (lambda: nest(lambda v: [v], 5000), "[[[[[...]]]]]"),
    (lambda: nest(lambda v: [v, v], 60), "[[[[[...], [...]], "),
    (lambda: nest(lambda v: slice(v, v), 60), "slice(slice(slice("),
    (lambda: nest(lambda v: collections.OrderedDict(a=v, b=v), 60), "OrderedDict({'a': Ordered"),
    (lambda: 10**5000, "<int of 16610 bits>"),
    (lambda: [1, "two", {3: (4.5, None)}, {6}], "[1, 'two', {3: (4.5, None)}, {6}]"),
    (lambda: list(range(99)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"),
]


@pytest.mark.parametrize(("make", "shown"), SHOWN)
def test_a_few_items_of_a_few_levels_are_shown(make, shown) -> None:
    assert in_short(make()).startswith(shown)


def test_a_deep_argument_is_shown(tmp_path, capsys) -> None:
    def fails(tree):
        raise ValueError("deep")

    print_record(load_record(record_failing(tmp_path, fails, nest(lambda v: [v], 5000))))
    assert "[[[[[...]]]]]" in capsys.readouterr().out


# --- texts that aren't UTF-8 ---


class Holder:
    pass


def tell(x, *texts, **more):
    raise ValueError(f"can't read {texts} {sorted(more)} {HALF}")


def test_a_message_with_half_a_character_is_recorded_and_reproduces(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "1")
    error = fail(tripwire.compile(tell, backend="eager", record_on_error=tmp_path), torch.ones(1))
    assert HALF in str(error)
    path = only(tmp_path)
    assert load_record(path).manifest.verdict.outcome == "reproduces"
    assert raised_in(path).message == "can't read () [] \\udce9"
    strict = {"PYTHONIOENCODING": "utf-8:strict"}
    said = run_elsewhere("-m", "tripwire", "replay", path, "--trust", cwd=tmp_path, **strict)
    assert "It reproduces." in said.stdout


def test_half_a_character_in_any_name_is_recorded(tmp_path) -> None:
    holder = Holder()
    setattr(holder, f"a{HALF}", [1])
    other = type("Other", (), {"__module__": f"m{HALF}"})()
    renamed = rename(lambda *args, **kwargs: tell(*args, **kwargs), f"n{HALF}m")
    path = record_failing(
        tmp_path, renamed, torch.ones(1), HALF, holder.__dict__, other.__class__.__module__,
        **{f"k{HALF}": holder, "other": other},
    )  # fmt: skip
    check_reproduces(path)
    assert load_record(path).manifest.function.name == "n\\udce9m"
    assert path.name.startswith("n_m_ValueError_")


def test_half_a_character_in_the_name_of_a_file_is_recorded(tmp_path) -> None:
    folder = tmp_path / f"caf{HALF}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    program = import_program(folder, "def fails(x):\n    raise ValueError(x)\n")
    path = record_failing(tmp_path / "out", program.fails, 3)
    record = check_reproduces(path)
    assert "caf\\udce9" in record.manifest.function.file
    assert "raise ValueError(x)" in "".join(record.sources.values())
    assert not write_repro(path)[1]


# --- scripts ---


def resizes(x, view, empty, frozen):
    view.add_(1)
    empty.resize_(2).fill_(7)
    frozen.resize_(3).fill_(1)
    x.untyped_storage().resize_(80)
    x.resize_(2, 6)
    raise ValueError(x[0, :3].tolist(), view.stride(), empty.tolist(), frozen.numel())


def test_tensors_of_a_script_can_be_resized_and_share_memory(tmp_path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    path = record_failing(tmp_path, resizes, base, base.t()[1:3], torch.empty(0), frozen)
    check_reproduces(path)
    script, why = write_repro(path)
    assert not why
    (tmp_path / "repro.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "repro.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == f"ValueError: {raised_in(path).message}"


# --- names of files, and paths ---


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("größe", "größe_ValueError"),
        ("関数", "関数_ValueError"),
        ("हिन्दी", "हिन्दी_ValueError"),
        ("<lambda>", "lambda_ValueError"),
        ("../a b\\c:d\0", "a_b_c_d_ValueError"),
        ("__call__", "call_ValueError"),
        ("x" * 300, f"{'x' * 120}_ValueError"),
        ("関" * 300, f"{'関' * 40}_ValueError"),
    ],
)
def test_a_file_is_named_after_its_function(tmp_path, name, file) -> None:
    def fails(x):
        raise ValueError(x)

    path = record_failing(tmp_path, rename(fails, name), 1)
    assert path.name.rpartition("_")[0] == file


def test_long_names_of_functions_and_exceptions_leave_room_for_a_number(tmp_path) -> None:
    kind = type("例" * 300, (ValueError,), {})

    def fails(x):
        raise kind(x)

    for _ in range(3):
        fail(tripwire.record_on_error(tmp_path)(rename(fails, "関" * 300)), 1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3
    assert all(len(os.fsencode(name)) <= 240 for name in names)


ITERATOR = iter([1])
HELD = [1, {"lock": ITERATOR}]


def uses_globals(x):
    raise ValueError(ITERATOR, HELD)


def test_globals_have_a_dot_in_their_paths(tmp_path) -> None:
    path = record_failing(tmp_path, uses_globals, 1)
    assert [one.what for one in load_record(path).manifest.omissions] == ["call.ITERATOR"]
