"""Autocast that is set by hand is refused: a graph wouldn't set it again."""

from __future__ import annotations

import pytest
import torch

import tripwire

W = torch.ones(3, 3)
set_enabled = torch.set_autocast_enabled  # a name bound before any trace


@pytest.fixture(autouse=True)
def autocast_as_it_was():
    yield
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)


def enabled(x):
    torch.set_autocast_enabled("cpu", True)
    try:
        return x @ W
    finally:
        torch.set_autocast_enabled("cpu", False)


def by_a_name_bound_before(x):
    set_enabled("cpu", True)
    y = x @ W
    set_enabled("cpu", False)
    return y


def by_the_old_name(x):
    torch.set_autocast_cpu_enabled(True)
    y = x @ W
    torch.set_autocast_cpu_enabled(False)
    return y


def dtype(x):
    with torch.autocast("cpu"):
        torch.set_autocast_dtype("cpu", torch.float16)
        return x @ W


def off_inside(x):
    with torch.autocast("cpu"):
        torch.set_autocast_enabled("cpu", False)
        y = x @ W
        torch.set_autocast_enabled("cpu", True)
        return y, x @ W


def around_a_context(x):
    torch.set_autocast_enabled("cpu", True)
    with torch.autocast("cpu", enabled=False):
        y = x * 2
    z = y @ W
    torch.set_autocast_enabled("cpu", False)
    return z


def only_before_a_context(x):
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_enabled("cpu", True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ W
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    return y


PROGRAMS = [
    enabled,
    by_a_name_bound_before,
    by_the_old_name,
    dtype,
    off_inside,
    around_a_context,
    only_before_a_context,
]


def dtypes(result):
    return [one.dtype for one in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_every_call_is_cast_like_the_plain_one(fn, backend, caplog) -> None:
    compiled, x = tripwire.compile(fn, backend=backend), torch.ones(2, 3)
    for _ in range(3):
        assert dtypes(compiled(x)) == dtypes(fn(x))
        assert not torch.is_autocast_enabled("cpu")
    assert "[torch-state-changed]" in caplog.text
    with pytest.raises(tripwire.CannotTrace, match="with torch.autocast"):
        tripwire.compile(fn, backend=backend, fullgraph=True)(x)


def test_contexts_are_compiled() -> None:
    def f(x):
        with torch.autocast("cpu"):
            y = x @ W
            with torch.autocast("cpu", enabled=False):
                z = x @ W
            return y, z, x @ W

    compiled, x = tripwire.compile(f, backend="aot_eager", fullgraph=True), torch.ones(2, 3)
    for _ in range(3):
        assert dtypes(compiled(x)) == dtypes(f(x))
    assert compiled.statistics().hits == 2
