"""Attention: which kernels `with sdpa_kernel(...)` allows, as a pair of nodes.

A graph allows them where the run did, and then allows again what was allowed before, whatever that
is in its own call. A compiler runs both while it looks at the graph, so that it chooses as torch
would.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType, FrameType

from torch import fx
from torch.nn import attention
from torch.nn.attention import SDPBackend

_GENERATOR: CodeType = attention.sdpa_kernel.__wrapped__.__code__  # type: ignore[attr-defined]


class Allowed:
    """What was allowed before a block of `sdpa_kernel`; in their order, where the block sets it."""

    def __init__(self, set_order: bool) -> None:
        self._before = attention._cur_sdpa_kernel_backends(with_priority=set_order)
        self._set_order = set_order

    def restore(self) -> None:
        """Allow it again."""
        attention._sdpa_kernel(self._before, self._set_order)


@fx.node.has_side_effect
def _enter_attention(kernels: Sequence[int], set_order: bool) -> Allowed:
    allowed = Allowed(set_order)
    attention._sdpa_kernel([SDPBackend(kernel) for kernel in kernels], set_order)
    return allowed


@fx.node.has_side_effect
def _exit_attention(allowed: Allowed) -> None:
    allowed.restore()


ENTER, EXIT = _enter_attention, _exit_attention  # fx's code calls them by their names


def find_block(kernels: object) -> tuple[FrameType | None, bool]:
    """The frame of the `sdpa_kernel` that allows these right now, and whether its block ends."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _GENERATOR:
        frame = frame.f_back
    return frame, frame is not None and kernels is frame.f_locals["previous_backends"]
