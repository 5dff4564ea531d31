"""Flags: the switches of torch.backends that change what a call computes, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

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


def read_flags() -> dict[str, bool]:
    """Each flag that this torch has."""
    found = {}
    for name in USUAL:
        with contextlib.suppress(AttributeError, RuntimeError):  # absent, or set in a newer form
            found[name] = bool(getattr(*_find(name)))
    return found


def unusual_flags() -> dict[str, bool]:
    """Each that isn't as usual: a record has only these."""
    return {name: value for name, value in read_flags().items() if value is not USUAL[name]}


@contextlib.contextmanager
def flags_set(recorded: Mapping[str, bool]) -> Iterator[None]:
    """These flags as they were recorded, all others as usual; put back afterwards."""
    before = read_flags()
    wanted = {name: recorded.get(name, usual) for name, usual in USUAL.items()}
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
