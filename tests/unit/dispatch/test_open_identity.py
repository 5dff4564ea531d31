"""`is` and `type` have Python's answers for numbers: where they may be asked, none is open."""

import collections
import dataclasses
import datetime
import enum
import math
import operator
import statistics
import types
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import check_compiles, check_same
from torch import nn
from unit.dispatch.sidebyside import check_twins

import tripwire

BACKENDS = ["eager", "aot_eager"]


def x():
    return torch.arange(3.0) + 1


def build_asked():
    """Functions that ask whether two numbers are one object, and how the numbers are replaced."""
    listed, table, last = [1, 2], {"a": 1, "b": 2}, collections.deque([1, 2])
    space, pair, a, b = SimpleNamespace(a=1, b=2), SimpleNamespace(t=(1, 2)), 1, 2

    def change_cells(left, right):
        nonlocal a, b
        a, b = left, right

    def put_listed(left, right):
        listed[:] = left, right

    return {
        "a list": (lambda x: x * listed[0] + 5 * (listed[0] is listed[1]), put_listed),
        "a dict": (
            lambda x: x * table["a"] + 5 * (table["a"] is table["b"]),
            lambda left, right: table.update(a=left, b=right),
        ),
        "a deque": (
            lambda x: x * last[0] + 5 * (last[0] is not last[1]),
            lambda left, right: last.extend((last.clear(), left, right)[1:]),
        ),
        "attributes": (
            lambda x: x * space.a + 5 * (space.a is space.b),
            lambda left, right: vars(space).update(a=left, b=right),
        ),
        "a tuple": (
            lambda x: x * pair.t[0] + 5 * (pair.t[0] is pair.t[1]),
            lambda left, right: vars(pair).update(t=(left, right)),
        ),
        "closure variables": (lambda x: x * a + 5 * (a is b), change_cells),
        "by operator.is_": (
            lambda x: x * listed[0] + 5 * operator.is_(listed[0], listed[1]),
            put_listed,
        ),
    }


ASKED = [(1, 2), (2, 3), (3, 4), (5, 5), (5, 6), (7, 7)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", build_asked())
def test_numbers_that_are_held_are_one_object_where_python_has_one(name, backend) -> None:
    function, put = build_asked()[name]
    compiled = tripwire.compile(function, backend=backend)
    for pair in ASKED:
        put(*pair)
        for _ in range(3):
            check_same(function(x()), compiled(x()))


FLOAT = 5.5
WORDS = SimpleNamespace(start="start", ndim="ndim")


def compare_slices(x, a, b):
    left, right = slice(a, 9), slice(b, 9)
    return x * left.start + 5 * (left.start is right.start) + len(WORDS.start)


ASKED_OF_PASSED = {
    "ints": (lambda x, a, b: x * a + 5 * (a is b), lambda a, b: (a, b)),
    "a list of ints": (lambda x, n: x * n[0] + 5 * (n[0] is n[1]), lambda a, b: ([a, b],)),
    "sizes": (
        lambda x, t: t.sum() + 5 * (t.shape[0] is t.shape[1]),
        lambda a, b: (torch.ones(a, b),),
    ),
    "numbers out of tensors": (
        lambda x, t: x * t[0].item() + 5 * (t[0].item() is t[1].item()),
        lambda a, b: (torch.tensor([a, b]),),
    ),
    "a size, and what has the name of an attribute elsewhere": (
        lambda x, t: t.shape[0] + 5 * x * (t.shape[0] is t.ndim) + len(WORDS.ndim),
        lambda a, b: (torch.ones(a, b),),
    ),
    "in slices that the run makes": (compare_slices, lambda a, b: (a, b)),
    "a float and a global": (
        lambda x, a: x * a + 5 * (a is FLOAT),
        lambda a, b: (FLOAT if a == b else a + 0.5,),
    ),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ASKED_OF_PASSED)
def test_numbers_that_are_passed_are_one_object_where_python_has_one(
    name, backend, dynamic
) -> None:
    function, make = ASKED_OF_PASSED[name]
    compiled = tripwire.compile(function, backend=backend, dynamic=dynamic)
    for pair in ASKED:
        for _ in range(3):
            check_same(function(x(), *make(*pair)), compiled(x(), *make(*pair)))


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


MISSING = object()
WORD = "sum"


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.last = torch.nn.Linear(3, 3)

    def forward(self, x, scale):
        return x * scale + (self.first is self.last)


@dataclasses.dataclass
class Rate:
    value: float
    steps: int


NOT_OF_NUMBERS = {
    "classes of data": lambda x, n, m=MISSING: x if Rate(n, 1) == Rate(0.5, 2) else x * n,
    "a word": lambda x, n, m=WORD: x * n if m is WORD else x,
    "a global": lambda x, n, m=MISSING: x * n if m is MISSING else x,
    "a member of an enum": lambda x, n, m=Mode.FAST: x * n if m is Mode.FAST else x,
    "a function of torch's": lambda x, n, m=torch.relu: x * n if m is torch.relu else x,
    "modules": Heads(),
}


@pytest.mark.parametrize("name", NOT_OF_NUMBERS)
def test_where_is_isnt_asked_of_numbers_they_stay_open(name) -> None:
    function = NOT_OF_NUMBERS[name]
    compiled = tripwire.compile(function, backend="eager", fullgraph=True)
    for i in range(1, 6):
        check_same(function(x(), 0.5 + i), compiled(x(), 0.5 + i))
    assert compiled.statistics().traces == 2


# --- functions that could tell, and that start when something is open already ---


def _is_int(x, n):
    return x * 2 if type(n) is int else x


def _is_same(x, n):
    m = n + 0
    return x * 2 if n is m else x


def _by_table(x, n):
    return {int: x * 2, float: x * 3}[type(n)]


def _in_a_list(x, n):
    return x * sum(type(one) is int for one in [n, (n, 1)[0], {"n": n}["n"]])


def _in_a_closure(x, n):
    def ask():
        return type(n) is int

    return x * 2 if ask() else x


def _as_duration(x, n):
    return x * (datetime.timedelta(seconds=n) * n).total_seconds()


def _as_decimal(x, n):
    return x * float(Decimal(n) * 2 + n)


def _as_exponent(x, n):
    return x * math.ldexp(1.0, n)


def _as_limit(x, n):
    return x * sum(collections.deque(range(9), maxlen=n))


def _as_sample(x, n):
    return x * statistics.mean([n, 1, 2]) + (n < np.float64(4.5)).sum()


def _as_seed(x, n):
    return x * torch.Generator().manual_seed(n).initial_seed()


class _Held:
    """What Python takes from these methods has to be a real int or float."""

    def __init__(self, n):
        self.n = n

    def __float__(self):
        return self.n * 2.0

    def __int__(self):
        return self.n + 1

    def __index__(self):
        return self.n

    def __hash__(self):
        return self.n


def _as_float(x, n):
    return x * float(_Held(n)) + math.sqrt(_Held(n))


def _as_int(x, n):
    return x * int(_Held(n))


def _as_index(x, n):
    return x * list(range(9))[_Held(n)] + len([1] * _Held(n))


def _as_hash(x, n):
    return x * hash(_Held(n))


TELLING = [
    _as_float,
    _as_int,
    _as_index,
    _as_hash,
    _is_int,
    _is_same,
    _by_table,
    _in_a_list,
    _in_a_closure,
]
TELLING += [_as_duration, _as_decimal, _as_exponent, _as_limit, _as_sample, _as_seed]


@pytest.mark.parametrize(
    ("tell", "backend", "dynamic"),
    [(tell, "eager", dynamic) for tell in TELLING for dynamic in (None, True)]
    + [(tell, "aot_eager", None) for tell in (_as_float, _as_index, _is_int)]
    + [
        pytest.param(tell, "aot_eager", None, marks=pytest.mark.slow)
        for tell in TELLING
        if tell not in (_as_float, _as_index, _is_int)
    ],
)
def test_a_function_that_could_tell_open_numbers_gets_plain_ones(tell, backend, dynamic) -> None:
    def branch(x, n):
        return tell(x, n) if n > 3 else x * n

    def sized(x, n):
        return tell(x, x.shape[0]) if x.shape[0] > 3 else x * n

    for fn in (branch, sized, tell):
        compiled = tripwire.compile(fn, backend=backend, dynamic=dynamic)
        for n in (2, 3, 4, 4, 5, 6):
            x = torch.arange(1.0, 1 + n)
            check_same(fn(x, n), compiled(x, n))
        compiled = tripwire.compile(fn, backend=backend, dynamic=dynamic)
        for n in (3, 4, 5):
            x = torch.arange(1.0, 1 + n)
            check_same(fn(x, n), compiled(x, n))


def test_numbers_of_the_world_are_plain_ones_to_a_function_that_could_tell() -> None:
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps, self.kinds = 0, []

        def note(self):
            self.kinds.append(type(self.steps))

        def forward(self, x):
            self.steps += 1
            if self.steps > 3:
                self.note()
            return x * self.steps

    plain, seen = Counter(), Counter()
    compiled = tripwire.compile(seen, backend="eager")
    for _ in range(6):
        check_same(plain(torch.ones(2)), compiled(torch.ones(2)))
        assert seen.kinds == plain.kinds
        assert seen.steps == plain.steps


@pytest.mark.parametrize("take", [_as_float, _as_int, _as_index, _as_hash])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_numbers_of_the_world_are_plain_ones_where_python_takes_no_other(take, backend) -> None:
    held = types.SimpleNamespace(n=3)

    def call(x):
        return take(x, held.n)

    compiled = tripwire.compile(call, backend=backend)
    for step in range(8):
        held.n = 3 + step // 2
        check_same(call(torch.ones(2)), compiled(torch.ones(2)))
    assert compiled.statistics().hits >= 3


def test_variables_of_callers_are_plain_once_a_function_could_tell() -> None:
    def ask(n):
        return type(n)

    def call(x, n, *rest, **named):
        half = n / 2
        if n > 3:
            ask(n)
        kinds = list(map(ask, (n, half, *rest, *named.values())))
        return x * n, kinds

    compiled = tripwire.compile(lambda x, n, *rest, **named: call(x, n, *rest, **named))
    for n in (2, 3, 4, 5):
        check_same(call(torch.ones(2), n, n, k=n), compiled(torch.ones(2), n, n, k=n))


def test_a_type_that_no_number_has_may_be_asked_for() -> None:
    def fn(x, scale):
        if type(scale) is list:
            return x
        return x * scale if type(x) is torch.Tensor else x - scale

    check_compiles(fn, [(torch.ones(2), n) for n in (2, 3, 4, 5)], traces=2)


def test_a_type_is_passed_on_beside_other_arguments() -> None:
    def pick(cls, a, b):
        return a if cls is torch.Tensor else b

    def fn(x, a, b):
        return x * pick(type(x), a, b) + (type(x), a is b)[1]

    check_compiles(fn, [(torch.ones(2), n, 1.0) for n in (2.0, 3.0, 4.0)], traces=3)


class Layers:
    """What caches of installed packages look like."""

    def __init__(self) -> None:
        self.items = [[1.5], [2.5]]
        self.kinds = set()

    def name(self, i):
        self.kinds.add(type(self))
        return type(self.items[i]).__name__


def test_the_type_of_an_item_or_of_ones_own_object_may_be_asked_for() -> None:
    layers = Layers()

    def fn(x, n):
        return x * n, layers.name(0)

    check_compiles(fn, [(torch.ones(2), n) for n in (2, 3, 4, 5)], traces=2)


def test_the_type_of_an_item_that_is_a_number_is_told() -> None:
    def fn(x, pair):
        return x * 2 if type(pair[0]) is int else x

    compiled = tripwire.compile(fn, backend="eager")
    for n in (2, 3, 4.0, 5, 6.0):
        check_same(fn(torch.ones(2), [n, 1]), compiled(torch.ones(2), [n, 1]))


def test_names_of_types_may_be_asked_for() -> None:
    def fn(x, n):
        told = [
            (type(one).__name__, type(one).__qualname__, one.__class__.__name__)
            for one in (n, n + 1, n / 2, n * 0.5, -n, n // 2, (n, 1), x.shape, x.shape[0])
        ]
        return x * n, told

    calls = [(torch.ones(n + 1), n) for n in (2, 3, 4, 5)]
    check_compiles(fn, calls, traces=2)
    check_compiles(fn, [(torch.ones(2), n + 0.5) for n in (2, 3, 4, 5)], traces=2)


def test_types_may_be_printed() -> None:
    def fn(x, n):
        told = [
            f"{type(one)} {type(one) = } {type(one)!r} {type(one)!s}" + str(type(one))
            for one in (n, n + 1, n / 2, -n, (n, 1), x.shape[0])
        ]
        if not isinstance(n, (int, float)) or n < 0:
            raise TypeError(f"n is {type(n) = }")
        if repr(type(n)).startswith("<class 'torch."):
            return x, told
        return x * n, told

    check_compiles(fn, [(torch.ones(n + 1), n) for n in (2, 3, 4, 5)], traces=2)
    check_compiles(fn, [(torch.ones(2), n + 0.5) for n in (2, 3, 4, 5)], traces=2)
    compiled = tripwire.compile(fn, backend="eager")
    for n in (2, 3, 4):
        compiled(torch.ones(2), n)
    for n in (-1, -2.5):
        with pytest.raises(TypeError, match=rf"type\(n\) = <class '{type(n).__name__}'>"):
            compiled(torch.ones(2), n)


@pytest.mark.parametrize("number", [(2, 3, 4, 5), (2.5, 3.5, 4.5)])
def test_a_bool_is_one_or_zero_beside_open_numbers(number) -> None:
    def fn(x, n, flag):
        found = max(n, flag), min(n, flag), n > flag, n == flag, n + flag, flag - n, n * flag
        return x * max(n, flag), *found, x.shape[0] >= flag, x.shape[0] + flag

    for flag in (True, False):
        compiled = tripwire.compile(fn, backend="eager")
        for n in number:
            x = torch.ones(int(n))
            check_same(fn(x, n, flag), compiled(x, n, flag))
        assert compiled.statistics().hits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", ["2.5", "1000000", "nan"])
@pytest.mark.parametrize("name", build_asked())
def test_two_equal_numbers_of_state_are_told_apart(name, number, backend) -> None:
    make = int if number.isdigit() else float
    ask, put = build_asked()[name]
    compiled = tripwire.compile(ask, backend=backend)
    one = make(number)
    for other in (one, make(number), one, make(number), make(number), one):
        put(one, other)
        check_same(ask(x()), compiled(x()))


def test_the_cause_says_that_it_is_another_object() -> None:
    space = SimpleNamespace(a=2.5, b=2.5)
    compiled = tripwire.compile(lambda x: x * (space.a is space.b), backend="eager")
    compiled(x())
    space.b = float("2.5")
    compiled(x())
    (cause,) = compiled.statistics().causes
    assert (cause.old, cause.new) == ("2.5", "2.5, another object")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", ['"%*d" % (n, 3)', '"%.*f" % (n, 1.5)', '"%-*.*f|" % (n, n, 1.5)'])
def test_a_text_takes_its_width_from_a_number_that_varies(text, backend, tmp_path) -> None:
    program = f"""
def call(x, n):
    return x * n, {text}
def go(f, see):
    for n in (3, 4, 5, 6, 3):
        see(f(T(1), n))
"""
    check_twins(program, backend, tmp_path)


def a_global_of_numpys():
    holder = SimpleNamespace(n=np.float64(1))
    return lambda x: (x * holder.n, type(holder.n).__name__), lambda n: vars(holder).update(n=n)


def an_item_in_a_text():
    table = {"n": np.float64(1)}
    return lambda x: (x * table["n"], f"{type(table['n'])}"), lambda n: table.update(n=n)


def a_size_first():
    holder = SimpleNamespace(n=1.0)
    return lambda x: (x * holder.n, str(type(holder.n))), lambda n: vars(holder).update(n=n)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [a_global_of_numpys, an_item_in_a_text, a_size_first])
def test_a_float_of_numpys_that_varies_has_its_own_type_also_by_name(make, backend) -> None:
    fn, put = make()
    compiled = tripwire.compile(fn, backend=backend)
    for n in (1.0, np.float64(2), np.float64(3), 4.0, np.float64(5), np.float64(6)):
        put(n)
        expected = fn(x())
        assert str(compiled(x())) == str(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_argument_that_is_a_float_of_numpys_has_its_own_type_also_by_name(backend) -> None:
    compiled = tripwire.compile(lambda x, n: (x * n, type(n).__qualname__), backend=backend)
    for n in map(np.float64, range(1, 6)):
        assert compiled(x(), n)[1] == "float64"
