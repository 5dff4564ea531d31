"""Writes: what a recorded call changes in place, and what it would be out of place."""

from __future__ import annotations

from typing import Any

import torch

from tripwire.reading.tensors import iter_given, storage_of, version_of
from tripwire.rulebook.refusals import Refused
from tripwire.rulebook.rules import RESULT_IS_CAST, Call, find_out_of_place
from tripwire.tracing.state import TracingState
from tripwire.values.classes import isinstance


def note_writes(state: TracingState, written: Any) -> None:
    """A recorded call wrote to these tensors."""
    for tensor in iter_given(written):
        state.note_write(tensor)


def note_changes(
    state: TracingState, rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Arguments whose version moved were changed by this very call: before it they were checked."""
    given = iter_given((args, kwargs)) if rule.writes or kwargs else args
    for tensor in given:
        if isinstance(tensor, torch.Tensor):
            known = state.values.find(tensor)
            if known is None:
                continue
            if known.version is None and rule.opaque:  # nothing would tell
                state.note_write(tensor)
            if known.version != version_of(tensor):
                if state.force_outplace and not rule.writes:
                    raise Refused(
                        "no-outplace-form", f"force_outplace: `{rule.name}` changes its argument."
                    )
                if not state.force_outplace:
                    state.note_write(tensor)
                known.version, known.seen_at = version_of(tensor), state.calls


CAST = Call("call_method", "to", "to")


def dtype_of_result(
    rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.dtype | None:
    """The dtype to cast to, where the out-of-place form would compute another."""
    written, *others = iter_given((args, kwargs))
    promoted = any(torch.result_type(written, other) != written.dtype for other in others)
    return written.dtype if promoted or rule.name in RESULT_IS_CAST else None


def out_of_place(
    state: TracingState, rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call:
    """The out-of-place form of a call. Raises Refused where it would mean something else."""
    plain = find_out_of_place(rule) if args and "out" not in kwargs else None
    if plain is None:
        raise Refused(
            "no-outplace-form",
            f"force_outplace: `{rule.name}` has no out-of-place form.",
        )
    written = next(iter_given((args, kwargs)))
    for other, known in state.values.live():
        if other is not written and other.layout is torch.strided:
            if storage_of(other) == storage_of(written):
                name = known.node.name if known.node else next(iter(known.sources))
                raise Refused(
                    "outplace-alias",
                    f"force_outplace: `{rule.name}` writes to memory that another live tensor "
                    f"({name}) shares; out of place that tensor would keep its value.",
                )
    return plain
