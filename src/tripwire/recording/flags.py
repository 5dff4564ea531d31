"""Flags: the switches of torch.backends that change what a call computes, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

USUAL = {
    "cudnn.enabled": True,
    "cudnn.benchmark": False,
    "cudnn.deterministic": False,
    "cudnn.allow_tf32": True,
    "cuda.matmul.allow_tf32": False,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "mkldnn.enabled": True,
}


PRECISIONS = {
    "fp32_precision": "none",
    "cuda.matmul.fp32_precision": "none",
    "cudnn.fp32_precision": "none",
    "cudnn.conv.fp32_precision": "tf32",
    "cudnn.rnn.fp32_precision": "tf32",
    "mkldnn.fp32_precision": "none",
    "mkldnn.conv.fp32_precision": "none",
    "mkldnn.matmul.fp32_precision": "none",
    "mkldnn.rnn.fp32_precision": "none",
}
_T = TypeVar("_T", bool, str)


def find_unusual(usual: Mapping[str, _T]) -> dict[str, _T]:
    """Each that isn't as usual: a record has only these."""
    return {name: value for name, value in _read(usual).items() if value != usual[name]}


@contextlib.contextmanager
def flags_set(recorded: Mapping[str, _T], usual: Mapping[str, _T]) -> Iterator[None]:
    """These flags as they were recorded, all others as usual; put back afterwards."""
    before = _read(usual)
    wanted = {name: recorded.get(name, value) for name, value in usual.items()}
    changed = {name: value for name, value in wanted.items() if before.get(name, value) != value}
    try:
        for name, value in changed.items():
            setattr(*_find(name), value)
        yield
    finally:
        for name in changed:
            setattr(*_find(name), before[name])


def _read(usual: Mapping[str, _T]) -> dict[str, _T]:
    """Each that this torch has."""
    found = {}
    for name, value in usual.items():
        with contextlib.suppress(AttributeError, RuntimeError):  # absent, or set in a newer form
            found[name] = type(value)(getattr(*_find(name)))
    return found


def _find(name: str) -> tuple[Any, str]:
    """What holds a flag, and its name there."""
    import torch

    *path, last = name.split(".")
    owner: Any = torch.backends
    for step in path:
        owner = getattr(owner, step)
    return owner, last
