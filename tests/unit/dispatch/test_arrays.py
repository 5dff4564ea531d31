"""Arrays of NumPy's that a call read can be resized, replaced and changed as in plain Python."""

from __future__ import annotations

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

pytest.importorskip("numpy")

_WORLD = """
import numpy as np

class O:
    pass

class S:
    __slots__ = ("k",)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = np.array([1.0, 2.0, 3.0])

    def forward(self, x):
        return x * float(self.k.sum()) + len(self.k)

class C:
    k = np.array([1.0, 2.0, 3.0])

def make():
    k = np.array([1.0, 2.0, 3.0])

    def get():
        return k

    def put(value):
        nonlocal k
        k = value

    return get, put

k = np.array([1.0, 2.0, 3.0])
o, s, m = O(), S(), M()
o.k = np.array([1.0, 2.0, 3.0])
s.k = np.array([1.0, 2.0, 3.0])
d = {"k": np.array([1.0, 2.0, 3.0])}
held = [np.array([1.0, 2.0, 3.0])]
get, put = make()
two = np.array([1.0, 2.0, 3.0])
"""
PLACES = {
    "a global": "k",
    "an attribute": "o.k",
    "a slot": "s.k",
    "a dict": "d['k']",
    "a list": "held[0]",
    "a class": "C.k",
    "a module": "m.k",
}
WRITES = {
    "resized": "{0}.resize((4,), refcheck=False)",
    "smaller": "{0}.resize(2, refcheck=False)",
    "resized if nobody has it": "{0}.resize((5,))",
    "changed": "{0}[1] = 7.0",
    "equal": "{0} = {0}.copy()",
    "replaced": "{0} = np.array([4.0, 5.0])",
    "reshaped": "{0}.shape = (3, 1)",
    "gone": "{0} = None; {0} = np.array([9.0, 9.0, 9.0])",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", PLACES)
def test_an_array_that_was_read_may_be_resized_and_replaced(
    place, write, backend, tmp_path
) -> None:
    path = PLACES[place]
    one, other = WRITES[write].format(path), WRITES["changed"].format(path)
    check_twins(
        _WORLD
        + f"""
def call(x):
    return x * float({path}.sum()) + len({path}), {path}.ndim

def go(f, see):
    for write in ("", "", {one!r}, "", {other!r}, ""):
        try:
            exec(write, globals())
            see(f(T()))
        except (ValueError, IndexError) as error:
            see(str(error))
""",
        backend,
        tmp_path,
        hits=1,
    )


READS = {
    "flags": ("k.flags.writeable", "k.setflags(write=False)", "k = k.copy()"),
    "strides": ("k.strides", "k = k[::-1].copy()[::-1]", "k = k.copy()"),
    "order": ("m2.flags.c_contiguous", "m2 = np.asfortranarray(m2)", "m2 = m2.T"),
    "identity": ("k is two", "k = two", "two = two.copy()", "k = two"),
    "two names of one": ("k.sum() + two.sum()", "two = k", "k[0] = 5.0", "two = k.copy()"),
    "in a cell": ("get().sum()", "get().resize(4, refcheck=False)", "put(np.ones(2))"),
    "in a function's cell": (
        "get.__closure__[0].cell_contents.sum()",
        *("get().resize(4, refcheck=False)", "put(np.ones(2))"),
    ),
    "freed in between": (
        "k.sum()",
        "k = None",
        "k = np.full(3, 2.0)",
        "k = None",
        "k = np.ones(3)",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", READS)
def test_who_reads_an_array_sees_how_it_lies_and_which_it_is(name, backend, tmp_path) -> None:
    read, *writes = READS[name]
    check_twins(
        _WORLD
        + f"""
m2 = np.arange(6.0).reshape(2, 3)

def call(x):
    return x * 2, str({read})

def go(f, see):
    for write in ("", "", *{writes!r}, ""):
        exec(write, globals())
        try:
            see(f(T()))
        except AttributeError as error:
            see(str(error))
""",
        backend,
        tmp_path,
        hits=1,
    )
