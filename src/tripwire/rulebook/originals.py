"""Originals: torch's functions as they were before somebody put others under their names.

torch tells a mode which function was called by looking up its name. Where a user's function stands
in for `F.relu` and calls the old one, the old one hands a mode the new one, which would then run a
second time. And a graph that spells a function by its name would reach whatever is there now.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodWrapperType
from typing import Any

import torch

from tripwire.env import is_own_file
from tripwire.rulebook.rules import Call, Target
from tripwire.values.classes import isinstance

_SPACES: tuple[Any, ...] = (torch.Tensor, torch.nn.functional, torch.functional, torch)
_FIRST = [(space, dict(vars(space))) for space in _SPACES]  # as tripwire found them
_METHODS = _FIRST[0][1]


def find_original(func: Any) -> Any:
    """The function that was called, where a mode is told of what stands under its name."""
    if isinstance(func, FunctionType) and is_own_file(func.__code__.co_filename):
        return func
    accessor = func.__name__ if type(func) is MethodWrapperType else None  # property.__get__
    wanted = func if accessor is None else func.__self__
    for space, first in _FIRST:
        for name, value in tuple(vars(space).items()):
            if value is not wanted:
                continue
            plain = first.get(name)
            if plain is None and space is torch.Tensor:
                plain = getattr(torch._C.TensorBase, name, None)
            if plain is None:
                return func
            return plain if accessor is None else getattr(plain, accessor, func)
    return func


def spell_original(rule: Call, func: Any) -> Call:
    """The rule, but by the function itself where its name leads to another one now."""
    if not _is_replaced(rule, func):
        return rule
    return replace(rule, op="call_function", target=Target(func, rule.name), attribute=None)


def _is_replaced(rule: Call, func: Any) -> bool:
    target = rule.target
    if target is func:
        space = sys.modules.get(func.__module__ or "torch", torch)
        return getattr(space, func.__name__, func) is not func
    by_operator = isinstance(target, BuiltinFunctionType) and target.__module__ == "_operator"
    if rule.op == "call_method" or by_operator:
        return _is_other_method(rule.name)
    return rule.attribute is not None and _is_other_method(rule.attribute)


def _is_other_method(name: str) -> bool:
    return vars(torch.Tensor).get(name) is not _METHODS.get(name)
