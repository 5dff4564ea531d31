"""What was said to torch.compile holds for tripwire's code as well: stances, resets, a back end.

Dynamo is asked only where somebody imported it. Before that, nothing can have been said to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tripwire.values.classes import isinstance

# A hit looks here for Dynamo, which may be imported at any time: 25 ns where it isn't.
MODULES = sys.modules
EVAL_FRAME = "torch._dynamo.eval_frame"


def find_stance() -> Any:
    """What torch.compiler.set_stance set, as Dynamo has it: `stance` and `backend`; or None."""
    return getattr(MODULES.get(EVAL_FRAME), "_stance", None)  # a thread may be importing it


def find_default_backend() -> str | Callable[..., Any]:
    """What torch.compiler.set_default_backend set; Inductor without it."""
    registry = MODULES.get("torch._dynamo.backends.registry")
    find = getattr(registry, "get_default_backend", None)  # torch 2.13 has it
    return "inductor" if find is None else find()


def tell_of_reset(listener: Callable[[], None]) -> None:
    """Have a listener called when torch.compiler.reset, or torch._dynamo.reset, is called next.

    Dynamo resets the code objects that it has seen, which it holds as weak references: it calls
    each, and leaves alone what is None. The list is cleared by each reset.
    """
    frames = MODULES.get("torch._dynamo.convert_frame")
    seen = getattr(getattr(frames, "input_codes", None), "seen", None)
    if isinstance(seen, list) and listener not in seen:
        seen.append(listener)


# --- torch.compile's own code, watched ---


@dataclass(frozen=True, slots=True)
class DynamoCompile:
    """One compile of Dynamo's."""

    number: str  # such as 3/1: the second compile of its fourth frame
    reason: str  # why what was compiled before didn't fit; empty for the first of a frame


def find_plain(compiled: Any) -> Callable[..., Any] | None:
    """What torch.compile compiled; None where it compiled nothing."""
    if getattr(compiled, "_compiled_call_impl", None) is not None:
        return compiled._call_impl  # type: ignore[no-any-return]  # nn.Module.compile
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):  # of a module, of a function
        plain: Callable[..., Any] | None = getattr(compiled, name, None)
        if plain is not None:
            return plain
    return None


class DynamoCompiles:
    """What Dynamo compiles inside the `with`, in this process."""

    def __enter__(self) -> list[DynamoCompile]:
        from torch._dynamo.utils import get_compilation_metrics

        self._list = get_compilation_metrics
        self._before = {id(found): found for found in get_compilation_metrics()}
        self._new: list[DynamoCompile] = []
        return self._new

    def __exit__(self, *_: object) -> None:
        self._new += [
            DynamoCompile(str(found.compile_id), found.recompile_reason or "")
            for found in self._list()
            if id(found) not in self._before and not found.is_runtime
        ]
