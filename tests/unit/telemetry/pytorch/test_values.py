from __future__ import annotations

import functools
import json
import types
import typing
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tripwire.telemetry import pytorch as t
from tripwire.telemetry.pytorch import TypeSafeSerializer


class Sub(torch.Tensor):
    pass


@functools.lru_cache
def cached(x):
    return x


KINDS = [
    (t.is_typing, [typing.Any, typing.Union, typing.Generic, int | str, typing.TypeVar("T")],
     [int, list[int], 3]),
    (t.is_numpy_int_type, [numpy.int32(1), numpy.uint8(1)], [1, numpy.float32(1), numpy.bool_(1)]),
    (t.is_numpy_float_type, [numpy.float16(1), numpy.float64(1)], [1.0, numpy.int8(1)]),
    (t.is_numpy_ndarray, [numpy.ones(1)], [[1], numpy.ma.masked_array([1]), numpy.float32(1)]),
    (t.is_function, [len, KeyError.__init__, str.upper, lambda: 0], [int, print.__call__, "x"]),
    (t.is_function_or_wrapper, [len, torch.ops.aten.add, torch.ops.aten.add.Tensor], [int]),
    (t.is_wrapper_or_member_descriptor,
     [list.append, list.__add__, types.FunctionType.__code__, [].__add__, type.__dict__["__mro__"]],
     [len, lambda: 0]),
    (t.is_lru_cache_wrapped_function, [cached, functools.cache(len)], [len, functools.lru_cache]),
    (t.istensor, [torch.ones(1), nn.Parameter(torch.ones(1))], [Sub([1.0]), 1, numpy.ones(1)]),
    (t.is_tensor, [torch.ones(1), Sub([1.0])], [1]),
    (t.is_lazy_module, [nn.LazyLinear(2)], [nn.Linear(1, 1), 3]),
    (t.is_namedtuple, [namedtuple("N", "a")(1)], [(1,), [1]]),
]  # fmt: skip


@pytest.mark.parametrize(("test", "yes", "no"), KINDS, ids=lambda v: getattr(v, "__name__", ""))
def test_each_kind_is_told_from_the_others(test, yes, no):
    assert all(map(test, yes))
    assert not any(map(test, no))


def test_istype_is_exact():
    assert t.istype({}, dict)
    assert not t.istype(OrderedDict(), dict)
    assert t.istype(1, (int, float))
    assert not t.istype(True, [int, float])


def test_cells_can_be_made():
    cell = t.make_cell(5)
    assert type(cell) is types.CellType
    assert cell.cell_contents == 5
    with pytest.raises(ValueError, match="empty"):
        t.make_cell().cell_contents


# --- as JSON -----------------------------------------------------------------------------------


def test_what_json_cant_hold_is_marked():
    @dataclass
    class Point:
        x: int

    found = json.loads(
        json.dumps(
            {
                "set": {2, 1},
                "dtype": object,
                "point": Point(3),
                (1, 2): "key",
                1: "number",
                "nan": float("nan"),
                "long": "x" * 20_000,
            },
            cls=TypeSafeSerializer,
        )
    )
    assert found["set"] == [1, 2]
    assert found["dtype"] == "<type: <class 'object'>>"
    assert found["point"] == {"x": 3}
    assert found["<tuple: (1, 2)>"] == "key"
    assert found["1"] == "number"
    assert found["nan"] == "<float: nan>"
    assert found["long"].endswith("… 20000 characters")


@given(
    st.recursive(
        st.one_of(
            st.none(), st.integers(), st.floats(), st.text(st.characters()), st.binary(), st.dates()
        ),
        lambda inner: st.one_of(
            st.lists(inner), st.dictionaries(st.integers() | st.text() | st.binary(), inner)
        ),
        max_leaves=10,
    )
)
def test_nothing_is_too_odd_to_serialise(value):
    json.loads(json.dumps(value, cls=TypeSafeSerializer))
