"""Flags: state of torch's that no dict holds; a call that finds it changed is traced anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import tripwire
from tripwire.reading.torchstate import PRECISIONS, SWITCHES, find_unusual, sample_backends

FUNCTORCH: Any = torch._C._functorch


@contextlib.contextmanager
def _in_a_transform() -> Iterator[None]:
    FUNCTORCH._grad_increment_nesting()
    try:
        yield
    finally:
        FUNCTORCH._grad_decrement_nesting()


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        yield


@contextlib.contextmanager
def _cast_to_half() -> Iterator[None]:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", before)


def is_profiled(x):
    return x + 1 if torch.autograd._profiler_enabled() else x - 1


def is_profiled_by_name(x):
    from torch.autograd import _profiler_enabled as runs

    return x + 1 if runs() else x - 1


def is_profiled_by_type(x):
    return x * torch._C._autograd._profiler_type().value


def is_profiled_in_a_helper(x):
    return is_profiled(x) * 3


def is_profiled_by_the_module(x):
    return x + 1 if torch.autograd.profiler._is_profiler_enabled else x - 1


def depth(x):
    return x + FUNCTORCH.get_dynamic_layer_stack_depth()


def has_interpreter(x):
    return x + 1 if torch._C._functorch.peek_interpreter_stack() is not None else x - 1


def level(x):
    return x + (FUNCTORCH.maybe_current_level() or 7)


def is_transformed(x):
    return x + 1 if torch._C._are_functorch_transforms_active() else x - 1


def wraps(x):
    return x + 1 if torch._C._functorch.is_gradtrackingtensor(x * 2) else x - 1


def may_hook(x):
    return x + 1 if torch._C._autograd._saved_tensors_hooks_is_enabled() else x - 1


def has_a_say(x):
    return x + 1 if torch._C._is_torch_function_enabled() else x - 1


def would_cast_to_half(x):
    return x + 1 if torch.get_autocast_dtype("cpu") is torch.float16 else x - 1


PROFILED = [
    is_profiled,
    is_profiled_by_name,
    is_profiled_by_type,
    is_profiled_in_a_helper,
    is_profiled_by_the_module,
]
TRANSFORMED = [depth, has_interpreter, level, is_transformed, wraps]
CASES: list[tuple[Callable[..., Any], Callable[[], AbstractContextManager[Any]]]] = [
    *((read, torch.autograd.profiler.profile) for read in PROFILED),
    *((read, _in_a_transform) for read in TRANSFORMED),
    (may_hook, _without_hooks),
    (has_a_say, torch._C.DisableTorchFunctionSubclass),
    (would_cast_to_half, _cast_to_half),
]


def _same(read: Callable[..., Any], compiled: Callable[..., Any], calls: int = 3) -> None:
    for n in range(calls):
        x = torch.full((2,), float(n))
        plain, got = read(x), compiled(x)
        assert type(got) is type(plain)
        assert got.tolist() == plain.tolist()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("read", "changed"), CASES, ids=[read.__name__ for read, _ in CASES])
def test_a_change_of_state_between_calls_is_followed(read, changed, backend) -> None:
    compiled = tripwire.compile(read, backend=backend)
    _same(read, compiled)
    with changed():
        _same(read, compiled)
    _same(read, compiled)
    assert tripwire.explain(compiled).hits >= 4


@pytest.mark.parametrize(("read", "changed"), [CASES[0], CASES[5]], ids=["profiler", "functorch"])
def test_inductors_code_follows_it_too(read, changed) -> None:
    compiled = tripwire.compile(read, backend="inductor")
    _same(read, compiled)
    with changed():
        _same(read, compiled)
    _same(read, compiled)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_callable_that_is_called_in_a_backward_sees_that_it_is(backend) -> None:
    def inside(x):
        return x + 1 if torch._C._current_graph_task_id() >= 0 else x - 1

    compiled = tripwire.compile(inside, backend=backend)
    _same(inside, compiled)
    seen = []

    def look(grad):
        seen.append((inside(grad).tolist(), compiled(grad).tolist()))

    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        x.register_hook(look)
        (x * 2).sum().backward()
    assert [got for _, got in seen] == [plain for plain, _ in seen] == [[3.0, 3.0]] * 3
    _same(inside, compiled)


KEPT = [switch for switch in (*SWITCHES, *PRECISIONS) if switch.path]


@pytest.mark.parametrize("switch", KEPT, ids=lambda switch: switch.path)
def test_entries_notice_each_switch_that_a_record_keeps(switch) -> None:
    before, now = sample_backends(), switch.find()
    others = (now is False,) if isinstance(now, bool) else ("ieee", "tf32")
    found = [(one, one.find()) for one in (switch, *PRECISIONS)]  # `allow_tf32` sets those, too
    switch.set(next(value for value in others if value != now))
    try:
        assert sample_backends() != before
        assert find_unusual([switch]) == {switch.path: switch.find()}
    finally:
        for one, value in found:
            one.set(value)
    assert sample_backends() == before
