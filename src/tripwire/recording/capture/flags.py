"""Flags: the switches of a process that change what a call computes.

Those of torch.backends are kept, by name. Others are told where they may matter: a replay runs with
the usual ones.
"""

from __future__ import annotations

import contextlib
import decimal
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, TypeVar

from tripwire.recording.format.manifest import Omission

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


# --- switches that are told ---


_ENVIRONMENT = ("environ", "environb", "getenv")
_USUAL_LIMIT = 1000
_USUAL_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


def find_settings(raised: str, names: Set[str]) -> Iterator[Omission]:
    """Settings that may show in a call: by the error that it raised, and the names in its code."""
    for what, is_unusual in _SETTINGS.items():
        if is_unusual(raised):
            yield Omission(what, "it isn't as usual here, and a record doesn't keep it")
    if not names.isdisjoint(_ENVIRONMENT):
        yield Omission("os.environ", "a record doesn't keep the environment's variables")


def _warns_loudly(raised: str) -> bool:
    return raised.endswith("Warning")


def _limits_recursion(raised: str) -> bool:
    return raised == "RecursionError" and sys.getrecursionlimit() != _USUAL_LIMIT


def _computes_otherwise(raised: str) -> bool:
    now, usual = decimal.getcontext(), decimal.DefaultContext
    return (now.prec, now.rounding, now.traps) != (usual.prec, usual.rounding, usual.traps)


def _numpy_raises(raised: str) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and bool(numpy.geterr() != _USUAL_ERRORS)


def _prints_otherwise(raised: str) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    now = torch._tensor_str.PRINT_OPTS
    return bool(vars(now) != vars(type(now)()))


_SETTINGS: dict[str, Callable[[str], bool]] = {
    "warnings.filters": _warns_loudly,
    "sys.setrecursionlimit": _limits_recursion,
    "decimal.getcontext()": _computes_otherwise,
    "numpy.seterr": _numpy_raises,
    "torch.set_printoptions": _prints_otherwise,
}
