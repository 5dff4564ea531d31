"""Gradients: a backward that fails is a failure of the call whose results it came from.

The call has returned by then. Its results' nodes report when a backward reaches them, and with
which gradients; torch's engine reports that a backward raised. The record makes the call again, and
then the backward.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tripwire.backends.registry import find_backend
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.dispatch.pipeline import Options
from tripwire.values.classes import isinstance
from tripwire.writes.patches import Patch, Patches

Gradients = list[torch.Tensor | None]  # of a call's results that have a node, in order
Failed = Callable[[BaseException, Gradients], None]


def differentiate(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    gradients: Gradients,
    backend: str | None,
) -> None:
    """Make a call, and the backward from its results.

    backend: compile it first; the first call makes the code, which the second runs.
    """
    if backend is not None:
        call = Dispatcher(call, "call", Options(find_backend(backend)))
        call(*args, **kwargs)
    tensors = _find_results(call(*args, **kwargs))
    known = [(t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None]
    torch.autograd.backward([t for t, _ in known], [g for _, g in known])


def _find_results(result: object) -> list[torch.Tensor]:
    leaves = tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


class Gone(Exception):
    """Something that a call was given has died since."""


def hold(value: Any, result: object) -> Callable[[], Any]:
    """What gives a value back later, or raises `Gone`: tensors are kept alive, objects aren't.

    Nodes of autograd will hold it, where no collector finds circles: an object may lead to the
    call's own result, as may a tensor that the call changed in place.
    """
    nodes = [tensor.grad_fn for tensor in _find_results(result)]

    def hold_one(value: Any) -> Callable[[], Any]:
        cls = type(value)
        if cls is list or cls is tuple:
            parts = [hold_one(part) for part in value]
            return lambda: cls(part() for part in parts)
        if cls is dict:
            items = [(key, hold_one(part)) for key, part in value.items()]
            return lambda: {key: part() for key, part in items}
        is_own = isinstance(value, torch.Tensor) and any(value.grad_fn is node for node in nodes)
        if cls in _PLAIN or (isinstance(value, torch.Tensor) and not is_own):
            return lambda: value
        if cls is MethodType:
            return _find_alive(weakref.WeakMethod(value))
        return _find_alive(weakref.ref(value))

    return hold_one(value)


_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def _find_alive(ref: Callable[[], Any]) -> Callable[[], Any]:
    def find() -> Any:
        value = ref()
        if value is None:
            raise Gone
        return value

    return find


class _Watched:
    """A call whose results have gradients to come. Their nodes hold it."""

    def __init__(self, count: int, failed: Failed) -> None:
        self.gradients: Gradients = [None] * count
        self.failed = failed

    def watch(self, tensor: torch.Tensor, at: int) -> None:
        number = tensor.output_nr

        def begin(grads: tuple[torch.Tensor | None, ...]) -> None:
            self.gradients[at] = grads[number]
            if _begun.latest is not None:
                _begun.latest.append(self)
            elif _running:  # in a thread of the engine's: the latest backward that began is likely
                _running[-1].append(self)

        assert tensor.grad_fn is not None
        tensor.grad_fn.register_prehook(begin)


class _Begun(threading.local):
    latest: list[_Watched] | None = None  # the calls that this thread's backward came to


_begun = _Begun()
_running: list[list[_Watched]] = []


def watch_backward(result: object, given: object, failed: Failed) -> None:
    """Have `failed` told of a backward that comes to these results of a call, and raises there.

    given: what the call was given. A backward that has come so far has left the call.
    """
    tensors = _find_results(result)
    if not tensors:
        return
    watched = _Watched(len(tensors), failed)
    nodes = [tensor.grad_fn for tensor in tensors]
    for tensor in _find_results(given):
        assert tensor.grad_fn is not None
        if not any(tensor.grad_fn is node for node in nodes):
            tensor.grad_fn.register_prehook(_leave(weakref.ref(watched)))
    _PATCHES.enter(id(watched))
    weakref.finalize(watched, _let_go, id(watched)).atexit = False
    for at, tensor in enumerate(tensors):
        watched.watch(tensor, at)
    while _dead:
        _PATCHES.leave(_dead.popleft())


def _leave(find: Callable[[], _Watched | None]) -> Callable[..., None]:
    def leave(grads: object) -> None:
        watched = find()
        for begun in _running:
            if watched in begun:
                begun.remove(watched)

    return leave


_dead: deque[int] = deque()


def _let_go(user: int) -> None:
    """May come at any time, also while the patches are being put in place."""
    if not _PATCHES.try_leave(user):
        _dead.append(user)


def _wrap_engine(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        begun: list[_Watched] = []
        before, _begun.latest = _begun.latest, begun
        _running.append(begun)
        try:
            return run(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if begun:  # the latest is where the engine was
                begun[-1].failed(error, begun[-1].gradients)
            raise
        finally:
            _begun.latest = before
            _running[:] = [one for one in _running if one is not begun]

    return run_backward


_PATCHES = Patches(lambda: (Patch(torch.autograd.graph, "_engine_run_backward", _wrap_engine),))
