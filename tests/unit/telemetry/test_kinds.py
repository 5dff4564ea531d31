from __future__ import annotations

import functools
import types
import typing
import weakref
from collections import OrderedDict, namedtuple

import numpy
import pytest
import torch
from torch import nn

from tripwire import telemetry as t


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


# --- flat calls --------------------------------------------------------------------------------


def test_nested_inputs_are_flattened_around_a_graph():
    seen = []

    def graph(pair, named):
        return pair[0] * named["w"] + pair[1]

    def compile_graph(flat, inputs):
        seen.append([v.shape for v in inputs])
        return flat

    x, y, w = torch.ones(2), torch.full((2,), 3.0), torch.full((2,), 2.0)
    call = t.flatten_graph_inputs(graph, ([x, y], {"w": w}), compile_graph)
    assert seen == [[torch.Size([2])] * 3]
    torch.testing.assert_close(call([x, y], {"w": w}), torch.full((2,), 5.0))
    with pytest.raises(ValueError, match="when the graph was compiled"):
        call([x], {"w": w})


def test_a_boxed_call_frees_its_arguments_early():
    def graph(stolen, other):
        return stolen[0] + other

    alive = []

    def compile_graph(flat, inputs):
        def compiled(args):
            first = weakref.ref(args[0])
            args.clear()
            alive.append(first() is not None)
            return 7

        compiled._boxed_call = True
        return compiled

    stolen = [torch.ones(1)]
    call = t.flatten_graph_inputs(graph, ([torch.ones(1)], torch.ones(1)), compile_graph, steal=[0])
    assert call(stolen, torch.ones(1)) == 7
    assert stolen == []
    assert alive == [False]


def test_calling_boxed_empties_the_list_whatever_the_function():
    args = [1, 2]
    assert t.call_boxed(lambda a, b: a + b, args) == 3
    assert args == []
    boxed = t.make_boxed_func(max)
    args = [1, 5]
    assert t.call_boxed(boxed, args) == 5
    assert args == []
