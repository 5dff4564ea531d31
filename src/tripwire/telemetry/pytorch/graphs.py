"""Graphs: what a compiler puts around one: flat inputs, boxed calls, names in its user's globals.

A boxed function takes one list and empties it, so that inputs die as early as they can. A name put
into a module's globals goes when its owner dies. A name that is there already is never taken over,
and one that somebody has put something else under since is left to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tripwire.errors import TelemetryError


def make_boxed_func(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A boxed function for one that takes positional arguments."""

    def boxed(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return function(*taken)

    boxed._boxed_call = True  # type: ignore[attr-defined]  # torch's mark, too
    return boxed


def call_boxed(function: Callable[..., Any], args: list[Any]) -> Any:
    """Call with a list that is empty afterwards, whether the function is boxed or not."""
    if getattr(function, "_boxed_call", False):
        result = function(args)
        args.clear()
        return result
    return make_boxed_func(function)(args)


def flatten_graph_inputs(
    graph: Callable[..., Any],
    inputs: Sequence[Any],
    compile_graph: Callable[[Callable[..., Any], list[Any]], Callable[..., Any]],
    *,
    steal: Sequence[int] = (),
) -> Callable[..., Any]:
    """Compile a graph that takes nested inputs as one that takes flat ones.

    `compile_graph` gets a callable on flat inputs and the flat inputs. The result takes nested
    inputs of the same structure; another structure is a ValueError. Inputs at the positions
    `steal` are lists that are emptied when the call begins.
    """
    from torch.utils import _pytree as pytree

    flat, spec = pytree.tree_flatten(tuple(inputs))

    def flat_graph(*leaves: Any) -> Any:
        return graph(*pytree.tree_unflatten(list(leaves), spec))

    compiled = compile_graph(flat_graph, flat)

    def call(*args: Any) -> Any:
        leaves, found = pytree.tree_flatten(args)
        if found != spec:
            raise ValueError(f"inputs are {found}, and were {spec} when the graph was compiled")
        for position in steal:
            args[position].clear()
        del args
        return call_boxed(compiled, leaves)

    return call


class CleanupHook:
    """Takes one name out of a scope, once."""

    __slots__ = ("_value", "name", "scope")

    def __init__(self, scope: dict[str, object], name: str, value: object) -> None:
        self.scope = scope
        self.name = name
        self._value: list[object] = [value]

    @staticmethod
    def create(scope: dict[str, object], name: str, value: object) -> CleanupHook:
        """Put a value into a scope under a new name."""
        if name in scope:
            raise TelemetryError(
                f"{name!r} exists in {scope.get('__name__', 'that scope')!r} already, and "
                "tripwire never overwrites it.",
                slug="global-name-taken",
            )
        scope[name] = value
        CleanupManager.count += 1
        return CleanupHook(scope, name, value)

    def __call__(self, *_: object) -> None:
        if self._value:
            value = self._value.pop()
            CleanupManager.count -= 1
            if self.scope.get(self.name, _NOTHING) is value:
                del self.scope[self.name]


class CleanupManager:
    """Calls the hooks of an object when it dies."""

    count: ClassVar[int] = 0  # names that are in some scope now
    instance: ClassVar[CleanupManager]

    def add(self, owner: object, hook: CleanupHook) -> None:
        """The hook's name goes with `owner`."""
        weakref.finalize(owner, hook).atexit = False


CleanupManager.instance = CleanupManager()

_NOTHING = object()
