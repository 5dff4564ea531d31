"""Facts about Python and torch, each tested by name."""

import contextlib
import functools
import os
import sys
import threading

import pytest
import torch
import typing_extensions
from torch import nn
from torch._decomp import decompositions
from torch.fx.experimental.proxy_tensor import make_fx

import tripwire
from tripwire import env
from tripwire.tracing import state


def test_monitoring_is_there_from_3_12_on() -> None:
    assert hasattr(sys, "monitoring") == env.HAS_MONITORING


def test_the_newest_python_that_is_known_is_3_13() -> None:
    assert (sys.version_info[:2] <= (3, 13)) == env.IS_KNOWN_PYTHON


def test_torch_and_the_standard_library_are_library_files() -> None:
    assert env.is_library_file(torch.nn.functional.__file__)
    assert env.is_library_file(contextlib.__file__)
    assert env.is_library_file("<frozen importlib._bootstrap>")
    assert env.is_library_file(typing_extensions.__file__)  # on 3.12 `Union[int, str]` runs it


def test_third_party_packages_and_user_files_are_not() -> None:
    assert not env.is_library_file(pytest.__file__)
    assert not env.is_library_file(__file__)
    assert not env.is_library_file("<string>")


def test_library_modules_by_name() -> None:
    assert env.is_library_module("torch.nn")
    assert env.is_library_module("os.path")
    assert env.is_library_module("typing_extensions")
    assert not env.is_stdlib_module("typing_extensions")
    assert not env.is_library_module("torchvision")
    assert not env.is_library_module("transformers.models")
    assert not env.is_library_module("__main__")
    assert env.is_stdlib_module("logging")
    assert not env.is_stdlib_module("torch.distributions")


def test_own_files_and_dispatch_files_are_known() -> None:
    assert env.is_own_file(env.__file__)
    assert not env.is_own_file(__file__)
    assert env.is_dispatch_file(torch.overrides.__file__)


def test_paths_inside_torch_are_told_from_its_root() -> None:
    assert env.torch_path(torch.nn.functional.__file__) == "nn/functional.py"
    assert env.torch_path(os.__file__) is None


def test_nodes_appended_by_hand_are_as_create_node_makes_them(monkeypatch) -> None:
    assert env.CAN_APPEND_NODES

    late = torch.ones(4)  # an input that is met after the first calls

    def f(x):
        hidden = torch.cat([x, x * 2]).sin()
        return hidden.split(2), hidden + late

    graphs = []
    for by_hand in (True, False):
        monkeypatch.setattr(state, "CAN_APPEND_NODES", by_hand)
        graph = tripwire.trace(f, torch.ones(2)).graph
        graph.lint()
        graphs.append(
            [(n.name, n.op, str(n.args), str(n.kwargs), len(n.users)) for n in graph.nodes]
        )
        assert len(graph.nodes) == len(graphs[-1])
        assert [n.name for n in graph.find_nodes(op="call_method", target="sin")] == ["hidden"]
    assert graphs[0] == graphs[1]


def test_torch_fx_says_when_it_traces() -> None:
    seen = []

    def f(x):
        seen.append(env.is_fx_tracing())
        return x * 2

    torch.fx.symbolic_trace(f)
    f(torch.ones(1))
    assert seen == [True, False]


def test_make_fx_puts_wrappers_in_the_place_of_methods_of_modules_for_all_threads() -> None:
    plain = nn.Module.__call__, nn.Module.__getattr__
    found = []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.extend((nn.Module.__call__, nn.Module.__getattr__))
        return x + 1

    make_fx(f)(torch.ones(1))
    assert all(new is not old for new, old in zip(found, plain, strict=True))
    assert tuple(map(env.find_wrapped, found)) == plain
    assert tuple(map(env.passes_on, found)) == (True, True)


def test_torch_fx_traces_in_the_thread_that_make_fx_was_called_in() -> None:
    found = []

    def f(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: found.append(env.is_fx_tracing()))
        thread.start()
        thread.join()
        found.append(env.is_fx_tracing())
        return x + 1

    for pre_dispatch in (False, True):
        make_fx(f, pre_dispatch=pre_dispatch)(torch.ones(1))
    assert found == [False, True] * 2


def test_the_wrappers_of_fx_itself_do_not_only_pass_on() -> None:
    found = []

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(nn.Module.__call__)
            return x + 1

    torch.fx.symbolic_trace(Net())
    assert env.find_wrapped(found[0]) is nn.Module.__call__
    assert not env.passes_on(found[0])


def test_other_functions_wrap_nothing_of_torchs() -> None:
    assert env.find_wrapped(nn.Module.__call__) is None
    assert env.find_wrapped(functools.wraps(nn.Module.__call__)(lambda module: None)) is None


def test_an_lstm_that_compilers_take_apart_keeps_its_shape_from_torch_2_13_on() -> None:
    weights = torch.randn(12, 4), torch.randn(12, 3)
    state = torch.zeros(2, 3), torch.zeros(2, 3)
    _, last = decompositions.one_layer_lstm(torch.randn(5, 2, 4), state, weights, False)
    assert (last[0].shape == state[0].shape) == env.LSTM_KEEPS_ITS_SHAPE
