"""What a run sets before it raises stays set, whatever function raises, also one patched by us."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch

import tripwire

NAME = "nowhere" + "_to_be_found"


def _import() -> object:
    import nowhere_to_be_found  # type: ignore[import-not-found]

    return nowhere_to_be_found


RAISING: dict[str, Callable[[torch.Tensor], object]] = {
    "a raise": lambda x: next(iter(())),
    "an import": lambda x: _import(),
    "import_module": lambda x: importlib.import_module(NAME),
    "getattr by a name": lambda x: getattr(x, NAME),
    "setattr by a name": lambda x: setattr(object(), NAME, 1),
    "hash": lambda x: hash([]),
    "the environment": lambda x: os.environ[NAME],
    "json": lambda x: json.dumps(object()),
    "math of a size": lambda x: math.sqrt(-x.shape[0]),
    "division by a size": lambda x: 1 // (x.shape[0] - x.shape[0]),
    "a torch call": lambda x: x.view(77),
    "a torch call in Python": lambda x: torch.nn.functional.linear(x, torch.ones(7, 7)),
    "an item": lambda x: (torch.ones(3) * x.sum()).item(),
}
SETTING: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)


@pytest.mark.parametrize("state", SETTING)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", RAISING)
def test_what_was_set_stays(kind, dynamic, state) -> None:
    act, (change, read) = RAISING[kind], SETTING[state]
    default = read()

    def call(x: torch.Tensor) -> object:
        change()
        return act(x)

    compiled = tripwire.compile(call, backend="eager", dynamic=dynamic)
    for size in (2, 3, 4):
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        with pytest.raises(Exception) as plain:
            call(torch.ones(size))
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        with pytest.raises(type(plain.value)):
            compiled(torch.ones(size))
        assert read() is not default
