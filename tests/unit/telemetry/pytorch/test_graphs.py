from __future__ import annotations

import gc
import types
import weakref

import pytest
import torch

from tripwire.errors import TelemetryError
from tripwire.telemetry import pytorch as t
from tripwire.telemetry.pytorch import CleanupHook, CleanupManager


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


# --- names in globals --------------------------------------------------------------------------


class Owner:
    pass


def test_a_name_goes_with_its_owner():
    scope = vars(types.ModuleType("users"))
    owner, before = Owner(), CleanupManager.count
    hook = CleanupHook.create(scope, "__compiled_0", 5)
    CleanupManager.instance.add(owner, hook)
    assert scope["__compiled_0"] == 5
    assert CleanupManager.count == before + 1
    del owner
    gc.collect()
    assert "__compiled_0" not in scope
    assert CleanupManager.count == before
    hook()
    assert CleanupManager.count == before


def test_an_existing_name_is_never_written_over():
    scope = {"__name__": "users", "taken": 1}
    with pytest.raises(TelemetryError, match=r"'taken' exists in 'users' already"):
        CleanupHook.create(scope, "taken", 2)
    assert scope["taken"] == 1


def test_a_name_that_somebody_else_uses_by_now_is_left_alone():
    scope: dict[str, object] = {}
    hook = CleanupHook.create(scope, "name", object())
    scope["name"] = "theirs"
    hook()
    assert scope == {"name": "theirs"}
