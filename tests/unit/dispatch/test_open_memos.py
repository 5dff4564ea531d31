"""A function behind lru_cache finds for an open number what it keeps for the plain one."""

import functools

import pytest
import torch
from support import check_same

import tripwire
from tripwire.tracing import casts

pytestmark = pytest.mark.skipif(casts._casts is None, reason="a call of a C object needs C")


def build(form):
    """A cached function, and what it ran for."""
    ran = []

    def mask(n, *rest, scale=1):
        ran.append((n, type(n), scale))
        return torch.ones(int(n)) * scale

    caches = {
        "limited": functools.lru_cache(maxsize=2),
        "unlimited": functools.cache,
        "typed": functools.lru_cache(maxsize=None, typed=True),
    }
    return caches[form](mask), ran


CALLS = {
    "a size": lambda mask, x, n: x * mask(x.shape[0]),
    "a number": lambda mask, x, n: x * mask(n),
    "twice": lambda mask, x, n: x * mask(n) + 5 * (mask(n) is mask(x.shape[0])),
    "two": lambda mask, x, n: x * mask(n, x.shape[0]),
    "named": lambda mask, x, n: x * mask(n, scale=n),
    "computed": lambda mask, x, n: x * mask(n * 2 - n),
    "a float": lambda mask, x, n: x * mask(n / 1),
    "a tuple beside it": lambda mask, x, n: x * mask(n, (n, x.shape[0])),
}


@pytest.mark.parametrize("form", ["limited", "unlimited", "typed"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_open_numbers_and_plain_ones_share_what_is_cached(form, call, dynamic) -> None:
    sides = [build(form), build(form)]
    plain = functools.partial(CALLS[call], sides[0][0])
    mask = sides[1][0]
    compiled = tripwire.compile(
        lambda x, n: CALLS[call](mask, x, n), backend="eager", dynamic=dynamic
    )
    for n in (3, 3, 4, 3, 5, 3, 4, 3):
        check_same(plain(torch.arange(n) + 1.0, n), compiled(torch.arange(n) + 1.0, n))
        assert sides[0][1] == sides[1][1]
        left, right = (mask.cache_info() for mask, _ in sides)
        assert left[2:] == right[2:]


def test_cached_functions_are_called_as_ever_after_a_run() -> None:
    mask, ran = build("limited")
    compiled = tripwire.compile(lambda x: x * mask(x.shape[0]), backend="eager")
    for n in (3, 4, 5):
        compiled(torch.ones(n))
    assert [n for n, _, _ in ran] == [3, 4, 5]
    mask(5), mask(n=6)
    assert [n for n, _, _ in ran] == [3, 4, 5, 6]
    with pytest.raises(TypeError, match="unhashable"):
        mask([1])


ROUNDS = (3, 5, 4, 6) * 8
SCALE = {0: 1.0}


def build_scaled(**how):
    @functools.lru_cache(**how)
    def scaled(n, *rest, by=1.0):
        return torch.arange(n) * SCALE[0] * by

    return scaled


class Table:
    @functools.cache  # noqa: B019
    def __call__(self, n, *rest, by=1.0):
        return torch.arange(n) * SCALE[0] * by


MEMOS = {
    "unlimited": (lambda: build_scaled(maxsize=None), 8),
    "typed": (lambda: build_scaled(maxsize=None, typed=True), 8),
    "limited": (lambda: build_scaled(maxsize=16), None),  # what was asked for last stays longest
    "a method": (Table, 8),
    "two at most": (lambda: build_scaled(maxsize=2), None),  # each call puts one out
    "none at most": (lambda: build_scaled(maxsize=0), None),
}
MEMO_CALLS = {
    "a size": lambda memo, x: x * memo(x.shape[0]),
    "two of them": lambda memo, x: x * memo(x.shape[0]) + memo(x.shape[0] + 1).sum(),
    "by name": lambda memo, x: x * memo(x.shape[0], by=2.0),
    "with more": lambda memo, x: x * memo(x.shape[0], x.dtype),
}


@pytest.mark.parametrize("memo", MEMOS)
@pytest.mark.parametrize("call", MEMO_CALLS)
def test_a_memo_that_is_filled_leaves_what_was_found_in_it_compiled(memo, call) -> None:
    make, traces = MEMOS[memo]
    sides = make(), make()
    compiled = tripwire.compile(lambda x: MEMO_CALLS[call](sides[1], x), backend="eager")
    for n in ROUNDS:
        x = torch.randn(n)
        check_same(MEMO_CALLS[call](sides[0], x), compiled(x))
    if traces is not None:
        assert compiled.statistics().traces <= traces
        assert compiled.statistics().hits >= len(ROUNDS) - traces


def clear(memo):
    memo.cache_clear()


def fill(memo):
    for n in range(7, 20):
        memo(n)


def change(memo):
    memo(4).mul_(2)


@pytest.mark.parametrize("how", [{"maxsize": None}, {"maxsize": 16}, {"maxsize": 5}])
@pytest.mark.parametrize("disturb", [clear, fill, change])
def test_what_others_do_to_a_memo_is_seen(disturb, how, monkeypatch) -> None:
    sides = build_scaled(**how), build_scaled(**how)
    compiled = tripwire.compile(lambda x: x * sides[1](x.shape[0]), backend="eager")
    for turn, n in enumerate(ROUNDS + ROUNDS):
        if turn % 13 == 12:
            monkeypatch.setitem(SCALE, 0, SCALE[0] + 1)  # in what is cached by then, as it was
            for memo in sides:
                disturb(memo)
        x = torch.randn(n)
        check_same(x * sides[0](n), compiled(x))
    if how["maxsize"] is None:
        assert compiled.statistics().hits > 10


# --- asked about a tensor that the call makes -----------------------------------------------------

OFFSET = {0: 1.0}


class Waves:
    """A function behind lru_cache, and how often it ran."""

    def __init__(self, **how):
        self.ran = 0

        @functools.lru_cache(**how)
        def waves(n, mask=None, scale=1.0):
            self.ran += 1
            counted = torch.arange(4.0) if mask is None else mask.cumsum(0)
            return counted * n * scale + OFFSET[0]

        self.waves = waves


def ask_twice(waves, x):
    mask = x > 0
    first = waves(3, mask)
    return first + x + float(waves(3, mask) is first)


def ask_in_turn(waves, x):
    masks = x > 0, x > 1
    found = [waves(3, masks[i]) for i in (0, 1, 0)]
    return sum(found) + float(found[0] is found[2])


def ask_for_both(waves, x):
    return waves(3) + waves(3, x > 0) + waves(3)


def ask_for_the_other_last(waves, x):
    return waves(3, x > 0) + waves(3)


OWN_TENSORS = {
    "by position": lambda waves, x: waves(3, x > 0) + x,
    "by name": lambda waves, x: waves(3, mask=x > 0) + x,
    "twice": ask_twice,
    "in turn": ask_in_turn,
    "a size beside it": lambda waves, x: waves(x.shape[0], x > 0) + x,
    "a number beside it": lambda waves, x: waves(3, x > 0, scale=2) + waves(3, x > 0, scale=2.0),
    "an argument": lambda waves, x: waves(3, x) + x,
    "changed and handed on": lambda waves, x: waves(3, x.add_(1)) + x,
    "without one as well": ask_for_both,
    "without one behind it": ask_for_the_other_last,
}


@pytest.mark.parametrize("how", [{"maxsize": 1}, {"maxsize": 1, "typed": True}, {"maxsize": 8}])
@pytest.mark.parametrize("ask", OWN_TENSORS)
def test_a_memo_asked_about_tensors_of_the_calls_own_answers_as_ever(ask, how, monkeypatch) -> None:
    sides = Waves(**how), Waves(**how)
    compiled = tripwire.compile(lambda x: OWN_TENSORS[ask](sides[1].waves, x), backend="eager")
    for turn in range(9):
        if turn == 5:
            monkeypatch.setitem(OFFSET, 0, 2.0)
        if turn == 7:
            for side in sides:
                side.waves.cache_clear()
        x = torch.randn(4)
        check_same(OWN_TENSORS[ask](sides[0].waves, x.clone()), compiled(x.clone()))
        assert sides[0].ran == sides[1].ran


@pytest.mark.parametrize(
    "ask", ["by position", "by name", "twice", "in turn", "a number beside it"]
)
@pytest.mark.parametrize("how", [{"maxsize": 1}, {"maxsize": 8}, {"maxsize": None}])
def test_a_memo_asked_about_tensors_of_the_calls_own_is_one_trace(ask, how) -> None:
    one = Waves(**how)
    compiled = tripwire.compile(
        lambda x: OWN_TENSORS[ask](one.waves, x), backend="eager", fullgraph=True
    )
    for _ in range(3):
        compiled(torch.randn(4))
        one.waves(4)
        OWN_TENSORS[ask](one.waves, torch.randn(4))  # others fill it meanwhile
    assert (compiled.statistics().traces, compiled.statistics().hits) == (1, 2)


def test_a_memo_asked_about_a_tensor_that_the_call_leaves_behind_is_refused() -> None:
    one = Waves(maxsize=2)

    def ask(x):
        mask = x > 0
        return one.waves(3, mask) + x, mask

    compiled = tripwire.compile(ask, backend="eager")
    for _ in range(5):
        x = torch.randn(4)
        found, mask = compiled(x)
        check_same(ask(x), (found, mask))
        assert one.waves(3, mask) is one.waves(3, mask)
    assert compiled.statistics().hits == 0
