"""Origin: what counts as a library's, and what as the user's."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import operator
import os
import random
import sys
import types
import typing

import numpy as np
import pytest
import torch
from torch import nn

import tripwire
from tripwire.recording.capture.origin import (
    find_library,
    find_library_namespace,
    is_installed_module,
    is_packaged_file,
)
from tripwire.recording.format.nodes import Library
from tripwire.recording.replay.rebuild import find_in_library


def mine():
    pass


class Mine:
    def method(self):
        pass


LIBRARY_THINGS = [
    torch,
    torch.nn.functional,
    os.path,
    torch.ops,
    json.dumps,
    nn.Linear,
    nn.Module.forward,
    nn.functional.relu,
    torch.add,
    torch.Tensor.add,
    torch._C._nn.gelu,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add,
    torch.get_rng_state,
    torch.float32.__class__,
    len,
    print,
    dict,
    dict.get,
    str.upper,
    object.__init__,
    type(None),
    types.FunctionType,
    types.GeneratorType,
    type({}.keys()),
    type(Ellipsis),
    collections.OrderedDict,
    collections.abc.Mapping,
    math.sqrt,
    operator.add,
    random.random,
    random._inst,
    functools.reduce,
    functools.partial,
    dataclasses.MISSING,
    typing.Any,
    typing.Optional,
    typing.Union,
    np.add,
    np.ndarray,
    np.linalg.norm,
    ValueError,
    sys.stdout,
    os.environ,
    tripwire.compile,
    pytest.fixture,
    dict.__dict__["fromkeys"],
]


def name_thing(thing: object) -> str:
    return getattr(thing, "__name__", type(thing).__name__)


@pytest.mark.parametrize("thing", LIBRARY_THINGS, ids=name_thing)
def test_a_librarys_thing_is_found_where_it_lies(thing) -> None:
    found = find_library(thing)
    if thing is dict.__dict__["fromkeys"]:  # only a method bound to the class can be had by name
        assert found is None
        return
    assert found is not None
    assert find_in_library(found) is thing


@pytest.mark.parametrize(
    "thing",
    [
        mine,
        Mine,
        Mine.method,
        Mine(),
        lambda: 0,
        sys.modules[__name__],
        types.ModuleType("torch"),
        nn.Linear(1, 1),
        torch.no_grad()(mine),
        functools.wraps(json.dumps)(lambda: 0),
        functools.lru_cache(mine),
        collections.namedtuple("X", "a"),
        [].append,
        3,
        "x",
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_is_the_users_is_not_a_librarys(thing) -> None:
    assert find_library(thing) is None


def test_a_function_that_a_library_wrapped_itself_is_found_where_it_put_it() -> None:
    import torch._dynamo  # noqa: F401  # it wraps manual_seed

    found = find_library(torch.manual_seed)
    assert found is not None
    assert find_in_library(found) is torch.manual_seed


def test_a_function_put_in_a_librarys_place_is_the_users(monkeypatch) -> None:
    @functools.wraps(json.dumps)
    def replaced(*args):
        return "mine"

    monkeypatch.setattr(json, "dumps", replaced)
    assert json.dumps.__module__ == "json"
    assert find_library(json.dumps) is None


def test_what_a_library_lost_is_no_longer_its_own(monkeypatch) -> None:
    before = json.dumps
    monkeypatch.setattr(json, "dumps", lambda: 0)
    assert find_library(before) is None


def test_files_of_libraries_are_packaged() -> None:
    assert is_packaged_file(torch.__file__)
    assert is_packaged_file(json.__file__)
    assert is_packaged_file(pytest.__file__)
    assert is_packaged_file(tripwire.__file__)
    assert is_packaged_file("<frozen os>")
    assert not is_packaged_file(__file__)
    assert not is_packaged_file("<stdin>")
    assert not is_packaged_file("<ipython-input-1>")


def test_a_module_is_installed_if_its_file_is() -> None:
    assert is_installed_module("torch.nn")
    assert is_installed_module("sys")
    assert is_installed_module("tripwire.recording")
    assert not is_installed_module(__name__)
    assert not is_installed_module("__main__")
    assert not is_installed_module("not_loaded")


def test_a_users_module_with_the_name_of_a_librarys(tmp_path, monkeypatch) -> None:
    module = types.ModuleType("wave")
    module.__file__ = str(tmp_path / "wave.py")
    monkeypatch.setitem(sys.modules, "wave", module)
    assert not is_installed_module("wave")
    assert find_library(module) is None


def test_a_namespace_is_a_librarys_only_if_it_is_that_very_dict() -> None:
    assert find_library_namespace(vars(json)) == Library("json", "__dict__")
    assert find_library_namespace(globals()) is None
    assert find_library_namespace({"__name__": "json"}) is None
    assert find_library_namespace({}) is None


def test_looking_runs_nothing_of_the_users() -> None:
    ran = []

    class Trap:
        def __getattribute__(self, name):
            ran.append(name)
            raise RuntimeError

    class Meta(type):
        def __getattribute__(cls, name):
            ran.append(name)
            raise RuntimeError

    cls = Meta("cls", (), {})
    ran.clear()
    assert find_library(Trap()) is None
    assert find_library(cls) is None
    assert ran == []


def test_a_function_that_a_library_wrapped_is_found_where_it_was_put(monkeypatch) -> None:
    @functools.wraps(torch.random.manual_seed)
    def wrapped(seed):
        return seed

    wrapped.__code__ = wrapped.__code__.replace(co_filename=torch.__file__)
    monkeypatch.setattr(torch, "manual_seed", wrapped)
    assert find_library(wrapped) == Library("torch", "manual_seed")
