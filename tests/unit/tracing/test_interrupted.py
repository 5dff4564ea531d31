"""An interrupt that hits tripwire while it leaves a run: what it left is left all the same (L7).

tests/laws/test_injected_faults.py finds such places; each that was found has a test here.
"""

from __future__ import annotations

import builtins
import gc
import linecache
import sys

import pytest
import torch
from torch import nn

import tripwire
from tripwire.tracing import hooks, observe, recorder
from tripwire.tracing.state import CURRENT

X = torch.ones(2)


def interrupt_once(monkeypatch, owner, name: str, *, after: int = 0) -> None:
    """Raise KeyboardInterrupt where a function begins, once."""
    space = {"plain": getattr(owner, name), "left": [None] * after}
    exec(compile(_INTERRUPTED, recorder.__file__, "exec"), space)  # as a part of tripwire
    monkeypatch.setattr(owner, name, space["interrupted"])


_INTERRUPTED = """
def interrupted(*args, **kwargs):
    if left is not None:
        if not left:
            globals()["left"] = None
            raise KeyboardInterrupt
        left.pop()
    return plain(*args, **kwargs)
"""


def check_left(fn=lambda x: x + 1, plain=lambda: X + 1) -> None:
    """Interrupt a call; nothing may be left while the exception lives, and the next call works."""
    before = builtins.getattr, nn.Module.__call__, len(gc.callbacks), gc.get_threshold()
    compiled = tripwire.compile(fn, backend="eager")
    with pytest.raises(KeyboardInterrupt):
        compiled(X)
    assert sys.getprofile() is None
    now = builtins.getattr, nn.Module.__call__, len(gc.callbacks), gc.get_threshold()
    assert now == before
    assert torch._C._len_torch_function_stack() == 0
    assert torch.is_grad_enabled()
    assert (CURRENT.state, CURRENT.tracing) == (None, False)
    for _ in range(3):
        assert torch.equal(compiled(X), plain())
    assert tripwire.statistics(compiled).hits


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (hooks.Patches, "leave", 0),
        (hooks.Patches, "leave", 1),
        (hooks.Patches, "_undo_all", 2),
        (hooks.Patches, "_undo_all", 3),
        (recorder.Recorder, "__exit__", 0),
        (observe.Observer, "__exit__", 0),
        (observe.Observer, "finish", 0),
    ],
)
def test_an_interrupt_while_a_run_is_left(monkeypatch, owner, name, after) -> None:
    interrupt_once(monkeypatch, owner, name, after=after)
    check_left()


def test_an_interrupt_while_the_run_leaves_no_grad(monkeypatch) -> None:
    def without_grad(x):
        with torch.no_grad():
            y = x + 1
        return y + 1

    interrupt_once(monkeypatch, recorder.Recorder, "_call", after=2)  # entering, adding, leaving
    check_left(without_grad, lambda: X + 2)


def test_an_exception_of_the_users_leaves_grad_mode_as_the_user_did() -> None:
    def raises(x):
        torch.set_grad_enabled(False)
        raise ValueError(x)

    try:
        with pytest.raises(ValueError):
            tripwire.compile(raises, backend="eager")(X)
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_generated_code_goes_with_its_graph() -> None:
    def shown() -> set[str]:
        return {name for name in linecache.cache if name.startswith("<eval_with_key>")}

    trace = tripwire.trace(lambda x: x + 1, X)
    before = shown()
    trace(X)
    assert len(shown() - before) == 1
    del trace
    gc.collect()
    assert shown() <= before
