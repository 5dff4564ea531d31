"""Views whose base was changed without gradients: torch can't tell their past any more."""

from __future__ import annotations

import pytest
import torch

import tripwire


def write_both(a, b):
    a.add_(1)
    b.add_(1)


def write_one(a, b):
    a.mul_(2)
    return a * b


def write_none(a, b):
    return a + b


def ask(a, b):
    return a + b if a.requires_grad else a


def write_after_detaching(a, b):
    b = b.detach()
    a.add_(b)
    return a.sum() + b.sum()


VIEWS = {
    "split": lambda x: x.split(10),
    "chunk": lambda x: x.chunk(2),
    "unbind": lambda x: x.view(2, 10).unbind(),
    "slices": lambda x: (x[:10], x[10:]),
    "overlapping": lambda x: (x[:10], x[5:15]),
}


def _outcome(fn, views, changed):
    base = torch.arange(20.0, requires_grad=True)
    a, b = VIEWS[views](base)
    with torch.no_grad():
        if changed:
            a.add_(3)
        try:
            result = fn(a, b)
        except RuntimeError as error:  # torch adds no tensor to one that overlaps it
            return str(error), base.tolist()
        return None if result is None else result.tolist(), base.tolist()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("fn", [write_both, write_one, write_none, ask, write_after_detaching])
def test_views_of_a_changed_base_are_taken_as_plain_code_takes_them(fn, views, backend) -> None:
    compiled = tripwire.compile(fn, backend=backend)
    for changed in (False, False, True, True, False):
        assert _outcome(compiled, views, changed) == _outcome(fn, views, changed)
