"""Of a list that is read by constant index alone, those places count, and nothing else."""

from __future__ import annotations

import types
import typing

import pytest
import torch
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire

# Each changes what is read and what isn't, in all the ways that a program has.
PROGRAMS = {
    "module's list": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = [1.0, 2.0, 3.0, 4.0]

    def forward(self, x):
        return x * self.table[1] + self.table[2]

m = M()

def call(x):
    return m(x)

def go(f, see):
    see(f(T())), see(f(T()))
    m.table[0] = 9.0
    see(f(T()))
    m.table[1] = 5.0
    see(f(T())), see(f(T()))
    m.table.append(7.0)
    see(f(T()))
    m.table.insert(0, 8.0)
    see(f(T()))
    m.table = list(m.table)
    see(f(T()))
    m.table = [1.0, 2.0, 3.0]
    see(f(T())), see(f(T()))
    m.table.reverse()
    see(f(T()))
    del m.table[2:]
    try:
        f(T())
    except IndexError as error:
        see(str(error))
    m.table.append(6.0)
    see(f(T()))
    m.table.sort()
    see(f(T())), see(f(T()))
""",
    "tensors in a list": """
held = [T(1), T(2), T(3)]

def call(x):
    return x * held[1]

def go(f, see):
    see(f(T())), see(f(T()))
    held[0] = T(8)
    see(f(T()))
    held[1] = T(9)
    see(f(T())), see(f(T()))
    held[1].add_(1)
    see(f(T()))
    held[0] = held[1]
    see(f(T()))
    held[2] = None
    see(f(T()))
    held.clear()
    held.extend([T(4), T(5)])
    see(f(T())), see(f(T()))
""",
    "a whole use beside it": """
held = [1.0, 2.0, 3.0]

def total():
    return sum(held)

def call(x):
    return x * held[1] + total()

def go(f, see):
    see(f(T())), see(f(T()))
    held[0] = 5.0
    see(f(T()))
    held.append(1.0)
    see(f(T())), see(f(T()))
""",
    "the same list under two names": """
one = [1.0, 2.0, 3.0]
two = one

def call(x):
    return x * one[1] * len(two)

def go(f, see):
    see(f(T())), see(f(T()))
    one.append(4.0)
    see(f(T()))
    one[1] = 7.0
    see(f(T())), see(f(T()))
""",
    "an index that varies, a slice, an end": """
held = [1.0, 2.0, 3.0]
place = 1

def call(x):
    return x * held[place] + held[-1] + held[0:2][1]

def go(f, see):
    global place
    see(f(T())), see(f(T()))
    held[1] = 5.0
    see(f(T()))
    held.append(6.0)
    see(f(T()))
    place = 2
    see(f(T())), see(f(T()))
""",
    "lists in lists": """
rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]

def call(x):
    return x * rows[1][0]

def go(f, see):
    see(f(T())), see(f(T()))
    rows[0][0] = 9.0
    see(f(T()))
    rows[1][1] = 9.0
    see(f(T()))
    rows[1][0] = 9.0
    see(f(T()))
    rows[1] = [7.0, 8.0]
    see(f(T())), see(f(T()))
    rows[0] = rows[1]
    see(f(T()))
""",
    "asked by value, by identity, for the end": """
held = [1, 2, 3]

def call(x):
    if 3 in held:
        x = x * 2
    if held[0] is held[1]:
        x = x + 5
    try:
        return x * held[3]
    except IndexError:
        return x * held[0]

def go(f, see):
    see(f(T())), see(f(T()))
    held[2] = 4
    see(f(T()))
    held.append(9)
    see(f(T())), see(f(T()))
""",
    "passed": """
def call(x, many, pair):
    return x * many[1] + pair[0]

def go(f, see):
    see(f(T(), [1.0, 2.0, 3.0], (T(1), T(2)))), see(f(T(), [1.0, 2.0, 3.0], (T(1), T(2))))
    see(f(T(), [5.0, 2.0, 3.0], (T(1), None)))
    see(f(T(), [5.0, 2.0], (T(1),)))
    see(f(T(), [5.0, 4.0], (T(3), T(2))))
    see(f(T(), [5.0, 4], (torch.ones(2, dtype=torch.float64), T(2))))
    see(f(T(), (5.0, 4.0), [T(3), T(2)]))
    try:
        f(T(), [5.0], (T(1),))
    except IndexError as error:
        see(str(error))
    x = T(3)
    see(f(x, [x, x], (x, x))), see(f(x, [x, T(3)], (x, x)))
""",
    "passed and changed": """
def call(x, many):
    y = x * many[0]
    many[1] = y
    return y + many[1]

def go(f, see):
    for i in range(4):
        many = [float(i), None, 7]
        see(f(T(i), many), many)
        see(f(T(i), [2.0, None]))
""",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_places_of_a_list_that_were_read_are_kept_true(name, backend, tmp_path) -> None:
    check_twins(PROGRAMS[name], backend, tmp_path, hits=1)


def test_a_write_elsewhere_in_a_list_retires_nothing() -> None:
    table = list(range(1000))
    compiled = tripwire.compile(lambda x: x * table[5], backend="eager", fullgraph=True)
    x = torch.ones(2)
    compiled(x)
    for place in (0, 4, 6, 999):
        table[place] = -1
        assert torch.equal(compiled(x), x * 5)
    table.append(3)
    del table[900:]
    compiled(x)
    assert compiled.statistics().traces == 1
    table[5] = 6
    assert torch.equal(compiled(x), x * 6)


def test_other_tensors_of_a_list_that_is_passed_may_be_anything() -> None:
    compiled = tripwire.compile(lambda ts: ts[0].sin(), backend="eager", fullgraph=True)
    x = torch.ones(2)
    for others in ([x], [], [torch.ones(3), None], [x, x, x]):
        assert torch.equal(compiled([x, *others]), x.sin())
    assert compiled.statistics().traces == 1


# --- what a named tuple holds, reached without its name -----------------------------------------


class Setup(typing.NamedTuple):
    scales: dict
    shift: float

    def total(self):
        return self[0]["a"] + sum(self.scales["b"])


class Home:
    setup = Setup({"a": 2.0, "b": [1.0], "c": 1.0}, 3.0)


SETUP = Home.setup


def by_index(x):
    return x * SETUP[0]["a"] + SETUP[0]["b"][0]


def unpacked(x):
    scales, _ = SETUP
    return x * scales["a"] + scales["b"][0]


def iterated(x):
    for part in SETUP:
        if isinstance(part, dict):
            x = x * part["a"] + part["b"][0]
    return x


def by_a_method(x):
    return x * SETUP.total()


def as_a_dict(x):
    scales = SETUP._asdict()["scales"]
    return x * scales["a"] + scales["b"][0]


def by_name_here_and_by_index_there(x):
    return x * SETUP.scales["a"] + Home.setup[0]["b"][0]


def by_index_here_and_by_name_there(x):
    return x * Home.setup[0]["a"] + SETUP.scales["b"][0]


def passed_on(x):
    def take(setup):
        return setup[0]["b"][0]

    return x * SETUP.scales["a"] + take(Home.setup)


def with_an_argument(x, setup=SETUP):
    return x * setup[0]["a"] + setup[0]["b"][0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "read",
    [
        by_index,
        unpacked,
        iterated,
        by_a_method,
        as_a_dict,
        by_name_here_and_by_index_there,
        by_index_here_and_by_name_there,
        passed_on,
        with_an_argument,
        lambda x: with_an_argument(x, SETUP),
    ],
)
def test_what_a_named_tuple_holds_is_read_without_its_name(read, backend) -> None:
    scales = SETUP.scales
    scales.update(a=2.0, b=[1.0])
    compiled = tripwire.compile(read, backend=backend)
    writes = (
        lambda: scales.update(a=5.0),
        lambda: scales["b"].insert(0, 7.0),
        lambda: scales.update(b=[4.0]),
    )
    for write in ((lambda: None), *writes):
        write()
        for _ in range(2):
            torch.testing.assert_close(compiled(torch.ones(2)), read(torch.ones(2)))
    assert compiled.statistics().hits >= 1


def test_a_field_of_a_named_tuple_that_is_read_by_its_name_is_read_as_far_as_code_says() -> None:
    compiled = tripwire.compile(lambda x: x * SETUP.scales["a"], backend="eager")
    for n in range(4):
        compiled(torch.ones(2))
        SETUP.scales["c"] = float(n)
    assert compiled.statistics().traces == 1


SHELF = types.ModuleType("shelf")
CATALOGUE = types.ModuleType("catalogue")  # that the module is reached through
CATALOGUE.shelf = SHELF  # type: ignore[attr-defined]


def adds(x):
    SHELF.add(x)
    return x


def appends(x):
    return x, SHELF.append(x)


def extends(x):
    CATALOGUE.shelf.extend(x)
    return x


def gets(x):
    return x * SHELF.get("scale")


def gets_behind(x):
    return x * CATALOGUE.shelf.get("scale", 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("read", "name"),
    [
        (adds, "add"),
        (appends, "append"),
        (extends, "extend"),
        (gets, "get"),
        (gets_behind, "get"),
    ],
)
def test_a_module_may_have_functions_named_as_methods_of_containers(read, name, backend) -> None:
    seen: list[object] = []
    kept = [lambda *_, n=n: seen.append(n) or float(n) for n in range(3)]  # nothing dies
    kept.append({"scale": 7.0}.get if name == "get" else seen.append)  # type: ignore[arg-type]
    compiled = tripwire.compile(read, backend=backend)
    for function in kept:
        setattr(SHELF, name, function)
        for _ in range(3):
            got, noted = compiled(torch.ones(2)), seen.copy()
            seen.clear()
            torch.testing.assert_close(got, read(torch.ones(2)))
            assert str(noted) == str(seen)
            seen.clear()
    assert compiled.statistics().hits >= 6


def test_what_an_append_returns_needs_nothing_of_what_a_list_holds() -> None:
    layer, log = torch.nn.Linear(2, 2), []
    layer.register_forward_hook(lambda module, args, out: log.append(tuple(out.shape)))
    compiled = tripwire.compile(layer, backend="eager")
    for _ in range(5):
        compiled(torch.ones(2))
    assert (compiled.statistics().traces, log) == (1, [(2,)] * 5)


# --- the attributes of a tensor as a whole ------------------------------------------------------

WHOLE = {
    "vars": "len(vars(t))",
    "a copy": "str(dict(t.__dict__))",
    "keys": "[*t.__dict__]",
    "a dict to compare with": "t.__dict__ == {}",
    "whether there are some": "bool(t.__dict__)",
    "items": "sorted(t.__dict__.items())",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("read", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("where", ["an argument", "a global"])
def test_who_reads_all_attributes_of_a_tensor_sees_each(where, read, backend, tmp_path) -> None:
    passed = "t" if where == "an argument" else "x"
    check_twins(
        f"""
t = T()

def call({passed}):
    return {passed} * 2, {read}

def go(f, see):
    global t
    for write in ("", "", "t.tag = 1", "", "t.tag = 2", "t.other = 1", "del t.tag", "t = T()"):
        exec(write, globals())
        see(f(t if {passed == "t"} else T()))
""",
        backend,
        tmp_path,
    )
