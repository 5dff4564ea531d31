"""Twins: a program and its compiled twin do the same things, and both say what they see.

A program is a text that defines `call`, which gets compiled, and `go(f, see)`, which calls it and
shows what came of that. Each twin has a module of its own, in a file, so that lines can be shown.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import tripwire

BACKENDS = ("eager", "aot_eager")
_NUMBERS = itertools.count()
_PRELUDE = """
import array, collections, dataclasses, functools, types, typing, weakref
import torch
import torch.nn.functional as F
from torch import nn

def T(value=1.0):
    return torch.full((2,), float(value))
"""


def check_twins(source: str, backend: str, folder: Path, *, hits: int = 0) -> tripwire.Explanation:
    """Plain and compiled see the same, and at least so many calls ran compiled code."""
    expected, _ = _play(source, None, folder)
    got, compiled = _play(source, backend, folder)
    assert got == expected
    explained = tripwire.explain(compiled)
    assert explained.hits >= hits
    return explained


def _play(source: str, backend: str | None, folder: Path) -> tuple[list[Any], Any]:
    path = folder / f"twin_{next(_NUMBERS)}.py"
    path.write_text(text := _PRELUDE + source)
    world = ModuleType(path.stem)
    sys.modules[path.stem] = world
    seen: list[Any] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(text, str(path), "exec", dont_inherit=True), world.__dict__)
            call = world.call if backend is None else tripwire.compile(world.call, backend=backend)
            world.go(call, lambda *values: seen.append(_write(values)))
    finally:
        del sys.modules[path.stem]
    return seen, call


def _write(value: Any) -> Any:
    """Plain data that is equal for equal values."""
    match value:
        case torch.Tensor():
            with torch._C.DisableTorchFunction():
                return type(value).__name__, value.requires_grad, value.detach().tolist()
        case dict():
            return type(value).__name__, [(_write(k), _write(v)) for k, v in value.items()]
        case list() | tuple():
            return type(value).__name__, [*map(_write, value)]
        case int() | float() | str() | None:
            return type(value).__name__, repr(value)
    return type(value).__name__
