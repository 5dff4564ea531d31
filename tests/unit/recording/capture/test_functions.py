"""Functions: what comes out of a record does what went in, from marshalled code and source."""

# ruff: noqa: RET503, C417
from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
import linecache
import math
import operator
import subprocess
import sys
import textwrap
import traceback
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from carrying import ELSEWHERE, HERE, Carried, both_ways, check_same_calls

from tripwire import CannotReplay
from tripwire.recording.capture.shelf import Shelf
from tripwire.recording.format import nodes
from tripwire.recording.format.file import Record
from tripwire.recording.replay import rerun
from tripwire.recording.replay.rebuild import Rebuilder, find_in_library

SCALE = 3
TABLE = {"a": 1, "b": [2, 3]}
UNUSED = ["nobody reads this"]
max = lambda *args: "shadowed"
counter = 0


# --- plain functions ---


def double(x: int) -> int:
    """Twice."""
    return x * 2


def chain(x: int) -> int:
    return double(x) + SCALE + TABLE["b"][0]


def star(a, /, b=SCALE, *args, c, d=4, **kwargs):
    return a, b, args, c, d, sorted(kwargs.items())


def uses_star(x):
    return star(x, 2, 3, c=5, e=6), star(x, c=1)


def even(n: int) -> bool:
    return True if n == 0 else odd(n - 1)


def odd(n: int) -> bool:
    return False if n == 0 else even(n - 1)


def comprehensions(n: int) -> object:
    squares = [i * i + SCALE for i in range(n) if i % 2]
    return squares, {i: j for i in squares for j in range(2)}, {*squares}, sum(x for x in squares)


def generator(n: int):
    for i in range(n):
        got = yield i * SCALE
        assert got is None
    yield from (double(x) for x in range(2))


def nested(n: int):
    class Inner:
        factor = n

        def times(self, x):
            return x * self.factor * SCALE

    def apply(f, x):
        return f(x)

    return apply(Inner().times, 4)


def matching(x):
    match x:
        case {"kind": "a", **rest}:
            return rest
        case [first, *_] if first > 1:
            return first
        case str() as text:
            return text
        case _:
            return None


def walrus(xs):
    return [y for x in xs if (y := x + 1) > 2]


def uses_builtin_names():
    return max(1, 2), min(1, 2), len(TABLE)


def absent_global():
    return this_name_is_nowhere  # noqa: F821


def raises(x):
    try:
        return 1 / x
    except ZeroDivisionError as error:
        raise ValueError("bad") from error


def formats(x):
    return f"{x!r:>5} {x:{SCALE}} " + f"{x.real}"


def unpacks(pairs):
    (a, b), *rest = pairs
    return a + b, [*rest, *pairs], {"k": a}


def swaps(a, b):
    a, b = b, a
    del b
    return a


def with_block():
    with contextlib.suppress(KeyError):
        return TABLE["missing"]
    return "suppressed"


def local_import(x):
    import math as m
    from operator import neg

    return m.sqrt(x) + neg(1)


CALLS: list[tuple[Any, list[tuple[Any, ...]]]] = [
    (double, [(2,), ("x",)]),
    (chain, [(1,), (None,)]),
    (uses_star, [(1,)]),
    (even, [(4,), (5,)]),
    (comprehensions, [(6,)]),
    (generator, [(3,)]),
    (nested, [(2,)]),
    (matching, [({"kind": "a", "x": 1},), ([2, 3],), ("t",), (1,)]),
    (walrus, [([1, 2, 3],)]),
    (uses_builtin_names, [()]),
    (absent_global, [()]),
    (raises, [(0,), (2,)]),
    (formats, [(3,)]),
    (unpacks, [([(1, 2), (3, 4)],), ([1],)]),
    (swaps, [(1, 2)]),
    (with_block, [()]),
    (local_import, [(4,)]),
]


@pytest.mark.parametrize("function, calls", CALLS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_function_does_the_same(function, calls) -> None:
    check_same_calls(function, *calls)


def test_what_a_function_says_of_itself_is_kept() -> None:
    for copy in both_ways(double):
        assert (copy.__name__, copy.__qualname__) == ("double", "double")
        assert (copy.__doc__, copy.__module__) == ("Twice.", __name__)
        assert copy.__code__.co_firstlineno == double.__code__.co_firstlineno
        assert copy.__code__.co_filename == __file__
        assert list(copy.__code__.co_positions()) == list(double.__code__.co_positions())


def test_only_the_globals_that_are_loaded_are_kept() -> None:
    (space,) = Carried(value=chain).nodes(nodes.Namespace)
    assert set(space.names) == {"double", "SCALE", "TABLE"}


def test_a_namespace_is_one_for_all_of_its_functions() -> None:
    for made in both_ways([double, chain, even]):
        assert len({id(f.__globals__) for f in made}) == 1


def bump():
    global counter
    counter += 1
    return counter


def look():
    return counter


def drop():
    global counter
    del counter


def test_global_stores_are_seen_by_the_others_and_by_nobody_outside() -> None:
    for one, two, three in both_ways([bump, look, drop]):
        assert (one(), one(), two()) == (1, 2, 2)
        three()
        with pytest.raises(NameError):
            two()
    assert counter == 0


def test_a_deleted_global_must_have_been_there() -> None:
    for copy in both_ways(drop):
        copy()


def reads_globals(name):
    return globals()[name]


def test_code_that_opens_its_namespace_gets_all_of_it() -> None:
    for copy in both_ways(reads_globals):
        assert copy("UNUSED") == UNUSED


def test_a_name_that_somebody_put_into_builtins_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(builtins, "injected_for_test", 5, raising=False)
    space: dict[str, Any] = {"__name__": "made"}
    exec("def f():\n    return injected_for_test", space)
    carried = Carried(value=space["f"])
    monkeypatch.undo()
    assert carried.build()["value"]() == 5


def test_builtins_of_ones_own_are_kept() -> None:
    space: dict[str, Any] = {"__builtins__": {"len": lambda x: "own"}}
    exec("def f(x):\n    return len(x), sum", space)
    (copy, _) = Carried(value=space["f"]).build()["value"], None
    with pytest.raises(NameError):
        copy([])
    exec("def g(x):\n    return len(x)", space)
    assert Carried(value=space["g"]).build()["value"]([]) == "own"
    assert "__name__" not in copy.__globals__


# --- closures ---


def make_counter(step):
    count = 0

    def up(by=1):
        nonlocal count
        count += step * by
        return count

    def now():
        return count

    return up, now


def test_cells_are_shared_as_they_were() -> None:
    up, now = make_counter(5)
    up()
    for copy_up, copy_now in both_ways((up, now)):
        assert copy_now() == 5
        copy_up(by=2)
        assert copy_now() == 15
    assert now() == 5


def make_recursive():
    def walk(n):
        return [] if n == 0 else [n, *walk(n - 1)]

    return walk


def make_mutual():
    def ping(n):
        return "ping" if n == 0 else pong(n - 1)

    def pong(n):
        return "pong" if n == 0 else ping(n - 1)

    return ping


def make_late():
    def early():
        return later

    return early
    later = 1


def make_deep(a):
    def one(b):
        def two(c):
            return lambda d: (a, b, c, d)

        return two

    return one(2)(3)


def test_closures_of_every_kind_are_carried() -> None:
    check_same_calls(make_recursive(), (3,))
    check_same_calls(make_mutual(), (3,), (4,))
    check_same_calls(make_deep(1), (4,))
    check_same_calls(make_late(), ())


def test_an_empty_cell_stays_empty() -> None:
    carried = Carried(value=make_late())
    assert [cell.empty for cell in carried.nodes(nodes.CellNode)] == [True]


# --- lambdas ---

first, second, third = lambda x: x + 1, lambda x: x + 2, lambda x: x + 1
table_of = {"a": (lambda x, y=SCALE: x * y), "b": [lambda: SCALE, lambda *a, **k: (a, k)]}
split = sorted(
    [3, 1, 2],
    key=lambda x: (
        -x
    ),
)  # fmt: skip
spread = (
    lambda a,
    b=(lambda: 1): a
    + b()
)  # fmt: skip


def lambda_in_a_header(xs):
    for f in [lambda x: x + 1, lambda x: x * 2]:
        if any(map(lambda x: x > 3, xs)):
            xs = [f(x) for x in xs]
        elif (g := lambda: "elif") and xs:
            return g
    return lambda: xs


def test_lambdas_in_one_line_are_told_apart() -> None:
    for made in both_ways([first, second, third]):
        assert [f(1) for f in made] == [2, 3, 2]
        assert made[0].__code__ is not made[2].__code__
    codes = Carried(value=[first, second, third]).table.codes
    assert len({code.place for code in codes}) == 3


def test_lambdas_inside_expressions_are_told_apart() -> None:
    check_same_calls(table_of["a"], (2,))
    check_same_calls(table_of["b"][0], ())
    check_same_calls(table_of["b"][1], (1, 2))
    check_same_calls(spread, (1,))
    check_same_calls(lambda_in_a_header([4]), ())
    check_same_calls(lambda_in_a_header([1]), ())


# --- decorators ---


def noisy(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return "noisy", function(*args, **kwargs)

    wrapper.mark = [1]
    return wrapper


def plain_decorator(*, times):
    def decorate(function):
        def wrapper(x):
            for _ in range(times):
                x = function(x)
            return x

        return wrapper

    return decorate


@noisy
def decorated(x, y=2):
    """Decorated."""
    return x + y


@plain_decorator(
    times=3,
)
def repeated(x):
    return x * 2


@functools.lru_cache(maxsize=7, typed=True)
def cached(x):
    return [x]


@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@contextlib.contextmanager
def managed(x):
    yield x + SCALE


def uses_managed(x):
    with managed(x) as y:
        return y


@torch.no_grad()
def without_grad():
    return torch.is_grad_enabled()


@functools.singledispatch
def dispatched(x):
    return "any", x


@dispatched.register
def _(x: int):
    return "int", x


@dispatched.register(list)
def _(x):
    return "list", [dispatched(y) for y in x]


def test_decorated_functions_are_carried() -> None:
    for copy in check_same_calls(decorated, (1,), (1, 5)):
        assert copy.__name__ == "decorated"
        assert copy.__doc__ == "Decorated."
        assert copy.mark == [1]
        assert copy.__wrapped__(1) == 3
        assert (
            copy.__wrapped__.__code__.co_firstlineno
            == decorated.__wrapped__.__code__.co_firstlineno
        )
    check_same_calls(repeated, (1,))


def test_a_cache_is_kept_without_its_content() -> None:
    cached(1)
    carried = Carried(value=cached)
    assert "1 cached result" in carried.left_out[0].why
    for copy in (carried.build(magic)["value"] for magic in (HERE, ELSEWHERE)):
        assert copy.cache_parameters() == {"maxsize": 7, "typed": True}
        assert copy.cache_info().currsize == 0
        assert copy(1) is copy(1)
        assert copy.__name__ == "cached"
    for copy in both_ways(fibonacci):
        assert copy(30) == 832040
        assert copy.__wrapped__.__globals__["fibonacci"] is copy


def test_wrappers_that_a_library_made_are_built_on_its_namespace() -> None:
    check_same_calls(uses_managed, (1,))
    for copy in both_ways(managed):
        assert copy.__globals__ is vars(contextlib)
        with copy(1) as value:
            assert value == 4
    check_same_calls(without_grad, ())


def test_single_dispatch_chooses_the_same() -> None:
    check_same_calls(dispatched, (1,), ("x",), ([1, "x"],))


# --- things around functions ---


class Holder:
    def __init__(self, x):
        self.x = x

    def method(self, y):
        return self.x + y


def test_methods_and_partials_stay_bound() -> None:
    holder = Holder(1)
    for method, same in both_ways((holder.method, holder)):
        assert method(2) == 3
        assert method.__self__ is same
    bound = functools.partial(star, 1, c=[9])
    for copy in both_ways(bound):
        assert copy() == bound()
    for copy in both_ways([functools.partialmethod(double, 1), operator.itemgetter(1)]):
        assert copy[1]([1, 2]) == 2


def test_methods_of_c_objects_stay_bound_to_them() -> None:
    items: list[int] = []
    for append, same in both_ways((items.append, items)):
        append(5)
        assert same == [5]
    for made in both_ways([len, str.upper, "abc".upper, math.sin, operator.add, dict.fromkeys]):
        assert made[0]([1]) == 1
        assert made[1]("a") == "A"
        assert made[2]() == "ABC"
        assert made[3] is math.sin
        assert made[5]("a") == {"a": None}


def test_weak_references_lead_to_the_same_or_to_nothing() -> None:
    holder = Holder(1)
    dead = weakref.ref(Holder(2))
    for alive, same, gone in both_ways((weakref.ref(holder), holder, dead)):
        assert alive() is same
        assert gone() is None


async def waits(x):
    async def one():
        return x

    async with contextlib.AsyncExitStack():
        return [await one(), [y async for y in ticks(2)]]


async def ticks(n):
    for i in range(n):
        yield i


def test_async_functions_are_carried() -> None:
    for copy in both_ways(waits):
        assert asyncio.run(copy(3)) == [3, [0, 1]]


# --- where the source comes from ---


def test_code_from_exec_has_no_source_and_is_refused_elsewhere() -> None:
    space: dict[str, Any] = {"__name__": "made", "K": 2}
    exec("def f(x):\n    return x + K", space)
    carried = Carried(value=space["f"])
    assert carried.table.codes[0].source is None
    assert carried.build(HERE)["value"](1) == 3
    with pytest.raises(CannotReplay, match=r"(?s)f can't be built here.*replay-no-code") as caught:
        carried.build(ELSEWHERE)
    assert caught.value.slug == "replay-no-code"


def test_code_of_a_notebook_cell_has_the_source_that_linecache_has() -> None:
    text = "def cell(x):\n    y = x + 1\n    return y / 0\n"
    name = "<ipython-input-3-abc>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), space)
    check_same_calls(space["cell"], (1,))


def test_a_file_that_was_changed_after_its_import_gives_no_source(tmp_path, monkeypatch) -> None:
    path = tmp_path / "changing.py"
    path.write_text("def f(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import changing

    path.write_text("def f(x):\n    return x + 222\n")
    linecache.checkcache()
    carried = Carried(value=changing.f)
    assert carried.table.codes[0].source is None
    assert carried.build()["value"](1) == 2


TWISTED = """
from __future__ import annotations
class Outer:
    class __Inner:
        __private = 4
        def get(self): return self.__private, self.__helper(lambda: self.__private)
        @staticmethod
        def __helper(f): return f()
    def make(self):
        __local = 7
        def inner(): return Outer.__Inner().get(), __local, (lambda: __local)()
        return inner
\tx = 1 if 0 else None
"""


def test_private_names_and_odd_layout(tmp_path, monkeypatch) -> None:
    path = tmp_path / "twisted.py"
    path.write_text(TWISTED.replace("\tx", "    x") + "größe = 'ä'; f = lambda: ('ü', lambda: 1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import twisted

    check_same_calls(twisted.Outer().make(), ())
    made = both_ways(twisted.f)
    assert [copy()[0] for copy in made] == ["ü", "ü"]
    assert made[1].__code__.co_consts == made[0].__code__.co_consts


def test_annotations_of_inner_functions_follow_the_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "futures.py"
    path.write_text(
        "from __future__ import annotations\n"
        "def f():\n    def g(x: Nowhere): pass\n    return g.__annotations__\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import futures

    check_same_calls(futures.f, ())


def annotated(x: int, y: list[str] | None = None) -> dict[str, int]:
    return {}


def reads_annotations():
    return annotated.__annotations__


def test_annotations_are_kept_only_if_code_reads_them() -> None:
    for copy in both_ways(annotated):
        assert copy.__annotations__ == {}
    check_same_calls(reads_annotations, ())


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from carrying import Carried

K = 5
class Local:
    def get(self):
        return K

def f(x):
    return Local().get() + x / 0

print(Carried(value=f).write(sys.argv[2]), end="")
"""


@pytest.mark.parametrize("how", ["file", "-c", "-"])
def test_functions_of_a_script_are_carried(tmp_path, how) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = {"file": [str(script)], "-c": ["-c", SCRIPT], "-": ["-"]}[how]
    source = Path(__file__).parents[4] / "src"
    done = subprocess.run(
        [sys.executable, *command, str(Path(__file__).parents[1]), str(tmp_path / "x.rec")],
        env={"PYTHONPATH": str(source)},
        input=SCRIPT if how == "-" else "",
        capture_output=True,
        text=True,
        check=True,
    )
    script.unlink()
    record = Record.of(Path(done.stdout).read_bytes())
    for magic in [HERE, ELSEWHERE] if how == "file" else [HERE]:
        shelf = Shelf(record.table, record.read, magic)
        rebuilder = Rebuilder(record.table, shelf)
        copy = rerun.rebuild(record.table, record.blobs, rebuilder)["value"]
        assert copy.__module__ == "__main__"
        with pytest.raises(ZeroDivisionError) as caught:
            copy(1)
        shown = "".join(traceback.format_exception(caught.value))
        assert "line 12, in f" in shown
        has_source = how == "file" or (how == "-c" and sys.version_info >= (3, 13))
        assert ("return Local().get() + x / 0" in shown) == has_source


# --- lines ---


@pytest.mark.parametrize("magic", [HERE, ELSEWHERE])
def test_tracebacks_show_file_line_and_text_where_the_file_is_gone(
    tmp_path, monkeypatch, magic
) -> None:
    path = tmp_path / f"vanishing{magic}.py"
    path.write_text(
        "import functools\n\n\ndef outer(x):\n    # a comment\n    def inner():\n"
        "        return [\n            1,\n            x / 0,  # here\n        ]\n"
        "    return inner()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__(path.stem)
    carried = Carried(value=module.outer)
    path.unlink()
    linecache.clearcache()
    with pytest.raises(ZeroDivisionError) as caught:
        carried.build(magic)["value"](1)
    shown = "".join(traceback.format_exception(caught.value))
    assert f'File "{path}", line 11, in outer\n    return inner()' in shown
    assert f'File "{path}", line 9, in inner\n    x / 0,  # here' in shown
    assert "~~^~~" in shown


def test_code_that_was_recorded_is_what_linecache_shows_over_another_file(
    tmp_path, monkeypatch
) -> None:
    path = tmp_path / "overwritten.py"
    path.write_text("\ndef f(x):\n    return x / 0  # old\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import overwritten

    carried = Carried(value=overwritten.f)
    path.write_text("something = 'else'\n" * 5)
    linecache.clearcache()
    copy = carried.build(ELSEWHERE)["value"]
    with pytest.raises(ZeroDivisionError) as caught:
        copy(1)
    assert "return x / 0  # old" in "".join(traceback.format_exception(caught.value))


# --- nothing runs ---


def test_encoding_runs_nothing_of_the_users() -> None:
    ran = []

    class Trap:
        def __getattribute__(self, name):
            ran.append(name)
            return object.__getattribute__(self, name)

        def __eq__(self, other):
            ran.append("==")
            return True

        def __hash__(self):
            ran.append("hash")
            return 1

        def __repr__(self):
            ran.append("repr")
            return ""

        @property
        def __class__(self):
            ran.append("class")
            return int

        @property
        def prop(self):
            ran.append("prop")

    trap = Trap()

    def uses(x=trap, *, y=trap):
        return trap.prop, x, y

    uses.mark = trap
    Carried(value=[uses, functools.partial(uses, trap), trap])
    assert ran == []


def test_a_function_of_a_dead_module_is_kept() -> None:
    module = types.ModuleType("short_lived")
    exec("K = 1\ndef f():\n    return K", module.__dict__)
    function = module.f
    del module
    assert Carried(value=function).build()["value"]() == 1


def test_source_of_nested_functions_is_kept_once() -> None:
    up, now = make_counter(1)
    carried = Carried(value=[make_counter, up, now])
    assert carried.source().count("nonlocal count") == 1
    assert carried.source().count("def make_counter") == 1


def test_an_argument_of_a_library_that_is_missing_is_named() -> None:
    carried = Carried(value=textwrap.dedent)
    node = nodes.Library("no_such_package.inner", "thing")
    with pytest.raises(CannotReplay, match="no_such_package.inner.thing") as caught:
        find_in_library(node)
    assert caught.value.slug == "replay-missing-library"
    with pytest.raises(CannotReplay, match=r"textwrap\.nothing"):
        find_in_library(nodes.Library("textwrap", "nothing"))
    assert carried.build()["value"] is textwrap.dedent
    assert "no_such_package" not in sys.modules
