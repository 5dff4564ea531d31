"""No open number outlives its run, whatever the program put it into."""

from __future__ import annotations

import collections
import contextvars
import fractions
import functools
import itertools
import json
import operator
import types
import uuid

import numpy
import pytest
import torch
from support import run_with_torch

import tripwire
from tripwire.values.numbers import is_open, iter_leaves

VARIABLE: contextvars.ContextVar = contextvars.ContextVar("number")
Pair = collections.namedtuple("Pair", "low high")


class Slots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


def _count(n):
    yield n
    yield n


def _start(n):
    numbers = _count(n)
    next(numbers)
    return numbers


def _with_defaults(n):
    def function(a=n, *, b=n):
        return a + b

    return function


def _product(n):
    made = itertools.product((1, 2), [n])
    next(made)
    return made


def _zip_longest(n):
    made = itertools.zip_longest([1, 2], [1], fillvalue=n)
    next(made)
    return made


# What a run makes of a number, and how to look into it.
KEPT = {
    "argument of a partial": (lambda n: functools.partial(max, n), lambda v: v.args),
    "keyword of a partial": (
        lambda n: functools.partial(max, key=n),
        lambda v: v.keywords.values(),
    ),
    "an error": (ValueError, lambda v: v.args),
    "an error's attribute": (lambda n: StopIteration(n), lambda v: (v.value, *v.args)),
    "slice": (lambda n: slice(n, None, n), lambda v: (v.start, v.step)),
    "frozenset": (lambda n: frozenset([n]), list),
    "tuple in a frozenset": (lambda n: frozenset([(n, 1)]), lambda v: next(iter(v))),
    "set": (lambda n: {n}, list),
    "key": (lambda n: {n: 1}, list),
    "tuple as a key": (lambda n: {(n, 1): 1}, lambda v: next(iter(v))),
    "named tuple": (lambda n: Pair(n, (n,)), lambda v: (v.low, *v.high)),
    "generator": (_count, list),
    "generator that began": (_start, list),
    "closure": (lambda n: lambda: n, lambda v: (v(),)),
    "defaults": (_with_defaults, lambda v: (*v.__defaults__, *v.__kwdefaults__.values())),
    "slot": (Slots, lambda v: (v.held,)),
    "bound method": (lambda n: types.MethodType(max, n), lambda v: (v.__self__,)),
    "property": (
        lambda n: property(functools.partial(max, n)),
        lambda v: v.fget.args,
    ),
    "proxy of a dict": (lambda n: types.MappingProxyType({"a": n}), lambda v: v.values()),
    "identifier": (lambda n: uuid.UUID(int=int(n)), lambda v: (v.int,)),
    "fraction": (lambda n: fractions.Fraction(int(n)), lambda v: (v.numerator,)),
    "moment": (lambda n: numpy.datetime64(int(n), "s"), lambda v: (int(v.astype(int)),)),
    "itemgetter": (operator.itemgetter, lambda v: v.__reduce__()[1]),
    "itemgetter of two": (lambda n: operator.itemgetter(n, 0), lambda v: v.__reduce__()[1]),
    "methodcaller": (lambda n: operator.methodcaller("f", n), lambda v: v.__reduce__()[1]),
    "keyword of a methodcaller": (
        lambda n: operator.methodcaller("f", a=n),
        lambda v: v.__reduce__()[0].keywords.values(),
    ),
    "repeat": (itertools.repeat, lambda v: itertools.islice(v, 2)),
    "count": (itertools.count, lambda v: itertools.islice(v, 2)),
    "chain": (lambda n: itertools.chain([n], (n,)), list),
    "product": (lambda n: itertools.product([n], (n, 1)), lambda v: next(v)),
    "rest of a product": (_product, lambda v: next(v)),
    "zip": (lambda n: zip([n], (n,), strict=True), lambda v: next(v)),
    "what fills a zip": (_zip_longest, lambda v: next(v)),
    "map": (lambda n: map(abs, [n]), list),
    "iterator of a list": (lambda n: iter([n]), list),
    "iterator of a tuple": (lambda n: iter((n, n)), list),
    "iterator of a frozenset": (lambda n: iter(frozenset((n,))), list),
    "next of a frozenset": (lambda n: iter(frozenset((n,))).__next__, lambda v: (v(),)),
    "rest of a frozenset": (
        lambda n: iter(frozenset((n,))).__reduce__,
        lambda v: v()[1][0],
    ),
    "sum with a number": (lambda n: n.__add__, lambda v: (v(0),)),
    "ratio of a number": (lambda n: n.as_integer_ratio, lambda v: v()),
    "iterator of values": (lambda n: iter({"a": n}.values()), list),
    "end of an iterator": (lambda n: iter(lambda: 1, n), lambda v: v.__reduce__()[1][1:]),
    "static method": (staticmethod, lambda v: (v.__wrapped__,)),
    "alias": (lambda n: types.GenericAlias(list, (n,)), lambda v: v.__args__),
    "key of a sort": (functools.cmp_to_key(min), lambda v: (v.obj,)),
    "context variable": (VARIABLE.set, lambda v: (VARIABLE.get(),)),
    "tuple in a context variable": (lambda n: VARIABLE.set((n,)), lambda v: VARIABLE.get()),
}


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_plain(name, kind) -> None:
    make, look = KEPT[name]
    kept = []

    def call(x, n):
        kept.append(make(n))
        return x * n

    compiled = tripwire.compile(call, backend="eager")
    for n in map(kind, range(2, 7)):
        kept.clear()
        compiled(torch.ones(2), n)
        found = list(look(kept[0]))
        assert found
        assert not any(map(is_open, found))
        json.dumps(found)
        assert n in found


@pytest.mark.parametrize("cache", [functools.lru_cache, functools.cache, functools.lru_cache(2)])
@pytest.mark.parametrize("number", [2.0, 2, (2.0, 3), [2.0]])
def test_what_a_cached_function_remembers_is_plain(cache, number) -> None:
    space = {"number": number}
    exec("def read(): return number", space)
    read = cache(space["read"])

    def call(x):
        value = read()
        first = value if isinstance(value, (int, float)) else value[0]
        return x * first, value

    compiled = tripwire.compile(call, backend="eager")
    for turn in range(6):
        if turn in (2, 4):
            space["number"] = type(number)(
                number + turn if isinstance(number, (int, float)) else [n + turn for n in number]
            )
            read.cache_clear()
        want, got = call(torch.ones(2)), compiled(torch.ones(2))
        torch.testing.assert_close(got[0], want[0])
        assert json.dumps(got[1]) == json.dumps(want[1]) == json.dumps(space["number"])
        assert read() == space["number"]
        assert not is_open(read())
        assert read.cache_info().currsize == 1


def test_what_is_kept_is_plain_where_the_collector_was_frozen() -> None:
    """Servers call `gc.freeze` before they fork; the collector knows no holders then."""
    program = """
import gc, torch, tripwire
from tripwire.values.numbers import is_open, iter_leaves

class Held: pass

held, numbers, by_name = Held(), [], {}

def call(x, n):
    numbers.append(n)
    by_name["n"] = n
    held.n, held.nested = n * 2, (n, [n])
    return x * n, {"n": n}

compiled = tripwire.compile(call, backend="eager")
gc.collect()
gc.freeze()
for n in (2.0, 3.0, 4.0, 5.0):
    result = compiled(torch.ones(2), n)
    found = numbers[-1], by_name["n"], held.n, held.nested[0], held.nested[1][0], result[1]["n"]
    assert not any(map(is_open, found)), found
    assert found == (n, n, 2 * n, n, n, n), found
print("plain")
"""
    assert run_with_torch(program) == "plain"


RESULTS = {
    "a size": lambda x: x.shape[0],
    "a tuple": lambda x: (1, x.shape[0]),
    "tuples": lambda x: ((x.shape[0], 1), (1, x.shape[1] + 1)),
    "a list": lambda x: [x.shape[0], (x.shape[1],)],
    "a float": lambda x: (x.shape[0] / 2,),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_without_tensors_is_plain(name, backend) -> None:
    compiled = tripwire.compile(RESULTS[name], backend=backend, dynamic=True)
    for size in (4, 5, 6):
        got = compiled(torch.ones(size, 3))
        assert not any(map(is_open, iter_leaves(got)))
        assert repr(got) == repr(RESULTS[name](torch.ones(size, 3)))
