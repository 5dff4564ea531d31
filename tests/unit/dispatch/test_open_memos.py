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
