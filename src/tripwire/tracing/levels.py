"""Levels: transforms of torch.func (vmap, grad, jvp, ...), as calls of the graph.

A transform opens a level, wraps tensors for it, calls the function, unwraps what that returned and
closes the level. It does so by functions that no torch-function mode sees. While a run is observed
they are patched, and each becomes a node, so that the graph says what the function's torch calls
mean. Other calls are recorded as ever: a wrapped tensor is a tensor.

A wrapped tensor has no meaning outside of its level. So nodes from the opening of a level to the
last use of what was wrapped become one call before anybody looks at the graph (outlines.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch import eager_transforms, predispatch
from torch._functorch.autograd_function import CustomFunctionHigherOrderOperator

from tripwire.rulebook.refusals import Refusal, Refused
from tripwire.rulebook.rules import Call, Target
from tripwire.tracing.fxnodes import build_arguments, record
from tripwire.tracing.graphs import Level
from tripwire.tracing.state import CURRENT, TracingState
from tripwire.values.identity import is_library_class
from tripwire.values.numbers import close_values
from tripwire.writes.patches import Patch

_C: Any = torch._C


def _wrap(call: Callable[..., Any], *, acts: bool) -> Callable[[Callable[..., Any]], object]:
    """Record a call of torch's that no mode sees. acts: it is made for what it does to levels."""
    rule = Call("call_function", Level(call, call.__name__), call.__name__.strip("_"))

    def wrap(plain: Callable[..., Any]) -> object:
        @functools.wraps(plain)
        def observed(*args: Any, **kwargs: Any) -> Any:
            state = CURRENT.state
            if state is None or state.refusal is not None:
                return plain(*args, **kwargs)
            return _observe(state, rule, plain, args, kwargs, acts=acts)

        return observed

    return wrap


def _observe(
    state: TracingState,
    rule: Call,
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    acts: bool,
) -> Any:
    where, shadow = state.capture_range(2), state.shadow
    given = args, kwargs
    with state.unrecorded():
        nodes = None
        state.has_levels = True
        try:
            nodes = build_arguments(state, rule, args, kwargs, lambda: where)
            varies = shadow is not None and shadow.has_open(given)
            args, kwargs = close_values(given)
        except Refused as refused:
            state.refuse(Refusal(refused.slug, refused.reason, where))
            args, kwargs = close_values(given)
        value = plain(*args, **kwargs)
        if nodes is None:
            return value
        try:
            seen = None if acts else value
            record(state, rule, nodes, args, kwargs, seen, where, varies=varies)
            if shadow is not None and varies and not acts:
                shadow.follow(rule, rule.target, *given, value)
        except Refused as refused:
            state.refuse(Refusal(refused.slug, refused.reason, where))
        return value


def _wrap_custom(plain: Callable[..., Any]) -> object:
    """`Function.apply` inside a transform. One of torch's own is a call; others are refused."""

    @functools.wraps(plain)
    def observed(self: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        state = CURRENT.state
        if state is None or state.refusal is not None or not is_library_class(cls):
            return plain(self, cls, *args, **kwargs)
        rule = Call("call_function", Target(cls.apply, f"{cls.__name__}_apply"), cls.__name__)
        call = functools.partial(plain, self, cls)
        return _observe(state, rule, call, args, kwargs, acts=False)

    return observed


def _add_batch_dim(tensor: torch.Tensor, dim: int, level: int) -> torch.Tensor:
    made: torch.Tensor = _functorch._add_batch_dim(
        tensor, tensor.dim() + dim if dim < 0 else dim, level
    )
    return made


OPENING: tuple[Callable[..., Any], ...] = (
    _functorch._vmap_increment_nesting,
    _functorch._jvp_increment_nesting,
    _functorch._grad_increment_nesting,
    _C._enter_dual_level,
)
CLOSING: tuple[Callable[..., Any], ...] = (
    _functorch._vmap_decrement_nesting,
    _functorch._jvp_decrement_nesting,
    _functorch._grad_decrement_nesting,
    _C._exit_dual_level,
)
_SETTING: tuple[Callable[..., Any], ...] = (
    _functorch.set_inplace_requires_grad_allowed,
    _C._set_fwd_grad_enabled,
)
_CONVERTING: tuple[Callable[..., Any], ...] = (
    _add_batch_dim,
    _functorch._remove_batch_dim,
    _functorch._wrap_for_grad,
    _functorch._unwrap_for_grad,
)


def _list_patches() -> list[Patch]:
    """Each where transforms find it."""
    found = []
    for call in (*OPENING, *CLOSING, *_SETTING, *_CONVERTING):
        name = call.__name__
        home = next(one for one in (predispatch, eager_transforms, _C) if name in vars(one))
        found.append(Patch(home, name, _wrap(call, acts=call not in _CONVERTING)))
    return [*found, Patch(CustomFunctionHigherOrderOperator, "__call__", _wrap_custom)]


PATCHES = tuple(_list_patches())
