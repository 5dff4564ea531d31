"""Numbers in lists and tuples, passed or held, stay open; and so do tensors that a list carries."""

import collections
import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from support import check_same

import tripwire
from tripwire.values.numbers import is_open

BACKENDS = ["eager", "aot_eager"]
CALLS = 12
Range = collections.namedtuple("Range", "low high")


@dataclass(frozen=True)
class Betas:
    betas: tuple = (0.9, 0.99)


def x():
    return torch.arange(3.0) + 1


def keep(value):
    return copy.deepcopy(value)


def passed(function, make):
    """Calls with arguments that `make(i)` makes; they are looked at afterwards."""

    def call(run, i):
        given = make(i)
        return run(x(), *given), keep(given)

    return function, call


def halve(x, scales):
    scales[0] *= 0.5
    scales.append(1.5)
    return x * scales[0]


def swap(x, pair):
    pair[0], pair[1] = pair[1], pair[0]
    return x * pair[0]


PASSED = {
    "a list": passed(lambda x, s: sum(x * one for one in s), lambda i: ([0.5 + i, 0.25 * i + 1],)),
    "a tuple": passed(lambda x, b: x * b[0] + (1 - b[1]) * x, lambda i: ((0.9 - i, 0.1 + i),)),
    "in tuples": passed(lambda x, c: x * c[0][1] + c[1]["b"][0], lambda i: (((1, i), {"b": [i]}),)),
    "a named tuple": passed(lambda x, r: (x + r.low) * r.high, lambda i: (Range(0.5, 1.5 + i),)),
    "a frozen dataclass": passed(
        lambda x, c: x * c.betas[0] + c.betas[1], lambda i: (Betas((0.1 + i, 2.0)),)
    ),
    "groups": passed(
        lambda x, groups: [x * g["lr"] * g["betas"][0] for g in groups],
        lambda i: ([{"lr": 0.1 / (i + 1), "betas": (0.9, 0.5)}, {"lr": 0.2, "betas": (i, 1)}],),
    ),
    "*args": passed(lambda x, *ws: sum(w * x for w in ws), lambda i: (0.1 + i, 0.2 * i + 1)),
    "a list of sizes": passed(lambda x, s: x.expand(s).sum(0), lambda i: ([2 + i, 3],)),
    "a list that is written": passed(halve, lambda i: ([0.5 + i, 0.25],)),
    "a list that is turned round": passed(swap, lambda i: ([0.5 + i, 0.25 + 2 * i],)),
    "with words in it": passed(
        lambda x, c: x.relu() * c[1] if c[0] == "relu" and c[2] is None else x,
        lambda i: (["relu", 0.5 + i, None],),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PASSED)
def test_numbers_in_containers_that_are_passed_are_traced_twice(name, backend) -> None:
    function, call = PASSED[name]
    compiled = tripwire.compile(function, backend=backend, fullgraph=True)
    for i in range(1, CALLS):
        check_same(call(function, i), call(compiled, i))
    assert compiled.statistics().traces == 2


def build_held():
    """Functions with something that they hold, and what is done to it before each call."""
    counts, scales, pair = [0, 5], [0.5, 0.25], SimpleNamespace(state=(0, 1.0))
    config, rows, last = {"betas": (0.9, 0.5)}, [[1, 2], [3, 4]], collections.deque([1, 2], 2)
    two = SimpleNamespace(a=[1, 2])
    two.b = two.a
    ranges = SimpleNamespace(r=Range(1, 2.0))

    def count(x):
        counts[0] += 1
        return x * counts[0] + counts[1]

    def decay(x):
        scales[:] = [one * 0.5 + 1 for one in scales]
        return x * scales[0]

    def advance(x):
        n, s = pair.state
        pair.state = (n + 1, s * 0.9)
        return x * s + n

    def below(x):
        rows[1][0] += 1
        return x * rows[1][0] + rows[0][1]

    def push(x):
        last.append(last[-1] + 1)
        return x * last[0]

    def by_other_name(x):
        two.a[0] += 1
        return x * two.b[0]

    def replace(x):
        ranges.r = ranges.r._replace(low=ranges.r.low + 1)
        return x * ranges.r.low

    return {
        "a counter in a list": (count, lambda i: None, lambda: list(counts)),
        "a list that is written whole": (decay, lambda i: None, lambda: list(scales)),
        "a list that others write": (
            lambda x: x * scales[0] + max(scales),
            lambda i: scales.__setitem__(0, 0.5 + i),
            lambda: list(scales),
        ),
        "a tuple that is replaced": (advance, lambda i: None, lambda: pair.state),
        "a tuple that others replace": (
            lambda x: x * config["betas"][0] + config["betas"][1],
            lambda i: config.update(betas=(0.9 + i, 0.5)),
            lambda: dict(config),
        ),
        "a list of lists": (below, lambda i: None, lambda: keep(rows)),
        "a deque": (push, lambda i: None, lambda: list(last)),
        "a list of two names": (by_other_name, lambda i: None, lambda: (two.a, two.b)),
        "a named tuple": (replace, lambda i: None, lambda: ranges.r),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", build_held())
def test_numbers_in_containers_that_are_held_are_traced_twice(name, backend) -> None:
    plain, change_plain, look_plain = build_held()[name]
    function, change, look = build_held()[name]
    compiled = tripwire.compile(function, backend=backend)
    for i in range(CALLS):
        change_plain(i)
        change(i)
        check_same(plain(x()), compiled(x()))
        assert repr(look_plain()) == repr(look())
    assert compiled.statistics().traces == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_a_list_carries_grow_in_compiled_code(backend) -> None:
    def build():
        cache = [None, torch.ones(2, 1, 3)]

        def attend(x):
            for i in range(2):
                held = cache[i]
                cache[i] = x if held is None else torch.cat([held, x], 1)
                x = x + (x @ cache[i].mT).softmax(-1) @ cache[i]
            return x

        return attend, cache

    (plain, expected), (function, cache) = build(), build()
    compiled = tripwire.compile(function, backend=backend)
    for seed in range(CALLS):
        given = torch.randn(2, 1, 3, generator=torch.Generator().manual_seed(seed))
        check_same(plain(given), compiled(given))
        check_same(expected, cache)
    assert compiled.statistics().traces <= 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("held", ["tuple", "list", "dict", "argument"])
def test_what_a_call_is_first_passed_has_the_sizes_open_that_are_known_to_vary(
    held, backend
) -> None:
    def attend(x, past, more=None):
        k, v = (past, more) if held == "argument" else past.values() if held == "dict" else past
        k, v = torch.cat([k.mT, x], 1), torch.cat([v.mT, x], 1)
        return (x @ k.mT).softmax(-1) @ v

    def decode(x, past, more=None):
        return x * 2 if past is None else attend(x, past, more)

    compiled = tripwire.compile(decode, backend=backend)
    for length in (5, 7, 4, 6):
        given = torch.randn(2, length, 3)
        check_same(decode(given, None), compiled(given, None))
        k, v = given.mT, given.mT + 1  # of another form than those that decoding makes
        past = {"tuple": (k, v), "list": [k, v], "dict": {"k": k, "v": v}, "argument": k}[held]
        more = (v,) if held == "argument" else ()
        one = torch.randn(2, 1, 3)
        check_same(decode(one, past, *more), compiled(one, past, *more))
    assert compiled.statistics().traces == 3  # the second is for all lengths of what is passed


def test_an_element_that_others_replace_is_the_next_calls() -> None:
    held = [torch.zeros(3), torch.ones(3)]

    def add(x):
        held[0] = held[0] + x
        return held[0] * held[1]

    compiled = tripwire.compile(add, backend="eager")
    total, factor = torch.zeros(3), torch.ones(3)
    for i in range(CALLS):
        if i == 5:
            factor = held[1] = torch.full((3,), 4.0)
        if i == 7:
            total = held[0] = torch.full((3,), 2.0)
        total = total + x()
        check_same(total * factor, compiled(x()))
        check_same(total, held[0])


def test_a_tuple_that_is_handed_back_is_the_one_that_was_passed() -> None:
    compiled = tripwire.compile(lambda x, t: (x * t[0], t), backend="eager", fullgraph=True)
    for i in range(4):
        given = (0.5 + i, 3)
        assert compiled(x(), given)[1] is given
    assert compiled.statistics().traces == 2


def test_code_that_asks_which_tuple_it_has_gets_those_that_are_there() -> None:
    first = (0.5, 1)
    held = SimpleNamespace(t=first)

    def which(x, t):
        return x * held.t[0] + t[0], t is first, t is held.t

    compiled = tripwire.compile(which, backend="eager")
    for i in range(CALLS):
        held.t = (0.5 + i, 1)
        given = (first, held.t, (2.5 + i, 1))[i % 3]
        check_same(which(x(), given), compiled(x(), given))


def test_a_run_that_raises_leaves_no_open_number_in_a_list() -> None:
    held = [3.5, 1]

    def refuse(x):
        if held[0] > 5:
            raise ValueError("too much")
        return x * held[0]

    compiled = tripwire.compile(refuse, backend="eager")
    for i in range(4):
        held[0] = 3.5 + i
        if i < 2:
            compiled(x())
        else:
            with pytest.raises(ValueError, match="too much"):
                compiled(x())
        assert not any(map(is_open, held))
    assert held == [6.5, 1]


def test_strides_where_the_size_is_one_close_nothing() -> None:
    def merge(x):
        heads = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        return heads.reshape(heads.shape[0], -1, x.shape[1], 4).transpose(1, 2).reshape(1, -1, 8)

    compiled = tripwire.compile(merge, backend="eager", fullgraph=True)
    for length in (5, 7, 9, 4):
        given = torch.randn(1, length, 8)
        check_same(merge(given), compiled(given))
    assert compiled.statistics().traces == 2


@pytest.mark.parametrize("size", [1, 2])
def test_strides_that_python_reads_are_the_real_ones(size) -> None:
    def read(x):
        heads = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        merged = heads.reshape(heads.shape[0], -1, x.shape[1], 4)
        return merged * merged.stride()[0], merged.stride(), merged.is_contiguous()

    compiled = tripwire.compile(read, backend="eager")
    for length in (5, 7, 9, 4):
        given = torch.randn(size, length, 8)
        check_same(read(given), compiled(given))


def multiply(x, numbers):
    for number in numbers:
        x = x * number
    return x


def build_handed_out():
    """Functions that compute with a tuple that is held, and hand it out; and how to replace it.

    And what they store, in a list.
    """
    seen = []
    space, names, table = SimpleNamespace(t=(1.0, 2.0)), SimpleNamespace(r=Range(1.0, 2.0)), {}
    rows, last, cell = [(1.0, 2.0)], collections.deque([(1.0, 2.0)]), (1.0, 2.0)
    nested, kept = SimpleNamespace(t=((1.0, 2.0), 3)), SimpleNamespace(t=(1.0, 2.0), seen=seen)
    turned, two = SimpleNamespace(t=(1.0, 2.0)), SimpleNamespace(a=(1.0, 2.0), b=None)
    table["t"] = (1.0, 2.0)

    def change_cell(t):
        nonlocal cell
        cell = t

    def keep_it(x):
        kept.seen.append(kept.t)
        return multiply(x, kept.t)

    def turn(x):
        before, turned.t = turned.t, (turned.t[1] + 1, turned.t[0])
        return multiply(x, before), before, turned.t

    cases = {
        "an attribute": (
            lambda x: (multiply(x, space.t), space.t),
            lambda t: vars(space).update(t=t),
        ),
        "a named tuple": (
            lambda x: (x * names.r.low + names.r.high, names.r),
            lambda t: vars(names).update(r=Range(*t)),
        ),
        "in a dict": (lambda x: (multiply(x, table["t"]), table["t"]), lambda t: table.update(t=t)),
        "in a list": (
            lambda x: (multiply(x, rows[0]), rows[0]),
            lambda t: rows.__setitem__(0, t),
        ),
        "in a deque": (
            lambda x: (multiply(x, last[0]), last[0]),
            lambda t: last.__setitem__(0, t),
        ),
        "a closure variable": (lambda x: (multiply(x, cell), cell), change_cell),
        "in a tuple": (
            lambda x: (x * nested.t[0][1], nested.t[0], {"all": [nested.t]}),
            lambda t: vars(nested).update(t=(t, 3)),
        ),
        "stored": (keep_it, lambda t: vars(kept).update(t=t)),
        "replaced by the call": (turn, lambda t: vars(turned).update(t=t)),
        "held twice": (
            lambda x: (x * two.a[0] + two.b[1], two.a, two.b),
            lambda t: vars(two).update(a=t, b=t),
        ),
    }
    return {name: (*case, seen) for name, case in cases.items()}


PAIRS = [(2.0, 3.0), (3.0, 2.0), (2.0, 3.0), (5.0, 7.0), (2.0, 3.0), (4.0, 4.0)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", build_handed_out())
def test_a_tuple_that_is_held_and_handed_out_is_the_one_that_is_there(name, backend) -> None:
    function, put, seen = build_handed_out()[name]
    twin, put_twin, seen_by_twin = build_handed_out()[name]
    compiled = tripwire.compile(function, backend=backend, fullgraph=True)
    for pair in PAIRS:
        put(pair)
        put_twin(pair)
        for _ in range(3):
            check_same(twin(x()), compiled(x()))
            check_same(seen_by_twin, seen)
    assert compiled.statistics().traces == 2


def test_a_held_tuple_that_is_handed_out_is_itself() -> None:
    held = SimpleNamespace(t=(1.0, 2.0))
    compiled = tripwire.compile(lambda x: (x * held.t[0], held.t), backend="eager")
    for i in range(4):
        held.t = (0.5 + i, 2.0)
        for _ in range(3):
            assert compiled(x())[1] is held.t
    assert compiled.statistics().traces == 2


TWICE = {
    "passed twice": (lambda x, a, b: (x * a[0] + b[1], a, b), lambda t: (t, t)),
    "twice in a list": (lambda x, ts: (x * ts[0][0] + ts[1][1], ts[1]), lambda t: ([t, t],)),
    "twice in a tuple": (lambda x, ts: (x * ts[0][0] + ts[1][1], ts[1]), lambda t: ((t, t),)),
    "twice in a dict": (
        lambda x, d: (x * d["a"][0] + d["b"][1], d["b"]),
        lambda t: ({"a": t, "b": t},),
    ),
    "twice in an object": (
        lambda x, o: (x * o.a[0] + o.b[1], o.b),
        lambda t: (SimpleNamespace(a=t, b=t),),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TWICE)
def test_a_tuple_that_is_passed_twice_has_this_calls_numbers(name, backend) -> None:
    function, make = TWICE[name]
    compiled = tripwire.compile(function, backend=backend, fullgraph=True)
    for pair in PAIRS:
        for _ in range(3):
            check_same(function(x(), *make(pair)), compiled(x(), *make(pair)))
    assert compiled.statistics().traces == 2


EQUAL_BY_CHANCE = {
    "an item": lambda t, p: p.__setitem__(1, float(t.dim())),
    "a slice": lambda t, p: p.__setitem__(slice(None), [2.0, float(t.dim())]),
    "popped and appended": lambda t, p: (p.pop(), p.append(float(t.dim()))),
    "cleared and filled": lambda t, p: (p.clear(), p.extend((2.0, float(t.dim())))),
    "a number out of a tensor": lambda t, p: p.__setitem__(1, t.new_ones(()).item()),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EQUAL_BY_CHANCE)
def test_a_write_over_an_open_number_is_one_even_where_it_is_equal(name, backend) -> None:
    act = EQUAL_BY_CHANCE[name]

    def plain(t, p):
        for value in p:
            t = t * value
        act(t, p)
        return t * p[1]

    compiled = tripwire.compile(plain, backend=backend)
    known, twin = [2.0, 3.0], [2.0, 3.0]
    for turn in range(6):
        # The second call finds what the first one wrote, and writes it again.
        given, wanted = (known, twin) if turn < 2 else ([2.0, 3.0 + turn], [2.0, 3.0 + turn])
        check_same(compiled(x(), given), plain(x(), wanted))
        assert given == wanted
    assert tripwire.explain(compiled).hits >= 3


# --- containers that batches come in ---


class Batch(dict):
    pass


class Stack(list):
    pass


Pair = collections.namedtuple("Pair", "x scale")
BATCHES = {
    "a named tuple": (Pair, lambda b: (b.x, b.scale)),
    "a named tuple in a dict": (lambda x, s: {"a": Pair(x, s)}, lambda b: b["a"]),
    "a named tuple in another": (lambda x, s: Pair(Pair(x, 1), s), lambda b: (b.x.x, b.scale)),
    "an ordered dict": (
        lambda x, s: collections.OrderedDict(x=x, s=s),
        lambda b: (b["x"], b["s"]),
    ),
    "a default dict": (
        lambda x, s: collections.defaultdict(list, x=x, s=s),
        lambda b: (b["x"], b["s"]),
    ),
    "a dict's subclass": (lambda x, s: Batch(x=x, s=s), lambda b: (b["x"], b["s"])),
    "a list's subclass": (lambda x, s: Stack([x, s]), lambda b: (b[0], b[1])),
    "a deque": (lambda x, s: collections.deque([x, s]), lambda b: (b[0], b[1])),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_stay_open_in_whatever_holds_the_batch(name, backend) -> None:
    make, take = BATCHES[name]

    def mean(batch):
        x, scale = take(batch)
        return x.sum(0) / x.shape[0] + scale.sum()

    compiled = tripwire.compile(mean, backend=backend, fullgraph=True)
    for size in (4, 5, 6, 7, 8):
        batch = make(torch.randn(size, 3), torch.randn(size))
        torch.testing.assert_close(compiled(batch), mean(batch))
    assert compiled.statistics().traces == 2
