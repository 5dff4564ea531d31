"""Settings: switches of the process that a record doesn't keep, told where they may matter.

A replay runs with the usual ones. A warning that was turned into an error isn't raised then, a
message that prints a tensor reads otherwise, and a variable of the environment isn't there.
"""

from __future__ import annotations

import decimal
import sys
from collections.abc import Callable, Iterator, Set
from typing import Any

from tripwire.recording.policy import Omission

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
