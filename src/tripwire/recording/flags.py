"""Flags: the switches of torch.backends that change what a call computes, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

NAMES = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "mkldnn.enabled",
)


def read_flags() -> dict[str, bool]:
    """Each flag that this torch has."""
    found = {}
    for name in NAMES:
        with contextlib.suppress(AttributeError, RuntimeError):  # absent, or set in a newer form
            found[name] = bool(getattr(*_find(name)))
    return found


@contextlib.contextmanager
def flags_set(wanted: Mapping[str, bool]) -> Iterator[None]:
    """These flags as they were recorded; put back afterwards."""
    before = read_flags()
    changed = {
        name: value for name, value in wanted.items() if before.get(name, value) is not value
    }
    try:
        for name, value in changed.items():
            setattr(*_find(name), value)
        yield
    finally:
        for name in changed:
            setattr(*_find(name), before[name])


def _find(name: str) -> tuple[Any, str]:
    """What holds a flag, and its name there."""
    import torch

    *path, last = name.split(".")
    owner: Any = torch.backends
    for step in path:
        owner = getattr(owner, step)
    return owner, last
